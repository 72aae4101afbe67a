"""What is wrong with the declaration of a workflow: each problem is one sentence, without its full stop.

Found at start, so that a fault in a declaration does not wait for the middle of somebody's money.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

from pydantic import BaseModel, RootModel

from .policy import ErrorClass, RetryPolicy
from .providers.base import Repeat
from .workflows import Choice, Consent, Step, StepKind, Workflow, ring


def problems(workflow: Workflow, repeat_of: Callable[[str, str], Repeat | None]) -> Iterator[str]:
    """What is wrong with a declaration. `repeat_of` gives the class of a provider's action, or None if unknown."""
    names = [step.name for step in workflow.steps]
    if not names:
        yield "it has no steps"
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two steps are called {name!r}; names must be unique"
    if sum(step.kind is StepKind.PIVOT for step in workflow.effects) > 1:
        yield "more than one step is the pivot; at most one may be"
    yield from shown_problems("shown", workflow.shown)
    yield from _cap_problems(workflow)
    for step in workflow.steps:
        yield from _order_problems(workflow, step, names)
        if isinstance(step, Choice):
            yield from _choice_problems(step)
    for step in workflow.effects:
        yield from _step_problems(workflow, step, repeat_of)
    yield from _ring_problems(workflow)


def _cap_problems(workflow: Workflow) -> Iterator[str]:
    """A cap that cannot be compared with what it caps would be found in the middle of a run, by nobody."""
    longest = workflow.max_elapsed
    if longest is not None and not (isinstance(longest, timedelta) and longest > timedelta(0)):
        yield f"max_elapsed of the run is {longest!r}; it must be a timedelta above 0, such as timedelta(hours=2)"
    for name in ("max_spend", "max_replans"):
        most = getattr(workflow, name)
        if not (most is None and name == "max_spend") and not (type(most) is int and most >= 0):
            yield f"{name} of the run is {most!r}; it must be a whole number, 0 or more"


def _order_problems(workflow: Workflow, step: Step | Choice, names: list[str]) -> Iterator[str]:
    earlier = set(names[: workflow.steps.index(step)])
    for needed in step.after or ():
        if needed not in earlier:
            yield f"step {step.name!r} comes after {needed!r}, which is not declared before it"
    if ":" in step.name:
        yield f"step {step.name!r} has a colon in its name; those are for undo steps"


def _step_problems(workflow: Workflow, step: Step, repeat_of: Callable[[str, str], Repeat | None]) -> Iterator[str]:
    repeat = repeat_of(step.provider, step.action)
    if repeat is None:
        yield f"step {step.name!r} uses {step.provider}/{step.action}, which no configured provider has"
        return
    reads = repeat is Repeat.READ
    if step.undo is not None and step.cannot_undo:
        yield f"step {step.name!r} has an undo and says that it cannot be undone; one of both is wrong"
    if not reads:
        yield from _pivot_problems(workflow, step)
    yield from _retry_problems(f"step {step.name!r}", step.retry)
    yield from _consent_problems(f"step {step.name!r}", step.consent)
    if step.undo is not None:
        yield from _undo_problems(workflow, step, repeat_of)
        yield from _retry_problems(f"the undo of {step.name!r}", step.undo.retry)
        yield from _consent_problems(f"the undo of {step.name!r}", step.undo.consent)


def _consent_problems(where: str, consent: Consent | None) -> Iterator[str]:
    """Without time to agree or to use it, the step would wait for a consent that nobody can give."""
    for name in ("expires_after", "use_within") if consent is not None else ():
        length = getattr(consent, name)
        if not (isinstance(length, timedelta) and length > timedelta(0)):
            yield f"the consent of {where} has {name} {length!r}; it must be a timedelta above 0"


def _pivot_problems(workflow: Workflow, step: Step) -> Iterator[str]:
    """Where a step with an effect stands, by what needs what: steps are sent as soon as their needs are met."""
    if step is workflow.pivot:
        return
    if workflow.after_pivot(step):
        if step.kind is StepKind.COMPENSABLE and step.undo is None and not step.cannot_undo:
            yield (
                f"step {step.name!r} comes after the pivot and is compensable, but nothing takes it back: make it "
                "retryable, or give it an undo, or undo=None with the reason in cannot_undo"
            )
        return
    before = workflow.before_pivot(step)
    if before and step.kind is StepKind.RETRYABLE:
        where = "the pivot waits for it" if workflow.pivot else "no step is the pivot"
        yield f"step {step.name!r} is retryable, but {where}, so a failure walks back; make it compensable"
    if step.undo is None and not step.cannot_undo:
        where = "comes before the pivot" if before else "does not wait for the pivot"
        yield (
            f"step {step.name!r} {where} and has an effect: give it an undo, or undo=None with the reason in "
            f"cannot_undo{'' if before else ', or have it come after the pivot'}"
        )


