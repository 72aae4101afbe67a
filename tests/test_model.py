"""The model-based test, small: the drill has 2,000 examples of 50 steps, the suite a few of 20."""

from __future__ import annotations

from typing import Any

import pytest

from drill import model
from drill.crashes import ORDER
from drill.world import World
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
