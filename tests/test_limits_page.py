"""The pages of stop switches and limits: set, seen everywhere, released, and refused where the role does not reach."""

from __future__ import annotations

import html
import re
import uuid
from typing import Any

import pytest

from console import access
from console.models import Tenant
from reconciliation import transition, watch
from reconciliation.models import Limit
from tests import cast
from tests.database import Clock


@pytest.fixture
def people(ledger_db: Any, till: Any) -> dict[str, Any]:
    return cast.people()


@pytest.fixture
def ann(people: dict[str, Any]) -> Any:
    return cast.client(people["op_ann"])


@pytest.fixture
def eve(people: dict[str, Any]) -> Any:
    return cast.client(people["vi_eve"])


def text(response: Any) -> str:
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.content.decode())))


def stop(browser: Any, **given: Any) -> Any:
    facts = {"kind": "stop", "tenant": "t_acme", "provider": "pay", "reason": "double payouts", "token": uuid.uuid4()}
    return browser.post("/limits/set", {**facts, **given}, follow=True)


def lift(browser: Any, limit: Limit, **given: Any) -> Any:
    facts = {"version": limit.version, "reason": "repaired", "token": uuid.uuid4(), **given}
    return browser.post(f"/limits/{limit.pk}/lift", facts, follow=True)


def test_a_stop_is_set_shown_on_every_page_that_it_touches_and_released(ann: Any, eve: Any) -> None:
    case = cast.operation()
    assert "Set." in text(stop(ann, action="refund.create"))
    for page in ("/", "/runs", "/health", "/limits", f"/operations/{case.pk}"):
        assert re.search(
            r"Stopped: pay/refund\.create in t_acme since .* by op_ann ?: double payouts · release", text(eve.get(page))
        ), page
    assert "Released." in text(lift(ann, Limit.objects.get()))
    assert "Stopped:" not in text(eve.get("/"))
    assert "double payouts" in text(ann.get("/limits"))  # among what was released lately


def test_a_stop_of_another_tenant_is_not_shown(people: dict[str, Any], ann: Any) -> None:
    stop(ann)
    zoe = cast.client(people["out_zoe"])
    assert "Stopped:" not in text(zoe.get("/"))
    assert "double payouts" not in text(zoe.get("/limits"))
    assert lift(zoe, Limit.objects.get()).status_code == 404
    assert stop(zoe).status_code == 404
    assert Limit.objects.get().lifted_at is None


def test_a_viewer_sees_and_cannot_set_or_release(ann: Any, eve: Any) -> None:
    assert stop(eve).status_code == 403
    assert not Limit.objects.exists()
    stop(ann)
    assert "Release" not in text(eve.get("/limits")).replace("Released lately", "")
    assert lift(eve, Limit.objects.get()).status_code == 403
    assert Limit.objects.get().lifted_at is None


def test_only_who_may_stop_every_tenant_stops_them_all(people: dict[str, Any], ann: Any) -> None:
    assert stop(ann, tenant="").status_code == 403
    access.set_role(user=people["op_ann"], tenant=Tenant.objects.get(slug="t_beta"), role="operator", by=cast.SETTER)
    assert stop(cast.client(people["op_ann"]), tenant="").status_code == 200
    assert "in every tenant" in text(cast.client(people["out_zoe"]).get("/"))


def test_a_missing_reason_or_a_limit_without_a_number_is_said(ann: Any) -> None:
    answer = stop(ann, reason="")
    assert answer.status_code == 422
    assert "A reason is needed" in text(answer)
    answer = stop(ann, kind="rate", most=5)
    assert answer.status_code == 422
    assert "Say how long the window is" in text(answer)
    assert stop(ann, kind="storm").status_code == 400
    assert stop(ann, token="").status_code == 400


