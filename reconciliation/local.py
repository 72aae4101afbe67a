"""Local effects: what is done in this database commits in one transaction with its settlement.

The claim is committed before, as for every other action; the effect, the fence and the settlement are the second
commit. So a worker that dies anywhere leaves both or neither, and a lease that ran out proves that nothing was applied:
whoever ends it raises the generation, and a transaction under the old one is refused by its fence and rolls back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import structlog
from django.db import DatabaseError, IntegrityError, ProgrammingError, connections, transaction

from . import policy, settlement, settling, storable, transition
from .actors import SYSTEM
from .claims import DATABASE_ERRORS, Claim, tried_since
from .models import JournalEntry, Operation
from .outcomes import Disposition, Outcome, stored_outcome
from .policy import RetryPolicy
from .providers import sql
from .providers.base import ActionSpec, Json, NotSent, OwnFault, ProviderError, Receipt, Repeat, RolledBack
from .scrub import fault
from .settlement import Judged
from .states import State
from .transition import Moved, Observed, TransitionRefused

log = structlog.get_logger(__name__)


def perform(claim: Claim) -> Outcome:
    """Do the claimed effect and settle it in one transaction; or settle that nothing of it was applied."""
    try:
        moved, judged = _commit(claim)
    except transition.TransactionLeft:
        log.critical("transaction_left", operation=claim.subject.pk, action=_name(claim))
        return settling.settle(claim, settlement.left_transaction(claim))
    except Exception as error:
        log.info("effect_rolled_back", operation=claim.subject.pk, attempt=claim.attempt, **fault(error))
        return _settle_rolled_back(claim, settlement.judge(claim, _proof(claim, error)))
    return _executed(claim, judged, moved)


def _commit(claim: Claim) -> tuple[Moved, Judged]:
    """The one transaction. Whatever is raised in here has rolled back everything that was done in here."""
    left = claim.send_by - policy.boot_seconds()
    if left <= 0:
        raise NotSent("the time to begin had passed before the effect could begin")
    generation = claim.generation
    with transaction.atomic(using=transition.ALIAS, durable=True):
        seconds = left + claim.spec.timeout.total_seconds()
        transition.begin_local(claim.subject, generation=generation, seconds=seconds)
        with sql.opened(_name(claim)):
            answer = claim.provider.perform(claim.call())
        if connections[transition.ALIAS].needs_rollback:
            raise RolledBack("The effect marked its transaction to be rolled back.")
        judged = _judged(claim, answer)
        run_generation = claim.held.generation if claim.held else None
        transition.fence_local(claim.subject, generation=generation, run_generation=run_generation)
        return _write(claim, judged), judged


def _judged(claim: Claim, answer: Any) -> Judged:
    if not isinstance(answer, Receipt):
        raise RolledBack("The effect gave no receipt.")
    judged = settlement.judge(claim, storable.receipt(answer))
    judged.observed.row()  # what cannot be written is found here
    if judged.to is not State.SUCCEEDED:
        raise RolledBack("What the effect says it did is not what was asked.")
    return judged


def _name(claim: Claim) -> str:
    return f"{claim.provider.name}/{claim.action}"


def _write(claim: Claim, judged: Judged) -> Moved:
    return transition.transition(
        claim.subject,
        to=judged.to,
        generation=claim.generation,
        guard=("held",),
        patch=judged.patch,
        after=judged.after,
        observed=[judged.observed],
        fact=settling.me().fact(judged.reason_code, attempt=claim.attempt),
    )


def _executed(claim: Claim, judged: Judged, moved: Moved) -> Outcome:
    return Outcome(
        pk=claim.subject.pk, state=judged.to, disposition=Disposition.EXECUTED, result=judged.result,
        reason_code=judged.reason_code, at=moved.at,
    )  # fmt: skip


# What was rolled back


def _proof(claim: Claim, error: Exception) -> Exception:
    """The error as what it proves: nothing was applied. What the effect says of trying again is kept."""
    if isinstance(error, ProviderError) and policy.classify(error, claim.spec) in policy.NOT_APPLIED:
        return error
    if isinstance(error, TransitionRefused):
        return RolledBack(error.sentence)
    if isinstance(error, transaction.TransactionManagementError):
        what = "tried to end its transaction, or went on in it after an error"
        return OwnFault(f"{_name(claim)} {what}: its transaction is ended by its settlement alone.")
    if isinstance(error, ProgrammingError):  # a missing table or right, a statement that cannot be read
        return OwnFault(f"The database cannot do what {_name(claim)} asks of it{_code(error)}.")
    if isinstance(error, IntegrityError) and "one_effect_one_operation" in str(error):
        return OwnFault(f"The id that {_name(claim)} gave is the proof of another operation already.")
    if isinstance(error, DatabaseError):
        return RolledBack(f"The database refused it ({type(error).__name__}{_code(error)}).")
    return RolledBack(f"The effect raised {type(error).__name__}.")


def _code(error: BaseException) -> str:
    """The five signs by which PostgreSQL names an error; nothing of its text, which may hold data."""
    code = getattr(error.__cause__, "sqlstate", None)
    return f", {code}" if code else ""


def _settle_rolled_back(claim: Claim, judged: Judged) -> Outcome:
    """Say so in the ledger. Where the COMMIT errored, this waits for what is left of it and asks how it ended.

    Nothing is kept beside the ledger where this cannot be written: the lease runs out, and that says the same.
    """
    for last in (False, True):
        try:
            return _executed(claim, judged, _write(claim, judged))
        except TransitionRefused as refusal:
            return _settled_meanwhile(claim, refusal)
        except DATABASE_ERRORS as error:
            log.error("settlement_failed", operation=claim.subject.pk, last=last, error=type(error).__name__)
            connections[transition.ALIAS].close()
    return settling.unsettled(claim)


def _settled_meanwhile(claim: Claim, refusal: TransitionRefused) -> Outcome:
    """The COMMIT had landed although it errored; or another generation owns the operation now."""
    operation = Operation.objects.get(pk=claim.subject.pk)
    mine = JournalEntry.objects.filter(operation=operation, generation=claim.generation, kind="receipt").exists()
    if mine:
        return replace(stored_outcome(operation), disposition=Disposition.EXECUTED, replayed=False)
    fact = settling.me().fact("stale_worker_refused", attempt=claim.attempt, verdict=refusal.verdict)
    transition.refuse(subject=claim.subject, tenant=claim.tenant, fact=fact)
    log.warning("stale_worker_refused", operation=operation.pk, generation=claim.generation)
    return stored_outcome(operation)


# What a lost worker leaves


def is_local(operation: Operation, spec: ActionSpec | None, attempts: Iterable[int]) -> bool:
    """Whether each of `attempts` was made as a local effect, by what was recorded when it began.

    An action that was declared otherwise then is not proven anything by what it declares now.
    """
    asked = set(attempts)
    if spec is None or spec.repeat is not Repeat.LOCAL or operation.sighted or not asked:
        return False
    kinds = ("attempt_started", "restored")  # what a restored ledger lost, it lost with its effect
    begun = JournalEntry.objects.filter(operation=operation, kind__in=kinds, attempt__in=asked)
    return {entry.attempt for entry in begun if '"local"' in entry.data} == asked


def expire(operation: Operation, spec: ActionSpec) -> None:
    """End a lease that ran out. Nothing was applied under it: from now on its transaction cannot commit any more.

    Raises LeaseLive while it lives, StaleVersion where it was settled meanwhile.
    """
    lost = _Lost.of(operation, spec)
    judged = settlement.judge(lost, RolledBack("Its worker was lost before the effect was committed."))
    transition.transition(
        operation.subject,
        to=judged.to,
        version=operation.version,
        patch={**judged.patch, "generation": operation.generation + 1},
        after=judged.after,
        guard=("lease_over",),
        observed=[
            Observed(
                kind="lease_expired",
                attempt=operation.attempts,
                generation=operation.generation,
                data={"owner": operation.lease_owner, "local": True},
            )
        ],
        fact=SYSTEM.fact("lease_expired", owner=operation.lease_owner, generation=operation.generation),
    )


@dataclass(frozen=True, kw_only=True)
class _Lost:
    """An attempt whose worker says nothing any more, as settlement.judge() reads it."""

    spec: ActionSpec
    attempt: int
    generation: int
    unknown: tuple[int, ...]
    identical_replays: int
    last_error: str
    first_sent_at: datetime | None
    retry: RetryPolicy
    spent_is_final: bool
    elapsed: float
    cost: int
    provider: Any = None
    request: Json = field(default_factory=dict)

    @classmethod
    def of(cls, operation: Operation, spec: ActionSpec) -> _Lost:
        retry = RetryPolicy.read(operation.retry_policy, spec)
        since = tried_since(operation, retry)
        return cls(
            spec=spec,
            attempt=operation.attempts,
            generation=operation.generation,
            unknown=tuple(operation.unknown_attempts),
            identical_replays=operation.identical_replays,
            last_error=operation.error_class,
            first_sent_at=operation.first_sent_at,
            retry=retry,
            spent_is_final=operation.spent_is_final,
            elapsed=(transition.database_now() - since).total_seconds() if since else 0.0,
            cost=operation.cost_minor,
        )
