"""What a declaration may not say: each fault is a sentence that names the place and what would be right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
from django.utils.module_loading import import_string
from pydantic import BaseModel

from reconciliation import checks, registry
from reconciliation.policy import ErrorClass, RetryPolicy
from reconciliation.providers.base import ActionSpec, Repeat
from reconciliation.soundness import problems
from reconciliation.workflows import Choice, Consent, Step, StepKind, Workflow
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


PROVIDERS = (
    "examples.order_desk.providers.pay", "examples.order_desk.providers.carrier", "examples.order_desk.providers.mail",
    "examples.order_desk.providers.tickets", "benchmarks.workload.SHELF", "tests.book.BOOK",
    "tests.cast.TILL", "tests.scripted.clerk_",
)  # fmt: skip


@pytest.mark.parametrize("path", PROVIDERS)
def test_what_a_provider_here_promises_is_sound(path: str) -> None:
    made = registry._made(import_string(path))
    found = {name: "; ".join(checks.action_problems(made, spec)) for name, spec in made.actions.items()}
    # "forgetful" stands for an action whose declaration is refused: what is done with it is tested all the same.
    assert {name for name, said in found.items() if said} <= {"forgetful"}


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
    assert told(RESERVE, SHIP, replace(TELL, name="a"), replace(TELL, name="b", after=("a",))) == ""


def test_a_compensable_step_after_the_pivot_needs_what_takes_it_back_or_a_reason() -> None:
    said = told(RESERVE, SHIP, PLAIN)
    assert said == (
        "step 'note' comes after the pivot and is compensable, but nothing takes it back: make it retryable, or give "
        "it an undo, or undo=None with the reason in cannot_undo"
    )
    right = (TELL, flows.reversible("note"), replace(PLAIN, cannot_undo="it stays"), replace(PLAIN, action="read"))
    assert [told(RESERVE, SHIP, step) for step in right] == ["", "", "", ""]


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


# Decisions, retries, and what may be seen


class Plan(BaseModel):
    amount: int
    secret: str = ""


class Anything(BaseModel, extra="allow"):
    amount: int


def choice(**parts: Any) -> str:
    return told(Choice(name="plan", choose=lambda facts: {}, **{"schema": Plan, **parts}))


def test_a_field_that_is_shown_but_not_in_the_schema_is_named() -> None:
    assert choice(shown=("amount",)) == ""
    said = "choice 'plan' shows 'ammount', which its schema does not have; its fields are amount, secret"
    assert choice(shown=("ammount",)) == said
    assert choice(shown=("ammount",), schema=Anything) == ""
    assert choice(shown=("ammount",), schema=None) == ""


def test_a_forgotten_comma_is_told_as_such() -> None:
    assert "it must be a tuple of names, such as ('amount',)" in choice(shown="amount")
    assert "shown is the text 'order'" in told(RESERVE, SHIP, shown="order")


def test_a_schema_that_checks_nothing_is_refused() -> None:
    assert "the schema of choice 'plan' is no pydantic model" in choice(schema=dict)
    assert "is no pydantic model" in choice(schema=Plan(amount=1))


def test_a_choice_that_may_never_propose_is_refused() -> None:
    assert "proposals must be at least 1" in choice(proposals=0)
    assert "timeout must be a timedelta above 0" in choice(timeout=120)


@pytest.mark.parametrize(
    ("caps", "said"),
    [
        ({"max_elapsed": 600}, "max_elapsed of the run is 600; it must be a timedelta above 0"),
        ({"max_elapsed": timedelta(0)}, "it must be a timedelta above 0, such as timedelta(hours=2)"),
        ({"max_spend": -1}, "max_spend of the run is -1; it must be a whole number, 0 or more"),
        ({"max_spend": "50"}, "max_spend of the run is '50'; it must be a whole number, 0 or more"),
        ({"max_replans": None}, "max_replans of the run is None; it must be a whole number, 0 or more"),
    ],
)
def test_a_cap_of_the_run_that_caps_nothing_is_refused(caps: dict[str, Any], said: str) -> None:
    assert said in told(RESERVE, SHIP, **caps)
    assert told(RESERVE, SHIP, max_elapsed=timedelta(hours=2), max_spend=0, max_replans=0) == ""


@pytest.mark.parametrize("consent", [Consent(expires_after=timedelta(0)), Consent(use_within=30)])  # type: ignore[arg-type]
def test_a_consent_that_nobody_has_time_to_give_or_to_use_is_refused(consent: Consent) -> None:
    assert "it must be a timedelta above 0" in told(replace(RESERVE, consent=consent), SHIP)
    undo = replace(RESERVE.undo, consent=consent) if RESERVE.undo else None
    assert "the consent of the undo of 'reserve' has" in told(replace(RESERVE, undo=undo), SHIP)
    assert told(replace(RESERVE, consent=Consent()), SHIP) == ""


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"attempts": 0}, "attempts 0; it must be at least 1"),
        ({"max_elapsed": timedelta(hours=1)}, "it must be a number of seconds"),
        ({"max_spend": "50"}, "max_spend '50'; it must be a number of minor units"),
        ({"jitter": None}, "jitter None; it must be from 0 to 1"),
        ({"intervals": (timedelta(seconds=1),)}, "each must be 0 seconds or more"),
        ({"factor": 0.5}, "factor 0.5; it must be at least 1"),
        ({"longest": -1}, "longest -1; it must be at least 0"),
        ({"jitter": 1.5}, "jitter 1.5; it must be from 0 to 1"),
        ({"intervals": (1.0, -2.0)}, "each must be 0 seconds or more"),
        ({"never": frozenset({"timeout"})}, "never retries timeout; never is a set of error classes: not_sent,"),
        ({"never": "rejected"}, "never is a set of error classes"),
    ],
)
def test_a_retry_policy_that_cannot_be_kept_is_refused(parts: dict[str, Any], said: str) -> None:
    policy = RetryPolicy(**parts)
    assert said in told(replace(RESERVE, retry=policy), SHIP)
    assert RESERVE.undo is not None
    again = told(replace(RESERVE, undo=replace(RESERVE.undo, retry=policy)), SHIP)
    assert "retry of the undo of 'reserve'" in again
    assert said in again


def test_a_retry_policy_in_its_bounds_is_fine() -> None:
    policy = RetryPolicy(attempts=1, intervals=(0,), jitter=1, never=frozenset({ErrorClass.REJECTED}))
    assert told(replace(RESERVE, retry=policy), SHIP) == ""


class Desk:
    """A provider of one action, as it is declared."""

    name, account = "desk", "main"

    def __init__(self, **promises: Any) -> None:
        self.actions = {"act": ActionSpec(**promises)}


def said_of(**promises: Any) -> str:
    desk = Desk(**promises)
    return "; ".join(checks.action_problems(desk, desk.actions["act"]))


def test_what_a_headline_or_an_amount_shows_is_declared_as_shown() -> None:
    shown = {"shown": ("order", "sum", "currency"), "money": ("sum", "currency")}
    assert said_of(**shown, headline="Refund {amount} for order {order}") == ""
    assert "headline names {card}, which shown does not list" in said_of(**shown, headline="Refund to {card}")
    assert "headline names {amount}, which shown does not list" in said_of(shown=("order",), headline="{amount}")
    assert "money names sum, currency, which shown does not list" in said_of(money=("sum", "currency"))


def test_a_headline_with_a_broken_brace_and_an_action_that_is_never_called_are_refused() -> None:
    assert "has a brace without its pair" in said_of(headline="Refund {order")
    assert "attempts is 0; at least one call must be allowed" in said_of(attempts=0)
    assert "it must be a tuple of names, such as ('order',)" in said_of(shown="order")


# Two of one name

TWIN, OTHER_TWIN = Desk(), Desk()
SAGA_TWIN = replace(flows.SAGA, steps=flows.SAGA.steps[:3])


@pytest.fixture
def configured(settings: Any) -> Iterator[Any]:
    registry.forget()
    yield settings
    registry.forget()


def test_two_providers_of_one_name_are_refused_rather_than_one_of_them_used(configured: Any) -> None:
    configured.AFTERCALL_PROVIDERS = ["tests.test_declarations.TWIN", "tests.test_declarations.OTHER_TWIN"]
    (error,) = checks.declarations(None)
    assert error.id == "reconciliation.E004"
    assert "Two providers are called 'desk'" in error.msg
    with pytest.raises(registry.DeclaredTwice):
        registry.provider("desk")


def test_two_declarations_of_one_version_are_refused_rather_than_one_of_them_used(configured: Any) -> None:
    configured.AFTERCALL_WORKFLOWS = ["tests.saga_workflows.SAGA", "tests.test_declarations.SAGA_TWIN"]
    (error,) = checks.declarations(None)
    assert error.id == "reconciliation.E004"
    assert "Two workflows are called 'saga' in version 1; raise the version of the newer one" in error.msg


def test_the_same_declaration_named_twice_is_one(configured: Any) -> None:
    configured.AFTERCALL_PROVIDERS = ["tests.test_declarations.TWIN"] * 2
    configured.AFTERCALL_WORKFLOWS = ["tests.saga_workflows.SAGA"] * 2
    assert (list(registry.providers()), list(registry.workflows())) == (["desk"], [("saga", 1)])
