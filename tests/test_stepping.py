"""What a declaration's own code raises stops the run for a person, whatever it raises: it would come back for ever."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import OperationalError
from structlog.testing import capture_logs

from reconciliation import registry, runs
from reconciliation.models import Operation, Run
from reconciliation.providers.base import Rejected
from reconciliation.states import RunState, State
from reconciliation.workflows import Consent, Step, StepKind, Undo
from tests.saga_workflows import PATIENT, flow, order, undone
from tests.scripted import applied
from tests.test_sagas import press, settle, start

RAISES: dict[str, type[Exception]] = {}  # what raises what at the moment
RAISED = (IndexError, AttributeError, ZeroDivisionError, KeyError)


def breaks(name: str) -> None:
    if name in RAISES:
        raise RAISES[name]("CANARY of a customer")


def _request(facts: Any) -> Any:
    breaks("request")
    return order(facts)


def _undo(facts: Any, result: Any) -> Any:
    breaks("undo.request")
    return undone(facts, result)


def _object(facts: Any) -> str:
    breaks("business_object")
    return str(facts.input["order"])


def _when(request: Any) -> bool:
    breaks("consent.when")
    return False


UNDO = Undo(action="keyed", request=_undo, retry=PATIENT)
BREAKS = flow(
    "breaks",
    Step(name="reserve", provider="clerk", action="keyed", request=order, undo=UNDO, retry=PATIENT),
    Step(name="ship", provider="clerk", action="keyed", kind=StepKind.PIVOT, request=_request, business_object=_object,
         consent=Consent(when=_when), retry=PATIENT),
)  # fmt: skip


@pytest.fixture
def breaking(clerk: Any, settings: Any) -> Any:
    settings.AFTERCALL_WORKFLOWS = ["tests.test_stepping.BREAKS"]
    registry.forget()
    yield clerk
    RAISES.clear()


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("part", ["request", "business_object", "consent.when"])
def test_a_declaration_that_raises_stops_its_run_and_names_the_class_alone(
    breaking: Any, clock: Any, part: str, raised: type[Exception]
) -> None:
    RAISES[part] = raised
    run = start("breaks")
    with capture_logs() as logs:
        settle(clock)
    run.refresh_from_db()
    assert (run.state, run.escalation_reason, run.waiting_for) == (RunState.PENDING, "step_cannot_be_built", "ship")
    assert len(breaking.calls) == 1, "the step before it"
    (told,) = [line for line in logs if line["event"] == "step_cannot_be_built"]
    assert (told["error"], "CANARY" in str(logs)) == (raised.__name__, False)
    RAISES.clear()
    assert press(run, "resume").verdict == "done"
    settle(clock)
    assert Run.objects.get().state == RunState.SUCCEEDED


@pytest.mark.parametrize("raised", RAISED)
def test_an_undo_that_raises_stops_the_walk_back_for_a_person(
    breaking: Any, clock: Any, raised: type[Exception]
) -> None:
    RAISES["undo.request"] = raised
    breaking.answers(applied("r-1"), Rejected("no", status=402))
    run = start("breaks")
    settle(clock)
    run.refresh_from_db()
    assert (run.state, run.escalation_reason) == (RunState.COMPENSATING, "step_cannot_be_built")
    RAISES.clear()
    assert press(run, "resume").verdict == "done"
    settle(clock)
    assert Run.objects.get().state == RunState.COMPENSATED
    assert Operation.objects.get(step="undo:reserve").state == State.SUCCEEDED


def test_a_database_that_fails_while_a_step_is_built_is_no_fault_of_the_declaration(breaking: Any, clock: Any) -> None:
    RAISES["request"] = OperationalError
    run = start("breaks")
    with pytest.raises(OperationalError):
        runs.advance(run.pk)
    RAISES.clear()
    clock.advance(minutes=5)
    settle(clock)
    assert Run.objects.get().state == RunState.SUCCEEDED
