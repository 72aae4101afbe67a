"""Watch: conditions that a person should see, each a query over the ledger, each noticed thing a Signal.

A signal opens when its condition is first seen and is cleared when it is not seen any more. Both are told once to the
callable that AFTERCALL_NOTIFY names. Signals decide nothing; a hook that fails is logged and breaks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import structlog
from django.conf import settings
from django.db import connections
from django.utils import timezone
from django.utils.module_loading import import_string
from django_q.models import OrmQ

from . import anchor, publishing, spool, transition
from .models import Signal, Tick
from .scrub import fault

log = structlog.get_logger(__name__)

MOST = 100  # of one kind; the oldest are shown, and the next take their places
OVERDUE = timedelta(seconds=60)  # a lease that ran out, or due work, that nobody has looked at for so long
KEY_SOON = timedelta(minutes=30)
SILENT = timedelta(minutes=2)
KEEP_CLEARED = timedelta(days=30)


@dataclass(frozen=True)
class Condition:
    """`sql` gives (tenant, subject, since, detail), oldest first; it may use %(now)s, %(late)s, %(stuck)s, %(soon)s."""

    kind: str
    title: str
    sql: str


CONDITIONS = (
    Condition(
        "lease_overdue",
        "A lease ran out and nobody has looked",
        "SELECT tenant, 'operation:' || id, lease_until, 'held by ' || lease_owner FROM reconciliation_operation"
        " WHERE state = 'pending' AND lease_until < %(late)s ORDER BY lease_until",
    ),
    Condition(
        "run_lease_overdue",
        "A run's lease ran out and nobody has taken it over",
        "SELECT tenant, 'run:' || id, lease_until, 'held by ' || lease_owner FROM reconciliation_run"
        " WHERE lease_until < %(late)s ORDER BY lease_until",
    ),
    Condition(
        "run_stuck",
        "A run has been running or uncertain for long",
        "SELECT tenant, 'run:' || id, updated_at, state || ' at ' || coalesce(nullif(waiting_for, ''), 'no step')"
        " FROM reconciliation_run WHERE state IN ('running', 'uncertain', 'compensating') AND updated_at < %(stuck)s"
        " ORDER BY updated_at",
    ),
    Condition(
        "unknown_long",
        "An outcome has been unknown for long",
        "SELECT tenant, 'operation:' || id, first_sent_at, provider || ' ' || action FROM reconciliation_operation"
        " WHERE state = 'ambiguous' AND first_sent_at < %(stuck)s ORDER BY first_sent_at",
    ),
    Condition(
        "key_soon_forgotten",
        "The provider is about to forget a key that is still needed",
        "SELECT tenant, 'operation:' || id, same_key_until, provider || ' ' || action FROM reconciliation_operation"
        " WHERE state IN ('ambiguous', 'failed_retryable') AND same_key_until BETWEEN %(now)s AND %(soon)s"
        " ORDER BY same_key_until",
    ),
    Condition(
        "approval_expiring",
        "A request for approval will soon expire unanswered",
        "SELECT tenant, 'approval:' || id, expires_at, coalesce(nullif(action, ''), 'to be sent')"
        " FROM reconciliation_approval WHERE state = 'waiting' AND expires_at BETWEEN %(now)s AND %(soon)s"
        " ORDER BY expires_at",
    ),
    Condition(
        "approval_expired",
        "A request for approval expired unanswered within the last day",
        "SELECT tenant, 'approval:' || id, expires_at, coalesce(nullif(action, ''), 'to be sent')"
        " FROM reconciliation_approval WHERE decided_at IS NULL AND (state = 'expired' OR state = 'waiting')"
        " AND expires_at BETWEEN %(day)s AND %(now)s ORDER BY expires_at",
    ),
    Condition(
        "approval_unused",
        "What two people agreed on could not be done in time within the last day",
        "SELECT tenant, 'approval:' || id, use_by, action FROM reconciliation_approval"
        " WHERE state = 'expired' AND decided_at IS NOT NULL AND action <> '' AND use_by BETWEEN %(day)s AND %(now)s"
        " ORDER BY use_by",
    ),
    Condition(
        "job_failing",
        "The last three runs of a job did not succeed",
        "SELECT j.tenant, 'job:' || j.id, l.first, j.name FROM reconciliation_job j, LATERAL ("
        "SELECT count(*) AS runs, min(n.scheduled_for) AS first, count(*) FILTER (WHERE n.state IN"
        " ('failed', 'compensated', 'cancelled') OR n.escalated_at IS NOT NULL) AS bad FROM"
        " (SELECT s.scheduled_for, r.state, r.escalated_at FROM reconciliation_slot s"
        " JOIN reconciliation_run r ON r.id = s.run_id WHERE s.job_id = j.id AND NOT s.manual"
        " AND (r.settled_at IS NOT NULL OR r.escalated_at IS NOT NULL) ORDER BY s.scheduled_for DESC LIMIT 3) n) l"
        " WHERE j.enabled AND l.runs = 3 AND l.bad = 3 ORDER BY l.first",
    ),
    Condition(
        "job_skipped",
        "Runs of a job were left out within the last day because the one before still went on",
        "SELECT j.tenant, 'job:' || j.id, min(s.scheduled_for), j.name || ': ' || sum(s.count) || ' left out'"
        " FROM reconciliation_slot s JOIN reconciliation_job j ON j.id = s.job_id"
        " WHERE s.state = 'skipped_overlap' AND s.updated_at > %(day)s GROUP BY j.tenant, j.id ORDER BY 3",
    ),
    Condition(
        "overdue",
        "Due work is not being taken",
        "SELECT '', 'sweep', min(due_at), count(*) || ' due' FROM reconciliation_operation WHERE due_at < %(late)s"
        " HAVING count(*) > 0",
    ),
    Condition(
        "restored",
        "The ledger was restored, and nothing is sent until a person releases it",
        "SELECT '', 'fence:' || id, since, reason || ', ' || marked || ' unknown by it'"
        " FROM reconciliation_restorefence WHERE state = 'down'",
    ),
    Condition(
        "clock_set",
        "The database's clock was set within the last day",
        "SELECT '', 'clock:' || id, set_at, round(abs(set_by)::numeric, 1) || CASE WHEN set_by > 0 THEN ' s forward'"
        " ELSE ' s back' END FROM reconciliation_clock WHERE set_at > %(day)s",
    ),
    Condition(
        "mass_trigger",
        "The guard against mass triggering stopped dispatch",
        "SELECT tenant, 'limit:' || id, since, concat_ws('/', provider, action) FROM reconciliation_limit"
        " WHERE kind = 'stop' AND lifted_at IS NULL AND set_by = 'system:guard' ORDER BY since",
    ),
    Condition(
        "held_for_long",
        "Operations wait for a limit",
        "SELECT l.tenant, 'limit:' || l.id, min(h.first_at), count(*) || ' wait' FROM reconciliation_heldback h"
        " JOIN reconciliation_limit l ON l.id = h.limit_id JOIN reconciliation_operation o ON o.id = h.operation_id"
        " WHERE l.lifted_at IS NULL AND o.state IN ('ready', 'failed_retryable') AND h.first_at < %(stuck)s"
        " GROUP BY l.tenant, l.id ORDER BY 3",
    ),
    Condition(
        "message_stuck",
        "A message of the outbox cannot be published",
        "SELECT tenant, 'message:' || id, changed_at, replace(problem, '_', ' ') || ', ' || provider || ' ' || action"
        " FROM reconciliation_message WHERE state = 'stuck' ORDER BY changed_at",
    ),
    Condition(
        "heard_after_pruning",  # opened by ledger_note(); it stays in sight for a month
        "A report came about something that was pruned",
        "SELECT tenant, subject, since, detail FROM reconciliation_signal WHERE kind = 'heard_after_pruning'"
        " AND cleared_at IS NULL AND since > %(month)s ORDER BY since",
    ),
)
Seen = tuple[str, str, datetime, str]  # tenant, subject, since, detail


def look() -> tuple[int, int]:
    """Look at every condition once, and tell what changed. Returns how many signals opened and were cleared."""
    opened = cleared = 0
    now = transition.database_now()
    for kind, find in _finders():
        try:
            new, over = _write(kind, find(now))
        except Exception as error:  # one condition must not hide the others
            log.error("signal_not_seen", kind=kind, **fault(error))
            continue
        opened, cleared = opened + new, cleared + over
    tell()
    Signal.objects.filter(cleared_at__lt=now - KEEP_CLEARED).delete()
    return opened, cleared


def title(kind: str) -> str:
    """What a kind of signal means, for people."""
    return TITLES.get(kind, kind.replace("_", " "))


def _finders() -> Iterable[tuple[str, Callable[[datetime], list[Seen]]]]:
    for condition in CONDITIONS:
        yield condition.kind, partial(_rows, condition)
    yield from _OUTSIDE.items()


def _rows(condition: Condition, now: datetime) -> list[Seen]:
    moments = {
        "now": now,
        "late": now - OVERDUE,
        "stuck": now - timedelta(seconds=settings.AFTERCALL_STUCK_AFTER),
        "soon": now + KEY_SOON,
        "day": now - timedelta(days=1),
        "month": now - KEEP_CLEARED,
    }
    with connections[transition.ALIAS].cursor() as cursor:
        cursor.execute(f"{condition.sql} LIMIT {MOST}", moments)
        return [(tenant, subject, since, detail[:300]) for tenant, subject, since, detail in cursor.fetchall()]


# What stands outside the ledger's tables


def _spooled(now: datetime) -> list[Seen]:
    """Reports that the database would not take; what cannot be read never comes in by itself."""
    waiting = list(spool.folder().glob("*.report"))
    unreadable = list(spool.folder().glob("*.unreadable"))
    if not waiting and not unreadable:
        return []
    return [("", "spool", now, f"{len(waiting)} reports wait, {len(unreadable)} cannot be read")]


def _queue(now: datetime) -> list[Seen]:
    """The broker's locks are by its own clock: a wake-up is free since then."""
    oldest = OrmQ.objects.order_by("lock").values_list("lock", flat=True).first()
    late = oldest is not None and timezone.now() - oldest > SILENT
    return [("", "queue", oldest, "no worker takes wake-ups")] if oldest and late else []


