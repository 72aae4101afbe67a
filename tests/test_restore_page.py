"""The page of the restore fence: what was found, who may release, and what every page says meanwhile."""

from __future__ import annotations

import html
import io
import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client

from console import access
from console.models import Tenant
from reconciliation import anchor, fence, restore, watch
from reconciliation.models import Limit, RestoreFence
from tests import cast, database
from tests.backups import Backup


@pytest.fixture
def people(ledger_db: Any, till: Any) -> dict[str, User]:
    """The cast, and an admin of both tenants."""
    made = cast.people()
    made["ad_fay"] = User.objects.create_user("ad_fay", password=cast.PASSWORD)
    for tenant in Tenant.objects.all():
        access.set_role(user=made["ad_fay"], tenant=tenant, role="admin", by=cast.SETTER)
    return made


@pytest.fixture
def fay(people: dict[str, User]) -> Client:
    return cast.client(people["ad_fay"])


@pytest.fixture
def ann(people: dict[str, User]) -> Client:
    return cast.client(people["op_ann"])


@pytest.fixture
def behind(people: dict[str, User], superuser_connection: Any) -> Iterator[Any]:
    """A backup was brought back: two cases are in it, one decision is not."""
    waiting = cast.operation(order="1002")
    cast.operation(order="1003", state="succeeded", sent=60)
    fence.forward()
    backup = Backup(superuser_connection)
    cast.operation(order="1004")
    fence.forward()
    backup.bring_back()
    yield waiting
    backup.drop()


def text(response: Any) -> str:
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.content.decode())))


def act(browser: Client, deed: str = "release", **given: Any) -> Any:
    facts = {"deed": deed, "version": RestoreFence.objects.get().version, "reason": "compared", "token": uuid.uuid4()}
    return browser.post("/restore/act", {**facts, **given}, follow=True)


def mark_all() -> None:
    while restore.mark():
        pass


def test_the_first_page_after_a_restore_says_so_and_so_does_every_other(behind: Any, ann: Client) -> None:
    for page in ("/", "/runs", "/approvals", "/schedules", "/audit", "/health", "/limits", "/restore",
                 f"/operations/{behind.pk}", "/stops", "/nowhere"):  # fmt: skip
        told = text(ann.get(page))
        assert "Nothing is sent: this ledger was restored and has forgotten what was done" in told, page


def test_the_signal_of_it_says_why_in_words(behind: Any, ann: Client) -> None:
    ann.get("/")
    watch.look()
    told = text(ann.get("/health"))
    assert re.search(
        r"this ledger was restored and has forgotten what was done after its backup, \d+ unknown by it", told
    )
    assert "fence:" not in told
    assert "behind," not in told


def test_the_page_says_what_was_found_and_how_far_behind_it_is(behind: Any, ann: Client) -> None:
    ann.get("/")
    told = text(ann.get("/restore"))
    assert "The anchor outside the database knows decisions that this ledger does not have" in told
    assert re.search(r"Decisions that are missing here 1 or more", told)
    assert "being marked as unknown" in told
    assert "let everything be sent again" not in told
    mark_all()
    page = ann.get("/restore").content.decode()
    assert "1 operation may have gone on" in page
    assert 'href="/?tab=all&amp;state=ambiguous&amp;cause=restored"' in page
    assert "1002" in text(ann.get("/?tab=all&state=ambiguous&cause=restored"))
    assert "1003" not in text(ann.get("/?tab=all&state=ambiguous&cause=restored"))


def test_what_the_ledger_has_forgotten_is_not_shown_as_sent(behind: Any, ann: Client) -> None:
    ann.get("/")
    mark_all()
    told = text(ann.get(f"/operations/{behind.pk}"))
    assert "No send is on record; it may have been sent in the time that this ledger has lost." in told
    assert "May have been sent. The money may have moved." in told
    held = text(ann.get("/limits"))
    assert "by the restore fence: this ledger was restored and has forgotten what was done after its backup." in held


def test_an_operator_sees_why_not_and_an_admin_releases(behind: Any, ann: Client, fay: Client) -> None:
    ann.get("/")
    mark_all()
    assert "Releasing needs the role admin in every tenant" in text(ann.get("/restore"))
    refused = act(ann)
    assert (refused.status_code, "needs “release” in every tenant" in text(refused)) == (403, True)
    assert RestoreFence.objects.get().is_down
    assert "let everything be sent again" in text(fay.get("/restore"))
    done = text(act(fay))
    assert "Released. What is still unknown goes on being looked up" in done
    assert "the anchor knows this ledger" in done
    assert re.search(r"Last released or adopted .* by ad_fay ?: compared", done)
    assert "Until" in done
    assert "Nothing is sent" not in text(ann.get("/"))


