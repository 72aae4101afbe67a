"""The part `restored`: a backup is taken at a random point of a run, the run ends, and the backup is brought back.

The restored ledger has forgotten what was sent after the backup. Nothing may be sent until a person releases it, and
after the release nothing may happen a second time. At every other point the anchor was written before the backup and
not after it, so that only the trails of the workers know what the backup lacks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from django.conf import settings
from django.db import connections
from psycopg import sql

from drill import boundaries, place
from drill.boundaries import Killed
from drill.crash import AGENT, Stage
from drill.crashes import ORDER
from drill.flows import PERSON
from drill.parts import Asked, Told
from drill.world import FAULTS, World
from reconciliation import fence, restore, runs, schedules, sweeping, workers
from reconciliation.models import Operation, RestoreFence, Run
from reconciliation.pressing import Verdict

POINTS, QUICK_POINTS = 50, 3


class Backup(Stage):
    """A stage whose database can be copied and brought back."""

    def _swap(self, source: str, target: str) -> None:
        """Make `target` a copy of `source`; whoever used either is gone."""
        connections.close_all()
        self.place.superuser.close()
        with place.psycopg.connect(place.url(self.place.folder, "postgres"), autocommit=True) as outside:
            outside.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = ANY (%s)", [[source, target]]
            )
            old, new = sql.Identifier(target), sql.Identifier(source)
            outside.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(old))
            outside.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(old, new))
        self.place.superuser = place.psycopg.connect(place.url(self.place.folder, self.place.name), autocommit=True)

    def take(self) -> None:
        """Copy the database, in the middle of whatever a worker does."""
        if not connections["default"].in_atomic_block:
            self._swap(self.place.name, f"{self.place.name}_backup")

    def bring_back(self) -> None:
        """The database of this name is what the backup held; the world and the anchor know better."""
        self._swap(f"{self.place.name}_backup", self.place.name)
        self.place.superuser.execute("UPDATE drill_clock SET shift = %s", [self.place.shift])
        fence.forget()
        workers._known.clear()


def point(folder: Any, number: int, seed: int, seen: Counter[str]) -> Iterator[str]:
    """One restore: what is wrong with it. `seen` counts why the fence came down, and what became unknown."""
    dice = random.Random(seed + number)
    stage = Backup(place.enter(folder, f"restored_{number}"), input=ORDER)
    stage.fresh(seed=number)
    action = dice.choice(("label.create", "pickup.schedule", "refund.create", "message.send", "ticket.close"))
    stage.world.at(action, dice.choice(list(FAULTS)))
    with boundaries.recording(stage.tape):
        runs.start("damaged_item", tenant="drill", workflow_id=f"r{number}", input=ORDER, actor=AGENT)
        at = dice.randrange(45)
        stage.tape.disturb = {at: stage.take}
        stage._as_worker(sweeping.sweep)
        if stage.tape.disturb:  # the run had ended before that point
            stage.tape.disturb = {}
            stage.take()
        known = sum(stage.world.calls.values())
        stage.rest()
        if number % 2:
            fence.forward()
        sent = sum(stage.world.calls.values())
        stage.bring_back()
        yield from _still(stage, before=sent, lost=sent - known, seen=seen)
        yield from _released(stage, seen)
    yield from _once(stage.world)


def _still(stage: Backup, *, before: int, lost: int, seen: Counter[str]) -> Iterator[str]:
    """Workers and beats do what they can; nothing leaves."""
    for _ in range(3):
        stage._as_worker(schedules.tick)
        stage._as_worker(sweeping.sweep)
        restore.tend()
    down = RestoreFence.objects.get()
    seen[f"came down as {down.reason}" if down.is_down else "the same ledger"] += 1
    if not down.is_down:
        yield f"the fence is up, and {lost} calls were lost"
    elif lost and down.reason != "behind":
        yield f"{lost} calls were lost, and the fence came down as {down.reason}"
    if sum(stage.world.calls.values()) != before:
        yield "a call left before the release"


def _released(stage: Backup, seen: Counter[str]) -> Iterator[str]:
    while restore.mark():
        pass
    down = RestoreFence.objects.get()
    seen["operations made unknown"] += down.marked
    if down.is_down:
        answer = restore.release(actor=PERSON, version=down.version, reason="drill", token=uuid4())
        if answer.verdict is not Verdict.DONE:
            yield f"not released: {answer.message}"
    yield from stage.rest(rounds=600)  # what is unknown after a restore is looked up for longer
    for operation in Operation.objects.all():
        if operation.state == "succeeded" and stage.world.count(operation.key) != 1:
            yield f"{operation.step}: called succeeded, {stage.world.count(operation.key)} effects"
    if Run.objects.filter(state="running").exists():
        yield "a run is running with nobody holding it"
    seen[f"run {Run.objects.get().state} in the end"] += 1


def _once(world: World) -> Iterator[str]:
    keys = [effect.key for effect in world.effects]
    yield from (f"{key}: {keys.count(key)} effects" for key in sorted(set(keys)) if keys.count(key) > 1)


def part(asked: Asked) -> Told:
    """Restore at so many points."""
    points = QUICK_POINTS if asked.quick else POINTS
    failures: list[Any] = []
    seen: Counter[str] = Counter()
    kept = settings.AFTERCALL_ANCHOR
    for number in range(points):
        with boundaries.installed():
            try:
                found = list(point(asked.folder, number, asked.seed, seen))
            except Killed:
                found = ["a worker was killed that should not be"]
        failures += [{"point": number, "seed": asked.seed + number, "problem": problem} for problem in found]
    settings.AFTERCALL_ANCHOR = kept
    return Told(
        name="restored from a backup",
        asks="A backup is brought back: does anything leave before the release, or happen twice after it?",
        counts={"restores": points, **dict(sorted(seen.items()))},
        failures=failures,
        notes=[f"Seeds {asked.seed} to {asked.seed + points - 1}."],
    )
