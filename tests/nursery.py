"""Real workers for tests, to be killed and frozen, and what must be true of the ledger when nothing is due any more.

    def test_a_killed_worker_refunds_once(desk):
        worker = desk.worker(do="perform", intent=REFUND, stop_at=["claimed"])
        worker.reached("claimed")
        worker.kill()
        desk.come_to_rest()
        assert desk.effects(desk.operation()) == 1

See tests/worker_driver.py for what a worker can do and where it can be stopped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from django.db.models import Min

from audit import verify
from audit.models import Entry
from reconciliation import publishing, registry, spool, sweeping, transition, workers
from reconciliation.models import Message, Operation, Run
from tests import database
from tests.book import PROVIDER as BOOK
from tests.book import committed
from tests.processes import spawn, wait_until
from tests.world import World

PROVIDERS = [f"examples.order_desk.providers.{name}" for name in ("pay", "carrier", "mail", "tickets")]
PROVIDERS.append(BOOK)
KEYED = ("pay", "carrier")  # these note the key of each call that had an effect
WORKFLOW = "tests.three_steps.THREE"
WITH_CLAIMS = {"AFTERCALL_WORKFLOWS": ["examples.order_desk.workflow.DAMAGED_ITEM"]}


class Worker:
    """One forked worker process."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid, self.folder = pid, folder

    def events(self) -> list[dict[str, Any]]:
        """What it has said so far."""
        try:
            lines = (self.folder / "events").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def reached(self, event: str, *, seconds: float = 20) -> dict[str, Any]:
        """Wait until it says `event`."""
        found: dict[str, Any] = wait_until(
            lambda: next((one for one in self.events() if one["event"] == event), None), seconds=seconds, every=0.005
        )
        return found

    def ended(self, *, seconds: float = 30) -> dict[str, Any]:
        """Wait for its end; what it said last."""
        last: dict[str, Any] = wait_until(
            lambda: next((one for one in self.events() if one["event"] in ("ended", "raised")), None), seconds=seconds
        )
        self.gone()
        return last

    def go_on(self, boundary: str) -> None:
        """Let it leave the boundary at which it waits, or will."""
        (self.folder / f"go-{boundary}").touch()

    def stop(self) -> None:
        """Let it end a loop that it is in."""
        (self.folder / "stop").touch()

    def has_reached(self, event: str) -> bool:
        """Whether it has said `event` by now."""
        return any(one["event"] == event for one in self.events())

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has nothing left of it."""
        os.kill(self.pid, signal.SIGKILL)
        self.gone()

    def freeze(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: _state(self.pid) == "T", every=0.002)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def gone(self) -> None:
        wait_until(lambda: _state(self.pid) in ("", "Z"), every=0.002)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _next_message() -> Any:
    """When the outbox has something to do next: what waits behind another message is not due by itself."""
    now = transition.database_now()
    late = Message.objects.filter(state="waiting", due_at__gt=now).aggregate(at=Min("due_at"))["at"]
    return now if publishing.anything_due() else late


class Nursery:
    """The process that forks workers."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._process = spawn(
            "-m", "tests.worker_driver", env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1
        )
        self._born: list[Worker] = []

    def worker(self, folder: Path, **job: Any) -> Worker:
        folder.mkdir(parents=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**job, "folder": str(folder)}) + "\n")
        worker = Worker(int(self._process.stdout.readline()), folder)
        self._born.append(worker)
        return worker

    def clear(self) -> None:
        """End every worker that a test left."""
        for worker in self._born:
            if _state(worker.pid):
                os.kill(worker.pid, signal.SIGKILL)
                worker.gone()
        self._born.clear()

    def stop(self) -> None:
        self.clear()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


