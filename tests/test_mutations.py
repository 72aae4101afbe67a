"""The drill's mutations still fit the code, so that the drill can break what they name."""

from __future__ import annotations

import importlib

import pytest

from drill import broken, mutations
from tests.database import TestDatabase

NAMES = {
    "compare-and-set", "fence", "approval re-check", "retention check", "settle time", "four-eyes", "run lock at claim",
    "send-by", "restore fence", "replay window", "a clock set back", "fence of a local effect",
    "commit with its settlement", "one operation a message", "compare-and-set of runs", "compare-and-set of approvals",
    "approval re-check of two people",
}  # fmt: skip


def test_every_guard_of_the_list_is_broken() -> None:
    assert {mutation.name for mutation in mutations.MUTATIONS} == NAMES


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_fits(mutation: mutations.Mutation, ledger_db: TestDatabase) -> None:
    if mutation.in_sql:
        with ledger_db.superuser() as connection:
            (text,) = connection.execute(broken.FUNCTION, [mutation.function]).fetchone()
        assert text.count(mutation.old) == 1
    else:
        module, _, name = mutation.function.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))
        assert mutation.new in broken.PYTHON
