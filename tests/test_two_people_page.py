"""The pages on which two people decide: limits, schedules and the request itself, without JavaScript."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from console import access
from console.models import Tenant
from reconciliation.models import Approval, Limit
from tests import cast
from tests.test_approvals_page import decide, text
from tests.test_limits_page import lift, stop
from tests.test_schedules_page import form_of, job, office  # noqa: F401 - a fixture


@pytest.fixture
def who(ledger_db: Any, till: Any) -> dict[str, Any]:
    return cast.people()


@pytest.fixture
def ann(who: dict[str, Any]) -> Any:
    return cast.client(who["op_ann"])


@pytest.fixture
def standing(ann: Any, clock: Any) -> Limit:
    stop(ann, kind="amount", most=100_000, window_seconds=86_400, currency="USD")
    clock.advance(minutes=16)
    return Limit.objects.get()


def change(browser: Any, limit: Limit, **given: Any) -> Any:
    facts = {"version": limit.version, "reason": "the sale begins", "token": uuid.uuid4(), **given}
    return browser.post(f"/limits/{limit.pk}/change", facts, follow=True)


def test_a_limit_that_is_to_be_raised_waits_for_another_person_who_sees_both_numbers(who, ann, standing):
    assert "More is in force as soon as another person agrees" in text(ann.get("/limits"))
    page = text(change(ann, standing, most=500_000))
    assert "Asked for" in page
    assert "Letting more through this limit is asked for by op_ann: another person decides" in page
    cleo = cast.client(who["ap_cleo"])
    page = text(cleo.get("/approvals"))
    assert "Let more through a limit" in page
    assert "at most 1,000.00 USD in 1 d 0 h at most 5,000.00 USD in 1 d 0 h" in page
    assert "the sale begins" in page
    approval = Approval.objects.get()
    assert decide(ann, approval, "approve").status_code == 403
    assert "Approved. Changed." in text(decide(cleo, approval, "approve"))
    assert "at most 5,000.00 USD" in text(ann.get("/limits"))


def test_less_is_in_force_at_once(ann, standing):
    assert "Changed. Every claim from now on reads it" in text(change(ann, standing, most=50_000))
    assert not Approval.objects.exists()


@pytest.mark.parametrize(("most", "status"), [("", 422), ("100000", 422), ("0", 400), ("9" * 20, 400), ("many", 400)])
def test_a_number_that_cannot_be_is_said(ann, standing, most, status):
    assert change(ann, standing, most=most).status_code == status
    assert Limit.objects.get().most == 100_000


def test_a_page_that_is_out_of_date_changes_nothing_and_a_viewer_may_not(who, ann, standing):
    assert change(ann, standing, most=5, version=9).status_code == 409
    eve = cast.client(who["vi_eve"])
    assert "Change…" not in text(eve.get("/limits"))
    assert change(eve, standing, most=5).status_code == 403
    assert change(cast.client(who["out_zoe"]), standing, most=5).status_code == 404
    assert Limit.objects.get().most == 100_000


def test_taking_a_limit_away_is_asked_for_and_shown_until_somebody_decides(who, ann, standing):
    assert "It stays in force until another person agrees" in text(ann.get("/limits"))
    page = text(lift(ann, standing))
    assert "Asked for" in page
    assert "Taking this limit away is asked for by op_ann" in text(cast.client(who["vi_eve"]).get("/limits"))
    cleo = cast.client(who["ap_cleo"])
    page = text(cleo.get("/approvals"))
    assert "Take a limit away" in page
    assert "nothing of it stays" in page
    assert "Nothing is done, and who asked is told a final answer" in page
    decide(cleo, Approval.objects.get(), "deny")
    assert Limit.objects.get().lifted_at is None
    assert "is asked for" not in text(ann.get("/limits"))


def test_what_touches_every_tenant_is_decided_by_who_may_in_all_of_them(who, ann, clock):
    beta = Tenant.objects.get(slug="t_beta")
    access.set_role(user=who["op_ann"], tenant=beta, role="operator", by=cast.SETTER)
    stop(ann, tenant="", kind="rate", most=9, window_seconds=60)
    clock.advance(minutes=16)
    lift(ann, Limit.objects.get())
    approval = Approval.objects.get()
    cleo = cast.client(who["ap_cleo"])
    assert "Take a limit away" not in text(cleo.get("/approvals?tab=others"))
    assert cleo.get(f"/approvals/{approval.pk}").status_code == 404
    assert "is asked for" not in text(cleo.get("/limits"))
    access.set_role(user=who["ap_cleo"], tenant=beta, role="approver", by=cast.SETTER)
    page = text(cleo.get("/approvals"))
    assert "Take a limit away" in page
    assert "every tenant" in page
    assert "Approved. Taken away." in text(decide(cleo, approval, "approve"))


def test_a_schedule_says_that_another_person_is_asked(office, clock):  # noqa: F811
    who = cast.people()
    ann, cleo = cast.client(who["op_ann"]), cast.client(who["ap_cleo"])
    daily = job(clock, workflow="telegram")
    terms = form_of(daily, workflow="telegram", missed="run_all", repeats_accepted="on", reason="each day counts")
    page = text(ann.post(f"/schedules/{daily.pk}/edit", terms | {"confirm": "1"}, follow=True))
    assert "Asked for" in page
    assert "Running every missed start although an action has no key is asked for by op_ann" in page
    page = text(cleo.get("/approvals"))
    assert "run only the latest one run all of them, in order" in page
    assert "no provider remembers a key for act" in page
    assert "runs every missed start from now on" in text(decide(cleo, Approval.objects.get(), "approve"))
    assert "accepted for actions without a key" in text(ann.get(f"/schedules/{daily.pk}"))
