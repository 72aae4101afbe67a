"""perform(): claim -> dispatch -> settle.

The claim (with "attempt n starts" in the journal) is committed before a byte leaves; no transaction is open while the
network is used; the settlement is one more commit. Whatever happens in between, the next reader of the ledger sees a
claim whose lease runs out, and an expired lease is an unknown outcome, never a second dispatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import structlog
from django.db import (
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
    transaction,
)

from . import consent, fence, local, lost_time, policy, registry, settlement, storable, transition, workers
from .actors import SYSTEM, Actor
from .anchor import AnchorUnreadable
from .claims import (
    DATABASE_ERRORS,
    Claim,
    FingerprintMismatch,
    Held,
    Intent,
    LedgerUnavailable,
    TooOld,
    claim_again,
    claim_new,
    on_record,
    outside_transactions,
    record,
    row_of,
)
from .models import Operation, Tombstone
from .outcomes import DISPOSITIONS, Disposition, Outcome, stored_outcome
from .providers.base import ActionSpec, Call, Json, NotSent, OutcomeUnknown, Provider, Receipt, Repeat
from .scrub import fault
from .settlement import Judged
from .settling import me, settle
from .states import Kind, State, Subject
from .transition import Observed, TransitionRefused

log = structlog.get_logger(__name__)

MAY_NOT_SEND = (
    transition.KeyForgotten,
    transition.NewerSent,
    transition.ReportedApplied,
    transition.TimeSpent,
    transition.SpendCap,
)
# Nobody agreed to it, or not to this, or not any more.
UNCONSENTED = (transition.NotApproved, transition.ApprovalPastUseBy, transition.ApprovalOfAnother)


def perform(intent: Intent, *, actor: Actor) -> Outcome:
    """Do it once: claim, call, settle; or say what is known where it was submitted before.

    Raises InvalidField (nothing recorded), FingerprintMismatch, registry.Unregistered, LedgerUnavailable and the
    TransitionRefused of rule 9 and of a run that is not held. Must not be called inside a transaction.
    """
    outside_transactions()
    provider = registry.provider(intent.provider)
    spec = registry.spec(intent.provider, intent.action)
    intent = _owned(intent, actor)
    row = row_of(intent, provider, spec)
    on_record()
    try:
        if consent.needed(intent.consent, intent.request):
            return _ask_first(row, intent, provider, spec, actor)
        claim = claim_new(row, intent, provider, spec, actor)
    except transition.Limited as limited:
        try:
            if limited.code in lost_time.REFUSED:
                return _look_first(row, intent, limited, actor)
            return _wait_for_room(row, intent, limited, actor)
        except DATABASE_ERRORS as error:
            raise LedgerUnavailable("what is held back could not be recorded; nothing was sent") from error
    except transition.Pruned:
        return _pruned(row, intent, actor)
    except transition.TooOld:
        raise _too_old(row, spec, actor) from None
    if claim is None:
        return _submitted_before(row, intent, actor)
    return dispatch(claim)


def _too_old(row: Mapping[str, Any], spec: ActionSpec, actor: Actor) -> TooOld:
    """There is no row that could tell of the refusal, so it stands under the key that the operation would have had."""
    asked = {name: row[name] for name in ("provider", "action", "key", "intended_at")}
    fact = actor.fact("too_old", on_behalf_of=row["on_behalf_of"], **asked)
    transition.refuse(subject="operation:new", tenant=row["tenant"], fact=fact)
    return TooOld(spec)


def _owned(intent: Intent, actor: Actor) -> Intent:
    """Who owns or made the token that asks answers for it, and never agrees to it."""
    return replace(intent, owners=(*intent.owners, *actor.owners)) if actor.owners else intent


def submit(intent: Intent, *, actor: Actor, **details: Any) -> Outcome:
    """Record it, due at once, for the workers to do; or say what is known where it was submitted before. Sends nothing.

    `details` stand in the audit entry of its birth. Raises what perform() raises.
    """
    provider = registry.provider(intent.provider)
    spec = registry.spec(intent.provider, intent.action)
    intent = _owned(intent, actor)
    row = row_of(intent, provider, spec)
    try:
        if intent.consent is not None and consent.needed(intent.consent, intent.request):
            _record_and_ask(row, intent, provider, spec, actor, stored=consent.text(intent.consent))
        else:
            waits = {**row, "state": State.READY, "reason_code": "queued"}
            fact = actor.fact("queued", on_behalf_of=intent.on_behalf_of, **details)
            record(waits, intent, actor, after={"due_at": 0}, fact=fact)
    except transition.Pruned:
        return _pruned(row, intent, actor)
    except transition.TooOld:
        raise _too_old(row, spec, actor) from None
    except (OperationalError, InterfaceError, InternalError, ProgrammingError) as error:
        raise LedgerUnavailable("it could not be recorded; nothing was sent") from error
    operation = _on_record(row, intent, actor)
    if operation is None:  # pruned since
        return _pruned(row, intent, actor)
    told = stored_outcome(operation)
    return replace(told, disposition=Disposition.QUEUED) if operation.state == State.READY else told


def _ask_first(row: Mapping[str, Any], intent: Intent, provider: Provider, spec: ActionSpec, actor: Actor) -> Outcome:
    """Record it and ask for a person's consent in one statement; nothing is sent before that is given."""
    assert intent.consent is not None
    try:
        _record_and_ask(row, intent, provider, spec, actor, stored=consent.text(intent.consent))
    except (OperationalError, InterfaceError, InternalError, ProgrammingError) as error:
        raise LedgerUnavailable("the request for consent could not be recorded; nothing was sent") from error
    return _submitted_before(row, intent, actor)


