"""A workflow is a declared list of steps: what to do, in which order, on which object.

Sagas, decisions, approvals and schedules widen this declaration; their fields are here where a step already declares
them (`kind`, `undo`), so that a page can show the pivot and what cannot be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from .providers.base import Json


class StepKind(StrEnum):
    """Before the pivot steps can be undone; the pivot decides; after it the way is forward only."""

    COMPENSABLE = "compensable"
    PIVOT = "pivot"
    RETRYABLE = "retryable"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a step may build its request from: the run's input and the results of the steps before it."""

    input: Json
    results: Mapping[str, Json]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step. `request` must give the same object each time that it is given the same facts."""

    name: str
    provider: str
    action: str
    request: Callable[[Facts], Json]
    kind: StepKind = StepKind.COMPENSABLE
    business_object: Callable[[Facts], str] | None = None  # defaults to the run's


@dataclass(frozen=True, kw_only=True)
class Workflow:
    """A named, versioned list of steps. A run keeps the version with which it began."""

    name: str
    steps: tuple[Step, ...]
    business_object: Callable[[Json], str]
    version: int = 1
    shown: tuple[str, ...] = field(default=())  # input fields that may be seen; all others are encrypted

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        if len(set(names)) < len(names):
            raise ValueError(f"workflow {self.name}: step names must be unique")
        if sum(step.kind is StepKind.PIVOT for step in self.steps) > 1:
            raise ValueError(f"workflow {self.name}: at most one step may be the pivot")
