"""What a declaration may not say: each fault is a sentence that names the place and what would be right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from reconciliation.providers.base import Repeat
from reconciliation.workflows import Choice, Step, StepKind, Workflow, problems
from tests import saga_workflows as flows

OWN = (
    "examples.order_desk.workflow", "drill.flows", "tests.saga_workflows", "tests.run_shapes", "tests.timetable",
    "tests.three_steps", "tests.scripted_workflows", "tests.book", "tests.test_eight_failures", "tests.test_two_people",
)  # fmt: skip


def declared(module: str) -> Iterator[Workflow]:
    for name, thing in vars(import_module(module)).items():
        for each in thing if isinstance(thing, tuple) and name != "REFUSED" else (thing,):
            if isinstance(each, Workflow):
                yield each


def kept(provider: str, action: str) -> Repeat:
    """Every action is there, and has an effect unless its name says that it reads."""
    return Repeat.READ if "read" in action else Repeat.KEYED


def told(*steps: Step | Choice, **parts: Any) -> str:
    return "; ".join(problems(flows.flow("w", *steps, **parts), kept))


@pytest.mark.parametrize("module", OWN)
def test_what_is_declared_here_is_sound(module: str) -> None:
    assert [(each.name, list(problems(each, kept))) for each in declared(module) if list(problems(each, kept))] == []


# What comes before the pivot is said by what needs what

RESERVE, SHIP, TELL = flows.reversible("reserve"), flows.SHIP, flows.TELL
PLAIN = Step(name="note", provider="clerk", action="keyed", request=flows.order)


def test_a_mail_that_may_be_sent_before_the_pivot_needs_an_undo_or_a_reason_wherever_it_is_declared() -> None:
    mail = replace(TELL, after=())
    said = told(RESERVE, SHIP, mail)
    assert "step 'tell' does not wait for the pivot and has an effect: give it an undo" in said
    assert "or have it come after the pivot" in said
    assert told(RESERVE, SHIP, replace(mail, cannot_undo="a mail stays sent")) == ""
    assert told(RESERVE, SHIP, replace(mail, action="read")) == ""
    assert told(RESERVE, SHIP, TELL) == ""


def test_a_step_that_is_declared_first_but_waits_for_nothing_is_held_to_the_same() -> None:
    said = told(PLAIN, replace(SHIP, after=()))
    assert "step 'note' does not wait for the pivot and has an effect" in said
    assert told(flows.reversible("note"), replace(SHIP, after=())) == ""


def test_what_the_pivot_needs_by_way_of_others_comes_before_it() -> None:
    read = replace(PLAIN, name="look", action="read")
    said = told(PLAIN, read, RESERVE, replace(SHIP, after=("reserve",)))
    assert "step 'note' comes before the pivot and has an effect: give it an undo" in said


def test_a_retryable_step_that_the_pivot_waits_for_is_refused_even_with_a_reason() -> None:
    said = told(replace(TELL, cannot_undo="it stays"), SHIP)
    assert "step 'tell' is retryable, but the pivot waits for it, so a failure walks back; make it compensable" in said


def test_a_retryable_step_of_a_workflow_without_a_pivot_is_refused() -> None:
    assert "is retryable, but no step is the pivot" in told(replace(TELL, cannot_undo="it stays"))


def test_a_step_without_an_undo_may_wait_for_the_pivot_by_way_of_another() -> None:
    assert told(RESERVE, SHIP, replace(PLAIN, name="a"), replace(PLAIN, name="b", after=("a",))) == ""


def test_a_step_that_is_compensable_by_its_kind_is_not_taken_for_one_before_the_pivot() -> None:
    assert PLAIN.kind is StepKind.COMPENSABLE
    workflow = flows.flow("w", RESERVE, SHIP, PLAIN, flows.reversible("aside", after=()))
    assert [step.name for step in workflow.steps if workflow.before_pivot(step)] == ["reserve"]
    assert [step.name for step in workflow.steps if workflow.after_pivot(step)] == ["note"]


# Undos that wait for each other


def test_two_undos_that_wait_for_each_other_are_refused_once() -> None:
    pair = flows.ringed("w", a=("b",), b=("a",))
    assert list(problems(pair, kept)) == [
        "the undos of 'a' and 'b' wait for each other, so that none of them would begin"
    ]


def test_a_ring_by_way_of_others_is_refused_and_names_all_that_are_in_it() -> None:
    ring_of_three = flows.ringed("w", outside=("a",), a=("b",), b=None, c=("a",))
    (said,) = problems(ring_of_three, kept)
    assert said == "the undos of 'a', 'b' and 'c' wait for each other, so that none of them would begin"


def test_an_undo_that_waits_for_itself_is_refused() -> None:
    assert list(problems(flows.ringed("w", a=("a",)), kept)) == ["the undo of 'a' waits for itself"]


def test_an_undo_may_wait_for_what_cannot_be_undone() -> None:
    assert list(problems(flows.STAMP_FIRST, kept)) == []
