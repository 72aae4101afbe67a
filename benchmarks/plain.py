"""The contender without a ledger: the same rows into tables of the same shape, in two commits of plain SQL.

Each commit is one statement and one round trip, prepared by the server, with all values worked out beforehand: no
canonical form, no hash, no encryption, no clock, no lock on an identity, no table of allowed moves. The statements are
made from what the ledger itself wrote for one sampled operation, so that bytes, indexes and constraints are the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg

from benchmarks import place

TABLES = {
    "operation": "reconciliation_operation",
    "journal": "reconciliation_journalentry",
    "audit": "audit_entry",
}
# What differs from operation to operation, worked out from its id: all indexes get new entries, as ours do.
OWN: Mapping[str, Mapping[str, str]] = {
    "operation": {
        "id": "{id}::bigint",
        "key": "'ac1-' || lpad(to_hex({id}::bigint), 64, '0')",
        "lineage": "decode(lpad(to_hex({id}::bigint), 64, '0'), 'hex')",
        "workflow_id": "'0123456789ab-' || {id}::bigint",
        "business_object": "'order-' || {id}::bigint",
        "provider_operation_id": "lpad(to_hex({id}::bigint), 24, '0')",
        "effect_id": "lpad(to_hex({id}::bigint), 24, '0')",
    },
    "journal": {"operation_id": "{id}::bigint"},
    "audit": {"subject": "'operation:' || {id}::bigint"},
}
Mark = Callable[[str], str]  # how a parameter is written: %(name)s or :name


@dataclass(frozen=True, kw_only=True)
class Work:
    """The rows of both commits, by table, without what differs from operation to operation."""

    claim: Mapping[str, Mapping[str, Any]]
    settle: Mapping[str, Mapping[str, Any]]

    def save(self, file: Path) -> None:
        file.write_text(json.dumps({"claim": self.claim, "settle": self.settle}, default=_text))

    @classmethod
    def load(cls, file: Path) -> Work:
        return cls(**json.loads(file.read_text()))


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, datetime | UUID):
        return str(value)
    raise TypeError(type(value).__name__)


def make_tables(connection: psycopg.Connection[Any]) -> None:
    """Tables with the columns, checks and indexes of the ledger's."""
    for name, original in TABLES.items():
        connection.execute(f"CREATE TABLE IF NOT EXISTS plain_{name} (LIKE {original} INCLUDING ALL)")


def sample(connection: psycopg.Connection[Any]) -> Work:
    """Let the ledger do one operation, and read what it had written at the time of the call and at the end."""
    from benchmarks.workload import ACTOR, SHELF, intent
    from reconciliation.executor import perform

    seen: list[dict[str, dict[str, Any]]] = []
    plain_perform = SHELF.perform

    def perform_and_look(call: Any) -> Any:
        seen.append(_newest(connection))
        return plain_perform(call)

    SHELF.perform = perform_and_look
    try:
        perform(intent(0, batch=uuid4().hex[:12]), actor=ACTOR)
    finally:
        del SHELF.perform
    claim, settle = seen[0], _newest(connection)
    changed = {k: v for k, v in settle["operation"].items() if v != claim["operation"][k]}
    return Work(claim=claim, settle={**settle, "operation": changed})


def _newest(connection: psycopg.Connection[Any]) -> dict[str, dict[str, Any]]:
    found = {}
    with connection.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        for name, table in TABLES.items():
            row = cursor.execute(f"SELECT * FROM {table} ORDER BY id DESC LIMIT 1").fetchone()
            assert row is not None
            if name != "operation":
                del row["id"]  # the tables number these rows themselves
            found[name] = row
    return found


def statements(work: Work, mark: Mark) -> tuple[str, str]:
    """The claim and the settlement, each as one statement."""
    inserts = [_insert(name, work.claim[name], "claim", mark) for name in TABLES]
    claim = "WITH o AS ({}), j AS ({}) {}".format(*inserts)
    rest = [_insert(name, work.settle[name], "settle", mark) for name in ("journal", "audit")]
    return claim, "WITH o AS ({}), j AS ({}) {}".format(_update(work.settle["operation"], mark), *rest)


def _insert(table: str, row: Mapping[str, Any], phase: str, mark: Mark) -> str:
    values = ", ".join(_value(table, column, value, phase, mark) for column, value in row.items())
    return f"INSERT INTO plain_{table} ({', '.join(row)}) VALUES ({values})"


def _update(changed: Mapping[str, Any], mark: Mark) -> str:
    changes = ", ".join(f"{c} = {_value('operation', c, value, 'settle', mark)}" for c, value in changed.items())
    held = f"state = 'pending' AND generation = {mark('claim_operation_generation')}"
    return f"UPDATE plain_operation SET {changes} WHERE id = {mark('id')} AND {held}"


def _value(table: str, column: str, value: Any, phase: str, mark: Mark) -> str:
    own = OWN[table].get(column)
    if own and value:
        return own.replace("{id}", mark("id"))
    if value is None:
        return "NULL"
    return "''" if value == "" else mark(f"{phase}_{table}_{column}")  # pgbench has no empty parameters


def values(work: Work) -> dict[str, Any]:
    """The parameters of both statements, without `id`."""
    return {
        f"{phase}_{table}_{column}": value
        for phase, rows in (("claim", work.claim), ("settle", work.settle))
        for table, row in rows.items()
        for column, value in row.items()
        if value not in (None, "") and column not in OWN[table]
    }


@contextmanager
def opened(work: Work) -> Iterator[Callable[[int], None]]:
    """A function that writes a new operation for every number it is given."""
    claim, settle = statements(work, lambda name: f"%({name})s")
    common, first = values(work), time.time_ns()
    with place.superuser() as connection:
        cursor = connection.cursor()

        def one(number: int) -> None:
            parameters = {**common, "id": first + number}
            cursor.execute(claim, parameters, prepare=True)
            cursor.execute(settle, parameters, prepare=True)
            assert cursor.rowcount == 1

        yield one
