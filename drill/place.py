"""A database of the drill's own: an embedded server in a throw-away folder, a migrated template, copies of it.

Nothing of a deployment is touched: neither its database nor its files nor its providers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import psycopg
from psycopg import sql

# Rows are vacuumed as in a deployment: a sweep changes its runs some hundred thousand times.
FAST = ("fsync=off", "full_page_writes=off", "synchronous_commit=off", "shared_buffers=256MB", "max_connections=120")
DURABLE = ("fsync=on", "synchronous_commit=on", "full_page_writes=on", "shared_buffers=64MB", "max_connections=60")
ORDER_DESK = "examples.order_desk.workflow.DAMAGED_ITEM"
ORDER_DESK_PROVIDERS = ",".join(
    f"examples.order_desk.providers.{name}" for name in ("pay", "carrier", "mail", "tickets")
)

# Only a database of the drill has this clock; production's has nothing to move.
CLOCK = """
CREATE TABLE drill_clock (shift interval NOT NULL);
INSERT INTO drill_clock VALUES (interval '0');
GRANT SELECT ON drill_clock TO PUBLIC;
CREATE OR REPLACE FUNCTION aftercall_now() RETURNS timestamptz LANGUAGE sql VOLATILE
AS $$ SELECT clock_timestamp() + (SELECT shift FROM public.drill_clock) $$;
"""


class Place:
    """One database of the drill: Django's connections lead to it, and its clock can be moved."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.superuser = psycopg.connect(url(folder, name), autocommit=True)
        self.shift = timedelta(0)

    def now(self) -> datetime:
        """The time that the ledger reads."""
        row = self.superuser.execute("SELECT aftercall_now()").fetchone()
        assert row is not None
        moment: datetime = row[0]
        return moment

    def advance(self, by: timedelta) -> None:
        """Move the clock on."""
        self.shift += by
        self.superuser.execute("UPDATE drill_clock SET shift = %s", [self.shift])


def url(folder: Path, database: str) -> str:
    """A superuser's address of a database of the drill's server."""
    from console import embedded

    return embedded.url(folder / "postgres", database=database)


@contextlib.contextmanager
def server(*, options: Sequence[str] = FAST) -> Iterator[Path]:
    """Start a server in a new folder and make the template there. Gives the folder; nothing is left at the end."""
    folder = Path(tempfile.mkdtemp(prefix="aftercall-drill-"))
    choose(folder)
    from console import embedded

    process = embedded.start(folder / "postgres", options=options)
    try:
        make_template(folder)
        yield folder
    finally:
        embedded.stop(process)
        shutil.rmtree(folder, ignore_errors=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL the server with all its sessions, as a machine that loses power does.

    Each session is a process group of its own, and one that is left would still hold the memory. The server is stopped
    first, so that it starts no session between the count and the kill.
    """
    family = [psutil.Process(process.pid)]
    family[0].suspend()
    family += family[0].children(recursive=True)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    psutil.wait_procs(family, timeout=10)


def choose(folder: Path) -> None:
    """Have Django use this folder and the order desk, whatever the environment says. Before Django is set up."""
    providers, workflows = (os.environ.get(f"DRILL_{name}", "") for name in ("PROVIDERS", "WORKFLOWS"))
    for name in [name for name in os.environ if name.startswith(("AFTERCALL_", "DATABASE_"))]:
        del os.environ[name]
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "console.settings",
        "AFTERCALL_VAR": str(folder),
        "AFTERCALL_LOG_LEVEL": "CRITICAL",
        "AFTERCALL_MASS_LIMIT": "1000000",  # workers that do nothing else pass what would be a mishap in a deployment
        "AFTERCALL_PROVIDERS": f"{providers or ORDER_DESK_PROVIDERS},drill.book.DESK",
        "AFTERCALL_WORKFLOWS": f"{workflows or ORDER_DESK},drill.flows.CONSENTED,drill.flows.WITH_RECORD",
    }


def make_template(folder: Path) -> None:
    """Migrate the server's ledger and give it the movable clock; copies are made of it."""
    import django

    django.setup()
    from django.db import connections

    from console import setup

    setup.set_up()
    connections.close_all()
    with psycopg.connect(url(folder, template()), autocommit=True) as inside:
        from drill.book import TABLE

        inside.execute(CLOCK + TABLE)


def template() -> str:
    """The name of the database of which copies are made."""
    from console import database

    return database.NAME


def enter(folder: Path, name: str) -> Place:
    """Make a copy of the template and point this process at it."""
    from django.conf import settings
    from django.db import connections

    connections.close_all()
    with psycopg.connect(url(folder, "postgres"), autocommit=True) as outside:
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
        # Copies are made one after the other: the template must have no other session.
        outside.execute("SELECT pg_advisory_lock(726013)")
        outside.execute(statement.format(sql.Identifier(name), sql.Identifier(template())))
    for alias in ("default", "owner"):
        connections[alias].settings_dict["NAME"] = name
    settings.AFTERCALL_SPOOL = folder / f"spool-{name}"
    settings.AFTERCALL_ANCHOR = folder / f"anchor-{name}.json"  # an anchor belongs to one database
    return Place(folder, name)