def test_a_typo_stops_nothing_and_the_form_comes_back_with_what_was_typed(ann: Any, eve: Any) -> None:
    cast.operation(provider="purse", action="pay.out")
    answer = stop(ann, provider="Pay", action="refund.create", workflow_type="damaged_item")
    assert answer.status_code == 422
    assert "There is no provider of that name" in text(answer)
    assert "Nearest: pay." in text(answer)
    page = answer.content.decode()
    for typed in ('id="stop-provider" name="provider" list="providers" value="Pay"', 'value="refund.create"',
                  'name="reason" value="double payouts"'):  # fmt: skip
        assert typed in page
    for known in ("pay", "purse", "refund.create", "pay.out", "damaged_item"):
        assert f"<option>{known}</option>" in page
    assert 'hx-get="/limits"' in page, "the open page keeps itself up to date"
    assert "Stopped:" not in text(eve.get("/"))
    token = re.search(r'name="token" value="([^"]+)"><input type="hidden" name="kind" value="stop"', page)
    assert token is not None
    assert "Set." in text(stop(ann, token=token[1]))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"most": "4e2"}, "“At most” cannot be read: it is a whole number above 0, in calls or minor units"),
        ({"most": "4.200,00"}, "“At most” cannot be read"),
        ({"most": 10**30}, "a whole number above 0"),
        ({"window_seconds": "1h"}, "“Window” cannot be read: it is a whole number above 0, in seconds."),
        ({"reason": "x" * 3000}, "“Reason” is longer than 2000 characters."),
        ({"workflow_type": "damaged\0item"}, "“Workflow” holds a character that cannot be kept (NUL)."),
    ],
)
def test_what_cannot_be_read_is_named_and_nothing_that_was_typed_is_lost(
    ann: Any, given: dict[str, Any], told: str
) -> None:
    typed = {"kind": "rate", "most": "5", "window_seconds": "60", "currency": "USD", "action": "refund.create"} | given
    answer = stop(ann, **typed)
    assert answer.status_code == 422
    assert told in text(answer)
    page = answer.content.decode()
    for name, value in (typed | {"reason": given.get("reason", "double payouts")}).items():
        if name == "kind":
            assert '<option value="rate" selected>' in page
        elif value != 10**30:
            kept = str(value).replace("\0", "\ufffd")
            assert re.search(rf'id="limit-[a-z]+" name="{name}"[^>]* value="{re.escape(kept)}"', page), name
    assert not Limit.objects.exists()


def test_a_number_that_cannot_be_read_changes_no_limit_and_the_reason_is_kept(ann: Any) -> None:
    stop(ann, kind="rate", most=5, window_seconds=60)
    limit = Limit.objects.get()
    for most in ("1e1", "", "0", str(2**63), "٣"):
        asked = {"version": limit.version, "most": most, "reason": "it sends too much", "token": uuid.uuid4()}
        answer = ann.post(f"/limits/{limit.pk}/change", asked)
        assert answer.status_code == 422, most
        assert "another whole number above 0" in text(answer)
        assert "it sends too much" in text(answer)
    assert Limit.objects.get().most == 5


def test_what_is_in_force_for_a_name_that_nothing_bears_says_so_and_is_released(ann: Any) -> None:
    by_hand = cast.SETTER.fact("limit_set")
    for number, columns in enumerate(
        (
            {"kind": "stop", "provider": "Pay"},
            {"kind": "rate", "provider": "pay", "action": "refund", "most": 5, "window_seconds": 60},
            {"kind": "stop", "workflow_type": "damaged-item"},
            {"kind": "amount", "provider": "desk", "currency": "USD", "most": 5, "window_seconds": 60},
            {"kind": "stop", "provider": "pay"},
        )
    ):
        row = {"tenant": "t_acme", "set_by": "person:1", "set_by_name": "op_ann", "reason": f"before {number}"}
        assert transition.set_limit(row=row | columns, fact=by_hand)
    cast.operation(provider="desk", action="ticket.open", amount=None, workflow_id="T-1", step="ticket")
    cast.operation(tenant="t_beta", provider="Pay")
    page = text(ann.get("/limits"))
    for told in (
        "no provider here is called Pay, configured or on record.",
        "no action here is called refund, configured or on record.",
        "no workflow here is called damaged-item, configured or on record.",
        "It holds nothing back: No action of desk declares money.",
    ):
        assert told in page
    assert page.count("It holds nothing back") == 4
    assert "It holds nothing back" not in text(ann.get("/limits", headers={"HX-Request": "true"})), "sought once a page"
    assert "Released." in text(lift(ann, Limit.objects.get(provider="Pay")))


def test_names_of_another_tenant_are_neither_offered_nor_known(people: dict[str, Any], ann: Any) -> None:
    cast.operation(tenant="t_beta", provider="vault", action="open")
    assert re.findall(r"<option>(\S+)</option>", ann.get("/limits").content.decode()) == [
        "pay",
        "refund.create",
        "t_acme",
        "t_acme",
    ]
    for name in ({"provider": "vault"}, {"provider": "valt"}, {"workflow_type": "damaged_item"}):
        answer = stop(ann, **name)
        assert answer.status_code == 422
        assert "Nearest" not in text(answer)
    assert "Set." in text(stop(cast.client(people["out_zoe"]), tenant="t_beta", provider="vault"))


