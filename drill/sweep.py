"""All the cases of the crash sweep, dealt out to processes, each with a database of its own."""

from __future__ import annotations

import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drill import crew
from drill.crash import CRASHES, Case, Halt, Seen, Stage
from drill.flows import (
    AGREED,
    BACK,
    CANCELLED,
    DENIED,
    FORWARD,
    RECORDED,
    RECORDED_BACK,
    SCHEDULED,
    UNANSWERED,
    actions_of,
    flows,
)
from drill.world import FAULTS
from reconciliation.providers.base import Json

NO_FAULT = "no fault"
TROUBLE = tuple(name for name in FAULTS if name != NO_FAULT)
SOME = TROUBLE[5::3]  # for the calls of flows that others play with every fault
EVERY_FAULT = (FORWARD, BACK, AGREED, DENIED, UNANSWERED, SCHEDULED)
OF_THEIR_OWN = ("outcome.record", "outcome.strike")  # calls of the flows that record here, and of no other
DRAWN = (*CRASHES, *CRASHES, "cancel")
DOUBLE = "double crash"
SHARE, DRAWS = 10, 10  # double crashes a job; pairs drawn for one of them, at most


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
        for halt in seen.took:
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
    """The whole sweep: each flow with each kind of crash, each call of it with its faults, and pairs by seed."""
    found: list[Job] = []
    for flow, what in flows(workflow).items():
        hows = ("cancel", "kill") if flow == CANCELLED else CRASHES
        found += [Job("singles", flow, how=how, every=every) for how in hows]
        for action in actions_of(workflow, what):
            for how in hows if flow == CANCELLED else ("kill",):
                found += [Job("singles", flow, fault, action, how, every) for fault in _faults(flow, action)]
    found += [
        Job("doubles", seed=seed + n * DRAWS, count=min(SHARE, doubles - n)) for n in range(0, doubles, SHARE)
    ]  # fmt: skip
    random.Random(seed).shuffle(found)
    return found


def _faults(flow: str, action: str) -> tuple[str, ...]:
    own = flow in (RECORDED, RECORDED_BACK) and action in OF_THEIR_OWN
    return TROUBLE if flow in EVERY_FAULT or own else SOME


Plain = dict[tuple[str, str, str], Seen]


def do(stage: Stage, workflow: Any, job: Job, plain: Plain | None = None) -> Tally:
    """Play the cases of one job. `plain` keeps the undisturbed runs from which this process has drawn pairs."""
    tally = Tally()
    if job.kind == "doubles":
        _doubles(stage, workflow, job, tally, plain if plain is not None else {})
        return tally
    for case in _singles(stage, workflow, job, tally):
        seen = stage.play(case, flows(workflow)[case.flow])
        tally.add("single" if len(seen.took) == len(case.halts) else "single, without effect", seen)
    return tally


def _singles(stage: Stage, workflow: Any, job: Job, tally: Tally) -> Iterator[Case]:
    basis = _basis(stage, workflow, Case(job.flow, job.fault, job.action), cancelled=job.how != "cancel")
    tally.add("undisturbed", basis)
    called = [n for n, name in enumerate(basis.boundaries) if name.startswith(f"{job.action}:")]
    if job.action and not called:
        return  # this flow does not come to that call
    # Before the faulted call comes up, the run is as without the fault, which has a job of its own.
    first = max(called[0] - 3, 0) if job.action else 0
    for at in range(first, len(basis.boundaries), job.every):
        if all(halt.at != at for halt in basis.case.halts):
            yield replace(basis.case, halts=(*basis.case.halts, Halt(job.how, at)), seed=at)


def _basis(stage: Stage, workflow: Any, case: Case, *, cancelled: bool) -> Seen:
    """Play it undisturbed. A flow that is cancelled is so at the last call before its pivot: all of that is undone."""
    flow = flows(workflow)[case.flow]
    seen = stage.play(case, flow)
    if case.flow != CANCELLED or not cancelled:
        return seen
    at = _last_call(seen.boundaries, (workflow.pivot or workflow.effects[-1]).action)
    return stage.play(replace(case, halts=(Halt("cancel", at),)), flow)


