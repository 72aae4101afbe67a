"""The outbox's page, and where else people learn that a message waits for them."""

from __future__ import annotations

import html
import re
import uuid
from typing import Any

import pytest

from reconciliation import outbox, publishing, sweeping, watch
from reconciliation.models import Message, Operation
from reconciliation.providers.base import OutcomeUnknown
from tests import cast
from tests.book import DESK
from tests.database import Clock
from tests.scripted import Clerk
from tests.test_outbox import clock_on, put, wish


@pytest.fixture
def people(ledger_db: Any, clerk: Clerk) -> dict[str, Any]:
    return cast.people()


@pytest.fixture
def ann(people: dict[str, Any]) -> Any:
    return cast.client(people["op_ann"])


def text(response: Any) -> str:
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.content.decode())))


def mine(number: int = 1, **parts: Any) -> Any:
    return wish(number, tenant="t_acme", **parts)


@pytest.fixture
def bad(people: dict[str, Any], clock: Clock) -> Message:
    """One that cannot be published, and one behind it."""
    pk = put(mine(1, provider="nowhere"), order="order-1002")
    put(mine(2), order="order-1002")
    clock_on(clock)
    return Message.objects.get(pk=pk)


def press(browser: Any, message: Message, verb: str, **given: Any) -> Any:
    facts = {"version": message.version, "reason": "looked into it", "token": uuid.uuid4(), **given}
    return browser.post(f"/outbox/{message.pk}/{verb}", facts, follow=True)


def test_an_empty_outbox_says_so(ann: Any) -> None:
    page = text(ann.get("/outbox"))
    assert "No message is stuck" in page
    assert "Nothing waits." in page
    assert "Nothing was published lately." in page


def test_the_page_says_what_is_stuck_and_why_what_waits_and_what_became_of_the_others(
    ann: Any, bad: Message, clerk: Clerk
) -> None:
    put(mine(3))
    sweeping.sweep()
    page = text(ann.get("/outbox"))
    assert "nowhere · keyed for order-1002" in page
    assert "This deployment has no handler for it: no provider 'nowhere' is configured here" in page
    assert "What goes after it in “order-1002” waits." in page
    assert re.search(r"clerk · keyed order-1002 .* order-1002 none yet", page)
    assert f"operation {Operation.objects.get().pk}" in page
    assert "4200" not in page, "what is asked for lies sealed"


def test_a_person_has_it_tried_again_or_discards_it(ann: Any, bad: Message, clock: Clock) -> None:
    assert "It is tried again now." in text(press(ann, bad, "release"))
    clock_on(clock)
    again = Message.objects.get(pk=bad.pk)
    assert (again.state, again.version) == ("stuck", 3)
    assert "Discarded." in text(press(ann, again, "discard"))
    assert "discarded by a person" in text(ann.get("/outbox"))


def test_a_page_that_is_out_of_date_changes_nothing_and_keeps_what_was_typed(ann: Any, bad: Message) -> None:
    press(ann, bad, "discard")
    late = press(ann, bad, "release", reason="the provider is there now")
    assert late.status_code == 409
    assert "the provider is there now" in text(late)


def test_who_may_only_look_is_told_so_and_refused(people: dict[str, Any], bad: Message) -> None:
    eve = cast.client(people["vi_eve"])
    assert "need the role operator or admin" in text(eve.get("/outbox"))
    assert press(eve, bad, "discard").status_code == 403
    assert Message.objects.get(pk=bad.pk).state == "stuck"


def test_without_a_reason_nothing_is_done(ann: Any, bad: Message) -> None:
    assert press(ann, bad, "discard", reason=" ").status_code == 422


def test_other_tenants_messages_are_not_there(ann: Any, bad: Message, clock: Clock) -> None:
    theirs = put(wish(9, tenant="t_globex", provider="nowhere"))
    clock_on(clock)
    assert f"message {theirs}" not in text(ann.get("/outbox"))
    assert press(ann, Message.objects.get(pk=theirs), "discard").status_code == 404


def test_a_page_does_not_read_the_backlog_of_other_tenants(people: dict[str, Any], superuser_connection: Any) -> None:
    columns = {
        "workflow_type": "'w'", "step": "'s'", "business_object": "'\"o\"'", "intent_version": "1", "ordering": "''",
        "provider": "'p'", "action": "'a'", "fingerprint": "'f'", "request_sealed": "'x'", "terms": "'{}'",
        "requested_by": "''", "on_behalf_of": "''", "intended_at": "now()", "tries": "0", "detail": "''",
        "created_at": "now()", "changed_at": "now()", "version": "0", "workflow_id": "i", "problem": "'too_old'",
        "tenant": "CASE WHEN i < 10 THEN 't_acme' ELSE 't_beta' END", "lineage": "sha256(i::text::bytea)",
        "state": "CASE i % 2 WHEN 0 THEN 'stuck' ELSE 'waiting' END", "due_at": "CASE i % 2 WHEN 1 THEN now() END",
    }  # fmt: skip
    superuser_connection.execute(
        f"INSERT INTO reconciliation_message ({', '.join(columns)}) SELECT {', '.join(columns.values())}"
        " FROM generate_series(1, 20000) AS i"
    )
    superuser_connection.execute("ANALYZE reconciliation_message")
    own = Message.objects.filter(tenant__in=["t_acme"])
    for rows in (own.filter(state="waiting").order_by("due_at", "id"), own.filter(state="stuck")):
        assert "message_open_tenant" in rows[:50].explain()


def test_the_queue_says_that_a_message_needs_a_decision_and_counts_it(ann: Any, bad: Message) -> None:
    page = text(ann.get("/"))
    assert "1 message of the outbox cannot be published." in page
    assert "Needs a decision 1" in page
    assert "Nothing needs a decision" not in page
    assert "cannot be published" not in text(ann.get("/?tab=all"))


def test_the_health_page_says_how_much_waits_and_for_how_long(ann: Any, bad: Message, clock: Clock) -> None:
    watch.look()
    page = text(ann.get("/health"))
    assert re.search(r"Outbox ▲ look here Waiting 1, the oldest for \d min Late 0 With a person 1", page)
    assert "Some messages cannot be published as they are and wait for a person." in page
    assert f"A message of the outbox cannot be published message:{bad.pk}" in page
    assert f'href="/outbox#message-{bad.pk}"' in ann.get("/health").content.decode()


def test_an_outbox_that_nobody_publishes_is_said_to_lose_nothing(ann: Any, clock: Clock) -> None:
    put(mine())
    assert "Messages are not being published" not in text(ann.get("/health"))
    clock.advance(minutes=5)
    assert "nothing is lost, they wait in the outbox" in text(ann.get("/health"))
    publishing.publish(limit=5)
    assert "Outbox ✓ as it should be Waiting 0 Late 0" in text(ann.get("/health"))


def test_what_waits_in_its_order_is_no_fault(ann: Any, clerk: Clerk, clock: Clock) -> None:
    clerk.answers(OutcomeUnknown("lost"))
    put(mine(1, action="none"), order="a"), put(mine(2), order="a")
    sweeping.sweep()
    clock.advance(minutes=5)
    assert "Outbox ✓ as it should be Waiting 1" in text(ann.get("/health"))


def test_the_case_of_a_message_s_operation_reads_like_any_other(ann: Any, clerk: Clerk) -> None:
    put(mine())
    publishing.publish(limit=5)
    page = text(ann.get(f"/operations/{Operation.objects.get().pk}"))
    assert "Recorded; nothing was ever sent." in page
    assert "recorded, and due at once" in page
    assert f"Requested by {DESK.id}" in page
    assert outbox.ALIAS == "default"
