"""A workflow is a declaration: what to do, in which order, on which object, and how each effect is undone.

Everything here is data and pure functions of a run's facts. It is checked at start (soundness.py): a fault in a
declaration is found at start, not in the middle of somebody's money.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from functools import cached_property
from hashlib import sha256
from typing import Any

from .policy import RetryPolicy
from .providers.base import Json


class StepKind(StrEnum):
    """Before the pivot steps can be undone; the pivot decides; after it the way is forward only.

    What stands before and after is said by what needs what, not by the order in which steps are declared.
    """

    COMPENSABLE = "compensable"
    PIVOT = "pivot"
    RETRYABLE = "retryable"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a step may build its request from: the run's input, and the results and choices of the steps before it."""

    input: Json
    results: Mapping[str, Json]


@dataclass(frozen=True, kw_only=True)
class Undo:
    """How the effect of a step is reversed: a new operation, never a rollback.

    `request` is given the facts of the run and the result of the step. `after` names steps whose own undo must be done
    first; without it the reverse of the declared order holds, past steps that cannot be undone.
    """

    action: str
    request: Callable[[Facts, Json], Json]
    provider: str = ""  # defaults to the step's
    after: tuple[str, ...] | None = None
    retry: RetryPolicy | None = None
    consent: Consent | None = None  # whether a person must agree to the exact request of the undo first


@dataclass(frozen=True, kw_only=True)
class Consent:
    """A step that needs a person's consent to its exact request, where `when` holds (always without it)."""

    when: Callable[[Json], bool] | None = None  # given the request
    policy: str = ""  # for the approver: "refunds above 500.00 need one approver"
    expires_after: timedelta = timedelta(hours=4)
    use_within: timedelta = timedelta(minutes=30)  # from the approval to the claim


@dataclass(frozen=True, kw_only=True)
class Step:
    """One effect. `request` must give the same object each time that it is given the same facts.

    `after` names the steps whose results it needs; without it the step follows the one declared before it. A step with
    an effect that does not wait for the pivot, or that is compensable after it, declares `undo`, or `undo=None` with
    the reason in `cannot_undo`. What has no undo is shown before a run starts.
    """

    name: str
    provider: str
    action: str
    request: Callable[[Facts], Json]
    kind: StepKind = StepKind.COMPENSABLE
    undo: Undo | None = None
    cannot_undo: str = ""
    after: tuple[str, ...] | None = None
    business_object: Callable[[Facts], str] | None = None  # defaults to the run's
    retry: RetryPolicy | None = None  # defaults to what the action declares
    consent: Consent | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A step whose outcome is not determined by the facts: a model's proposal, the clock, a random value, a read.

    `choose` is asked once; what it proposes is validated (`schema`: a pydantic model or None), stored, and reused on
    every replay. Each time that it is asked spends one of `proposals`, whatever comes of it; an invalid proposal is
    kept, masked, for diagnosis, and so is one that takes longer than `timeout` and finds the run in other hands.
    """

    name: str
    choose: Callable[[Facts], Any]
    schema: Any = None
    shown: tuple[str, ...] = ()
    after: tuple[str, ...] | None = None
    proposals: int = 3
    timeout: timedelta = timedelta(minutes=2)  # how long it may take to propose; the queue must leave as much


@dataclass(frozen=True, kw_only=True)
class Workflow:
    """A named, versioned declaration. A run keeps the version with which it began, and stops where that was edited."""

    name: str
    steps: tuple[Step | Choice, ...]
    business_object: Callable[[Json], str]
    version: int = 1
    shown: tuple[str, ...] = field(default=())  # input fields that may be seen; all others are encrypted
    lock: Callable[[Json], str] | None = None  # one run at a time for what this names; an unknown operation keeps it
    max_elapsed: timedelta | None = None
    max_spend: int | None = None  # minor units of `cost`, over all steps
    max_replans: int = 3  # fresh decisions, each with a reason

    def step(self, name: str) -> Step | Choice:
        """The step called `name`. Raises KeyError."""
        return next((step for step in self.steps if step.name == name), None) or _missing(name)

    @property
    def effects(self) -> tuple[Step, ...]:
        """The steps that call a provider."""
        return tuple(step for step in self.steps if isinstance(step, Step))

    @property
    def pivot(self) -> Step | None:
        """The step after which the way is forward only."""
        return next((step for step in self.effects if step.kind is StepKind.PIVOT), None)

    @cached_property
    def digest(self) -> str:
        """What this version says of its steps, their order and their undos, as a hash.

        A run keeps the digest with which it began: an edit that forgot to raise the version is noticed by it. What a
        function makes of the facts is not in it; a request that changed is refused by its fingerprint.
        """
        told = [(step.name, self.needs(step), _data(step)) for step in self.steps]
        return sha256(json.dumps(told).encode()).hexdigest()

    def needs(self, step: Step | Choice) -> tuple[str, ...]:
        """Which steps must have succeeded before `step` may start."""
        if step.after is not None:
            return step.after
        place = self.steps.index(step)
        return (self.steps[place - 1].name,) if place else ()

    def all_needs(self, step: Step | Choice) -> set[str]:
        """Which steps must have succeeded before `step` may start, also by way of others."""
        steps = {each.name: each for each in self.steps}
        return closure(step.name, lambda name: self.needs(steps[name]) if name in steps else ())

    def before_pivot(self, step: Step | Choice) -> bool:
        """Whether the pivot waits for `step`. Without a pivot nothing is decided, so every step counts as before it."""
        pivot = self.pivot
        return pivot is None or step.name in self.all_needs(pivot)

    def after_pivot(self, step: Step | Choice) -> bool:
        """Whether `step` waits for the pivot, so that a failure of it never walks back.

        What neither waits for the pivot nor is waited for by it may run before it, beside it or without it.
        """
        pivot = self.pivot
        return pivot is not None and pivot.name in self.all_needs(step)

    def undo_needs(self, step: Step) -> tuple[str, ...]:
        """Steps whose undo must be done before that of `step`: as it declares, or all later ones that have one.

        What cannot be undone holds back nothing but what names it: no order would bring its undo about.
        """
        if step.undo is None:
            return ()
        if step.undo.after is not None:
            return step.undo.after
        place = self.steps.index(step)
        return tuple(each.name for each in self.effects if each.undo and self.steps.index(each) > place)


def _data(step: Step | Choice) -> list[Any]:
    if isinstance(step, Choice):
        return ["choice"]
    undo = step.undo and (step.undo.provider or step.provider, step.undo.action, step.undo.after)
    return [step.kind, step.provider, step.action, undo]


def _missing(name: str) -> Step:
    raise KeyError(f"the workflow has no step {name!r}")


def closure(name: str, needs: Callable[[str], Iterable[str]]) -> set[str]:
    """Everything that `name` needs, directly or by way of others; itself only where it stands in a ring."""
    found: set[str] = set()
    open_ = list(needs(name))
    while open_:
        each = open_.pop()
        if each not in found:
            found.add(each)
            open_ += needs(each)
    return found


def ring(name: str, needs: Callable[[str], Iterable[str]]) -> set[str]:
    """Everything that `name` needs and that needs it, itself among them; empty where it stands in no ring."""
    return {each for each in closure(name, needs) if name in closure(each, needs)}
