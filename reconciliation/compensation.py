"""Walking back: what was applied is reversed by new operations, journaled, keyed and retried like all others.

Before the pivot a permanent failure walks back; from the pivot on the way is forward, and what cannot be done calls a
person. Unknown steps are found out before anything is undone, and an unknown pivot blocks both ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from django.conf import settings
from django.db.models import Q

from audit.models import Entry

from . import leases, stepping, transition
from .actors import SYSTEM, Actor
from .claims import Held, Intent
from .keys import Identity
from .models import JournalEntry, Operation, Run
from .progress import UNDO, Progress, next_due
from .states import RunState, State
from .workflows import Step, Workflow

VERSIONS = 1000  # left out after a restore


def after_failure(progress: Progress, lease: Held) -> None:
    """A step failed for good and nothing is unknown: end, walk back, or call a person, by where the pivot stands."""
    run, failed = progress.run, progress.failed[0]
    if not progress.applied:
        end_waiting(run, reason_code="run_ended", actor=SYSTEM)  # a person may be asked about a step beside it
        return leases.leave(run.subject, lease, to=RunState.FAILED, reason_code="step_failed", waiting_for=failed.step)
    if way_is_forward(progress):
        return leases.stop(run, lease, step=failed.step, reason="step_failed_after_pivot")
    leases.leave(
        run.subject, lease, to=RunState.COMPENSATING, reason_code="walks_back", waiting_for=failed.step,
        after={"due_at": 0},
    )  # fmt: skip


def way_is_forward(progress: Progress) -> bool:
    """Whether a step that failed for good must be done all the same: something was applied that is not walked back."""
    if not progress.applied:
        return False
    step = progress.workflow.step(progress.failed[0].step)
    return progress.pivoted or progress.workflow.after_pivot(step)


def walk_back(run: Run, workflow: Workflow, lease: Held) -> None:
    """Undo what may be undone until nothing more can; then leave the run where it stands."""
    end_waiting(run, reason_code="run_walks_back", actor=SYSTEM)
    tried: set[str] = set()
    faults: dict[str, str] = {}  # step -> why its undo could not be sent; what does not wait for it goes on
    while True:
        progress = Progress.of(Run.objects.get(pk=run.pk), workflow)
        if progress.unknown:
            return _find_out_first(progress, lease)
        if progress.given_up:  # what may stand is not undone by leaving it out
            return leases.stop(
                run, lease, step=progress.given_up[0].step, reason="step_terminated", to=RunState.COMPENSATING
            )
        if progress.pivoted and progress.to_undo():  # it was found after all, since this way was taken
            return leases.stop(run, lease, step="", reason="pivot_applied", to=RunState.COMPENSATING)
        ready = [step for step in progress.undoable() if step.name not in tried and may_start(progress, step)]
        if not ready:
            return _settle(progress, lease, faults)
        step = ready[0]
        tried.add(step.name)
        fault = stepping.send(run, UNDO + step.name, partial(undo_intent, progress, step, held=lease), lease)
        if fault:
            faults[step.name] = fault[1]


def _find_out_first(progress: Progress, lease: Held) -> None:
    """After a restore a step may be unknown again: whether it is to be undone too, and before what, is not known."""
    first = progress.unknown[0]
    if all(operation.escalated_at is not None for operation in progress.unknown):
        return leases.stop(
            progress.run, lease, step=first.step, reason="step_needs_person", to=RunState.COMPENSATING,
            versions=progress.versions,
        )  # fmt: skip
    leases.leave(
        progress.run.subject, lease, to=RunState.COMPENSATING, reason_code="step_unknown", waiting_for=first.step,
        guard=(f"as_read:{progress.versions}",),
    )  # fmt: skip


def end_waiting(run: Run, *, reason_code: str, actor: Actor, reason: str = "", undos: bool = False) -> list[Operation]:
    """End forward steps that wait to be sent: nothing of them was applied, and nothing more is sent. Returns them.

    `undos` ends those too of which nothing was ever seen; one that was seen stays with whom it called.
    """
    which = Q(undo_of=None) | Q(sighted=False) if undos else Q(undo_of=None)
    waiting = Operation.objects.filter(
        which, run=run, state__in=(State.READY, State.FAILED_RETRYABLE, State.AWAITING_APPROVAL)
    ).order_by("id")
    ended = list(waiting)
    for operation in ended:
        transition.transition(
            operation.subject,
            to=State.FAILED_TERMINAL,
            version=operation.version,
            patch={"reason_code": reason_code, **transition.unmarked(operation)},
            fact=actor.fact(reason_code, reason=reason, run=run.pk),
        )
    return ended


def may_start(progress: Progress, step: Step) -> bool:
    """Whether the undo of a step may be sent now, as far as that undo itself goes."""
    undo = progress.undo(step)
    if undo is None or stopped_with_run(undo):
        return True
    return undo.state in (State.READY, State.FAILED_RETRYABLE) and undo.escalated_at is None


def stopped_with_run(undo: Operation) -> bool:
    """Whether only the end of its run ended it: where a person sets the run going again, a new intent follows it."""
    return undo.is_over and undo.reason_code in ("run_cancelled", "run_ended")


def rise(operation: Operation) -> int:
    """By how much the version of the next intent rises. Versions that may have been given out in a lost time are left
    out: their keys may be known to the provider, with other bytes.
    """
    restored = JournalEntry.objects.filter(operation=operation, kind="restored").exists()
    return VERSIONS if restored else 1


def _version(progress: Progress, step: Step, done: Operation) -> int:
    undo = progress.undo(step)
    if undo is None:
        return done.intent_version
    return undo.intent_version + (rise(undo) if stopped_with_run(undo) else 0)


def undo_intent(progress: Progress, step: Step, *, held: Held | None) -> Intent:
    """The operation that reverses `step`: the identity of what it undoes, with step `undo:<step>`.

    Raises Shredded where half of its result is gone: an undo of that half would be another one.
    """
    assert step.undo is not None
    run, done = progress.run, progress.operations[step.name]
    if done.shredded_at is not None:
        raise transition.Shredded(kind=done.subject.kind, pk=done.pk, source=done.state, target=None)
    return Intent(
        identity=Identity(
            tenant=done.tenant,
            workflow_type=done.workflow_type,
            workflow_id=done.workflow_id,
            step=UNDO + step.name,
            business_object=done.business_object,
            intent_version=_version(progress, step, done),
        ),
        provider=step.undo.provider or step.provider,
        action=step.undo.action,
        request=step.undo.request(progress.facts, done.result),
        held=held,
        requested_by=run.requested_by,
        on_behalf_of=run.on_behalf_of,
        owners=(*run.owners, *(asked_back_by(run) if held else ())),
        consent=step.undo.consent,
        retry=step.undo.retry,
        undo_of=done.pk,
        run_id=run.pk,
        spent_is_final=False,  # an undo must be done: when its budget is spent a person is called
    )


def asked_back_by(run: Run) -> list[str]:
    """Who had the run walk back, where a person did: they ask for its undos as much as who started it, and never agree
    to one. Where it took two people, that is the one who asked.
    """
    asked = Entry.objects.filter(subject=str(run.subject), event="transition", reason_code="compensation_asked")
    last = asked.order_by("-seq").first()
    return [] if last is None else [last.body["details"].get("asked_by", last.actor)]


# Where the run stands when nothing more is undone by itself


def _settle(progress: Progress, lease: Held, faults: Mapping[str, str]) -> None:
    run, left = progress.run, progress.to_undo()
    if not left:
        return leases.leave(run.subject, lease, to=RunState.COMPENSATED, reason_code="all_undone")
    undos = {step.name: progress.undo(step) for step in left}
    stuck = [step for step in left if step.name in faults or is_stuck(step, undos[step.name])]
    moving = [undo for step in left if step not in stuck and (undo := undos[step.name]) and _moves_by_itself(undo)]
    asked = [step for step in left if waits_for_consent(undos[step.name])]
    where = told(stuck, left, asked)
    # Undos that wait for each other are stuck, too: each only waits, and nothing else would call a person.
    if not moving and (stuck or not progress.undoable()):
        only_faults = not asked and len({faults.get(step.name, "") for step in stuck}) == 1
        reason = (faults.get(stuck[0].name) if only_faults else None) or "undo_incomplete"
        return leases.stop(
            run,
            lease,
            step=where,
            reason=reason,
            to=RunState.COMPENSATING,
            versions=progress.versions if reason in leases.FOR_A_STEP else None,
        )
    if asked and not moving:  # the decision wakes the run, at once where it came before this is written
        return leases.leave(
            run.subject,
            lease,
            to=RunState.COMPENSATING,
            reason_code="undo_awaits_approval",
            waiting_for=where,
            guard=(f"as_read:{progress.versions}",),
        )
    due = next_due(undo for undo in moving if undo.state in (State.READY, State.FAILED_RETRYABLE))
    leases.leave(
        run.subject,
        lease,
        to=RunState.COMPENSATING,
        reason_code="undo_waits",
        waiting_for=where,
        patch={"due_at": due.isoformat()} if due else None,
        # An unknown undo wakes the run when it is known; should it become known while this is written, the sweep does.
        after=None if due else {"due_at": float(settings.AFTERCALL_TAKE_AGAIN)},
    )


def is_stuck(step: Step, undo: Operation | None) -> bool:
    """Nothing but a person moves it on: no undo is declared, it failed for good, or automation has stopped with it."""
    if step.undo is None:
        return True
    return (
        undo is not None
        and not stopped_with_run(undo)
        and (undo.escalated_at is not None or undo.state in (State.FAILED_TERMINAL, State.TERMINATED))
    )


def _moves_by_itself(undo: Operation) -> bool:
    waiting = (State.READY, State.FAILED_RETRYABLE, State.AMBIGUOUS, State.PENDING)
    return undo.escalated_at is None and undo.state in waiting


def waits_for_consent(undo: Operation | None) -> bool:
    """Whether a person is asked to agree to it: their decision moves it on."""
    return undo is not None and undo.state == State.AWAITING_APPROVAL


def told(stuck: list[Step], left: list[Step], asked: list[Step]) -> str:
    """Which undos are stuck, which wait for a person's consent, and which still wait for those."""
    waiting = [step for step in left if step not in stuck and step not in asked]
    parts = (("stuck", stuck), ("waits for consent", asked), ("waiting", waiting))
    return "; ".join(f"{word}: {', '.join(step.name for step in steps)}" for word, steps in parts if steps)
