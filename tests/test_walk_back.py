"""A person cuts into a run that walks back: what they stop is sent no more, and goes on if they say so."""

# ruff: noqa: F811 - fixtures are imported
from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from audit.models import Entry
from console import endings
from console.sagas import saga
from reconciliation import actions, deeds, executor, leases, limits, registry, runs, sweeping, transition
from reconciliation.models import Approval, Limit, Operation, Run
from reconciliation.providers.base import Verdict
from reconciliation.states import ApprovalState, RunState, State
from tests import saga_workflows as flows
from tests.scripted import AGENT, OLGA, applied, found, saw
from tests.test_approvals import CLEO, ROOT, do
from tests.test_limits import put
from tests.test_sagas import CLAIM, DOWN, LOST, REFUSED, answer_by_step, press, sagas, settle, start, states  # noqa: F401 - a fixture

# Cancelling a run that walks back


def backs_off(sagas: Any, run: Run) -> None:
    """undo:charge got a 503 and waits for its next attempt."""
    sagas.answers(applied("r-1"), applied("c-1"), REFUSED, DOWN)
    sweeping.sweep()
    sweeping.sweep()


def is_held(sagas: Any, run: Run) -> None:
    """A stop switch was pulled while the pivot was refused, so undo:charge was never sent."""
    sagas.answers(applied("r-1"), applied("c-1"), lambda call: put("stop", provider="clerk") and REFUSED)
    sweeping.sweep()
    sweeping.sweep()
    assert Operation.objects.get(step="undo:charge").attempts == 0


def is_repeated(sagas: Any, run: Run) -> None:
    """No answer came for undo:charge; look-ups cannot tell, and the key makes a repeat safe."""
    sagas.answers(applied("r-1"), applied("c-1"), REFUSED, LOST)
    sweeping.sweep()
    sweeping.sweep()


def is_in_flight(sagas: Any, run: Run) -> None:
    """The cancel comes while the request of undo:charge is under way; then a 503 comes back."""
    sagas.answers(applied("r-1"), applied("c-1"), REFUSED, lambda call: press(run, "cancel") and DOWN)
    sweeping.sweep()
    sweeping.sweep()


@pytest.mark.parametrize("undo", [backs_off, is_held, is_repeated, is_in_flight])
def test_a_run_cancelled_while_it_walks_back_sends_no_undo_any_more(sagas: Any, clock: Any, undo: Any) -> None:
    run = start("saga")
    undo(sagas, run)
    if undo is not is_in_flight:
        assert press(run, "cancel").verdict == "done"
    if undo is is_held:
        release()
    effects, sent = list(sagas.effects), len(sagas.calls)
    sagas.sees()
    for _ in range(30):
        sweeping.sweep()
        clock.advance(60)
    run.refresh_from_db()
    assert (run.state, sagas.effects, len(sagas.calls)) == (RunState.CANCELLED, effects, sent)
    left = Operation.objects.get(step="undo:charge")
    assert (left.state, left.reason_code) == {
        backs_off: (State.FAILED_TERMINAL, "run_cancelled"),
        is_held: (State.FAILED_TERMINAL, "run_cancelled"),
        is_in_flight: (State.FAILED_TERMINAL, "run_ended"),
    }.get(undo, (State.AMBIGUOUS, left.reason_code))


def release() -> None:
    limits.lift(Limit.objects.get(), actor=OLGA, version=1, reason="it is over", token=uuid4())


def test_a_cancelled_run_says_what_happened_what_did_not_and_what_is_unknown(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), applied("c-1"), REFUSED, applied("u-1"), LOST)
    run = start("saga")
    sweeping.sweep()
    sweeping.sweep()
    told = press(run, "cancel").message
    assert told == (
        "Cancelled. Applied: reserve (r-1). Undone since: charge (c-1). Unknown, left to look-ups: undo:reserve. "
        "Not applied: ship. Not begun: tell."
    )
    run.refresh_from_db()
    account = endings.told(run, with_names=True)
    assert account is not None
    assert ([o.step for o in account.unknown], account.not_begun) == (["undo:reserve"], ("tell",))
    answer = press(run, "compensate_run")
    assert (answer.verdict, "what became of undo:reserve" in answer.message) == ("refused", True)


