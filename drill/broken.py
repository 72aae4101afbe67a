"""A pytest plugin of the drill: breaks the guard named in DRILL_BREAK, in the test run's own database or process.

Nothing that is shipped loads it. A mutation that does not fit the code any more is an error, not a pass.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from drill.mutations import MUTATIONS, Mutation

FUNCTION = "SELECT pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.proname = %s"


def _wanted() -> Mutation | None:
    return next((one for one in MUTATIONS if one.name == os.environ.get("DRILL_BREAK")), None)


@pytest.fixture(scope="session", autouse=True)
def _break_it(request: pytest.FixtureRequest) -> Iterator[None]:
    mutation = _wanted()
    if mutation is None:
        yield
    elif mutation.in_sql:
        _break_in_sql(request.getfixturevalue("test_database"), mutation)
        yield
    else:
        _break_in_python(mutation)
        yield


def _break_in_sql(database: Any, mutation: Mutation) -> None:
    with database.superuser() as connection:
        row = connection.execute(FUNCTION, [mutation.function]).fetchone()
        assert row is not None, f"there is no function {mutation.function}"
        broken = row[0].replace(mutation.old, mutation.new)
        assert broken != row[0], f"{mutation.name}: {mutation.old!r} is not in {mutation.function} any more"
        connection.execute(broken)


def _break_in_python(mutation: Mutation) -> None:
    module, _, name = mutation.function.rpartition(".")
    there = importlib.import_module(module)
    assert hasattr(there, name), f"there is no {mutation.function} any more"
    setattr(there, name, PYTHON[mutation.new])


def _last_sent(operation: Any, spec: Any, *times: Any) -> Any:
    """Absence is believed as soon as something was sent."""
    return operation.last_sent_at - timedelta(days=1) if operation.last_sent_at else None


PYTHON = {"last_sent": _last_sent, "for_ever": lambda spec: 10**9, "always": lambda *_, **__: True}
