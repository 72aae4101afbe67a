"""What is done when two people agree: each deed here uses up the consent by the very move that it allows.

The approver's page and the sweep both come through carry_out(). Asking is in second_person.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeGuard

from django.db.transaction import atomic

from audit.log import Fact

from . import consent, deeds, executor, intents, jobs, limits, reconciler, registry, run_deeds, runs, transition
from .actors import Actor
from .deeds import NotAllowed, Pressed, View
from .models import Approval, Operation, Run
from .progress import Progress
from .providers.base import Repeat
from .retrying import why_not_retryable
from .second_person import (
    ACCEPT_REPEATS,
    CHANGED,
    COMPENSATE_RUN,
    LIFT_LIMIT,
    NEW_INTENT,
    RAISE_LIMIT,
    SEND_AGAIN,
    STANDS,
    WAIVE_UNDO,
    ask,
    concerned,
    end_changed,
    has_changed,
    open_request,
    use,
)
from .states import ApprovalState, RunState, State
from .workflows import Step

# Send again, accepting a duplicate


def say_send_again(view: View) -> tuple[bool, str]:
    """Whether sending again can be asked for, or done."""
    operation = view.operation
    if operation.state != State.AMBIGUOUS:
        return False, "Its outcome is not unknown; this is for what may or may not have been applied."
    if operation.waived:
        return False, transition.Waived.sentence
    if view.spec is None:
        return False, "This deployment has no handler for the action; configure its provider first."
    if operation.sighted:
        return False, "Something of it was seen at the provider: sending again would do it twice. Resolve it."
    if view.run_in_the_way:
        return False, view.run_in_the_way
    keyed = view.spec.repeat is Repeat.KEYED
    forgotten = keyed and (operation.same_key_until is None or operation.same_key_until <= view.now)
    if not why_not_retryable(operation) and not forgotten:
        return False, "A retry with the same key is safe now; that makes no duplicate."
    standing = open_request(operation, SEND_AGAIN)
    if _agreed(standing) and view.held:  # asking stays possible: it takes its time
        return False, view.held
    return _say_asked(standing) or (
        True,
        "Asks another person to accept that it may happen twice. Once they agree it is looked up, then sent again.",
    )


def _say_asked(standing: Approval | None) -> tuple[bool, str] | None:
    if standing is None or has_changed(standing):
        return None
    if standing.state == ApprovalState.WAITING:
        return False, f"It is asked for already (approval {standing.pk}); another person decides."
    return True, f"Another person has agreed (approval {standing.pk}): does it now."


def send_again(operation: Operation, press: Pressed, actor: Actor) -> str:
    """Ask for it, or do it where another person has agreed."""
    standing = open_request(operation, SEND_AGAIN)
    if not _agreed(standing):
        return ask(operation, SEND_AGAIN, {}, version=press.version, reason=press.reason, actor=actor)
    return carry_out(standing, actor=actor)


def _agreed(standing: Approval | None) -> TypeGuard[Approval]:
    return standing is not None and standing.state == ApprovalState.APPROVED and not has_changed(standing)


def _send_again(approval: Approval, actor: Actor) -> str:
    operation = _looked_up(approval, actor, still=State.AMBIGUOUS)
    if operation is None:
        return "Looked up first, and that told more: nothing was sent again. Read the case anew."
    with runs.holding(operation, held=None, actor=actor) as lease:
        executor.attempt_again(operation, actor=actor, reason=approval.reason, held=lease, use=use(approval, operation))
    after = Operation.objects.get(pk=operation.pk)
    return f"Sent again: attempt {after.attempts}. It is {after.state.replace('_', ' ')} now."


def _looked_up(approval: Approval, actor: Actor, *, still: State) -> Operation | None:
    """The operation as it is after a look; None, and the request is over, where that told more than was agreed to."""
    assert approval.operation_id is not None
    operation = Operation.objects.get(pk=approval.operation_id)
    if registry.look_up_of(operation.provider) is not None:  # rule 7: look before you leap
        operation = reconciler.reconcile(operation.pk, actor=actor).operation
    if operation.state == still and not operation.sighted:
        return operation
    _void(approval, actor)
    return None


def _void(approval: Approval, actor: Actor) -> None:
    """What was agreed to will never be done: its request ends here, where the look-up's move has not ended it."""
    fresh = Approval.objects.get(pk=approval.pk)
    if fresh.state == ApprovalState.APPROVED:
        transition.move_approval(fresh, to=ApprovalState.SUPERSEDED, fact=actor.fact("look_up_told_more"))


