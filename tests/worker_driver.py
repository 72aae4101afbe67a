"""A worker process for tests, which stops where it is told to, so that it can be killed or frozen right there.

The started process is a nursery: it has everything imported, touches neither database nor network, and forks one worker
for each line on its standard input. A worker writes what it does to `events` in its job's folder; at a boundary at
which it is to stop it says so and waits for the file `go` beside it. Nothing of this is in the shipped code: the
boundaries are wrapped around its functions in here.

A job is a JSON object:
    do         perform | retry | advance | sweep | callers | beat
    folder     where its events are written
    stop_at    boundaries at which it waits (see BOUNDARIES)
    passing    how often it passes such a boundary before it waits
    settings   values of Django settings, environ   values of the environment
    clock      seconds by which every clock that Python reads is wrong, from the start
    jump       the same, from the first boundary on
and what the verb needs: intent, pk, actor, ...
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import django

if __name__ == "__main__":
    django.setup()

from django.conf import settings
from django.db import connections

from console import tether
from reconciliation import (
    claims,
    executor,
    leases,
    local,
    outbox,
    publishing,
    retrying,
    runs,
    schedules,
    settlement,
    settling,
    sweeping,
    tasks,
    transition,
    workers,
)
from reconciliation.actors import SYSTEM, Actor
from reconciliation.anchor import FileAnchor
from reconciliation.executor import Intent
from reconciliation.keys import Identity
from reconciliation.providers.http import HttpProvider
from tests import book

Job = dict[str, Any]


class Told:
    """What the parent reads: one JSON line an event."""

    def __init__(self, folder: Path, *, jump: float = 0.0, passing: int = 0) -> None:
        self.folder, self.jump, self.passing = folder, jump, passing
        self._file = (folder / "events").open("a", buffering=1)
        self._lock = threading.Lock()

    def say(self, event: str, **facts: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"event": event, **facts}, default=str) + "\n")

    def wait_at(self, boundary: str) -> None:
        """Say where we are, and stay until the parent lets us go on; the first `passing` times, pass."""
        if self.passing > 0:
            self.passing -= 1
            return
        self.say(boundary)
        while not (self.folder / f"go-{boundary}").exists():
            time.sleep(0.005)
        if self.jump:
            _skew(self.jump)


def _before(module: Any, name: str) -> Callable[[Told, str], None]:
    def wrap(told: Told, boundary: str) -> None:
        plain = getattr(module, name)

        def stopped(*args: Any, **named: Any) -> Any:
            told.wait_at(boundary)
            return plain(*args, **named)

        setattr(module, name, stopped)

    return wrap


def _after(module: Any, name: str, *, some: bool = False) -> Callable[[Told, str], None]:
    """`some`: only where it did something, and answers how much."""

    def wrap(told: Told, boundary: str) -> None:
        plain = getattr(module, name)

        def stopped(*args: Any, **named: Any) -> Any:
            answer = plain(*args, **named)
            if answer or not some:
                told.wait_at(boundary)
            return answer

        setattr(module, name, stopped)

    return wrap


# The two boundaries within the call are the sandbox's: hang_before_effect and hang_after_effect.
BOUNDARIES = {
    "starting": _before(runs, "start"),
    "ticking": _before(schedules, "tick"),
    "slot_made": _before(schedules, "start"),  # the slot is committed, and its run is not begun
    "run_made": _after(runs, "start"),  # within the transaction that gives the slot its run
    "ticked": _after(schedules, "tick", some=True),  # the run is there, and nobody has been woken
    "before_claim": _before(claims, "_write_claim"),
    "claimed": _after(claims, "_write_claim"),
    "sending": _before(HttpProvider, "_own_client"),  # behind the executor's check of send_by, before the adapter's
    "answered": _after(executor, "_send"),
    "judged": _after(settlement, "judge"),
    "settled": _after(settling, "_write_settlement"),
    "leaving": _before(leases, "leave"),
    # A local effect, in its transaction and around its end.
    "opened": _after(transition, "begin_local"),
    "in_effect": _after(book, "write"),
    "unfenced": _before(transition, "fence_local"),
    "fenced": _after(transition, "fence_local"),
    "written": _after(local, "_write"),
    "committed": _after(local, "_commit"),
    # The outbox: in the business's transaction, and between the publisher's commits.
    "put": _after(outbox, "put"),
    "taken": _after(outbox, "take"),
    "born": _after(executor, "submit"),
    "unmarked": _before(outbox, "published"),
    "marked": _after(outbox, "published"),
    "anchoring": _before(FileAnchor, "sync"),  # both locks are held, and the anchor is not written yet
}


def intent_of(told: Job) -> Intent:
    """The intent in a job."""
    return Intent(identity=Identity(**told["identity"]), **{k: v for k, v in told.items() if k != "identity"})


def _perform(job: Job) -> Any:
    return executor.perform(intent_of(job["intent"]), actor=Actor(id=workers.me(), kind="worker"))


def _retry(job: Job) -> Any:
    actor = Actor(id=job["person"], kind="person") if "person" in job else SYSTEM
    return retrying.retry(job["pk"], actor=actor, version=job.get("version"), reason=job.get("reason", ""))


def _advance(job: Job) -> Any:
    return runs.advance(job["pk"]).state


def _start_and_advance(job: Job) -> Any:
    """What whoever receives an event does: start the run that it asks for, and walk it."""
    run = runs.start(
        job["workflow"], tenant="acme", workflow_id=job["workflow_id"], input=job["input"],
        actor=Actor(id="agent:events", kind="agent"),
    )  # fmt: skip
    return runs.advance(run.pk).state


def _beat_and_sweep(job: Job) -> Any:
    """A beat, and the worker that it wakes."""
    schedules.tick()
    return sweeping.sweep()


def _beat(job: Job) -> int:
    """One beat after the other until the file `stop` is there, at least one. Answers how many there were."""
    beats = 0
    while True:
        tasks.beat_once()
        beats += 1
        if (Path(job["folder"]) / "stop").exists():
            return beats


def _sweep(job: Job) -> Any:
    return sweeping.sweep()


def _trade(job: Job) -> Any:
    """What business code does: its own row and a message, in one transaction."""
    return book.trade(intent_of(job["intent"]), order=job.get("order", ""))


def _publish(job: Job) -> Any:
    return publishing.publish(limit=job.get("limit", 50))


def _callers(job: Job) -> list[Any]:
    """`threads` callers of one intent, all at once, once everybody is there; each asks until it has a final answer."""
    told = Told(Path(job["folder"]))
    barrier = threading.Barrier(job["threads"], action=lambda: told.say("ready"))
    answers: list[Any] = []

    def call() -> None:
        connections["default"].ensure_connection()
        barrier.wait()
        while not (Path(job["folder"]).parent / "start").exists():
            time.sleep(0.001)
        answers.append(final_answer(job["intent"]))
        connections.close_all()

    threads = [threading.Thread(target=call) for _ in range(job["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def final_answer(intent: Job) -> tuple[str, Any]:
    """Submit until the answer is final: (state, result)."""
    while True:
        outcome = _perform({"intent": intent})
        if outcome.state in ("succeeded", "failed_terminal"):
            return str(outcome.state), outcome.result
        time.sleep(0.03)


VERBS: dict[str, Callable[[Job], Any]] = {
    "perform": _perform,
    "retry": _retry,
    "advance": _advance,
    "start_and_advance": _start_and_advance,
    "beat_and_sweep": _beat_and_sweep,
    "beat": _beat,
    "sweep": _sweep,
    "trade": _trade,
    "publish": _publish,
    "callers": _callers,
}


def _skew(seconds: float) -> None:
    """Every wall clock that Python code reads is off by so much; what is measured stays right."""
    import time_machine

    time_machine.travel(time.time() + seconds, tick=True).start()


def work(job: Job) -> None:
    """The life of one worker."""
    told = Told(Path(job["folder"]), jump=job.get("jump", 0.0), passing=job.get("passing", 0))
    os.environ.update(job.get("environ", {}))
    for name, value in job.get("settings", {}).items():
        setattr(settings, name, value)
    if "clock" in job:
        _skew(job["clock"])
    for boundary in job.get("stop_at", ()):
        BOUNDARIES[boundary](told, boundary)
    try:
        told.say("began", me=workers.me())
        answer = VERBS[job["do"]](job)
    except Exception as error:
        told.say("raised", error=type(error).__name__, text=str(error))
    else:
        plain = {"state": answer.state, "result": answer.result} if hasattr(answer, "disposition") else answer
        told.say("ended", answer=plain, disposition=getattr(answer, "disposition", None))


def _jobs() -> Iterator[Job]:
    for line in sys.stdin:
        yield json.loads(line)


def nursery() -> None:
    """Fork a worker for each job until the input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a killed worker is gone at once, and no zombie
    mine = os.getpid()
    for job in _jobs():
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            tether.tie(to=mine)
            try:
                work(job)
            finally:
                os._exit(0)
        print(pid, flush=True)  # noqa: T201 - the answer to the parent


if __name__ == "__main__":
    nursery()
