"""Who takes part, each in a process of its own, so that no one's threads or memory slow another one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

from benchmarks import dbos_steps, ours, pgbench, plain

ONE_PROCESS = "Aftercall, 1 process"
EIGHT_PROCESSES = "Aftercall, 8 processes"
PLAIN = "plain psycopg, 1 process"
PGBENCH = "pgbench, 1 client"
PGBENCH_EIGHT = "pgbench, 8 clients"
DBOS = "DBOS, 1 process"
# Who is held against whom.
PAIRS = ((ONE_PROCESS, DBOS), (ONE_PROCESS, PLAIN), (ONE_PROCESS, PGBENCH), (EIGHT_PROCESSES, PGBENCH_EIGHT))
CHILDREN = {ONE_PROCESS: ("ours", 1), EIGHT_PROCESSES: ("ours", 8), PLAIN: ("plain", 1), DBOS: ("dbos", 1)}
WARM_UP = 0.3  # of the measured time: connections, plans and caches are there before the clock runs


def available(*, without: set[str]) -> list[str]:
    """All that can run here, in the order of a round."""
    names = [ONE_PROCESS, PLAIN, DBOS, PGBENCH, EIGHT_PROCESSES, PGBENCH_EIGHT]
    left_out = {PGBENCH, PGBENCH_EIGHT} if pgbench.program() is None else set()
    return [name for name in names if name not in left_out | without]


def measure(name: str, *, seconds: float, work: Path) -> float:
    """Operations per second of one contender in one round."""
    if name in (PGBENCH, PGBENCH_EIGHT):
        clients = 8 if name == PGBENCH_EIGHT else 1
        return pgbench.run(seconds, work=plain.Work.load(work), clients=clients)
    kind, processes = CHILDREN[name]
    command = [sys.executable, "-m", "benchmarks", "--child", kind, "--seconds", str(seconds), "--work", str(work)]
    children = [subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) for _ in range(processes)]
    for child in children:
        _await_warm(child)
    for child in children:
        _say_go(child)
    return sum(_rate(child) for child in children)


def _await_warm(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    if child.stdout.readline() != "warm\n":
        raise RuntimeError("A contender could not start; what it said stands above.")


def _say_go(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


def _rate(child: subprocess.Popen[str]) -> float:
    output, _ = child.communicate()
    if child.returncode:
        raise RuntimeError("A contender failed; what it said stands above.")
    return float(output)


def be(kind: str, *, seconds: float, work: Path) -> None:
    """Be a contender: warm up, say so, wait for the word, work for `seconds`, print operations per second."""
    import django

    django.setup()
    opened = {"ours": ours.opened, "dbos": dbos_steps.opened, "plain": lambda: plain.opened(plain.Work.load(work))}
    with opened[kind]() as one:
        first = repeat(one, seconds=seconds * WARM_UP, start=0)[1]
        print("warm", flush=True)
        sys.stdin.readline()
        rate, _ = repeat(one, seconds=seconds, start=first)
    print(rate)


def repeat(one: Callable[[int], None], *, seconds: float, start: int) -> tuple[float, int]:
    """Call `one` with rising numbers for `seconds`; return calls per second and the next number."""
    number, began = start, time.perf_counter()
    while time.perf_counter() < began + seconds:
        one(number)
        number += 1
    return (number - start) / (time.perf_counter() - began), number
