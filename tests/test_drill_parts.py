"""What the other parts of the drill take for a failure."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError

from drill import processes, pulled, restored
from drill.world import World
from reconciliation.claims import LedgerUnavailable
from tests.source import ROOT


def test_kills_under_which_enough_was_acknowledged_and_something_was_hit_tell_something() -> None:
    assert pulled.too_little(kills=3, acknowledged=3, left=[0, 2, 0], astray=[]) == []


@pytest.mark.parametrize(
    ("left", "acknowledged", "told"),
    [([0, 2, 0], 2, "2 acknowledged under 3 kills"), ([0, 0, 0], 9, "none hit anything")],
)
def test_kills_that_tell_nothing_fail(left: list[int], acknowledged: int, told: str) -> None:
    (problem,) = pulled.too_little(kills=3, acknowledged=acknowledged, left=left, astray=[])
    assert told in problem


@pytest.mark.parametrize("error", [OperationalError("gone"), LedgerUnavailable("nothing was sent")])
def test_a_database_that_is_away_refuses(monkeypatch: Any, error: Exception) -> None:
    crew = disturbed(monkeypatch, error)
    assert (crew.refused, crew.astray, crew.told) == (1, [], {})


def test_any_other_error_is_no_refusal_and_fails(monkeypatch: Any) -> None:
    crew = disturbed(monkeypatch, KeyError("fingerprint"))
    assert (crew.refused, crew.astray) == (0, ["1-1: KeyError: 'fingerprint'"])
    assert pulled.too_little(kills=1, acknowledged=9, left=[1], astray=crew.astray) == [
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


def test_every_test_that_starts_workers_belongs_to_the_drill() -> None:
    starting = {str(file.relative_to(ROOT)) for file in Path(ROOT, "tests").glob("test_*.py") if starts(file)}
    assert set(processes.FILES) == starting | {"tests/test_restored_for_real.py"}


def starts(file: Path) -> bool:
    return any("Desk" in line for line in file.read_text().splitlines() if line.startswith("from tests.nursery import"))
