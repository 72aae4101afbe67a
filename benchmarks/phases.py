"""Where the time of one operation goes: the phases of `perform()`, and the server's time in each function.

Each phase's own time is taken by a clock around the functions that do it; what is called from within another phase
counts there no more. The server counts the time of its functions itself (track_functions).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

FUNCTIONS = ("ledger_open", "ledger_move_operation", "ledger_journal", "audit_append")
SERVER = "SELECT funcname, calls, total_time, self_time FROM pg_stat_user_functions WHERE funcname = ANY (%s)"


class Clock:
    """Adds up the own time of nested phases, in seconds."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._inner: list[float] = [0.0]

    def around(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed as part of `phase`."""

        def timed(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                whole = time.perf_counter() - began
                self.spent[phase] = self.spent.get(phase, 0.0) + whole - self._inner.pop()
                self._inner[-1] += whole

        return timed


def places() -> list[tuple[Any, str, str]]:
    """(module or object, name, phase) of the functions that do the work."""
    from audit import log
    from benchmarks.workload import SHELF
    from reconciliation import keys, sealing, settlement, transition

    return [
        *((module, "canonical", "canonical form") for module in (keys, sealing)),
        *((keys, name, "hashes: key, lineage, fingerprint") for name in ("_keyed", "lineage_hash")),
        (sealing, "seal_bytes", "encryption"),
        *((transition, name, "JSON for the statements") for name in ("_json", "_journal")),
        (log, "body", "audit body"),
        (settlement, "judge", "judgement of the receipt"),
        (SHELF, "perform", "the provider's call"),
    ]


@contextmanager
def timed(clock: Clock) -> Iterator[None]:
    """Put clocks around the functions of every phase, and the statements by the name of their function."""
    from reconciliation import transition

    plain = [(owner, name, getattr(owner, name)) for owner, name, _ in places()]
    for owner, name, phase in places():
        setattr(owner, name, clock.around(phase, getattr(owner, name)))
    call = transition._call
    by_name = {name: clock.around(f"statement: {name}", call) for name in FUNCTIONS}
    transition._call = lambda sql, values: by_name[sql.split("FROM ")[1].split("(")[0]](sql, values)
    try:
        yield
    finally:
        transition._call = call
        for owner, name, function in plain:
            setattr(owner, name, function)


def measure(superuser: psycopg.Connection[Any], *, count: int) -> list[dict[str, Any]]:
    """Perform `count` operations under the clock; return rows of {phase, microseconds} for one operation."""
    from django.db import connections

    from benchmarks import ours

    with ours.opened() as one:
        for number in range(count // 5 + 1):
            one(number)
        _count_functions(connections["default"], superuser)
        clock = Clock()
        with timed(clock):
            perform = clock.around("the rest of perform()", one)
            for number in range(count, 2 * count):
                perform(number)
        connections["default"].close()  # the session hands its counts over at its end
    rows = {phase: spent / count * 1e6 for phase, spent in clock.spent.items()}
    return [{"phase": phase, "microseconds": round(spent, 1)} for phase, spent in _ordered(rows, superuser, count)]


def _count_functions(connection: Any, superuser: psycopg.Connection[Any]) -> None:
    superuser.execute(f"ALTER DATABASE {superuser.info.dbname} SET track_functions = 'all'")
    superuser.execute("SELECT pg_stat_reset()")
    connection.close()


def _ordered(rows: dict[str, float], superuser: psycopg.Connection[Any], count: int) -> Iterator[tuple[str, float]]:
    """Python's phases, then each statement with what of it the server spent in its function, and in which part."""
    server = {name: (calls, total, own) for name, calls, total, own in superuser.execute(SERVER, [list(FUNCTIONS)])}
    yield from ((phase, spent) for phase, spent in rows.items() if not phase.startswith("statement"))
    for name in ("ledger_open", "ledger_move_operation"):
        whole, inside = rows[f"statement: {name}"], server[name][1] * 1000 / count
        yield f"{name}: the function, on the server", inside
        yield f"{name}: driver, way to the server and back, commit", whole - inside
    for name in FUNCTIONS:
        yield f"  within the functions: {name} itself", server[name][2] * 1000 / count
    yield "whole operation", sum(rows.values())
