"""The page on which a person counts what really happened at this provider."""

from __future__ import annotations

import time
from html import escape
from itertools import groupby
from typing import Any

STYLE = """
:root { color-scheme: light dark; --bg: light-dark(#f6f7f8, #111417); --panel: light-dark(#fff, #181c20);
  --line: light-dark(#dfe3e7, #2b3238); --ink: light-dark(#15191d, #e7ebee); --soft: light-dark(#57616b, #98a3ad);
  --warn: light-dark(#9a5b00, #f0b35a); font: 15px/1.5 Inter, system-ui, sans-serif; }
* { box-sizing: border-box; margin: 0; }
body { background: var(--bg); color: var(--ink); padding: 28px 20px 60px; font-variant-numeric: tabular-nums; }
main { max-width: 900px; margin: 0 auto; }
h1 { font-size: 22px; font-weight: 620; letter-spacing: -.02em; }
h2 { font-size: 15px; font-weight: 600; padding: 11px 14px; border-bottom: 1px solid var(--line); display: flex; }
h2 span { margin-left: auto; font-weight: 400; color: var(--soft); }
h2 span.more { color: var(--warn); font-weight: 600; }
p { color: var(--soft); padding: 4px 0 18px; max-width: 70ch; }
a { color: inherit; }
form { display: flex; gap: 8px; padding-bottom: 18px; align-items: center; }
input, button { font: inherit; color: inherit; background: var(--panel); border: 1px solid var(--line);
  border-radius: 6px; padding: 6px 10px; }
section { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; margin-bottom: 14px;
  overflow-x: auto; }
table { width: 100%; border-collapse: collapse; }
th { text-align: left; font-weight: 500; font-size: 12.5px; color: var(--soft); }
th, td { padding: 8px 14px; vertical-align: top; }
tr + tr td { border-top: 1px solid var(--line); }
code { font: 12.5px ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}: what really happened</title><link rel="stylesheet" href="/style.css"></head>
<body><main><h1>{name}: what really happened</h1>
<p>{summary} This is the outside world of the example.
It keeps its own books, and nothing here comes from Aftercall.</p>
<form><label for="order">Order</label><input id="order" name="order" value="{order}" size="14">
<button>Show</button> <a href="/">All orders</a></form>
{groups}
</main></body></html>
"""


def draw(name: str, effects: list[dict[str, Any]], *, order: str = "") -> str:
    """The page for these effects, grouped by order, newest order first."""
    ranked = sorted(effects, key=lambda effect: (effect["order"] or "", effect["n"]))
    groups = [(label, list(rows)) for label, rows in groupby(ranked, key=lambda effect: effect["order"])]
    groups.sort(key=lambda group: -group[1][-1]["n"])
    summary = "No effect so far." if not effects else f"{len(effects)} effects." if len(effects) > 1 else "1 effect."
    drawn = "\n".join(_group(label, rows) for label, rows in groups)
    return PAGE.format(name=escape(name), summary=summary, order=escape(order), groups=drawn)


def _group(label: str | None, rows: list[dict[str, Any]]) -> str:
    kinds = [row["kind"] for row in rows]
    twice = " more" if len(set(kinds)) < len(kinds) and label else ""
    count = "1 effect" if len(rows) == 1 else f"{len(rows)} effects"
    count += ", some of one kind" if twice else ""
    title = f"Order {escape(label)}" if label else "Without an order"
    body = "".join(_row(row) for row in rows)
    head = "<tr><th>When</th><th>What</th><th>Id</th><th>Details</th><th>Reference</th></tr>"
    return f'<section><h2>{title}<span class="n{twice}">{count}</span></h2><table>{head}{body}</table></section>'


def _row(row: dict[str, Any]) -> str:
    at = time.strftime("%H:%M:%S", time.gmtime(row["at"]))
    details = ", ".join(
        f"{name} {value}" for name, value in row["fields"].items() if name not in ("order", "reference")
    )
    cells = (at, row["kind"], f"<code>{escape(row['id'])}</code>", escape(details[:200]))
    drawn = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr>{drawn}<td><code>{escape((row['reference'] or '')[:16])}</code></td></tr>"
