"""What a person may do with a request for consent, and how requests end by themselves.

Who asked, for whom it was asked, and who owns or made the token that asked may never approve, whatever their role and
through whatever door: the database compares them under its lock. They may deny and withdraw. The moment of expiry is
late already, by the database's clock, whether or not a sweep has run. A denial is put on record even after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog
from django.conf import settings

from audit import log as audit
from audit.models import Entry

from . import agreed, consent, holds, pressing, registry, second_person, transition
from .actors import SYSTEM, Actor, Permission
from .claims import LedgerUnavailable
from .deeds import NotAllowed, Pressed
from .models import Approval, Operation, Run
from .pressing import Verdict
from .progress import Progress
from .states import RUN_TERMINAL, ApprovalState, State
from .transition import TransitionRefused
from .wording import duration

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class ApprovalView:
    """A request for consent and what its previews depend on, read at one moment of the database's clock."""

    approval: Approval
    operation: Operation | None
    run: Run | None
    now: datetime
    held: str  # why what it is about would be held back now, or nothing

    @property
    def over(self) -> bool:
        """Whether nobody can approve it any more. The moment itself is late."""
        return self.approval.expires_at <= self.now

    @property
    def going(self) -> Run | None:
        """The run that goes on from what is decided, where there is one that has not ended."""
        return self.run if self.run is not None and self.run.state not in RUN_TERMINAL else None

    @property
    def too_late_for_its_run(self) -> bool:
        """Whether nothing would be sent any more; what is undone after the end, and the run itself, are not."""
        after_the_end = self.operation is None or self.operation.stands_alone
        return self.run is not None and self.going is None and not after_the_end


def read(approval: Approval) -> ApprovalView:
    """What the previews of `approval` depend on."""
    operation = approval.operation
    run = approval.run or (operation.run if operation else None)
    sends = operation is not None and approval.state == ApprovalState.WAITING
    return ApprovalView(
        approval=approval,
        operation=operation,
        run=run,
        now=transition.database_now(),
        held=holds.in_the_way(operation) if operation is not None and sends else "",
    )


# Who may


def mine(approval: Approval, actor: Actor) -> bool:
    """Whether the actor is one of those who may never approve it: it is their own request."""
    return bool(set(consent.forbidden(*approval.forbidden)) & set(consent.names(actor)))


def not_permitted(view: ApprovalView, action: str, actor: Actor) -> str:
    """Why this person may not do this with the request, or nothing."""
    own = mine(view.approval, actor)
    if actor.kind != "person":
        return "Only a person decides."
    if action == "withdraw":
        return "" if own or actor.may(Permission.WITHDRAW) else _ROLE.format("withdraw")
    if action == "deny" and own:
        return ""
    needed = [Permission.APPROVE]
    if view.approval.action in second_person.DUPLICATES:
        needed.append(Permission.SEND_AGAIN)
    missing = next((permission for permission in needed if not actor.may(permission)), None)
    if missing:
        return _ROLE.format(missing.replace("_", " "))
    return _OWN if action == "approve" and own else ""


_ROLE = "Your role does not allow this; it needs “{}”."
_OWN = "You asked for this, or it was asked for you: another person decides. You may deny or withdraw it."


# What each decision would do


def say_approve(view: ApprovalView) -> tuple[bool, str]:
    """Whether it can be approved, and what would follow."""
    if view.approval.action and view.approval.state == ApprovalState.SUPERSEDED:
        return False, _CHANGED
    if view.approval.state != ApprovalState.WAITING:
        return False, f"It is {view.approval.state} already."
    if view.over:
        return False, "Its time is over, so it cannot be approved any more. Ask for it again."
    if view.approval.action and second_person.has_changed(view.approval):
        return False, _CHANGED
    if view.too_late_for_its_run:
        return False, "Its run has ended; nothing would be sent."
    lasts, waits = duration(timedelta(seconds=view.approval.use_within)), holds.waits(view.held)
    if view.approval.action:
        return (
            True,
            f"It is done at once, in your name and that of who asked; else {_soon(view.approval)}{waits}",
        )
    then = " Then the run goes on." if view.going else ""
    said = f"Exactly this is sent, once, if a worker takes it within {lasts}; after that it is asked anew.{then}"
    return True, f"{said}{waits}"


_CHANGED = "What it is about has changed since it was asked: it must be asked for again."


def say_deny(view: ApprovalView) -> tuple[bool, str]:
    """Whether it can be denied, and what would follow."""
    state = view.approval.state
    if state == ApprovalState.EXPIRED and not view.approval.decided_by:
        return True, "Nobody can approve it any more; your denial is put on record."
    if state != ApprovalState.WAITING:
        return False, f"It is {state} already."
    if view.approval.action:
        return True, "Nothing is done, and who asked is told a final answer."
    return True, f"Nothing has been sent, and nothing will be. Who asked is told a final answer.{_then(view)}"


def _then(view: ApprovalView) -> str:
    """What becomes of the run whose step is denied."""
    run = view.going
    if run is None:
        return ""
    if view.operation is not None and view.operation.undo_of_id is not None:
        return " Its effect stays, and the run stops for a person."
    try:
        progress = Progress.of(run, registry.workflow(run.workflow_type, run.workflow_version))
    except registry.Unregistered:
        return " The run stops at this step."
    if progress.pivoted:
        return " The run is past its pivot: it stops here, and a person decides how it goes on."
    names = [step.name for step in reversed(progress.applied)]
    return f" The run stops at this step and undoes {', '.join(names)}." if names else " The run ends here."


def say_withdraw(view: ApprovalView) -> tuple[bool, str]:
    """Whether it can be taken back, and what would follow."""
    if view.approval.state not in (ApprovalState.WAITING, ApprovalState.APPROVED):
        return False, f"It is {view.approval.state} already."
    if view.approval.action:
        return True, "The request is taken back; nothing is done."
    return True, "The request is taken back and its operation is stopped; nothing was sent."


