"""The sweep: finds everything that is due, and does it through the verbs that people call.

A queue task is a wake-up that may come twice, late or never; what is due stands in the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import structlog
from django.conf import settings

from . import approvals, executor, publishing, reconciler, registry, retrying, runs, second_person, transition
from .actors import SYSTEM
from .models import Operation
from .scrub import fault
from .sealing import CannotOpen
from .states import RUN_TERMINAL, Kind, State
from .transition import TransitionRefused

log = structlog.get_logger(__name__)


def sweep(*, limit: int = 50, until: float | None = None) -> int:
    """Do everything that is due, up to `limit` of each kind. Returns how many were handled.

    Nothing is begun after `until` (monotonic seconds): what was taken by then comes back when it is due again.
    """
    handled = publishing.publish(limit=limit)  # first: what it makes is due at once
    handled += _end_changed(limit)
    duties = ((approvals.end_due, Kind.APPROVAL), (handle, Kind.OPERATION), (runs.advance, Kind.RUN))
    for duty, kind in duties:
        for pk in transition.take_due(kind, limit=limit, again=settings.AFTERCALL_TAKE_AGAIN):
            if until is not None and time.monotonic() >= until:
                log.info("sweep_ends", kind=kind, why="no time to begin anything more")
                return handled
            handled += _guarded(duty, pk, kind)
    return handled


def _guarded(duty: Callable[[int], Any], pk: int, kind: Kind) -> int:
    """One broken item must not stop the others; it comes back when it is due again."""
    try:
        duty(pk)
    except TransitionRefused as refusal:
        log.info("sweep_refused", kind=kind, pk=pk, verdict=refusal.verdict)
    except Exception as error:
        log.error("sweep_failed", kind=kind, pk=pk, **fault(error))
    return 1


def _end_changed(limit: int) -> int:
    """End requests for a second person that nobody can agree to any more; those who asked may ask anew."""
    ended = 0
    for request in second_person.may_have_changed(limit=limit):
        try:
            ended += second_person.end_changed(request, SYSTEM)
        except TransitionRefused as refusal:  # somebody decided it meanwhile
            log.info("sweep_refused", kind=Kind.APPROVAL, pk=request.pk, verdict=refusal.verdict)
        except Exception as error:
            log.error("sweep_failed", kind=Kind.APPROVAL, pk=request.pk, **fault(error))
    return ended


def handle(pk: int) -> None:
    """What is due for one operation, by its state."""
    operation = Operation.objects.get(pk=pk)
    state = State(operation.state)
    if state in (State.PENDING, State.AMBIGUOUS) or reconciler.contradicted(operation):
        looked = reconciler.reconcile(pk, on_schedule=True)
        if looked.judgement is not None and looked.judgement.repeat:
            _repeat(looked.operation)
    elif operation.escalated_at is None and state in (State.READY, State.FAILED_RETRYABLE):
        if operation.waived:
            _give_up(operation, "undo_waived")
        elif operation.run_id is None or operation.stands_alone:
            _retry(operation)
        elif runs.advance(operation.run_id).state in RUN_TERMINAL:  # its run claims it, under the run's lease
            _give_up(operation, "run_ended")


def _give_up(operation: Operation, code: str) -> None:
    """Nothing sends it any more, and that no attempt was applied is proven."""
    transition.transition(
        operation.subject,
        to=State.FAILED_TERMINAL,
        version=operation.version,
        patch={"reason_code": code},
        fact=SYSTEM.fact(code),
    )


def _retry(operation: Operation) -> None:
    """The automatic retry of what is proven not applied. What stands in the way for good is shown to a person."""
    try:
        retrying.retry(operation.pk, version=operation.version)
    except retrying.NotRetryable:
        executor.call_a_person(operation, "shredded" if operation.shredded_at is not None else "seen_after_all")
    except registry.Unregistered as missing:
        _leave_to_others(operation, missing)
    except CannotOpen:
        executor.call_a_person(operation, "request_unreadable")


def _leave_to_others(operation: Operation, missing: registry.Unregistered) -> None:
    """This process has no handler for it: another may, for as long as deployments take to be rolled out."""
    log.warning("operation_left_to_others", operation=operation.pk, why=str(missing))
    since = max(operation.updated_at, operation.not_before or operation.updated_at)
    if transition.database_now() - since >= timedelta(seconds=settings.AFTERCALL_STUCK_AFTER):
        executor.call_a_person(operation, "no_handler")


def _repeat(operation: Operation) -> None:
    """The automatic same-key retry after a look-up that could not tell."""
    try:
        retrying.retry(operation.pk, version=operation.version)
    except (
        retrying.NotRetryable, *executor.MAY_NOT_SEND, *executor.UNCONSENTED, transition.RunNotHeld, transition.Limited,
    ) as refusal:  # fmt: skip
        verdict = getattr(refusal, "verdict", "not_retryable")
        transition.refuse(
            subject=operation.subject, tenant=operation.tenant, fact=SYSTEM.fact("not_repeated", verdict=verdict)
        )
        log.info("not_repeated", operation=operation.pk, verdict=verdict)
