"""Watch: conditions that a person should see, each a query over the ledger, each noticed thing a Signal.

A signal opens when its condition is first seen and is cleared when it is not seen any more. Both are told to the
callable that AFTERCALL_NOTIFY names, apart from the looking: it is somebody else's code and may hang or fail. What it
does not take after a few tries is kept as not told. Signals decide nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import structlog
from django.conf import settings
from django.db import connections
from django.utils import timezone
from django.utils.module_loading import import_string
from django_q.exceptions import TimeoutException
from django_q.models import OrmQ
from django_q.timeout import TimeoutHandler

from . import anchor, publishing, spool, transition
from .models import Signal, Tick
from .scrub import fault

log = structlog.get_logger(__name__)

MOST = 100  # of one kind and tenant; the oldest are shown, one row counts the others, which take their places
OVERDUE = timedelta(seconds=60)  # a lease that ran out, or due work, that nobody has looked at for so long
KEY_SOON = timedelta(minutes=30)
SILENT = timedelta(minutes=2)
KEEP_CLEARED = timedelta(days=30)
HOOK_SECONDS = 10  # a call of the hook that takes longer has failed
ROUND_SECONDS = 5.0  # after which no other call is begun, so that two rounds never hold two workers
TRIES = 5  # of one event, within about an hour


@dataclass(frozen=True)
class Condition:
    """`sql` gives (tenant, subject, since, detail), each subject once.

    It may use %(now)s, %(late)s, %(stuck)s, %(soon)s, %(day)s, %(month)s, and `standing`: see _WRITE.
    """

    kind: str
    title: str
    sql: str


CONDITIONS = (
    Condition(
        "lease_overdue",
        "A lease ran out and nobody has looked",
        "SELECT tenant, 'operation:' || id, lease_until, 'held by ' || lease_owner FROM reconciliation_operation"
        " WHERE state = 'pending' AND lease_until < %(late)s",
    ),
    Condition(
        "run_lease_overdue",
        "A run's lease ran out and nobody has taken it over",
        "SELECT tenant, 'run:' || id, lease_until, 'held by ' || lease_owner FROM reconciliation_run"
        " WHERE settled_at IS NULL AND lease_until < %(late)s",
    ),
    Condition(
        "run_stuck",
        "A run has been running or uncertain for long without a step forward",
        "SELECT tenant, 'run:' || id, at, state || ' at ' || coalesce(nullif(waiting_for, ''), 'no step')"
        " FROM standing WHERE state IN ('running', 'uncertain', 'compensating')",
    ),
    Condition(
        "run_not_going_on",
        "A run should go on, and for long nobody could take it further",
        "SELECT tenant, 'run:' || id, at, workflow_type || ' version ' || workflow_version ||"
        " coalesce(', ' || nullif(waiting_for, ''), '') FROM standing"
        " WHERE state IN ('pending', 'awaiting_approval')"
        " AND escalated_at IS NULL AND lease_until IS NULL AND NOT locked_out AND NOT with_others",
    ),
    Condition(
        "run_locked_out",
        "A run has been waiting for long for what another run holds",
        "SELECT tenant, 'run:' || id, at, coalesce(nullif(waiting_for, ''), 'waits for its lock') FROM standing"
        " WHERE state = 'pending' AND escalated_at IS NULL AND locked_out",
    ),
    Condition(
        "unknown_long",
        "An outcome has been unknown for long",
        "SELECT tenant, 'operation:' || id, first_sent_at, provider || ' ' || action FROM reconciliation_operation"
        " WHERE state = 'ambiguous' AND first_sent_at < %(stuck)s",
    ),
    Condition(
        "key_soon_forgotten",
        "The provider is about to forget a key that is still needed",
        "SELECT tenant, 'operation:' || id, same_key_until, provider || ' ' || action FROM reconciliation_operation"
        " WHERE state IN ('ambiguous', 'failed_retryable') AND same_key_until BETWEEN %(now)s AND %(soon)s",
    ),
    Condition(
        "approval_expiring",
        "A request for approval will soon expire unanswered",
        "SELECT tenant, 'approval:' || id, expires_at, coalesce(nullif(action, ''), 'to be sent')"
        " FROM reconciliation_approval WHERE state = 'waiting' AND expires_at BETWEEN %(now)s AND %(soon)s",
    ),
    Condition(
        "approval_expired",
        "A request for approval expired unanswered within the last day",
        "SELECT tenant, 'approval:' || id, expires_at, coalesce(nullif(action, ''), 'to be sent')"
        " FROM reconciliation_approval WHERE decided_at IS NULL AND (state = 'expired' OR state = 'waiting')"
        " AND expires_at BETWEEN %(day)s AND %(now)s",
    ),
    Condition(
        "approval_unused",
        "What two people agreed on could not be done in time within the last day",
        "SELECT tenant, 'approval:' || id, use_by, action FROM reconciliation_approval"
        " WHERE state = 'expired' AND decided_at IS NOT NULL AND action <> '' AND use_by BETWEEN %(day)s AND %(now)s",
    ),
    Condition(
        "job_failing",
        "The last three runs of a job did not succeed",
        "SELECT j.tenant, 'job:' || j.id, l.first, j.name FROM reconciliation_job j, LATERAL ("
        "SELECT count(*) AS runs, min(n.scheduled_for) AS first, count(*) FILTER (WHERE n.state IN"
        " ('failed', 'compensated', 'cancelled') OR n.escalated_at IS NOT NULL) AS bad FROM"
        " (SELECT s.scheduled_for, coalesce(r.state, t.state) AS state, r.escalated_at FROM reconciliation_slot s"
        " LEFT JOIN reconciliation_run r ON r.id = s.run_id"
        " LEFT JOIN reconciliation_tombstone t ON t.kind = 'run' AND t.subject_id = s.run_id"  # how a pruned one ended
        " WHERE s.job_id = j.id AND NOT s.manual AND s.run_id IS NOT NULL"
        " AND (r.settled_at IS NOT NULL OR r.escalated_at IS NOT NULL OR t.id IS NOT NULL)"
        " ORDER BY s.scheduled_for DESC LIMIT 3) n) l"
        " WHERE j.enabled AND l.runs = 3 AND l.bad = 3",
    ),
    Condition(
        "job_cannot_start",
        "The runs of a job are not being started",
        "SELECT tenant, 'job:' || id, since, name || ': ' || why FROM (SELECT j.*,"
        " CASE WHEN j.problem <> '' THEN replace(j.problem, '_', ' ') WHEN l.refused = 3 THEN"
        " 'its workflow refused the last three starts' END AS why,"
        " CASE WHEN j.problem = '' THEN l.first ELSE coalesce(least(w.first, CASE WHEN j.next_at < %(now)s THEN"
        " j.next_at END), j.updated_at) END AS since FROM reconciliation_job j,"
        " LATERAL (SELECT min(n.scheduled_for) AS first, count(*) FILTER (WHERE n.state = 'not_started') AS refused"
        " FROM (SELECT s.scheduled_for, s.state FROM reconciliation_slot s WHERE s.job_id = j.id AND NOT s.manual"
        " AND s.state IN ('started', 'not_started') ORDER BY s.scheduled_for DESC LIMIT 3) n) l,"
        " LATERAL (SELECT min(s.scheduled_for) AS first FROM reconciliation_slot s WHERE s.job_id = j.id"
        " AND s.state IN ('due', 'queued', 'catching_up')) w WHERE j.enabled) k"
        " WHERE why IS NOT NULL AND since < %(late)s",
    ),
    Condition(
        "job_skipped",
        "Runs of a job were left out within the last day because the one before still went on",
        "SELECT j.tenant, 'job:' || j.id, min(s.scheduled_for), j.name || ': ' || sum(s.count) || ' left out'"
        " FROM reconciliation_slot s JOIN reconciliation_job j ON j.id = s.job_id"
        " WHERE s.state = 'skipped_overlap' AND s.updated_at > %(day)s GROUP BY j.tenant, j.id",
    ),
    Condition(
        "overdue",
        "Due work is not being taken",
        "SELECT '', 'sweep', min(due_at), count(*) || ' due' FROM (SELECT due_at FROM reconciliation_operation"
        " WHERE due_at < %(late)s UNION ALL SELECT due_at FROM reconciliation_run WHERE due_at < %(late)s) d"
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
        " WHERE kind = 'stop' AND lifted_at IS NULL AND set_by = 'system:guard'",
    ),
    Condition(
        "held_for_long",
        "Operations wait for a limit",
        "SELECT l.tenant, 'limit:' || l.id, min(h.first_at), count(*) || ' wait' FROM reconciliation_heldback h"
        " JOIN reconciliation_limit l ON l.id = h.limit_id JOIN reconciliation_operation o ON o.id = h.operation_id"
        " WHERE l.lifted_at IS NULL AND o.state IN ('ready', 'failed_retryable') AND h.first_at < %(stuck)s"
        " GROUP BY l.tenant, l.id",
    ),
    Condition(
        "message_stuck",
        "A message of the outbox cannot be published",
        "SELECT tenant, 'message:' || id, changed_at, replace(problem, '_', ' ') || ', ' || provider || ' ' || action"
        " FROM reconciliation_message WHERE state = 'stuck'",
    ),
    Condition(
        "not_told",
        "The hook for notifications did not take what it was told within the last day",
        "SELECT '', 'notify', min(not_told_at), count(*) || ' not told' FROM reconciliation_signal"
        " WHERE not_told_at > %(day)s AND kind <> 'not_told' HAVING count(*) > 0",
    ),
    Condition(
        "heard_after_pruning",  # opened by ledger_note(); it stays in sight for a month
        "A report came about something that was pruned",
        "SELECT tenant, subject, since, detail FROM reconciliation_signal WHERE kind = 'heard_after_pruning'"
        " AND cleared_at IS NULL AND since > %(month)s",
    ),
)
Seen = tuple[str, str, datetime, str]  # tenant, subject, since, detail


def look() -> tuple[int, int]:
    """Look at every condition once. Returns how many signals opened and were cleared; tell() tells of them."""
    opened = cleared = 0
    now = transition.database_now()
    for kind, write in _writers(now):
        try:
            new, over = write()
        except Exception as error:  # one condition must not hide the others
            log.error("signal_not_seen", kind=kind, **fault(error))
            continue
        opened, cleared = opened + new, cleared + over
    Signal.objects.filter(cleared_at__lt=now - KEEP_CLEARED).delete()
    return opened, cleared


def title(kind: str) -> str:
    """What a kind of signal means, for people."""
    return TITLES.get(kind, kind.replace("_", " "))


def _writers(now: datetime) -> Iterable[tuple[str, Callable[[], tuple[int, int]]]]:
    moments = {
        "now": now,
        "late": now - OVERDUE,
        "stuck": now - timedelta(seconds=settings.AFTERCALL_STUCK_AFTER),
        "soon": now + KEY_SOON,
        "day": now - timedelta(days=1),
        "month": now - KEEP_CLEARED,
    }
    for condition in CONDITIONS:
        yield condition.kind, partial(_write, condition.kind, condition.sql, moments)
    for kind, find in _OUTSIDE.items():
        yield kind, partial(_write_found, kind, find, moments)


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


def _beat_silent(now: datetime) -> list[Seen]:
    return _silent("beat", now, SILENT, "the last beat is long ago")


def _anchor_silent(now: datetime) -> list[Seen]:
    """It can be read, so claims go on, and cannot be written; or somebody holds it who does not come to an end."""
    patience = SILENT + timedelta(seconds=settings.AFTERCALL_ANCHOR_EVERY)
    return _silent("anchor", now, patience, "not written since then")


def _silent(duty: str, now: datetime, patience: timedelta, detail: str) -> list[Seen]:
    at = Tick.objects.filter(name=duty).values_list("at", flat=True).first()
    return [("", duty, at, detail)] if at and now - at > patience else []


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
    "beat_silent": _beat_silent,
    "anchor_silent": _anchor_silent,
}
TITLES = {condition.kind: condition.title for condition in CONDITIONS} | {
    "spool_waits": "Receipts wait on disk",
    "anchor_unreadable": "The anchor cannot be read, so nothing is sent",
    "outbox_behind": "Messages of the outbox are not being published",
    "queue_old": "The wake-up queue is not being emptied",
    "beat_silent": "No beat",
    "anchor_silent": "The anchor is not written forward, so a restore to a later moment may go unnoticed",
}


# Writing

# `standing` are open runs without a step forward since %(stuck)s, with `at`, when the last one was. Taking a run and
# leaving it again is none, nor is a look-up that tells nothing; while a step waits for a time that was set for it, that
# time counts. What a person last did is looked for among the newest entries only: a run that hangs gathers some every
# minute. `locked_out`: another run has what it locks. `with_others`: a step of it is with a person, or held back by a
# limit, which has a signal of its own; or that was so until lately, or the lock was another run's until then: from the
# moment at which it can go on, it has its time to be taken.
#
# The whole condition is asked for, so that what is not shown is told from what is over. Of each tenant the oldest are
# shown, and what is open stays so while it holds; the others are counted in one row. In one order, so that two beats
# that look at the same moment do not wait for each other.
_WRITE = """
WITH standing AS (
    SELECT r.*, greatest(s.at, p.at) AS at,
        r.lock <> '' AND NOT r.lock_held AND EXISTS (SELECT FROM reconciliation_run h
            WHERE h.tenant = r.tenant AND h.lock = r.lock AND h.lock_held) AS locked_out,
        EXISTS (SELECT FROM reconciliation_operation o WHERE o.run_id = r.id AND (o.state = 'awaiting_approval'
            OR o.state IN ('ready', 'failed_retryable') AND (o.due_at IS NULL OR o.escalated_at IS NOT NULL
                OR o.updated_at >= %(stuck)s
                OR EXISTS (SELECT FROM reconciliation_heldback h JOIN reconciliation_limit l ON l.id = h.limit_id
                            WHERE h.operation_id = o.id AND coalesce(l.lifted_at, %(now)s) >= %(stuck)s))))
        OR r.lock <> '' AND EXISTS (SELECT FROM reconciliation_signal g WHERE g.kind = 'run_locked_out'
            AND g.subject = 'run:' || r.id AND coalesce(g.cleared_at, %(now)s) >= %(stuck)s) AS with_others
      FROM reconciliation_run r,
      LATERAL (SELECT greatest(r.created_at,
          (SELECT max(greatest(o.created_at, o.last_sent_at, o.not_before, o.settled_at))
             FROM reconciliation_operation o WHERE o.run_id = r.id),
          (SELECT c.at FROM reconciliation_chosen c WHERE c.run_id = r.id ORDER BY c.id DESC LIMIT 1)) AS at) s,
      LATERAL (SELECT max(n.at) AS at FROM (SELECT e.at, e.actor_kind FROM audit_entry e
          WHERE e.subject = 'run:' || r.id ORDER BY e.seq DESC LIMIT 1000) n WHERE n.actor_kind = 'person') p
     WHERE r.settled_at IS NULL AND r.created_at < %(stuck)s AND s.at < %(stuck)s
       AND coalesce(p.at, s.at) < %(stuck)s),
