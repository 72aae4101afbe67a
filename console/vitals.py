"""What the health page measures. Queries of columns only: a queued task is never unpickled in a web process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import tzdata
from django.db import connection
from django.db.models import Count, Min, Q
from django.template.defaultfilters import filesizeformat
from django.urls import reverse
from django.utils import timezone
from django_q.models import OrmQ

from reconciliation import fence_wording, publishing, watch
from reconciliation.models import Operation, Run, Signal, Tick, Worker
from reconciliation.transition import database_now
from reconciliation.wording import duration

SILENT = timedelta(seconds=90)  # a worker says that it lives with each task that it takes
LATE = timedelta(seconds=30)  # due work is taken within seconds; half a minute is a sweep that does not run
FORGOTTEN = timedelta(hours=1)  # a worker that has been gone for so long is history, not health
MOST = 1000


@dataclass(frozen=True)
class Check:
    """One part: its name, rows of (what, value), and what is wrong and what to do ("" where nothing is)."""

    name: str
    rows: list[tuple[str, str]]
    bad: str = ""
    table: list[list[str]] = field(default_factory=list)
    columns: tuple[str, ...] = ()
    link: tuple[str, str] | None = None  # (name of a page, what the link says)


@dataclass(frozen=True)
class Told:
    """A signal, what it means, its subject and detail for people, and the page of that ("" where it has none)."""

    signal: Signal
    title: str
    subject: str
    url: str
    detail: str


_PAGES = {"operation": "case", "run": "run", "approval": "approval", "job": "schedule"}


def signals(tenants: list[str]) -> list[Told]:
    """What is open and concerns these tenants or everybody, oldest first."""
    rows = Signal.objects.filter(cleared_at__isnull=True, tenant__in=["", *tenants]).order_by("since")[:MOST]
    return [Told(row, watch.title(row.kind), _subject(row), _url(row), _detail(row)) for row in rows]


def _subject(row: Signal) -> str:
    """The row that counts what is not shown by itself stands for many."""
    kind = row.subject.partition(":")[0]
    return {"more": "others", "fence": "this ledger"}.get(kind, row.subject)


def _detail(row: Signal) -> str:
    """The fence's is a code and what it made unknown."""
    code, comma, marked = row.detail.partition(", ")
    known = fence_wording.SHORT.get(code) if row.kind == "restored" else None
    return f"{known.removesuffix('.')}{comma}{marked}" if known else row.detail


def _url(row: Signal) -> str:
    kind, _, pk = row.subject.partition(":")
    if kind in ("fence", "anchor"):
        return reverse("restore")
    if kind in ("message", "outbox"):
        return f"{reverse('outbox')}#message-{pk}" if pk else reverse("outbox")
    if kind == "limit":
        return f"{reverse('limits')}#limit-{pk}"
    return reverse(_PAGES[kind], args=[pk]) if kind in _PAGES and row.kind != "heard_after_pruning" else ""


def checks() -> list[Check]:
    """Every part, each by a constant number of queries."""
    now = database_now()
    parts: list[Callable[[datetime], Check]] = [_overdue, _outbox, _queue, _beat, _zones, _database, _workers]
    return [part(now) for part in parts]


def _overdue(now: datetime) -> Check:
    rows, late = [], 0
    for name, model in (("operations", Operation), ("runs", Run)):
        due = model._default_manager.filter(due_at__lt=now - LATE).order_by("due_at")
        number = due[: MOST + 1].count()
        oldest = due.values_list("due_at", flat=True).first()
        late += number
        rows.append((f"Overdue {name}", _capped(number) + (f", oldest by {duration(now - oldest)}" if oldest else "")))
    bad = "Due work is not being taken. Look at beat and workers; nothing is lost, it waits in the ledger."
    return Check("Due work", rows, bad if late else "")


def _outbox(now: datetime) -> Check:
    seen = publishing.backlog(before=now - LATE)
    waits = _capped(seen.waiting) + (f", the oldest for {duration(now - seen.since)}" if seen.since else "")
    rows = [("Waiting", waits), ("Late", _capped(seen.late)), ("With a person", _capped(seen.stuck))]
    late = "Messages are not being published. Look at beat and workers; nothing is lost, they wait in the outbox. "
    stuck = "Some messages cannot be published as they are and wait for a person. "
    bad = (late if seen.late else "") + (stuck if seen.stuck else "")
    return Check("Outbox", rows, bad.strip(), link=("outbox", "The messages"))


