"""Running tests of the suite from the drill, in a process and with a database of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ran:
    """What came of it. `last` is pytest's own summary."""

    status: int
    said: str

    @property
    def passed(self) -> int:
        return self._number("passed")

    @property
    def failed(self) -> int:
        return self._number("failed")

    @property
    def sound(self) -> bool:
        return self.status == 0 and self.passed > 0

    @property
    def last(self) -> str:
        return (self.said.strip().splitlines() or ["nothing was said"])[-1][:200]

    def _number(self, what: str) -> int:
        found = re.findall(rf"(\d+) {what}", self.said)
        return int(found[-1]) if found else 0


def run(tests: Sequence[str], *, broken: str = "", processes: int = 1) -> Ran:
    """Run these tests; `broken` names the guard to be taken out (drill/broken.py)."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AFTERCALL_", "DATABASE_", "DJANGO_", "DRILL_"))}
    parallel = ["-n", str(min(processes, 4))] if processes > 1 else []
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=line", "-p", "drill.broken", *parallel, *tests],
        env={**kept, "DRILL_BREAK": broken}, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    return Ran(ran.returncode, ran.stdout + ran.stderr)
