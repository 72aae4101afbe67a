"""DBOS: a workflow of one step that makes the same call, in a database of its own on the same server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import psycopg

from benchmarks import place

NAME = "dbos_system"


def make_database(connection: psycopg.Connection[Any]) -> None:
    """Make it where it is missing; DBOS makes its tables itself."""
    if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [NAME]).fetchone():
        connection.execute(f"CREATE DATABASE {NAME}")


@contextmanager
def opened() -> Iterator[Callable[[int], None]]:
    """A function that runs a new workflow for every number it is given."""
    from dbos import DBOS, SetWorkflowID

    from benchmarks.workload import answer, request

    DBOS(config={"name": "benchmark", "system_database_url": place.url(NAME), "log_level": "ERROR"})

    @DBOS.step()
    def tag(what: dict[str, Any], key: str) -> dict[str, Any]:
        receipt = answer(what, effect=key)
        return {"id": receipt.provider_operation_id, "result": receipt.result, "observed": receipt.observed}

    @DBOS.workflow()
    def tag_order(what: dict[str, Any], key: str) -> dict[str, Any]:
        return tag(what, key)

    batch = uuid4().hex[:12]

    def one(number: int) -> None:
        key = f"{batch}-{number:011d}"
        with SetWorkflowID(key):
            assert tag_order(request(number), key)["id"] == key

    DBOS.launch()
    try:
        yield one
    finally:
        DBOS.destroy()