def _undo_problems(workflow: Workflow, step: Step, repeat_of: Callable[[str, str], Repeat | None]) -> Iterator[str]:
    assert step.undo is not None
    provider = step.undo.provider or step.provider
    if repeat_of(provider, step.undo.action) is None:
        yield f"the undo of {step.name!r} uses {provider}/{step.undo.action}, which no configured provider has"
    for needed in step.undo.after or ():
        if needed not in {one.name for one in workflow.effects}:
            yield f"the undo of {step.name!r} waits for that of {needed!r}, which is no step with an effect"


def _ring_problems(workflow: Workflow) -> Iterator[str]:
    """Undos that wait for each other, however many are in the ring: none of them would ever begin."""
    steps = {step.name: step for step in workflow.effects}

    def needs(name: str) -> Iterable[str]:
        return workflow.undo_needs(steps[name]) if name in steps else ()

    for found in dict.fromkeys(frozenset(ring(name, needs)) for name in steps):
        *others, last = [repr(name) for name in steps if name in found] or [""]
        if others:
            yield f"the undos of {', '.join(others)} and {last} wait for each other, so that none of them would begin"
        elif last:
            yield f"the undo of {last} waits for itself"


def shown_problems(what: str, names: Any) -> Iterator[str]:
    """A comma that was forgotten makes one text of a tuple, and each of its letters a name."""
    if isinstance(names, str):
        yield f"{what} is the text {names!r}; it must be a tuple of names, such as ({names!r},)"


def _choice_problems(step: Choice) -> Iterator[str]:
    if step.proposals < 1:
        yield f"choice {step.name!r} may propose {step.proposals} times; proposals must be at least 1"
    if not (isinstance(step.timeout, timedelta) and step.timeout > timedelta(0)):
        yield f"choice {step.name!r} has no time to propose; timeout must be a timedelta above 0"
    yield from shown_problems(f"shown of choice {step.name!r}", step.shown)
    if step.schema is None:
        return
    if not (isinstance(step.schema, type) and issubclass(step.schema, BaseModel)):
        yield f"the schema of choice {step.name!r} is no pydantic model; give a class made from BaseModel, or None"
        return
    known = _fields(step.schema)
    if known is None or isinstance(step.shown, str):
        return
    for name in step.shown:
        if name not in known:
            fields = ", ".join(sorted(known))
            yield f"choice {step.name!r} shows {name!r}, which its schema does not have; its fields are {fields}"


def _fields(schema: type[BaseModel]) -> set[str] | None:
    """What a proposal of this schema is stored with; None where the schema leaves that open."""
    open_ = schema.model_config.get("extra") == "allow" or issubclass(schema, RootModel)
    if open_ or schema.__pydantic_decorators__.model_serializers:
        return None
    names = set(schema.model_fields) | set(schema.model_computed_fields)
    return names | {field.serialization_alias for field in schema.model_fields.values() if field.serialization_alias}


def _retry_problems(where: str, retry: RetryPolicy | None) -> Iterator[str]:
    if retry is None:
        return
    least = {"attempts": 1, "factor": 1, "longest": 0, "max_elapsed": 0, "max_spend": 0}
    for name, lowest in least.items():
        value = getattr(retry, name)
        if value is not None and not _is_number(value):
            yield f"retry of {where} has {name} {value!r}; it must be a number{_unit(name)}"
        elif value is not None and not value >= lowest:
            yield f"retry of {where} has {name} {value}; it must be at least {lowest}"
    if not (_is_number(retry.jitter) and 0 <= retry.jitter <= 1):
        yield f"retry of {where} has jitter {retry.jitter!r}; it must be from 0 to 1, a part of the wait"
    if any(not (_is_number(seconds) and seconds >= 0) for seconds in retry.intervals):
        yield f"retry of {where} has intervals {retry.intervals!r}; each must be 0 seconds or more"
    never = [retry.never] if isinstance(retry.never, str) else sorted(retry.never)
    if isinstance(retry.never, str) or not set(never) <= set(ErrorClass):
        classes = ", ".join(ErrorClass)
        yield f"retry of {where} never retries {', '.join(never)}; never is a set of error classes: {classes}"


def _unit(name: str) -> str:
    return {"longest": " of seconds", "max_elapsed": " of seconds", "max_spend": " of minor units"}.get(name, "")


def _is_number(value: Any) -> bool:
    """A timedelta is none: what is stored with an operation is seconds."""
    return isinstance(value, int | float) and not isinstance(value, bool)