def _queue(now: datetime) -> Check:
    since = timezone.now()  # the broker writes locks by its own clock: free since then, or taken until then
    waiting = Q(lock__lte=since)
    told = OrmQ.objects.aggregate(
        waiting=Count("id", filter=waiting), taken=Count("id", filter=~waiting), oldest=Min("lock", filter=waiting)
    )
    age = since - told["oldest"] if told["oldest"] else None
    rows = [("Waiting", str(told["waiting"])), ("Taken by a worker", str(told["taken"]))]
    rows.append(("Oldest waiting for", duration(age) if age else "nothing waits"))
    slow = age is not None and age > timedelta(minutes=1)
    return Check(
        "Wake-up queue", rows, "Wake-ups wait: no worker is free. The sweep finds their work too." if slow else ""
    )


def _workers(now: datetime) -> Check:
    shown = Worker.objects.filter(seen_at__gt=now - FORGOTTEN).order_by("-seen_at")[:50]
    table = [[w.name, w.role, w.host, str(w.pid), duration(now - w.seen_at) + " ago", _life(w, now)] for w in shown]
    alive = sum(row[-1] == "alive" and row[1] == "worker" for row in table)
    bad = "" if alive else "No worker is alive: nothing is sent and nothing is looked up. Start one."
    columns = ("Name", "Role", "Host", "Pid", "Seen", "State")
    return Check("Workers", [("Alive", str(alive))], bad, table, columns)


def _life(worker: Worker, now: datetime) -> str:
    if worker.dead_at:
        return "dead"
    if now - worker.seen_at < SILENT:
        return "alive"
    return "idle" if worker.role == "web" else "silent"  # a web process is heard of only when it sends


def _beat(now: datetime) -> Check:
    ticks = list(Tick.objects.order_by("name"))
    rows = [(tick.name, f"{duration(now - tick.at)} ago by {tick.by}, {tick.handled} handled") for tick in ticks]
    fresh = any(now - tick.at < LATE for tick in ticks)
    bad = "" if fresh else "No beat in the last half minute: expired leases and due look-ups wait. Start the beat."
    return Check("Beat and sweep", rows or [("Last sweep", "never")], bad)


def _zones(now: datetime) -> Check:
    version = tzdata.IANA_VERSION
    bad = (
        f"Zone data {version} is old; install a newer tzdata, or schedules may run an hour off."
        if old(version, now)
        else ""
    )
    return Check(
        "Time zones", [("IANA version in use", version), ("Your zone", timezone.get_current_timezone_name())], bad
    )


def old(version: str, now: datetime) -> bool:
    """Whether IANA data is a year behind: zones change several times a year, often at short notice."""
    digits = version[:4]
    return not digits.isdecimal() or now - datetime(int(digits), 12, 31, tzinfo=UTC) > timedelta(days=270)


_DATABASE = """
SELECT current_setting('server_version'), pg_is_in_recovery(), current_setting('fsync'),
       current_setting('synchronous_commit'), pg_database_size(current_database()), current_user, current_database(),
       (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()), current_setting('max_connections')
"""


def _database(now: datetime) -> Check:
    with connection.cursor() as cursor:
        cursor.execute(_DATABASE)
        version, replica, fsync, commit, size, user, name, used, limit = cursor.fetchone()
    rows: list[tuple[str, Any]] = [
        ("PostgreSQL", version),
        ("Database", f"{name} as {user}"),
        ("Role", "replica" if replica else "primary"),
        ("fsync", fsync),
        ("synchronous_commit", commit),
        ("Size", filesizeformat(size)),
        ("Connections", f"{used} of {limit}"),
        ("Its clock", f"{abs((timezone.now() - now).total_seconds()):.1f} s from this process"),
    ]
    return Check("Database", rows, _unsafe(replica, fsync, commit))


def _unsafe(replica: bool, fsync: str, commit: str) -> str:
    if replica:
        return "This is a replica: decisions must never read from one. Point DATABASE_URL at the primary."
    if fsync != "on" or commit == "off":
        return "A crash can lose commits that were acknowledged. Set fsync and synchronous_commit to on."
    return ""


def _capped(number: int) -> str:
    return f"{MOST}+" if number > MOST else str(number)
