"""Operator actions that need a second person: pressing asks, another person's consent carries it out.

The consent is bound to the subject, the action, its inputs and what is known by its fingerprint; it is used up by the
very move that it allows. Should that move be refused at the moment of the consent, the sweep makes it as soon as it can
be made, and whoever asked may press again, while the consent holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from . import consent, executor, keys, reconciler, registry, runs, transition
from .actors import Actor
from .deeds import NotAllowed, Pressed, View
from .models import Approval, Operation, Run
from .progress import Progress
from .providers.base import Json, Repeat
from .retrying import why_not_retryable
from .states import APPROVAL_OPEN, ApprovalState, RunState, State
from .wording import duration

LASTS = timedelta(hours=4)  # in which a second person can agree
USE_WITHIN = timedelta(minutes=30)  # from the consent to the deed
SEND_AGAIN, WAIVE_UNDO = "send_again", "waive_undo"
POLICIES = {
    SEND_AGAIN: "Sending again what may have been applied needs a second person who accepts a duplicate.",
    WAIVE_UNDO: "An undo that was done by hand is vouched for by two people.",
}


def open_request(subject: Operation | Run, action: str, *, inputs: Json | None = None) -> Approval | None:
    """The open request for consent to this action, if there is one."""
    about = {"operation": subject} if isinstance(subject, Operation) else {"run": subject}
    found = Approval.objects.filter(**about, action=action, state__in=APPROVAL_OPEN)
    if inputs is not None:
        found = found.filter(inputs=keys.canonical(inputs).decode())
    return found.order_by("-id").first()


def standing(subject: Operation | Run) -> list[Approval]:
    """Every open request for a second person about this subject, the newest first."""
    about = {"operation": subject} if isinstance(subject, Operation) else {"run": subject}
    return list(Approval.objects.filter(**about, state__in=APPROVAL_OPEN).exclude(action="").order_by("-id"))


def _fingerprint(subject: Operation | Run, action: str, inputs: Json) -> str:
    what = subject.fingerprint if isinstance(subject, Operation) else subject.input_fingerprint
    bound = {"subject": str(subject.subject), "of": what, "inputs": inputs}
    return keys.fingerprint(provider="-", account="-", action=action, request=bound)


def ask(subject: Operation | Run, action: str, inputs: Json, press: Pressed, actor: Actor) -> str:
    """Ask for a second person's consent. The same request twice is one request."""
    pk, new = transition.open_approval(
        subject.subject,
        version=press.version,
        ask=consent.action_request(
            action=action,
            inputs=inputs,
            fingerprint=_fingerprint(subject, action, inputs),
            policy=POLICIES[action],
            reason=press.reason,
            actor=actor,
            lasts=LASTS,
            use_within=USE_WITHIN,
        ),
        fact=actor.fact("second_person_asked", reason=press.reason, action=action),
    )
    if not new:
        return f"It is asked for already (approval {pk}); another person decides."
    return f"Asked for (approval {pk}). It is done as soon as another person agrees, within {duration(LASTS)}."


def _use(approval: Approval, subject: Operation | Run) -> dict[str, Any]:
    """What the move names that uses the consent up. The fingerprint is worked out anew from what is known now."""
    return {
        "id": approval.pk,
        "action": approval.action,
        "fingerprint": _fingerprint(subject, approval.action, json.loads(approval.inputs)),
        "asked_by": approval.requested_by,
        "approved_by": approval.decided_by,
    }


# Send again, accepting a duplicate


def say_send_again(view: View) -> tuple[bool, str]:
    """Whether sending again can be asked for, or done."""
    operation = view.operation
    if operation.state != State.AMBIGUOUS:
        return False, "Its outcome is not unknown; this is for what may or may not have been applied."
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
    return _say_asked(open_request(operation, SEND_AGAIN)) or (
        True,
        "Asks another person to accept that it may happen twice. Once they agree it is looked up, then sent again.",
    )


def _say_asked(standing: Approval | None) -> tuple[bool, str] | None:
    if standing is None:
        return None
    if standing.state == ApprovalState.WAITING:
        return False, f"It is asked for already (approval {standing.pk}); another person decides."
    return True, f"Another person has agreed (approval {standing.pk}): does it now."