@pytest.mark.parametrize("undo", [backs_off, is_in_flight])
def test_what_was_cancelled_while_it_walked_back_is_undone_when_a_person_asks_for_it(
    sagas: Any, clock: Any, undo: Any
) -> None:
    run = start("saga")
    undo(sagas, run)
    press(run, "cancel")
    settle(clock)
    assert press(run, "compensate_run").verdict == "done"
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    versions = Operation.objects.filter(step="undo:charge").order_by("intent_version")
    assert [each.state for each in versions] == [State.FAILED_TERMINAL, State.SUCCEEDED]
    assert [sagas.effects.count(each.key) for each in versions] == [0, 1]


def test_an_undo_that_a_person_asked_for_after_the_end_is_retried_by_itself(sagas: Any, clock: Any) -> None:
    run = start("saga")
    settle(clock)
    charge = Operation.objects.get(step="charge")
    sagas.sees(found(charge.provider_operation_id, order="1002", amount=4200))
    sagas.answers(DOWN)
    assert press(charge, "compensate").verdict == "done"
    settle(clock)
    undo = Operation.objects.get(undo_of=charge)
    assert (undo.state, undo.attempts, sagas.effects.count(undo.key)) == (State.SUCCEEDED, 2, 1)
    assert Entry.objects.get(subject=str(undo.subject), seq=1).told("reason") == "as agreed"
    run.refresh_from_db()
    assert run.state == RunState.SUCCEEDED


def offered(subject: Any, action: str) -> str:
    fresh = type(subject)._default_manager.get(pk=subject.pk)
    return next(each.why for each in actions.previews(fresh, actor=OLGA) if each.action == action)


def test_what_a_person_decides_about_a_step_of_a_cancelled_run_sets_nothing_going_and_says_so(
    sagas: Any, clock: Any
) -> None:
    sagas.answers(applied("r-1"), LOST)
    run = start("saga")
    sweeping.sweep()
    charge = Operation.objects.get(step="charge")
    assert "The run goes on." in offered(charge, "resolve_applied")
    press(run, "cancel")
    assert "run" not in offered(charge, "resolve_applied")
    assert press(charge, "resolve_applied").message == "Recorded as applied, on your word."
    settle(clock)
    run.refresh_from_db()
    assert (run.state, len(sagas.calls)) == (RunState.CANCELLED, 2)


