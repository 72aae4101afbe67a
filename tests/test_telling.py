"""Signals are told to a hook that is somebody else's code: it may hang or fail, and nothing else waits for it."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from django_q.models import OrmQ, Success
from django_q.tasks import async_task

from reconciliation import tasks, timekeeping, watch
from reconciliation.models import Signal, Tick
from tests import cast
from tests.database import Clock
from tests.processes import spawn, wait_until
from tests.test_same_identity import Crowd

TOLD: list[dict[str, Any]] = []
MINUTE = timedelta(minutes=1)


def hook(payload: dict[str, Any]) -> None:
    TOLD.append(payload)


def broken_hook(payload: dict[str, Any]) -> None:
    TOLD.append(payload)
    raise RuntimeError("the pager is down, token sk-live-CANARY2")


def leaving_hook(payload: dict[str, Any]) -> None:
    TOLD.append(payload)
    raise SystemExit(3)


def sleeping_hook(payload: dict[str, Any]) -> None:
    TOLD.append(payload)
    time.sleep(300)


@pytest.fixture
def told(ledger_db: Any, settings: Any) -> list[dict[str, Any]]:
    """What the hook was called with."""
    settings.AFTERCALL_NOTIFY = "tests.test_telling.hook"
    TOLD.clear()
    return TOLD


@pytest.fixture
def lost(told: Any, clock: Clock) -> Any:
    """An operation whose worker was lost, as the one thing to tell of."""
    operation = cast.operation(state="pending", hidden={"card": "sk-live-CANARY1"})
    clock.advance(minutes=2)
    watch.look()
    Signal.objects.exclude(kind="lease_overdue").update(tell_at=None)
    return operation


def over(operation: Any, clock: Clock) -> None:
    cast._move(operation, "ambiguous", {"unknown_attempts": [1], "due_at": clock.now()}, "worker_lost")
    watch.look()
    Signal.objects.exclude(kind="lease_overdue").update(tell_at=None)


def the() -> Signal:
    return Signal.objects.get(kind="lease_overdue")


def heard(told: list[dict[str, Any]]) -> list[str]:
    assert {each["kind"] for each in told} <= {"lease_overdue"}
    return [each["event"] for each in told]


def test_the_hook_hears_once_of_the_opening_and_once_of_the_end(lost: Any, clock: Clock, told: Any) -> None:
    for _ in range(3):
        watch.look()
        tasks.tell()
    assert heard(told) == ["opened"]
    assert (the().told_open, the().told_cleared, the().tell_at) == (True, False, None)
    over(lost, clock)
    for _ in range(3):
        tasks.tell()
    assert heard(told) == ["opened", "cleared"]
    assert (told[0]["subject"], told[0]["tenant"]) == (f"operation:{lost.pk}", "t_acme")
    assert (the().told_open, the().told_cleared, the().tell_at) == (True, True, None)
    assert "CANARY" not in str(told)
    assert lost.key not in str(told)


def test_what_was_over_before_anybody_told_of_it_is_told_in_its_order(lost: Any, clock: Clock, told: Any) -> None:
    over(lost, clock)
    tasks.tell()
    assert heard(told) == ["opened", "cleared"]


def test_workers_side_by_side_tell_each_event_once(lost: Any, told: Any) -> None:
    crowd = Crowd(6)
    answers = crowd.all_at_once(tasks.tell)
    crowd.leave()
    assert sorted(answers) == [0, 0, 0, 0, 0, 1], answers
    assert heard(told) == ["opened"]


def test_the_beat_asks_a_worker_to_tell_and_never_calls_the_hook(lost: Any, settings: Any, told: Any) -> None:
    settings.AFTERCALL_NOTIFY = "tests.test_telling.sleeping_hook"
    tasks.drain()
    began = time.monotonic()
    tasks.beat_once()
    assert time.monotonic() - began < 30
    assert Tick.objects.filter(name="beat").exists()
    assert told == []
    asked = [row.task["func"] for row in OrmQ.objects.all()]  # a test may read what a web process may not
    assert asked.count("reconciliation.tasks.tell") == 1


def test_a_hook_that_hangs_is_left_after_some_seconds_and_called_again_later(
    lost: Any, clock: Clock, settings: Any, told: Any, monkeypatch: Any
) -> None:
    settings.AFTERCALL_NOTIFY = "tests.test_telling.sleeping_hook"
    monkeypatch.setattr(watch, "HOOK_SECONDS", 1)
    cast.operation(state="pending")
    clock.advance(minutes=2)
    watch.look()
    began = time.monotonic()
    assert tasks.tell() == 1, "a round ends with a call that hung"
    assert time.monotonic() - began < 20
    waits = Signal.objects.get(pk=told[0]["signal"])
    assert (waits.told_open, waits.tries) == (False, 1)
    assert waits.tell_at > clock.now() + MINUTE
    settings.AFTERCALL_NOTIFY = "tests.test_telling.hook"
    clock.set(waits.tell_at)
    tasks.tell()
    assert Signal.objects.get(pk=waits.pk).told_open


def test_a_real_worker_whose_hook_hangs_leaves_it_and_the_others_go_on_meanwhile(
    lost: Any, database_url_env: dict[str, str]
) -> None:
    environment = database_url_env | {"AFTERCALL_NOTIFY": "tests.test_telling.sleeping_hook"}
    async_task("reconciliation.tasks.tell", group="tell")
    worker = spawn("manage.py", "qcluster", env=environment)
    try:
        wait_until(lambda: the().tries == 1, seconds=60)
        tasks.wake()
        wait_until(lambda: Tick.objects.filter(name="sweep").exists(), seconds=60)
        wait_until(lambda: not OrmQ.objects.exists(), seconds=60)
    finally:
        worker.kill()
        worker.wait()
    assert (the().told_open, the().tries) == (False, 1)
    assert Success.objects.filter(func="reconciliation.tasks.tell").exists(), "the task ended, not its worker"


@pytest.mark.parametrize("bad", ["broken_hook", "leaving_hook", "no_such_hook"])
def test_a_hook_that_fails_breaks_nothing_and_after_some_tries_it_is_on_record_that_nobody_was_told(
    lost: Any, clock: Clock, settings: Any, told: Any, capsys: Any, bad: str
) -> None:
    settings.AFTERCALL_NOTIFY = f"tests.test_telling.{bad}"
    for _ in range(8):
        assert tasks.tell() <= 1
        clock.advance(hours=1)
        Signal.objects.exclude(kind="lease_overdue").update(tell_at=None)
    assert bad == "no_such_hook" or heard(told) == ["opened"] * watch.TRIES
    assert (the().told_open, the().tell_at) == (False, None)
    assert the().not_told_at is not None
    watch.look()
    assert Signal.objects.get(kind="not_told").detail == "1 not told"
    assert "Not told" in cast.client(cast.people()["vi_eve"]).get("/health").content.decode()
    assert "CANARY" not in capsys.readouterr().out


def test_what_could_not_be_told_when_it_opened_is_told_when_it_is_over(
    lost: Any, clock: Clock, settings: Any, told: Any
) -> None:
    settings.AFTERCALL_NOTIFY = "tests.test_telling.broken_hook"
    for _ in range(6):
        tasks.tell()
        clock.advance(hours=1)
    TOLD.clear()
    settings.AFTERCALL_NOTIFY = "tests.test_telling.hook"
    over(lost, clock)
    tasks.tell()
    assert heard(told) == ["opened", "cleared"]
    assert (the().told_open, the().told_cleared, the().not_told_at) == (True, True, None)


def test_a_signal_is_told_no_later_because_the_clock_was_set_back(lost: Any, clock: Clock, told: Any) -> None:
    timekeeping.keep()
    clock.jump(hours=-5)
    tasks.tell()
    assert told == []
    timekeeping.keep()
    tasks.tell()
    assert heard(told) == ["opened"]


def test_a_worker_that_dies_in_the_hook_each_time_is_not_called_for_ever(lost: Any, clock: Clock, told: Any) -> None:
    for _ in range(watch.TRIES):
        assert watch._next() is not None  # and there it was lost
        clock.advance(hours=1)
    tasks.tell()
    assert told == []
    assert (the().told_open, the().tell_at) == (False, None)
    assert the().not_told_at is not None


def test_where_no_worker_takes_it_the_beat_tells_beside_itself(lost: Any, clock: Clock, told: Any) -> None:
    tasks.beat_once()
    assert told == []
    clock.advance(seconds=watch.SILENT.total_seconds() + 1)
    tasks.beat_once()
    wait_until(lambda: "lease_overdue" in [each["kind"] for each in told], seconds=60)
    wait_until(lambda: "tell" not in [thread.name for thread in threading.enumerate()], seconds=60)


def test_without_a_hook_nothing_is_asked_of_the_queue_and_the_log_tells(lost: Any, settings: Any, told: Any) -> None:
    settings.AFTERCALL_NOTIFY = ""
    tasks.drain()
    tasks.beat_once()
    assert "reconciliation.tasks.tell" not in [row.task["func"] for row in OrmQ.objects.all()]
    assert the().told_open
