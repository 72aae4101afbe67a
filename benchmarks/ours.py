"""The contender that is ours: `executor.perform()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4


@contextmanager
def opened() -> Iterator[Callable[[int], None]]:
    """A function that performs a new operation for every number it is given."""
    from benchmarks.workload import ACTOR, intent
    from reconciliation.executor import perform
    from reconciliation.states import State

    batch = uuid4().hex[:12]

    def one(number: int) -> None:
        outcome = perform(intent(number, batch=batch), actor=ACTOR)
        assert outcome.state is State.SUCCEEDED

    yield one
