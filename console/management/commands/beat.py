"""The beat: asks the ledger every second what is due. Several may run; what may happen once is guarded there."""

import signal
import threading
import time
from typing import Any

import structlog
from django.core.management.base import BaseCommand
from django.db import DatabaseError, close_old_connections
from django.utils.module_loading import import_string

EVERY = 1.0  # seconds
log = structlog.get_logger("aftercall.beat")


class Command(BaseCommand):
    help = __doc__

    def handle(self, *args: Any, **options: Any) -> None:
        stopping = threading.Event()
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, lambda *_: stopping.set())
        beat_once = import_string("reconciliation.tasks.beat_once")
        while not stopping.is_set():
            began = time.monotonic()
            _beat(beat_once)
            stopping.wait(max(0.0, EVERY - (time.monotonic() - began)))


def _beat(beat_once: Any) -> None:
    """One beat. A database that is away for a while is not a reason to die: the next beat tries again."""
    close_old_connections()
    try:
        beat_once()
    except DatabaseError as error:
        log.warning("beat_failed", error=type(error).__name__)
