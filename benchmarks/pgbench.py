"""PostgreSQL's own load generator with the very statements of plain.py: what the server does without Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from benchmarks import place
from benchmarks.plain import Work, statements, values

SCRIPT = r"""\set n :n + 1
\set id :first + :client_id * 100000000 + :n
{claim};
{settle};
"""


def program() -> Path | None:
    """pgbench of the embedded wheel, else of Debian's package, else whichever is on the path."""
    from console import embedded

    bundled = embedded.binaries() / "pgbench"
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/pgbench"))
    on_path = shutil.which("pgbench")
    found = [bundled] * bundled.exists() + debian[-1:] + [Path(on_path)] * bool(on_path)
    return found[0] if found else None


def run(seconds: float, *, work: Work, clients: int) -> float:
    """Run for `seconds` with `clients`; return operations per second. Each statement is a commit of its own."""
    claim, settle = statements(work, lambda name: f":{name}")
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(SCRIPT.format(claim=claim, settle=settle))
        script.flush()
        done = subprocess.run(
            _command(script.name, work, seconds=seconds, clients=clients), capture_output=True, text=True, check=False
        )
    found = re.search(r"^tps = ([\d.]+)", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        raise RuntimeError(f"pgbench failed: {done.stderr.strip()[-500:]}")
    return float(found[1])


def _command(script: str, work: Work, *, seconds: float, clients: int) -> list[str]:
    where = urlsplit(place.url())
    defined = {**values(work), "n": 0, "first": time.time_ns()}
    return [
        *(str(program()), "--no-vacuum", "--protocol=prepared", f"--time={max(1, round(seconds))}"),
        *(f"--client={clients}", f"--jobs={min(clients, os.cpu_count() or 1)}", f"--file={script}"),
        *(f"--define={name}={_written(value)}" for name, value in defined.items()),
        *("--host", parse_qs(where.query)["host"][0], "--username", str(where.username), where.path.strip("/")),
    ]


def _written(value: Any) -> str:
    """A value as PostgreSQL reads it from text."""
    if isinstance(value, list):
        return "{" + ",".join(map(str, value)) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
