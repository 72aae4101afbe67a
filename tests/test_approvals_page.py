"""The approvals page: what exactly would be sent, to whom it is offered, and how decisions end without JavaScript."""

from __future__ import annotations

import re
import uuid
from datetime import timedelta
from typing import Any

import pytest

from audit.log import Fact
from reconciliation import executor, transition
from reconciliation.actors import Actor
from reconciliation.executor import Intent
from reconciliation.keys import Identity
from reconciliation.models import Approval, Operation
from reconciliation.workflows import Consent
from tests import cast

FACT = Fact(actor="system:tests", actor_kind="system", reason_code="looked_up")
AGENT = Actor(id="agent:desk-2", kind="agent")
POLICY = Consent(policy="Refunds above 500.00 need one approver.")


def large(order: str = "1014", *, tenant: str = "t_acme", version: int = 1, consent: Consent = POLICY, **facts: Any):
    """A refund that waits for consent, by the ledger's own functions."""
    identity = Identity(
        tenant=tenant, workflow_type="damaged_item", workflow_id=f"T-{order}", step="issue_refund",
        business_object=order, intent_version=version,
    )  # fmt: skip
    request = {"order": order, "amount": 64_000, "currency": "USD", "card": "4242424242424242"}
    whole = {"requested_by": AGENT.id, "on_behalf_of": "op_ann", **facts}
    intent = Intent(
        identity=identity, provider="pay", action="refund.create", request=request, consent=consent, **whole
    )
    pk = executor.perform(intent, actor=AGENT).pk
    return Approval.objects.filter(operation_id=pk).latest("id")


@pytest.fixture
def who(ledger_db, till):
    return cast.people()


def text(response: Any) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", response.content.decode()).split())


def decide(browser: Any, approval: Approval, action: str, *, token: str = "", **fields: Any) -> Any:
    whole = {
        "action": action,
        "token": token or str(uuid.uuid4()),
        "version": approval.version,
        "reason": "It is right.",
    }
    return browser.post(f"/approvals/{approval.pk}/act", {**whole, **fields}, follow=True)


def test_the_approver_sees_exactly_what_would_be_sent_and_why_it_is_asked(who):
    approval = large()
    page = cast.client(who["ap_cleo"]).get("/approvals")
    shown = text(page)
    for words in ("Waiting for you 1", "Refund 640.00 USD for order 1014",
                  "Asked by agent desk-2 , on behalf of op_ann",
                  "Policy: Refunds above 500.00 need one approver.", "Exactly this, once, until", "amount 640.00 USD",
                  "card •••• hidden", "Approvals 1 waiting for you"):  # fmt: skip
        assert words in shown, words
    assert "4242" not in page.content.decode()
    assert f'hx-get="/approvals/{approval.pk}?tab=you"' in page.content.decode()


def test_each_person_has_the_requests_that_concern_them(who):
    large()
    lists = {}
    for name in ("ap_cleo", "op_ann", "op_bob", "out_zoe"):
        shown = text(cast.client(who[name]).get("/approvals"))
        lists[name] = tuple(
            int(re.search(rf"{tab} (\d+)", shown)[1]) for tab in ("for you", "for others", "Your requests")
        )
    assert lists == {"ap_cleo": (1, 0, 0), "op_ann": (0, 1, 1), "op_bob": (0, 1, 0), "out_zoe": (0, 0, 0)}


def test_an_outsider_finds_nothing_under_its_number(who):
    approval = large()
    stranger = cast.client(who["out_zoe"])
    assert stranger.get(f"/approvals/{approval.pk}").status_code == 404
    assert decide(stranger, approval, "approve").status_code == 404


@pytest.mark.case("F6")
def test_approving_twice_is_one_decision_and_two_pages_that_say_so(who):
    approval, browser, token = large(), cast.client(who["ap_cleo"]), str(uuid.uuid4())
    for _ in range(2):
        assert "Done. Approved." in text(decide(browser, approval, "approve", token=token))
    assert "You approved this already" in text(decide(browser, approval, "approve"))
    approval.refresh_from_db()
    assert (approval.state, approval.decision_reason) == ("approved", "It is right.")
    assert Operation.objects.get().state == "ready"


