"""The single writer: every change of the state or mark of an operation, run or approval passes through here.

One call is one statement and, outside a transaction, one commit: the database function takes the locks, reads its
clock, compares version or generation, looks the pair up in the table loaded from states.py, and writes row, journal
and audit entry together, or refuses with a verdict that becomes one of the errors below.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, ClassVar

import orjson
from django.conf import settings
from django.db import connections

from audit import log
from audit.log import Fact
from audit.verify import Head

from . import here, prepared
from .models import Approval, Job, Limit, Operation, Run, Tombstone
from .states import Kind, Subject

ALIAS = here.ALIAS
# Made once: json.dumps with options makes a new encoder at every call.
_write = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


# What a new operation holds unless its row says otherwise; a column forgotten here is refused by its NOT NULL.
_BLANK = {
    "execution": "aftercall", "retry_policy": "", "spent_is_final": True, "consent": "", "request_shown": "{}",
    "request_sealed": "", "currency": "", "generation": 0, "lease_owner": "", "attempts": 0, "reason_code": "",
    "escalation_reason": "", "requested_by": "", "on_behalf_of": "",
}  # fmt: skip
_BIRTH_TIMES = {"lease_until", "due_at", "first_sent_at", "last_sent_at", "same_key_until", "escalated_at"}


OPEN = (
    "SELECT * FROM ledger_open(%s::json, %s::jsonb, %s::jsonb, %s, %s::jsonb, %s, %s::jsonb, %s::numeric, %s, %s, %s)"
)
MOVE = (
    "SELECT * FROM ledger_move_operation"
    "(%s, %s, %s, %s, %s::jsonb, %s::jsonb, %s::jsonb, %s::text[], %s::jsonb, %s, %s::jsonb, %s, %s::jsonb)"
)


class TransitionRefused(Exception):
    """A move that was not made. `verdict` names why, `source` the state that was found, `target` the one wanted."""

    verdict: ClassVar[str] = "refused"
    sentence: str = "The move was refused."

    def __init__(self, *, kind: str, pk: int | None, source: str, target: str | None) -> None:
        super().__init__(f"{kind} {pk}: {source or 'new'} -> {target or source}: {self.sentence}")
        self.kind, self.pk, self.source, self.target = kind, pk, source, target


class Gone(TransitionRefused):
    verdict, sentence = "gone", "There is no such row."


class StaleVersion(TransitionRefused):
    verdict, sentence = "stale_version", "It changed since it was read; read it again and decide anew."


class StaleGeneration(TransitionRefused):
    verdict, sentence = "stale_generation", "The lease is over or another holder has it; nothing more may be written."


class LeaseLive(TransitionRefused):
    verdict, sentence = "lease_live", "A live lease holds it; wait for its end."


class KeyForgotten(TransitionRefused):
    verdict, sentence = "key_forgotten", "The provider may have forgotten the key; the same key is no longer safe."


class NotDue(TransitionRefused):
    verdict, sentence = "not_due", "It may not be claimed yet."


class TimeSpent(TransitionRefused):
    verdict, sentence = "time_spent", "It has been tried for as long as its step may be; a person may still retry it."


class SpendCap(TransitionRefused):
    verdict, sentence = "spend_cap", "It has cost as much as its step may; a person may still retry it."


class NewerSent(TransitionRefused):
    verdict, sentence = "newer_sent", "A newer operation on the same object was sent; repeating this one would undo it."


class ReportedApplied(TransitionRefused):
    verdict, sentence = (
        "reported_applied",
        "A late report says that it was applied; nothing may be sent.",
    )


class RunNotHeld(TransitionRefused):
    verdict, sentence = "run_not_held", "Its run is not running under this holder; a stopped run sends nothing."


class StepUnknown(TransitionRefused):
    verdict, sentence = "step_unknown", "One of its steps is in flight or unknown; find out first."


class LockHeld(TransitionRefused):
    verdict, sentence = "lock_held", "Another run works on the same thing; this one waits for its end."


class NotApproved(TransitionRefused):
    verdict, sentence = "not_approved", "It needs a person's consent, which nobody has given."


class ApprovalPastUseBy(TransitionRefused):
    verdict, sentence = "approval_past_use_by", "The consent was not used in time; it must be asked for again."


class ApprovalUsed(TransitionRefused):
    verdict, sentence = "approval_used", "The consent was used up already; it holds for one time."


class ApprovalOfAnother(TransitionRefused):
    verdict, sentence = "approval_of_another", "The consent was given to another action than this one."


class ApprovalExpired(TransitionRefused):
    verdict, sentence = (
        "approval_expired",
        "The time in which it could be approved is over; it must be asked for again.",
    )


class OwnRequest(TransitionRefused):
    verdict, sentence = (
        "own_request",
        "Who asks, for whom it is asked and who owns the token may not approve it; another person must.",
    )


class NotInTable(TransitionRefused):
    verdict, sentence = "not_in_table", "The transition table has no such move."


class OlderVersionOpen(TransitionRefused):
    verdict, sentence = (
        "older_version_open",
        "An older version of this intent is in flight or unknown; settle it first.",
    )


class NewerVersionExists(TransitionRefused):
    verdict, sentence = "newer_version_exists", "A newer version of this intent exists; the older one is void."


class OlderVersionWaiting(TransitionRefused):
    verdict, sentence = "older_version_waiting", "An older version still waits; withdraw it first."


class Shredded(TransitionRefused):
    verdict, sentence = (
        "shredded",
        "What was sealed of it was shredded, so it cannot be sent; submit it anew with a higher intent_version.",
    )


class Waived(TransitionRefused):
    verdict, sentence = (
        "waived",
        "Two people vouched that this was undone by hand; sending it would undo it twice.",
    )


class Pruned(TransitionRefused):
    verdict, sentence = "pruned", "It was settled and pruned; what it came to is on record, and it is not done again."


class TooOld(TransitionRefused):
    verdict, sentence = "too_old", "Its intended_at is older than anything that is still known here."


class Limited(TransitionRefused):
    """A claim that a stop switch, a limit or a ceiling holds back. Nothing was sent and no attempt was counted."""

    verdict, sentence = "limited", "It is held back and waits."

    def __init__(self, *, kind: str, pk: int | None, source: str, target: str | None) -> None:
        code, _, wait = source.partition(" ")
        self.code, self.wait, self.limit_id = code, float(wait) if wait else None, pk
        self.sentence = HELD_BACK.get(code, self.sentence)
        super().__init__(kind=kind, pk=pk, source=code, target=target)


# What a person is told of each way of being held back.
HELD_BACK = {
    "restored": "This ledger may have been restored from a backup; nothing is sent until a person releases it.",
    "maybe_replayed": "The ledger was restored, and this may have been sent before; it is looked up first.",
    "stopped": "A stop switch holds it back; it goes on when a person releases the switch.",
    "limit_concurrency": "As many are in flight as its limit allows; it goes on when there is room.",
    "limit_rate": "As many were sent as its limit allows in this window; it goes on when there is room.",
    "limit_amount": "As much was sent as its limit allows in this window; it goes on when there is room.",
    "ceiling_passed": "It would take its object above what all of this action may come to; unknown ones count.",
}


class TransactionLeft(TransitionRefused):
    verdict, sentence = (
        "transaction_left",
        "The effect left the transaction that it was given, so what it did may have been committed without a result.",
    )


REFUSALS: dict[str, type[TransitionRefused]] = {
    error.verdict: error
    for error in (
        Gone, StaleVersion, StaleGeneration, LeaseLive, KeyForgotten, NotDue, NewerSent, ReportedApplied, RunNotHeld,
        StepUnknown, LockHeld, NotApproved, ApprovalPastUseBy, ApprovalUsed, ApprovalOfAnother, ApprovalExpired,
        OwnRequest, NotInTable, OlderVersionOpen, NewerVersionExists, OlderVersionWaiting, Shredded, Pruned, TooOld,
        Limited, TransactionLeft, Waived, TimeSpent, SpendCap,
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One journal entry to be. `data` holds fields that may be seen, `sealed` a token of the others."""

    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)
    attempt: int | None = None
    generation: int | None = None
    observer: str = ""
    sealed: str = ""

    @cached_property
    def written(self) -> str:
        """The data's text, written once: it is tried before the row is needed."""
        return _write(self.data).replace("\\u0000", "\\ufffd")

    def row(self) -> dict[str, Any]:
        """As the database functions take it. Raises TypeError or ValueError for data that is not JSON."""
        return {
            "kind": self.kind,
            "data": self.written,
            "attempt": self.attempt,
            "generation": self.generation,
            "observer": self.observer,
            "sealed": self.sealed,
        }


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A move that was made: the row's id, the database's time, the state it came from, the version it has now."""

    pk: int
    at: datetime
    source: str
    version: int


def open_operation(
    *,
    row: Mapping[str, Any],
    after: Mapping[str, float],
    observed: Sequence[Observed],
    fact: Fact,
    run_generation: int | None = None,
    ask: Mapping[str, Any] | None = None,
) -> Moved | None:
    """Record a new operation in `row["state"]`. None where its identity is already known.

    `ask` is the request for consent that is born with one in `awaiting_approval` (consent.request()).

    Raises RunNotHeld, OlderVersionOpen, OlderVersionWaiting, NewerVersionExists, NotInTable, Pruned, TooOld, and
    Limited where it is to be `pending` and something holds it back.
    """
    if unknown := set(after) - _BIRTH_TIMES:
        raise ValueError(f"a birth sets no {', '.join(sorted(unknown))}")
    body, openings = log.body(fact)
    verdict, pk, at, detail = _call(
        OPEN,
        [
            _json({**_BLANK, **row}), _json(after), _journal(observed), body, _json(openings or None), run_generation,
            _json(ask), row.get("horizon"), settings.AFTERCALL_MASS_LIMIT, row.get("held_by"), row.get("held_code"),
        ],
    )  # fmt: skip
    if verdict == "exists":
        return None
    _raise_unless_moved(verdict, kind=Kind.OPERATION, pk=pk, source=detail, target=str(row["state"]))
    return Moved(pk=pk, at=at, source="", version=1)


def transition(
    subject: Subject,
    *,
    to: str | None,
    fact: Fact,
    version: int | None = None,
    generation: int | None = None,
    patch: Mapping[str, Any] | None = None,
    after: Mapping[str, float] | None = None,
    once: Mapping[str, float] | None = None,
    guard: Sequence[str] = (),
    observed: Sequence[Observed] = (),
    run_generation: int | None = None,
    consent: Mapping[str, Any] | None = None,
) -> Moved:
    """Move `subject` to state `to` (None keeps the state and changes the mark or a due time).

    Exactly one of `version` (compare-and-set) and `generation` with a guard `held` or `lease_live` (fence) must be
    given. `patch` sets columns to values (and its `cost` is added to what an operation has cost), `after` to seconds
    from the database's now, `once` the same for columns that are still null. `consent` holds under "ask" the request
    for consent that goes with a move to `awaiting_approval`, or under "use" the approval of an operator action that
    this move uses up. Raises a TransitionRefused that names from, to and id; nothing is written then.
    """
    if version is None and not (generation is not None and {"held", "lease_live"} & set(guard)):
        raise ValueError("a transition needs the version it was decided on, or the generation that it is fenced by")
    body, openings = log.body(_with_mark(fact, patch or {}, after or {}))
    common = [subject.pk, version, generation, to, _json(patch or {}), _json(after) if after else None]
    tail = [_journal(observed), body, _json(openings or None)]
    if subject.kind is Kind.OPERATION:
        statement = MOVE
        values = [*common, _json(once) if once else None, list(guard), *tail, run_generation, _json(consent)]
    else:
        statement = (
            "SELECT * FROM ledger_move_run"
            "(%s, %s, %s, %s, %s::jsonb, %s::jsonb, %s::text[], %s::jsonb, %s, %s::jsonb, %s::jsonb)"
        )
        values = [*common, list(guard), *tail, _json(consent)]
    verdict, pk, at, detail, new_version = _call(statement, values)
    _raise_unless_moved(verdict, kind=subject.kind, pk=pk, source=detail, target=to)
    return Moved(pk=pk, at=at, source=detail, version=new_version)


def unmarked(row: Operation | Run) -> dict[str, Any]:
    """The patch that clears the escalation mark, where there is one."""
    return {"escalated_at": None, "escalation_reason": ""} if row.escalated_at is not None else {}


def _with_mark(fact: Fact, patch: Mapping[str, Any], after: Mapping[str, float]) -> Fact:
    """Setting and clearing the mark is a decision too: it stands in the entry."""
    if "escalated_at" in after or patch.get("escalated_at") is not None:
        return replace(fact, details={**fact.details, "mark": patch["escalation_reason"]})
    if "escalated_at" in patch and patch["escalated_at"] is None:
        return replace(fact, details={**fact.details, "mark": "cleared"})
    return fact


def open_run(
    *, row: Mapping[str, Any], after: Mapping[str, float], fact: Fact, horizon: float | None = None
) -> Moved | None:
    """Record a new run. None where its identity is already known; raises Pruned where it was, and its row is gone, and
    TooOld where nothing knows it and it was asked for more than `horizon` seconds ago.
    """
    body, openings = log.body(fact)
    verdict, pk, at, detail = _call(
        "SELECT * FROM ledger_open_run(%s::jsonb, %s::jsonb, %s, %s::jsonb, %s::numeric)",
        [_json(row), _json(after), body, _json(openings or None), horizon],
    )
    if verdict == "exists":
        return None
    _raise_unless_moved(verdict, kind=Kind.RUN, pk=pk, source=detail, target=str(row["state"]))
    return Moved(pk=pk, at=at, source="", version=1)


def open_approval(
    subject: Operation | Run | Limit | Job, *, version: int, ask: Mapping[str, Any], fact: Fact
) -> tuple[int, bool]:
    """Ask for a second person's consent to an action on `subject`. Returns (approval's id, whether it is new).

    Raises StaleVersion where the subject is not what the asker saw.
    """
    body, openings = log.body(fact)
    pks = {kind: subject.pk if isinstance(subject, kind) else None for kind in (Operation, Run, Limit, Job)}
    asked = {**ask, "limit_id": pks[Limit], "job_id": pks[Job]}
    verdict, pk, _, detail = _call(
        "SELECT * FROM ledger_open_approval(%s, %s, %s, %s::jsonb, %s, %s::jsonb)",
        [pks[Operation], pks[Run], version, _json(asked), body, _json(openings or None)],
    )
    if verdict == "exists":
        return pk, False
    kind = Kind.OPERATION if isinstance(subject, Operation) else Kind.RUN if isinstance(subject, Run) else Kind.APPROVAL
    _raise_unless_moved(verdict, kind=kind, pk=pk, source=detail, target=None)
    return pk, True


def policy_changed(subject: Limit | Job, *, use: Mapping[str, Any] | None, fact: Fact) -> None:
    """Say, in the transaction of the change and under its row's lock, that a limit or a job was changed.

    Uses up the consent that allowed it, where one is needed, and ends the requests that were about what it was before.
    Raises the TransitionRefused that says why the consent cannot be used.
    """
    body, openings = log.body(fact)
    limit, job = (subject.pk, None) if isinstance(subject, Limit) else (None, subject.pk)
    (refused,) = _call(
        "SELECT ledger_policy_changed(%s, %s, %s::jsonb, %s, %s::jsonb)",
        [limit, job, _json(use) if use else None, body, _json(openings or None)],
    )
    _raise_unless_moved(refused or "moved", kind=Kind.APPROVAL, pk=None, source="", target=None)


def move_approval(
    approval: Approval,
    *,
    to: str,
    fact: Fact,
    who: Sequence[str] = (),
    patch: Mapping[str, Any] | None = None,
    operation_to: str | None = None,
    operation_patch: Mapping[str, Any] | None = None,
    operation_after: Mapping[str, float] | None = None,
    version: int | None = None,
) -> Moved:
    """Decide about an approval or end it, and move the operation that waits for it, in one statement.

    `who` holds every name under which the decider is known: where one of them is among those who may never approve,
    OwnRequest is raised. Expiry is judged by the database's clock after the locks are held; the moment itself is late.
    """
    body, openings = log.body(fact)
    verdict, pk, at, detail, new_version = _call(
        "SELECT * FROM ledger_move_approval"
        "(%s, %s, %s, %s::text[], %s::jsonb, %s, %s::jsonb, %s::jsonb, %s, %s::jsonb)",
        [
            approval.pk, approval.version if version is None else version, to, list(who), _json(patch or {}),
            operation_to, _json(operation_patch or {}), _json(operation_after), body, _json(openings or None),
        ],
    )  # fmt: skip
    _raise_unless_moved(verdict, kind=Kind.APPROVAL, pk=pk, source=detail, target=to)
    return Moved(pk=pk, at=at, source=detail, version=new_version)


def ask_for_proposal(
    subject: Subject, *, generation: int, seconds: float, step: str, version: int, most: int, observer: str
) -> int:
    """Put on record that a choice step is asked now, and prolong the run's lease by `seconds`.

    Returns which proposal of this version it is; 0 where `most` were asked for already. Raises RunNotHeld.
    """
    row = {"step": step, "version": version, "most": most, "observer": observer}
    values = [subject.pk, generation, seconds, _json(row)]
    (number,) = _call("SELECT ledger_ask_for_proposal(%s, %s, %s::numeric, %s::jsonb)", values)
    if number is None:
        raise RunNotHeld(kind=subject.kind, pk=subject.pk, source="", target=None)
    return int(number)


def choose(subject: Subject, *, generation: int, row: Mapping[str, Any]) -> bool:
    """Store what a choice step proposed. False where another holder's valid proposal of this version came first.

    Raises RunNotHeld where the lease on the run is over: the proposal is kept then, as one that was refused.
    """
    (verdict,) = _call("SELECT ledger_choose(%s, %s, %s::jsonb)", [subject.pk, generation, _json(row)])
    if verdict == "run_not_held":
        raise RunNotHeld(kind=subject.kind, pk=subject.pk, source="", target=None)
    return bool(verdict == "moved")


def note(subject: Subject, observed: Sequence[Observed], *, look_soon: bool = False) -> datetime:
    """Journal alone: keep what was observed where nothing is decided by it. Returns the database's time."""
    is_operation = subject.kind is Kind.OPERATION
    (at,) = _call(
        "SELECT ledger_note(%s, %s, %s::jsonb, %s)",
        [subject.pk if is_operation else None, None if is_operation else subject.pk, _journal(observed), look_soon],
    )
    when: datetime = at
    return when


