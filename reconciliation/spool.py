"""The last place for a receipt: a local file, when the database takes neither the settlement nor the journal entry.

Files are encrypted, synced before the worker goes on, and come in as late reports when the database is back. One file
is one report; it is removed only after its journal entry is committed, so a crash in between journals it twice, which
is harmless, and never loses it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import structlog
from django.conf import settings
from django.db import DatabaseError, DataError, IntegrityError, InterfaceError

from . import transition
from .sealing import CannotOpen, open_bytes, seal_bytes
from .states import Kind, Subject

log = structlog.get_logger(__name__)


def folder() -> Path:
    """Where reports wait."""
    return Path(settings.AFTERCALL_SPOOL)


def keep(subject: Subject, entry: transition.Observed) -> Path:
    """Write one report to disk and sync it."""
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    report = json.dumps({"operation": subject.pk, "entry": entry.row()}).encode()
    path = folder() / f"{uuid4().hex}.report"
    partial = path.with_suffix(".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(seal_bytes(report).encode())
        file.flush()
        os.fsync(descriptor)
    partial.rename(path)
    _sync_folder()
    log.error("receipt_spooled", operation=subject.pk, file=path.name)
    return path


def _sync_folder() -> None:
    descriptor = os.open(folder(), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def bring_in() -> int:
    """Journal every waiting report as a late one. Returns how many came in; what fails stays for the next time.

    Several processes may do so at once. A report that no journal can take, or whose operation this database does not
    have, is set aside, so that it does not stand in the way of the others.
    """
    count = 0
    for path in sorted(folder().glob("*.report")):
        try:
            _bring_in(json.loads(open_bytes(path.read_bytes())))
        except FileNotFoundError:
            continue  # another process has brought it in
        except (CannotOpen, ValueError, KeyError, TypeError, DataError, IntegrityError) as fault:
            _set_aside(path, fault)
        except (DatabaseError, InterfaceError):
            log.warning("spooled_report_waits", file=path.name)
            return count
        else:
            path.unlink(missing_ok=True)
            count += 1
    return count


def _set_aside(path: Path, fault: Exception) -> None:
    log.critical("spooled_report_unreadable", file=path.name, error=type(fault).__name__)
    with suppress(FileNotFoundError):
        path.rename(path.with_suffix(".unreadable"))


def _bring_in(report: dict[str, Any]) -> None:
    row = report["entry"]
    entry = transition.Observed(**{**row, "kind": "late_report", "data": json.loads(row["data"])})
    transition.note(Subject(Kind.OPERATION, report["operation"]), [entry], look_soon=True)
