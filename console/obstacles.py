"""What a run does not get past by itself, and what a person can do about it, in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from reconciliation import case_wording, run_wording, wording
from reconciliation.compensation import is_stuck, may_start, waits_for_consent
from reconciliation.leases import HANDLER, LOCK
from reconciliation.models import JournalEntry, Operation, Run
from reconciliation.progress import Progress
from reconciliation.states import RUN_TERMINAL, RunState, State
from reconciliation.workflows import Step, closure, ring


@dataclass(frozen=True)
class Obstacle:
    """One thing that the run does not get past by itself, and who waits for it."""

    text: str
    waits: tuple[str, ...] = ()
    operation: Operation | None = None
    said: str = ""  # the provider's own words, scrubbed and cut
    other: Run | None = None
    help: str = ""  # what a person can do about it, and what follows
    again: datetime | None = None  # when the run is taken up again


def obstacles(progress: Progress) -> list[Obstacle]:
    """What a run that has not ended does not get past by itself, in its own order."""
    if progress.run.state in RUN_TERMINAL:
        return []
    if progress.run.state == RunState.COMPENSATING:
        return _stuck_undos(progress) + no_handler(progress.run)
    return _stuck_steps(progress) + _lock_of_others(progress.run) + no_handler(progress.run)


def _stuck_undos(progress: Progress) -> list[Obstacle]:
    found = [_unknown_step(operation) for operation in (*progress.unknown, *progress.given_up)]
    if progress.run.escalation_reason == "pivot_applied":
        return [Obstacle(_sentence("pivot_applied", ""))]
    for step in progress.to_undo():
        undo = progress.undo(step)
        waits = tuple(other.name for other in progress.to_undo() if step.name in _undos_behind(progress, other))
        if is_stuck(step, undo):
            why = _why(undo) if undo else step.cannot_undo or "no undo is declared"
            text = f"The undo of {step.name} is stuck: {why}."
            found.append(Obstacle(text, waits, undo, _said(undo), help=_undo_help(undo)))
        elif waits_for_consent(undo):
            found.append(Obstacle(f"The undo of {step.name} waits for a person's consent.", waits, undo))
        elif undo is not None and undo.state in (State.PENDING, State.AMBIGUOUS):
            found.append(Obstacle(f"What became of the undo of {step.name} is being found out.", waits, undo))
        elif _could_not_be_sent(progress, step):
            why = wording.reason(progress.run.escalation_reason)
            found.append(Obstacle(f"The undo of {step.name} could not be sent: {why}.", waits, undo))
    return found + _rings(progress)


def _rings(progress: Progress) -> list[Obstacle]:
    """Undos that wait for each other: a declaration that was run although the check at start refuses it."""

    def needs(name: str) -> Iterable[str]:
        return undos_before(progress, _effect(progress, name))

    rings = dict.fromkeys(frozenset(ring(step.name, needs)) for step in progress.to_undo())
    named = [", ".join(step.name for step in progress.workflow.effects if step.name in each) for each in rings if each]
    return [Obstacle(f"Undos wait for each other, so that none begins: {names}. Waive one that was done by hand.")
            for names in named]  # fmt: skip


def _unknown_step(operation: Operation) -> Obstacle:
    text = _way_of(operation) or "is in flight."
    text = f"{operation.step} {text} Nothing is undone before that is known."
    return Obstacle(text, (), operation, help=_help(operation))


def _could_not_be_sent(progress: Progress, step: Step) -> bool:
    """A run stops only when each undo that may be sent was tried: one that was not sent all the same met a fault."""
    stopped = progress.run.escalated_at is not None and not progress.unknown
    return stopped and step in progress.undoable() and may_start(progress, step)


def _undos_behind(progress: Progress, step: Step) -> set[str]:
    """Whose undo must be done before that of `step`, also by way of others."""
    return closure(step.name, lambda name: undos_before(progress, _effect(progress, name)))


def _effect(progress: Progress, name: str) -> Step:
    return next(step for step in progress.workflow.effects if step.name == name)


def _stuck_steps(progress: Progress) -> list[Obstacle]:
    found = []
    for operation in progress.in_state(*(state for state in State if state != State.SUCCEEDED)):
        text = _way_of(operation)
        if text:
            waits = _followers(progress, operation.step)
            found.append(
                Obstacle(f"{operation.step} {text}", waits, operation, _said(operation), help=_help(operation))
            )
    reason = progress.run.escalation_reason
    at = progress.run.waiting_for
    if reason and not any(each.operation and each.operation.step == at for each in found):
        found.insert(0, Obstacle(_sentence(reason, at), _followers(progress, at) if at else ()))
    return found


def _sentence(code: str, at: str) -> str:
    text = wording.sentence(code)
    return f"{at}: {text[:1].lower()}{text[1:]}" if at else text


def _way_of(operation: Operation) -> str:
    """How a forward step is in the way, or nothing where it only takes its time."""
    if operation.escalated_at is not None:
        return f"is stuck: {wording.reason(operation.escalation_reason)}."
    if operation.state == State.AMBIGUOUS:
        return "is unknown, and is being looked up."
    if operation.state in (State.FAILED_TERMINAL, State.TERMINATED):
        return f"{wording.state_label(operation.state).word}: {_why(operation)}."
    if operation.state == State.AWAITING_APPROVAL:
        return "waits for a person's consent."
    return ""


def _help(operation: Operation) -> str:
    """What a person can do about a step with which automation has stopped."""
    if operation.state == State.FAILED_TERMINAL:
        return "Open it to try again as a new intent."
    if operation.given_up:
        return "Open it to look it up; what nobody can find out leaves a cancel of the run."
    if operation.escalated_at is None:
        return ""
    ways = {
        State.AMBIGUOUS: "to look it up or to say what became of it",
        State.FAILED_RETRYABLE: "to retry it",
    }.get(State(operation.state), "")
    return f"Open it {ways}; the run then goes on by itself." if ways else ""


def _undo_help(undo: Operation | None) -> str:
    by_hand = "waive it where it was done by hand"
    if undo is None:
        return "Waive it where two people accept that it stands."
    if undo.state == State.TERMINATED:
        return (
            f"{by_hand.capitalize()}."
            if undo.unknown_attempts
            else f"Open it to try again as a new intent, or {by_hand}."
        )
    told = _help(undo)
    head, found, tail = told.partition(";")
    return f"{head if found else head.removesuffix('.')}, or {by_hand}{found + tail if found else '.'}" if told else ""


def _why(operation: Operation) -> str:
    return wording.reason(operation.escalation_reason or operation.reason_code)


def _said(operation: Operation | None) -> str:
    """What the provider answered where it refused, from the newest such entry."""
    if operation is None or operation.state != State.FAILED_TERMINAL:
        return ""
    refusals = JournalEntry.objects.filter(operation=operation, kind="not_applied")
    newest = refusals.order_by("-id").first()
    return str(case_wording.facts(newest).get("excerpt") or "") if newest else ""


def _followers(progress: Progress, name: str) -> tuple[str, ...]:
    """Steps without a result that need `name`, directly or by way of others."""
    workflow = progress.workflow
    return tuple(s.name for s in workflow.steps if not progress.done(s.name) and name in workflow.all_needs(s))


def _lock_of_others(run: Run) -> list[Obstacle]:
    if not run.waiting_for.startswith(LOCK):
        return []
    holder = Run.objects.filter(tenant=run.tenant, lock=run.lock, lock_held=True).first()
    if holder is None or holder.pk == run.pk:
        return []
    return [Obstacle(f"It works on {run.lock}, which another run has to itself:", other=holder)]


def no_handler(run: Run) -> list[Obstacle]:
    """That the worker which looked at it last had no handler for what comes next."""
    if not run.waiting_for.startswith(HANDLER):
        return []
    text = f"A worker left it to another one: {run_wording.lacking(run)}."
    return [Obstacle(text, help="Once a worker has it, the run goes on by itself", again=run.due_at)]


def undos_before(progress: Progress, step: Step) -> tuple[str, ...]:
    """Whose undo must be done before that of `step`, of those that are still to be done."""
    left = {each.name for each in progress.to_undo()}
    if step.name not in left:
        return ()
    needed = set(progress.workflow.undo_needs(step))
    return tuple(each.name for each in progress.workflow.effects if each.name in needed & left)