def refuse(*, subject: Subject | str, tenant: str, fact: Fact) -> None:
    """Record a refused attempt, committed apart from the transaction that it refuses."""
    connection = connections[ALIAS]
    if not connection.in_atomic_block:
        log.append(subject=str(subject), tenant=tenant, event="refused", fact=fact)
        return
    body, openings = log.body(fact)
    apart = connection.copy(alias=ALIAS)
    try:
        with apart.cursor() as cursor:
            cursor.execute(
                "SELECT audit_append(%s, %s, 'refused', NULL, NULL, NULL, %s, %s::jsonb)",
                [str(subject), tenant, body, _json(openings or None)],
            )
    finally:
        apart.close()


def heartbeat(subject: Subject, *, generation: int, seconds: float, longest: float) -> datetime | None:
    """Prolong a live lease by `seconds`, never beyond `longest` seconds after the send. None: it is over, stop."""
    values = [subject.pk, generation, seconds, longest]
    (until,) = _call("SELECT ledger_heartbeat(%s, %s, %s::numeric, %s::numeric)", values)
    lease: datetime | None = until
    return lease


def heartbeat_run(subject: Subject, *, generation: int, seconds: float) -> datetime | None:
    """Prolong the live lease of a run to `seconds` from now, never shorten it. None: it is over, stop."""
    (until,) = _call("SELECT ledger_heartbeat_run(%s, %s, %s::numeric)", [subject.pk, generation, seconds])
    lease: datetime | None = until
    return lease


