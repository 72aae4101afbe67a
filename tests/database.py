"""The tests' PostgreSQL: one server for a run, one migrated template, one copy of it for each worker.

Tests commit for real, as the application role; afterwards a superuser empties the tables behind every guard.
"""

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psycopg
from django.conf import settings
from django.db import connections
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from console import embedded, setup

VAR = Path(os.environ["AFTERCALL_TEST_VAR"])
FAST = ("fsync=off", "full_page_writes=off", "max_connections=300", "autovacuum=off", "shared_buffers=128MB")
LOCK = 726_011  # any number: workers make the template one at a time

CLOCK = """
CREATE TABLE IF NOT EXISTS test_clock (shift interval NOT NULL);
INSERT INTO test_clock SELECT interval '0' WHERE NOT EXISTS (SELECT 1 FROM test_clock);
GRANT SELECT ON test_clock TO PUBLIC;
CREATE OR REPLACE FUNCTION aftercall_now() RETURNS timestamptz LANGUAGE sql VOLATILE
AS $$ SELECT clock_timestamp() + (SELECT shift FROM public.test_clock) $$;
"""

# A business's own table beside the ledger; see tests/book.py.
BOOK = """
CREATE TABLE IF NOT EXISTS test_book (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, reference text NOT NULL, order_id text NOT NULL,
    amount bigint NOT NULL, slip text UNIQUE DEFERRABLE INITIALLY DEFERRED
);
GRANT SELECT, INSERT, UPDATE ON test_book TO PUBLIC;
"""

# Kept between tests: what migrations put there.
SEEDED = ("django_migrations", "django_content_type", "auth_permission", "reconciliation_move", "test_clock")
EMPTY = """
DO $$
DECLARE name text;
BEGIN
    SET LOCAL session_replication_role = replica;  -- no trigger guards a row from this session
    SET LOCAL lock_timeout = '2s';
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> ALL (ARRAY[{seeded}]) LOOP
        EXECUTE format('DELETE FROM %I', name);
    END LOOP;
    UPDATE test_clock SET shift = interval '0' WHERE shift <> interval '0';
END $$
"""


class TestDatabase:
    """One worker's database and the ways into it."""

    __test__ = False

    def __init__(self, *, name: str, password: str) -> None:
        self.name, self.password = name, password

    def url(self, *, user: str) -> str:
        """Return the address of this database for `user`, also for another process."""
        place = {key: value for key, value in server().items() if key in {"host", "port"}}
        return f"postgresql://{user}:{self.password}@/{self.name}?{urlencode(place)}"

    def environment(self) -> dict[str, str]:
        """Return the environment in which a child process uses this database with the tests' settings."""
        return {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "DATABASE_URL": self.url(user=settings.AFTERCALL_APP_ROLE),
            "DATABASE_OWNER_URL": self.url(user=settings.AFTERCALL_OWNER_ROLE),
            "AFTERCALL_SPOOL": str(settings.AFTERCALL_SPOOL),
            "AFTERCALL_ANCHOR": str(settings.AFTERCALL_ANCHOR),
        }

    def superuser(self) -> "psycopg.Connection[Any]":
        """Open an autocommit connection that no guard of the database stops."""
        return superuser(self.name)

    def empty(self, connection: "psycopg.Connection[Any]") -> None:
        """Remove everything that a test left and set the clock right, past triggers and foreign keys."""
        statement = EMPTY.replace("{seeded}", ", ".join(f"'{table}'" for table in SEEDED))
        try:
            connection.execute(statement)
        except psycopg.errors.LockNotAvailable:
            warnings.warn("A session that a test left open held locks; it was ended.", stacklevel=2)
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            connection.execute(statement)


