"""The model-based test, small: the drill has 2,000 examples of 50 steps, the suite a few of 20."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from drill import model
from drill.crashes import ORDER
from drill.world import World
from examples.order_desk.workflow import DAMAGED_ITEM
from reconciliation.models import Operation
from tests.test_drill import stage  # noqa: F401 - a fixture


def test_random_steps_never_disagree_with_the_model(stage: Any) -> None:  # noqa: F811
    model.play(stage, ORDER, examples=30, steps=20, seed=0)


def test_a_world_that_does_everything_twice_is_told_apart(stage: Any, monkeypatch: Any) -> None:  # noqa: F811
    plain = World.land

    def twice(world: World, provider: str, spec: Any, call: Any) -> Any:
        plain(world, provider, spec, call)
        world.keys.clear()
        return plain(world, provider, spec, call)

    monkeypatch.setattr(World, "land", twice)
    with pytest.raises(AssertionError, match="2 effects"):
        model.play(stage, ORDER, examples=3, steps=4, seed=1, shrink=False)


@pytest.mark.parametrize("idle", ["refund.create", "ticket.close"])
def test_a_world_that_says_yes_and_does_nothing_is_told_apart(stage: Any, monkeypatch: Any, idle: str) -> None:  # noqa: F811
    plain = World.land

    def nothing(world: World, provider: str, spec: Any, call: Any) -> Any:
        done = plain(world, provider, spec, call)
        world.effects = [effect for effect in world.effects if effect.action != idle]
        return done

    monkeypatch.setattr(World, "land", nothing)
    with pytest.raises(AssertionError, match="basis receipt: and it did not happen"), steps(stage) as ledger:
        run_to_its_end(ledger, 0)


def test_two_runs_that_close_one_ticket_agree_with_the_model(stage: Any) -> None:  # noqa: F811
    with steps(stage) as ledger:
        run_to_its_end(ledger, 0)
        run_to_its_end(ledger, 1)
    closed = Operation.objects.filter(action="ticket.close", state="succeeded")
    assert sorted(stage.world.count(operation.key) for operation in closed) == [0, 1]


@contextmanager
def steps(on: Any) -> Iterator[Any]:
    """The state machine, to be taken through steps by hand."""
    ledger: Any = model.machine(on, ORDER)()
    try:
        yield ledger
    finally:
        ledger.teardown()


def run_to_its_end(ledger: Any, number: int) -> None:
    ledger.start(workflow=DAMAGED_ITEM, number=number, fault="no fault")
    ledger.workers_sweep(kill=-1)
    ledger.the_ledger_agrees_with_the_paper()
