"""The pages on which two people decide: limits, schedules and the request itself, without JavaScript."""

from __future__ import annotations

import re
import uuid
from typing import Any

import pytest

from console import access
from console.models import Tenant
from reconciliation import runs, sweeping
from reconciliation.models import Approval, Limit, Operation, Run
from tests import cast
from tests.cast import SETTER
from tests.scripted import AGENT, applied
from tests.test_approvals_page import decide, text
from tests.test_limits_page import lift, stop
from tests.test_run_page import desk, stuck  # noqa: F401 - a fixture
from tests.test_sagas import DOWN
from tests.test_schedules_page import form_of, job, office, save  # noqa: F401 - a fixture
from tests.test_two_people import guarded  # noqa: F401 - a fixture


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


@pytest.mark.parametrize("most", ["", "100000", "0", "9" * 20, "many"])
def test_a_number_that_cannot_be_is_said(ann, standing, most):
    assert change(ann, standing, most=most).status_code == 422
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
    page = text(save(ann, f"/schedules/{daily.pk}/edit", terms))
    assert "Asked for" in page
    assert "Running every missed start although an action has no key is asked for by op_ann" in page
    page = text(cleo.get("/approvals"))
    assert "run only the latest one run all of them, in order" in page
    assert "no provider remembers a key for act" in page
    assert "runs every missed start from now on" in text(decide(cleo, Approval.objects.get(), "approve"))
    assert "accepted for actions without a key" in text(ann.get(f"/schedules/{daily.pk}"))


# About a run


def press(browser: Any, path: str, subject: Any, action: str, **inputs: str) -> Any:
    given = {"action": action, "token": uuid.uuid4(), "version": subject.version, "reason": "as agreed", **inputs}
    return browser.post(f"{path}/{subject.pk}/act", given, follow=True)


@pytest.fixture
def stopped(guarded: Any, clock: Any) -> tuple[dict[str, Any], Run]:  # noqa: F811
    """A run of a tenant with people that was cancelled after its first step, which two people must agree to undo."""
    guarded.answers(applied("r-1"), DOWN)
    run = runs.start("saga", tenant="t_acme", workflow_id="w1", input={"order": "1002"}, actor=AGENT)
    sweeping.sweep()
    runs.cancel(run.pk, actor=SETTER, version=Run.objects.get().version, reason="stop")
    return cast.people(), Run.objects.get()


def test_the_approver_sees_each_effect_that_would_be_undone_with_its_amount_and_id(stopped):
    who, run = stopped
    assert "Asked for" in text(press(cast.client(who["op_ann"]), "/runs", run, "compensate_run"))
    page = text(cast.client(who["ap_cleo"]).get("/approvals"))
    assert "What would be undone Amount, provider's id State" in page
    assert "reserve, applied 42.00 USD r-1 ✓ succeeded" in page
    assert "changed since it was asked" not in page


def test_what_the_run_did_since_is_flagged_and_cannot_be_agreed_to(guarded, clock):  # noqa: F811
    who = cast.people()
    guarded.answers(applied("r-1"), DOWN, applied("c-1"), DOWN)
    run = runs.start("saga", tenant="t_acme", workflow_id="w1", input={"order": "1002"}, actor=AGENT)
    sweeping.sweep()
    root, cleo = cast.client(who["op_ann"]), cast.client(who["ap_cleo"])
    press(root, "/runs", Run.objects.get(), "compensate_run")
    clock.advance(30)
    sweeping.sweep()
    page = text(cleo.get("/approvals"))
    assert re.search(r"charge, applied 42.00 USD c-1 ✓ succeeded changed since it was asked", page)
    assert "It must be asked for again" in page
    assert decide(cleo, Approval.objects.get(), "approve").status_code == 422
    assert Run.objects.get(pk=run.pk).state != "compensating"
    sweeping.sweep()
    assert "Nothing waits for you" in text(cleo.get("/approvals"))
    page = text(cleo.get("/approvals?tab=ended"))
    assert "↷ superseded" in page
    assert "What it was about has changed since it was asked, so nothing was done." in page


def test_a_waiver_shows_what_was_applied_and_how_its_undo_stands(desk, clock):  # noqa: F811
    run = stuck(desk, clock)
    who = cast.people()
    assert "Asked for" in text(
        press(cast.client(who["op_ann"]), "/runs", run, "waive_undo", input_step="schedule_pickup")
    )
    browser = cast.client(who["ap_cleo"])
    page = text(browser.get("/approvals"))
    assert "Accept that the undo of schedule_pickup was done by hand" in page
    assert re.search(r"schedule_pickup, applied pu_\w+ ✓ succeeded", page)
    assert "undo:schedule_pickup, its undo ✕ failed the provider found the request malformed" in page
    undo = Operation.objects.get(step="undo:schedule_pickup")
    press(cast.client(who["op_bob"]), "/operations", undo, "new_intent")
    page = text(browser.get("/approvals"))
    assert "What it is about has changed since it was asked. It must be asked for again." in page
    assert decide(browser, Approval.objects.get(), "approve").status_code == 422
