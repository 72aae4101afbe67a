"""The restore fence: whether this database is the ledger that the anchor outside knows, as of before its last send.

`look()` compares them on each new connection of a process that could send, before its first claim, and again every few
seconds. Where the database is behind its anchor, is another one, or cannot be told to be the same, the fence comes
down in the database: from that commit on no claim is given by any process. What follows is in restore.py.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import structlog
from django.db import connections

from audit import log as audit
from audit.verify import Head

from . import anchor
from .actors import Actor
from .anchor import AnchorHeld, AnchorUnreadable, Known, Trails
from .here import connection as my_connection
from .models import Limit, Operation, RestoreFence
from .transition import ALIAS

log = structlog.get_logger(__name__)

SYSTEM = Actor(id="system:fence", kind="system")
LOCK = 726_015  # the anchor is decided about by one session at a time
LOOK_AGAIN = 5.0  # seconds; a pooler may hide from us that the server behind it has changed
JUMP = 1_000_000  # numbers of operations, runs and approvals that are left out, at the least


@dataclass(frozen=True, kw_only=True)
class Here:
    """What this database is and knows."""

    system: str
    oid: int
    timeline: int
    position: int
    digest: str
    at: datetime | None
    empty: bool  # no operation, run, job or tombstone
    database: str  # "" before the ledger was ever anchored
    state: str
    version: int
    mark: int
    signature: str
    reason: str  # for which the fence is down
    anchored: str | None  # the hash of the entry at the anchor's position; None: there is none
    lost: int  # claims on the trail that are not here


@dataclass(frozen=True)
class Problem:
    """Why this may not be the ledger that the anchor knows."""

    code: str  # unanchored | no_anchor | another | moved | behind | forked
    signature: str


_FACTS = """
SELECT (SELECT system_identifier::text FROM pg_control_system()),
       (SELECT oid::bigint FROM pg_database WHERE datname = current_database()),
       ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int,
       coalesce(e.id, 0), coalesce(encode(e.hash, 'hex'), ''), e.at,
       NOT (EXISTS (SELECT 1 FROM reconciliation_operation) OR EXISTS (SELECT 1 FROM reconciliation_run)
            OR EXISTS (SELECT 1 FROM reconciliation_job) OR EXISTS (SELECT 1 FROM reconciliation_tombstone)),
       coalesce(f.database::text, ''), coalesce(f.state, 'up'), coalesce(f.version, 0), coalesce(f.mark, 0),
       coalesce(f.signature, ''), CASE WHEN f.state = 'down' THEN f.reason ELSE '' END,
       (SELECT encode(k.hash, 'hex') FROM audit_entry k WHERE k.id = %s),
       (SELECT count(*) FROM unnest(%s::bigint[], %s::int[]) AS t (id, generation)
          LEFT JOIN reconciliation_operation o ON o.id = t.id
         WHERE (o.id IS NULL OR o.generation < t.generation)
           AND NOT EXISTS (SELECT 1 FROM reconciliation_tombstone s WHERE s.kind = 'operation' AND s.subject_id = t.id))
  FROM (SELECT 1) AS one
  LEFT JOIN reconciliation_restorefence f ON true
  LEFT JOIN LATERAL (SELECT id, hash, at FROM audit_entry ORDER BY id DESC LIMIT 1) AS e ON true
