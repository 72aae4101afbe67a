"""All the cases of the crash sweep, dealt out to processes, each with a database of its own."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drill.crash import Case, Halt, Seen, Stage
from drill.flows import AGREED, BACK, CANCELLED, FORWARD, actions_of, flows
from drill.world import FAULTS
from reconciliation.providers.base import Json

NO_FAULT = "no fault"
TROUBLE = tuple(name for name in FAULTS if name != NO_FAULT)
DISTURBANCES = ("kill", "kill", "kill_unseen", "freeze", "freeze", "cancel")


@dataclass(frozen=True)
class Job:
    """One share of the sweep: all single crashes of a flow with one fault, or so many double ones from a seed."""

    kind: str  # singles | doubles
    flow: str = ""
    fault: str = NO_FAULT
    action: str = ""
    how: str = "kill"
    every: int = 1  # only each n-th boundary, where time is short
    seed: int = 0
    count: int = 0


@dataclass
class Tally:
    """What came of many cases."""

    cases: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    effects: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, kind: str, seen: Seen) -> None:
        self.cases[kind] += 1
        self.ended[f"{seen.case.flow}: {seen.ended}"] += 1
        self.effects += seen.effects
        for halt in seen.case.halts:
            if halt.at < len(seen.boundaries):
                self.places[f"{halt.how} at {seen.boundaries[halt.at]}"] += 1
        if seen.problems:
            self.failures.append(seen.told() | {"at": [seen.boundaries[h.at : h.at + 1] for h in seen.case.halts]})

    def merge(self, other: Tally) -> None:
        for name in ("cases", "ended", "places"):
            getattr(self, name).update(getattr(other, name))
        self.effects += other.effects
        self.failures += other.failures
        self.seconds += other.seconds


def jobs(workflow: Any, *, every: int, doubles: int, seed: int) -> list[Job]:
    """The whole sweep. The first crash of a pair is any; so is what it does."""
    found: list[Job] = []
    for flow, what in flows(workflow).items():
        hows = ("cancel",) if flow == CANCELLED else ("kill", "freeze", "kill_unseen")
        found += [Job("singles", flow, how=how, every=every) for how in hows]
        for action in actions_of(workflow, what):
            for fault in TROUBLE if flow in (FORWARD, BACK, AGREED) else TROUBLE[5::3]:
                found.append(Job("singles", flow, fault, action, how=hows[0], every=every))
    found += [Job("doubles", seed=seed + n, count=min(50, doubles - n)) for n in range(0, doubles, 50)]
    random.Random(seed).shuffle(found)
    return found


def do(stage: Stage, workflow: Any, job: Job) -> Tally:
    """Play the cases of one job."""
    tally = Tally()
    for kind, case in _singles(stage, workflow, job) if job.kind == "singles" else _doubles(workflow, job):
        tally.add(kind, stage.play(case, flows(workflow)[case.flow]))
    return tally


def _singles(stage: Stage, workflow: Any, job: Job) -> Iterator[tuple[str, Case]]:
    plain = Case(job.flow, job.fault, job.action)
    seen = stage.play(plain, flows(workflow)[job.flow])
    yield "undisturbed", plain
    if job.action and not any(name.startswith(f"{job.action}:") for name in seen.boundaries):
        return  # this flow does not come to that call
    # Before the faulted call comes up, the run is as without the fault, which has a job of its own.
    first = (
        next((n for n, name in enumerate(seen.boundaries) if name.startswith(f"{job.action}:")), 3) if job.action else 0
    )
    for at in range(max(first - 3, 0), len(seen.boundaries), job.every):
        yield "single", Case(job.flow, job.fault, job.action, (Halt(job.how, at),), seed=at)


def _doubles(workflow: Any, job: Job) -> Iterator[tuple[str, Case]]:
    for number in range(job.count):
        dice = random.Random((job.seed + number) * 7919)
        flow = dice.choice(list(flows(workflow)))
        fault = dice.choice(list(FAULTS))
        action = dice.choice(actions_of(workflow, flows(workflow)[flow]))
        first = dice.randrange(70)
        halts = tuple(Halt(dice.choice(DISTURBANCES), at) for at in (first, first + 1 + dice.randrange(40)))
        yield "double", Case(flow, fault, action, halts, seed=job.seed + number)


# Many processes


def run(folder: Path, *, workflow: str, input: Json, share: Sequence[Job], processes: int, until: float,
        say: Callable[[str], None]) -> Tally:  # fmt: skip
    """Deal the jobs out and gather what came of them. Jobs that are not begun at `until` (monotonic) are left out."""
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    crew = [
        context.Process(target=_be, args=(folder, n, workflow, input, share[n::processes], until, results), daemon=True)
        for n in range(processes)
    ]
    for one in crew:
        one.start()
    whole, left = Tally(), processes
    told = time.monotonic()
    while left:
        tally = results.get()
        if tally is None:
            left -= 1
            continue
        whole.merge(tally)
        for failure in tally.failures[:3]:
            say(f"crash sweep: FAILED {failure}")
        if time.monotonic() - told > 15:
            told = time.monotonic()
            say(f"crash sweep: {sum(whole.cases.values())} cases, {len(whole.failures)} failures")
    for one in crew:
        one.join()
    return whole


def _be(
    folder: Path, number: int, workflow: str, input: Json, share: Sequence[Job], until: float, results: Any
) -> None:
    from drill import boundaries, place
    from reconciliation import registry

    try:
        with boundaries.installed():  # kept until the end: a generator that nobody holds takes its wraps off at once
            stage = Stage(place.enter(folder, f"sweep_{os.getpid()}_{number}"), input=input)
            declared = registry.workflow(workflow)
            for job in share:
                if time.monotonic() > until:
                    break
                began = time.monotonic()
                tally = do(stage, declared, job)
                tally.seconds = time.monotonic() - began
                results.put(tally)
            results.put(_verified())
    except BaseException:
        results.put(Tally(failures=[{"problems": [traceback.format_exc()[-900:]]}]))
    finally:
        results.put(None)


def _verified() -> Tally:
    """The audit log of everything that this process did, as a whole."""
    from audit import verify

    found = [str(problem) for problem in verify.verify(verify.registered_heads())]
    return Tally(failures=[{"problems": [f"audit log: {problem}"]} for problem in found])