found (tenant, subject, since, detail) AS MATERIALIZED ({sql}),
ranked AS (
    SELECT f.*, s.id IS NOT NULL AS open, row_number() OVER (PARTITION BY f.tenant ORDER BY f.since, f.subject) AS place
      FROM found f LEFT JOIN reconciliation_signal s
        ON s.kind = %(kind)s AND s.subject = f.subject AND s.cleared_at IS NULL),
shown AS (
    SELECT tenant, subject, since, left(detail, 300) AS detail FROM ranked WHERE place <= %(most)s OR open
    UNION ALL
    SELECT tenant, 'more:' || tenant, min(since), 'and ' || count(*) || ' more' FROM ranked
     WHERE place > %(most)s AND NOT open GROUP BY tenant),
opened AS (
    INSERT INTO reconciliation_signal (kind, tenant, subject, since, seen_at, detail, told_open, told_cleared, tries,
                                       tell_at)
    SELECT %(kind)s, tenant, subject, since, aftercall_now(), detail, false, false, 0, aftercall_now()
      FROM shown ORDER BY subject
    ON CONFLICT (kind, subject) WHERE cleared_at IS NULL
    DO UPDATE SET seen_at = excluded.seen_at, detail = excluded.detail RETURNING xmax = 0 AS new),
cleared AS (
    UPDATE reconciliation_signal s SET cleared_at = aftercall_now(), tell_at = coalesce(s.tell_at, aftercall_now())
     WHERE s.kind = %(kind)s AND s.cleared_at IS NULL AND NOT EXISTS (SELECT FROM shown w WHERE w.subject = s.subject)
    RETURNING 1)