def _last_call(passed: list[str], before: str) -> int:
    end = next((n for n, name in enumerate(passed) if name.startswith(f"{before}:")), len(passed))
    calls = [n for n, name in enumerate(passed[:end]) if name.endswith(": about to leave")]
    return calls[-1] if calls else len(passed) // 2


def _doubles(stage: Stage, workflow: Any, job: Job, tally: Tally, plain: Plain) -> None:
    """Draw pairs until so many of them were double crashes."""
    for number in range(job.count * DRAWS):
        case = _drawn(stage, workflow, job.seed + number, tally, plain)
        seen = stage.play(case, flows(workflow)[case.flow])
        tally.add(kind_of_pair(seen), seen)
        if tally.cases[DOUBLE] == job.count:
            return
    tally.failures.append({"problems": [f"{job.count * DRAWS} pairs made {tally.cases[DOUBLE]} double crashes"]})


def _drawn(stage: Stage, workflow: Any, seed: int, tally: Tally, plain: Plain) -> Case:
    """Two disturbances, within the run that they disturb as it is without them."""
    dice = random.Random(seed * 7919)
    flow = dice.choice(list(flows(workflow)))
    key = (flow, dice.choice(list(FAULTS)), dice.choice(actions_of(workflow, flows(workflow)[flow])))
    if key not in plain:
        plain[key] = _basis(stage, workflow, Case(*key), cancelled=True)
        tally.add("undisturbed", plain[key])
    basis = plain[key]
    taken = {halt.at for halt in basis.case.halts}
    points = dice.sample([at for at in range(len(basis.boundaries)) if at not in taken], 2)
    pair = tuple(Halt(dice.choice(DRAWN), at) for at in sorted(points))
    return replace(basis.case, halts=(*basis.case.halts, *pair), seed=seed)


def kind_of_pair(seen: Seen) -> str:
    """Under which name a pair is counted. A cancel that belongs to the flow is neither of its two."""
    pair = seen.case.halts[-2:]
    of = "pair of crashes" if all(halt.how in CRASHES for halt in pair) else "crash and a person's cancel"
    took = sum(halt in seen.took for halt in pair)
    if took == 2:
        return DOUBLE if of == "pair of crashes" else of
    return f"{of}, {'one' if took else 'none'} took effect"


# Many processes


def run(folder: Path, *, workflow: str, input: Json, share: Sequence[Job], processes: int, until: float,
        say: Callable[[str], None]) -> Tally:  # fmt: skip
    """Deal the jobs out and gather what came of them. Jobs that are not begun at `until` (monotonic) are left out."""
    whole, told = Tally(), time.monotonic()
    shares = [(folder, n, workflow, input, share[n::processes], until) for n in range(processes)]
    for one in crew.gather(_be, shares):
        tally = Tally(failures=[{"problems": [one.reason]}]) if isinstance(one, crew.Lost) else one
        whole.merge(tally)
        for failure in tally.failures[:3]:
            say(f"crash sweep: FAILED {failure}")
        if time.monotonic() - told > 15:
            told = time.monotonic()
            say(f"crash sweep: {sum(whole.cases.values())} cases, {len(whole.failures)} failures")
    return whole


def _be(
    tell: Callable[[Tally], None], folder: Path, number: int, workflow: str, input: Json, share: Sequence[Job],
    until: float,
) -> None:  # fmt: skip
    from drill import boundaries, place
    from reconciliation import registry

    try:
        with boundaries.installed():  # kept until the end: a generator that nobody holds takes its wraps off at once
            stage = Stage(place.enter(folder, f"sweep_{os.getpid()}_{number}"), input=input)
            declared = registry.workflow(workflow)
            plain: Plain = {}
            for job in share:
                if time.monotonic() > until:
                    break
                began = time.monotonic()
                tally = do(stage, declared, job, plain)
                tally.seconds = time.monotonic() - began
                tell(tally)
            tell(_verified())
    except BaseException:
        tell(Tally(failures=[{"problems": [traceback.format_exc()[-900:]]}]))


def _verified() -> Tally:
    """The audit log of everything that this process did, as a whole."""
    from audit import verify

    found = [str(problem) for problem in verify.verify(verify.registered_heads())]
    return Tally(failures=[{"problems": [f"audit log: {problem}"]} for problem in found])