class Desk:
    """One test's ledger, world and workers."""

    def __init__(self, nursery: Nursery, folder: Path, clock: database.Clock, world: World) -> None:
        self.nursery, self.folder, self.clock, self.world = nursery, folder, clock, world
        self._workers = 0

    def worker(self, **job: Any) -> Worker:
        """Start a worker on a job."""
        self._workers += 1
        return self.nursery.worker(self.folder / f"worker-{self._workers}", **job)

    def operation(self, **which: Any) -> Operation:
        """The operation, which must be one."""
        return Operation.objects.get(**which)

    def effects(self, operation: Operation) -> int:
        """How often the world has seen it done."""
        if operation.provider == "book":
            return committed(self.clock.connection, reference=operation.key)
        # What takes an object back stands beside what made it, under the object's reference: the key tells them apart.
        mark = {"key" if operation.provider in KEYED else "reference": operation.key}
        mark = {"id": operation.request["ticket"]} if "ticket" in operation.request else mark
        return self.world.servers[operation.provider].count(**mark)

    def sent(self, operation: Operation) -> int:
        """How many calls that could have an effect arrived for it."""
        return len(self.world.servers[operation.provider].requests(reference=operation.key))

    def next_due(self) -> Any:
        """When the sweep has something to do next; None: never."""
        times = [model.objects.aggregate(at=Min("due_at"))["at"] for model in (Operation, Run)]
        times.append(_next_message())
        return min((at for at in times if at is not None), default=None)

    def sweep(self) -> int:
        """What beat and worker do, once."""
        workers.bury_dead()
        spool.bring_in()
        return sweeping.sweep()

    def come_to_rest(self, *, rounds: int = 60) -> None:
        """Sweep, as another worker, and move the clock on to whatever is due next, until nothing is."""
        for _ in range(rounds):
            self.sweep()
            due = self.next_due()
            if due is None:
                return
            if due > self.clock.now():
                self.clock.set(due)
        states = [(o.action, o.state, o.reason_code) for o in Operation.objects.exclude(due_at=None)]
        raise AssertionError(f"after {rounds} sweeps still due: {states} {list(Run.objects.values())}")

    def check(self) -> None:
        """What must be true of every ledger at rest, whatever happened to its workers."""
        for operation in Operation.objects.all():
            effects = self.effects(operation)
            assert effects <= 1, f"{operation.action}: {effects} effects"
            assert operation.state not in ("pending", "ready"), operation.state
            if operation.state in ("ambiguous", "failed_retryable"):
                assert operation.escalated_at, f"{operation.action} is {operation.state} and nobody will look"
            if operation.state in ("failed_retryable", "failed_terminal"):
                assert effects == 0, f"{operation.action} is called {operation.state} and happened"
            if operation.state == "succeeded" and operation.action != "ticket.read":
                assert effects == 1, f"{operation.action} is called succeeded and did not happen"
        self.check_audit()

    def check_audit(self) -> None:
        """Each version of each row was written by one audited move, and the log is whole."""
        for row in [*Operation.objects.all(), *Run.objects.all()]:
            moves = Entry.objects.filter(subject=str(row.subject), event="transition")
            assert sorted(moves.values_list("version", flat=True)) == list(range(1, row.version + 1))
        assert list(verify.verify(verify.registered_heads())) == []


@pytest.fixture(scope="session")
def nursery(test_database: database.TestDatabase, whole_world: World) -> Iterator[Nursery]:
    """Started once: what a worker imports takes longer than what it does."""
    made = Nursery(
        {**test_database.environment(), "AFTERCALL_PROVIDERS": ",".join(PROVIDERS), "AFTERCALL_WORKFLOWS": WORKFLOW}
    )
    yield made
    made.stop()


@pytest.fixture
def desk(nursery: Nursery, tmp_path: Path, clock: database.Clock, world: World, settings: Any) -> Iterator[Desk]:
    """Ledger, world and workers, all empty."""
    settings.AFTERCALL_PROVIDERS = PROVIDERS
    settings.AFTERCALL_WORKFLOWS = [WORKFLOW]
    settings.AFTERCALL_BACK_OFF = 2.0
    registry.forget()
    workers._known.clear()  # the row behind the name went with the test before
    yield Desk(nursery, tmp_path, clock, world)
    nursery.clear()
    registry.forget()


@pytest.fixture
def claims(desk: Desk, settings: Any) -> Iterator[Desk]:
    """The order desk with its workflow: in this process, and in each worker that is given WITH_CLAIMS."""
    settings.AFTERCALL_WORKFLOWS = WITH_CLAIMS["AFTERCALL_WORKFLOWS"]
    registry.forget()
    yield desk
    registry.forget()