SELECT (SELECT count(*) FROM opened WHERE new), (SELECT count(*) FROM cleared)
"""
_FOUND = (
    "SELECT * FROM unnest(%(tenants)s::text[], %(subjects)s::text[], %(sinces)s::timestamptz[], %(details)s::text[])"
)


def _write(kind: str, sql: str, facts: Mapping[str, Any]) -> tuple[int, int]:
    with connections[transition.ALIAS].cursor() as cursor:
        cursor.execute(_WRITE.replace("{sql}", sql), {**facts, "kind": kind, "most": MOST})
        opened, cleared = cursor.fetchone()
    return int(opened), int(cleared)


def _write_found(kind: str, find: Callable[[datetime], list[Seen]], moments: Mapping[str, datetime]) -> tuple[int, int]:
    seen = find(moments["now"])
    columns = [list(column) for column in zip(*seen, strict=True)] if seen else [[], [], [], []]
    names = ("tenants", "subjects", "sinces", "details")
    return _write(kind, _FOUND, {**moments, **dict(zip(names, columns, strict=True))})


# Telling

# A try is counted before the call, so that a hook that ends its worker is not called for ever.
_NEXT = """
UPDATE reconciliation_signal SET tries = tries + 1,
       tell_at = aftercall_now() + (tries + 1) * (tries + 1) * interval '2 minutes'
 WHERE id = (SELECT id FROM reconciliation_signal WHERE tell_at <= aftercall_now() ORDER BY tell_at, id LIMIT 1
             FOR UPDATE SKIP LOCKED)