# Try again as a new intent what only a person's word calls not applied


def say_new_intent(operation: Operation) -> tuple[bool, str]:
    """Whether a new intent can be asked for although nothing proves that the one before it was not applied."""
    standing = open_request(operation, NEW_INTENT)
    if _agreed(standing):
        return False, "Another person has agreed; it is done by itself as soon as nothing is in the way."
    return _say_asked(standing) or (
        True,
        "It was called not applied on a person's word, so a new one could do it twice: asks another person to accept"
        " that. Once they agree the old one is looked up, and then recorded as a new intent with a new key.",
    )


def new_intent(operation: Operation, press: Pressed, actor: Actor) -> str:
    """The same request once more; where nothing proves that it was not applied, another person is asked first."""
    if not operation.unknown_attempts:
        return deeds.new_intent(operation, press, actor)
    return ask(operation, NEW_INTENT, {}, version=press.version, reason=press.reason, actor=actor)


def _new_intent(approval: Approval, actor: Actor) -> str:
    operation = _looked_up(approval, actor, still=State.FAILED_TERMINAL)
    if operation is None:
        return "Looked up first, and that told more: no new intent was made. Read the case anew."
    try:
        with atomic(using=transition.ALIAS):
            made = intents.next_version(
                operation, actor=actor, reason=approval.reason, use=use(approval, operation), never=approval.forbidden
            )
            deeds.let_run_go_on(operation, actor, approval.reason)
    except intents.NoIntent as refusal:
        raise NotAllowed(str(refusal)) from refusal
    return f"Recorded as operation {made.pk}, version {made.intent_version} of this intent."


# Waive an undo


def waivable(run: Run) -> list[str]:
    """Steps whose undo a person may vouch for: those that still wait, on a run that cannot finish them by itself."""
    if run.state != RunState.COMPENSATING or run.escalated_at is None:
        return []
    try:
        progress = Progress.of(run, registry.workflow(run.workflow_type, run.workflow_version))
    except registry.Unregistered:
        return []
    undos = ((step.name, progress.undo(step)) for step in progress.to_undo())
    return [name for name, undo in undos if undo is None or undo.state != State.PENDING]


def lasts(run: Run, step: str) -> bool:
    """Whether the effect of this step cannot be undone by declaration: a waiver then accepts that it stands."""
    try:
        declared = registry.workflow(run.workflow_type, run.workflow_version).step(step)
    except (registry.Unregistered, KeyError):
        return False
    return isinstance(declared, Step) and declared.undo is None


def say_waive_undo(run: Run) -> tuple[bool, str]:
    """Whether an undo of this run can be vouched for."""
    if run.state != RunState.COMPENSATING or run.escalated_at is None:
        return False, "Only where a run walks back and is stuck can an undo be vouched for."
    if not waivable(run):
        return False, "No undo of this run waits for a person."
    return True, (
        "You say that it was undone by hand, or accept that it stands where nothing undoes it, and another person"
        " agrees; then the run goes on without it."
    )


def waive_undo(run: Run, press: Pressed, actor: Actor) -> str:
    """Ask for it, or do it where another person has agreed."""
    step = str(press.inputs.get("step", ""))
    if step not in waivable(run):
        raise NotAllowed(f"Name the step whose undo is waived: {', '.join(waivable(run))}.")
    standing = open_request(run, WAIVE_UNDO, inputs={"step": step})
    if not _agreed(standing):
        policy = STANDS if lasts(run, step) else ""
        return ask(
            run, WAIVE_UNDO, {"step": step}, version=press.version, reason=press.reason, actor=actor, policy=policy
        )
    return carry_out(standing, actor=actor)


def _waive_undo(approval: Approval, actor: Actor) -> str:
    assert approval.run_id is not None
    run, step = Run.objects.get(pk=approval.run_id), json.loads(approval.inputs)["step"]
    if step not in waivable(run):
        raise NotAllowed(f"The undo of {step} does not wait for a person now.")
    undo, used = next(iter(concerned(run, WAIVE_UNDO, {"step": step})), None), use(approval, run)
    code = "effect_accepted" if lasts(run, step) else "undo_waived"
    fact = actor.fact(code, reason=approval.reason, step=step, **consent.both(used))
    with atomic(using=transition.ALIAS):
        transition.transition(
            run.subject,
            to=None,
            version=run.version,
            patch={
                "waived": sorted({*run.waived, step}), "escalated_at": None, "escalation_reason": "",
                "reason_code": code,
            },
            after={"due_at": 0},
            guard=("not_held",),
            consent={"use": used},
            fact=fact,
        )  # fmt: skip
        if undo is not None:
            _end_undo(undo, fact)
    if code == "effect_accepted":
        return f"It is accepted by two people that {step} stands; the run goes on."
    return f"The undo of {step} is vouched for by two people; the run goes on."


