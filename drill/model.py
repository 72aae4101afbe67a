"""The part `model`: random steps against a small reference model of what may be known, shrunk where they disagree.

What is noted and compared is in reference.py; here is what is asked of the ledger, in any order.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from operator import or_
from typing import Any
from uuid import uuid4

from django.db.models import Max, Q
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from audit.models import Entry
from drill import boundaries, crew, place
from drill.boundaries import Killed
from drill.crash import TABLES, Stage
from drill.duplicates import ACTIONS
from drill.flows import CONSENTED, PERSON
from drill.parts import Asked, Told
from drill.reference import Reference
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
    "withdraw", "close",
)  # fmt: skip
ON_RUNS = ("resume", "cancel", "compensate_run", "waive_undo")
OFFERED = "what is offered"
WHICH, OLD = st.integers(0, 20), st.sampled_from((False, False, True))
PEOPLE = {"Dana": PERSON, "Otto": OTHER}
WHO = st.sampled_from(tuple(PEOPLE))  # by name, so that a story stays short
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
PATHS: dict[Any, tuple[str, ...]] = {
    Operation: ("workflow_id",), Run: ("workflow_id",), Approval: ("operation__workflow_id", "run__workflow_id"),
}  # fmt: skip
NEVER = "9000-01-01"  # when what an earlier example left is due


def machine(stage: Stage, input: dict[str, Any]) -> type[RuleBasedStateMachine]:
    """The state machine over this stage."""

    class Ledger(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            stage.fresh()
            workers._known.clear()
            self.reference = Reference(stage.now())
            self.before = {model: model.objects.aggregate(newest=Max("pk"))["newest"] or 0 for model in PATHS}
            self.recording = boundaries.recording(stage.tape)
            self.recording.__enter__()

        def teardown(self) -> None:
            self.recording.__exit__(None, None, None)
            with stage.place.superuser.transaction():
                stage.place.superuser.execute("SET LOCAL session_replication_role = replica")
                for table in TABLES:
                    stage.place.superuser.execute(f"UPDATE {table} SET due_at = '{NEVER}' WHERE due_at < '{NEVER}'")
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
            known = self._operation(order, action, version)
            wish = self.reference.wishes.get((order, action, version))
            stage.world.script.clear()
            stage.world.at(action, fault)
            before = sum(stage.world.calls.values())
            intent = Intent(identity=identity, provider=provider, action=action, request=request)
            outcome = self._do(lambda: executor.perform(intent, actor=AGENT), kill=kill)
            sent = sum(stage.world.calls.values()) - before
            if wish is not None and wish != request:
                assert outcome is FingerprintMismatch or kill >= 0, outcome
                assert sent == 0, "another request under a known identity was sent"
            elif known is not None and known.state not in CLAIMABLE:
                assert sent == 0, f"a {known.state} operation was sent because it was asked for again"
            elif known is None and kill < 0 and isinstance(outcome, executor.Outcome):
                self._as_the_table_says(outcome, fault)
            stage.world.script.clear()
            there = self._operation(order, action, version)
            if there is not None:
                kept = self.reference.wishes.setdefault((order, action, version), request)
                assert there.request == kept, "what is recorded is not what was asked for first"

        def _operation(self, order: str, action: str, version: int) -> Operation | None:
            return Operation.objects.filter(
                workflow_id=order, step=action, intent_version=version, workflow_type="model"
            ).first()

        def _as_the_table_says(self, outcome: Any, fault: str) -> None:
            expected = EXPECTED.get(fault, State.AMBIGUOUS)
            assert outcome.state == expected, f"{fault}: {outcome.state}, the table says {expected}"

        @rule(
            workflow=st.sampled_from((DAMAGED_ITEM, CONSENTED)),
            number=st.integers(0, 1),
            fault=st.sampled_from((*["no fault"] * len(FAULTS), *FAULTS)),
            for_whom=st.sampled_from(("", PERSON.id, OTHER.id)),
        )
        def start(self, workflow: Any, number: int, fault: str, for_whom: str = "") -> None:
            stage.world.at(workflow.effects[number * 2].action, fault)
            run = self._do(lambda: runs.start(
                workflow.name, tenant="drill", workflow_id=f"{stage.name}-{number}", input=input, actor=AGENT,
                on_behalf_of=for_whom,
            ))  # fmt: skip
            self.reference.starters.setdefault(run.pk, frozenset({AGENT.id, for_whom}))

        @rule(seconds=st.sampled_from((1, 5, 31, 45, 60, 600, 4000, 90_000)), kill=st.integers(-30, 30))
        def time_passes_and_workers_sweep(self, seconds: int, kill: int) -> None:
            stage.advance(timedelta(seconds=seconds))
            stage.world.time_passes()
            self._do(schedules.tick)
            self._do(sweeping.sweep, kill=kill)

        @rule(kill=st.integers(-60, 60))
        def workers_sweep(self, kill: int) -> None:
            self._do(sweeping.sweep, kill=kill)

        # What people do

        @rule(which=WHICH, name=st.sampled_from((OFFERED, *PRESSED)), old=OLD, who=WHO)
        def press(self, which: int, name: str, old: bool, who: str) -> None:
            self._press(self._pick(Operation, which), name, PEOPLE[who], old=old)

        @rule(which=WHICH, name=st.sampled_from((OFFERED, *ON_RUNS)), old=OLD, who=WHO)
        def press_on_a_run(self, which: int, name: str, old: bool, who: str) -> None:
            self._press(self._pick(Run, which), name, PEOPLE[who], old=old)

        @rule(which=WHICH, name=st.sampled_from((OFFERED, "approve", "approve", "deny", "withdraw")), old=OLD, who=WHO)
        def answer(self, which: int, name: str, old: bool, who: str) -> None:
            self._press(self._pick(Approval, which), name, PEOPLE[who], old=old)

        @rule(which=WHICH, who=WHO)
        def press_what_is_offered(self, which: int, who: str) -> None:
            kind = (Operation, Approval, Run, Approval)[which % 4]
            self._press(self._pick(kind, which), OFFERED, PEOPLE[who], old=False, turn=which)

        def _press(self, subject: Any, name: str, who: Actor, *, old: bool, turn: int = 0) -> None:
            if subject is None:
                return
            version = subject.version - 1 if old else subject.version
            offered = actions.previews(subject, actor=who)
            if name == OFFERED:
                allowed = [p.action for p in offered if p.allowed] or [offered[0].action]
                name = allowed[turn % len(allowed)]
            shown = next((p for p in offered if p.action == name), None)
            inputs = {i.name: i.choices[0][0] if i.choices else "x" for i in shown.inputs} if shown else {}
            press = actions.Press(action=name, token=uuid4(), version=version, reason="model", inputs=inputs)
            before = sum(stage.world.calls.values())
            told = self._do(lambda: actions.act(subject, press, actor=who), who=who.id)
            done = isinstance(told, actions.Answer) and told.verdict == "done"
            if done and shown is not None and not shown.allowed:
                raise AssertionError(f"{name} was shown as impossible ({shown.why}) and done")
            self.reference.pressed(
                subject, name, who, old=old, done=done, fresh=type(subject).objects.get(pk=subject.pk),
                calls=sum(stage.world.calls.values()) > before, now=stage.now(),
            )  # fmt: skip

        # How it is done

        def _all(self, model: Any) -> Any:
            mine = [Q(**{f"{path}__startswith": f"{stage.name}-"}) for path in PATHS[model]]
            # By primary key: what earlier examples left is not read again at each step.
            return model.objects.filter(reduce(or_, mine), tenant="drill", pk__gt=self.before[model]).order_by("pk")

        def _pick(self, model: Any, which: int) -> Any:
            found = sorted(self._all(model), key=_waits_for_a_person, reverse=True)
            return found[which % len(found)] if found else None

        def _do(self, work: Callable[[], Any], *, kill: int = -1, who: str = "") -> Any:
            """Do it as a worker that may be killed. What it answered, or the kind of refusal."""
            self.reference.begin(stage.now(), who)
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
            now, runs_of = stage.now(), dict[int, list[Operation]]()
            operations = {operation.pk: operation for operation in self._all(Operation)}
            effects = {pk: stage.world.count(operation.key) for pk, operation in operations.items()}
            calls = {pk: stage.world.calls[operation.key] for pk, operation in operations.items()}
            for pk, operation in operations.items():
                spec = stage.real[operation.provider].actions[operation.action]
                # Of what is natural the target's state counts: another operation may have brought it there before.
                natural = spec.repeat is Repeat.NATURAL and stage.world.is_so(operation.action, operation.request)
                self.reference.check_operation(
                    operation, effects=effects[pk], calls=calls[pk], is_so=natural, repeat=spec.repeat
                )
                runs_of.setdefault(operation.run_id or 0, []).append(operation)
            for approval in self._all(Approval):
                self.reference.check_approval(approval, operations.get(approval.operation_id or 0), now)
            for run in self._all(Run):
                self.reference.check_run(run, runs_of.get(run.pk, []), effects=effects, calls=calls)

        @invariant()
        def every_change_is_a_move_of_the_table_with_one_entry(self) -> None:
            for kind, model in ((Kind.OPERATION, Operation), (Kind.RUN, Run), (Kind.APPROVAL, Approval)):
                rows = {str(row.subject): row for row in self._all(model)}
                moves: dict[str, list[tuple[int, str, str]]] = {subject: [] for subject in rows}
                entries = Entry.objects.filter(subject__in=rows, event="transition").order_by("version")
                for subject, *move in entries.values_list("subject", "version", "from_state", "to_state"):
                    moves[subject].append((move[0], move[1], move[2]))
                for subject, row in rows.items():
                    self._each_is_in_the_table(kind, row, moves[subject])

        def _each_is_in_the_table(self, kind: Kind, row: Any, moves: list[tuple[int, str, str]]) -> None:
            assert [m[0] for m in moves] == list(range(1, row.version + 1)), f"{row.subject}: {moves}"
            for _, source, target in moves:
                assert source == target or (kind, source, target) in PAIRS, f"{row.subject}: {source} -> {target}"
            assert moves[-1][2] == row.state

    return Ledger


def _waits_for_a_person(row: Any) -> bool:
    """These are picked first: most rows of a run wait for nobody, and most presses on them are refused."""
    return row.state == "waiting" if isinstance(row, Approval) else row.escalated_at is not None


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
    each = -(-examples // asked.processes)
    shares = [(asked, n, each, steps) for n in range(asked.processes)]
    ended = list(crew.gather(_be, shares))
    failures = [one.reason if isinstance(one, crew.Lost) else one for one in ended if one]
    seeds = [asked.seed + n for n in range(asked.processes)]
    return Told(
        name="random steps against a model",
        asks="Does the ledger ever disagree with a small model of what may be known, whatever happens in which order?",
        counts={"examples": each * len(shares), "steps an example, at most": steps},
        failures=failures,
        notes=[f"Seeds {seeds}."],
    )


def _be(tell: Callable[[str], None], asked: Asked, number: int, examples: int, steps: int) -> None:
    from drill.crashes import ORDER

    failure = ""
    try:
        with boundaries.installed():
            stage = Stage(place.enter(asked.folder, f"model_{os.getpid()}"), input=ORDER)
            play(stage, ORDER, examples=examples, steps=steps, seed=asked.seed + number)
    except BaseException:
        failure = traceback.format_exc()[-3000:]
    tell(failure)
