"""How many duplicates blind retries make: worked out, and checked by throwing dice.

One attempt ends in one of four ways: applied and answered (`s`), applied but unanswered (`u`), not applied and tried
again (`q`: unanswered before the effect, or refused for now), or refused for good (the rest). A duplicate is an
operation that was applied more than once. Whoever cannot tell `u` from `q` tries both again.
"""

from __future__ import annotations

import random


def of_three(*, s: float, u: float, q: float) -> float:
    """P = u(s+u)(1+2q): the first and second attempt applied, or the first and third, or the second and third."""
    return u * (s + u) * (1 + 2 * q)


def of(attempts: int, *, s: float, u: float, q: float, applied: bool = False) -> float:
    """The probability of a duplicate within so many attempts, exactly. `applied`: one attempt has been already."""
    if attempts == 0:
        return 0.0
    again = q * of(attempts - 1, s=s, u=u, q=q, applied=applied)
    if applied:
        return s + u + again
    return u * of(attempts - 1, s=s, u=u, q=q, applied=True) + again


def thrown(attempts: int, *, s: float, u: float, q: float, operations: int, seed: int) -> int:
    """How many of so many operations were applied more than once, by dice."""
    dice = random.Random(seed)
    return sum(_one(attempts, s, u, q, dice) > 1 for _ in range(operations))


def _one(attempts: int, s: float, u: float, q: float, dice: random.Random) -> int:
    effects = 0
    for _ in range(attempts):
        rolled = dice.random()
        effects += rolled < s + u
        if rolled < s or rolled >= s + u + q:
            break
    return effects


def surprising(seen: int, *, expected: float, operations: int) -> bool:
    """Whether the dice contradict the formula: more than five standard deviations apart."""
    deviation = (operations * expected * (1 - expected)) ** 0.5
    return abs(seen - operations * expected) > 5 * deviation + 1
