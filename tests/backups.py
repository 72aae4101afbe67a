"""A backup of the test's database, and its return: every table and every sequence is what it was, everybody is cut off.

    backup = Backup(superuser_connection)
    perform(...)                # sent, and forgotten by
    backup.bring_back()

The database stays the same one for PostgreSQL, as after a restore to a point in time.
"""

from __future__ import annotations

from typing import Any

import psycopg
from django.db import connections
from psycopg import sql

from reconciliation import fence, workers


class Backup:
    """What the database holds at the moment of the call."""

    def __init__(self, superuser: psycopg.Connection[Any]) -> None:
        self.superuser = superuser
        self.take()

    def take(self) -> None:
        with self.superuser.transaction():
            self.superuser.execute("DROP SCHEMA IF EXISTS backup CASCADE; CREATE SCHEMA backup")
            for table in self._tables():
                here, there = sql.Identifier("public", table), sql.Identifier("backup", table)
                self.superuser.execute(sql.SQL("CREATE TABLE {} AS TABLE {}").format(there, here))
            self.numbers = self._numbers()

    def bring_back(self) -> None:
        """The database forgets what was written since."""
        connections.close_all()
        with self.superuser.transaction():
            self.superuser.execute("SET LOCAL session_replication_role = replica")
            for table in self._tables():
                here, there = sql.Identifier("public", table), sql.Identifier("backup", table)
                self.superuser.execute(sql.SQL("DELETE FROM {}").format(here))
                copy = sql.SQL("INSERT INTO {} OVERRIDING SYSTEM VALUE SELECT * FROM {}")
                self.superuser.execute(copy.format(here, there))
            for name, last in self.numbers.items():
                self.superuser.execute("SELECT setval(%s::regclass, %s, %s)", [name, last or 1, last is not None])
        workers._known.clear()  # the row behind the name may be gone
        fence.forget()

    def _tables(self) -> list[str]:
        rows = self.superuser.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'test_clock'"
        )
        return [row[0] for row in rows.fetchall()]

    def _numbers(self) -> dict[str, int | None]:
        rows = self.superuser.execute(
            "SELECT quote_ident(schemaname) || '.' || quote_ident(sequencename), last_value FROM pg_sequences"
            " WHERE schemaname = 'public'"
        )
        return dict(rows.fetchall())

    def drop(self) -> None:
        self.superuser.execute("DROP SCHEMA IF EXISTS backup CASCADE")