RETURNING id, kind, tenant, subject, since, detail, cleared_at, told_open, tries
"""
_TOLD = """
UPDATE reconciliation_signal SET told_open = true, told_cleared = told_open, tries = 0, not_told_at = NULL,
       tell_at = CASE WHEN NOT told_open AND cleared_at IS NOT NULL THEN aftercall_now() END WHERE id = %(id)s
"""
# Where it was over in the meantime, both are told once more.
_NOT_TOLD = """
UPDATE reconciliation_signal SET tries = 0, not_told_at = aftercall_now(),
       tell_at = CASE WHEN cleared_at IS DISTINCT FROM %(cleared_at)s THEN aftercall_now() END WHERE id = %(id)s
"""


def waiting_to_be_told(*, late: timedelta = timedelta(0)) -> bool:
    """Whether there is something to tell of that nobody has told for `late` since it was to be told."""
    return Signal.objects.filter(tell_at__lte=transition.database_now() - late).exists()


def tell() -> int:
    """Tell the hook what it has not been told, for some seconds. Returns how many calls were made.

    An event is told once, or again where its teller was lost in the middle. It is tried TRIES times at most, and is
    then kept as not told. A call that hangs ends the round.
    """
    began, calls = time.monotonic(), 0
    while time.monotonic() - began < ROUND_SECONDS and (event := _next()) is not None:
        calls += 1
        if not _tell_one(event):
            break
    return calls


def _next() -> dict[str, Any] | None:
    with connections[transition.ALIAS].cursor() as cursor:
        cursor.execute(_NEXT)
        row = cursor.fetchone()
        return dict(zip([column.name for column in cursor.description], row, strict=True)) if row else None


def _tell_one(event: dict[str, Any]) -> bool:
    """One call. False where it hung."""
    about = {"kind": event["kind"], "subject": event["subject"]}
    change = "cleared" if event["told_open"] else "opened"
    if event["tries"] == 1:
        log.warning("signal", change=change, **about)
    if event["tries"] > TRIES:  # whoever made the last try was lost in it
        return _mark(_NOT_TOLD, event)
    try:
        _call_hook(_payload(change, event))
    except (Exception, SystemExit) as error:  # somebody else's code
        log.error("notification_failed", **about, tries=event["tries"], **fault(error))
        if event["tries"] == TRIES:
            _mark(_NOT_TOLD, event)
        return not isinstance(error, TimeoutException)
    return _mark(_TOLD, event)


def _mark(statement: str, event: dict[str, Any]) -> bool:
    with connections[transition.ALIAS].cursor() as cursor:
        cursor.execute(statement, event)
    return True


def _payload(change: str, event: dict[str, Any]) -> dict[str, Any]:
    """Names and times of the ledger; never a request, a result or a key."""
    cleared = event["cleared_at"]
    return {
        "event": change, "signal": event["id"], "kind": event["kind"], "title": title(event["kind"]),
        "tenant": event["tenant"], "subject": event["subject"], "since": event["since"].isoformat(),
        "detail": event["detail"], "cleared_at": cleared.isoformat() if cleared else None,
    }  # fmt: skip


def _call_hook(payload: dict[str, Any]) -> None:
    """Raises TimeoutException where the hook hangs; in a worker this takes the place of the task's own alarm.

    The queue ends a worker that even that does not wake up.
    """
    if settings.AFTERCALL_NOTIFY:
        with TimeoutHandler(HOOK_SECONDS):
            import_string(settings.AFTERCALL_NOTIFY)(payload)
