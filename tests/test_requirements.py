"""A fresh machine gets what the code needs: what is installed here by chance hides what the lock lacks."""

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

from tests.world import ROOT

SHIPPED = ("audit", "console", "examples", "reconciliation")


def imported(file: Path) -> set[str]:
    """Top-level names of the packages that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_everything_that_is_imported_is_locked() -> None:
    files = [file for app in SHIPPED for file in (ROOT / app).rglob("*.py")]
    foreign = set().union(*map(imported, files)) - sys.stdlib_module_names - {*SHIPPED}
    locked = set(re.findall(r"^([a-z0-9.-]+)(?:\[.*\])?==", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    sellers = packages_distributions()
    missing = [
        name
        for name in sorted(foreign)
        if not {re.sub("[-_.]+", "-", each).lower() for each in sellers.get(name, ())} & locked
    ]
    assert missing == []
