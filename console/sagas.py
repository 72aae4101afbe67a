"""A run as its pages draw it: stages of steps with their undos and decisions beside them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, Exists, Min, OuterRef, QuerySet, Sum

from console.ledger import spec_of
from console.obstacles import Obstacle, no_handler, obstacles, undos_before
from reconciliation import case_wording, choosing, registry, sealing, wording
from reconciliation.models import Chosen, Operation, Run
from reconciliation.progress import UNDO, Progress, cannot_be_undone, has_effect
from reconciliation.states import RUN_TERMINAL, RunState, State
from reconciliation.wording import Label
from reconciliation.workflows import Choice, Step, StepKind, Workflow

UNREADABLE = "(sealed under a key that is not configured)"
NOT_BEGUN = Label("", "not begun", "calm")


@dataclass(frozen=True)
class UndoView:
    """How a step is taken back: the operation that does so where there is one, else what stands in its place."""

    label: Label
    note: str
    operation: Operation | None = None
    never: bool = False  # nothing takes this back


@dataclass(frozen=True)
class Refused:
    """A proposal that does not count: why, and what of it may be seen. A name that it made up is masked as well."""

    version: int
    at: datetime
    problem: str
    shown: list[tuple[str, str]]
    hidden: tuple[str, ...]


@dataclass(frozen=True)
class Decision:
    """What a choice step proposed: the version that counts, its shown fields, and what was refused or given up."""

    version: int
    at: datetime | None
    shown: list[tuple[str, str]]
    hidden: tuple[str, ...]
    reason: str  # why it was decided afresh
    refused: list[Refused]
    unanswered: int
    given_up: list[tuple[int, str]]  # (version, why)


@dataclass(frozen=True)
class StepView:
    """One step of a run: declared, and with its operation or decision where there is one."""

    name: str
    label: Label
    note: str
    pivot: bool = False
    operation: Operation | None = None
    headline: str = ""
    after: tuple[str, ...] = ()  # told where it is not simply the step before it
    undo: UndoView | None = None
    decision: Decision | None = None


@dataclass(frozen=True)
class Stage:
    """Steps that start side by side, since none of them needs another."""

    steps: list[StepView]
    last_way_back: bool = False  # what stands below it waits for the pivot: there the way is forward only


@dataclass(frozen=True)
class Saga:
    """Everything that a run's page draws of its steps."""

    stages: list[Stage]
    obstacles: list[Obstacle]
    never: list[tuple[str, str]]  # (step, reason) of what nothing takes back

    @property
    def steps(self) -> list[StepView]:
        return [step for stage in self.stages for step in stage.steps]

    @property
    def operations(self) -> list[Operation]:
        """Forward ones and undos."""
        found = [operation for step in self.steps for operation in (step.operation, step.undo and step.undo.operation)]
        return [operation for operation in found if operation]


def saga(run: Run) -> Saga:
    """Read a run's steps, by its declaration, or by its operations alone where that is not configured here any more."""
    try:
        workflow = registry.workflow(run.workflow_type, run.workflow_version)
    except registry.Unregistered:
        return _undeclared(run)
    progress = Progress.of(run, workflow)
    decisions = _decisions(progress)
    views = {step.name: _view(progress, step, decisions) for step in workflow.steps}
    return Saga(
        stages=_stages(workflow, views) + _strangers(progress),
        obstacles=obstacles(progress),
        never=cannot_be_undone(workflow),
    )


def run_steps(run: Run) -> list[StepView]:
    """The steps in their order, for the small drawing beside a case."""
    return saga(run).steps


# Stages


def _stages(workflow: Workflow, views: Mapping[str, StepView]) -> list[Stage]:
    depth: dict[str, int] = {}
    for step in workflow.steps:
        depth[step.name] = 1 + max((depth[needed] for needed in workflow.needs(step)), default=-1)
    # What waits for the pivot stands below its line, whatever its depth: other steps may run before it or without it.
    places = {step.name: (workflow.after_pivot(step), depth[step.name]) for step in workflow.steps}
    last = max((place for place in places.values() if not place[0]), default=None)
    return [
        Stage(
            [views[name] for name, at in places.items() if at == place],
            last_way_back=workflow.pivot is not None and place == last,
        )
        for place in sorted(set(places.values()))
    ]


def _strangers(progress: Progress) -> list[Stage]:
    """Operations of the run that its declaration does not name."""
    known = {step.name for step in progress.workflow.steps}
    known |= {UNDO + name for name in known}
    left = [operation for name, operation in progress.operations.items() if name not in known]
    return [Stage([_of_operation(operation)]) for operation in left]


