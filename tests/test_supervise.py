"""What the supervisor does with processes that do not behave."""

import sys
import time
from pathlib import Path

import pytest

from console import supervise
from console.supervise import Command, Supervisor
from tests import conftest
from tests.processes import wait_until


def running(code, said):
    command = Command(name="child", argv=[sys.executable, "-c", code])
    return Supervisor([command], folder=Path.cwd(), say=said.append)


@pytest.mark.processes
def test_a_child_that_keeps_dying_is_started_less_and_less_often(monkeypatch):
    monkeypatch.setattr(supervise, "FIRST_PAUSE", 0.1)
    said = []
    supervisor = running("raise SystemExit(3)", said)
    supervisor.start()

    def died_three_times():
        supervisor.children[0].tend()
        return len([line for line in said if "ended with 3" in line]) == 3

    wait_until(died_three_times, seconds=20)
    supervisor.stop()
    pauses = [line.split("again in ")[1] for line in said if "ended with 3" in line]
    assert pauses == ["0.1 s", "0.2 s", "0.4 s"]


@pytest.mark.processes
def test_a_child_that_does_not_end_when_asked_is_killed(monkeypatch):
    monkeypatch.setattr(supervise, "GRACE", 0.5)
    said = []
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(60)"
    supervisor = running(deaf, said)
    supervisor.start()
    wait_until(lambda: "child | deaf" in said)
    began = time.monotonic()
    supervisor.stop()
    assert time.monotonic() - began < 5
    assert supervisor.children[0].process.poll() is not None


class Item:
    def __init__(self):
        self.added = []

    def get_closest_marker(self, name):
        return name == "browser"

    def add_marker(self, mark):
        self.added.append(mark.name)


def test_without_a_browser_its_tests_are_left_out(monkeypatch):
    monkeypatch.setattr(conftest, "CHROMIUM", None)
    monkeypatch.delenv("CI", raising=False)
    item = Item()
    conftest.pytest_collection_modifyitems(config=None, items=[item])
    assert item.added == ["skip"]


def test_in_ci_a_missing_browser_is_a_failure(monkeypatch):
    monkeypatch.setattr(conftest, "CHROMIUM", None)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.UsageError, match="install chromium"):
        conftest.pytest_collection_modifyitems(config=None, items=[Item()])
