"""The part `duplicates`: which mechanism removes which class of duplicates, and how many blind retries would make.

Each way of calling is a class; a later one adds a mechanism to the one before it. They live here and nowhere else:
nothing that is shipped can switch one off. The last is what is shipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

from drill import arithmetic, boundaries, place
from drill.boundaries import Killed
from drill.crash import AGENT, Stage
from drill.parts import Asked, Told
from reconciliation import executor, policy, transition, workers
from reconciliation.executor import Intent
from reconciliation.keys import Identity
from reconciliation.providers.base import Call

MAIL = {"to": "ada@example.com", "subject": "Your claim", "body": "It is on its way."}
ACTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "remembers keys": ("pay", "refund.create", {"amount": 4200, "currency": "USD", "card": "card_4242"}),
    "no keys, a list that is sure": ("mail", "message.send_listed", MAIL),
    "no keys, an index that lags": ("mail", "message.send", MAIL),
}
ATTEMPTS = 3


@dataclass(frozen=True)
class Wish:
    """One thing that is to be done once."""

    provider: str
    action: str
    request: dict[str, Any]


class Blind:
    """No journal, fresh keys: whoever is not told of success tries again, and knows nothing of earlier deliveries."""

    title = "no journal, fresh keys"

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def deliver(self, wish: Wish) -> None:
        """A task runner hands the wish to a worker."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self.cast(wish).perform(self.call(wish, attempt))
            except Exception:  # that is what blind means
                continue
            return

    def rest(self) -> None:
        """Time passes until nothing is left to do."""
        self.stage.advance(timedelta(minutes=2))
        self.stage.world.time_passes()

    def cast(self, wish: Wish) -> Any:
        return self.stage.cast[wish.provider]

    def call(self, wish: Wish, attempt: int) -> Call:
        return Call(
            action=wish.action, key=self.key(wish), request=wish.request, tenant="drill", attempt=attempt,
            send_by=policy.boot_seconds() + 40,
        )  # fmt: skip

    def key(self, wish: Wish) -> str:
        return uuid4().hex


class Journalled(Blind):
    """A journal of what was done, fresh keys: what is known to be done is not done again."""

    title = "journal, fresh keys"

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.done: set[str] = set()

    def deliver(self, wish: Wish) -> None:
        if wish.request["order"] in self.done:
            return
        super().deliver(wish)
        self.done.add(wish.request["order"])


class StableKeys(Journalled):
    """A journal, and one key for all attempts: a provider that remembers keys answers again instead of doing again."""

    title = "stable keys"

    def key(self, wish: Wish) -> str:
        return f"drill-{wish.request['order']}-{wish.action}"


class Shipped(Blind):
    """What is shipped: the ledger, one key, and a look-up before anything unknown is sent again."""

    title = "keys and look-up"

    def deliver(self, wish: Wish) -> None:
        order = wish.request["order"]
        identity = Identity(
            tenant="drill", workflow_type="duplicates", workflow_id=order, step="act", business_object=order
        )
        intent = Intent(identity=identity, provider=wish.provider, action=wish.action, request=wish.request)
        try:
            executor.perform(intent, actor=AGENT)
        except transition.TransitionRefused:
            return

    def rest(self) -> None:
        self.stage.rest()


WAYS: tuple[type[Blind], ...] = (Blind, Journalled, StableKeys, Shipped)


# What goes wrong. Each leaves the wish done at least once, were it not for the guard.


def done_twice(way: Blind, wish: Wish) -> None:
    """The queue delivers it again after it was done."""
    way.deliver(wish)
    way.deliver(wish)


def meanwhile(way: Blind, wish: Wish) -> None:
    """It is delivered a second time while the first worker has its hand on the socket."""
    way.stage.tape.on[f"{wish.action}: under way"] = lambda: way.deliver(wish)
    way.deliver(wish)


def unanswered(way: Blind, wish: Wish) -> None:
    """The answer is lost after the effect; it is tried again."""
    way.stage.world.at(wish.action, "time-out after the effect")
    way.deliver(wish)


def crashed(way: Blind, wish: Wish) -> None:
    """The worker is killed between the effect and its record; the queue delivers it to another."""
    way.stage.tape.on[f"{wish.action}: done there, not answered"] = way.stage.tape.kill
    try:
        way.deliver(wish)
    except Killed:
        way.stage.tape.dead = False
        workers._known.clear()
    way.deliver(wish)


def slow(way: Blind, wish: Wish) -> None:
    """The original is still on its way when it is tried again."""
    way.stage.world.at(wish.action, "time-out, effect comes late")
    way.deliver(wish)


