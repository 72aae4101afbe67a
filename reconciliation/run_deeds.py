"""What stands behind each button on a run, and what the run says of itself before and after."""

from __future__ import annotations

from dataclasses import dataclass

from . import choosing, compensation, reconciler, registry, runs
from .actors import Actor
from .deeds import NotAllowed, Pressed
from .models import Operation, Run
from .progress import Progress, cannot_be_undone, has_effect
from .providers.base import Verdict
from .states import RUN_TERMINAL, RunState, State
from .wording import reason
from .workflows import Choice, Step

Say = tuple[bool, str]


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a run did, did not do, does not know, and cannot take back: for a person to read."""

    applied: tuple[Operation, ...]
    undone: tuple[Operation, ...]  # those of them that were reversed, or that people vouched for
    unknown: tuple[Operation, ...]  # undos too
    not_applied: tuple[Operation, ...]
    not_begun: tuple[str, ...]  # steps of which nothing is on record
    cannot_be_undone: tuple[tuple[str, str], ...]  # (step, reason) of those that stand or may stand

    @property
    def standing(self) -> tuple[Operation, ...]:
        """What was applied and is not undone."""
        return tuple(o for o in self.applied if o not in self.undone)


def account(run: Run) -> Account:
    """Read it from the run's operations. One that only reads was never applied: it is told of where it is unknown."""
    operations = list(Operation.objects.filter(run=run).order_by("id"))
    forward = [o for o in operations if o.undo_of_id is None]
    unknown = [o for o in operations if o.state in (State.PENDING, State.AMBIGUOUS) or o.given_up]
    succeeded = [o for o in forward if o.state == State.SUCCEEDED]
    applied = [o for o in succeeded if has_effect(o)]
    reversed_ = {o.undo_of_id for o in operations if o.undo_of_id is not None and o.state == State.SUCCEEDED}
    lasting = {step.name for step in _effects(run) if step.undo is None}  # a waiver of these accepts that they stand
    undone = [o for o in applied if o.pk in reversed_ or o.step in set(run.waived) - lasting]
    may_stand = {o.step for o in (*applied, *unknown) if o not in undone}
    begun = {o.step for o in forward}
    return Account(
        applied=tuple(applied),
        undone=tuple(undone),
        unknown=tuple(unknown),
        not_applied=tuple(o for o in forward if o not in succeeded and o not in unknown),
        not_begun=tuple(step.name for step in _effects(run) if step.name not in begun),
        cannot_be_undone=tuple(pair for pair in _cannot(run) if pair[0] in may_stand),
    )


def _effects(run: Run) -> tuple[Step, ...]:
    try:
        return registry.workflow(run.workflow_type, run.workflow_version).effects
    except registry.Unregistered:
        return ()


def _cannot(run: Run) -> list[tuple[str, str]]:
    try:
        return cannot_be_undone(registry.workflow(run.workflow_type, run.workflow_version))
    except registry.Unregistered:
        return []


def tell(told: Account) -> str:
    """The account in sentences, with the provider's ids."""
    nothing = "Nothing of it stands." if told.undone else "Nothing was applied."
    looked_up = tuple(o for o in told.unknown if o.state == State.PENDING or o.due_at is not None)
    given_up = tuple(o for o in told.unknown if o not in looked_up)
    parts = [
        f"Applied: {_named(told.standing)}." if told.standing else nothing,
        f"Undone since: {_named(told.undone)}." if told.undone else "",
        f"Unknown, left to look-ups: {_named(looked_up)}." if looked_up else "",
        f"Unknown, and looked up only where a person asks: {_named(given_up)}." if given_up else "",
        f"Not applied: {', '.join(dict.fromkeys(o.step for o in told.not_applied))}." if told.not_applied else "",
        f"Not begun: {', '.join(told.not_begun)}." if told.not_begun else "",
        f"Cannot be undone: {', '.join(name for name, _ in told.cannot_be_undone)}." if told.cannot_be_undone else "",
    ]
    return " ".join(part for part in parts if part)


def _named(operations: tuple[Operation, ...]) -> str:
    return ", ".join(f"{o.step} ({o.provider_operation_id})" if o.provider_operation_id else o.step for o in operations)


