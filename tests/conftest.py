"""Fixtures of the whole suite. Tests use a real PostgreSQL and commit; see tests/database.py."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connections

from console import embedded
from reconciliation import fence, spool
from tests import database
from tests.book import book  # noqa: F401 - fixtures
from tests.cast import till  # noqa: F401 - fixtures
from tests.nursery import claims, desk, nursery  # noqa: F401 - fixtures
from tests.scripted import clerk, shop  # noqa: F401 - fixtures
from tests.world import whole_world, world  # noqa: F401 - fixtures

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_CHROMIUM = "no Chromium was found (apt-get install chromium)"

_server: "subprocess.Popen[bytes] | None" = None


def pytest_configure(config: pytest.Config) -> None:
    """Start the run's database in the first process; it ends with that process, however that ends."""
    global _server
    if hasattr(config, "workerinput") or config.option.collectonly or os.environ["AFTERCALL_TEST_SERVER"]:
        return
    _server = embedded.start(database.VAR / "postgres", options=database.FAST)


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    if os.environ["AFTERCALL_TEST_SERVER"] and not config.option.collectonly:
        database.drop_template()
    if _server is not None:
        embedded.stop(_server)
    shutil.rmtree(database.VAR, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave browser tests out where there is no browser; in CI that is a failure, not a smaller suite."""
    in_browser = [item for item in items if item.get_closest_marker("browser")]
    if not in_browser or CHROMIUM:
        return
    if os.environ.get("CI"):
        raise pytest.UsageError(
            "No Chromium was found, and in CI the browser tests are not left out; install chromium."
        )
    for item in in_browser:
        item.add_marker(pytest.mark.skip(reason=NO_CHROMIUM))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which tests were left out for want of a browser."""
    skipped = terminalreporter.stats.get("skipped", [])
    left_out = sorted({report.nodeid.split("[")[0] for report in skipped if NO_CHROMIUM in str(report.longrepr)})
    if left_out:
        terminalreporter.write_line(f"Left out, since {NO_CHROMIUM}:")
        for name in left_out:
            terminalreporter.write_line(f"  {name}")


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args: dict[str, Any]) -> dict[str, Any]:
    """The system's Chromium; its sandbox needs rights that containers do not give."""
    return {**browser_type_launch_args, "executable_path": CHROMIUM, "args": ["--no-sandbox"]}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for an embedded database: unlike tmp_path, other users may pass through what is above it, always."""
    made = Path(tempfile.mkdtemp(dir=database.VAR))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="session")
def django_db_setup() -> None:
    """Nothing: pytest-django's own test database is not used."""


@pytest.fixture(scope="session")
def test_database(request: pytest.FixtureRequest, django_db_blocker: Any) -> Iterator[database.TestDatabase]:
    """This worker's database, migrated, with both roles."""
    worker = getattr(request.config, "workerinput", {}).get("workerid", "main")
    with django_db_blocker.unblock():
        opened = database.worker_database(worker)
        made = opened.__enter__()
    yield made
    with django_db_blocker.unblock():
        opened.__exit__(None, None, None)


@pytest.fixture(scope="session")
def cleaner(test_database: database.TestDatabase) -> Iterator["psycopg.Connection[Any]"]:
    with test_database.superuser() as connection:
        yield connection


@pytest.fixture
def ledger_db(
    test_database: database.TestDatabase, cleaner: "psycopg.Connection[Any]", django_db_blocker: Any
) -> Iterator[database.TestDatabase]:
    """Opens the database to a test, as the application role and with commits that are real; empties it afterwards.

    As in a deployment, the ledger is anchored while it is empty.
    """
    with django_db_blocker.unblock():
        fence.look()
        yield test_database
        connections.close_all()
    test_database.empty(cleaner)
    database.weigh_anchor()
    shutil.rmtree(spool.folder(), ignore_errors=True)  # a report that a test left would come in during the next one


@pytest.fixture
def db(ledger_db: database.TestDatabase) -> database.TestDatabase:
    """What pytest-django's own fixtures (live_server, client helpers) ask for."""
    return ledger_db


@pytest.fixture
def transactional_db(ledger_db: database.TestDatabase) -> database.TestDatabase:
    return ledger_db


@pytest.fixture
def clock(ledger_db: database.TestDatabase, cleaner: "psycopg.Connection[Any]") -> database.Clock:
    """The database's clock, movable; it is set right after the test."""
    return database.Clock(cleaner)


@pytest.fixture
def superuser_connection(ledger_db: database.TestDatabase) -> Iterator["psycopg.Connection[Any]"]:
    """An autocommit connection that no grant or trigger stops, for tampering and for looking."""
    with ledger_db.superuser() as connection:
        yield connection


@pytest.fixture
def database_url_env(ledger_db: database.TestDatabase) -> dict[str, str]:
    """The environment in which a child process uses this worker's database. See also tests/processes.py."""
    return ledger_db.environment()