def forgotten(way: Blind, wish: Wish) -> None:
    """The worker is killed after the effect, and the queue delivers again when the provider has forgotten the key."""
    way.stage.tape.on[f"{wish.action}: done there, not answered"] = way.stage.tape.kill
    try:
        way.deliver(wish)
    except Killed:
        way.stage.tape.dead = False
        workers._known.clear()
    way.stage.advance(timedelta(days=2))
    way.deliver(wish)


TROUBLES: tuple[Callable[[Blind, Wish], None], ...] = (done_twice, meanwhile, unanswered, crashed, slow, forgotten)


def once(stage: Stage, way: type[Blind], trouble: Callable[[Blind, Wish], None], kind: str) -> int:
    """One wish, one way of calling, one trouble: how many effects too many there are in the end."""
    stage.fresh()
    provider, action, rest = ACTIONS[kind]
    wish = Wish(provider, action, {"order": f"{stage.name}", **rest})
    caller = way(stage)
    with boundaries.recording(stage.tape):
        trouble(caller, wish)
        caller.rest()
        caller.deliver(wish)  # and once more when the dust has settled
        caller.rest()
    effects = sum(effect.action == action for effect in stage.world.effects)
    return max(effects - 1, 0)


def table(stage: Stage, *, times: int) -> dict[tuple[str, str], list[int]]:
    """(trouble, kind of provider) -> duplicates of each way, in the order of WAYS."""
    return {
        (str(trouble.__doc__), kind): [sum(once(stage, way, trouble, kind) for _ in range(times)) for way in WAYS]
        for trouble in TROUBLES
        for kind in ACTIONS
    }


def problems(counted: dict[tuple[str, str], list[int]]) -> list[str]:
    """Where a mechanism removes nothing of its own, or the last one leaves something."""
    found = [f"{' / '.join(where)}: {row[-1]} left by what is shipped" for where, row in counted.items() if row[-1]]
    for n, way in enumerate(WAYS[1:], start=1):
        if not any(row[n - 1] and not row[n] for row in counted.values()):
            found.append(f"{way.title} removes no class of duplicates of its own")
        if any(row[n] > row[n - 1] for row in counted.values()):
            found.append(f"{way.title} adds duplicates")
    if not all(any(row[n] for row in counted.values()) for n in range(len(WAYS) - 1)):
        found.append("a way without all mechanisms leaves nothing, so the table shows nothing")
    return found


# Worked out

EXAMPLE = {"s": 0.97, "u": 0.01, "q": 0.02}  # 1 % applied unanswered, 1 % lost before the effect, 1 % refused for now


def worked_out(*, operations: int, seed: int) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Rows (attempts, probability, duplicates expected, seen by dice) and where they contradict each other."""
    rows: list[tuple[Any, ...]] = []
    found: list[str] = []
    for attempts in (1, 2, 3, 4, 5, 10):
        exact = arithmetic.of(attempts, **EXAMPLE)
        seen = arithmetic.thrown(attempts, **EXAMPLE, operations=operations, seed=seed + attempts)
        rows.append((attempts, f"{exact:.5f}", round(exact * operations), seen))
        if arithmetic.surprising(seen, expected=exact, operations=operations):
            found.append(f"{attempts} attempts: {exact:.5f} worked out, {seen} of {operations} seen (seed {seed})")
    if abs(arithmetic.of_three(**EXAMPLE) - arithmetic.of(3, **EXAMPLE)) > 1e-12:
        found.append("the formula for three attempts contradicts the recursion")
    return rows, found


def part(asked: Asked) -> Told:
    """The table, and what blind retries would have made."""
    times, operations = (1, 100_000) if asked.quick else (20, 1_000_000)
    with boundaries.installed():
        counted = table(Stage(place.enter(asked.folder, "duplicates"), input={}), times=times)
    rows, contradictions = worked_out(operations=operations, seed=asked.seed)
    return Told(
        name="duplicates by mechanism",
        asks="Which mechanism removes which duplicates, and how many would blind retries make?",
        counts={
            "wishes": len(counted) * len(WAYS) * times,
            "operations thrown as dice": operations * len(rows),
            **{f"duplicates, {way.title}": sum(row[n] for row in counted.values()) for n, way in enumerate(WAYS)},
        },
        tables={
            f"duplicates in {times} wishes each": (
                ("what happened", "the provider", *(way.title for way in WAYS)),
                [(*where, *row) for where, row in counted.items()],
            ),
            "blind retries: 97 % answered, 1 % applied but unanswered, 2 % not applied": (
                ("attempts", "a duplicate in", f"of {operations:,} operations", "seen by dice"),
                rows,
            ),
        },
        failures=problems(counted) + contradictions,
    )
