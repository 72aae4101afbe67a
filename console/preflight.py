"""What must hold before anything is started. Each check says in one sentence what is wrong and what would be right."""

import contextlib
import errno
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from console import embedded

OLDEST = 15  # the oldest PostgreSQL whose features and defaults (no CREATE for everybody) we rely on
CLOCK = "SELECT pg_catalog.clock_timestamp()"  # the body of aftercall_now() that audit/migrations/0001 makes


class CannotStart(Exception):
    """One sentence: what is wrong, and what would be right."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one session sees of its server. `clock` is the body of aftercall_now(), None before the first migration."""

    version: int
    is_replica: bool
    fsync: str
    synchronous_commit: str
    clock: str | None


def check_port(host: str, port: int) -> None:
    """Refuse an address on which nothing can listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise CannotStart(
                f"Port {port} on {host} {reason}; end what listens there or start with --port and another number."
            ) from error


def check_folder(var: Path) -> None:
    """Refuse a folder for data into which this process cannot write."""
    probe = var / f".probe-{os.getpid()}"
    try:
        var.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CannotStart(
            f"The folder {var} cannot be written ({error.strerror}); make it writable for this user "
            "or set AFTERCALL_VAR to a folder that is."
        ) from error


def check_server(settings: Mapping[str, Any], *, name: str) -> None:
    """Refuse a database (Django's settings of it) that cannot be reached or cannot keep what it promises."""
    judge(read_facts(settings, name=name))


def judge(facts: Facts) -> None:
    """Refuse a server on which a commit may be lost, may not be possible, or whose clock was replaced."""
    if facts.version < OLDEST:
        raise CannotStart(f"The database is PostgreSQL {facts.version}; Aftercall needs {OLDEST} or newer.")
    if facts.is_replica:
        raise CannotStart("The database is a replica that takes no writes; point DATABASE_URL at the primary.")
    if facts.fsync != "on":
        raise CannotStart("The database runs with fsync off, so a crash loses what it confirmed; set fsync = on.")
    if facts.synchronous_commit == "off":
        raise CannotStart(
            "The database runs with synchronous_commit off, so a crash loses what it confirmed; "
            "set synchronous_commit = on for the server and for Aftercall's roles."
        )
    if facts.clock not in (None, CLOCK):
        raise CannotStart(
            "The database's function aftercall_now() is not the one that the migrations made (a test clock?), "
            "so no deadline could be trusted; use a database that was not made for tests."
        )


def read_facts(settings: Mapping[str, Any], *, name: str) -> Facts:
    """Ask the server. `name` is the variable to name in the sentence when it cannot be reached."""
    with _connect(settings, name=name) as connection:
        row = connection.execute(
            "SELECT current_setting('server_version_num')::int / 10000, pg_is_in_recovery(), current_setting('fsync'),"
            " current_setting('synchronous_commit'),"
            " (SELECT btrim(prosrc, E' \\n\\t;') FROM pg_proc WHERE oid = to_regprocedure('public.aftercall_now()'))"
        ).fetchone()
    assert row is not None
    return Facts(version=row[0], is_replica=row[1], fsync=row[2], synchronous_commit=row[3], clock=row[4])


def _connect(settings: Mapping[str, Any], *, name: str) -> "psycopg.Connection[Any]":
    given = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD", "dbname": "NAME"}
    values = {word: settings[key] for word, key in given.items() if settings.get(key)}
    try:
        return psycopg.connect(make_conninfo(**{**settings["OPTIONS"], **values}), autocommit=True)
    except psycopg.OperationalError as error:
        raise CannotStart(
            f"The database of {name} cannot be used ({_reason(error)}); start that server or correct {name}."
        ) from error
    except psycopg.ProgrammingError as error:
        raise CannotStart(f"{name} carries a parameter that PostgreSQL does not know; remove it.") from error


def _reason(error: psycopg.OperationalError) -> str:
    """The driver's last line, which names host and cause and never the password."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no answer"
    with contextlib.suppress(IndexError):
        text = text.split("failed: ", 1)[1]
    return text.removeprefix("FATAL:").strip().rstrip(".")


def embedded_superuser(var: Path) -> dict[str, Any]:
    """Return Django-like settings of the embedded server's superuser, for the checks before there is a database."""
    return {
        "HOST": str(embedded.socket_folder(var / "postgres")),
        "USER": embedded.SUPERUSER,
        "NAME": "postgres",
        "OPTIONS": {},
    }
