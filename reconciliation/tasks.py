"""What the queue and the beat call: a wake-up, never a memory. Each may run twice, late or never."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import structlog
from django.conf import settings
from django.db import connections
from django_q.models import OrmQ
from django_q.tasks import async_task

from . import (
    fence,
    leases,
    publishing,
    registry,
    restore,
    retention,
    schedules,
    spool,
    sweeping,
    timekeeping,
    transition,
    watch,
    workers,
)  # fmt: skip
from .anchor import AnchorUnreadable
from .models import Approval, Operation, Run, Tick
from .workflows import Choice

log = structlog.get_logger(__name__)

WATCH_EVERY = 15.0  # seconds
LONG_CALL = 30.0  # seconds that a provider's call usually takes at most
SHORTEST = 5.0  # seconds
ROUNDS = 20  # a drain ends by itself well before the queue would take it for lost; the beat asks again
QUIET = timedelta(seconds=10)  # the health page takes a worker that has not been heard of for 90 s for silent


def drain() -> int:
    """Do what is due, in batches, until nothing is left. The task of the queue's workers."""
    _guarded(fence.look)
    workers.seen()
    spool.bring_in()
    total, until = 0, time.monotonic() + _time_to_begin()
    batch = settings.AFTERCALL_SWEEP_BATCH
    while total < batch * ROUNDS and time.monotonic() < until and (handled := sweeping.sweep(limit=batch, until=until)):
        total += handled
    tick("sweep", by=workers.me(), handled=total)
    return total


def _time_to_begin() -> float:
    """Seconds in which a task begins new things: the last of them still has the time that a model may take, before the
    queue ends the task and spends a proposal that nobody heard."""
    steps = [step for workflow in registry.workflows().values() for step in workflow.steps]
    longest = max((leases.of_step(step) for step in steps if isinstance(step, Choice)), default=0.0)
    return max(SHORTEST, float(str(settings.Q_CLUSTER["timeout"])) - max(longest, leases.with_margin(LONG_CALL)))


def wake() -> None:
    """Ask the queue for a drain. May be lost: the beat asks again as long as something is due."""
    async_task("reconciliation.tasks.drain", group="drain")


def beat_once() -> None:
    """One round of the beat; two or more beats are harmless."""
    workers.me("beat")
    workers.seen()
    workers.bury_dead()
    timekeeping.keep()
    down = fence.is_down()
    if down or _is_time("anchor", every=settings.AFTERCALL_ANCHOR_EVERY):
        tended = _guarded(restore.tend)
        down = tended is not None and tended.down
        if tended is not None and tended.done:  # else it is tried in the next round, and after a while it is a signal
            tick("anchor", by=workers.me(), handled=0)
    schedules.tick()
    if (_anything_due() or _long_quiet()) and OrmQ.objects.count() < settings.Q_CLUSTER["workers"]:
        wake()
    if _is_time("watch", every=WATCH_EVERY):
        opened, cleared = watch.look()  # before this beat is on record, so that the silence before it is seen
        tick("watch", by=workers.me(), handled=opened + cleared)
        _have_told()
    if _is_time("retention", every=settings.AFTERCALL_RETENTION_EVERY):
        begun = Tick.objects.filter(name="retention").exists()  # the first round comes when one interval is over
        tick("retention", by=workers.me(), handled=0)
        if begun and not down:
            async_task("reconciliation.tasks.retain", group="retention")
    tick("beat", by=workers.me(), handled=0)


def _have_told() -> None:
    """Signals are told by a worker, since the hook is somebody else's code and may hang: the beat never calls it.

    Where no worker takes it (which is a signal, too), a thread beside the beat tells; one, however long it takes.
    """
    if not settings.AFTERCALL_NOTIFY:
        watch.tell()  # a line in the log
    elif watch.waiting_to_be_told(late=watch.SILENT):
        if not any(thread.name == "tell" for thread in threading.enumerate()):
            threading.Thread(target=_tell_beside, name="tell", daemon=True).start()
    elif watch.waiting_to_be_told() and OrmQ.objects.count() <= settings.Q_CLUSTER["workers"]:
        async_task("reconciliation.tasks.tell", group="tell")


def tell() -> int:
    """One bounded round of telling. The task of the queue's workers; a lost one is made up for by the next look."""
    return watch.tell()


def _tell_beside() -> None:
    try:
        watch.tell()
    finally:
        connections.close_all()


def _guarded(duty: Callable[[], Any]) -> Any:
    """An anchor that cannot be read stops claims, and nothing else: look-ups and schedules' rows go on."""
    try:
        return duty()
    except AnchorUnreadable as error:
        log.critical("anchor_unreadable", why=str(error))


def retain() -> str:
    """One bounded round of retention, and a task for the next one as long as there is more to go.

    The task of the queue's workers; a lost one is made up for an hour later.
    """
    tally = retention.tend()
    tick("retention", by=workers.me(), handled=tally.pruned.total())
    if tally.full:
        async_task("reconciliation.tasks.retain", group="retention")
    return tally.told()


def _is_time(duty: str, *, every: float) -> bool:
    """Whether a duty was last done `every` seconds ago or longer. Two beats may both say so; that is harmless."""
    return _not_within(duty, timedelta(seconds=every))


def _anything_due() -> bool:
    now = transition.database_now()
    return (
        Operation.objects.filter(due_at__lte=now).exists()
        or Run.objects.filter(due_at__lte=now).exists()
        or Approval.objects.filter(due_at__lte=now).exists()
        or publishing.anything_due()
        or any(spool.folder().glob("*.report"))
    )


def _long_quiet() -> bool:
    """Whether no worker has swept for a while: a wake-up without work shows that they are there, and empties spools."""
    return _not_within("sweep", QUIET)


def _not_within(duty: str, span: timedelta) -> bool:
    """A time in the future was told by a clock that has been set back since: it says nothing, so the duty is due."""
    at = Tick.objects.filter(name=duty).values_list("at", flat=True).first()
    return at is None or not timedelta(0) <= transition.database_now() - at < span


def tick(name: str, *, by: str, handled: int) -> None:
    """Put on record that a recurring duty was done now."""
    with connections[transition.ALIAS].cursor() as cursor:
        cursor.execute(
            "INSERT INTO reconciliation_tick (name, at, by, handled) VALUES (%s, aftercall_now(), %s, %s)"
            " ON CONFLICT (name) DO UPDATE SET at = excluded.at, by = excluded.by, handled = excluded.handled",
            [name, by, handled],
        )
