"""A run that fails half-way is walked back: what was applied is reversed, once, in order, or a person is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.test import override_settings

from examples.order_desk.workflow import DAMAGED_ITEM
from reconciliation import actions, checks, deeds, executor, leases, registry, run_deeds, runs, sweeping
from reconciliation.actions import Press
from reconciliation.models import Chosen, Operation, Run
from reconciliation.progress import cannot_be_undone
from reconciliation.providers.base import OutcomeUnknown, Rejected, Unavailable
from reconciliation.soundness import problems
from reconciliation.states import RunState, State
from reconciliation.workflows import Step, Undo, Workflow
from tests import cast
from tests import saga_workflows as flows
from tests.ledger import changes_without_audit
from tests.processes import wait_until
from tests.scripted import AGENT, OLGA, absent, applied, cannot_tell, found
from tests.test_same_identity import Crowd

REFUSED = Rejected("no", status=402)
DOWN = Unavailable("later", status=503)
LOST = OutcomeUnknown("no answer came")


@pytest.fixture
def sagas(clerk: Any, settings: Any, superuser_connection: Any) -> Any:
    names = [name for name, thing in vars(flows).items() if isinstance(thing, Workflow)]
    settings.AFTERCALL_WORKFLOWS = [f"tests.saga_workflows.{name}" for name in (*names, "REFUSED")]
    registry.forget()
    flows.PROPOSALS.clear()
    flows.ASKED.clear()
    yield clerk
    assert changes_without_audit(superuser_connection) == []


def start(name: str, *, order: str = "1002", workflow_id: str = "w1") -> Run:
    return runs.start(name, tenant="acme", workflow_id=workflow_id, input={"order": order}, actor=AGENT)


def settle(clock: Any, *, rounds: int = 60, seconds: float = 30) -> None:
    """Sweep and let time pass until nothing is due any more."""
    for _ in range(rounds):
        if not sweeping.sweep():
            if not (Operation.objects.exclude(due_at=None).exists() or Run.objects.exclude(due_at=None).exists()):
                return
            clock.advance(seconds)
    raise AssertionError("it does not come to rest")


def states() -> dict[str, str]:
    return dict(Operation.objects.order_by("id").values_list("step", "state"))


def press(subject: Any, action: str, **inputs: str) -> actions.Answer:
    fresh = type(subject)._default_manager.get(pk=subject.pk)
    return actions.act(
        fresh, Press(action=action, token=uuid4(), version=fresh.version, reason="as agreed", inputs=inputs), actor=OLGA
    )


def answer_by_step(clerk: Any, monkeypatch: pytest.MonkeyPatch, raised: dict[str, Exception]) -> None:
    """Have the calls of these steps raise; all others are applied."""
    plain = clerk.perform

    def perform(call: Any) -> Any:
        step = Operation.objects.get(key=call.key).step
        if step in raised:
            raise raised[step]
        return plain(call)

    monkeypatch.setattr(clerk, "perform", perform)


# The order desk itself, in the sandbox


@pytest.fixture
def desk(ledger_db: Any, world: Any, settings: Any) -> Any:
    settings.AFTERCALL_PROVIDERS = [f"examples.order_desk.providers.{n}" for n in ("pay", "carrier", "mail", "tickets")]
    settings.AFTERCALL_WORKFLOWS = ["examples.order_desk.workflow.DAMAGED_ITEM"]
    registry.forget()
    yield world
    registry.forget()


CLAIM = {
    "order": "1002", "ticket": "T-77", "amount": 4200, "currency": "USD", "card": "card_4242", "customer": "Ada Fenn",
    "email": "ada@example.com", "address": "1 Mill Lane", "window": "tomorrow 9-12", "service": "return",
}  # fmt: skip


def test_a_claim_whose_refund_is_refused_leaves_no_label_and_no_pickup(desk: Any, clock: Any) -> None:
    desk.pay.fault("reject", order="1002", status=422)
    run = runs.start("damaged_item", tenant="acme", workflow_id="T-77", input=CLAIM, actor=AGENT)
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    assert list(states()) == [
        "create_label", "schedule_pickup", "issue_refund", "undo:schedule_pickup", "undo:create_label",
    ]  # fmt: skip
    assert desk.pay.count(order="1002") == 0


def test_the_order_desk_is_declared_soundly() -> None:
    assert DAMAGED_ITEM.pivot is not None
    assert list(problems(DAMAGED_ITEM, lambda provider, action: "keyed")) == []  # type: ignore[arg-type, return-value]


# Walking back


@pytest.mark.case("G4")
def test_effects_are_reversed_newest_first_and_each_once(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), applied("c-1"), REFUSED)
    run = start("saga")
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    assert list(states()) == ["reserve", "charge", "ship", "undo:charge", "undo:reserve"]
    assert [call.request["id"] for call in sagas.calls[3:]] == ["c-1", "r-1"]


@pytest.mark.case("G4")
def test_an_undo_that_fails_twice_and_then_works_holds_the_next_one_back(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), applied("c-1"), REFUSED, DOWN, DOWN)
    run = start("saga")
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    undo = Operation.objects.get(step="undo:charge")
    assert (undo.attempts, Operation.objects.get(step="undo:reserve").attempts) == (3, 1)
    assert undo.pk < Operation.objects.get(step="undo:reserve").pk


@pytest.mark.case("G1", "G4")
def test_an_undo_that_never_works_is_named_and_what_waits_for_it_too(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), applied("c-1"), REFUSED, DOWN, DOWN, DOWN)
    run = start("saga")
    settle(clock)
    run.refresh_from_db()
    assert (run.state, run.escalation_reason) == (RunState.COMPENSATING, "undo_incomplete")
    assert run.waiting_for == "stuck: charge; waiting: reserve"
    undo = Operation.objects.get(step="undo:charge")
    assert (undo.state, undo.escalation_reason) == (State.FAILED_RETRYABLE, "budget_spent")
    assert "undo:reserve" not in states()


@pytest.mark.case("G1")
def test_a_person_finishes_an_undo_and_the_rest_follows_by_itself(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), applied("c-1"), REFUSED, DOWN, DOWN, DOWN)
    run = start("saga")
    settle(clock)
    undo = Operation.objects.get(step="undo:charge")
    assert press(undo, "retry").verdict == "done"
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    assert sagas.effects.count(undo.key) == 1
    assert sagas.effects.count(Operation.objects.get(step="undo:reserve").key) == 1


UNDONE_ELSEWHERE = flows.flow(
    "undone_elsewhere",
    Step(
        name="stamp", provider="clerk", action="keyed", request=flows.order,
        undo=Undo(provider="archive", action="strike", request=flows.undone),
    ),
)  # fmt: skip


def test_a_worker_without_the_handler_of_an_undo_leaves_the_run_to_another(sagas: Any, settings: Any) -> None:
    settings.AFTERCALL_WORKFLOWS = ["tests.test_sagas.UNDONE_ELSEWHERE"]
    registry.forget()
    run = start("undone_elsewhere")
    sweeping.sweep()
    run.refresh_from_db()
    assert (run.state, run.escalated_at) == (RunState.PENDING, None)
    assert run.waiting_for.startswith("handler: no provider 'archive' is configured here")
    assert sagas.calls == []


@pytest.mark.case("G1")
def test_a_run_that_walks_back_goes_on_by_itself_when_its_stuck_undo_is_found_after_all(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), applied("c-1"), REFUSED, LOST)
    run = start("saga")
    for _ in range(3):
        sweeping.sweep()
    executor.call_a_person(Operation.objects.get(step="undo:charge"), "no_conclusive_answer")
    settle(clock)
    run.refresh_from_db()
    assert (run.state, run.escalation_reason) == (RunState.COMPENSATING, "undo_incomplete")
    sagas.sees(found("u-1", order="1002", amount=4200))
    assert press(Operation.objects.get(step="undo:charge"), "look_up").verdict == "done"
    settle(clock)
    run.refresh_from_db()
    assert (run.state, run.escalated_at) == (RunState.COMPENSATED, None)


def test_a_run_is_not_stopped_for_one_branch_while_automation_goes_on_with_another(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def perform(call: Any) -> Any:
        raise LOST if Operation.objects.get(key=call.key).step == "reserve" else DOWN

    monkeypatch.setattr(sagas, "perform", perform)
    run = start("apart")
    sweeping.sweep()
    executor.call_a_person(Operation.objects.get(step="reserve"), "no_conclusive_answer")
    sweeping.sweep()
    run.refresh_from_db()
    assert states() == {"reserve": State.AMBIGUOUS, "charge": State.FAILED_RETRYABLE}
    assert (run.state, run.escalated_at) == (RunState.UNCERTAIN, None)


def test_undos_that_do_not_wait_for_each_other_go_on_past_a_stuck_one(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = sagas.perform

    def perform(call: Any) -> Any:
        operation = Operation.objects.get(key=call.key)
        if operation.step == "ship":
            raise REFUSED
        if operation.step == "undo:charge":
            raise DOWN
        return plain(call)

    monkeypatch.setattr(sagas, "perform", perform)
    run = start("apart")
    settle(clock)
    run.refresh_from_db()
    assert (run.state, run.escalation_reason) == (RunState.COMPENSATING, "undo_incomplete")
    assert states()["undo:reserve"] == State.SUCCEEDED
    assert run.waiting_for == "stuck: charge"


def test_an_effect_that_cannot_be_undone_leaves_the_run_to_a_person(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("s-1"), REFUSED)
    run = start("lasting")
    settle(clock)
    run.refresh_from_db()
    assert (run.state, run.escalation_reason, run.waiting_for) == (
        RunState.COMPENSATING, "undo_incomplete", "stuck: stamp",
    )  # fmt: skip


def test_what_has_no_undo_is_named_before_a_run_starts_with_the_reason_or_that_there_is_none(sagas: Any) -> None:
    assert cannot_be_undone(flows.LASTING) == [("stamp", "a stamp stays"), ("ship", "no undo is declared")]
    assert cannot_be_undone(flows.LOOKED) == [("ship", "no undo is declared")]


def test_what_cannot_be_undone_does_not_keep_earlier_steps_from_being_undone(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), applied("c-1"), applied("s-1"), REFUSED)
    run = start("stamped")
    settle(clock)
    run.refresh_from_db()
    assert [call.request.get("id") for call in sagas.calls[4:]] == ["c-1", "r-1"]
    assert (run.state, run.escalation_reason) == (RunState.COMPENSATING, "undo_incomplete")
    assert run.waiting_for == "stuck: stamp"


def test_an_undo_that_names_what_cannot_be_undone_waits_for_a_person(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), applied("c-1"), applied("s-1"), REFUSED)
    run = start("stamp_first")
    settle(clock)
    run.refresh_from_db()
    assert not [step for step in states() if step.startswith("undo:")]
    assert run.waiting_for == "stuck: stamp; waiting: charge, reserve"
    cast.run_stands(run, None, waived=["stamp"], escalated_at=None, escalation_reason="")
    runs.advance(run.pk)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED


@pytest.mark.parametrize(("name", "steps"), [("ring_of_two", "b, a"), ("ring_of_three", "c, b, a")])
def test_undos_that_wait_for_each_other_are_marked_for_a_person(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch, name: str, steps: str
) -> None:
    answer_by_step(sagas, monkeypatch, {"ship": REFUSED})
    run = start(name)
    settle(clock)
    run.refresh_from_db()
    assert (run.state, run.escalation_reason) == (RunState.COMPENSATING, "undo_incomplete")
    assert run.waiting_for == f"waiting: {steps}"
    (resume,) = [each for each in actions.previews(run, actor=OLGA) if each.action == "resume"]
    assert not resume.allowed
    cast.run_stands(run, None, waived=["a"], escalated_at=None, escalation_reason="")
    runs.advance(run.pk)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED


def test_a_step_beside_the_pivot_that_fails_before_it_walks_back(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_by_step(sagas, monkeypatch, {"note": REFUSED})
    run = start("aside")
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    assert "ship" not in states()
    assert states()["undo:reserve"] == State.SUCCEEDED


def test_a_step_beside_a_pivot_that_is_refused_is_undone_like_those_before_it(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_by_step(sagas, monkeypatch, {"ship": REFUSED})
    run = start("aside")
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    assert {step for step in states() if step.startswith("undo:")} == {"undo:reserve", "undo:note"}


def test_after_the_pivot_the_way_is_forward_only(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), applied("c-1"), applied("s-1"), REFUSED)
    run = start("saga")
    settle(clock)
    run.refresh_from_db()
    assert (run.state, run.escalation_reason) == (RunState.PENDING, "step_failed_after_pivot")
    assert not [step for step in states() if step.startswith("undo:")]
    assert not dict(_allowed(run))["compensate_run"]


def test_a_step_whose_time_ends_while_it_waits_walks_back_and_its_undo_waits_for_a_person(
    sagas: Any, clock: Any
) -> None:
    sagas.answers(applied("r-1"), DOWN, DOWN)
    run = start("hasty")
    settle(clock)
    run.refresh_from_db()
    assert states() == {"reserve": "succeeded", "ship": "failed_terminal", "undo:reserve": "failed_retryable"}
    assert Operation.objects.get(step="ship").reason_code == "time_spent"
    assert (run.state, run.escalation_reason, len(sagas.calls)) == (RunState.COMPENSATING, "undo_incomplete", 3)
    undo = Operation.objects.get(step="undo:reserve")
    assert undo.escalation_reason == "time_spent"
    assert press(undo, "retry").verdict == "done"
    settle(clock)
    assert Run.objects.get().state == RunState.COMPENSATED


def test_a_step_after_the_pivot_whose_time_ends_while_it_waits_calls_a_person(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), applied("s-1"), DOWN)
    run = start("hasty")
    settle(clock)
    run.refresh_from_db()
    assert (run.state, run.escalation_reason, len(sagas.calls)) == (RunState.PENDING, "step_needs_person", 3)
    tell = Operation.objects.get(step="tell")
    assert (tell.state, tell.escalation_reason) == (State.FAILED_RETRYABLE, "time_spent")
    assert press(tell, "retry").verdict == "done"
    settle(clock)
    assert Run.objects.get().state == RunState.SUCCEEDED


def _offered(step: str, action: str) -> str:
    operation = Operation.objects.get(step=step)
    (preview,) = [each for each in actions.previews(operation, actor=OLGA) if each.action == action]
    return preview.why


def test_calling_a_step_not_applied_says_first_which_way_its_run_then_takes(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), applied("c-1"), LOST, LOST)
    start("saga")
    sweeping.sweep()
    assert "may undo what it applied before" in _offered("ship", "resolve_not_applied")
    press(Operation.objects.get(step="ship"), "resolve_applied")
    sweeping.sweep()
    assert "waits for a person: the way is forward only" in _offered("tell", "resolve_not_applied")


def test_an_unknown_pivot_blocks_both_ways(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), applied("c-1"), LOST)
    run = start("saga")
    sweeping.sweep()
    run.refresh_from_db()
    assert run.state == RunState.UNCERTAIN
    assert press(run, "compensate_run").verdict == "refused"
    assert not [step for step in states() if step.startswith("undo:")]


def test_a_pivot_proven_absent_is_tried_once_more_and_then_a_person_decides(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), applied("c-1"), LOST, LOST)
    sagas.sees(absent())
    run = start("saga")
    settle(clock)
    run.refresh_from_db()
    assert states()["ship"] == State.FAILED_RETRYABLE
    assert Operation.objects.get(step="ship").escalation_reason == "absent_again"
    assert not [step for step in states() if step.startswith("undo:")]


def test_a_failure_while_another_branch_is_unknown_waits_for_it_before_it_undoes(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = sagas.perform

    def perform(call: Any) -> Any:
        step = Operation.objects.get(key=call.key).step
        if step == "reserve":
            raise LOST
        if step == "charge":
            raise REFUSED
        return plain(call)

    monkeypatch.setattr(sagas, "perform", perform)
    run = start("apart")
    sweeping.sweep()
    run.refresh_from_db()
    assert run.state == RunState.UNCERTAIN
    monkeypatch.setattr(sagas, "perform", plain)
    sagas.sees(found("r-9", order="1002", amount=4200))
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    assert states() == {
        "reserve": State.SUCCEEDED, "charge": State.FAILED_TERMINAL, "undo:reserve": State.SUCCEEDED,
    }  # fmt: skip


# Decisions


def test_a_decision_is_asked_for_once_and_reused_on_every_replay(sagas: Any, clock: Any) -> None:
    flows.PROPOSALS[:] = [{"amount": 7, "secret": "CANARY"}]
    sagas.answers(DOWN)
    run = start("decided")
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.SUCCEEDED
    assert len(flows.ASKED) == 1
    assert {call.request["amount"] for call in sagas.calls} == {7}
    stored = Chosen.objects.get()
    assert (stored.value_shown, "CANARY" in stored.value_sealed) == ('{"amount":7}', False)


def test_an_invalid_proposal_is_kept_masked_and_spends_a_budget_of_its_own(sagas: Any, clock: Any) -> None:
    flows.PROPOSALS[:] = [{"amount": -1, "secret": "CANARY"}, {"amount": 8}]
    run = start("decided")
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.SUCCEEDED
    refused = Chosen.objects.get(valid=False)
    assert refused.problem == "amount: greater_than"
    assert Operation.objects.get(step="pay").attempts == 1


def test_without_a_valid_proposal_a_person_decides_whether_to_ask_again(sagas: Any, clock: Any) -> None:
    flows.PROPOSALS[:] = [{"amount": 0}, ValueError, {"amount": 9}]
    run = start("decided")
    settle(clock)
    run.refresh_from_db()
    assert run.escalation_reason == "no_valid_proposal"
    assert sagas.calls == []
    assert press(run, "choose_again").verdict == "done"
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.SUCCEEDED
    assert Chosen.objects.get(valid=True).version == 2


def test_a_decision_from_which_steps_followed_is_not_made_afresh(sagas: Any, clock: Any) -> None:
    flows.PROPOSALS[:] = [{"amount": 7}]
    sagas.answers(LOST)
    run = start("decided")
    sweeping.sweep()
    answer = press(run, "choose_again")
    assert answer.verdict == "refused"
    assert "followed" in answer.message


# Cancelling, locks, caps


def test_a_cancelled_run_sends_nothing_more_and_says_what_there_is(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), DOWN)
    run = start("saga")
    sweeping.sweep()
    answer = press(run, "cancel")
    assert answer.verdict == "done"
    assert "Applied: reserve (r-1)." in answer.message
    calls = len(sagas.calls)
    settle(clock)
    run.refresh_from_db()
    assert (run.state, len(sagas.calls)) == (RunState.CANCELLED, calls)
    assert states()["charge"] == State.FAILED_TERMINAL


def test_a_cancelled_run_is_undone_only_when_a_person_asks_for_it(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), DOWN)
    run = start("saga")
    sweeping.sweep()
    press(run, "cancel")
    settle(clock)
    offered = next(p for p in actions.previews(Run.objects.get(pk=run.pk), actor=OLGA) if p.action == "compensate_run")
    assert (offered.label, offered.button) == ("Undo what was applied", "Undo what was applied")
    assert press(run, "compensate_run").verdict == "done"
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    assert states()["undo:reserve"] == State.SUCCEEDED


def test_what_was_only_read_counts_neither_as_applied_nor_as_not_to_be_undone(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("l-1"), DOWN)
    run = start("looked")
    sweeping.sweep()
    previews = {each.action: each for each in actions.previews(Run.objects.get(pk=run.pk), actor=OLGA)}
    assert not previews["compensate_run"].allowed
    assert "Nothing was applied; there is nothing to undo." in previews["compensate_run"].why
    answer = press(run, "cancel")
    assert "Nothing was applied." in answer.message
    assert "Cannot be undone" not in answer.message
    told = run_deeds.account(Run.objects.get(pk=run.pk))
    assert [operation.step for operation in told.not_applied] == ["ship"]


def test_one_run_at_a_time_works_on_what_a_lock_names(sagas: Any, clock: Any) -> None:
    sagas.answers(LOST)
    first = start("locked", workflow_id="w1")
    sweeping.sweep()
    second, other = start("locked", workflow_id="w2"), start("locked", workflow_id="w3", order="1003")
    sweeping.sweep()
    second.refresh_from_db()
    other.refresh_from_db()
    assert (second.state, second.waiting_for) == (RunState.PENDING, "lock: held by run w1")
    assert other.state == RunState.SUCCEEDED
    press(first, "cancel")  # an unknown operation keeps the lock
    sweeping.sweep()
    clock.advance(120)
    sweeping.sweep()
    second.refresh_from_db()
    assert second.state == RunState.PENDING
    sagas.sees(found("r-9", order="1002", amount=4200))
    settle(clock)
    second.refresh_from_db()
    assert second.state == RunState.SUCCEEDED


def test_a_run_names_the_newest_holder_of_its_lock_whatever_a_worker_lacks(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sweep_without_handler() -> None:
        def lacks(workflow: Workflow) -> float:
            raise registry.Unregistered("no provider 'a'")

        with monkeypatch.context() as there:
            there.setattr(leases, "longest", lacks)
            clock.advance(61)
            runs.advance(waits.pk)

    def said() -> tuple[str, int]:
        waits.refresh_from_db()
        return waits.waiting_for, waits.version

    long = "w" * 200
    sagas.answers(LOST)
    first = start("locked", workflow_id=long)
    sweeping.sweep()
    waits = start("locked", workflow_id="w2")
    sweep_without_handler()
    assert said()[0] == "handler: no provider 'a'"
    runs.advance(waits.pk)
    by_first = said()
    assert by_first[0] == f"lock: held by run {long}"[:200]
    for _ in range(3):
        sweep_without_handler()
        runs.advance(waits.pk)
    assert said() == by_first
    sagas.sees(found("r-9", order="1002", amount=4200))
    press(Operation.objects.get(step="ship"), "look_up")
    assert runs.advance(first.pk).state == RunState.SUCCEEDED
    sweep_without_handler()
    assert said()[0] == "handler: no provider 'a'", "nobody has the lock any more"
    sagas.answers(LOST)
    runs.advance(start("locked", workflow_id="w3").pk)
    runs.advance(waits.pk)
    assert said()[0] == "lock: held by run w3"


def test_an_unknown_step_that_was_stopped_keeps_the_lock_until_its_absence_is_proven(sagas: Any, clock: Any) -> None:
    sagas.answers(LOST)
    first = start("locked", workflow_id="w1")
    sweeping.sweep()
    ship = Operation.objects.get(step="ship")
    assert "Other runs on order:1002 go on waiting" in _told(ship, "terminate")
    press(ship, "terminate")
    press(first, "cancel")
    second = start("locked", workflow_id="w2")
    sweeping.sweep()
    second.refresh_from_db()
    assert second.waiting_for == "lock: held by run w1"
    sagas.sees(absent())
    for _ in range(2):
        clock.advance(minutes=30)
        press(ship, "look_up")
    ship.refresh_from_db()
    assert (ship.state, ship.unknown_attempts) == (State.TERMINATED, [])
    settle(clock)
    second.refresh_from_db()
    assert second.state == RunState.SUCCEEDED


def test_one_step_of_an_ended_run_is_not_undone_while_another_run_has_its_lock(sagas: Any, clock: Any) -> None:
    ended = start("kept_apart", workflow_id="w1")
    settle(clock)
    sagas.answers(LOST)
    busy = start("locked", workflow_id="w2")
    sweeping.sweep()
    reserve = Operation.objects.get(step="reserve")
    sagas.sees(found(reserve.provider_operation_id, order="1002", amount=4200))
    assert "Another run works on the same thing" in press(reserve, "compensate").message
    assert "undo:reserve" not in states()
    sagas.sees(found("s-9", order="1002", amount=4200))
    settle(clock)
    busy.refresh_from_db()
    ended.refresh_from_db()
    assert (ended.state, busy.state) == (RunState.SUCCEEDED, RunState.SUCCEEDED)
    sagas.sees(found(reserve.provider_operation_id, order="1002", amount=4200))
    assert press(reserve, "compensate").verdict == "done"
    assert states()["undo:reserve"] == State.SUCCEEDED
    assert not Run.objects.filter(lock_held=True).exists()


def test_an_unknown_undo_of_an_ended_run_keeps_others_from_the_same_thing(sagas: Any, clock: Any) -> None:
    start("kept_apart", workflow_id="w1")
    settle(clock)
    reserve = Operation.objects.get(step="reserve")
    sagas.sees(found(reserve.provider_operation_id, order="1002", amount=4200), cannot_tell())
    sagas.answers(LOST)
    press(reserve, "compensate")
    assert states()["undo:reserve"] == State.AMBIGUOUS
    other = start("locked", workflow_id="w2")
    sweeping.sweep()
    other.refresh_from_db()
    assert other.waiting_for == "lock: held by run w1"
    sagas.sees(found("u-1", order="1002", amount=4200))
    settle(clock)
    other.refresh_from_db()
    assert other.state == RunState.SUCCEEDED


def test_a_run_stops_for_a_person_when_it_has_spent_what_it_may(sagas: Any, clock: Any) -> None:
    sagas.answers(replace(applied("r-1"), cost=100))
    run = start("capped")
    settle(clock)
    run.refresh_from_db()
    assert run.escalation_reason == "run_spend_cap"
    assert list(states()) == ["reserve"]


def test_branches_do_not_wait_for_each_other(sagas: Any, clock: Any) -> None:
    sagas.answers(LOST)
    start("apart")
    sweeping.sweep()
    assert sorted(states().values()) == [State.AMBIGUOUS, State.SUCCEEDED]
    assert "ship" not in states()


def test_a_run_that_waits_for_a_look_up_beyond_its_time_is_shown_and_nothing_more_of_it_is_sent(
    sagas: Any, clock: Any
) -> None:
    sagas.answers(applied("r-1"), *[LOST] * 40)
    run = start("timed")
    sweeping.sweep()
    for _ in range(11):
        clock.advance(60)
        sweeping.sweep()
    sent = len(sagas.calls)
    run.refresh_from_db()
    assert sent > 2
    assert (run.state, run.escalation_reason) == (RunState.UNCERTAIN, "run_time_spent")
    for _ in range(11):
        clock.advance(60)
        sweeping.sweep()
    assert len(sagas.calls) == sent
    sagas.sees(found("s-1", order="1002", amount=4200))
    press(Operation.objects.get(step="ship"), "look_up")
    settle(clock)
    run.refresh_from_db()
    assert (run.state, run.escalated_at) == (RunState.SUCCEEDED, None)  # that was the last one


# Single operations


def test_one_effect_of_an_ended_run_is_reversed_by_itself_once(sagas: Any, clock: Any) -> None:
    run = start("saga")
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.SUCCEEDED
    charge = Operation.objects.get(step="charge")
    sagas.sees(found(charge.provider_operation_id, order="1002", amount=4200))
    assert press(charge, "compensate").verdict == "done"
    undo = Operation.objects.get(undo_of=charge)
    assert (undo.state, undo.step) == (State.SUCCEEDED, "undo:charge")
    assert press(charge, "compensate").verdict == "refused"
    assert sagas.effects.count(undo.key) == 1


def test_what_the_provider_does_not_show_any_more_is_not_reversed(sagas: Any, clock: Any) -> None:
    start("saga")
    settle(clock)
    sagas.sees(absent())
    charge = Operation.objects.get(step="charge")
    assert press(charge, "compensate").verdict == "refused"
    assert not Operation.objects.filter(undo_of=charge).exists()


def test_a_step_that_failed_for_good_after_the_pivot_goes_on_as_a_new_intent(sagas: Any, clock: Any) -> None:
    sagas.answers(applied("r-1"), applied("c-1"), applied("s-1"), REFUSED)
    run = start("saga")
    settle(clock)
    told = Operation.objects.get(step="tell")
    assert press(told, "new_intent").verdict == "done"
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.SUCCEEDED
    versions = Operation.objects.filter(step="tell").order_by("intent_version")
    assert [(o.intent_version, o.state) for o in versions] == [(1, "failed_terminal"), (2, "succeeded")]
    assert len({o.key for o in versions}) == 2


def test_of_two_people_who_ask_for_a_new_intent_at_once_both_are_answered_and_one_is_made(
    sagas: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refers to the run first and then lets it go on: two that read it at first would wait for each other."""
    sagas.answers(applied("r-1"), applied("c-1"), applied("s-1"), REFUSED)
    run = start("saga")
    settle(clock)
    plain, tell = deeds.let_run_go_on, Operation.objects.get(step="tell")

    def once_the_other_waits(*facts: Any) -> None:
        wait_until(lambda: waiting_for_locks() == 1)
        plain(*facts)

    monkeypatch.setattr(deeds, "let_run_go_on", once_the_other_waits)
    crowd = Crowd(2)
    answers = crowd.all_at_once(lambda: press(tell, "new_intent"))
    crowd.leave()
    assert sorted(str(getattr(answer, "verdict", answer)) for answer in answers) == ["done", "refused"]
    settle(clock)
    run.refresh_from_db()
    assert (run.state, Operation.objects.filter(step="tell").count()) == (RunState.SUCCEEDED, 2)


