"""Who may be sending: each process that calls providers is on record, and its death is proven, never presumed.

Silence is not death: a stopped process wakes up again. A process is known dead when, seen from the same boot and the
same process namespace, its pid is gone or belongs to a process that started later. A host name proves nothing (two
machines may share one), nor does a namespace that nobody can look into any more; such a case goes to a person.
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from django.db import connections

from .models import Worker
from .transition import ALIAS

_lock = threading.Lock()
_role = "worker"
_known: dict[int, str] = {}  # pid -> name: a forked child is another worker than its parent


def _forked() -> None:
    """A child starts unknown: a pid that comes round again must not bear a dead worker's name; nor a held lock."""
    global _lock
    _lock = threading.Lock()
    _known.clear()


os.register_at_fork(after_in_child=_forked)


@dataclass(frozen=True)
class Place:
    """Where a process lives, as far as its death can be proven from."""

    host: str
    boot_id: str
    pid_namespace: str

    @classmethod
    def here(cls) -> Place:
        """The place of this process; parts that the system does not tell stay empty and prove nothing."""
        return cls(socket.gethostname()[:120], _read("/proc/sys/kernel/random/boot_id"), _link("/proc/self/ns/pid"))


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def started_ticks(pid: int) -> int | None:
    """Clock ticks since boot at which `pid` started, or None where that cannot be read (a zombie has ended)."""
    stat = _read(f"/proc/{pid}/stat")
    after_name = stat.rpartition(") ")[2].split()
    if len(after_name) < 20 or after_name[0] in ("Z", "X"):
        return None
    return int(after_name[19])


def provably_gone(pid: int, ticks: int) -> bool:
    """Whether the process that had `pid` and started at `ticks` has ended.

    A process that /proc does not show may be hidden from us (hidepid, another user); only the kernel's "no such
    process", a zombie, or another process in its place is proof.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it is there, and somebody else's
    after_name = _read(f"/proc/{pid}/stat").rpartition(") ")[2].split()
    if len(after_name) < 20:
        return False
    return after_name[0] in ("Z", "X") or int(after_name[19]) != ticks


def serve_as(role: str) -> None:
    """What this process is on record as, should it send anything: a web process does so when a person presses retry."""
    global _role
    _role = role


def me(role: str = "") -> str:
    """The name of this process in the ledger; registers it at its first call."""
    pid = os.getpid()
    name = _known.get(pid)
    if name is None:
        with _lock:
            name = _known.get(pid) or _register(pid, role or _role)
            _known[pid] = name
    return name


def _register(pid: int, role: str) -> str:
    place = Place.here()
    name = f"{role}:{place.host[:40]}.{pid}.{uuid4().hex[:12]}"
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(
            "INSERT INTO reconciliation_worker (name, role, host, boot_id, pid_namespace, pid, pid_started, started_at,"
            " seen_at) SELECT %s, %s, %s, %s, %s, %s, %s, now, now FROM aftercall_now() AS now",
            [name, role, place.host, place.boot_id, place.pid_namespace, pid, started_ticks(pid) or 0],
        )
    return name


def seen() -> None:
    """This process is alive: for the health page, which decides nothing."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("UPDATE reconciliation_worker SET seen_at = aftercall_now() WHERE name = %s", [me()])


def bury_dead() -> int:
    """Put on record which workers of this machine are provably gone. Returns how many were found now."""
    place = Place.here()
    if not (place.boot_id and place.pid_namespace):
        return 0
    neighbours = Worker.objects.filter(dead_at=None, boot_id=place.boot_id, pid_namespace=place.pid_namespace)
    gone = [w.pk for w in neighbours if w.pid_started and provably_gone(w.pid, w.pid_started)]
    if gone:
        with connections[ALIAS].cursor() as cursor:
            cursor.execute(
                "UPDATE reconciliation_worker SET dead_at = aftercall_now() WHERE id = ANY (%s) AND dead_at IS NULL",
                [gone],
            )
    return len(gone)


def known_dead(name: str) -> bool:
    """Whether the worker called `name` is proven to be gone."""
    return Worker.objects.filter(name=name, dead_at__isnull=False).exists()
