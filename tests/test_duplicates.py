"""Which mechanism removes which duplicates, and the arithmetic of blind retries."""

from __future__ import annotations

import pytest

from drill import arithmetic, duplicates
from drill.duplicates import ACTIONS, EXAMPLE, TROUBLES, WAYS, Journalled, Shipped, StableKeys
from tests.test_drill import stage  # noqa: F401 - a fixture

KEYED, LISTED, LAGGING = ACTIONS


def test_blind_retries_double_what_was_worked_out() -> None:
    assert arithmetic.of(2, **EXAMPLE) == pytest.approx(0.00980, abs=5e-6)
    assert arithmetic.of(3, **EXAMPLE) == pytest.approx(0.01019, abs=5e-6)
    assert arithmetic.of_three(**EXAMPLE) == pytest.approx(arithmetic.of(3, **EXAMPLE), abs=1e-12)


@pytest.mark.parametrize("attempts", [1, 2, 3, 7])
def test_dice_agree_with_the_recursion(attempts: int) -> None:
    odds = {"s": 0.6, "u": 0.2, "q": 0.15}
    seen = arithmetic.thrown(attempts, **odds, operations=40_000, seed=attempts)
    assert not arithmetic.surprising(seen, expected=arithmetic.of(attempts, **odds), operations=40_000)
    assert attempts == 1 or arithmetic.surprising(seen, expected=arithmetic.of(attempts, **odds) / 2, operations=40_000)


def test_one_attempt_makes_no_duplicate_and_a_sure_one_always_does() -> None:
    assert arithmetic.of(1, s=0.5, u=0.5, q=0.0) == 0
    assert arithmetic.of(2, s=0.0, u=1.0, q=0.0) == 1


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.__name__)
def test_what_is_shipped_makes_no_duplicate(stage, trouble, kind) -> None:  # noqa: F811
    assert duplicates.once(stage, Shipped, trouble, kind) == 0


@pytest.mark.parametrize(
    ("way", "trouble", "kind"),
    [
        (Journalled, duplicates.unanswered, KEYED),
        (StableKeys, duplicates.unanswered, LISTED),
        (StableKeys, duplicates.forgotten, KEYED),
        (StableKeys, duplicates.slow, LAGGING),
    ],
)
def test_a_way_that_leaves_a_mechanism_out_makes_some(stage, way, trouble, kind) -> None:  # noqa: F811
    assert duplicates.once(stage, way, trouble, kind) > 0


def test_each_mechanism_must_remove_duplicates_of_its_own() -> None:
    good = {("a", "k"): [2, 0, 0, 0], ("b", "k"): [2, 1, 0, 0], ("c", "k"): [2, 1, 1, 0]}
    assert duplicates.problems(good) == []
    assert duplicates.problems({**good, ("d", "k"): [2, 1, 1, 1]})
    assert duplicates.problems({("a", "k"): [2, 0, 0, 0], ("b", "k"): [2, 1, 1, 0]})
    assert len(WAYS) == 4
