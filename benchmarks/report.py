"""What a run says: a table for people, files for whoever compares runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contenders import PAIRS

RESULTS = Path(__file__).parent / "results"
UNIT = "operations/s"
Rates = Mapping[str, Sequence[float]]  # contender -> one figure a round


def compared(rates: Rates) -> list[dict[str, Any]]:
    """The pairs with their medians; the ratio is ours to theirs."""
    middle = {name: median(each) for name, each in rates.items()}
    return [
        {
            "name": f"{ours} / {other}",
            "ours": round(middle[ours], 1),
            "other": round(middle[other], 1),
            "unit": UNIT,
            "ratio": round(middle[ours] / middle[other], 3),
        }
        for ours, other in PAIRS
        if ours in rates and other in rates
    ]


def text(rates: Rates, phases: Sequence[Mapping[str, Any]]) -> str:
    """The tables."""
    lines = [f"{'contender':<28}{'median':>10}{'lowest':>10}{'highest':>10}  {UNIT}"]
    lines += [f"{n:<28}{median(each):>10.0f}{min(each):>10.0f}{max(each):>10.0f}" for n, each in rates.items()]
    lines += ["", f"{'pair':<52}{'ours':>8}{'other':>8}{'ratio':>8}"]
    lines += [f"{r['name']:<52}{r['ours']:>8.0f}{r['other']:>8.0f}{r['ratio']:>8.2f}" for r in compared(rates)]
    if phases:
        lines += ["", f"{'where one operation of ours spends its time':<62}{'us':>8}"]
        lines += [f"{row['phase']:<62}{row['microseconds']:>8.0f}" for row in phases]
    return "\n".join(lines)


def write(rates: Rates, phases: Sequence[Mapping[str, Any]], *, machine: Mapping[str, Any], into: Path) -> None:
    """latest.json holds the list of pairs, and a file named by the time all there is to know of the run."""
    now = datetime.now(UTC)
    whole = {
        "at": now.isoformat(timespec="seconds"),
        "machine": machine,
        "results": compared(rates),
        "rounds": {name: [round(rate, 1) for rate in each] for name, each in rates.items()},
        "phases": list(phases),
    }
    _dump(into / f"{now:%Y-%m-%dT%H%MZ}.json", whole)
    _dump(into / "latest.json", whole["results"])


def _dump(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=2) + "\n")