def _undeclared(run: Run) -> Saga:
    newest = {o.step: o for o in Operation.objects.filter(run=run).order_by("intent_version", "id")}
    steps = [o for o in newest.values() if not o.step.startswith(UNDO)]
    views = [_of_operation(o, undo=newest.get(UNDO + o.step)) for o in sorted(steps, key=lambda o: o.pk)]
    return Saga([Stage([view]) for view in views], [] if run.state in RUN_TERMINAL else no_handler(run), [])


# One step


def _view(progress: Progress, step: Step | Choice, decisions: Mapping[str, Decision]) -> StepView:
    after = _told_after(progress.workflow, step)
    if isinstance(step, Choice):
        return _choice(progress, step, decisions.get(step.name), after)
    operation, pivot = progress.operations.get(step.name), step.kind is StepKind.PIVOT
    undo = _undo(progress, step)
    if operation is None:
        return StepView(step.name, NOT_BEGUN, "not begun", pivot, after=after, undo=undo)
    return _of_operation(operation, pivot=pivot, after=after, view=undo)


def _of_operation(
    operation: Operation,
    *,
    undo: Operation | None = None,
    pivot: bool = False,
    after: tuple[str, ...] = (),
    view: UndoView | None = None,
) -> StepView:
    label = wording.state_label(operation.state, escalated=operation.escalated_at is not None)
    headline = case_wording.headline(operation, spec_of(operation))
    view = view or (_undo_operation(undo) if undo else None)
    return StepView(operation.step, label, _note(operation, label), pivot, operation, headline, after, view)


def _note(operation: Operation, label: Label) -> str:
    if operation.state in (State.SUCCEEDED, State.READY):
        return operation.provider_operation_id or label.word
    return f"{label.word}, attempt {operation.attempts}" if operation.attempts else label.word


def _told_after(workflow: Workflow, step: Step | Choice) -> tuple[str, ...]:
    place = workflow.steps.index(step)
    usual = (workflow.steps[place - 1].name,) if place else ()
    needed = workflow.needs(step)
    return () if needed == usual else needed or ("nothing",)


# Its undo


def _undo(progress: Progress, step: Step) -> UndoView:
    undo, done = progress.undo(step), progress.operations.get(step.name)
    if step.name in progress.run.waived and step.undo is None:
        return UndoView(Label("✓", "accepted", "calm"), "it stands, and two people accept that", undo)
    if step.name in progress.run.waived:
        return UndoView(Label("✓", "done by hand", "good"), "a person vouched for it", undo)
    if undo is not None:
        return _undo_operation(undo)
    if not has_effect(step):
        return UndoView(Label("", "", ""), "nothing to undo: it only reads")
    if step.undo is None:
        return UndoView(Label("", "", ""), f"cannot be undone: {step.cannot_undo or 'no undo is declared'}", never=True)
    if progress.run.state in RUN_TERMINAL and (done is None or done.state == State.FAILED_TERMINAL):
        return UndoView(Label("", "", ""), "nothing to undo")
    waits = undos_before(progress, step) if progress.run.state == RunState.COMPENSATING else ()
    note = f"waits for the undo of {', '.join(waits)}" if waits else f"{step.undo.action}, not begun"
    return UndoView(Label("", "", ""), note)


def _undo_operation(undo: Operation) -> UndoView:
    label = wording.state_label(undo.state, escalated=undo.escalated_at is not None)
    code = undo.escalation_reason or undo.reason_code
    plain = undo.state == State.SUCCEEDED and undo.escalated_at is None
    return UndoView(label, undo.provider_operation_id if plain else wording.reason(code), undo)


# Its decision


def _choice(progress: Progress, step: Choice, decision: Decision | None, after: tuple[str, ...]) -> StepView:
    if step.name in progress.chosen:
        assert decision is not None
        label = Label("✓", "decided", "good")
        return StepView(step.name, label, f"version {decision.version}", after=after, decision=decision)
    refused = len(decision.refused) if decision else 0
    if not decision or not (refused or decision.unanswered):
        return StepView(step.name, NOT_BEGUN, "not decided", after=after, decision=decision)
    word = Label("↻", "refused", "wait") if refused else Label("→", "asked", "wait")
    label = Label("▲", "no valid proposal", "person") if progress.run.escalated_at else word
    times = f"{refused} proposal{'' if refused == 1 else 's'} refused" if refused else "asked, no answer so far"
    return StepView(step.name, label, times, after=after, decision=decision)


def _decisions(progress: Progress) -> dict[str, Decision]:
    """Every choice step of which something is on record."""
    choices = [step for step in progress.workflow.steps if isinstance(step, Choice)]
    if not choices:
        return {}
    rows = list(Chosen.objects.filter(run_id=progress.run.pk).order_by("id"))
    asked, reasons = choosing.asked_for(progress.run), choosing.reasons(progress.run)
    known = {row.step for row in rows} | {name for name, _ in asked}
    return {
        step.name: _decision(progress, step, [row for row in rows if row.step == step.name], asked, reasons)
        for step in choices
        if step.name in known
    }