def test_two_people_release_one_switch_and_the_second_is_told(people: dict[str, Any], ann: Any) -> None:
    stop(ann)
    limit = Limit.objects.get()
    assert lift(ann, limit).status_code == 200
    second = lift(cast.client(people["op_bob"]), limit)
    assert second.status_code == 409
    assert "released or changed already" in text(second)


def test_a_double_click_is_one_press(ann: Any) -> None:
    token = uuid.uuid4()
    first, second = stop(ann, token=token), stop(ann, token=token)
    assert "Set." in text(first)
    assert "Set." in text(second)
    assert Limit.objects.count() == 1


def test_limits_are_written_for_people(ann: Any) -> None:
    cast.operation()
    stop(ann, kind="amount", most=100_000, window_seconds=86_400, currency="USD")
    stop(ann, kind="concurrency", most=3, workflow_type="damaged_item")
    page = text(ann.get("/limits"))
    assert "at most 1,000.00 USD in 1 d 0 h pay in t_acme" in page
    assert "at most 3 in flight pay of workflow damaged_item in t_acme" in page


def test_a_limit_that_is_set_already_is_tightened_through_the_same_form_and_never_loosened(ann: Any) -> None:
    rate = {"kind": "rate", "window_seconds": 3600}
    stop(ann, most=1000, **rate)
    assert "at most 1,000 attempts in 1 h 00 m was in force; from now on it is at most 1 attempt" in text(
        stop(ann, most=1, **rate)
    )
    answer = stop(ann, most=50, **rate)
    assert answer.status_code == 422
    assert "Here at most 1 attempt in 1 h 00 m is in force already" in text(answer)
    stop(ann, kind="rate", most=2, window_seconds=5)
    page = text(ann.get("/limits"))
    assert "at most 1 attempt in 1 h 00 m pay in t_acme" in page
    assert "at most 2 attempts in 5 s pay in t_acme" in page
    stop(ann, kind="rate", most=3, window_seconds=90)
    assert "at most 3 attempts in 90 s pay in t_acme" in text(ann.get("/limits"))  # and not in 1 min


def test_signals_are_on_the_health_page_with_links_and_only_ones_own(people: dict[str, Any], clock: Clock) -> None:
    mine = cast.operation(state="pending")
    cast.operation(state="pending", tenant="t_beta")
    clock.advance(minutes=3)
    watch.look()
    page = cast.client(people["vi_eve"]).get("/health").content.decode()
    assert page.count("A lease ran out and nobody has looked") == 1
    assert f'href="/operations/{mine.pk}"' in page


def test_a_stranger_sees_nothing(client: Any) -> None:
    for path in ("/limits", "/stops"):
        assert client.get(path).status_code == 302


def test_a_version_that_no_page_has_shown_changes_nothing(ann: Any, clock: Clock) -> None:
    stop(ann, kind="rate", most=5, window_seconds=60, provider="")
    clock.advance(hours=1)  # by now a second person has to agree
    limit = Limit.objects.get()
    for version in (2**31, 2**63, 10**30):
        assert lift(ann, limit, version=version).status_code == 400
        asked = {"version": version, "most": 9, "reason": "more", "token": uuid.uuid4()}
        assert ann.post(f"/limits/{limit.pk}/change", asked).status_code == 400
    after = Limit.objects.get()
    assert (after.version, after.most, after.lifted_at) == (limit.version, 5, None)


@pytest.mark.parametrize("currency", ["ßßßßßßßß", "$"])
def test_a_currency_that_no_operation_can_bear_limits_nothing_and_is_said(ann: Any, currency: str) -> None:
    answer = stop(ann, kind="amount", most=5, window_seconds=60, provider="", currency=currency)
    assert answer.status_code == 422
    assert "A currency is a code of 3 to 8 letters" in text(answer)
    assert not Limit.objects.exists()


def test_the_page_says_how_many_new_operations_the_guard_lets_through(ann, settings):
    settings.AFTERCALL_MASS_LIMIT = 2500
    assert "more than 2,500 new operations of one kind in a minute stop that kind" in text(ann.get("/limits"))