# Local effects: an open transaction of the caller's, in which the effect and its settlement are one


def begin_local(subject: Subject, *, generation: int, seconds: float) -> None:
    """Mark the open transaction: without fence_local() the database refuses to commit it, and ends it in `seconds`."""
    _call("SELECT ledger_begin_local(%s, %s, %s)", [subject.pk, generation, max(1, int(seconds * 1000))])


def fence_local(subject: Subject, *, generation: int, run_generation: int | None) -> None:
    """Let the effect in the open transaction be committed with the settlement that comes next.

    Raises StaleGeneration where the lease is over or another has it, RunNotHeld, NotApproved, and TransactionLeft where
    this is not the transaction that begin_local() marked.
    """
    (verdict,) = _call("SELECT ledger_fence_local(%s, %s, %s)", [subject.pk, generation, run_generation])
    _raise_unless_moved(verdict or "moved", kind=subject.kind, pk=subject.pk, source="pending", target="succeeded")


def keep_time(*, known: datetime | None, elapsed: float | None, tolerance: float) -> tuple[datetime, float]:
    """Look at the database's clock (sql/clock.sql). Returns (its time, by how many seconds it was set, noticed now)."""
    at, set_by = _call("SELECT * FROM ledger_keep_time(%s, %s::numeric, %s::numeric)", [known, elapsed, tolerance])
    return at, float(set_by)