# What each action would do


def say_resume(run: Run) -> Say:
    """Clear the mark."""
    if run.state in RUN_TERMINAL:
        return False, "The run has ended."
    if run.escalated_at is None:
        return False, "Automation has not stopped with this run."
    if runs.edited(run):
        return False, f"It would stop again at once: {reason('workflow_changed')}. Put that declaration back first."
    again = _stays_stuck(run) if run.state == RunState.COMPENSATING else _stops_again(run)
    if again:
        return False, again
    return True, "Clears the mark: automation goes on from the first step that is not settled."


def _stops_again(run: Run) -> str:
    """Why a run on its way forward would stop at once again, and what helps; empty where it would not."""
    try:
        progress = Progress.of(run, registry.workflow(run.workflow_type, run.workflow_version))
    except registry.Unregistered:
        return ""  # left to a deployment that knows it
    if progress.finished:
        return ""
    cap = runs.cap_reached(progress)
    if cap:
        return f"It would stop again at once: {reason(cap)}. {_ways_out(run)}"
    if runs.needs_a_person(progress):
        step = (*progress.unknown, *progress.waiting)[0].step
        return f"{step} waits for a person's decision: it is made on its page, and the run then goes on by itself."
    if progress.unknown:
        return ""  # it waits for what is unknown
    stopped = progress.in_state(State.TERMINATED)
    if stopped:
        return f"It would stop again at once: {stopped[0].step} was stopped by a person. {_ways_out(run)}"
    choices = (step for step in progress.startable() if isinstance(step, Choice))
    if spent := next((step.name for step in choices if choosing.is_spent(run, step)), ""):
        return (
            f"It would stop again at once: {spent} was asked for as often as it may be. Ask for a fresh decision, or "
            "cancel the run."
        )
    if progress.failed and compensation.way_is_forward(progress):
        return (
            f"It would stop again at once: {progress.failed[0].step} failed for good, and the way is forward only. "
            "Try that step again as a new intent on its page, or cancel the run."
        )
    return ""


def _ways_out(run: Run) -> str:
    undo = say_compensate(run)[0]
    return f"Cancel the run{', or have what was applied undone' if undo else ''}."


def _stays_stuck(run: Run) -> str:
    """Why a run on its way back would not get on, and what helps; empty where an undo of it may move."""
    try:
        progress = Progress.of(run, registry.workflow(run.workflow_type, run.workflow_version))
    except registry.Unregistered:
        return ""
    if given_up := progress.given_up:
        return (
            f"It would stop again at once: {given_up[0].step} was stopped by a person while nobody knew whether it was "
            "applied. Look it up on its page, or cancel the run."
        )
    left = progress.to_undo()
    if left and progress.pivoted:
        return "The pivot was applied: the way is forward only. Cancel the run; single steps can be compensated then."
    if not left or any(_may_move(progress.undo(step)) for step in progress.undoable()):
        return ""
    ended = (State.FAILED_TERMINAL, State.TERMINATED)
    failed = ", ".join(step.name for step in left if (u := progress.undo(step)) and u.state in ended)
    if failed:
        return f"The undo of {failed} failed for good: try it again as a new intent on its page, or waive it."
    called = ", ".join(step.name for step in left if (u := progress.undo(step)) and u.escalated_at is not None)
    if called:
        return f"The undo of {called} waits for a person: decide about it on its page, or waive it."
    names = ", ".join(step.name for step in left)
    return f"No undo of {names} can begin by itself. Where one was done by hand, waive it."


def _may_move(undo: Operation | None) -> bool:
    if undo is None or compensation.stopped_with_run(undo):
        return True
    return undo.escalated_at is None and undo.state not in (State.FAILED_TERMINAL, State.TERMINATED)


def say_cancel(run: Run) -> Say:
    """Stop all new work."""
    if run.state in RUN_TERMINAL:
        return False, "The run has ended."
    return True, f"Stops all new work; look-ups go on. {tell(account(run))}"


