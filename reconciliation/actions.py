"""What a person may do. Each action has a preview that says what it would do and why it is or is not allowed.

Permissions, versions, one-time tokens and guards sit here, behind the door; a page or an API endpoint only shows the
previews and passes on what was pressed. Automation calls the functions that stand behind these actions:
`reconciler.reconcile()`, `retrying.retry()`, `runs.advance()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from uuid import UUID

from django.db import IntegrityError, transaction

from . import agreed, approvals, holds, pressing, registry, run_deeds
from .actors import Actor, Permission
from .approvals import ApprovalView
from .claims import LedgerUnavailable
from .deeds import (
    NOT_HERE,
    NotAllowed,
    View,
    check_reason,
    close,
    compensate,
    look_up,
    not_here,
    read,
    resolve_applied,
    resolve_not_applied,
    retry,
    stop,
)  # fmt: skip
from .intents import after_a_restore, undo_step, why_not_undoable
from .judgement import absence_provable_at
from .models import Approval, Operation, Run
from .pressing import Answer, Verdict, answer_of
from .progress import Progress
from .providers.base import Repeat
from .reconciler import COMMITS_TOGETHER, spec_or_none
from .retrying import why_not_retryable
from .states import RUN_TERMINAL, TERMINAL, State
from .transition import Shredded, StaleVersion, TransitionRefused, Waived

__all__ = [
    "Actor", "Answer", "Input", "Permission", "Press", "Preview", "Verdict", "act", "answer_of", "previews",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Input:
    """One more field that an action asks for, beside the reason."""

    name: str
    label: str
    help: str = ""
    required: bool = False
    choices: tuple[tuple[str, str], ...] = ()  # (value, label); empty: free text


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What would happen, and why it is or is not allowed."""

    action: str
    label: str  # "Retry with the same key"
    button: str  # "Retry"
    allowed: bool
    why: str  # allowed: what it will do; else: why not, and what would allow it
    permission: Permission
    permitted: bool  # whether this person's role reaches that far; else `why` says what it needs
    recommended: bool = False
    needs_reason: bool = False
    inputs: tuple[Input, ...] = ()
    shortcut: str = ""  # one letter, or none


@dataclass(frozen=True, kw_only=True)
class Press:
    """One press of one button, as a form or an API call carried it."""

    action: str
    token: UUID
    version: int  # of the subject, as the page showed it
    reason: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)


# What each action would do, or why it is not allowed. (allowed, sentence)

Say = tuple[bool, str]


def _say_look_up(view: View) -> Say:
    operation = view.operation
    if operation.attempts == 0:
        return False, "Nothing was ever sent, so there is nothing to look up."
    if view.leased:
        return False, f"An attempt is in flight; its lease ends in {view.until(operation.lease_until)}."
    if view.local and operation.state == State.PENDING:
        return True, "The worker's lease is over, which proves that nothing was applied: ends it."
    if view.local and operation.state != State.AMBIGUOUS:
        return False, COMMITS_TOGETHER
    if view.local and operation.sighted:
        return False, "There is nobody to ask: look at the rows that it writes, then resolve it."
    if view.local:
        return True, "Looks whether its result is on record. What did not commit with its result was rolled back."
    if operation.state == State.PENDING:
        return True, "The worker's lease is over: ends it, and asks the provider what became of the call."
    if view.nobody_to_ask:
        return False, f"{operation.provider} offers no look-up, so nobody can be asked from here."
    provable = absence_provable_at(operation, view.spec) if view.spec else None
    sentence = f"Asks {operation.provider} what it knows of this call. Sends nothing."
    if operation.sighted:
        return True, f"{sentence} Something of it was seen there once, so an empty answer no longer proves anything."
    if operation.state == State.AMBIGUOUS and view.spec and view.spec.absence_is_proof and provable:
        if provable > view.now:
            return (
                True,
                f"{sentence} In {view.until(provable)} an empty answer begins to prove that nothing was applied.",
            )
        reads = view.spec.absence_reads
        return True, f"{sentence} An empty answer counts now; {reads} of them, spaced, prove that nothing was applied."
    return True, sentence


def _say_resolve_applied(view: View) -> Say:
    if view.operation.state != State.AMBIGUOUS:
        return False, _NOT_UNKNOWN
    then = " The run goes on." if view.run_waits else ""
    if view.found:
        return True, f"The newest look-up found it: becomes succeeded, on the look-up's evidence.{then}"
    said = "On your word: becomes succeeded, marked as asserted by you for good."
    return True, f"{_seen_otherwise(view)}{said}{then}"


