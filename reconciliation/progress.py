"""Where a run stands, read from its operations and choices: what is done, what may start, what is in the way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from . import registry
from .models import Chosen, Operation, Run
from .providers.base import Json, Repeat
from .states import State
from .workflows import Choice, Facts, Step, Workflow

UNDO = "undo:"


@dataclass(frozen=True)
class Progress:
    """One reading of a run's rows. Nothing in it is stored; it is read anew after each step."""

    run: Run
    workflow: Workflow
    operations: dict[str, Operation]  # by step; the newest intent of each
    chosen: dict[str, Chosen]  # by choice step; the newest valid version
    versions: int = 0  # the sum over all its operations: another sum means that something moved since

    @classmethod
    def of(cls, run: Run, workflow: Workflow) -> Progress:
        """Read where the run stands."""
        operations = list(Operation.objects.filter(run_id=run.pk).order_by("intent_version", "id"))
        valid = Chosen.objects.filter(run_id=run.pk, valid=True).order_by("version")
        chosen = {c.step: c for c in valid if f"{c.step}@{c.version}" not in run.voided}
        return cls(run, workflow, {o.step: o for o in operations}, chosen, sum(o.version for o in operations))

    @cached_property
    def facts(self) -> Facts:
        """What steps may build their requests from."""
        results: dict[str, Json] = {name: c.value for name, c in self.chosen.items()}
        whole = (o for o in self.operations.values() if o.state == State.SUCCEEDED and o.shredded_at is None)
        results |= {o.step: o.result for o in whole}  # half a result is none
        return Facts(input=self.run.input, results=results)

    def done(self, name: str) -> bool:
        """Whether a step has its result."""
        return name in self.chosen or self._state(name) == State.SUCCEEDED

    def _state(self, name: str) -> str:
        operation = self.operations.get(name)
        return operation.state if operation else ""

    def version(self, name: str, *, at_least: int = 1) -> int:
        """The newest intent of a step: a person may have made a new one."""
        operation = self.operations.get(name)
        return operation.intent_version if operation else at_least

    def startable(self) -> list[Step | Choice]:
        """Steps that nothing is known of or that wait for their time, and whose needs are met."""
        return [step for step in self.workflow.steps if not self.done(step.name) and self._may_start(step)]

    def _may_start(self, step: Step | Choice) -> bool:
        if not all(self.done(needed) for needed in self.workflow.needs(step)):
            return False
        operation = self.operations.get(step.name)
        return operation is None or (
            operation.state in (State.READY, State.FAILED_RETRYABLE) and operation.escalated_at is None
        )

    @property
    def finished(self) -> bool:
        """Whether every step has its result."""
        return all(self.done(step.name) for step in self.workflow.steps)

    def in_state(self, *states: State) -> list[Operation]:
        """Forward operations in one of these states, in the order of their steps."""
        return [o for step in self.workflow.effects if (o := self.operations.get(step.name)) and o.state in states]

    @property
    def unknown(self) -> list[Operation]:
        """Steps in flight or of unknown outcome."""
        return self.in_state(State.PENDING, State.AMBIGUOUS)

    @property
    def given_up(self) -> list[Operation]:
        """Steps that a person stopped while nobody knew whether they were applied."""
        return [operation for operation in self.in_state(State.TERMINATED) if operation.given_up]

    @property
    def waiting(self) -> list[Operation]:
        """Steps that wait for their time, for a repair or for a person's consent."""
        return self.in_state(State.READY, State.FAILED_RETRYABLE, State.AWAITING_APPROVAL)

    @property
    def failed(self) -> list[Operation]:
        """Steps that failed for good."""
        return self.in_state(State.FAILED_TERMINAL)

    @property
    def pivoted(self) -> bool:
        """Whether the pivot was applied: the way is forward only."""
        pivot = self.workflow.pivot
        return pivot is not None and self._state(pivot.name) == State.SUCCEEDED

    @property
    def applied(self) -> list[Step]:
        """Steps with an effect that was applied (or asserted so), in their order."""
        done = (step for step in self.workflow.effects if self._state(step.name) == State.SUCCEEDED)
        return [step for step in done if has_effect(step)]

    def undo(self, step: Step) -> Operation | None:
        """The newest undo of a step."""
        return self.operations.get(UNDO + step.name)

    def undone(self, step: Step) -> bool:
        """Whether a step's effect is reversed, or a person vouched that it was."""
        return step.name in self.run.waived or self._state(UNDO + step.name) == State.SUCCEEDED

    def to_undo(self) -> list[Step]:
        """Applied steps that still wait for their undo, those first that may be undone first."""
        return [step for step in reversed(self.applied) if not self.undone(step)]

    def undoable(self) -> list[Step]:
        """Steps whose undo may start now: those that must be undone before them are."""
        left = {step.name for step in self.to_undo()}
        return [step for step in self.to_undo() if step.undo and not left & set(self.workflow.undo_needs(step))]


def has_effect(call: Step | Operation) -> bool:
    """Whether it changes anything outside, so that there is something to undo or to tell about."""
    try:
        return registry.spec(call.provider, call.action).repeat is not Repeat.READ
    except registry.Unregistered:
        return True  # what is not known here is not taken for harmless


def cannot_be_undone(workflow: Workflow) -> list[tuple[str, str]]:
    """(step, reason) of what a run of this workflow cannot take back, for people to read before it starts."""
    never = [step for step in workflow.effects if step.undo is None and has_effect(step)]
    return [(step.name, step.cannot_undo or "no undo is declared") for step in never]


def next_due(operations: Iterable[Operation]) -> datetime | None:
    """When the first of them is due, if any is."""
    return min((o.due_at for o in operations if o.due_at is not None), default=None)