@pytest.mark.case("F6")
def test_the_second_of_two_deciders_is_told_who_was_first(who):
    from console import access
    from console.models import Role, Tenant

    access.set_role(user=who["op_bob"], tenant=Tenant.objects.get(slug="t_acme"), role=Role.APPROVER, by=cast.SETTER)
    approval = large()
    decide(cast.client(who["ap_cleo"]), approval, "deny")
    answer = decide(cast.client(who["op_bob"]), approval, "approve")
    assert (answer.status_code, "Already denied by ap_cleo at 20" in text(answer)) == (409, True)


@pytest.mark.case("F3")
def test_a_request_whose_time_is_over_offers_no_approval_and_takes_none(who, clock):
    approval = large()
    clock.set(approval.expires_at)
    browser = cast.client(who["ap_cleo"])
    shown = text(browser.get(f"/approvals/{approval.pk}"))
    assert "Its time is over, so it cannot be approved any more." in shown
    assert decide(browser, approval, "approve").status_code == 422
    assert "Done. Denied." in text(decide(browser, approval, "deny"))


def test_a_decision_has_a_reason(who):
    approval = large()
    answer = decide(cast.client(who["ap_cleo"]), approval, "approve", reason=" ")
    assert (answer.status_code, "A reason is needed" in text(answer)) == (422, True)


def test_who_it_is_asked_for_denies_but_does_not_approve(who):
    approval = large(on_behalf_of="ap_cleo")
    browser = cast.client(who["ap_cleo"])
    shown = text(browser.get(f"/approvals/{approval.pk}?tab=yours"))
    assert "another person decides. You may deny or withdraw it." in shown
    assert decide(browser, approval, "approve").status_code == 403
    assert "Done. Denied." in text(decide(browser, approval, "deny"))


def test_what_else_was_done_for_the_same_order_is_beside_it(who):
    cast.operation(state="succeeded", order="1014", amount=64_000, sent=60, provider_operation_id="re_1")
    large()
    shown = text(cast.client(who["ap_cleo"]).get("/approvals"))
    assert "Also on 1014 State Refund 640.00 USD for order 1014 ✓ succeeded" in shown


def test_what_was_unknown_when_it_was_asked_and_is_found_since_bears_a_flag(who, clock):
    was = cast.operation(state="ambiguous", order="1014", amount=64_000, sent=60)
    same = cast.operation(state="ambiguous", order="1014", amount=100, sent=60)
    large()
    browser = cast.client(who["ap_cleo"])
    clock.advance(5)
    transition.transition(same.subject, to=None, version=same.version, patch={"look_ups": 1}, fact=FACT)
    assert "since it was asked" not in text(browser.get("/approvals"))
    patch = {"basis": "look_up", "reason_code": "found", "due_at": None}
    transition.transition(was.subject, to="succeeded", version=was.version, patch=patch, fact=FACT)
    shown = text(browser.get("/approvals"))
    assert shown.count("changed since it was asked") == 1
    assert "Refund 640.00 USD for order 1014 changed since it was asked" in shown


def test_ended_requests_stay_to_be_read(who, clock):
    one, two = large("1"), large("2", consent=Consent(expires_after=timedelta(seconds=30)))
    decide(cast.client(who["ap_cleo"]), one, "deny")
    clock.advance(60)
    from reconciliation import sweeping

    sweeping.sweep()
    browser = cast.client(who["op_ann"])
    assert "denied" in text(browser.get("/approvals?tab=decided"))
    assert f"/approvals/{two.pk}?" in browser.get("/approvals?tab=ended").content.decode()
    assert "Approved by" not in text(browser.get(f"/approvals/{two.pk}"))
    assert "Denied by ap_cleo" in text(browser.get(f"/approvals/{one.pk}"))


def test_an_empty_list_says_what_would_be_there(who):
    assert "Nothing waits for you" in text(cast.client(who["ap_cleo"]).get("/approvals"))