def _end_undo(undo: Operation, fact: Fact) -> None:
    """An undo that was not applied ends with its waiver. One that may have been is left to look-ups; its version rises,
    so that what is judged of it at this moment is judged anew, by what is known now.
    """
    over = undo.state in (State.READY, State.FAILED_RETRYABLE, State.AWAITING_APPROVAL)
    transition.transition(
        undo.subject,
        to=State.FAILED_TERMINAL if over else None,
        version=undo.version,
        patch={"reason_code": "undo_waived", **transition.unmarked(undo)} if over else {},
        fact=fact,
    )


# Undo what a run did, where an action says that no one person does


def undone_by_two(run: Run) -> list[str]:
    """Steps that stand and are reversed by hand only if two people agree."""
    applied = [(each.step, reconciler.spec_or_none(each)) for each in run_deeds.account(run).standing]
    return [step for step, spec in applied if spec is not None and spec.undo_second_person]


def say_compensate_run(run: Run) -> tuple[bool, str]:
    """Whether what the run did can be undone, and by how many people."""
    allowed, told = run_deeds.say_compensate(run)
    steps = undone_by_two(run) if allowed else []
    if not steps:
        return allowed, told
    asks = f"Asks another person, for {', '.join(steps)} is not reversed by one alone. Then: {told}"
    return _say_asked(open_request(run, COMPENSATE_RUN)) or (True, asks)


def compensate_run(run: Run, press: Pressed, actor: Actor) -> str:
    """Have it undone, ask for that, or do what another person has agreed to."""
    if not undone_by_two(run):
        return run_deeds.compensate(run, press, actor)
    standing = open_request(run, COMPENSATE_RUN)
    if not _agreed(standing):
        run_deeds.check_they_stand(run, actor)
        return ask(run, COMPENSATE_RUN, {}, version=press.version, reason=press.reason, actor=actor)
    return carry_out(standing, actor=actor)


def _compensate_run(approval: Approval, actor: Actor) -> str:
    assert approval.run_id is not None
    run = Run.objects.get(pk=approval.run_id)
    allowed, why = run_deeds.say_compensate(run)
    if not allowed:
        raise NotAllowed(why)
    try:
        run_deeds.check_they_stand(run, actor)
    except NotAllowed as gone:  # it will not come back: what was agreed to is not tried again
        _void(approval, actor)
        return str(gone)
    run.refresh_from_db()
    runs.compensate(run.pk, actor=actor, version=run.version, reason=approval.reason, use=use(approval, run))
    return "What was applied is being undone, newest first."


# Change what guards everybody


def _lift_limit(approval: Approval, actor: Actor) -> str:
    limit = approval.limit
    assert limit is not None
    return limits.lift_agreed(limit, use=use(approval, limit), actor=actor, reason=approval.reason)


def _raise_limit(approval: Approval, actor: Actor) -> str:
    limit, most = approval.limit, json.loads(approval.inputs)["most"]
    assert limit is not None
    return limits.change_agreed(limit, most=most, use=use(approval, limit), actor=actor, reason=approval.reason)


def _accept_repeats(approval: Approval, actor: Actor) -> str:
    job = approval.job
    assert job is not None
    return jobs.repeats_agreed(job, use=use(approval, job), actor=actor, reason=approval.reason)


# Carrying out


_DEEDS: dict[str, Callable[[Approval, Actor], str]] = {
    SEND_AGAIN: _send_again,
    NEW_INTENT: _new_intent,
    WAIVE_UNDO: _waive_undo,
    COMPENSATE_RUN: _compensate_run,
    LIFT_LIMIT: _lift_limit,
    RAISE_LIMIT: _raise_limit,
    ACCEPT_REPEATS: _accept_repeats,
}


def carry_out(approval: Approval, *, actor: Actor) -> str:
    """Do what was agreed to, once. Raises NotAllowed or the TransitionRefused that stood in the way."""
    if end_changed(approval, actor):
        return CHANGED
    try:
        return _DEEDS[approval.action](approval, actor)
    except reconciler.CannotLookUp as why:
        raise NotAllowed(str(why)) from why
    except deeds.NOT_HERE as lacking:
        raise NotAllowed(deeds.not_here(lacking)) from lacking