def _silent(name: str) -> Callable[[datetime], list[Seen]]:
    def find(now: datetime) -> list[Seen]:
        at = Tick.objects.filter(name=name).values_list("at", flat=True).first()
        return [("", name, at, f"the last {name} is long ago")] if at and now - at > SILENT else []

    return find


def _anchor(now: datetime) -> list[Seen]:
    """While the anchor cannot be read, no claim is made by anybody who asks it."""
    try:
        anchor.current().read()
    except anchor.AnchorUnreadable as error:
        return [("", "anchor", now, str(error))]
    return []


def _outbox(now: datetime) -> list[Seen]:
    """Messages that should have been published; what waits behind another one is not late."""
    seen = publishing.backlog(before=now - OVERDUE)
    return [("", "outbox", seen.since or now, f"{seen.late} due, {seen.waiting} wait")] if seen.late else []


_OUTSIDE: dict[str, Callable[[datetime], list[Seen]]] = {
    "spool_waits": _spooled,
    "anchor_unreadable": _anchor,
    "outbox_behind": _outbox,
    "queue_old": _queue,
    "beat_silent": _silent("beat"),
}
TITLES = {condition.kind: condition.title for condition in CONDITIONS} | {
    "spool_waits": "Receipts wait on disk",
    "anchor_unreadable": "The anchor cannot be read, so nothing is sent",
    "outbox_behind": "Messages of the outbox are not being published",
    "queue_old": "The wake-up queue is not being emptied",
    "beat_silent": "No beat",
}


