"""A deployment of its own whose database is brought back by pg_dump, by a copy of its files, and loaded elsewhere.

Effects are counted at the outside system itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from console import database, embedded
from tests.database import FAST
from tests.world import ROOT, World

pytestmark = pytest.mark.processes
PROVIDER = "examples.order_desk.providers.pay"


class Deployment:
    """A folder with an embedded server, secrets and an anchor."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "postgres"
        self.server: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        self.server = embedded.start(self.data, options=FAST)

    def down(self) -> None:
        if self.server is not None:
            embedded.stop(self.server)
            self.server = None

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AFTERCALL_", "DATABASE_"))}
        env = {
            **kept, "DJANGO_SETTINGS_MODULE": "console.settings", "AFTERCALL_VAR": str(self.folder),
            "AFTERCALL_PROVIDERS": PROVIDER, "AFTERCALL_LOG_LEVEL": "CRITICAL",
        }  # fmt: skip
        return subprocess.run([sys.executable, *argv], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)

    def does(self, *words: str) -> Any:
        """What a process of the deployment says."""
        ran = self.run("-m", "tests.one_refund", *words)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout.splitlines()[-1])

    def status(self) -> tuple[int, str]:
        ran = self.run("manage.py", "restore_status", "--json")
        return ran.returncode, json.loads(ran.stdout)["reason"]

    def program(self, name: str, *argv: str) -> None:
        """Run one of PostgreSQL's own programs against this server, as its superuser."""
        place = ["-h", str(embedded.socket_folder(self.data)), "-U", embedded.SUPERUSER]
        subprocess.run([str(embedded.binaries() / name), *place, *argv], check=True, capture_output=True, timeout=60)


@pytest.fixture
def deployment(folder: Path, world: World) -> Iterator[Deployment]:
    made = Deployment(folder)
    made.up()
    assert made.run("manage.py", "setup_database").returncode == 0
    assert made.does("refund", "1001") == {"state": "succeeded", "reason": "receipt"}
    yield made
    made.down()


def check(deployment: Deployment, world: World, reason: str) -> None:
    """Nothing is sent before the release, and nothing twice after it."""
    assert deployment.does("refund", "1002") == {"state": "ambiguous", "reason": "restored"}
    assert deployment.does("refund", "1003")["state"] == "ambiguous"
    assert deployment.status() == (1, reason)
    assert world.pay.count() == 2
    assert deployment.does("release") == {"verdict": "done"}
    assert deployment.status() == (0, "")
    assert deployment.does("look_up", "1002") == {"state": "succeeded"}
    assert deployment.does("refund", "1002")["state"] == "succeeded"
    assert world.pay.count() == 2


def by_dump(deployment: Deployment) -> Callable[[], None]:
    kept = deployment.folder / "backup.dump"
    deployment.program("pg_dump", "-Fc", "-f", str(kept), database.NAME)

    def bring_back() -> None:
        with psycopg.connect(embedded.url(deployment.data), autocommit=True) as outside:
            outside.execute(f"DROP DATABASE {database.NAME} WITH (FORCE)")
            outside.execute(f"CREATE DATABASE {database.NAME} OWNER {database.OWNER_ROLE}")
        deployment.program("pg_restore", "-d", database.NAME, str(kept))

    return bring_back


def copy(source: Path, target: Path) -> None:
    """With its owner, who is another user where root runs the tests."""
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


def by_files(deployment: Deployment) -> Callable[[], None]:
    kept = deployment.folder / "kept"
    deployment.down()
    copy(deployment.data, kept)
    deployment.up()

    def bring_back() -> None:
        deployment.down()
        shutil.rmtree(deployment.data)
        copy(kept, deployment.data)
        deployment.up()

    return bring_back


@pytest.mark.parametrize("backup", [by_dump, by_files])
def test_a_restored_database_sends_nothing_and_nothing_twice(
    deployment: Deployment, world: World, backup: Callable[[Deployment], Callable[[], None]]
) -> None:
    bring_back = backup(deployment)
    assert deployment.does("refund", "1002")["state"] == "succeeded"
    bring_back()
    check(deployment, world, "behind")


def test_a_copy_that_is_loaded_elsewhere_sends_nothing(deployment: Deployment, world: World) -> None:
    assert deployment.does("refund", "1002")["state"] == "succeeded"
    deployment.down()
    other = Deployment(Path(f"{deployment.folder}-elsewhere"))
    try:
        other.folder.mkdir()
        copy(deployment.data, other.data)
        shutil.copy(deployment.folder / "secrets.json", other.folder)
        other.up()
        assert other.does("refund", "1003") == {"state": "ambiguous", "reason": "restored"}
        assert other.status() == (1, "no_anchor")
        assert world.pay.count() == 2
        deployment.up()  # the original goes on
        assert deployment.does("refund", "1004")["state"] == "succeeded"
    finally:
        other.down()
        shutil.rmtree(other.folder, ignore_errors=True)


def test_a_server_that_was_killed_and_recovered_is_the_same_ledger(deployment: Deployment, world: World) -> None:
    assert deployment.does("refund", "1002")["state"] == "succeeded"
    assert deployment.server is not None
    deployment.server.kill()
    deployment.server.wait()
    deployment.up()
    assert deployment.does("refund", "1003")["state"] == "succeeded"
    assert deployment.status() == (0, "")
