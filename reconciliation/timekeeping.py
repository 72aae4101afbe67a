"""What follows when the database's clock is set: things may become unknown or be over earlier, never again or later.

Every decision reads that clock, and none reads another. The beat remembers the latest time that it told, and measures
how much time has passed by a clock that nobody sets.

- *Set back*: what was over at the latest time told stays over, from the first moment on. When the beat sees it, every
  lease, retention of a key, consent and due time follows by as much, so that none lasts longer than it was meant to.
- *Set forward*: leases, retentions and consents are over earlier, which is safe. An empty answer of a provider would
  prove absence earlier, which is not: what was sent before then has to settle anew, from that moment on.
"""

from __future__ import annotations

from datetime import datetime

import structlog
from django.db import transaction

from audit import log as audit

from . import transition
from .actors import SYSTEM
from .models import Clock
from .policy import boot_seconds

log = structlog.get_logger(__name__)

TOLERANCE = 5.0  # seconds; less is within what the margins of leases and retentions allow for
SUBJECT = "clock:1"

_last: tuple[datetime, float] | None = None  # what this process was told, and its own clock just before


def keep() -> float:
    """Look whether the clock was set since the last look. Returns by how many seconds, where this look noticed it.

    Any number of processes may look; each setting is followed, and is in the audit log, once.
    """
    global _last
    before = boot_seconds()
    known, elapsed = (None, None) if _last is None else (_last[0], before - _last[1])
    with transaction.atomic():
        now, set_by = transition.keep_time(known=known, elapsed=elapsed, tolerance=TOLERANCE)
        if set_by:
            code = "clock_set_forward" if set_by > 0 else "clock_set_back"
            fact = SYSTEM.fact(code, milliseconds=round(1000 * abs(set_by)))
            audit.append(subject=SUBJECT, tenant=":all", event="clock", fact=fact)
            log.error("clock_set", seconds=set_by)
    _last = (now, before)
    return set_by


def forget() -> None:
    """What this process knows is of another database, or of another life of it."""
    global _last
    _last = None


def put_forward_at() -> datetime | None:
    """When the clock was last set forward, by the clock as it is now."""
    return Clock.objects.values_list("forward_at", flat=True).first()