# Deciding


def approve(approval: Approval, press: Pressed, actor: Actor) -> str:
    """Agree to exactly this. What a person asked for is carried out at once, after the decision is committed."""
    _decide(approval, press, actor, to=ApprovalState.APPROVED, code="approved", operation_to=State.READY)
    lasts = duration(timedelta(seconds=approval.use_within))
    if not approval.action:
        return f"Approved. It is sent, once, as soon as a worker takes it, within {lasts}."
    try:
        return f"Approved. {agreed.carry_out(Approval.objects.get(pk=approval.pk), actor=actor)}"
    except LedgerUnavailable as away:
        pressing.refuse(approval, actor, action=approval.action, why="ledger_unavailable", reason=press.reason)
        why = away.sentence
    except NotAllowed as refusal:
        why = str(refusal)
    except TransitionRefused as refusal:
        why = refusal.sentence
    return f"Approved, but it could not be done yet: {why} It is done {_soon(approval)}"


def _soon(approval: Approval) -> str:
    lasts = duration(timedelta(seconds=approval.use_within))
    return f"by itself as soon as nothing is in the way, within {lasts}; after that it must be asked for again."


def deny(approval: Approval, press: Pressed, actor: Actor) -> str:
    """Say no. Also when the time was over: that somebody said no is worth a record."""
    if approval.state == ApprovalState.EXPIRED:
        fact = actor.fact("denied_after_expiry", reason=press.reason)
        audit.append(subject=str(approval.subject), tenant=approval.tenant, event="denied", fact=fact)
        return "It had expired before; your denial is on record."
    _decide(approval, press, actor, to=ApprovalState.DENIED, code="denied", operation_to=State.FAILED_TERMINAL)
    return "Denied. Nothing was sent, and nothing will be."


def withdraw(approval: Approval, press: Pressed, actor: Actor) -> str:
    """Take the request back. What was approved and not used yet is stopped as well."""
    operation = approval.operation
    if not approval.action and operation is not None and operation.state != State.AWAITING_APPROVAL:
        transition.transition(  # its approval ends with it, in the same transaction
            operation.subject, to=State.TERMINATED, version=operation.version,
            patch={"reason_code": "withdrawn"}, fact=actor.fact("withdrawn", reason=press.reason),
        )  # fmt: skip
        return "Taken back. Nothing more is sent."
    _decide(approval, press, actor, to=ApprovalState.WITHDRAWN, code="withdrawn", operation_to=State.TERMINATED)
    return "Taken back. Nothing was sent."


def _decide(
    approval: Approval, press: Pressed, actor: Actor, *, to: ApprovalState, code: str, operation_to: State
) -> None:
    asked = {"asked_by": approval.requested_by, "asked_for": approval.on_behalf_of, "fingerprint": approval.fingerprint}
    transition.move_approval(
        approval,
        to=to,
        version=press.version,
        who=consent.names(actor),
        patch=_decision(press, actor) if code != "withdrawn" else None,
        operation_to=None if approval.action else operation_to,
        operation_patch={"reason_code": code, "escalated_at": None, "escalation_reason": ""},
        operation_after={"due_at": 0} if operation_to is State.READY else None,
        fact=actor.fact(code, reason=press.reason, **asked),
    )


def _decision(press: Pressed, actor: Actor) -> dict[str, object]:
    return {"decided_by": actor.id, "decision_reason": press.reason, "again": settings.AFTERCALL_TAKE_AGAIN}


def decided_before(approval: Approval, action: str, actor: Actor) -> tuple[Verdict, str] | None:
    """What a press is told that came after the decision. The same decision by the same person is no conflict."""
    fresh = Approval.objects.get(pk=approval.pk)
    if not fresh.decided_by or fresh.decided_at is None:
        return None
    code = "denied" if fresh.state == ApprovalState.DENIED else "approved"
    if fresh.decided_by == actor.id and action == {"denied": "deny", "approved": "approve"}[code]:
        return Verdict.JOINED, f"You {code} this already, at {pressing.time_of(fresh.decided_at)}."
    return Verdict.CONFLICT, f"Already {code} by {_decider(fresh)} at {pressing.time_of(fresh.decided_at)}."


def _decider(approval: Approval) -> str:
    entry = Entry.objects.filter(subject=str(approval.subject), actor=approval.decided_by).order_by("-seq").first()
    return pressing.who(entry) if entry else approval.decided_by


# Ending by itself


def end_due(pk: int) -> None:
    """What is due for one request: it can be done now, or nobody decided or used it in time. The sweep calls this."""
    approval = Approval.objects.get(pk=pk)
    if approval.state == ApprovalState.WAITING:
        transition.move_approval(
            approval,
            to=ApprovalState.EXPIRED,
            operation_to=None if approval.action else State.FAILED_TERMINAL,
            operation_patch={"reason_code": "approval_expired", "escalated_at": None, "escalation_reason": ""},
            fact=SYSTEM.fact("approval_expired"),
        )
    elif approval.state == ApprovalState.APPROVED and not (approval.action and _tried_again(approval)):
        transition.move_approval(approval, to=ApprovalState.EXPIRED, fact=SYSTEM.fact("approval_past_use_by"))


def _tried_again(approval: Approval) -> bool:
    """What could not be done at the moment of the consent is done as soon as it can be. False: its use-by is over."""
    if approval.use_by is None or approval.use_by <= transition.database_now():
        return False
    try:
        agreed.carry_out(approval, actor=SYSTEM)
    except (NotAllowed, TransitionRefused) as why:
        log.info("agreed_but_not_yet", approval=approval.pk, why=str(why))
    return True