def _record_and_ask(
    row: Mapping[str, Any], intent: Intent, provider: Provider, spec: ActionSpec, actor: Actor, *, stored: str
) -> None:
    if not _known(row):
        call = Call(
            action=intent.action, key=row["key"], request=intent.request, tenant=intent.identity.tenant, attempt=0
        )
        record(
            {**row, "state": State.AWAITING_APPROVAL, "consent": stored, "reason_code": "approval_requested"},
            intent, actor,
            fact=actor.fact("approval_requested", reason=intent.reason, on_behalf_of=intent.on_behalf_of),
            ask=consent.request(
                fingerprint=row["fingerprint"],
                stored=stored,
                requested_by=intent.requested_by or actor.id,
                on_behalf_of=intent.on_behalf_of,
                owners=intent.owners,
                reason=intent.reason,
                seen=consent.kept(consent.look(provider, call), spec.shown),
            ),
        )  # fmt: skip


def _known(row: Mapping[str, Any]) -> bool:
    return Operation.objects.filter(
        lineage=bytes.fromhex(row["lineage"][2:]), intent_version=row["intent_version"]
    ).exists()


def _wait_for_room(row: Mapping[str, Any], intent: Intent, limited: transition.Limited, actor: Actor) -> Outcome:
    """What is held back is recorded as waiting: never lost, and no attempt. Above a ceiling a person must act."""
    for_good = limited.wait is None
    marked = {"escalation_reason": limited.code} if for_good else {}
    held = {"reason_code": limited.code, "held_code": limited.code, "held_by": limited.limit_id}
    moved = record(
        {**row, **held, **marked, "state": State.READY}, intent, actor,
        after={"escalated_at": 0} if for_good else {"due_at": limited.wait or 0},
        observed=[Observed(kind="held_back", data={"code": limited.code, "limit": limited.limit_id})],
        fact=actor.fact(
            limited.code, reason=intent.reason, on_behalf_of=intent.on_behalf_of, limit=limited.limit_id
        ),
    )  # fmt: skip
    if moved is None:
        return _submitted_before(row, intent, actor)
    log.warning("held_back", operation=moved.pk, code=limited.code, limit=limited.limit_id)
    return stored_outcome(Operation.objects.get(pk=moved.pk))


def _look_first(row: Mapping[str, Any], intent: Intent, limited: transition.Limited, actor: Actor) -> Outcome:
    """After a restore, what is not shown to be new may have been sent in the time that was lost: it enters unknown."""
    fence.forget()
    with transaction.atomic(using=transition.ALIAS):
        moved = record(
            {**row, "state": State.READY, "reason_code": limited.code}, intent, actor, after={"due_at": 0},
            fact=actor.fact(limited.code, reason=intent.reason, on_behalf_of=intent.on_behalf_of),
        )  # fmt: skip
        if moved is not None:
            lost_time.look_first(Operation.objects.get(pk=moved.pk))
    if moved is None:
        return _submitted_before(row, intent, actor)
    log.warning("entered_unknown", operation=moved.pk, code=limited.code)
    return stored_outcome(Operation.objects.get(pk=moved.pk))


def _pruned(row: Mapping[str, Any], intent: Intent, actor: Actor) -> Outcome:
    """The answer of what a pruned operation left behind. Its result is gone; how it ended is not."""
    stone = Tombstone.objects.get(
        lineage=bytes.fromhex(row["lineage"][2:]), intent_version=intent.identity.intent_version
    )
    subject = Subject(Kind.OPERATION, stone.subject_id)
    if stone.fingerprint != row["fingerprint"]:
        fact = actor.fact("fingerprint_mismatch", stored=stone.fingerprint, offered=row["fingerprint"])
        transition.refuse(subject=subject, tenant=stone.tenant, fact=fact)
        raise FingerprintMismatch(pk=stone.subject_id, stored=stone.fingerprint, offered=row["fingerprint"])
    state = State(stone.state)
    disposition = DISPOSITIONS[state]
    return Outcome(
        pk=stone.subject_id,
        state=state,
        disposition=disposition,
        result={},
        reason_code="pruned",
        replayed=disposition is Disposition.REPLAY,
        at=stone.settled_at,
    )