# Writing and telling

_OPEN = """
INSERT INTO reconciliation_signal (kind, tenant, subject, since, seen_at, detail, told_open, told_cleared)
VALUES (%s, %s, %s, %s, aftercall_now(), %s, false, false)
ON CONFLICT (kind, subject) WHERE cleared_at IS NULL
DO UPDATE SET seen_at = excluded.seen_at, detail = excluded.detail RETURNING xmax = 0
"""


_TELL_OPENED = """
UPDATE reconciliation_signal SET told_open = true WHERE NOT told_open
RETURNING id, kind, tenant, subject, since, detail, cleared_at
"""
_TELL_CLEARED = """
UPDATE reconciliation_signal SET told_cleared = true WHERE NOT told_cleared AND cleared_at IS NOT NULL
RETURNING id, kind, tenant, subject, since, detail, cleared_at
"""


def _write(kind: str, seen: list[Seen]) -> tuple[int, int]:
    with connections[transition.ALIAS].cursor() as cursor:
        opened = 0
        for tenant, subject, since, detail in seen:
            cursor.execute(_OPEN, [kind, tenant, subject, since, detail])
            opened += bool(cursor.fetchone()[0])
        cursor.execute(
            "UPDATE reconciliation_signal SET cleared_at = aftercall_now()"
            " WHERE kind = %s AND cleared_at IS NULL AND NOT subject = ANY (%s)",
            [kind, [subject for _tenant, subject, _since, _detail in seen]],
        )
        return opened, cursor.rowcount


def tell() -> None:
    """Tell the hook of each signal that opened or was cleared: once, by whoever marks it as told first."""
    for event, statement in (("opened", _TELL_OPENED), ("cleared", _TELL_CLEARED)):
        with connections[transition.ALIAS].cursor() as cursor:
            cursor.execute(statement)
            rows = cursor.fetchall()
        for row in rows:
            _tell_one(event, *row)


def _tell_one(
    event: str, pk: int, kind: str, tenant: str, subject: str, since: datetime, detail: str, cleared: datetime | None
) -> None:
    """The payload holds names and times of the ledger, never a request, a result or a key."""
    log.warning("signal", change=event, kind=kind, subject=subject)
    payload: dict[str, Any] = {
        "event": event, "signal": pk, "kind": kind, "title": title(kind), "tenant": tenant, "subject": subject,
        "since": since.isoformat(), "detail": detail, "cleared_at": cleared.isoformat() if cleared else None,
    }  # fmt: skip
    if not settings.AFTERCALL_NOTIFY:
        return
    try:
        import_string(settings.AFTERCALL_NOTIFY)(payload)
    except Exception as error:  # somebody else's code
        log.error("notification_failed", kind=kind, subject=subject, **fault(error))