def _say_resolve_not_applied(view: View) -> Say:
    if view.operation.state != State.AMBIGUOUS:
        return False, _NOT_UNKNOWN
    if view.absence_proven and view.operation.waived:
        return True, "Absence is proven, and it was undone by hand: becomes failed for good."
    if view.absence_proven and view.operation.run_is_over:
        return True, "Absence is proven, and its run has ended: becomes failed for good."
    if view.absence_proven:
        return True, "Absence is proven: becomes retryable, and is sent again only when somebody presses retry."
    said = "On your word: becomes failed for good, marked as asserted by you. It is not sent again."
    return True, f"{_seen_otherwise(view)}{said}{_then_its_run(view)}"


def _then_its_run(view: View) -> str:
    """What its run does with a step that failed for good."""
    if view.run is None or not view.run_waits:
        return ""
    if view.operation.undo_of_id is not None:
        return " Its run takes the undo as failed, and waits for a new intent or a waiver."
    if _pivoted(view.run):
        return " Its run takes the step as failed and waits for a person: the way is forward only."
    return " Its run takes the step as failed and may undo what it applied before."


def _pivoted(run: Run) -> bool:
    try:
        return Progress.of(run, registry.workflow(run.workflow_type, run.workflow_version)).pivoted
    except registry.Unregistered:
        return False  # left to a deployment that knows it


def _seen_otherwise(view: View) -> str:
    """What either word of a person leaves out where a look-up saw something."""
    if view.local and view.operation.sighted:
        return "Look at the rows that it writes first. "
    return (
        "The provider showed something of it, not as asked: that stays as it is there. "
        if view.operation.sighted
        else ""
    )


_NOT_UNKNOWN = "Its outcome is not unknown; there is nothing to resolve."


def _say_retry(view: View) -> Say:
    allowed, why = _say_repeated(view)
    return (False, view.held) if allowed and view.held else (allowed, why)


def _say_repeated(view: View) -> Say:
    operation, spec = view.operation, view.spec
    why = why_not_retryable(operation)
    if not why and spec is None:
        why = "This deployment has no handler for the action; configure its provider first."
    if why or spec is None:
        return False, why
    if view.run_in_the_way:
        return False, view.run_in_the_way
    if spec.repeat is Repeat.KEYED and operation.first_sent_at is not None:
        if operation.same_key_until is None or operation.same_key_until <= view.now:
            return False, f"{operation.provider} may have forgotten the key; a retry could do it twice. Look it up."
        left = view.until(operation.same_key_until)
        if operation.state == State.AMBIGUOUS:
            return True, f"Safe for {left}: {operation.provider} remembers the key and answers with the first result."
        return True, f"No attempt was applied; sends the same request under the same key. Safe for {left}."
    if operation.state == State.AMBIGUOUS:
        return True, "Doing it twice is the same as doing it once; refused if a newer one on this object was sent."
    if view.local:
        return True, "Every attempt was rolled back as a whole; does it again."
    return True, "No attempt was applied; sends the same request again."


def _say_terminate(view: View) -> Say:
    if view.operation.state in TERMINAL:
        return False, "It has ended already."
    if view.operation.state == State.PENDING:
        return False, "An attempt is in flight; wait for its answer or for the end of its lease."
    unknown = view.operation.state == State.AMBIGUOUS
    known = "Its outcome stays unknown on record." if unknown else "Nothing more is sent; no attempt was applied."
    left = f"{_only_a_waiver(view)}{_keeps_lock(view)}" if unknown else ""
    return True, f"Stops here. {known}{' Its run stops with it.' if view.run_waits else ''}{left}"


def _only_a_waiver(view: View) -> str:
    """What is left for the run of an undo that is stopped while unknown."""
    if view.operation.undo_of_id is None or view.operation.waived or not view.run_waits:
        return ""
    return (
        " It cannot be tried again then, not as a new intent either: unless a look-up finds it, the run ends only by a"
        " waiver (done by hand, and another person agrees) or a cancel."
    )


def _keeps_lock(view: View) -> str:
    run = view.operation.run
    if run is None or not run.lock_held:
        return ""
    return f" Other runs on {run.lock} go on waiting until a look-up proves what became of it."


def _say_withdraw(view: View) -> Say:
    if view.operation.state not in (State.READY, State.AWAITING_APPROVAL):
        return False, "Only what was never sent can be withdrawn."
    return True, "Nothing was sent, and nothing will be."


def _say_close(view: View) -> Say:
    operation = view.operation
    if operation.state not in TERMINAL:
        return False, "Its outcome is not settled; what settles it ends the case."
    if operation.escalated_at is None:
        return False, "Nobody was called to it."
    return True, "Takes it off the queue: somebody has dealt with it. What is known of it stays as it is."


