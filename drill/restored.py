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
from drill.boundaries import Killed, Tape
from drill.crash import AGENT, Stage
from drill.crashes import ORDER
from drill.duplicates import ACTIONS
from drill.flows import PERSON
from drill.parts import Asked, Told
from drill.world import FAULTS, World
from reconciliation import executor, fence, restore, runs, schedules, sweeping, workers
from reconciliation.executor import Intent, Outcome
from reconciliation.keys import Identity
from reconciliation.models import Operation, RestoreFence, Run
from reconciliation.pressing import Verdict

POINTS, QUICK_POINTS = 50, 3
CLAIMS = ("before ledger_open", "before ledger_move_operation pending")


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

    known = -1  # calls that had been made when the backup was taken

    def take(self) -> None:
        """Copy the database, in the middle of whatever a worker does; a transaction is let come to its end first."""
        if connections["default"].in_atomic_block:
            self.tape.disturb[len(self.tape.passed)] = self.take
            return
        self.known = sum(self.world.calls.values())
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
    action = dice.choice(("label.create", "pickup.schedule", "refund.create", "message.send", "ticket.close"))
    fault = dice.choice(list(FAULTS))
    with boundaries.installed():
        at = dice.randrange(_last_claim(Backup(place.enter(folder, f"whole_{number}"), input=ORDER), action, fault) + 1)
    with boundaries.installed():
        stage = Backup(place.enter(folder, f"restored_{number}"), input=ORDER)
        with boundaries.recording(_begun(stage, action, fault, number)):
            stage.tape.disturb = {at: stage.take}
            _ended(stage)
            if number % 2:
                fence.forward()
            if stage.known < 0:
                yield f"the run did not come to boundary {at}"
                return
            sent = sum(stage.world.calls.values())
            stage.bring_back()
            yield from _still(stage, before=sent, lost=sent - stage.known, seen=seen)
            yield from _released(stage, seen)
        yield from _once(stage.world)


def _begun(stage: Backup, action: str, fault: str, number: int) -> Tape:
    stage.fresh(seed=number)
    stage.world.at(action, fault)
    runs.start("damaged_item", tenant="drill", workflow_id=f"r{number}", input=ORDER, actor=AGENT)
    return stage.tape


def _ended(stage: Backup) -> None:
    stage._as_worker(sweeping.sweep)
    stage.rest()


def _last_claim(stage: Backup, action: str, fault: str) -> int:
    """The boundary before the last claim of the whole run: a backup from up to there lacks at least that one."""
    with boundaries.recording(_begun(stage, action, fault, 0)):
        _ended(stage)
    return max(n for n, name in enumerate(stage.tape.passed) if name in CLAIMS)


def _still(stage: Backup, *, before: int, lost: int, seen: Counter[str]) -> Iterator[str]:
    """Workers and beats do what they can, and something new is asked for each time; nothing leaves."""
    for turn in range(3):
        stage._as_worker(schedules.tick)
        stage._as_worker(sweeping.sweep)
        restore.tend()
        yield from _refused(_asked(stage, turn), seen)
    down = RestoreFence.objects.get()
    seen[f"came down as {down.reason}" if down.is_down else "the same ledger"] += 1
    if not down.is_down:
        yield f"the fence is up, and {lost} calls were lost"
    elif lost and down.reason != "behind":
        yield f"{lost} calls were lost, and the fence came down as {down.reason}"
    if sum(stage.world.calls.values()) != before:
        yield "a call left before the release"


def _asked(stage: Backup, turn: int) -> Outcome:
    """Somebody asks for something that nobody has asked for before."""
    order = f"{stage.name}-new-{turn}"
    identity = Identity(
        tenant="drill", workflow_type="after the restore", workflow_id=order, step="refund", business_object=order
    )
    provider, action, rest = next(iter(ACTIONS.values()))
    intent = Intent(identity=identity, provider=provider, action=action, request={"order": order, **rest})
    return executor.perform(intent, actor=AGENT)


def _refused(outcome: Outcome, seen: Counter[str]) -> Iterator[str]:
    """It is recorded, as what may have been done in the lost time, and not sent. The calls are counted at the end."""
    if (outcome.state, outcome.reason_code) == ("ambiguous", "restored"):
        seen["new intents refused before the release"] += 1
    else:
        yield f"a new intent before the release became {outcome.state} ({outcome.reason_code})"


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
        try:
            found = list(point(asked.folder, number, asked.seed, seen))
        except Killed:
            found = ["a worker was killed that should not be"]
        failures += [{"point": number, "seed": asked.seed + number, "problem": problem} for problem in found]
    settings.AFTERCALL_ANCHOR = kept
    refused = seen["new intents refused before the release"]
    if refused != 3 * points:
        failures.append(f"{refused} new intents were refused before the release, not {3 * points}")
    return Told(
        name="restored from a backup",
        asks="A backup is brought back: does anything leave before the release, or happen twice after it?",
        counts={"restores": points, **dict(sorted(seen.items()))},
        failures=failures,
        notes=[f"Seeds {asked.seed} to {asked.seed + points - 1}."],
    )