def attempt_again(
    operation: Operation,
    *,
    actor: Actor,
    reason: str = "",
    held: Held | None = None,
    use: Mapping[str, Any] | None = None,
) -> Outcome:
    """One more attempt of a known operation: claim under every guard, call, settle.

    Raises the TransitionRefused that stood in the way. Whether the state allows it at all is asked before
    (`retrying.why_not_retryable`); what the clock and other operations allow is asked under the claim's lock.
    """
    try:
        claim = claim_again(operation, actor=actor, reason=reason, held=held, use=use)
    except transition.ApprovalPastUseBy:
        if use is None and operation.state != State.AMBIGUOUS:
            consent.ask_again(operation, actor=actor)
        raise
    except (transition.KeyForgotten, transition.NewerSent) as refusal:
        _call_for(operation, refusal.verdict, actor)
        raise
    except (transition.TimeSpent, transition.SpendCap) as refusal:
        _end_by_its_cap(operation, refusal.verdict, actor)
        raise
    except transition.Limited as limited:
        if limited.code == "maybe_replayed":
            lost_time.look_first(Operation.objects.get(pk=operation.pk))
        elif limited.wait is None:
            _call_for(operation, limited.code, actor)
        fence.forget()
        raise
    return dispatch(claim)


def _end_by_its_cap(operation: Operation, code: str, actor: Actor) -> None:
    """It came to its cap while it waited to be sent again: the end that the settlement of an attempt would have chosen.

    What is unknown is left to its look-ups, which call a person.
    """
    fails = settlement.spent_fails(final=operation.spent_is_final, error_class=operation.error_class)
    if operation.state != State.FAILED_RETRYABLE or not fails:
        return _call_for(operation, code, actor)
    transition.transition(
        operation.subject,
        to=State.FAILED_TERMINAL,
        version=operation.version,
        guard=("unreported",),
        patch={"reason_code": code, "due_at": None, "not_before": None},
        fact=actor.fact(code),
    )


def _call_for(operation: Operation, reason: str, actor: Actor) -> None:
    """What is proven not applied and may no longer be sent would be asked for ever; an unknown one is looked up."""
    if actor.kind != "person" and operation.state in (State.READY, State.FAILED_RETRYABLE):
        call_a_person(operation, reason, actor=actor)


def call_a_person(operation: Operation, reason: str, *, actor: Actor = SYSTEM) -> None:
    """Mark an operation with which automation cannot go on. Raises StaleVersion where it moved on meanwhile."""
    transition.transition(
        operation.subject,
        to=None,
        version=operation.version,
        patch={"escalation_reason": reason, "due_at": None},
        after={"escalated_at": 0},
        fact=actor.fact(reason),
    )


def dispatch(claim: Claim) -> Outcome:
    """Send the claimed attempt once and settle what came of it."""
    outside_transactions()
    try:
        now = consent.changed(claim.agreed, claim.provider, claim.call()) if not claim.unknown else None
    except NotSent as unchecked:
        return settle(claim, _judge(claim, unchecked))
    if now is not None:
        return _ask_anew(claim, now)
    if claim.spec.repeat is Repeat.LOCAL:
        return local.perform(claim)
    return settle(claim, _judge(claim, _send(claim)))


def _ask_anew(claim: Claim, now: Json) -> Outcome:
    """What was agreed to rests on something that has changed: nothing is sent, and a person is asked again."""
    assert claim.agreed is not None
    shown, sealed = consent.kept(now, claim.spec.shown)
    never_sent = {"first_sent_at": None, "last_sent_at": None, "same_key_until": None}
    observed = Observed(
        kind="precondition_failed", attempt=claim.attempt, generation=claim.generation, observer=workers.me(),
        data={"shown": shown}, sealed=sealed,
    )  # fmt: skip
    stored = Operation.objects.only("consent").get(pk=claim.subject.pk).consent
    try:
        transition.transition(
            claim.subject,
            to=State.AWAITING_APPROVAL,
            generation=claim.generation,
            guard=("held",),
            patch={
                "reason_code": "precondition_failed", "due_at": None,
                **(never_sent if claim.first_sent_at is None else {}),
            },
            observed=[observed],
            consent={"ask": consent.again(claim.agreed, stored=stored, seen=(shown, sealed))},
            fact=me().fact("precondition_failed", attempt=claim.attempt),
        )  # fmt: skip
    except transition.RunNotHeld:
        _end_with_its_run(claim, never_sent if claim.first_sent_at is None else {}, observed)
    except TransitionRefused as refusal:
        log.info("not_asked_anew", operation=claim.subject.pk, verdict=refusal.verdict)
    return stored_outcome(Operation.objects.get(pk=claim.subject.pk))


