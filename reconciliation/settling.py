"""Settling: write what came of an attempt, and keep it as evidence even where it can settle nothing any more."""

from __future__ import annotations

from dataclasses import replace

import structlog
from django.db import (
    DataError,
    IntegrityError,
    connections,
)

from . import settlement, spool, transition, workers
from .actors import Actor
from .claims import DATABASE_ERRORS, Claim
from .models import JournalEntry, Operation
from .outcomes import Disposition, Outcome, stored_outcome
from .settlement import Judged
from .states import State
from .transition import Moved, TransitionRefused

log = structlog.get_logger(__name__)


def settle(claim: Claim, judged: Judged) -> Outcome:
    """Write what came of an attempt. A receipt is evidence first: it is kept even where it can settle nothing."""
    try:
        moved = _write_settlement(claim, judged)
    except transition.ReportedApplied:
        # An earlier attempt has been reported as applied meanwhile: this refusal speaks for its own attempt only.
        return settle(claim, settlement.contradicted(claim, judged))
    except TransitionRefused as refusal:
        return _too_late(claim, judged, refusal)
    except IntegrityError as error:
        if judged.to is State.SUCCEEDED:
            # One effect at the provider proves one operation: this one is another's, which a person must sort out.
            return settle(claim, settlement.belongs_to_another(claim, judged))
        return _settle_once_more(claim, judged, error)
    except (DataError, ValueError) as error:  # it holds what no column can: the attempt is unknown, and looked up
        return _settle_once_more(claim, settlement.unreadable(claim), error)
    except DATABASE_ERRORS as error:
        return _settle_once_more(claim, judged, error)
    return Outcome(
        pk=claim.subject.pk,
        state=judged.to,
        disposition=Disposition.EXECUTED,
        result=judged.result,
        reason_code=judged.reason_code,
        at=moved.at,
    )


def _write_settlement(claim: Claim, judged: Judged) -> Moved:
    return transition.transition(
        claim.subject,
        to=judged.to,
        generation=claim.generation,
        guard=("held", "unreported") if judged.to in _FAILED and claim.attempt > 1 else ("held",),
        patch=judged.patch,
        after=judged.after,
        observed=[judged.observed],
        fact=me().fact(judged.reason_code, attempt=claim.attempt),
    )


def me() -> Actor:
    return Actor(id=workers.me(), kind="worker")


_FAILED = (State.FAILED_RETRYABLE, State.FAILED_TERMINAL)


def _settle_once_more(claim: Claim, judged: Judged, error: Exception) -> Outcome:
    """The COMMIT errored or the settlement was refused: it may have been written. Ask, then keep the receipt alone."""
    log.error("settlement_failed", operation=claim.subject.pk, attempt=claim.attempt, error=type(error).__name__)
    connections[transition.ALIAS].close()
    try:
        moved = _write_settlement(claim, judged)
    except TransitionRefused as refusal:
        return _too_late(claim, judged, refusal)
    except DATABASE_ERRORS:
        _keep_receipt(claim, judged)
        return unsettled(claim)
    return replace(unsettled(claim), state=judged.to, result=judged.result, at=moved.at)


def _keep_receipt(claim: Claim, judged: Judged) -> None:
    """Journal it alone; if that fails too, spool it. Nothing is sent again: the lease runs out into `ambiguous`."""
    connections[transition.ALIAS].close()
    _report(claim, judged)
    log.critical("receipt_kept_unsettled", operation=claim.subject.pk, attempt=claim.attempt)


def _report(claim: Claim, judged: Judged) -> None:
    report = replace(judged.observed, kind="late_report")
    try:
        transition.note(claim.subject, [report], look_soon=True)
    except DATABASE_ERRORS:
        spool.keep(claim.subject, report)


def _too_late(claim: Claim, judged: Judged, refusal: TransitionRefused) -> Outcome:
    """Another generation owns it now: what we saw is kept and judged by others. Unless our first write had landed."""
    try:
        if not _already_written(claim, judged):
            _report_late(claim, judged, refusal)
        return stored_outcome(Operation.objects.get(pk=claim.subject.pk))
    except DATABASE_ERRORS:
        _keep_receipt(claim, judged)
        return unsettled(claim)


def _report_late(claim: Claim, judged: Judged, refusal: TransitionRefused) -> None:
    transition.note(claim.subject, [replace(judged.observed, kind="late_report")], look_soon=True)
    fact = me().fact("stale_worker_refused", attempt=claim.attempt, verdict=refusal.verdict)
    transition.refuse(subject=claim.subject, tenant=claim.tenant, fact=fact)
    log.warning("stale_worker_refused", operation=claim.subject.pk, generation=claim.generation)


def _already_written(claim: Claim, judged: Judged) -> bool:
    """Whether this claim's settlement is on record; its late report, or somebody's finding, is not that."""
    return JournalEntry.objects.filter(
        operation_id=claim.subject.pk,
        generation=claim.generation,
        attempt=claim.attempt,
        kind=judged.observed.kind,
    ).exists()


def unsettled(claim: Claim) -> Outcome:
    """What is told where nothing could be written: the lease runs out, and then it is found out."""
    return Outcome(
        pk=claim.subject.pk,
        state=State.PENDING,
        disposition=Disposition.EXECUTED,
        result={},
        reason_code="settlement_failed",
    )
