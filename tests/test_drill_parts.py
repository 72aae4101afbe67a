"""What the other parts of the drill take for a failure."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError

from drill import __main__ as main
from drill import crew, processes, pulled, report, restored
from drill.parts import Asked, Told
from drill.world import World
from reconciliation.claims import LedgerUnavailable
from tests.source import ROOT


def test_kills_under_which_enough_was_acknowledged_and_something_was_hit_tell_something() -> None:
    assert pulled.too_little(kills=3, acknowledged=3, effects=2, left=[0, 2, 0], astray=[]) == []


@pytest.mark.parametrize(
    ("left", "acknowledged", "effects", "told"),
    [
        ([0, 2, 0], 2, 2, "2 acknowledged under 3 kills"),
        ([0, 0, 0], 9, 9, "none hit anything"),
        ([0, 2, 0], 9, 4, "4 effects of 9 acknowledged: most were never sent"),
    ],
)
def test_kills_that_tell_nothing_fail(left: list[int], acknowledged: int, effects: int, told: str) -> None:
    (problem,) = pulled.too_little(kills=3, acknowledged=acknowledged, effects=effects, left=left, astray=[])
    assert told in problem


@pytest.mark.parametrize("error", [OperationalError("gone"), LedgerUnavailable("nothing was sent")])
def test_a_database_that_is_away_refuses(monkeypatch: Any, error: Exception) -> None:
    crew = disturbed(monkeypatch, error)
    assert (crew.refused, crew.astray, crew.told) == (1, [], {})


def test_any_other_error_is_no_refusal_and_fails(monkeypatch: Any) -> None:
    crew = disturbed(monkeypatch, KeyError("fingerprint"))
    assert (crew.refused, crew.astray) == (0, ["1-1: KeyError: 'fingerprint'"])
    assert pulled.too_little(kills=1, acknowledged=9, effects=9, left=[1], astray=crew.astray) == [
        "an error that no killed database explains: 1-1: KeyError: 'fingerprint'"
    ]


def disturbed(monkeypatch: Any, error: Exception) -> pulled.Crew:
    def perform(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(pulled.executor, "perform", perform)
    monkeypatch.setattr(pulled.connections, "close_all", lambda: None)
    crew = pulled.Crew(World(now=pulled.place_now), seed=1)
    crew._one("1-1", random.Random(1))
    return crew


@pytest.mark.parametrize(("state", "code", "problems"), [("ambiguous", "restored", 0), ("succeeded", "", 1)])
def test_something_new_that_is_sent_before_the_release_fails(state: str, code: str, problems: int) -> None:
    seen: Counter[str] = Counter()
    outcome: Any = SimpleNamespace(state=state, reason_code=code)
    assert len(list(restored._refused(outcome, seen))) == problems
    assert seen.total() == 1 - problems


def one_that_is_killed(tell: Any, name: str) -> None:
    tell(f"{name} begins")
    if name == "b":
        os.kill(os.getpid(), signal.SIGKILL)
    tell(f"{name} ends")


def test_a_process_that_the_system_kills_is_told_and_the_others_go_on() -> None:
    told = list(crew.gather(one_that_is_killed, [("a",), ("b",), ("c",)]))
    lost = [one for one in told if isinstance(one, crew.Lost)]
    assert {one for one in told if one not in lost} == {"a begins", "a ends", "b begins", "c begins", "c ends"}
    assert [one.reason for one in lost] == ["a process of the drill ended with status -9 in the middle of its share"]


def test_a_part_that_raises_is_a_failed_part_of_the_report(monkeypatch: Any, tmp_path: Path) -> None:
    def part(asked: Any) -> Told:
        raise RuntimeError("no room on the disk")

    monkeypatch.setattr(main, "import_module", lambda name: SimpleNamespace(part=part))
    asked = Asked(quick=True, seed=1, processes=1, say=lambda line: None, folder=tmp_path)
    told = main._one("pulled", asked)
    assert not told.passed
    assert "no room on the disk" in told.failures[0]
    assert not report.write([told], seed=1, command="", into=tmp_path)
    assert "no room on the disk" in (tmp_path / "report.txt").read_text()


def test_every_test_that_starts_workers_belongs_to_the_drill() -> None:
    starting = {str(file.relative_to(ROOT)) for file in Path(ROOT, "tests").glob("test_*.py") if starts(file)}
    assert set(processes.FILES) == starting | {"tests/test_restored_for_real.py"}


def starts(file: Path) -> bool:
    return any("Desk" in line for line in file.read_text().splitlines() if line.startswith("from tests.nursery import"))
