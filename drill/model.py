"""The part `model`: random steps against a small reference model of what may be known, shrunk where they disagree.

The model keeps what a reader would keep on paper: what was asked for, what really happened, what the ledger said last.
It knows no lease, no version and no SQL.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import uuid4

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from audit.models import Entry
from drill import boundaries, place
from drill.boundaries import Killed
from drill.crash import TABLES, Stage
from drill.duplicates import ACTIONS
from drill.flows import CONSENTED, PERSON
from drill.parts import Asked, Told
from drill.world import FAULTS
from examples.order_desk.workflow import DAMAGED_ITEM
from reconciliation import actions, executor, runs, schedules, sweeping, transition, workers
from reconciliation.actors import Actor, Permission
from reconciliation.executor import FingerprintMismatch, Intent
from reconciliation.keys import Identity
from reconciliation.models import Approval, Operation, Run
from reconciliation.providers.base import Repeat
from reconciliation.states import PAIRS, Kind, State

KINDS = tuple(ACTIONS)
AGENT = Actor(id="agent:model", kind="agent")
OTHER = Actor(id="person:2", kind="person", name="Otto Other", permissions=frozenset(Permission))
PRESSED = (
    "look_up", "resolve_applied", "resolve_not_applied", "retry", "send_again", "new_intent", "compensate", "terminate",
    "withdraw",
)  # fmt: skip
ON_RUNS = ("resume", "cancel", "compensate_run", "waive_undo")
FINAL = frozenset({State.SUCCEEDED, State.FAILED_TERMINAL, State.TERMINATED})
CLAIMABLE = frozenset({State.READY, State.FAILED_RETRYABLE})
# What one call with this fault must leave, whatever the action: the decision table on a page.
EXPECTED = {
    "no fault": State.SUCCEEDED,
    "not sent": State.FAILED_RETRYABLE,
    "own fault": State.FAILED_RETRYABLE,
    "unavailable": State.FAILED_RETRYABLE,
    "rate limited": State.FAILED_RETRYABLE,
    "rejected": State.FAILED_TERMINAL,
    "unauthorized": State.FAILED_TERMINAL,
}
NEVER = "9000-01-01"  # when what an earlier example left is due


@dataclass
class Paper:
    """What is noted of one operation."""

    state: str
    version: int
    attempts: int
    duplicates_accepted: bool = False


@dataclass
class Model:
    """The reference: identities that were asked for and with which request, and the last word on each operation."""

    wishes: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    papers: dict[int, Paper] = field(default_factory=dict)


def machine(stage: Stage, input: dict[str, Any]) -> type[RuleBasedStateMachine]:
    """The state machine over this stage."""

    class Ledger(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            stage.fresh()
            workers._known.clear()
            self.model = Model()
            self.recording = boundaries.recording(stage.tape)
            self.recording.__enter__()

        def teardown(self) -> None:
            self.recording.__exit__(None, None, None)
            with stage.place.superuser.transaction():
                stage.place.superuser.execute("SET LOCAL session_replication_role = replica")
                for table in TABLES:
                    stage.place.superuser.execute(f"UPDATE {table} SET due_at = '{NEVER}' WHERE due_at IS NOT NULL")
            stage.advance(-stage.place.shift)

        # What is asked of it

        @rule(
            number=st.integers(0, 2), kind=st.sampled_from(KINDS), version=st.integers(1, 2),
            amount=st.sampled_from((4200, 4200, 4201)), fault=st.sampled_from(tuple(FAULTS)), kill=st.integers(-9, 9),
        )  # fmt: skip
        def submit(self, number: int, kind: str, version: int, amount: int, fault: str, kill: int) -> None:
            provider, action, rest = ACTIONS[kind]
            order = f"{stage.name}-{number}"
            request = {"order": order, **rest} | ({"amount": amount} if "amount" in rest else {"subject": f"s{amount}"})
            identity = Identity(
                tenant="drill", workflow_type="model", workflow_id=order, step=action, business_object=order,
                intent_version=version,
            )  # fmt: skip
            known = Operation.objects.filter(
                workflow_id=order, step=action, intent_version=version, workflow_type="model"
            ).first()
            stage.world.script.clear()
            stage.world.at(action, fault)
            before = sum(stage.world.calls.values())
            intent = Intent(identity=identity, provider=provider, action=action, request=request)
            outcome = self._do(lambda: executor.perform(intent, actor=AGENT), kill=kill)
            sent = sum(stage.world.calls.values()) - before
            if known is not None and known.request != request:
                assert outcome is FingerprintMismatch or kill >= 0, outcome
                assert sent == 0, "another request under a known identity was sent"
            elif known is not None and known.state not in CLAIMABLE:
                assert sent == 0, f"a {known.state} operation was sent because it was asked for again"
            elif known is None and kill < 0 and isinstance(outcome, executor.Outcome):
                self._as_the_table_says(outcome, fault)
            stage.world.script.clear()

        def _as_the_table_says(self, outcome: Any, fault: str) -> None:
            expected = EXPECTED.get(fault, State.AMBIGUOUS)
            assert outcome.state == expected, f"{fault}: {outcome.state}, the table says {expected}"

        @rule(
            workflow=st.sampled_from((DAMAGED_ITEM, CONSENTED)),
            number=st.integers(0, 1),
            fault=st.sampled_from(tuple(FAULTS)),
        )
        def start(self, workflow: Any, number: int, fault: str) -> None:
            stage.world.at(workflow.effects[number * 2].action, fault)
            self._do(lambda: runs.start(
                workflow.name, tenant="drill", workflow_id=f"{stage.name}-{number}", input=input, actor=AGENT
            ))  # fmt: skip

        @rule(seconds=st.sampled_from((1, 5, 31, 45, 60, 600, 4000, 90_000)), kill=st.integers(-15, 30))
        def time_passes_and_workers_sweep(self, seconds: int, kill: int) -> None:
            stage.advance(timedelta(seconds=seconds))
            stage.world.time_passes()
            self._do(schedules.tick)
            self._do(sweeping.sweep, kill=kill)

        @rule(kill=st.integers(-15, 60))
        def workers_sweep(self, kill: int) -> None:
            self._do(sweeping.sweep, kill=kill)

        # What people do

        @rule(
            which=st.integers(0, 20),
            name=st.sampled_from(PRESSED),
            old=st.booleans(),
            who=st.sampled_from((PERSON, OTHER)),
        )
        def press(self, which: int, name: str, old: bool, who: Actor) -> None:
            self._press(self._pick(Operation, which), name, who, old=old)

        @rule(which=st.integers(0, 20), name=st.sampled_from(ON_RUNS), old=st.booleans())
        def press_on_a_run(self, which: int, name: str, old: bool) -> None:
            self._press(self._pick(Run, which), name, PERSON, old=old)

        @rule(
            which=st.integers(0, 20),
            name=st.sampled_from(("approve", "approve", "deny", "withdraw")),
            who=st.sampled_from((PERSON, OTHER)),
        )
        def answer(self, which: int, name: str, who: Actor) -> None:
            self._press(self._pick(Approval, which), name, who, old=False)

        def _press(self, subject: Any, name: str, who: Actor, *, old: bool) -> None:
            if subject is None:
                return
            version = subject.version - 1 if old else subject.version
            shown = next((p for p in actions.previews(subject, actor=who) if p.action == name), None)
            inputs = {i.name: i.choices[0][0] if i.choices else "x" for i in shown.inputs} if shown else {}
            press = actions.Press(action=name, token=uuid4(), version=version, reason="model", inputs=inputs)
            if (
                isinstance(subject, Approval)
                and subject.action == "send_again"
                and name == "approve"
                and subject.operation
            ):
                self.model.papers[subject.operation.pk].duplicates_accepted = True
            told = self._do(lambda: actions.act(subject, press, actor=who))
            if shown is not None and not shown.allowed and isinstance(told, actions.Answer):
                assert told.verdict != "done", f"{name} was shown as impossible ({shown.why}) and done"

        # How it is done

        def _all(self, model: Any) -> Any:
            path = "operation__workflow_id" if model is Approval else "workflow_id"
            return model.objects.filter(tenant="drill", **{f"{path}__startswith": f"{stage.name}-"})

        def _pick(self, model: Any, which: int) -> Any:
            found = list(self._all(model).order_by("pk"))
            return found[which % len(found)] if found else None

        def _do(self, work: Callable[[], Any], *, kill: int = -1) -> Any:
            """Do it as a worker that may be killed. What it answered, or the kind of refusal."""
            if kill >= 0:
                stage.tape.disturb = {len(stage.tape.passed) + kill: lambda: stage._die(seen=kill % 2 == 0)}
            try:
                return work()
            except Killed:
                stage.tape.dead = False
                workers._known.clear()
                return Killed
            except (transition.TransitionRefused, FingerprintMismatch, runs.RunMismatch, actions.NotAllowed) as refusal:
                return type(refusal)
            finally:
                stage.tape.disturb = {}

        # What must be true after every step

        @invariant()
        def the_ledger_agrees_with_the_paper(self) -> None:
            for operation in self._all(Operation):
                effects = stage.world.count(operation.key)
                paper = self.model.papers.setdefault(operation.pk, Paper("", 0, 0))
                self._check(operation, effects, paper)
                paper.state, paper.version, paper.attempts = operation.state, operation.version, operation.attempts

        def _check(self, operation: Operation, effects: int, paper: Paper) -> None:
            name = f"{operation.step} ({operation.state})"
            assert effects <= 1 or paper.duplicates_accepted, f"{name}: {effects} effects"
            assert stage.world.calls[operation.key] <= operation.attempts, f"{name}: a call that is not on record"
            assert operation.version >= paper.version, f"{name}: an older version came back"
            assert operation.attempts >= paper.attempts, f"{name}: an attempt was forgotten"
            if paper.state in FINAL and operation.state != paper.state:
                assert operation.state == State.SUCCEEDED, f"{name}: left {paper.state}"
                assert operation.escalated_at, f"{name}: {paper.state} was contradicted quietly"
            if operation.state == State.SUCCEEDED and operation.basis != "asserted":
                assert effects or self._is_so(operation), f"{name}, basis {operation.basis}: and it did not happen"
            if operation.state in (State.FAILED_TERMINAL, State.FAILED_RETRYABLE) and effects:
                assert operation.basis == "asserted" or operation.escalated_at, f"{name}: and it happened"

        def _is_so(self, operation: Operation) -> bool:
            """Of what is natural the target's state counts: another operation may have brought it there before."""
            natural = stage.real[operation.provider].actions[operation.action].repeat is Repeat.NATURAL
            return natural and stage.world.is_so(operation.action, operation.request)

        @invariant()
        def every_change_is_a_move_of_the_table_with_one_entry(self) -> None:
            for kind, model in ((Kind.OPERATION, Operation), (Kind.RUN, Run)):
                for row in self._all(model):
                    moves = list(
                        Entry.objects.filter(subject=str(row.subject), event="transition").order_by("version")
                        .values_list("version", "from_state", "to_state")
                    )  # fmt: skip
                    assert [m[0] for m in moves] == list(range(1, row.version + 1)), f"{row.subject}: {moves}"
                    for _, source, target in moves:
                        assert source == target or (kind, source, target) in PAIRS, (
                            f"{row.subject}: {source} -> {target}"
                        )
                    assert moves[-1][2] == row.state

    return Ledger