def send_again(operation: Operation, press: Pressed, actor: Actor) -> str:
    """Ask for it, or do it where another person has agreed."""
    standing = open_request(operation, SEND_AGAIN)
    if standing is None or standing.state == ApprovalState.WAITING:
        return ask(operation, SEND_AGAIN, {}, press, actor)
    return carry_out(standing, actor=actor)


def _send_again(approval: Approval, actor: Actor) -> str:
    assert approval.operation_id is not None
    operation = Operation.objects.get(pk=approval.operation_id)
    if registry.look_up_of(operation.provider) is not None:  # rule 7: look before you leap
        operation = reconciler.reconcile(operation.pk, actor=actor).operation
    if operation.state != State.AMBIGUOUS or operation.sighted:
        _void(approval, actor)
        return "Looked up first, and that told more: nothing was sent again. Read the case anew."
    with runs.holding(operation, held=None, actor=actor) as lease:
        executor.attempt_again(
            operation, actor=actor, reason=approval.reason, held=lease, use=_use(approval, operation)
        )
    after = Operation.objects.get(pk=operation.pk)
    return f"Sent again: attempt {after.attempts}. It is {after.state.replace('_', ' ')} now."


def _void(approval: Approval, actor: Actor) -> None:
    """What was agreed to will never be done: its request ends here, where the look-up's move has not ended it."""
    fresh = Approval.objects.get(pk=approval.pk)
    if fresh.state == ApprovalState.APPROVED:
        transition.move_approval(fresh, to=ApprovalState.SUPERSEDED, fact=actor.fact("look_up_told_more"))


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


def say_waive_undo(run: Run) -> tuple[bool, str]:
    """Whether an undo of this run can be vouched for."""
    if run.state != RunState.COMPENSATING or run.escalated_at is None:
        return False, "Only where a run walks back and is stuck can an undo be vouched for."
    if not waivable(run):
        return False, "No undo of this run waits for a person."
    return True, "You say that it was undone by hand, and another person agrees; then the run goes on without it."


def waive_undo(run: Run, press: Pressed, actor: Actor) -> str:
    """Ask for it, or do it where another person has agreed."""
    step = str(press.inputs.get("step", ""))
    if step not in waivable(run):
        raise NotAllowed(f"Name the step whose undo was done by hand: {', '.join(waivable(run))}.")
    standing = open_request(run, WAIVE_UNDO, inputs={"step": step})
    if standing is None or standing.state == ApprovalState.WAITING:
        return ask(run, WAIVE_UNDO, {"step": step}, press, actor)
    return carry_out(standing, actor=actor)


def _waive_undo(approval: Approval, actor: Actor) -> str:
    assert approval.run_id is not None
    run, step = Run.objects.get(pk=approval.run_id), json.loads(approval.inputs)["step"]
    if step not in waivable(run):
        return f"The undo of {step} does not wait for a person any more; nothing was waived."
    use = _use(approval, run)
    transition.transition(
        run.subject,
        to=None,
        version=run.version,
        patch={
            "waived": sorted({*run.waived, step}), "escalated_at": None, "escalation_reason": "",
            "reason_code": "undo_waived",
        },
        after={"due_at": 0},
        guard=("not_held",),
        consent={"use": use},
        fact=actor.fact("undo_waived", reason=approval.reason, step=step, asked_by=use["asked_by"],
                        approved_by=use["approved_by"]),
    )  # fmt: skip
    return f"The undo of {step} is vouched for by two people; the run goes on."


# Carrying out


_DEEDS: dict[str, Callable[[Approval, Actor], str]] = {SEND_AGAIN: _send_again, WAIVE_UNDO: _waive_undo}


def carry_out(approval: Approval, *, actor: Actor) -> str:
    """Do what was agreed to, once. Raises NotAllowed or the TransitionRefused that stood in the way."""
    try:
        return _DEEDS[approval.action](approval, actor)
    except reconciler.CannotLookUp as why:
        raise NotAllowed(str(why)) from why