# Limits, and what retention takes away


def set_limit(*, row: Mapping[str, Any], fact: Fact) -> int | None:
    """Record a limit; None where one is in force in its place, with whatever number."""
    body, openings = log.body(fact)
    (pk,) = _call("SELECT ledger_set_limit(%s::jsonb, %s, %s::jsonb)", [_json(row), body, _json(openings or None)])
    return None if pk is None else int(pk)


def lift_limit(pk: int, *, version: int, by: str, fact: Fact) -> bool:
    """End a limit and make due what it held back. False where it is at another version or ended."""
    body, openings = log.body(fact)
    values = [pk, version, by, body, _json(openings or None)]
    (lifted,) = _call("SELECT ledger_lift_limit(%s, %s, %s, %s, %s::jsonb)", values)
    return bool(lifted)


def change_limit(pk: int, *, version: int, most: int, fact: Fact) -> bool:
    """Change how much a limit lets through. False where it is at another version, ended, or has no such number."""
    body, openings = log.body(fact)
    values = [pk, version, most, body, _json(openings or None)]
    (changed,) = _call("SELECT ledger_change_limit(%s, %s, %s, %s, %s::jsonb)", values)
    return bool(changed)


def prune(subject: Subject, *, keep: float, fact: Fact) -> str:
    """Take a settled subject's row and journal away and leave a tombstone: "pruned", or why it must stay."""
    body, _none = log.body(fact)
    (verdict,) = _call(f"SELECT ledger_prune_{subject.kind}(%s, %s::numeric, %s)", [subject.pk, keep, body])
    return str(verdict)