def test_an_admin_of_one_tenant_of_two_may_not(behind: Any, people: dict[str, User]) -> None:
    access.set_role(user=people["ad_fay"], tenant=Tenant.objects.get(slug="t_beta"), role="viewer", by=cast.SETTER)
    browser = cast.client(people["ad_fay"])
    browser.get("/")
    mark_all()
    assert act(browser).status_code == 403


def test_a_release_needs_a_reason_a_token_and_the_version_that_was_drawn(behind: Any, fay: Client) -> None:
    fay.get("/")
    assert "still being marked" in text(act(fay))
    mark_all()
    assert act(fay, reason=" ").status_code == 422
    assert act(fay, token="").status_code == 400
    assert act(fay, deed="open").status_code == 400
    assert act(fay, version=9).status_code == 409
    assert RestoreFence.objects.get().is_down
    token = uuid.uuid4()
    version = RestoreFence.objects.get().version
    first, second = act(fay, token=token, version=version), act(fay, token=token, version=version)
    assert text(first).count("Released.") == text(second).count("Released.") == 1
    assert act(fay, version=version).status_code == 409


def test_limits_show_the_fence_and_do_not_lift_it(behind: Any, ann: Client) -> None:
    ann.get("/")
    page = ann.get("/limits").content.decode()
    limit = Limit.objects.get()
    assert "It ends with the release of the restored ledger" in page
    assert f"/limits/{limit.pk}/lift" not in page
    lifted = ann.post(f"/limits/{limit.pk}/lift", {"version": 1, "reason": "go", "token": uuid.uuid4()})
    assert lifted.status_code in (403, 422)
    assert Limit.objects.get().lifted_at is None


def test_an_unanchored_ledger_is_adopted_or_treated_as_restored(people: dict[str, User], fay: Client, ann: Client,
                                                                superuser_connection: Any) -> None:  # fmt: skip
    cast.operation()
    superuser_connection.execute("DELETE FROM reconciliation_restorefence")
    database.weigh_anchor()
    fence.forget()
    assert "nobody has said yet that this ledger is complete" in text(ann.get("/"))
    assert "Saying so needs the role admin" in text(ann.get("/restore"))
    assert act(ann, "adopt").status_code == 403
    assert "Treat it as restored" in text(fay.get("/restore"))
    assert "Adopted." in text(act(fay, "adopt"))
    assert not RestoreFence.objects.get().is_down


def test_an_anchor_that_cannot_be_read_is_said_on_every_page(people: dict[str, User], ann: Client) -> None:
    anchor.current().path.write_text("{")  # type: ignore[attr-defined]
    fence.forget()
    assert re.search(r"Nothing is sent: The anchor .* cannot be read", text(ann.get("/")))
    assert not RestoreFence.objects.get().is_down


def test_a_stranger_sees_nothing(client: Client) -> None:
    assert client.get("/restore").status_code == 302
    assert client.post("/restore/act").status_code == 302


# The command


def status(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with pytest.raises(SystemExit) as ended:
        call_command("restore_status", *arguments, stdout=out, stderr=err)
    return int(str(ended.value.code)), out.getvalue(), err.getvalue()


def test_the_command_says_that_all_is_well(people: dict[str, User]) -> None:
    assert status() == (0, "The anchor knows this ledger; the fence is up.\n", "")


def test_the_command_finds_a_restore_by_itself_and_tells_machines(behind: Any) -> None:
    code, out, _ = status("--json")
    told = json.loads(out)
    assert (code, told["state"], told["reason"], told["entries_lost"]) == (1, "down", "behind", 1)
    mark_all()
    code, out, _ = status()
    assert (code, "1 operations became unknown by it, 1 are so still" in out) == (1, True)


def test_the_command_cannot_tell_without_the_anchor(people: dict[str, User]) -> None:
    anchor.current().path.write_text("{")  # type: ignore[attr-defined]
    fence.forget()
    code, _, err = status()
    assert (code, "cannot be read" in err) == (2, True)


def test_the_command_adopts_what_has_no_anchor_and_not_what_is_behind(behind: Any) -> None:
    code, _, err = status("--adopt", "--reason", "I know")
    assert (code, "the anchor shows that this ledger lost something" in err.lower()) == (1, True)
    database.weigh_anchor()


def test_a_planned_move_is_adopted_before_anybody_looks(people: dict[str, User]) -> None:
    cast.operation()
    known = anchor.current().read()
    assert known is not None
    anchor.current().write(anchor.Known(**{**vars(known), "system": "7777"}))
    fence.forget()
    assert status("--adopt")[0] == 1  # a reason is needed
    code, out, _ = status("--adopt", "--reason", "upgraded PostgreSQL")
    assert (code, "the fence is up" in out) == (0, True)
    fence.forget()
    assert status()[0] == 0