class Clock:
    """The test database's clock, which can be moved; production has none like it."""

    def __init__(self, connection: "psycopg.Connection[Any]") -> None:
        self.connection = connection

    def now(self) -> datetime:
        """Return the time that the ledger reads."""
        row = self.connection.execute("SELECT aftercall_now()").fetchone()
        assert row is not None
        return row[0]

    def advance(self, seconds: float = 0, **parts: float) -> datetime:
        """Let `seconds` (or minutes=, hours=, days=) pass, and return the new time."""
        self.jump(seconds, **parts)
        return self._noticed_by_nobody()

    def set(self, moment: datetime) -> datetime:
        """Let it be `moment`, from where the clock runs on."""
        self.connection.execute("UPDATE test_clock SET shift = %s - clock_timestamp()", [moment])
        return self._noticed_by_nobody()

    def jump(self, seconds: float = 0, **parts: float) -> datetime:
        """Move the clock without any time passing, as somebody would who sets it."""
        self.connection.execute("UPDATE test_clock SET shift = shift + %s", [timedelta(seconds=seconds, **parts)])
        return self.now()

    def _noticed_by_nobody(self) -> datetime:
        from reconciliation import timekeeping

        timekeeping.forget()  # what a beat of this process has measured is less than what has passed for the test
        return self.now()


def weigh_anchor() -> None:
    """Forget the anchor of a database that was emptied, and its trails."""
    anchor = Path(settings.AFTERCALL_ANCHOR)
    anchor.unlink(missing_ok=True)
    shutil.rmtree(f"{anchor}.trail", ignore_errors=True)


def server() -> dict[str, Any]:
    """Return how a superuser reaches the run's server."""
    url = os.environ.get("AFTERCALL_TEST_SERVER") or embedded.url(VAR / "postgres")
    return conninfo_to_dict(url)


def superuser(name: str | None = None) -> "psycopg.Connection[Any]":
    return psycopg.connect(**{**server(), **({"dbname": name} if name else {})}, autocommit=True)


@contextmanager
def worker_database(worker: str) -> Iterator[TestDatabase]:
    """Give this worker a copy of the migrated template, and point Django's connections at it."""
    run = VAR.name.rsplit("-", 1)[-1].lower()
    password = os.environ["AFTERCALL_TEST_PASSWORD"]
    template, name = f"aftercall_{run}", f"aftercall_{run}_{worker}"
    with superuser() as connection:
        connection.execute("SELECT pg_advisory_lock(%s)", [LOCK])
        _ensure_template(connection, template, password)
        connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(*map(sql.Identifier, (name, template))))
    _point_at(name, password)
    settings.AFTERCALL_SPOOL = VAR / f"spool-{worker}"  # a report belongs to one database
    settings.AFTERCALL_ANCHOR = str(VAR / f"anchor-{worker}.json")  # and so does an anchor
    try:
        yield TestDatabase(name=name, password=password)
    finally:
        connections.close_all()
        with superuser() as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def drop_template() -> None:
    """Remove the template from a server that outlives the run."""
    run = VAR.name.rsplit("-", 1)[-1].lower()
    with superuser() as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {}").format(sql.Identifier(f"aftercall_{run}")))


def _ensure_template(connection: "psycopg.Connection[Any]", template: str, password: str) -> None:
    if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [template]).fetchone():
        return
    setup.create_roles(connection)
    for role in (settings.AFTERCALL_APP_ROLE, settings.AFTERCALL_OWNER_ROLE):
        connection.execute(
            sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), sql.Literal(password)),
        )
    draft = f"{template}_draft"  # a template that exists is whole
    setup.create_database(connection, name=draft)
    _point_at(draft, password)
    setup.migrate_and_grant()
    connections.close_all()
    with superuser(draft) as inside:
        inside.execute(CLOCK + BOOK)
    connection.execute(
        sql.SQL("ALTER DATABASE {} RENAME TO {}").format(sql.Identifier(draft), sql.Identifier(template)),
    )


def _point_at(name: str, password: str) -> None:
    connections.close_all()
    place = server()
    for alias in ("default", "owner"):
        connections[alias].settings_dict.update(
            NAME=name, PASSWORD=password, HOST=place.get("host", ""), PORT=place.get("port", "")
        )