def shred(subject: Subject, *, after: float, fact: Fact) -> str:
    """Empty what is sealed of an operation settled `after` seconds ago, or of the proposals that an ended run refused:
    "shredded", or why it must stay.
    """
    body, _none = log.body(fact)
    function = "ledger_shred" if subject.kind is Kind.OPERATION else "ledger_shred_proposals"
    (verdict,) = _call(f"SELECT {function}(%s, %s::numeric, %s)", [subject.pk, after, body])
    return str(verdict)


def forget(*, tombstones_older: float, limit: int) -> int:
    """Drop tombstones and window counts that nothing can ask for any more. Returns how many."""
    (stones,) = _call("SELECT ledger_forget_tombstones(%s::numeric, %s)", [tombstones_older, limit])
    (uses,) = _call("SELECT ledger_forget_uses(%s)", [limit])
    return int(stones) + int(uses)


def forget_messages(*, older: float, discarded: float, limit: int) -> int:
    """Drop messages of the outbox that have been over for `older` seconds, or discarded for `discarded` ones."""
    values = [older, discarded, limit]
    (gone,) = _call("SELECT ledger_forget_messages(%s::numeric, %s::numeric, %s)", values)
    return int(gone)


def take_due(kind: Kind, *, limit: int, again: float) -> list[int]:
    """Ids of due work, each handed to one caller, due again in `again` seconds should that caller be lost."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("SELECT ledger_take_due(%s, %s, %s)", [kind, limit, again])
        return [row[0] for row in cursor.fetchall()]


def database_now() -> datetime:
    """The one clock that decides."""
    (at,) = _call("SELECT aftercall_now()", [])
    when: datetime = at
    return when


def audit_heads() -> Iterator[Head]:
    """Where everything that this module writes stands, for the proof that no audit row is missing."""
    for kind, model in ((Kind.OPERATION, Operation), (Kind.RUN, Run), (Kind.APPROVAL, Approval)):
        for pk, version, state in model._default_manager.values_list("pk", "version", "state").iterator(
            chunk_size=2000
        ):
            yield Head(f"{kind}:{pk}", version, state)
    # What is left of the pruned still says how their chains must end.
    stones = Tombstone._default_manager.values_list("kind", "subject_id", "version")
    for kind_of, subject_id, version in stones.iterator(chunk_size=2000):
        yield Head(f"{kind_of}:{subject_id}", version, "pruned")
    for pk, version, lifted_at in Limit._default_manager.values_list("pk", "version", "lifted_at"):
        yield Head(f"limit:{pk}", version, "lifted" if lifted_at else "set")


def _call(statement: str, values: Sequence[Any]) -> Any:
    """The one row of a statement. The hot ones go without a cursor, unless they are part of a larger transaction."""
    connection = here.connection()
    if statement in (OPEN, MOVE) and not connection.in_atomic_block:
        connection.ensure_connection()
        with connection.wrap_database_errors:
            return prepared.row(connection.connection, statement, values)
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchone()


def _json(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value, default=str).decode()


def _journal(observed: Sequence[Observed]) -> str:
    return orjson.dumps([entry.row() for entry in observed]).decode()


def _raise_unless_moved(verdict: str, *, kind: Kind, pk: int | None, source: str, target: str | None) -> None:
    if verdict != "moved":
        raise REFUSALS[verdict](kind=kind, pk=pk, source=source, target=target)
