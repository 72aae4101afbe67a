"""What a part of the drill is given, and what it has to say for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Asked:
    """What was asked for on the command line."""

    quick: bool
    seed: int
    processes: int
    say: Callable[[str], None]
    folder: Path  # of the drill's server: place.enter() makes a database there
    workflow: str = "damaged_item"
    input: dict[str, Any] = field(default_factory=dict)


@dataclass
class Told:
    """The account of one part: counts, tables and failures. It passes where nothing failed and something was done."""

    name: str
    asks: str  # the question, in one sentence
    counts: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, tuple[Sequence[str], list[Sequence[Any]]]] = field(default_factory=dict)
    failures: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.failures and any(self.counts.values())
