"""States and the one transition table, as data.

The table is the guard (its pairs are loaded into `reconciliation_move`, which the database checks on every move), and
it draws the buttons, the docs and the tests. A row says when the move happens, in the words that people read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What can be in a state."""

    OPERATION = "operation"
    RUN = "run"
    APPROVAL = "approval"


@dataclass(frozen=True, slots=True)
class Subject:
    """One row that is in a state. Its name is what the audit log calls it."""

    kind: Kind
    pk: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.pk}"


class State(StrEnum):
    """What is known of an operation (design: operation states)."""

    READY = "ready"
    AWAITING_APPROVAL = "awaiting_approval"
    PENDING = "pending"
    FAILED_RETRYABLE = "failed_retryable"
    AMBIGUOUS = "ambiguous"
    SUCCEEDED = "succeeded"
    FAILED_TERMINAL = "failed_terminal"
    TERMINATED = "terminated"


class RunState(StrEnum):
    """Where a run stands (design: run states)."""

    PENDING = "pending"
    RUNNING = "running"
    AWAITING_APPROVAL = "awaiting_approval"
    UNCERTAIN = "uncertain"
    COMPENSATING = "compensating"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    COMPENSATED = "compensated"
    CANCELLED = "cancelled"


class ApprovalState(StrEnum):
    """What became of a request for a person's consent to one exact action (design: approvals)."""

    WAITING = "waiting"
    APPROVED = "approved"
    CONSUMED = "consumed"
    DENIED = "denied"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"
    SUPERSEDED = "superseded"


class MessageState(StrEnum):
    """What became of a message of the outbox. It has no table of moves: outbox.py is its one writer."""

    WAITING = "waiting"  # to be published
    PUBLISHED = "published"  # there is an operation for it
    STUCK = "stuck"  # it cannot be published as it is; a person must act
    DISCARDED = "discarded"  # a person said that it is not to be published


class Basis(StrEnum):
    """On what an outcome rests."""

    RECEIPT = "receipt"
    LOOK_UP = "look_up"
    CLAIM = "claim"
    ASSERTED = "asserted"


TERMINAL = frozenset({State.SUCCEEDED, State.FAILED_TERMINAL, State.TERMINATED})
RUN_TERMINAL = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.COMPENSATED, RunState.CANCELLED})
APPROVAL_OPEN = frozenset({ApprovalState.WAITING, ApprovalState.APPROVED})


@dataclass(frozen=True)
class Move:
    """One permitted move. `source` None is the birth of the row."""

    kind: Kind
    source: str | None
    target: str
    when: str


def _moves(kind: Kind, source: str | None, **targets: str) -> tuple[Move, ...]:
    return tuple(Move(kind, source, target, when) for target, when in targets.items())


