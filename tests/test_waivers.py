"""An undo that two people vouch for is done: nothing sends it again, and what shows that it was sent is told aloud."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from audit.models import Entry
from reconciliation import actions, intents, registry, run_deeds, transition
from reconciliation.actions import Verdict
from reconciliation.models import Approval, Operation, Run
from reconciliation.providers.base import OutcomeUnknown
from reconciliation.states import ApprovalState, RunState, State
from reconciliation.workflows import Step, Undo, Workflow
from tests import saga_workflows as flows
from tests.scripted import absent, applied, found, row
from tests.test_approvals import ANN, BECAUSE, CLEO, ROOT, do, press
from tests.test_reconcile import report
from tests.test_sagas import DOWN, REFUSED, settle, start

LOST = OutcomeUnknown("no answer came")
BOB = replace(ROOT, id="person:2", name="op_bob")


def reversed_by(action: str, *, provider: str = "clerk") -> Workflow:
    undo = Undo(action=action, provider=provider, request=flows.undone, retry=flows.PATIENT)
    reserve = Step(name="reserve", provider="clerk", action="keyed", request=flows.order, undo=undo)
    return flows.flow(f"by_{provider}_{action}", reserve, flows.SHIP)


LISTED, BLIND, KEYED = reversed_by("lookup"), reversed_by("none", provider="blind"), reversed_by("keyed")


@pytest.fixture
def sagas(clerk: Any, settings: Any) -> Any:
    own = [f"tests.test_waivers.{name}" for name in ("LISTED", "BLIND", "KEYED")]
    settings.AFTERCALL_WORKFLOWS = [*own, "tests.saga_workflows.LASTING"]
    registry.forget()
    return clerk


def stuck(sagas: Any, clock: Any, name: str, *answers: Any) -> tuple[Run, Operation]:
    """A run that walks back and is stuck at the undo of its one step, which got these answers."""
    sagas.answers(applied("r-1"), REFUSED, *answers)
    run = start(name)
    settle(clock, seconds=120)
    run.refresh_from_db()
    assert (run.state, run.escalation_reason) == (RunState.COMPENSATING, "undo_incomplete")
    return run, Operation.objects.get(step="undo:reserve")


def waive(run: Run, clock: Any) -> Run:
    do(run, "waive_undo", ANN, step="reserve")
    answer = press("approve", Approval.objects.get(action="waive_undo"), CLEO)
    assert "vouched for by two people" in answer.message
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    return run


def offered(subject: Any, action: str) -> tuple[bool, str]:
    fresh = type(subject).objects.get(pk=subject.pk)
    shown = next(p for p in actions.previews(fresh, actor=ROOT) if p.action == action)
    return shown.allowed, shown.why


def test_an_unknown_undo_that_is_proven_absent_after_its_waiver_is_not_sent(sagas, clock):
    run, undo = stuck(sagas, clock, "by_clerk_lookup", LOST)
    assert (undo.state, undo.escalation_reason) == (State.AMBIGUOUS, "no_conclusive_answer")
    waive(run, clock)
    sent = len(sagas.calls)
    sagas.sees(absent())
    for _ in range(2):
        clock.advance(120)
        do(undo, "look_up", ANN)
    settle(clock)
    after = row(undo.pk)
    assert (after.state, after.reason_code, after.escalated_at) == (State.FAILED_TERMINAL, "undo_waived", None)
    assert len(sagas.calls) == sent, "it was undone by hand"


def test_a_late_report_of_a_refusal_sends_no_waived_undo(sagas, clock):
    run, undo = stuck(sagas, clock, "by_blind_none", LOST)
    assert undo.escalation_reason == "nothing_can_find_out"
    waive(run, clock)
    sent = len(sagas.calls)
    report(undo.pk, 1, error_class="unavailable")
    settle(clock)
    assert (row(undo.pk).state, len(sagas.calls)) == (State.FAILED_TERMINAL, sent)


def test_a_waiver_ends_an_undo_that_was_not_applied_and_nobody_retries_it(sagas, clock):
    run, undo = stuck(sagas, clock, "by_clerk_keyed", DOWN, DOWN, DOWN)
    assert (undo.state, undo.escalation_reason) == (State.FAILED_RETRYABLE, "budget_spent")
    waive(run, clock)
    after = row(undo.pk)
    assert (after.state, after.reason_code, after.escalated_at) == (State.FAILED_TERMINAL, "undo_waived", None)
    for action in ("retry", "new_intent"):
        assert not offered(undo, action)[0]
        assert do(undo, action, ROOT).verdict is Verdict.REFUSED
    assert "undone by hand" in offered(undo, "new_intent")[1]


def test_what_was_undone_by_hand_is_not_reversed_on_its_own_page_either(sagas, clock):
    run, _ = stuck(sagas, clock, "by_clerk_keyed", DOWN, DOWN, DOWN)
    waive(run, clock)
    done = Operation.objects.get(step="reserve")
    sagas.sees(found(done.provider_operation_id))
    sent = len(sagas.calls)
    allowed, why = offered(done, "compensate")
    assert (allowed, "undone by hand" in why) == (False, True)
    assert do(done, "compensate", ROOT).verdict is Verdict.REFUSED
    assert len(sagas.calls) == sent


def test_an_unknown_undo_that_was_waived_is_not_sent_again_by_two_people(sagas, clock):
    run, undo = stuck(sagas, clock, "by_blind_none", LOST)
    assert offered(undo, "send_again")[0]
    waive(run, clock)
    assert "undone by hand" in offered(undo, "send_again")[1]
    assert do(undo, "send_again", ANN).verdict is Verdict.REFUSED


def test_stopping_an_unknown_undo_says_first_that_only_a_waiver_or_a_cancel_is_left_for_its_run(sagas, clock):
    run, undo = stuck(sagas, clock, "by_blind_none", LOST)
    assert "the run ends only by a waiver" in offered(undo, "terminate")[1]
    assert do(undo, "terminate", ANN).verdict is Verdict.DONE
    settle(clock)
    left = {p.action for p in actions.previews(row(undo.pk), actor=ROOT) if p.allowed}
    assert left <= {"look_up", "close"}
    ways = {p.action for p in actions.previews(Run.objects.get(pk=run.pk), actor=ROOT) if p.allowed}
    assert ways == {"waive_undo", "cancel"}
    waive(run, clock)


def test_calling_an_undo_not_applied_says_that_its_run_goes_on_waiting(sagas, clock):
    _, undo = stuck(sagas, clock, "by_blind_none", LOST)
    assert (
        "Its run takes the undo as failed, and waits for a new intent or a waiver."
        in offered(undo, "resolve_not_applied")[1]
    )


def test_a_waived_undo_that_is_found_after_all_is_told_aloud(sagas, clock):
    run, undo = stuck(sagas, clock, "by_clerk_lookup", LOST)
    waive(run, clock)
    sagas.sees(found("u-1"))
    do(undo, "look_up", ANN)
    after = row(undo.pk)
    assert (after.state, after.escalation_reason) == (State.SUCCEEDED, "undone_twice")


def test_an_ended_waived_undo_that_is_found_after_all_is_told_aloud_too(sagas, clock):
    run, undo = stuck(sagas, clock, "by_clerk_keyed", DOWN, DOWN, DOWN)
    waive(run, clock)
    sagas.sees(found("u-1"))
    do(undo, "look_up", ANN)
    after = row(undo.pk)
    assert (after.state, after.escalation_reason) == (State.SUCCEEDED, "undone_twice")


def test_a_waived_undo_that_a_person_calls_not_applied_is_over(sagas, clock):
    run, undo = stuck(sagas, clock, "by_clerk_lookup", LOST)
    waive(run, clock)
    sagas.sees(absent())
    clock.advance(120)
    do(undo, "look_up", ANN)
    assert row(undo.pk).state == State.AMBIGUOUS
    assert do(undo, "resolve_not_applied", ANN).verdict is Verdict.DONE
    assert (row(undo.pk).state, row(undo.pk).escalated_at) == (State.FAILED_TERMINAL, None)


def test_a_waiver_is_of_the_undo_that_was_shown_and_not_of_a_later_one(sagas, clock):
    run, undo = stuck(sagas, clock, "by_blind_none", REFUSED)
    assert undo.state == State.FAILED_TERMINAL
    do(run, "waive_undo", ANN, step="reserve")
    sagas.answers(LOST)
    assert do(undo, "new_intent", BOB).verdict is Verdict.DONE
    settle(clock)
    assert Operation.objects.get(step="undo:reserve", intent_version=2).state == State.AMBIGUOUS
    request = Approval.objects.get(action="waive_undo")
    answer = press("approve", request, CLEO)
    assert (answer.verdict, "changed since it was asked" in answer.message) == (Verdict.REFUSED, True)
    run.refresh_from_db()
    assert run.waived == []
    do(run, "waive_undo", ANN, step="reserve")
    request.refresh_from_db()
    assert request.state == ApprovalState.SUPERSEDED
    assert press("approve", Approval.objects.latest("id"), CLEO).verdict is Verdict.DONE


def test_a_waiver_is_of_an_undo_as_it_stood_and_not_of_one_that_became_unknown(sagas, clock):
    run, undo = stuck(sagas, clock, "by_clerk_keyed", DOWN, DOWN, DOWN)
    do(run, "waive_undo", ANN, step="reserve")
    sagas.answers(LOST)
    assert do(undo, "retry", BOB).verdict is Verdict.DONE
    assert row(undo.pk).state == State.AMBIGUOUS
    answer = press("approve", Approval.objects.get(action="waive_undo"), CLEO)
    assert (answer.verdict, "changed since it was asked" in answer.message) == (Verdict.REFUSED, True)
    run.refresh_from_db()
    assert run.waived == []


def test_a_waiver_on_a_run_that_was_cancelled_meanwhile_is_not_agreed_to_any_more(sagas, clock):
    run, _ = stuck(sagas, clock, "by_blind_none", REFUSED)
    do(run, "waive_undo", ANN, step="reserve")
    request = Approval.objects.get()
    assert do(run, "cancel", BOB).verdict is Verdict.DONE
    assert press("approve", request, CLEO).verdict is Verdict.REFUSED
    settle(clock)
    request.refresh_from_db()
    assert (request.state, request.decided_by) == (ApprovalState.SUPERSEDED, "")


def test_an_effect_that_cannot_be_undone_is_accepted_to_stand_and_nobody_says_undone_by_hand(sagas, clock):
    sagas.answers(applied("s-1"), REFUSED)
    run = start("lasting")
    settle(clock)
    shown = next(p for p in actions.previews(Run.objects.get(), actor=ANN) if p.action == "waive_undo")
    assert shown.inputs[0].choices == (("stamp", "stamp: cannot be undone, accepted that it stands"),)
    do(run, "waive_undo", ANN, step="stamp")
    request = Approval.objects.get()
    assert request.policy == "That an effect stands which cannot be undone is accepted by two people."
    answer = press("approve", request, CLEO)
    assert "accepted by two people that stamp stands" in answer.message
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    assert Entry.objects.filter(subject=str(run.subject), reason_code="effect_accepted").count() == 1
    account = run_deeds.account(run)
    assert ([each.step for each in account.standing], account.undone) == (["stamp"], ())


def test_the_database_itself_sends_no_waived_undo(sagas, clock):
    run, undo = stuck(sagas, clock, "by_blind_none", LOST)
    waive(run, clock)
    with pytest.raises(transition.Waived):
        transition.transition(
            undo.subject, to=State.PENDING, version=row(undo.pk).version, fact=ROOT.fact("retry_requested")
        )


def test_the_database_takes_no_new_intent_of_a_waived_undo(sagas, clock):
    run, undo = stuck(sagas, clock, "by_clerk_keyed", DOWN, DOWN, DOWN)
    waive(run, clock)
    with pytest.raises(transition.Waived):
        intents.next_version(row(undo.pk), actor=ROOT, reason=BECAUSE)