def _say_new_intent(view: View) -> Say:
    operation = view.operation
    if operation.waived:
        return False, Waived.sentence
    if operation.shredded_at is not None:
        return False, Shredded.sentence
    if operation.state not in (State.FAILED_TERMINAL, State.TERMINATED):
        return False, "Possible once it is proven that this one was not applied and will not be tried."
    if operation.given_up:
        return False, "It was stopped while nobody knew whether it was applied; a new one could do it twice."
    if operation.sighted:
        return False, "Something of it was seen at the provider; a new one could do it twice."
    if operation.run is not None and operation.run.state in RUN_TERMINAL:
        return False, "Its run has ended; start a new run."
    lost = after_a_restore(operation)
    if operation.unknown_attempts:
        allowed, asked = agreed.say_new_intent(operation)
        return allowed, f"{asked}{lost}" if allowed else asked
    goes_on = ", and lets its run go on with it" if view.run_waits else ""
    said = f"Records the same request as a new intent with a new key{goes_on}."
    return True, f"{said}{lost}{holds.waits(view.held)}"


def _say_compensate(view: View) -> Say:
    why = why_not_undoable(view.operation)
    if why:
        return False, why
    by_two = view.spec is not None and view.spec.undo_second_person
    asks = " It is sent only after another person has agreed to it." if by_two else ""
    said = f"Looks whether it still stands, then reverses it by a new operation with a key of its own.{asks}"
    return True, f"{said}{holds.waits(_held_undo(view))}"


def _held_undo(view: View) -> str:
    """Why its undo, which may be another action at another provider, would be held back now, or nothing."""
    step = undo_step(view.operation)
    if step is None or step.undo is None:
        return ""
    return holds.in_the_way(view.operation, provider=step.undo.provider or step.provider, action=step.undo.action)


@dataclass(frozen=True)
class _Action:
    """One row of the panel."""

    name: str
    label: str
    button: str
    permission: Permission
    say: Callable[..., Say]
    do: Callable[..., str]
    needs_reason: bool = True
    shortcut: str = ""
    inputs: tuple[Input, ...] = ()
    calls_out: bool = False  # uses the network, so it is not one transaction
    any_version: bool = False  # harmless on a page that is out of date
    asks: Callable[..., tuple[Input, ...]] | None = None  # inputs that depend on what is acted on
    only_where_allowed: bool = False  # elsewhere not worth a line that says why not


_PROVIDER_ID = Input(
    name="provider_operation_id",
    label="Provider's id",
    help="The id of the effect at the provider, if you know it. One effect proves one operation.",
)
_OPERATION_ACTIONS = (
    _Action("look_up", "Look up again", "Look up", Permission.LOOK_UP, _say_look_up, look_up, needs_reason=False,
            shortcut="l", calls_out=True, any_version=True),
    _Action("retry", "Retry with the same key", "Retry", Permission.RETRY, _say_retry, retry, shortcut="r",
            calls_out=True),
    _Action("resolve_applied", "Resolve as applied", "It was applied", Permission.RESOLVE, _say_resolve_applied,
            resolve_applied, inputs=(_PROVIDER_ID,)),
    _Action("resolve_not_applied", "Resolve as not applied", "It was not applied", Permission.RESOLVE,
            _say_resolve_not_applied, resolve_not_applied),
    _Action("new_intent", "Try again as a new intent", "New intent", Permission.RETRY, _say_new_intent,
            agreed.new_intent),
    _Action("compensate", "Compensate", "Compensate", Permission.COMPENSATE, _say_compensate, compensate,
            calls_out=True),
    _Action("withdraw", "Withdraw", "Withdraw", Permission.WITHDRAW, _say_withdraw, partial(stop, code="withdrawn")),
    _Action("terminate", "Terminate", "Terminate", Permission.TERMINATE, _say_terminate,
            partial(stop, code="terminated")),
    _Action("send_again", "Send again, accepting a duplicate", "Send again", Permission.RETRY,
            agreed.say_send_again, agreed.send_again, calls_out=True),
    _Action("close", "Close the case", "Close", Permission.RESOLVE, _say_close, close, only_where_allowed=True),
)  # fmt: skip


def _ask_which_undo(run: Run) -> tuple[Input, ...]:
    steps = tuple((name, _waived_how(run, name)) for name in agreed.waivable(run))
    return (Input(name="step", label="Undone by hand", required=True, choices=steps),)


def _waived_how(run: Run, step: str) -> str:
    return f"{step}: cannot be undone, accepted that it stands" if agreed.lasts(run, step) else step