MOVES: tuple[Move, ...] = (
    *_moves(
        Kind.OPERATION,
        None,
        ready="recorded, to be sent later",
        awaiting_approval="recorded, and the action needs a person's consent first",
        pending="recorded and claimed at once",
    ),
    *_moves(
        Kind.OPERATION,
        State.AWAITING_APPROVAL,
        ready="approved, to be sent later",
        pending="approved, and the approval used up by this claim",
        failed_terminal="denied or expired; nothing was sent",
        terminated="stopped by a person; nothing was sent",
        ambiguous="the ledger was restored: it may have been sent since the backup",
    ),
    *_moves(
        Kind.OPERATION,
        State.READY,
        pending="claimed under a lease",
        awaiting_approval="the approval went past its use-by",
        failed_terminal="refused before anything was sent",
        terminated="stopped or withdrawn; nothing was sent",
        ambiguous="the ledger was restored: it may have been sent since the backup",
    ),
    *_moves(
        Kind.OPERATION,
        State.FAILED_RETRYABLE,
        pending="claimed under a lease, for another attempt",
        awaiting_approval="the approval went past its use-by",
        succeeded="proof came that it was applied after all",
        failed_terminal="the budget is spent; no attempt was applied",
        terminated="stopped by a person; no attempt was applied",
        ambiguous="the ledger was restored: it may have been sent since the backup",
    ),
    *_moves(
        Kind.OPERATION,
        State.PENDING,
        succeeded="the provider's answer proves the effect",
        failed_retryable="proven not applied; may be tried again",
        failed_terminal="proven not applied, and refused for good",
        ambiguous="no answer, or one that proves nothing",
        awaiting_approval="a precondition failed just before sending; nothing was sent",
    ),
    *_moves(
        Kind.OPERATION,
        State.AMBIGUOUS,
        succeeded="found at the provider, or asserted by a person",
        failed_retryable="absence proven; may be tried again",
        failed_terminal="absence proven or asserted, and not to be tried again",
        pending="sent again with the same key, where that is safe",
        terminated="stopped by a person; the outcome stays unknown",
    ),
    *_moves(
        Kind.OPERATION,
        State.FAILED_TERMINAL,
        succeeded="proof came that it was applied after all",
        ambiguous="the ledger was restored: what proved its failure may not be the newest that was known",
    ),
    *_moves(Kind.OPERATION, State.TERMINATED, succeeded="proof came that it was applied after all"),
    *_moves(Kind.RUN, None, pending="started"),
    *_moves(
        Kind.RUN,
        RunState.PENDING,
        running="taken by a worker",
        compensating="what was applied is undone",
        cancelled="cancelled by a person or by its schedule",
        failed="a step failed before anything was applied",
    ),
    *_moves(
        Kind.RUN,
        RunState.RUNNING,
        running="taken over after the lease ran out",
        pending="waits for a due time, or its worker was lost",
        uncertain="the outcome of a step is unknown",
        awaiting_approval="a step waits for a person's consent",
        compensating="a step failed for good; what was applied is undone",
        succeeded="every step is verified",
        failed="a step failed before anything was applied",
        cancelled="cancelled by a person or by its schedule",
    ),
    *_moves(
        Kind.RUN,
        RunState.UNCERTAIN,
        running="the unknown step is known now, or is being tried again",
        pending="resumed by a person",
        compensating="what was applied is undone",
        cancelled="cancelled by a person or by its schedule",
    ),
    *_moves(
        Kind.RUN,
        RunState.AWAITING_APPROVAL,
        running="the person decided",
        pending="resumed by a person",
        compensating="what was applied is undone",
        cancelled="cancelled by a person or by its schedule",
    ),
    *_moves(
        Kind.RUN,
        RunState.COMPENSATING,
        compensating="taken by a worker, or taken over after the lease ran out",
        compensated="each applied step is undone or waived",
        cancelled="cancelled by a person",
    ),
    *_moves(Kind.RUN, RunState.CANCELLED, compensating="a person has what was applied undone"),
    *_moves(Kind.APPROVAL, None, waiting="asked for"),
    *_moves(
        Kind.APPROVAL,
        ApprovalState.WAITING,
        approved="a person who may agreed to exactly this, in time",
        denied="a person said no, in time or not",
        expired="nobody decided in time",
        withdrawn="taken back, or what it was for was stopped",
        superseded="what it was for has changed; it is asked anew, or not at all",
    ),
    *_moves(
        Kind.APPROVAL,
        ApprovalState.APPROVED,
        consumed="used up by the claim that sends what was agreed to",
        expired="not used in time",
        withdrawn="taken back, or what it was for was stopped",
        superseded="what it was for has changed; it is asked anew, or not at all",
    ),
    *_moves(
        Kind.APPROVAL,
        ApprovalState.CONSUMED,
        superseded="what was agreed to had changed just before sending; nothing was sent, and it is asked anew",
    ),
)

PAIRS: frozenset[tuple[str, str | None, str]] = frozenset((m.kind, m.source, m.target) for m in MOVES)


def allowed(kind: Kind, source: str | None, target: str) -> bool:
    """Whether the table has the move."""
    return (kind, source, target) in PAIRS


def targets(kind: Kind, source: str) -> tuple[Move, ...]:
    """The moves that lead away from `source`, in the table's order."""
    return tuple(m for m in MOVES if m.kind == kind and m.source == source)


def drawn() -> str:
    """The table in Markdown, as docs/states.md shows it."""
    return "\n\n".join(_drawn(kind, title) for kind, title in _TITLES.items()) + "\n"


_TITLES = {Kind.OPERATION: "Operations", Kind.RUN: "Runs", Kind.APPROVAL: "Approvals"}


def _drawn(kind: Kind, title: str) -> str:
    rows = [f"| {_named(m.source)} | {_named(m.target)} | {m.when} |" for m in MOVES if m.kind == kind]
    return "\n".join([f"### {title}", "", "| from | to | when |", "|---|---|---|", *rows])


def _named(state: str | None) -> str:
    return f"`{state}`" if state else "(new)"