def _decision(
    progress: Progress,
    step: Choice,
    rows: list[Chosen],
    asked: Mapping[tuple[str, int], int],
    reasons: Mapping[tuple[str, int], str],
) -> Decision:
    counts = progress.chosen.get(step.name)
    answered = Counter((row.step, row.version) for row in rows)
    given_up = {row.version: "" for row in rows if row.valid and row.pk != (counts and counts.pk)}
    given_up |= {version: why for (name, version), why in reasons.items() if name == step.name}
    return Decision(
        version=counts.version if counts else 0,
        at=counts.at if counts else None,
        shown=_shown(counts.value_shown) if counts else [],
        hidden=_hidden(counts.value_sealed) if counts else (),
        reason=counts.reason if counts else "",
        refused=[_refused(step, row) for row in rows if not row.valid],
        unanswered=sum(max(0, n - answered[key]) for key, n in asked.items() if key[0] == step.name),
        given_up=sorted(given_up.items()),
    )


def _refused(step: Choice, row: Chosen) -> Refused:
    known, names = choosing.declared(step), _hidden(row.value_sealed)
    others = len([name for name in names if name not in known and name != UNREADABLE])
    hidden = tuple(name for name in names if name in known or name == UNREADABLE)
    masked = () if not others else (choosing.OTHER if others == 1 else f"{choosing.OTHER} ({others})",)
    return Refused(row.version, row.at, row.problem, _shown(row.value_shown), hidden + masked)


def _shown(text: str) -> list[tuple[str, str]]:
    value = json.loads(text or "{}")
    return [(name, each if isinstance(each, str) else json.dumps(each)) for name, each in sorted(value.items())]


def _hidden(token: str) -> tuple[str, ...]:
    try:
        return sealing.hidden_names(token)
    except sealing.CannotOpen:
        return (UNREADABLE,)


# Runs that stopped


@dataclass(frozen=True)
class Stopped:
    """Runs with which automation has stopped although no operation of theirs is marked: no case would show them."""

    rows: QuerySet[Run]
    number: int
    since: datetime | None


def stopped(tenants: Sequence[str]) -> Stopped:
    """Those of these tenants, by the index of marked runs."""
    marked = Operation.objects.filter(run=OuterRef("pk"), escalated_at__isnull=False)
    rows = Run.objects.filter(tenant__in=tenants, escalated_at__isnull=False).exclude(Exists(marked))
    all_of_them = rows.aggregate(number=Count("id"), since=Min("escalated_at"))
    return Stopped(rows, all_of_them["number"], all_of_them["since"])


# Caps and lock


def limits(run: Run, *, now: datetime) -> list[tuple[str, str]]:
    """(name, text) of what the run as a whole may spend, as far as its declaration sets a cap."""
    try:
        workflow = registry.workflow(run.workflow_type, run.workflow_version)
    except registry.Unregistered:
        return []
    rows = []
    if workflow.max_elapsed is not None:
        rows.append(("Time", _time_spent(run, workflow.max_elapsed, now)))
    if workflow.max_spend is not None:
        spent = Operation.objects.filter(run=run).aggregate(spent=Sum("cost_minor"))["spent"] or 0
        rows.append(("Cost", f"{wording.money(spent, '')} of {wording.money(workflow.max_spend, '')}"))
    if any(isinstance(step, Choice) for step in workflow.steps):
        rows.append(("Decided anew", f"{run.replans} of {workflow.max_replans} times"))
    return rows


def _time_spent(run: Run, longest: timedelta, now: datetime) -> str:
    spent = (run.settled_at or now) - run.created_at
    text = f"{wording.duration(spent)} of {wording.duration(longest)}"
    if run.settled_at:
        return text
    return f"{text}; over" if spent >= longest else f"{text}; stops in {wording.duration(longest - spent)}"


def never(workflow_name: str) -> list[tuple[str, str]]:
    """(step, reason) of what nothing takes back of a run that is started now, to be read where people start one."""
    try:
        return cannot_be_undone(registry.workflow(workflow_name))
    except registry.Unregistered:
        return []


def declared() -> list[tuple[Workflow, dict[str, Any]]]:
    """Every workflow of this deployment in its newest version, with what people should know before they start it."""
    newest: dict[str, Workflow] = {}
    for (name, version), workflow in registry.workflows().items():
        if name not in newest or newest[name].version < version:
            newest[name] = workflow
    return [
        (each, {"pivot": each.pivot.name if each.pivot else "", "never": cannot_be_undone(each)})
        for each in sorted(newest.values(), key=lambda each: each.name)
    ]