def play(stage: Stage, input: dict[str, Any], *, examples: int, steps: int, seed: int, shrink: bool = True) -> None:
    """Raise AssertionError with the shortest story that ends in a disagreement."""
    run_state_machine_as_test(
        seeded(seed)(machine(stage, input)),
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, database=None, print_blob=False,
            suppress_health_check=list(HealthCheck), phases=(Phase.generate, *([Phase.shrink] if shrink else [])),
        ),
    )  # fmt: skip


EXAMPLES, STEPS = 2000, 50
QUICK_EXAMPLES, QUICK_STEPS = 12, 20


def part(asked: Asked) -> Told:
    """So many examples, over several processes."""
    examples, steps = (QUICK_EXAMPLES, QUICK_STEPS) if asked.quick else (EXAMPLES, STEPS)
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    each = -(-examples // asked.processes)
    crew = [
        context.Process(target=_be, args=(asked, n, each, steps, results), daemon=True) for n in range(asked.processes)
    ]
    for one in crew:
        one.start()
    failures = [failure for _ in crew if (failure := results.get())]
    for one in crew:
        one.join()
    seeds = [asked.seed + n for n in range(asked.processes)]
    return Told(
        name="random steps against a model",
        asks="Does the ledger ever disagree with a small model of what may be known, whatever happens in which order?",
        counts={"examples": each * len(crew), "steps an example, at most": steps},
        failures=failures,
        notes=[f"Seeds {seeds}."],
    )


def _be(asked: Asked, number: int, examples: int, steps: int, results: Any) -> None:
    from drill.crashes import ORDER

    failure = ""
    try:
        with boundaries.installed():
            stage = Stage(place.enter(asked.folder, f"model_{os.getpid()}"), input=ORDER)
            play(stage, ORDER, examples=examples, steps=steps, seed=asked.seed + number)
    except BaseException:
        failure = traceback.format_exc()[-3000:]
    results.put(failure)