def waiting_for_locks() -> int:
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with connection.cursor() as cursor:
        cursor.execute(waits)
        return int(cursor.fetchone()[0])


# Declarations


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (flows.flow("w"), "it has no steps"),
        (flows.flow("w", flows.SHIP, flows.SHIP), "names must be unique"),
        (flows.flow("w", flows.SHIP, flows.reversible("x", kind=flows.StepKind.PIVOT)), "more than one step is"),
        (flows.flow("w", flows.reversible("a", after=("b",)), flows.reversible("b")), "not declared before it"),
        (flows.flow("w", flows.Step(name="a", provider="clerk", action="keyed", request=flows.order), flows.SHIP),
         "give it an undo"),
        (flows.flow("w", flows.reversible("a", cannot_undo="no"), flows.SHIP), "one of both is wrong"),
        (flows.flow("w", flows.Step(name="a", provider="x", action="y", request=flows.order)), "no configured"),
    ],
)  # fmt: skip
def test_a_fault_in_a_declaration_is_found_at_start(sagas: Any, broken: Workflow, said: str) -> None:
    assert any(said in problem for problem in problems(broken, checks._repeat_of))


def test_a_broken_declaration_is_a_system_check_error(sagas: Any) -> None:
    with override_settings(AFTERCALL_WORKFLOWS=["tests.saga_workflows.NOWHERE"]):
        registry.forget()
        (error,) = checks.declarations(None)
        assert error.id == "reconciliation.E001"
    registry.forget()
    found = [error.msg for error in checks.declarations(None) if error.id != "reconciliation.E002"]
    assert {said.partition(" version")[0] for said in found} == {"Workflow ring_of_two", "Workflow ring_of_three"}


def _told(operation: Operation, action: str) -> str:
    previews = actions.previews(Operation.objects.get(pk=operation.pk), actor=OLGA)
    return next(preview.why for preview in previews if preview.action == action)


def _allowed(run: Run) -> list[tuple[str, bool]]:
    fresh = Run.objects.get(pk=run.pk)
    return [(preview.action, preview.allowed) for preview in actions.previews(fresh, actor=OLGA)]


def test_what_a_lost_answer_turns_out_to_have_cost_counts_towards_the_runs_cap(sagas: Any, clock: Any) -> None:
    sagas.answers(LOST)
    sagas.sees(replace(found("r-1", order="1002", amount=4200), cost=100))
    run = start("capped")
    settle(clock)
    run.refresh_from_db()
    assert run.escalation_reason == "run_spend_cap"
    assert states() == {"reserve": State.SUCCEEDED}
