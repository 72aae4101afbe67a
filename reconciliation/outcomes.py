"""What a submitter is told: where the operation stands, and whether that is an old answer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from .models import Operation
from .providers.base import Json
from .states import State


class Disposition(StrEnum):
    """What became of one submission of an operation."""

    EXECUTED = "executed"  # this call sent it, and the answer is in `state`
    QUEUED = "queued"
    REPLAY = "replay"  # settled before; nothing was sent now
    STOPPED = "stopped"
    WAIT = "wait"
    IN_PROGRESS = "in_progress"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The answer to one submission. `replayed` with `at` says that it is the stored one, and from when."""

    pk: int
    state: State
    disposition: Disposition
    result: Json
    reason_code: str = ""
    replayed: bool = False
    at: datetime | None = None
    sent: bool = True  # False: no attempt was ever made

    @property
    def outcome(self) -> str:
        """succeeded | failed | unknown | not_sent, as far as it is known."""
        if not self.sent and self.state is not State.SUCCEEDED:
            return "not_sent"
        if self.state is State.SUCCEEDED:
            return "succeeded"
        if self.state in (State.FAILED_TERMINAL, State.FAILED_RETRYABLE):
            return "failed"  # proof of no effect; `state` says whether it will be tried again
        return "not_sent" if self.state in (State.READY, State.AWAITING_APPROVAL) else "unknown"


DISPOSITIONS = {
    State.SUCCEEDED: Disposition.REPLAY,
    State.FAILED_TERMINAL: Disposition.REPLAY,
    State.TERMINATED: Disposition.STOPPED,
    State.PENDING: Disposition.IN_PROGRESS,
}
REFUSED_BY_PEOPLE = ("denied", "approval_expired")  # nothing was sent, and nothing will be


def stored_outcome(operation: Operation) -> Outcome:
    """What the ledger knows, marked as a stored answer with its time."""
    state = State(operation.state)
    disposition = DISPOSITIONS.get(state, Disposition.WAIT)
    if state is State.FAILED_TERMINAL and operation.reason_code in REFUSED_BY_PEOPLE:
        disposition = Disposition.STOPPED
    return Outcome(
        pk=operation.pk,
        state=state,
        disposition=disposition,
        result=operation.result,
        reason_code=operation.reason_code,
        replayed=disposition is Disposition.REPLAY,
        at=operation.settled_at or operation.updated_at,
        sent=operation.attempts > 0,
    )