def say_compensate(run: Run) -> Say:
    """Undo what was applied."""
    told = account(run)
    if run.state == RunState.COMPENSATING:
        return False, "It is being undone already."
    if run.state in RUN_TERMINAL and run.state != RunState.CANCELLED:
        return False, "The run has ended; single steps can be compensated on their own pages."
    if told.unknown:
        return False, f"Find out first what became of {_named(told.unknown)}; nothing is undone before."
    if not told.applied:
        return False, "Nothing was applied; there is nothing to undo. Cancel it instead."
    if not told.standing:
        return False, "Everything that was applied is undone already."
    try:
        progress = Progress.of(run, registry.workflow(run.workflow_type, run.workflow_version))
        for each in told.standing:  # without its action nobody can tell who may have it undone, and whether one may
            registry.spec(each.provider, each.action)
    except registry.Unregistered as missing:
        return False, f"Nothing here says how its steps are undone: {missing}."
    if runs.changed(run, progress.workflow):
        return False, f"It would stop at once: {reason('workflow_changed')}. Put that declaration back first."
    if progress.pivoted:
        return False, "The pivot was applied: the way is forward only. Single steps can be compensated after the end."
    return True, f"Looks whether each still stands, then undoes what was applied, newest first. {tell(told)}"


def check_they_stand(run: Run, actor: Actor) -> None:
    """Look at each effect that is about to be undone (rule 7). Raises NotAllowed where one was taken away already."""
    progress = Progress.of(run, registry.workflow(run.workflow_type, run.workflow_version))
    standing = [progress.operations[step.name] for step in progress.to_undo() if step.undo is not None]
    gone = ", ".join(operation.step for operation in standing if _taken_away(operation, actor))
    if gone:
        raise NotAllowed(
            f"The provider shows that this was taken away already: {gone}. Nothing was undone. What still stands can "
            "be compensated step by step on its own page, once the run is cancelled."
        )


def _taken_away(operation: Operation, actor: Actor) -> bool:
    if registry.look_up_of(operation.provider) is None:
        return False
    finding = reconciler.reconcile(operation.pk, actor=actor).finding
    return finding is not None and finding.verdict is Verdict.REMOVED


def say_choose_again(run: Run) -> Say:
    """Have the newest decision made afresh."""
    if run.state in RUN_TERMINAL:
        return False, "The run has ended."
    try:
        step = _last_choice(run)
        if step is None:
            return False, "This workflow has no decision step."
        choosing.give_up(Progress.of(run, registry.workflow(run.workflow_type, run.workflow_version)), step.name)
    except (registry.Unregistered, choosing.NotChosenAgain) as refusal:
        return False, str(refusal)
    return True, f"Asks for a fresh decision of {step.name}; the old one stays on record."


def _last_choice(run: Run) -> Choice | None:
    """The choice furthest on that was decided, or that found no valid proposal."""
    workflow = registry.workflow(run.workflow_type, run.workflow_version)
    progress = Progress.of(run, workflow)
    choices = [step for step in workflow.steps if isinstance(step, Choice)]
    reached = [step for step in choices if step.name in progress.chosen or step.name == run.waiting_for]
    return next(reversed(reached or choices), None)


# What each action does


def resume(run: Run, press: Pressed, actor: Actor) -> str:
    """Let automation go on."""
    runs.resume(run.pk, actor=actor, version=press.version, reason=press.reason)
    return "The run is due again; automation goes on from the first step that is not settled."


def cancel(run: Run, press: Pressed, actor: Actor) -> str:
    """Stop all new work, and tell what there is."""
    runs.cancel(run.pk, actor=actor, version=press.version, reason=press.reason)
    return f"Cancelled. {tell(account(run))}"


def compensate(run: Run, press: Pressed, actor: Actor) -> str:
    """Have what was applied undone."""
    check_they_stand(run, actor)
    runs.compensate(run.pk, actor=actor, version=press.version, reason=press.reason)
    return "What was applied is being undone, newest first."


def choose_again(run: Run, press: Pressed, actor: Actor) -> str:
    """Have a decision made afresh."""
    step = _last_choice(run)
    try:
        runs.choose_again(
            run.pk, step=step.name if step else "", actor=actor, version=press.version, reason=press.reason
        )
    except choosing.NotChosenAgain as refusal:
        raise NotAllowed(str(refusal)) from refusal
    return "A fresh decision is asked for; the old one stays on record."