def test_an_undo_of_a_cancelled_run_that_a_person_calls_absent_on_proof_is_over_and_made_anew_if_asked_for(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("saga")
    is_repeated(sagas, run)
    press(run, "cancel")
    undo = Operation.objects.get(step="undo:charge")
    monkeypatch.setattr(deeds.View, "absence_proven", True)
    assert offered(undo, "resolve_not_applied") == "Absence is proven, and its run has ended: becomes failed for good."
    assert press(undo, "resolve_not_applied").verdict == "done"
    undo.refresh_from_db()
    assert (undo.state, undo.reason_code, undo.escalated_at) == (State.FAILED_TERMINAL, "run_ended", None)
    assert press(run, "compensate_run").verdict == "done"
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    assert Operation.objects.get(step="undo:charge", intent_version=2).state == State.SUCCEEDED


def test_the_database_itself_sends_no_undo_of_a_cancelled_walk_back(sagas: Any, clock: Any) -> None:
    run = start("saga")
    backs_off(sagas, run)
    undo = Operation.objects.get(step="undo:charge")
    run.refresh_from_db()
    transition.transition(run.subject, to="cancelled", version=run.version, fact=OLGA.fact("cancelled", reason="no"))
    clock.advance(60)
    with pytest.raises(transition.RunNotHeld):
        executor.claim_again(Operation.objects.get(pk=undo.pk), actor=OLGA)
    assert states()["undo:charge"] == State.FAILED_RETRYABLE


# Undos that a person stopped


@pytest.mark.parametrize("how", ["withdraw", "terminate"])
def test_an_undo_that_a_person_stopped_before_it_was_sent_is_tried_again_as_a_new_intent(
    sagas: Any, clock: Any, how: str
) -> None:
    run = start("saga")
    (is_held if how == "withdraw" else backs_off)(sagas, run)
    undo = Operation.objects.get(step="undo:charge")
    assert press(undo, how).verdict == "done"
    if how == "withdraw":
        release()
    settle(clock)
    run.refresh_from_db()
    assert (run.escalation_reason, run.waiting_for) == ("undo_incomplete", "stuck: charge; waiting: reserve")
    assert press(undo, "new_intent").verdict == "done"
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    versions = Operation.objects.filter(step="undo:charge").order_by("intent_version")
    assert [(each.state, sagas.effects.count(each.key)) for each in versions] == [("terminated", 0), ("succeeded", 1)]


def test_an_undo_that_a_person_stopped_while_it_was_unknown_is_not_made_anew(sagas: Any, clock: Any) -> None:
    run = start("saga")
    is_repeated(sagas, run)
    undo = Operation.objects.get(step="undo:charge")
    assert press(undo, "terminate").verdict == "done"
    assert press(undo, "new_intent").verdict == "refused"
    settle(clock)
    assert Operation.objects.filter(step="undo:charge").count() == 1


# Undos that wait for consent


def waits(sagas: Any) -> Run:
    """A run that walks back, and asks for consent to give the charge back."""
    sagas.answers(applied("r-1"), applied("c-1"), REFUSED)
    run = start("asked_back")
    sweeping.sweep()
    sweeping.sweep()
    assert states()["undo:charge"] == State.AWAITING_APPROVAL
    run.refresh_from_db()
    return run


def test_a_run_whose_undo_waits_for_consent_is_left_alone_and_says_so(sagas: Any, clock: Any) -> None:
    run = waits(sagas)
    assert (run.state, run.due_at, run.waiting_for) == (
        RunState.COMPENSATING, None, "waits for consent: charge; waiting: reserve",
    )  # fmt: skip
    assert [(each.text, each.waits) for each in saga(run).obstacles] == [
        ("The undo of charge waits for a person's consent.", ("reserve",))
    ]
    entries = Entry.objects.count()
    for _ in range(5):
        clock.advance(61)
        sweeping.sweep()
    assert Entry.objects.count() == entries


def test_an_undo_is_sent_once_its_consent_is_given_and_the_rest_follows(sagas: Any, clock: Any) -> None:
    run = waits(sagas)
    assert len(sagas.calls) == 3
    assert press(Approval.objects.get(), "approve").verdict == "done"
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    undos = Operation.objects.filter(undo_of__isnull=False)
    assert [sagas.effects.count(each.key) for each in undos] == [1, 1]


def test_an_undo_that_was_denied_stops_its_run_and_is_asked_for_again_as_a_new_intent(sagas: Any, clock: Any) -> None:
    run = waits(sagas)
    assert press(Approval.objects.get(), "deny").verdict == "done"
    settle(clock)
    run.refresh_from_db()
    assert (run.escalation_reason, run.waiting_for) == ("undo_incomplete", "stuck: charge; waiting: reserve")
    answer = press(Operation.objects.get(step="undo:charge"), "new_intent")
    assert (answer.verdict, "It waits for a person's consent." in answer.message) == ("done", True)
    settle(clock)
    assert Approval.objects.latest("id").state == ApprovalState.WAITING
    assert len(sagas.calls) == 3


def test_a_decision_that_comes_while_the_run_is_being_left_is_not_lost(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = leases.leave

    def late(*args: Any, **facts: Any) -> None:
        if facts["reason_code"] == "undo_awaits_approval":
            press(Approval.objects.get(), "deny")
        plain(*args, **facts)

    monkeypatch.setattr(leases, "leave", late)
    sagas.answers(applied("r-1"), applied("c-1"), REFUSED)
    run = start("asked_back")
    settle(clock)
    run.refresh_from_db()
    assert run.escalation_reason == "undo_incomplete"


def test_cancelling_the_run_takes_the_request_for_an_undo_back(sagas: Any, clock: Any) -> None:
    run = waits(sagas)
    assert press(run, "cancel").verdict == "done"
    assert Approval.objects.get().state == ApprovalState.WITHDRAWN
    settle(clock)
    assert (states()["undo:charge"], len(sagas.calls)) == (State.FAILED_TERMINAL, 3)


def test_who_asks_for_an_undo_does_not_agree_to_it_and_both_rules_hold(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sagas.actions, "keyed", replace(sagas.actions["keyed"], undo_second_person=True))
    start("asked_back")
    settle(clock)
    charge = Operation.objects.get(step="charge")
    sagas.sees(found(charge.provider_operation_id, order="1002", amount=4200))
    assert press(charge, "compensate").verdict == "done"
    asked = Approval.objects.get()
    assert set(asked.forbidden) >= {OLGA.id, AGENT.id}
    assert "two people" in asked.policy
    assert "one more person" in asked.policy
    assert press(asked, "approve").verdict == "refused"


def asked_back_by_hand(sagas: Any) -> Run:
    """A run that waits for its pivot, until Olga has what it applied undone: the charge only if somebody agrees."""
    sagas.answers(applied("r-1"), applied("c-1"), DOWN)
    run = start("asked_back")
    sweeping.sweep()
    sagas.sees(found("c-1", order="1002", amount=4200))
    assert press(run, "compensate_run").verdict == "done"
    return run


def test_who_had_a_run_walk_back_does_not_agree_to_what_it_undoes(sagas: Any, clock: Any) -> None:
    run = asked_back_by_hand(sagas)
    settle(clock)
    asked = Approval.objects.get()
    sent = len(sagas.calls)
    assert press(asked, "approve").verdict == "refused"
    assert do(asked, "approve", CLEO).verdict == "done"
    settle(clock)
    run.refresh_from_db()
    assert (run.state, len(sagas.calls)) == (RunState.COMPENSATED, sent + 2)


def test_who_had_a_run_walk_back_again_after_a_cancel_does_not_agree_and_who_did_before_may(
    sagas: Any, clock: Any
) -> None:
    run = asked_back_by_hand(sagas)
    settle(clock)
    first = Approval.objects.get()
    press(run, "cancel")
    assert do(run, "compensate_run", ROOT).verdict == "done"
    settle(clock)
    second = Approval.objects.exclude(pk=first.pk).get()
    assert do(second, "approve", ROOT).verdict == "refused"
    assert press(second, "approve").verdict == "done"


def test_of_two_who_had_a_run_walk_back_only_the_one_who_asked_is_kept_from_its_undos(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sagas.actions, "keyed", replace(sagas.actions["keyed"], undo_second_person=True))
    asked_back_by_hand(sagas)
    assert do(Approval.objects.get(), "approve", CLEO).verdict == "done"
    settle(clock)
    asked = Approval.objects.get(action="")
    assert (press(asked, "approve").verdict, do(asked, "approve", CLEO).verdict) == ("refused", "done")


def test_who_retries_an_undo_after_its_consent_was_over_does_not_agree_to_it_anew(sagas: Any, clock: Any) -> None:
    waits(sagas)
    first = Approval.objects.get()
    do(first, "approve", CLEO)
    put("stop", provider="clerk")
    sweeping.sweep()
    release()
    first.refresh_from_db()
    clock.set(first.use_by)
    assert do(Operation.objects.get(step="undo:charge"), "retry", ROOT).verdict == "refused"
    anew = Approval.objects.latest("id")
    assert (anew.state, anew.replaces_id) == (ApprovalState.WAITING, first.pk)
    assert (do(anew, "approve", ROOT).verdict, do(anew, "approve", CLEO).verdict) == ("refused", "done")


def test_who_had_one_effect_reversed_does_not_agree_to_sending_that_again(sagas: Any, clock: Any) -> None:
    start("saga")
    settle(clock)
    charge = Operation.objects.get(step="charge")
    sagas.sees(found(charge.provider_operation_id, order="1002", amount=4200))
    sagas.answers(LOST)
    assert press(charge, "compensate").verdict == "done"
    undo = Operation.objects.get(undo_of=charge)
    clock.set(undo.same_key_until)
    assert do(undo, "send_again", ROOT).verdict == "done"
    assert press(Approval.objects.get(), "approve").verdict == "refused"


# A declaration that was edited under its version


def edit_undos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo everything of `saga` by another action than its runs began with."""
    steps = (replace(step, undo=step.undo and replace(step.undo, action="natural")) for step in flows.SAGA.effects)
    monkeypatch.setattr(flows, "SAGA", replace(flows.SAGA, steps=tuple(steps)))
    registry.forget()


def test_one_effect_is_not_reversed_by_another_undo_than_its_run_began_with(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("saga")
    settle(clock)
    charge = Operation.objects.get(step="charge")
    sagas.sees(found(charge.provider_operation_id, order="1002", amount=4200))
    sent = len(sagas.calls)
    with monkeypatch.context() as patch:
        edit_undos(patch)
        answer = press(charge, "compensate")
        assert (answer.verdict, "Put that declaration back first" in answer.message) == ("refused", True)
    registry.forget()
    assert len(sagas.calls) == sent
    assert press(charge, "compensate").verdict == "done"
    assert Operation.objects.get(undo_of=charge).action == "keyed"


def test_a_run_is_not_set_on_its_way_back_by_other_undos_than_it_began_with(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sagas.answers(applied("r-1"), applied("c-1"), DOWN)
    run = start("saga")
    sweeping.sweep()
    press(run, "cancel")
    edit_undos(monkeypatch)
    answer = press(run, "compensate_run")
    assert (answer.verdict, "Put that declaration back first" in answer.message) == ("refused", True)
    run.refresh_from_db()
    assert run.state == RunState.CANCELLED


def test_what_was_recorded_is_retried_and_made_anew_as_it_was_whatever_the_declaration_says_now(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("saga")
    backs_off(sagas, run)
    edit_undos(monkeypatch)
    undo = Operation.objects.get(step="undo:charge")
    assert press(undo, "retry").verdict == "done"
    undo.refresh_from_db()
    assert (undo.state, undo.action, sagas.calls[-1].action) == (State.SUCCEEDED, "keyed", "keyed")
    settle(clock)
    run.refresh_from_db()
    assert (run.state, run.escalation_reason) == (RunState.COMPENSATING, "workflow_changed")


# Undos that cannot be sent


def test_an_undo_that_cannot_be_built_is_named_and_the_others_go_on(sagas: Any, clock: Any) -> None:
    flows.NOT_BUILT.add("charge")
    sagas.answers(applied("r-1"), applied("c-1"), REFUSED)
    run = start("fragile")
    settle(clock)
    run.refresh_from_db()
    assert states()["undo:reserve"] == State.SUCCEEDED
    assert (run.state, run.escalation_reason, run.waiting_for) == (
        RunState.COMPENSATING, "step_cannot_be_built", "stuck: charge",
    )  # fmt: skip
    assert [each.text for each in saga(run).obstacles] == [
        "The undo of charge could not be sent: the request of a step cannot be built."
    ]
    flows.NOT_BUILT.clear()
    assert press(run, "resume").verdict == "done"
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    assert [sagas.effects.count(each.key) for each in Operation.objects.filter(undo_of__isnull=False)] == [1, 1]


# Requests for consent on runs that ended


def test_a_run_that_failed_leaves_no_request_for_consent_behind(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_by_step(sagas, monkeypatch, {"charge": REFUSED})
    run = start("asked_apart")
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.FAILED
    assert states() == {"reserve": State.FAILED_TERMINAL, "charge": State.FAILED_TERMINAL}
    assert Approval.objects.get().state == ApprovalState.WITHDRAWN


def test_a_run_cancelled_while_it_reads_what_a_request_rests_on_asks_for_nothing(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("asked_first")

    def shows(call: Any) -> dict[str, str]:
        press(run, "cancel")
        return {"etag": "a"}

    monkeypatch.setattr(sagas, "precondition", shows, raising=False)
    sweeping.sweep()
    run.refresh_from_db()
    assert run.state == RunState.CANCELLED
    assert not Approval.objects.exists()
    assert states() == {}


def test_what_changed_under_a_consent_is_not_asked_anew_for_a_run_that_ended(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [{"etag": "a"}]
    monkeypatch.setattr(sagas, "precondition", lambda call: shown[-1], raising=False)
    run = start("asked_first")
    sweeping.sweep()
    assert press(Approval.objects.get(), "approve").verdict == "done"

    def changes(call: Any) -> dict[str, str]:
        press(run, "cancel")
        return {"etag": "b"}

    monkeypatch.setattr(sagas, "precondition", changes, raising=False)
    settle(clock)
    ship = Operation.objects.get(step="ship")
    assert (ship.state, ship.reason_code, ship.first_sent_at) == (State.FAILED_TERMINAL, "run_ended", None)
    assert not Approval.objects.filter(state=ApprovalState.WAITING).exists()
    assert sagas.calls == []


# Looking before a whole run is undone


def cancelled(sagas: Any, clock: Any) -> Run:
    """A run that was cancelled after two effects."""
    sagas.answers(applied("r-1"), applied("c-1"), DOWN)
    run = start("saga")
    sweeping.sweep()
    press(run, "cancel")
    settle(clock)
    return run


def test_what_was_taken_away_at_the_provider_meanwhile_is_not_undone_once_more(sagas: Any, clock: Any) -> None:
    run = cancelled(sagas, clock)
    sagas.sees(saw(Verdict.REMOVED), found("r-1"))
    sent = len(sagas.calls)
    answer = press(run, "compensate_run")
    assert (answer.verdict, "taken away already: charge." in answer.message) == ("refused", True)
    settle(clock)
    run.refresh_from_db()
    assert (run.state, len(sagas.calls)) == (RunState.CANCELLED, sent)


def test_what_still_stands_is_looked_at_once_and_undone(sagas: Any, clock: Any) -> None:
    run = cancelled(sagas, clock)
    sagas.sees(found("c-1"), found("r-1"))
    assert press(run, "compensate_run").verdict == "done"
    assert len(sagas.look_ups) == 2
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED


def test_a_run_of_a_workflow_that_is_not_known_here_is_not_set_on_its_way_back(
    sagas: Any, clock: Any, settings: Any
) -> None:
    run = cancelled(sagas, clock)
    settings.AFTERCALL_WORKFLOWS = []
    registry.forget()
    answer = press(run, "compensate_run")
    assert (answer.verdict, "how its steps are undone" in answer.message) == ("refused", True)
    run.refresh_from_db()
    assert run.state == RunState.CANCELLED


def test_a_run_that_walks_back_stops_when_its_pivot_turns_out_to_have_been_applied(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), applied("c-1"), LOST, DOWN)
    run = start("saga")
    sweeping.sweep()
    ship = Operation.objects.get(step="ship")
    assert press(ship, "resolve_not_applied").verdict == "done"
    sweeping.sweep()
    sweeping.sweep()
    assert states()["undo:charge"] == State.FAILED_RETRYABLE
    sagas.sees(found("s-1"))
    sent = len(sagas.calls)
    press(ship, "look_up")
    for _ in range(5):
        sweeping.sweep()
        clock.advance(30)
    run.refresh_from_db()
    assert (states()["ship"], len(sagas.calls)) == (State.SUCCEEDED, sent)
    assert (run.state, run.escalation_reason) == (RunState.COMPENSATING, "pivot_applied")
    assert [each.text for each in saga(run).obstacles] == [
        "The pivot was applied after all, and the way is forward only; nothing more is undone."
    ]
    assert press(run, "resume").verdict == "refused"
    assert press(run, "cancel").verdict == "done"


# The order desk itself, and its carrier's count


def carrier_did(claims: Any) -> list[str]:
    return [effect["kind"] for effect in claims.world.carrier.effects(order="1002")]


@pytest.mark.processes
def test_at_the_order_desk_nothing_is_undone_after_a_cancel_and_each_undo_once_when_a_person_asks(
    claims: Any,
) -> None:
    claims.world.pay.fault("reject", order="1002", status=422)
    claims.world.carrier.fault("unavailable", action="pickup.cancel")
    run = runs.start("damaged_item", tenant="acme", workflow_id="T-77", input=CLAIM, actor=AGENT)
    runs.advance(run.pk)
    runs.advance(run.pk)
    assert states()["undo:schedule_pickup"] == State.FAILED_RETRYABLE
    assert press(run, "cancel").verdict == "done"
    undo = Operation.objects.get(step="undo:schedule_pickup")
    assert (undo.state, undo.reason_code, undo.due_at) == (State.FAILED_TERMINAL, "run_cancelled", None)
    arrived = len(claims.world.carrier.requests())
    for _ in range(10):
        claims.clock.advance(minutes=10)
        claims.come_to_rest()
    run.refresh_from_db()
    assert (run.state, len(claims.world.carrier.requests())) == (RunState.CANCELLED, arrived)
    assert carrier_did(claims) == ["label", "pickup"]
    assert press(run, "compensate_run").verdict == "done"
    claims.come_to_rest()
    claims.check()
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    assert carrier_did(claims) == ["label", "pickup", "pickup.cancel", "label.void"]
    assert claims.world.pay.count() == 0