def _end_with_its_run(claim: Claim, patch: Json, observed: Observed) -> None:
    """Nothing was sent under this claim, and its run has ended meanwhile: nobody is asked about it any more."""
    try:
        transition.transition(
            claim.subject,
            to=State.FAILED_TERMINAL,
            generation=claim.generation,
            guard=("held",),
            patch={"reason_code": "run_ended", "due_at": None, **patch},
            observed=[observed],
            fact=me().fact("run_ended", attempt=claim.attempt),
        )
    except TransitionRefused as refusal:
        log.info("not_ended_with_its_run", operation=claim.subject.pk, verdict=refusal.verdict)


def _judge(claim: Claim, answer: Receipt | Exception) -> Judged:
    """An answer that cannot be read says nothing about the effect, and must not take its attempt down with it."""
    try:
        judged = settlement.judge(claim, answer)
        judged.observed.row()  # found here rather than when it must be written
    except Exception as error:
        log.error("answer_unreadable", operation=claim.subject.pk, attempt=claim.attempt, **fault(error))
        return settlement.unreadable(claim)
    return judged


def _send(claim: Claim) -> Receipt | Exception:
    if policy.boot_seconds() >= claim.send_by:
        return NotSent("the time to send had passed before the request could leave")
    try:
        fence.note(claim.subject.pk, claim.generation)
    except AnchorUnreadable as error:  # a restore that loses this claim would not be noticed
        log.critical("claim_not_noted", operation=claim.subject.pk, why=str(error))
        return NotSent("the claim could not be noted outside the database")
    try:
        answer = claim.provider.perform(claim.call())
        return (
            storable.receipt(answer) if isinstance(answer, Receipt) else OutcomeUnknown("The adapter gave no receipt.")
        )
    except Exception as error:  # whatever an adapter raises is an answer; what no rule names is unknown
        log.info("attempt_unanswered", operation=claim.subject.pk, attempt=claim.attempt, error=type(error).__name__)
        return error


def _submitted_before(row: Mapping[str, Any], intent: Intent, actor: Actor) -> Outcome:
    operation = _on_record(row, intent, actor)
    if operation is None:  # pruned since the claim found it
        return _pruned(row, intent, actor)
    if operation.state in (State.READY, State.FAILED_RETRYABLE) and operation.escalated_at is None:
        return _go_on(operation, intent, actor)
    return _told(operation, actor)


def _on_record(row: Mapping[str, Any], intent: Intent, actor: Actor) -> Operation | None:
    """The operation of this identity. Raises FingerprintMismatch where it is one with another request."""
    operation = Operation.objects.filter(
        lineage=bytes.fromhex(row["lineage"][2:]), intent_version=intent.identity.intent_version
    ).first()
    if operation is not None and operation.fingerprint != row["fingerprint"]:
        transition.refuse(
            subject=operation.subject,
            tenant=operation.tenant,
            fact=actor.fact("fingerprint_mismatch", stored=operation.fingerprint, offered=row["fingerprint"]),
        )
        raise FingerprintMismatch(pk=operation.pk, stored=operation.fingerprint, offered=row["fingerprint"])
    return operation


def _go_on(operation: Operation, intent: Intent, actor: Actor) -> Outcome:
    """A waiting operation whose time has come is claimed by whoever submits it again; an early one waits on."""
    if operation.due_at is None:
        return _told(operation, actor)
    try:
        return attempt_again(operation, actor=actor, reason=intent.reason, held=intent.held)
    except transition.Limited:  # on record already, once for each limit
        return stored_outcome(Operation.objects.get(pk=operation.pk))
    except (transition.NotDue, transition.StaleVersion, transition.NotInTable, *MAY_NOT_SEND, *UNCONSENTED):
        return _told(Operation.objects.get(pk=operation.pk), actor)


def _told(operation: Operation, actor: Actor) -> Outcome:
    """The stored answer; a delivery that came too early or while another is at it is journaled and spends no budget."""
    outcome = stored_outcome(operation)
    if outcome.disposition in (Disposition.IN_PROGRESS, Disposition.WAIT):
        facts = {"disposition": outcome.disposition, "state": operation.state}
        try:
            transition.note(operation.subject, [Observed(kind="delivery_refused", observer=actor.id, data=facts)])
        except DATABASE_ERRORS as error:
            raise LedgerUnavailable("the ledger cannot be written; nothing was sent") from error
    return outcome
