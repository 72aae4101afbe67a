"""The report: report.json for machines, report.txt and report.html for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from drill.parts import Told

SHOWN = 25  # failures in text and HTML; report.json has all of them
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1c2024 }
table { border-collapse: collapse; margin: .6rem 0 1.2rem } td, th { padding: .25rem .8rem .25rem 0; text-align: left }
th { border-bottom: 1px solid #889 } td { border-bottom: 1px solid #dde; font-variant-numeric: tabular-nums }
.bad { color: #a11 } .good { color: #175 } pre { white-space: pre-wrap; background: #f5f6f8; padding: .6rem }
"""


def write(told: Sequence[Told], *, seed: int, command: str, into: Path) -> bool:
    """Write all three. Returns whether everything passed."""
    into.mkdir(parents=True, exist_ok=True)
    whole = data(told, seed=seed, command=command)
    (into / "report.json").write_text(json.dumps(whole, indent=1, default=str) + "\n")
    (into / "report.txt").write_text(text(told, seed=seed) + "\n")
    (into / "report.html").write_text(html(told, seed=seed, at=whole["at"]) + "\n")
    return all(part.passed for part in told)


def data(told: Sequence[Told], *, seed: int, command: str) -> dict[str, Any]:
    """Everything, as plain data."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "seed": seed,
        "passed": all(part.passed for part in told),
        "parts": [
            {
                "name": part.name,
                "asks": part.asks,
                "passed": part.passed,
                "seconds": round(part.seconds, 1),
                "counts": part.counts,
                "tables": {name: _plain(*table) for name, table in part.tables.items()},
                "notes": part.notes,
                "failures": part.failures,
            }
            for part in told
        ],
    }  # fmt: skip


def _plain(columns: Sequence[str], rows: list[Sequence[Any]]) -> dict[str, Any]:
    return {"columns": list(columns), "rows": [list(row) for row in rows]}


def verdict(part: Told) -> str:
    """One word, with the number where it is bad."""
    if part.failures:
        return f"{len(part.failures)} FAILURES"
    return "passed" if part.passed else "NOTHING WAS DONE"


def text(told: Sequence[Told], *, seed: int) -> str:
    """For a terminal."""
    lines = [f"Drill, seed {seed}", ""]
    lines += [f"  {part.name:<44}{verdict(part):<18}{part.seconds:>7.0f} s" for part in told]
    for part in told:
        lines += ["", part.name, part.asks, *(f"  {name}: {_number(value)}" for name, value in part.counts.items())]
        for title, (columns, rows) in part.tables.items():
            lines += ["", f"  {title}", *(f"    {line}" for line in _columns([columns, *rows]))]
        lines += [f"  {note}" for note in part.notes]
        lines += [f"  FAILED {_one_line(failure)}" for failure in part.failures[:SHOWN]]
    return "\n".join(lines)


def _columns(rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    told = [[_number(value) for value in row] for row in rows]
    widths = [max(len(row[n]) for row in told) for n in range(len(told[0]))]
    for row in told:
        yield "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip()


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _one_line(failure: Any) -> str:
    return failure if isinstance(failure, str) else json.dumps(failure, default=str)[:600]


def html(told: Sequence[Told], *, seed: int, at: str) -> str:
    """One page without scripts."""
    rows = "".join(
        f"<tr><td><a href='#{n}'>{escape(part.name)}</a></td><td class='{'good' if part.passed else 'bad'}'>"
        f"{verdict(part)}</td><td>{part.seconds:.0f} s</td></tr>"
        for n, part in enumerate(told)
    )
    parts = "".join(_section(n, part) for n, part in enumerate(told))
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>Aftercall drill</title><style>{STYLE}</style>"
        f"<h1>Drill</h1><p>{at}, seed {seed}</p><table><tr><th>part</th><th>outcome</th><th>took</th></tr>"
        f"{rows}</table>{parts}</html>"
    )


def _section(number: int, part: Told) -> str:
    counts = "".join(f"<tr><td>{escape(n)}</td><td>{escape(_number(v))}</td></tr>" for n, v in part.counts.items())
    tables = "".join(_table(title, columns, rows) for title, (columns, rows) in part.tables.items())
    failed = "".join(f"<pre class='bad'>{escape(_one_line(failure))}</pre>" for failure in part.failures[:SHOWN])
    notes = "".join(f"<p>{escape(note)}</p>" for note in part.notes)
    head = f"<h2 id='{number}'>{escape(part.name)}</h2><p>{escape(part.asks)}</p>"
    return f"{head}<table>{counts}</table>{tables}{notes}{failed}"


def _table(title: str, columns: Sequence[str], rows: list[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(str(name))}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(_number(v))}</td>" for v in row) + "</tr>" for row in rows)
    return f"<h3>{escape(title)}</h3><table><tr>{head}</tr>{body}</table>"