_RUN_ACTIONS = (
    _Action("resume", "Resume the run", "Resume", Permission.RESUME, run_deeds.say_resume, run_deeds.resume),
    _Action("compensate_run", "Undo what was applied", "Undo what was applied", Permission.COMPENSATE,
            agreed.say_compensate_run, agreed.compensate_run, calls_out=True),
    _Action("choose_again", "Ask for a fresh decision", "Decide anew", Permission.RESUME, run_deeds.say_choose_again,
            run_deeds.choose_again),
    _Action("cancel", "Cancel the run", "Cancel the run", Permission.CANCEL, run_deeds.say_cancel, run_deeds.cancel),
    _Action("waive_undo", "Waive an undo", "Waive", Permission.RESOLVE, agreed.say_waive_undo,
            agreed.waive_undo, asks=_ask_which_undo),
)  # fmt: skip
_DENY = _Action("deny", "Deny", "Deny", Permission.APPROVE, approvals.say_deny, approvals.deny, shortcut="d")
_WITHDRAW = _Action("withdraw", "Take it back", "Withdraw", Permission.WITHDRAW, approvals.say_withdraw,
                    approvals.withdraw)  # fmt: skip
_APPROVE = _Action("approve", "Approve", "Approve", Permission.APPROVE, approvals.say_approve, approvals.approve,
                   shortcut="a")  # fmt: skip
_APPROVAL_ACTIONS = (_APPROVE, _DENY, _WITHDRAW)
# An operator action is carried out as soon as it is agreed to, and may use the network for that.
_CONSENT_ACTIONS = (replace(_APPROVE, calls_out=True), _DENY, _WITHDRAW)


Subject = Operation | Run | Approval
Seen = View | Run | ApprovalView


def previews(subject: Subject, *, actor: Actor) -> tuple[Preview, ...]:
    """Every action on `subject`, the allowed ones first, each with what it would do or why it is not allowed."""
    view = _read(subject)
    told = [(action, _preview(action, view, actor)) for action in _actions(subject)]
    shown = [preview for action, preview in told if preview.allowed or not action.only_where_allowed]
    best = next((p.action for p in shown if p.allowed and p.action in ("look_up", "resume")), None)
    marked = [_recommend(p) if p.action == best else p for p in shown]
    return tuple(sorted(marked, key=lambda preview: not preview.allowed))


def _recommend(preview: Preview) -> Preview:
    return Preview(**{**vars(preview), "recommended": True})


def _read(subject: Subject) -> Seen:
    return approvals.read(subject) if isinstance(subject, Approval) else read(subject)


def _actions(subject: Subject) -> tuple[_Action, ...]:
    if isinstance(subject, Approval):
        return _CONSENT_ACTIONS if subject.action else _APPROVAL_ACTIONS
    return _OPERATION_ACTIONS if isinstance(subject, Operation) else _RUN_ACTIONS


def _preview(action: _Action, view: Seen, actor: Actor) -> Preview:
    allowed, why = action.say(view)
    not_permitted = _not_permitted(action, view, actor)
    if not_permitted:
        allowed, why = False, not_permitted
    return Preview(
        action=action.name,
        label=action.label,
        button=action.button,
        allowed=allowed,
        why=why,
        permission=action.permission,
        permitted=not not_permitted,
        needs_reason=action.needs_reason,
        inputs=action.asks(view) if action.asks else action.inputs,
        shortcut=action.shortcut,
    )


def _not_permitted(action: _Action, view: Seen, actor: Actor) -> str:
    """Why this person may not do it here, or nothing."""
    if isinstance(view, ApprovalView):
        return approvals.not_permitted(view, action.name, actor)
    if action.name in ("compensate", "compensate_run"):
        needed = next((p for p in (action.permission, *_undo_permissions(view)) if not actor.may(p)), None)
        return _NEEDS.format(needed.replace("_", " ")) if needed else ""
    mine = isinstance(view, View) and view.operation.requested_by == actor.id
    if actor.may(action.permission) or (action.name == "withdraw" and mine):
        return ""
    return _NEEDS.format(action.permission.replace("_", " "))


def _undo_permissions(view: View | Run) -> list[Permission]:
    """What the actions themselves ask of who has their effects reversed by hand; of a run all of them at once."""
    specs = [view.spec] if isinstance(view, View) else [spec_or_none(each) for each in run_deeds.account(view).standing]
    return [Permission(spec.undo_by) for spec in specs if spec is not None and spec.undo_by]


_NEEDS = "Your role does not allow this; it needs “{}”."


# Pressing


