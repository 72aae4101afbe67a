"""The part `pulled`: PostgreSQL is killed with -9, again and again, under workers; nothing acknowledged may be lost.

The server has fsync on. The world (which calls arrived, what they did) is kept in this process, which survives.
"""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connections

from drill import place
from drill.crash import AGENT
from drill.duplicates import ACTIONS
from drill.parts import Asked, Told
from drill.world import World, doubles
from reconciliation import executor, registry, spool, sweeping, transition, workers
from reconciliation.claims import DATABASE_ERRORS, LedgerUnavailable
from reconciliation.executor import Intent
from reconciliation.keys import Identity
from reconciliation.models import Operation

KILLS, QUICK_KILLS = 60, 3
WORKERS = 4
ROUNDS = 5000  # each of what the last kill left unknown is looked up some ten times, and each time is its own
ASKS = "PostgreSQL is killed with -9 while workers send: is anything lost that was acknowledged, or any unknown hidden?"


class Crew:
    """Workers that perform one intent after the other and remember what they were told."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.seed = world, seed
        self.told: dict[str, str] = {}  # key of the identity -> the state that was acknowledged
        self.refused = 0
        self.astray: list[str] = []  # errors that a database which is away does not explain
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self._work, args=(n,), daemon=True) for n in range(WORKERS)]

    def _work(self, number: int) -> None:
        dice = random.Random(self.seed + number)
        count = 0
        while not self.stop.is_set():
            count += 1
            self._one(f"{number}-{count}", dice)
        connections.close_all()

    def _one(self, name: str, dice: random.Random) -> None:
        provider, action, rest = ACTIONS[dice.choice(list(ACTIONS))]
        identity = Identity(
            tenant="drill", workflow_type="pulled", workflow_id=name, step="act", business_object=f"order-{name}"
        )
        intent = Intent(identity=identity, provider=provider, action=action, request={"order": name, **rest})
        try:
            self.told[name] = str(executor.perform(intent, actor=AGENT).state)
        except (*DATABASE_ERRORS, LedgerUnavailable):  # the database is away: nothing was acknowledged
            self.refused += 1
            connections.close_all()
            time.sleep(0.05)
        except Exception as error:
            self.astray.append(f"{name}: {type(error).__name__}: {error}")
            connections.close_all()


def part(asked: Asked) -> Told:
    """Kill, restart, and at the end compare ledger, acknowledgements and world."""
    kills = QUICK_KILLS if asked.quick else KILLS
    folder = asked.folder / "pulled"
    folder.mkdir(mode=0o711)
    kept = {alias: dict(connections[alias].settings_dict) for alias in ("default", "owner")}
    real, spooled, var = registry.providers, settings.AFTERCALL_SPOOL, settings.AFTERCALL_VAR
    settings.AFTERCALL_VAR = folder
    server = _start(folder)
    try:
        place.make_template(folder)
        workers._known.clear()
        told = _run(asked, folder, server, kills)
    finally:
        registry.providers = real
        settings.AFTERCALL_SPOOL, settings.AFTERCALL_VAR = spooled, var
        connections.close_all()
        for alias, one in kept.items():
            connections[alias].settings_dict.update(one)
        workers._known.clear()
    return told


def _start(folder: Path) -> subprocess.Popen[bytes]:
    from console import embedded

    server = embedded.start(folder / "postgres", options=place.DURABLE, wait=60)
    for alias in ("default", "owner"):
        host = str(embedded.socket_folder(folder / "postgres"))
        connections[alias].settings_dict.update(HOST=host, NAME=place.template())
    return server


def _run(asked: Asked, folder: Path, server: subprocess.Popen[bytes], kills: int) -> Told:
    lock = threading.Lock()
    world = World(now=lambda: place_now(), name="pulled")
    plain = world.land

    def land(*args: Any) -> Any:
        with lock:
            return plain(*args)

    world.land = land  # type: ignore[method-assign]
    cast = doubles(registry.providers(), world, lambda name: None)
    registry.providers = lambda: cast  # type: ignore[assignment,return-value]
    settings.AFTERCALL_SPOOL = folder / "spool"
    settings.AFTERCALL_ANCHOR = folder / "anchor.json"
    from console import embedded

    crew, dice = Crew(world, asked.seed), random.Random(asked.seed)
    for thread in crew.threads:
        thread.start()
    left = []
    for _ in range(kills):
        time.sleep(0.3 + dice.random() * 0.7)
        place.kill(server)
        killed = place_now()
        server = _start(folder)
        left.append(_in_flight(folder, before=killed))
    time.sleep(0.5)
    crew.stop.set()
    for thread in crew.threads:
        thread.join(30)
    connections.close_all()
    try:
        return _compare(folder, crew, world, left)
    finally:
        connections.close_all()
        embedded.stop(server)


def place_now() -> datetime:
    """The machine's clock: the world must not ask a database that is away."""
    return datetime.now(UTC)


