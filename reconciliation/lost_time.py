"""What may have been sent in the time that a restored ledger has lost: it is unknown, once more than is known here.

Such an attempt may have left at any time since the backup. Retention of a key counts from the earliest moment, absence
is proven from the latest one on, and whoever sent it is not known to be dead.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import structlog
from django.db.models import Q

from . import fence, policy, reconciler, transition
from .models import Approval, Operation, RestoreFence
from .policy import ErrorClass
from .providers.base import ActionSpec, Repeat
from .states import APPROVAL_OPEN, TERMINAL, ApprovalState, State
from .transition import Observed, TransitionRefused

log = structlog.get_logger(__name__)

REFUSED = ("restored", "maybe_replayed")  # why a claim is refused after a restore (transition.Limited.code)
GENERATIONS = 1000  # by which they jump: a claim of the lost time finds nothing to settle


def make_unknown(operation: Operation, down: RestoreFence) -> None:
    """Move it to unknown, under a generation that no claim of the lost time has. Raises StaleVersion.

    What a person agreed to may have been used up: the request for consent is void, and made anew if it is ever sent.
    """
    spec = reconciler.spec_or_none(operation)
    patch, after = _unknown_since(down, operation, spec)
    transition.transition(
        operation.subject,
        to=None if operation.state == State.AMBIGUOUS else State.AMBIGUOUS,
        version=operation.version,
        patch=patch,
        after=after,
        observed=[_seen(operation, spec, patch)],
        fact=fence.SYSTEM.fact("restored", was=operation.state),
    )
    for approval in Approval.objects.filter(operation=operation, state__in=sorted(APPROVAL_OPEN)).order_by("pk"):
        transition.move_approval(approval, to=ApprovalState.SUPERSEDED, fact=fence.SYSTEM.fact("restored"))


def void_requests(down: RestoreFence, *, limit: int) -> int:
    """End requests for consent from before the restore that no open operation takes along: on runs, limits and jobs,
    and on operations that have ended. In the lost time somebody may have agreed, and it may have been done.

    Returns how many ended now. Whoever still wants it asks anew.
    """
    from_before = Approval.objects.filter(
        Q(operation__isnull=True) | Q(operation__state__in=sorted(TERMINAL)),
        state__in=sorted(APPROVAL_OPEN), created_at__lte=max(filter(None, (down.since, down.known_until))),
    )  # fmt: skip
    ended = 0
    for approval in from_before.order_by("pk")[:limit]:
        try:
            transition.move_approval(approval, to=ApprovalState.SUPERSEDED, fact=fence.SYSTEM.fact("restored"))
        except TransitionRefused as refusal:  # somebody decided meanwhile; the next round sees what is left
            log.info("not_voided", approval=approval.pk, verdict=refusal.verdict)
        else:
            ended += 1
    return ended


def _seen(operation: Operation, spec: ActionSpec | None, patch: Mapping[str, Any]) -> Observed:
    """An effect in this database was lost with its settlement, which is proof that it is not there (local.py)."""
    local = {"local": True} if spec is not None and spec.repeat is Repeat.LOCAL else {}
    data = {"was": operation.state, **local}
    return Observed(kind="restored", attempt=patch["attempts"], generation=patch["generation"], data=data)


def _unknown_since(
    down: RestoreFence, operation: Operation, spec: ActionSpec | None
) -> tuple[dict[str, Any], dict[str, float]]:
    """(patch, after) of an operation that may have been sent between the backup and now, once more than is known."""
    assert down.known_until is not None
    attempt = operation.attempts + 1
    flying = [operation.attempts] if operation.state == State.PENDING else []
    patch: dict[str, Any] = {
        "attempts": attempt,
        "unknown_attempts": sorted({*operation.unknown_attempts, *flying, attempt}),
        "generation": operation.generation + GENERATIONS,
        "error_class": ErrorClass.UNKNOWN,
        "reason_code": "restored",
        "look_ups": 0, "absent_reads": 0, "absent_read_at": None, "absences": 0, "identical_replays": 0,
        "lease_owner": "", "not_before": None, "settled_at": None, "basis": "",
        **_earliest(down, operation, spec),
    }  # fmt: skip
    after = {
        "due_at": 0.0, "last_sent_at": 0.0, "lease_ended_at": 0.0,
        "escalate_at": spec.escalate_after.total_seconds() if spec else 0.0,
    }  # fmt: skip
    person = reconciler.needs_a_person(operation, spec)
    if person and operation.escalated_at is None:
        return {**patch, "escalation_reason": person}, {**after, "escalated_at": 0.0, "escalate_at": 0.0}
    return patch, after


def _earliest(down: RestoreFence, operation: Operation, spec: ActionSpec | None) -> dict[str, Any]:
    """When the provider may have heard of it for the first time, where this ledger does not know."""
    if operation.first_sent_at is not None or down.known_until is None:
        return {}
    first = {"first_sent_at": down.known_until.isoformat()}
    if spec is None or spec.repeat is not Repeat.KEYED:
        return first
    until = down.known_until + timedelta(seconds=policy.same_key_seconds(spec))
    return {**first, "same_key_until": until.isoformat()}


def look_first(operation: Operation) -> None:
    """A claim found that it may be a repetition of one that was lost: it is looked up before anything is sent."""
    down = fence.current()
    if down is None or operation.state in TERMINAL:
        return
    try:
        make_unknown(operation, down)
    except TransitionRefused as refusal:  # it moved on, and comes back by itself
        log.info("not_made_unknown", operation=operation.pk, verdict=refusal.verdict)
