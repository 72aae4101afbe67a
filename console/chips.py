"""Filters of a list, as chips that are links."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One filter: its choices, and the one that holds."""

    name: str
    value: str
    choices: list[tuple[str, str]]

    @property
    def label(self) -> str:
        """The choice that holds, in the words in which it was offered."""
        return dict(self.choices).get(self.value, self.value)


def worth_showing(chips: list[Chip]) -> list[Chip]:
    """Those with a choice to make or to take back."""
    return [chip for chip in chips if chip.choices or chip.value]