def _in_flight(folder: Path, *, before: datetime) -> int:
    """Operations of which the kill left open whether they were applied: nothing has touched them since."""
    statement = (
        "SELECT count(*) FROM reconciliation_operation WHERE state IN ('pending', 'ambiguous') AND updated_at <= %s"
    )
    with place.psycopg.connect(place.url(folder, place.template()), autocommit=True) as outside:
        row = outside.execute(statement, [before]).fetchone()
    assert row is not None
    return int(row[0])


def too_little(*, kills: int, acknowledged: int, effects: int, left: Sequence[int], astray: Sequence[str]) -> list[str]:
    """Why these kills tell nothing: little was acknowledged or done, or nothing was hit; and errors of another kind."""
    problems = [f"an error that no killed database explains: {one}" for one in astray]
    if acknowledged < kills:
        problems.append(f"{acknowledged} acknowledged under {kills} kills: too few to have lost one")
    if effects < acknowledged / 2:
        problems.append(f"{effects} effects of {acknowledged} acknowledged: most were never sent")
    if not any(left):
        problems.append(f"after none of {kills} kills was anything pending or ambiguous: none hit anything")
    return problems


def _compare(folder: Path, crew: Crew, world: World, left: list[int]) -> Told:
    pulled, kills = place.Place(folder, place.template()), len(left)
    problems = too_little(
        kills=kills, acknowledged=len(crew.told), effects=len(world.effects), left=left, astray=crew.astray
    )
    rows = {o.workflow_id: o for o in Operation.objects.filter(workflow_type="pulled")}
    for name, state in crew.told.items():
        row = rows.get(name)
        if row is None or (state in ("succeeded", "failed_terminal") and row.state != state):
            problems.append(f"{name}: {state} was acknowledged, the ledger has {row and row.state}")
    keys = {row.key for row in rows.values()}
    problems += [
        f"{e.action} {e.observed['order']} happened and no row knows of it" for e in world.effects if e.key not in keys
    ]
    unknown = [row for row in rows.values() if row.state in ("pending", "ambiguous")]
    hidden = [r for r in unknown if r.due_at is None and r.escalated_at is None]
    problems += [f"{row.workflow_id} ({row.state}): nobody will look" for row in hidden]
    if not _comes_to_rest(pulled):
        problems.append(f"after {ROUNDS} rounds something was still due: what stands below may only not be there yet")
    for row in Operation.objects.filter(workflow_type="pulled"):
        effects = world.count(row.key)
        if effects > 1:
            problems.append(f"{row.workflow_id} ({row.state}): {effects} effects")
        if row.state in ("succeeded", "failed_terminal") and effects != (row.state == "succeeded"):
            problems.append(f"{row.workflow_id} ({row.state}): {effects} effects")
        if row.state in ("pending", "ambiguous", "failed_retryable") and not row.escalated_at:
            problems.append(f"{row.workflow_id} ({row.state}): at rest, and nobody was called")
    from audit import verify

    problems += [f"audit log: {found}" for found in verify.verify(verify.registered_heads())]
    return Told(
        name="PostgreSQL killed with -9",
        asks=ASKS,
        counts={
            "kills": kills, "kills that left something open": sum(bool(n) for n in left),
            "left open by a kill, in sum": sum(left), "operations": len(rows), "acknowledged": len(crew.told),
            "refused while it was away": crew.refused, "unknown after the last kill": len(unknown),
            "effects counted in the world": len(world.effects),
        },
        failures=problems,
    )  # fmt: skip


def _comes_to_rest(pulled: place.Place) -> bool:
    """Sweep as the clock moves on to what is due next, until nothing is."""
    from drill.crash import NEXT_DUE

    spool.bring_in()
    workers.bury_dead()
    for _ in range(ROUNDS):
        sweeping.sweep(limit=500)
        row = pulled.superuser.execute(NEXT_DUE).fetchone()
        if row is None or row[0] is None:
            return True
        if row[0] > row[1]:
            pulled.advance(row[0] - transition.database_now())
    return False