"""


class _Looked(threading.local):
    """What this thread has looked at: a connection, until when that counts, and whose ledger it was."""

    connection: Any = None
    until: float = 0.0
    database: str = ""
    place: anchor.Anchor | None = None


_looked = _Looked()


def forget() -> None:
    """Look again before the next claim of this thread."""
    _looked.connection = None


def look() -> None:
    """Compare this connection's database with the anchor, unless that was just done; the fence comes down if it must.

    Raises AnchorUnreadable where that cannot be told, and the database's errors. Inside a transaction nothing is
    claimed, so nothing is looked at: what would be found there might be rolled back.
    """
    wrapper = my_connection()
    if wrapper.in_atomic_block:
        return
    connection = wrapper.connection
    if connection is not None and connection is _looked.connection and time.monotonic() < _looked.until:
        return
    here = _settled()
    _looked.connection, _looked.until = wrapper.connection, time.monotonic() + LOOK_AGAIN
    _looked.database, _looked.place = here.database, anchor.current()


def note(operation: int, generation: int) -> None:
    """Put a committed claim on the trail before its request leaves. Raises AnchorUnreadable: then nothing may leave."""
    if _looked.connection is None or _looked.connection is not my_connection().connection:
        _look_for(operation, generation)
    assert _looked.place is not None
    _looked.place.note(_looked.database, operation, generation)


def _look_for(operation: int, generation: int) -> None:
    """The connection is not the one on which this was claimed: the server behind it may have been exchanged since."""
    look()
    if is_down() or not Operation.objects.filter(pk=operation, generation=generation).exists():
        raise AnchorUnreadable("The ledger behind a new connection does not hold this claim, or may send nothing.")


def _settled() -> Here:
    known, here, _trails = compare()
    problem = judge(known, here)
    known_to_be_down = problem is not None and here.state == "down" and here.signature == problem.signature
    if known_to_be_down or (here.database and problem is None):
        return here
    return _decide()


def compare() -> tuple[Known | None, Here, Trails]:
    """Read both sides. The anchor first: what it knows was committed before, so a live database is never behind it."""
    place = anchor.current()
    known = place.read()
    trails = place.noted(known.database if known else "")
    return known, _here(known, trails), trails


def _here(known: Known | None, trails: Trails) -> Here:
    claims = sorted(trails.claims)
    values: list[Any] = [
        known.position if known else 0,
        [pk for pk, _ in claims],
        [generation for _, generation in claims],
    ]
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(_FACTS, values)
        row = cursor.fetchone()
    return Here(**dict(zip(Here.__dataclass_fields__, row, strict=True)))


def judge(known: Known | None, here: Here) -> Problem | None:
    """What is wrong with this database, as far as the anchor knows; None where it is the same and not behind."""
    code = _wrong(known, here)
    return Problem(code, f"{code} {known.database if known else ''} {known.mark if known else ''}") if code else None


def _wrong(known: Known | None, here: Here) -> str:
    if known is None or not known.database:
        if here.reason == "unanchored" or not here.database:
            return "" if here.empty else "unanchored"
        return "no_anchor"
    if known.database != here.database:
        return "another"
    if here.mark < known.mark or here.lost or (known.position and here.anchored is None):
        return "behind"
    if known.position and here.anchored != known.digest:
        return "forked"
    return "moved" if (known.system, known.oid) != (here.system, here.oid) else ""


# Deciding, one process at a time


@contextmanager
def deciding(*, wait: float = anchor.PATIENCE) -> Iterator[None]:
    """Nobody else writes the anchor or decides about the fence meanwhile, on any machine and in any session.

    Raises AnchorHeld where somebody else does so for longer than `wait` seconds.
    """
    with anchor.current().lock(wait), connections[ALIAS].cursor() as cursor:
        if not anchor.within(wait, lambda: call("SELECT pg_try_advisory_lock(%s)", [LOCK])):
            raise AnchorHeld("The right to decide about the anchor, in the database,", wait)
        try:
            yield
        finally:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [LOCK])


def _decide() -> Here:
    """Under the lock, and read anew: what looked like a missing anchor may have been another process's first start."""
    with deciding():
        known, here, _trails = compare()
        if known is not None and known.pending and known.pending == here.database and here.state == "up":
            return _complete(here)
        begun = known.pending if known else ""
        if here.empty and not (known and known.database) and here.database in ("", begun):
            return _first(known)
        problem = judge(known, here)
        if problem is not None:
            _come_down(problem, known, here)
        return here


