"""The crash sweep: one run at a time, disturbed at chosen boundaries, until nothing is due; then the world is asked.

A case is a flow (what is to happen), a fault of one provider call, and disturbances: a worker is killed, is frozen
while others go on (and wakes up with what it knew), or a person cancels the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

from django.db import connections
from django.db.models import Q

from audit.models import Entry
from drill import book, boundaries
from drill.boundaries import Killed, Moved, Tape
from drill.flows import PERSON, Flow, decide
from drill.place import Place
from drill.world import World, doubles
from reconciliation import jobs, registry, runs, schedules, sweeping, transition, workers
from reconciliation.actors import Actor
from reconciliation.jobs import Terms
from reconciliation.models import Approval, Message, Operation, Run, Slot
from reconciliation.occurrences import SlotState
from reconciliation.providers.base import Json, Repeat
from reconciliation.providers.sql import SqlProvider
from reconciliation.states import RUN_TERMINAL, RunState, State

AGENT = Actor(id="agent:drill", kind="agent")
ROUNDS = 80
CRASHES = ("kill", "kill_unseen", "freeze")
TABLES = [model._meta.db_table for model in (Operation, Run, Approval)]
DUE = [*TABLES, Message._meta.db_table]
NEXT_DUE = f"SELECT least({', '.join(f'(SELECT min(due_at) FROM {table})' for table in DUE)}), aftercall_now()"


@dataclass(frozen=True)
class Halt:
    """One disturbance. `at` counts the boundaries that all workers of the case have passed."""

    how: str  # kill | kill_unseen | freeze | cancel
    at: int


@dataclass(frozen=True)
class Case:
    """One cell of the sweep. `seed` decides the jitter of back-offs and nothing else."""

    flow: str
    fault: str
    action: str
    halts: tuple[Halt, ...] = ()
    seed: int = 0


@dataclass
class Seen:
    """What came of a case."""

    case: Case
    boundaries: list[str]
    ended: str
    effects: int
    problems: list[str]
    took: tuple[Halt, ...] = ()  # which of the disturbances took effect

    def told(self) -> dict[str, Any]:
        """As the report keeps it."""
        return {"case": asdict(self.case), "ended": self.ended, "problems": self.problems}


class Stage:
    """A ledger, doubles of the configured providers and a movable clock, for one case after the other."""

    def __init__(self, place: Place, *, input: Json) -> None:
        self.place, self.input = place, input
        self.real = dict(registry.providers())
        self.number = 0
        self.took: list[Halt] = []
        self.world = World(now=self.now)
        self.tape = Tape()
        self._cast_doubles()

    def now(self) -> Any:
        return transition.database_now()

    def advance(self, by: timedelta) -> None:
        """Let time pass for the database, for send-by deadlines and for the world."""
        self.place.advance(by)
        Moved.seconds = self.place.shift.total_seconds()

    def _cast_doubles(self) -> None:
        self.world.rows = lambda key: book.rows(self.place.superuser, key)
        here = {name: real for name, real in self.real.items() if isinstance(real, SqlProvider)}
        outside = {name: real for name, real in self.real.items() if name not in here}
        cast: dict[str, Any] = dict(doubles(outside, self.world, lambda name: self.tape.boundary(name)))
        for name, real in here.items():
            cast[name] = book.BookDouble(
                name, real.account, real.actions, self.world, lambda name: self.tape.boundary(name)
            )
        self.cast = cast
        for double in cast.values():
            double.wait = self.advance  # type: ignore[method-assign]
        registry.providers = lambda: cast  # type: ignore[assignment,return-value]

    def fresh(self, *, seed: int = 0) -> None:
        """An empty world and a tape on which nothing is planned; the ledger keeps what it has."""
        random.seed(seed)
        self.number += 1
        self.world, self.tape = World(now=self.now, name=self.name), Tape()
        self._cast_doubles()

    @property
    def name(self) -> str:
        """A name that no other case has."""
        return f"{self.place.name}-{self.number}"

    # One case

    def play(self, case: Case, flow: Flow) -> Seen:
        """Run one case to its rest, and say what is wrong with what is left."""
        self.fresh(seed=case.seed)
        for action, faults in flow.script.items():
            self.world.at(action, *faults)
        if case.action:
            self.world.script.setdefault(case.action, []).insert(0, case.fault)
        self._ask_for(flow)
        self.took = []
        self.tape.disturb = {halt.at: self._disturbance(halt, flow) for halt in case.halts}
        with boundaries.recording(self.tape):
            problems = self._come_to_rest(flow)
            if flow.then is not None and not problems:
                self._as_worker(lambda: flow.then(self._run()))  # type: ignore[misc]
                problems += self._come_to_rest(flow)
        ended = self._run()
        if ended is None:
            problems.append("the run was never started")
            return Seen(case, self.tape.passed, "never started", 0, problems, tuple(self.took))
        problems += list(self._problems(ended))
        told = f"{ended.state}{', escalated' if ended.escalated_at else ''}"
        return Seen(case, self.tape.passed, told, len(self.world.effects), problems, tuple(self.took))

    def _ask_for(self, flow: Flow) -> None:
        """Start the run, or make a job whose time has just come: then the beat starts it."""
        if not flow.scheduled:
            runs.start(flow.workflow, tenant="drill", workflow_id=self.name, input=self.input, actor=AGENT)
            return
        at = (self.now() + timedelta(minutes=2)).replace(second=0, microsecond=0)
        terms = Terms(
            expression=f"{at.minute} {at.hour} {at.day} {at.month} *", workflow=flow.workflow, input=self.input
        )
        jobs.create(tenant="drill", name=self.name, terms=terms, token=uuid4(), actor=PERSON)
        self.advance(at - self.now() + timedelta(milliseconds=1))

    def _run(self) -> Any:
        return Run.objects.filter(Q(workflow_id=self.name) | Q(workflow_id__startswith=f"{self.name}@")).first()

    def _disturbance(self, halt: Halt, flow: Flow) -> Callable[[], None]:
        """What is done at the boundary; it is noted where it takes effect."""

        def disturb() -> None:
            if (halt.how == "freeze" and self._freeze(flow)) or (halt.how == "cancel" and self._cancel()):
                self.took.append(halt)
            elif halt.how.startswith("kill"):
                self.took.append(halt)
                self._die(seen=halt.how == "kill")

        return disturb

    def _die(self, *, seen: bool) -> None:
        name = workers._known.get(workers.os.getpid())
        if seen and name:  # another process of this machine can tell that the pid is gone
            self.place.superuser.execute(
                "UPDATE reconciliation_worker SET dead_at = aftercall_now() WHERE name = %s", [name]
            )
        self.tape.kill()

    def _freeze(self, flow: Flow) -> bool:
        """The worker sleeps, in the middle of whatever it does; others go on until nothing is due; it wakes up.

        Not within a transaction: the others would have to wait for its locks, and there is one connection here.
        """
        if connections["default"].in_atomic_block:
            return False
        mine = dict(workers._known)
        workers._known.clear()
        try:
            self._come_to_rest(flow)
        finally:
            workers._known.clear()
            workers._known.update(mine)
        return True

    def _cancel(self) -> bool:
        """A person cancels in another process, at this very moment; refused where the run has ended."""
        run = self._run()
        if run is None or connections["default"].in_atomic_block:
            return False
        was, self.tape.disturb = self.tape.disturb, {}
        before = len(self.tape.passed)
        try:
            runs.cancel(run.pk, actor=PERSON, version=run.version, reason="drill")
        except transition.TransitionRefused:
            return False
        finally:
            del self.tape.passed[before:]
            self.tape.disturb = was
        return True

    def _as_worker(self, work: Callable[[], Any]) -> Any:
        """Do it; a killed worker leaves what it left, and the next one has a name of its own."""
        try:
            return work()
        except Killed:
            self.tape.dead = False
            workers._known.clear()
            return 1
        except transition.TransitionRefused:
            return 0

    def _come_to_rest(self, flow: Flow) -> list[str]:
        def people() -> bool:
            return bool(flow.decide) and bool(self._as_worker(lambda: decide(self._run(), flow.decide)))

        return self.rest(people, beat=flow.scheduled)

    def rest(
        self, people: Callable[[], bool] = lambda: False, *, beat: bool = False, rounds: int = ROUNDS
    ) -> list[str]:
        """Sweep, let people act and time pass until nothing is due. Returns what is wrong where that does not end."""
        for _ in range(rounds):
            if beat:
                self._as_worker(schedules.tick)
            self._as_worker(sweeping.sweep)
            if people():
                continue
            due, now = self._next_due()
            if due is None and not (beat and self._slot_waits()):
                return []
            due = due or now
            if due > now:
                self.advance(due - now + timedelta(milliseconds=1))
        return [f"still due after {rounds} sweeps"]

    def _slot_waits(self) -> bool:
        """Whether the beat has something to decide or to start, which a killed one left."""
        waiting = Slot.objects.filter(job__name=self.name, state=SlotState.DUE).exists()
        return waiting or self._run() is None

    def _next_due(self) -> tuple[Any, Any]:
        """When something is due next, and the time now."""
        row = self.place.superuser.execute(NEXT_DUE).fetchone()
        assert row is not None
        return row[0], row[1]

    # What must be true of it

    def _problems(self, run: Run) -> Iterator[str]:
        self.world.time_passes()
        operations = list(Operation.objects.filter(run=run).order_by("id"))
        told = list(
            Operation.objects.filter(workflow_type=book.BY_MESSAGE, workflow_id__in=[o.key for o in operations])
        )
        for operation in [*operations, *told]:
            yield from self._operation_problems(operation)
        yield from self._run_problems(run, {o.step: o for o in operations})
        yield from self._message_problems(operations)
        approvals = list(Approval.objects.filter(operation__run=run))
        yield from self._audit_problems([run, *operations, *told, *approvals])
        yield from self._slot_problems(run)
        known = {operation.key for operation in [*operations, *told]}
        for effect in self.world.effects:
            if effect.key not in known:
                yield f"{effect.action} happened and the ledger knows nothing of it"

    def _operation_problems(self, operation: Operation) -> Iterator[str]:
        effects, name = self.world.count(operation.key), f"{operation.step} ({operation.state})"
        spec = self.real[operation.provider].actions[operation.action]
        if effects > 1:
            yield f"{name}: {effects} effects"
        if operation.state in (State.PENDING, State.READY):
            yield f"{name}: left so with nothing due"
        if operation.state in (State.AMBIGUOUS, State.FAILED_RETRYABLE) and not operation.escalated_at:
            yield f"{name}: nobody will look"
        if (
            operation.state in (State.FAILED_RETRYABLE, State.FAILED_TERMINAL)
            and effects
            and not operation.escalated_at
        ):
            yield f"{name}: and it happened"
        if operation.state == State.SUCCEEDED and not effects and spec.repeat is not Repeat.READ:
            yield f"{name}: and it did not happen"

    def _run_problems(self, run: Run, operations: dict[str, Operation]) -> Iterator[str]:
        if run.state not in RUN_TERMINAL and not run.escalated_at:
            yield f"run {run.state}: nobody holds it and nobody is called"
        applied = [o for o in operations.values() if not o.undo_of_id and self.world.count(o.key)]
        quiet = {o.pk for o in applied if not _loud(o)}  # with the others a person was called
        undone = {o.undo_of_id for o in operations.values() if o.undo_of_id and self.world.count(o.key)}
        if run.state == RunState.FAILED and quiet:
            yield "run failed: and something was applied"
        if run.state == RunState.COMPENSATED and not quiet <= undone <= {o.pk for o in applied}:
            yield "run compensated: and not all that was applied is undone"
        if run.state == RunState.SUCCEEDED:
            steps = {step.name for step in registry.workflow(run.workflow_type).effects}
            if {o.step for o in operations.values() if o.state == State.SUCCEEDED} != steps:
                yield "run succeeded: and not every step has"

    def _message_problems(self, operations: list[Operation]) -> Iterator[str]:
        """A message is there if, and only if, the effect that put it in was committed; and it was published once."""
        for operation in operations:
            if "tell" not in operation.request:
                continue
            states = list(Message.objects.filter(workflow_id=operation.key).values_list("state", flat=True))
            expected = ["published"] * self.world.count(operation.key)
            if states != expected:
                yield f"{operation.step} ({operation.state}): its messages are {states}, not {expected}"

    def _slot_problems(self, run: Run) -> Iterator[str]:
        slots = list(Slot.objects.filter(job__name=self.name, job__tenant="drill"))
        if "@" in run.workflow_id and [(slot.state, slot.run_id) for slot in slots] != [("started", run.pk)]:
            yield f"the scheduled time has {[(slot.state, slot.reason_code) for slot in slots]}"
        if Run.objects.filter(workflow_id__startswith=f"{self.name}@").count() > 1:
            yield "more than one run stands for one scheduled time"

    def _audit_problems(self, rows: list[Any]) -> Iterator[str]:
        subjects = {str(row.subject): row.version for row in rows}
        written: dict[str, list[int]] = {}
        for subject, version in Entry.objects.filter(subject__in=subjects, event="transition").values_list(
            "subject", "version"
        ):
            written.setdefault(subject, []).append(version)
        for subject, version in subjects.items():
            if sorted(written.get(subject, [])) != list(range(1, version + 1)):
                yield f"{subject}: {version} changes, audit entries for {sorted(written.get(subject, []))}"


LOUD = ("applied_after_all", "seen_after_all", "unknown_after_all")


def _loud(operation: Operation) -> bool:
    """Called not applied, seen applied later: a process that froze with its hand on the socket. A person is called."""
    return operation.escalation_reason in LOUD and operation.escalated_at is not None
