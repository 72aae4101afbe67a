"""What the source says, for tests that hold its rules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("audit", "reconciliation", "console", "examples")


def files(*packages: str) -> Iterator[Path]:
    """Every Python file of these packages, migrations left out."""
    for package in packages:
        yield from (path for path in sorted((ROOT / package).rglob("*.py")) if "migrations" not in path.parts)


def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports, also inside functions, and by name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "import_string", "__import__"):
            names |= {
                a.value.partition(".")[0] for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
            }
    return names


# Tables that only the functions behind transition.py may change, and the columns that are states or marks.
GUARDED = "reconciliation_(?:operation|run|journalentry|move|message)|audit_entry"
_SQL = re.compile(
    rf"\b(?:UPDATE|INSERT\s+INTO|DELETE\s+FROM|TRUNCATE|COPY)\s+(?:TABLE\s+|ONLY\s+)?\"?(?:public\.)?\"?(?:{GUARDED})\b",
    re.I,
)
_FUNCTION = re.compile(r"\bledger_[a-z_]+\s*\(", re.I)
_MODELS = {"Operation", "Run", "JournalEntry", "AllowedMove", "Entry", "Message"}
_WRITES = {
    "save", "update", "delete", "create", "bulk_create", "bulk_update", "get_or_create", "update_or_create",
    "asave", "aupdate", "adelete", "acreate", "abulk_create", "abulk_update", "save_base", "raw",
}  # fmt: skip
_ROWS = {"operation", "run", "entry", "operations", "runs", "subject", "fresh", "row", "made"}
_COLUMNS = {"state", "escalated_at", "escalation_reason", "version"}


def other_writers(source: str) -> list[str]:
    """Each place in a file that would write a guarded row, or call a function that does: `line: what`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        what = _written(node)
        if what:
            found.append(f"{node.lineno}: {what}")
    return found


def _written(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        match = _SQL.search(node.value) or _FUNCTION.search(node.value)
        return match.group(0) if match else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _WRITES:
        return f"{ast.unparse(node.func)}()" if _of_the_ledger(node.func.value) else ""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return next((ast.unparse(t) for t in targets if isinstance(t, ast.Attribute) and _sets_a_state(t)), "")


def _of_the_ledger(value: ast.AST) -> bool:
    names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
    return bool(names & (_MODELS | _ROWS))


def _sets_a_state(target: ast.Attribute) -> bool:
    return target.attr in _COLUMNS and isinstance(target.value, ast.Name) and target.value.id in _ROWS


def _name(function: ast.AST) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