def _first(known: Known | None) -> Here:
    """The first start of a ledger. The anchor says beforehand which identity comes, should we die in between."""
    name = known.pending if known and known.pending else str(uuid4())
    anchor.current().write(Known(database="", pending=name))
    call("SELECT fence_first(%s)", [UUID(name)])
    return _complete(_here(None, Trails(frozenset())))


def _complete(here: Here) -> Here:
    """The ledger's identity is committed; the anchor knows it from now on."""
    anchor.current().write(_known(here))
    return here


def _known(here: Here, **other: Any) -> Known:
    names = ("database", "mark", "system", "oid", "timeline", "position", "digest")
    facts = {name: getattr(here, name) for name in names} | {"at": here.at.isoformat() if here.at else ""}
    return Known(**facts | other)


def _come_down(problem: Problem, known: Known | None, here: Here) -> None:
    if here.state == "down" and here.signature == problem.signature:
        return
    lost = max(known.position - here.position, 0) if known else 0
    found = {"anchor": asdict(known) if known else None, "here": asdict(here), "entries_lost": lost}
    row = {
        "signature": problem.signature,
        "reason": problem.code,
        "found": json.dumps(found, default=str),
        # A ledger from before there were anchors may be just that: a person says what it is before anything changes.
        "marking": problem.code != "unanchored",
    }
    body, _none = audit.body(
        SYSTEM.fact("fence_came_down", code=problem.code, entries_lost=lost, claims_lost=here.lost)
    )
    if call("SELECT fence_down(%s::jsonb, %s, %s)", [json.dumps(row), JUMP + 2 * lost, body]):
        log.critical("restore_fence_down", reason=problem.code, entries_lost=lost, claims_lost=here.lost)


# Going forward


def forward() -> bool:
    """Write the anchor forward to what is committed now. True where it knows all of that.

    False while the fence is down, and where somebody else is deciding: whoever that is writes it, or hangs, and a beat
    that waited for a process that hangs would keep its other duties waiting.
    """
    try:
        with deciding(wait=0):
            return _forward()
    except AnchorHeld:
        return False


def _forward() -> bool:
    known, here, trails = compare()
    if here.state == "down" or known is None or judge(known, here) is not None:
        return False
    if known.position == here.position and known.timeline == here.timeline:
        return True  # nothing was decided since, so nothing was sent
    place = anchor.current()
    place.sync()
    mark = call("SELECT fence_mark(%s)", [UUID(here.database)])
    if mark is None:
        return False
    if known.timeline != here.timeline:
        log.warning("database_timeline_changed", before=known.timeline, now=here.timeline)
    place.write(replace(_known(here), mark=mark))
    place.tidy(trails)
    return True


# Reading


def is_down() -> bool:
    """Whether nothing may be sent."""
    return Limit.objects.filter(kind="restored", lifted_at__isnull=True).exists()


def stands() -> bool:
    """Whether this is the ledger that the anchor knows, and nobody has found otherwise. Looks where that is due."""
    try:
        look()
    except AnchorUnreadable as error:
        log.critical("anchor_unreadable", why=str(error))
        return False
    return not is_down()


def replays_since() -> datetime | None:
    """The release before which what is asked for may have been done; None where no replay window is open."""
    open_one = Limit.objects.filter(kind="replay", lifted_at__isnull=True)
    return open_one.values_list("since", flat=True).first()


def current() -> RestoreFence | None:
    """The fence's row; None before the ledger was ever anchored."""
    return RestoreFence.objects.first()


def audit_heads() -> Iterator[Head]:
    """Where the fence stands, for the proof that no audit row is missing."""
    for fence in RestoreFence.objects.filter(version__gt=0):
        yield Head(f"fence:{fence.pk}", fence.version, fence.state)


def call(statement: str, values: list[Any]) -> Any:
    """Call one of the functions in sql/restore.sql."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchone()[0]
