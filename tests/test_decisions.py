"""A decision is asked for once: beside other steps, by a slow model, by a worker that dies while it asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from threading import Event
from typing import Any

import pytest

from reconciliation import registry, sweeping
from reconciliation.models import Chosen, Run
from reconciliation.providers.base import Json
from reconciliation.states import RunState
from reconciliation.workflows import Choice, Facts, Step, StepKind
from tests.saga_workflows import PATIENT, Plan, flow, order, reversible
from tests.scripted import applied
from tests.test_sagas import settle, start

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