def act(subject: Subject, press: Press, *, actor: Actor) -> Answer:
    """Carry out one press. Refusals and conflicts are answers, recorded in the audit log, and change nothing."""
    action = next((a for a in _actions(subject) if a.name == press.action), None)
    if action is None:
        raise NotAllowed(f"There is no action {press.action!r} here.")
    if action.calls_out:
        earlier = pressing.take(press.token, action=press.action, subject=subject, actor=actor)
        return earlier or pressing.keep(press.token, *_answer(action, subject, press, actor))
    with transaction.atomic():
        earlier = pressing.take(press.token, action=press.action, subject=subject, actor=actor)
        return earlier or pressing.keep(press.token, *_answer(action, subject, press, actor))


def _answer(action: _Action, subject: Subject, press: Press, actor: Actor) -> tuple[Verdict, str]:
    fresh = type(subject)._default_manager.get(pk=subject.pk)
    not_permitted = _not_permitted(action, _read(fresh), actor)
    if not_permitted:
        return _refused(action, fresh, press, actor, why="not_allowed", told=not_permitted)
    try:
        if fresh.version != press.version and not action.any_version:
            raise StaleVersion(kind=fresh.subject.kind, pk=fresh.pk, source=fresh.state, target=None)
        _check(action, fresh, press)
        return Verdict.DONE, _do(action, fresh, press, actor)
    except StaleVersion:
        return _joined(action, fresh, press, actor) or _out_of_date(action, fresh, press, actor)
    except NotAllowed as refusal:
        why, told = "not_allowed", str(refusal)
    except NOT_HERE as lacking:
        why, told = "not_allowed", f"Nothing was changed. {not_here(lacking)}"
    except LedgerUnavailable as away:
        why, told = "ledger_unavailable", f"Nothing was changed. {away.sentence}"
    except TransitionRefused as refusal:
        why, told = refusal.verdict, f"Nothing was changed. {refusal.sentence}"
    return _joined(action, fresh, press, actor) or _refused(action, fresh, press, actor, why=why, told=told)


def _do(action: _Action, fresh: Subject, press: Press, actor: Actor) -> str:
    if action.calls_out:
        return action.do(fresh, press, actor)
    try:
        with transaction.atomic():  # a savepoint: the answer to the press is stored even where the deed is refused
            return action.do(fresh, press, actor)
    except IntegrityError as clash:
        if "one_effect_one_operation" not in str(clash):
            raise
        raise NotAllowed("This provider's id already proves another operation; one effect proves one.") from clash


def _check(action: _Action, fresh: Subject, press: Press) -> None:
    allowed, why = action.say(_read(fresh))
    if not allowed:
        raise NotAllowed(why)
    missing = "A reason is needed: it goes into the audit log with your name." if action.needs_reason else ""
    check_reason(press.reason, missing=missing)


def _joined(action: _Action, fresh: Subject, press: Press, actor: Actor) -> tuple[Verdict, str] | None:
    """A retry that somebody else started, or starts at this moment, is joined: neither refused nor made twice."""
    if isinstance(fresh, Approval):
        return _decided_before(action, fresh, press, actor)
    if not isinstance(fresh, Operation) or action.name != "retry":
        return None
    attempt = pressing.attempt_of_others(fresh, press.version)
    if not attempt:
        return None
    pressing.joined(fresh, actor, action=action.name, reason=press.reason)
    return Verdict.JOINED, f"Already being done: {attempt}"


def _decided_before(action: _Action, fresh: Approval, press: Press, actor: Actor) -> tuple[Verdict, str] | None:
    """The second of two decisions: the same one again by the same person is told so, another one loses."""
    told = approvals.decided_before(fresh, action.name, actor)
    if told is None:
        return None
    if told[0] is Verdict.JOINED:
        pressing.joined(fresh, actor, action=action.name, reason=press.reason)
    else:
        pressing.refuse(fresh, actor, action=action.name, why="already_decided", reason=press.reason)
    return told


def _refused(
    action: _Action, fresh: Subject, press: Press, actor: Actor, *, why: str, told: str
) -> tuple[Verdict, str]:
    pressing.refuse(fresh, actor, action=action.name, why=why, reason=press.reason)
    return Verdict.REFUSED, told


def _out_of_date(action: _Action, fresh: Subject, press: Press, actor: Actor) -> tuple[Verdict, str]:
    """It changed since the page was drawn."""
    pressing.refuse(fresh, actor, action=action.name, why="stale_version", reason=press.reason)
    return (
        Verdict.CONFLICT,
        f"Nothing was changed: this page was out of date. {pressing.changes_since(fresh, press.version)}",
    )
