"""A decision is asked for once: beside other steps, by a slow model, by a worker that dies while it asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from threading import Event
from typing import Any

import pytest

from console import checks
from reconciliation import registry, sweeping, workers
from reconciliation.models import Chosen, JournalEntry, Run
from reconciliation.providers.base import Json
from reconciliation.soundness import problems
from reconciliation.states import RunState
from reconciliation.workflows import Choice, Facts, Step, StepKind
from tests.saga_workflows import PATIENT, Plan, flow, order, reversible
from tests.scripted import applied
from tests.test_sagas import press, settle, start

ASKED: list[int] = []
BEGUN, SENT = Event(), Event()
WAIT = 30.0  # seconds, for the other thread
MODEL: list[Callable[[], Any]] = []  # what the model does, each time that it is asked


def ask(facts: Facts) -> Any:
    ASKED.append(len(ASKED) + 1)
    return MODEL.pop(0)()


def _once_the_model_is_asked(facts: Facts) -> Json:
    assert BEGUN.wait(WAIT)
    return order(facts)


PLAN = Choice(name="plan", choose=ask, schema=Plan, shown=("amount",), proposals=3, after=())
PAY = Step(name="pay", provider="clerk", action="keyed", kind=StepKind.PIVOT, request=order, retry=PATIENT)
SLOW = flow("slow", PLAN, PAY)
BESIDE = flow(
    "beside", PLAN, replace(reversible("reserve", after=()), request=_once_the_model_is_asked),
    replace(PAY, after=("plan", "reserve")),
)  # fmt: skip


@pytest.fixture
def model(clerk: Any, settings: Any) -> Any:
    settings.AFTERCALL_WORKFLOWS = [f"tests.test_decisions.{name}" for name in ("SLOW", "BESIDE")]
    registry.forget()
    for kept in (ASKED, MODEL):
        kept.clear()
    for event in (BEGUN, SENT):
        event.clear()
    return clerk


def test_a_short_step_beside_a_slow_model_leaves_the_lease_to_the_model(
    model: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(model.actions, "keyed", replace(model.actions["keyed"], timeout=timedelta(seconds=5)))

    def thinks() -> Json:
        BEGUN.set()
        assert SENT.wait(WAIT)
        clock.advance(40)
        sweeping.sweep()  # another worker, that looks for what is due
        return {"amount": 7}

    def answers(call: Any) -> Any:
        SENT.set()
        return applied("r-1")

    MODEL[:] = [thinks, lambda: {"amount": 8}]
    model.answers(answers)
    start("beside")
    settle(clock)
    assert ASKED == [1]
    assert Chosen.objects.get().value == {"amount": 7, "secret": "none"}
    assert Run.objects.get().state == RunState.SUCCEEDED


# What is asked for is on record first


def sweep_past_deaths(clock: Any, *, rounds: int = 12) -> None:
    """Workers come and go: each sweeps, may die at it, and the next comes when the lease is over."""
    for _ in range(rounds):
        try:
            sweeping.sweep()
        except SystemExit:
            workers._known.clear()
        clock.advance(minutes=4)


def dies() -> Any:
    """The queue ends the task, or the model takes its worker down."""
    raise SystemExit


def test_a_model_that_takes_its_workers_down_is_asked_as_often_as_it_may_propose_and_a_person_is_told(
    model: Any, clock: Any
) -> None:
    MODEL[:] = [dies] * 9
    run = start("slow")
    sweep_past_deaths(clock)
    run.refresh_from_db()
    assert ASKED == [1, 2, 3]
    assert (run.escalation_reason, run.waiting_for) == ("no_valid_proposal", "plan")
    asked = JournalEntry.objects.filter(run=run, kind="proposal_asked").order_by("id")
    assert [entry.attempt for entry in asked] == [1, 2, 3]
    MODEL[:] = [lambda: {"amount": 9}]
    assert press(run, "choose_again").verdict == "done"
    settle(clock)
    assert Run.objects.get().state == RunState.SUCCEEDED
    assert Chosen.objects.get().version == 2


def test_a_proposal_is_on_record_before_the_model_is_asked(model: Any, clock: Any) -> None:
    seen: list[int] = []

    def looks() -> Json:
        seen.append(JournalEntry.objects.filter(kind="proposal_asked").count())
        return {"amount": 7}

    MODEL[:] = [looks]
    start("slow")
    settle(clock)
    assert seen == [1]


def test_each_proposal_has_a_lease_of_its_own(model: Any, clock: Any) -> None:
    def slowly(amount: int) -> Callable[[], Json]:
        def thinks() -> Json:
            clock.advance(100)
            sweeping.sweep()  # another worker, that looks for what is due
            return {"amount": amount}

        return thinks

    MODEL[:] = [slowly(0), slowly(-1), slowly(7)]
    start("slow")
    settle(clock)
    assert ASKED == [1, 2, 3]
    assert Chosen.objects.get(valid=True).value["amount"] == 7
    assert [each.problem for each in Chosen.objects.filter(valid=False)] == ["amount: greater_than"] * 2


@pytest.mark.parametrize("taken", [False, True])
def test_an_answer_that_comes_when_the_run_is_held_no_more_is_kept_and_counts_as_refused(
    model: Any, clock: Any, taken: bool
) -> None:
    def too_late() -> Json:
        clock.advance(minutes=5)
        if taken:
            sweeping.sweep()  # another worker takes the run and asks
        return {"amount": 7, "secret": "CANARY"}

    MODEL[:] = [too_late, lambda: {"amount": 8}]
    start("slow")
    settle(clock)
    late = Chosen.objects.get(valid=False)
    assert (late.problem, late.value) == ("came when the run was held no more", {"amount": 7, "secret": "CANARY"})
    assert "CANARY" not in f"{late.value_shown}{late.value_sealed}"
    assert Chosen.objects.get(valid=True).value["amount"] == 8
    assert {call.request["amount"] for call in model.calls} == {4200}
    assert ASKED == [1, 2]


def test_refusals_from_before_proposals_were_on_record_count_all_the_same(
    model: Any, clock: Any, superuser_connection: Any
) -> None:
    run = start("slow")
    superuser_connection.execute(
        "INSERT INTO reconciliation_chosen (run_id, step, version, valid, problem, reason, value_shown, value_sealed,"
        " at) SELECT %s, 'plan', 1, false, 'amount: missing', '', '{}', '', now() FROM generate_series(1, 2)",
        [run.pk],
    )
    MODEL[:] = [lambda: {"amount": 0}] * 3
    settle(clock)
    assert ASKED == [1]
    assert Run.objects.get().escalation_reason == "no_valid_proposal"


def test_a_choice_that_may_take_longer_than_the_queue_lets_a_task_is_refused_at_start(
    model: Any, settings: Any
) -> None:
    assert checks.time_to_propose() == []
    settings.Q_CLUSTER = {**settings.Q_CLUSTER, "timeout": 130}
    (first, _) = checks.time_to_propose()
    assert first.id == "aftercall.E023"
    assert "choice 'plan' may take 130 s with its lease's margin, but the queue ends a task after 130 s" in first.msg
    settings.Q_CLUSTER = {**settings.Q_CLUSTER, "timeout": 133}
    assert checks.time_to_propose() == []


def test_a_choice_without_time_to_propose_is_refused() -> None:
    told = list(problems(flow("hurried", replace(PLAN, timeout=timedelta(0)), PAY), lambda *_: None))
    assert "choice 'plan' has no time to propose; timeout must be above 0" in told
