"""A database of the benchmark's own: the embedded server in a throw-away folder, with every commit flushed."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import psycopg

# What people set on a server of this size; nothing here makes a commit less durable than PostgreSQL's defaults.
OPTIONS = ("shared_buffers=512MB", "max_wal_size=4GB", "checkpoint_timeout=30min")
DURABLE = ("fsync", "synchronous_commit", "full_page_writes")


@contextmanager
def database(*, parent: Path | None = None) -> Iterator[psycopg.Connection[Any]]:
    """Start the server, migrate it and point Django (in children, too) at it. Gives a superuser's connection.

    The data lies below `parent`, or where the system keeps what is temporary.
    """
    folder = Path(tempfile.mkdtemp(prefix="aftercall-bench-", dir=parent))
    _choose(folder)
    from console import embedded

    server = embedded.start(folder / "postgres", options=OPTIONS)
    try:
        _migrate()
        with superuser() as connection:
            _refuse_unless_durable(connection)
            yield connection
    finally:
        embedded.stop(server)
        shutil.rmtree(folder, ignore_errors=True)


def _choose(folder: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("AFTERCALL_", "DATABASE_"))]:
        del os.environ[name]
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "console.settings",
        "AFTERCALL_VAR": str(folder),
        "AFTERCALL_PROVIDERS": "benchmarks.workload.SHELF",
        "AFTERCALL_LOG_LEVEL": "ERROR",
        "AFTERCALL_MASS_LIMIT": "1000000",
    }


def _migrate() -> None:
    import django

    django.setup()
    from console import setup

    setup.set_up()


def _refuse_unless_durable(connection: psycopg.Connection[Any]) -> None:
    for name in DURABLE:
        if connection.execute(f"SHOW {name}").fetchone() != ("on",):
            raise SystemExit(f"{name} is off: numbers of a database that may lose commits would mean nothing.")


def superuser(database: str | None = None) -> psycopg.Connection[Any]:
    """Open an autocommit connection as the superuser, to the ledger's database unless told otherwise."""
    return psycopg.connect(url(database), autocommit=True)


def url(database: str | None = None) -> str:
    """Return the superuser's address of a database of this server."""
    from django.conf import settings

    from console import embedded

    name = database or settings.DATABASES["default"]["NAME"]
    return embedded.url(Path(settings.AFTERCALL_VAR) / "postgres", database=name)


def machine(connection: psycopg.Connection[Any], *, data: Path | None) -> dict[str, Any]:
    """Describe what was measured on: no names of hosts, no paths."""
    row = connection.execute("SELECT current_setting('server_version')").fetchone()
    assert row is not None
    return {
        "cpu": _first(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(int(_first(r"^MemTotal:\s+(\d+) kB$", "/proc/meminfo") or 0) / 2**20),
        "file_system": _file_system(data or Path(tempfile.gettempdir())),
        "load_average": round(os.getloadavg()[1], 1),  # of the last five minutes: others at work spoil figures
        "kernel": f"{platform.system()} {platform.release()}",
        "postgresql": row[0],
        "python": platform.python_version(),
        **{name: version(name) for name in ("django", "psycopg", "dbos")},
        "settings": {**dict.fromkeys(DURABLE, "on"), **dict(option.split("=") for option in OPTIONS)},
    }


def _file_system(folder: Path) -> str:
    """The kind of file system that the commits are flushed to; on tmpfs a flush costs nothing."""
    mounts = [(Path(m.mountpoint), m.fstype) for m in psutil.disk_partitions(all=True)]
    place = folder.resolve()
    return max((m for m in mounts if place.is_relative_to(m[0])), key=lambda m: len(m[0].parts), default=(0, "?"))[1]


def _first(pattern: str, file: str) -> str | None:
    try:
        found = re.search(pattern, Path(file).read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1].strip() if found else None
