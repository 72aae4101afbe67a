"""perform(): claim -> dispatch -> settle.

The claim (with "attempt n starts" in the journal) is committed before a byte leaves; no transaction is open while the
network is used; the settlement is one more commit. Whatever happens in between, the next reader of the ledger sees a
claim whose lease runs out, and an expired lease is an unknown outcome, never a second dispatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID, uuid4

import structlog
from django.db import (
    DatabaseError,
    DataError,
    IntegrityError,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
    connections,
)

from . import consent, keys, policy, registry, sealing, settlement, spool, storable, transition, workers
from .actors import Actor
from .keys import Identity, InvalidField
from .models import Approval, JournalEntry, Operation, Tombstone
from .policy import RetryPolicy, boot_seconds
from .providers.base import ActionSpec, Call, Json, NotSent, OutcomeUnknown, Provider, Receipt, Repeat
from .scrub import fault
from .settlement import Judged
from .states import Kind, State, Subject
from .transition import Moved, Observed, TransitionRefused
from .workflows import Consent

log = structlog.get_logger(__name__)

MAY_NOT_SEND = (transition.KeyForgotten, transition.NewerSent, transition.ReportedApplied)
# Nobody agreed to it, or not to this, or not any more.
UNCONSENTED = (transition.NotApproved, transition.ApprovalPastUseBy, transition.ApprovalOfAnother)
DATABASE_ERRORS = (DatabaseError, InterfaceError)  # Django's InterfaceError is no DatabaseError


class LedgerUnavailable(Exception):
    """The claim could not be written, so nothing was sent."""


class FingerprintMismatch(Exception):
    """A known identity with another provider, action or request. Nothing is sent, nothing else is told."""

    def __init__(self, *, pk: int, stored: str, offered: str) -> None:
        super().__init__(
            f"operation {pk} has this identity with another request (stored {stored}, offered {offered}); "
            "raise intent_version if this is a new intent"
        )
        self.pk, self.stored, self.offered = pk, stored, offered


class TooOld(InvalidField):
    """An intent from before anything that is still known: whether it was done cannot be told, so it is not done."""

    def __init__(self, spec: ActionSpec) -> None:
        days = spec.keep.days
        super().__init__("intended_at", f"is more than {days} days ago, too long to tell whether it was done already; "
                         "find out at the provider, then ask with a new intent_version")  # fmt: skip


class Disposition(StrEnum):
    """What became of one submission of an operation."""

    EXECUTED = "executed"  # this call sent it, and the answer is in `state`
    QUEUED = "queued"
    REPLAY = "replay"  # settled before; nothing was sent now
    STOPPED = "stopped"
    WAIT = "wait"
    IN_PROGRESS = "in_progress"


@dataclass(frozen=True, kw_only=True)
class Held:
    """The lease on a run under which its steps are claimed."""

    run_id: int
    generation: int


@dataclass(frozen=True, kw_only=True)
class Intent:
    """What is to be done once. `request` is a JSON object; its bytes are fixed at the first acceptance."""

    identity: Identity
    provider: str
    action: str
    request: Json
    held: Held | None = None
    requested_by: str = ""
    on_behalf_of: str = ""
    intended_at: datetime | None = None
    retry: RetryPolicy | None = None
    undo_of: int | None = None  # the operation that this one reverses
    run_id: int | None = None  # its run, where that has ended and is not held
    spent_is_final: bool = True  # False: a spent budget waits for a person instead of failing
    consent: Consent | None = None  # whether, and under which policy, a person must agree before it is sent
    owners: tuple[str, ...] = ()  # who owns and who made the token that asks: they never approve it


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The answer to one submission. `replayed` with `at` says that it is the stored one, and from when."""

    pk: int
    state: State
    disposition: Disposition
    result: Json
    reason_code: str = ""
    replayed: bool = False
    at: datetime | None = None
    sent: bool = True  # False: no attempt was ever made

    @property
    def outcome(self) -> str:
        """succeeded | failed | unknown | not_sent, as far as it is known."""
        if not self.sent and self.state is not State.SUCCEEDED:
            return "not_sent"
        if self.state is State.SUCCEEDED:
            return "succeeded"
        if self.state in (State.FAILED_TERMINAL, State.FAILED_RETRYABLE):
            return "failed"  # proof of no effect; `state` says whether it will be tried again
        return "not_sent" if self.state in (State.READY, State.AWAITING_APPROVAL) else "unknown"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The right to send attempt `attempt`, and what is needed to do so without reading again."""

    subject: Subject
    tenant: str
    generation: int
    attempt: int
    nonce: UUID
    provider: Provider
    action: str
    spec: ActionSpec
    key: str
    request: Json
    unknown: tuple[int, ...]  # earlier attempts that nobody knows about
    identical_replays: int
    last_error: str
    send_by: float
    at: datetime
    first_sent_at: datetime | None
    same_key_until: datetime | None
    provider_operation_id: str = ""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    spent_is_final: bool = True
    cost: int = 0  # minor units, of the attempts before this one
    agreed: Approval | None = None  # the consent under which it is sent, where it needs one

    @property
    def elapsed(self) -> float:
        """Seconds from the first send to this claim."""
        return (self.at - self.first_sent_at).total_seconds() if self.first_sent_at else 0.0

    def call(self) -> Call:
        """What the adapter gets."""
        return Call(
            action=self.action,
            key=self.key,
            request=self.request,
            tenant=self.tenant,
            attempt=self.attempt,
            provider_operation_id=self.provider_operation_id or None,
            first_sent_at=self.first_sent_at or self.at,
            last_sent_at=self.at,
            send_by=self.send_by,
        )


def perform(intent: Intent, *, actor: Actor) -> Outcome:
    """Do it once: claim, call, settle; or say what is known where it was submitted before.

    Raises InvalidField (nothing recorded), FingerprintMismatch, registry.Unregistered, LedgerUnavailable and the
    TransitionRefused of rule 9 and of a run that is not held. Must not be called inside a transaction.
    """
    _outside_transactions()
    provider = registry.provider(intent.provider)
    spec = registry.spec(intent.provider, intent.action)
    row = row_of(intent, provider, spec)
    _on_record()
    try:
        if consent.needed(intent.consent, intent.request):
            return _ask_first(row, intent, provider, spec, actor)
        claim = _claim_new(row, intent, provider, spec, actor)
    except transition.Limited as limited:
        try:
            return _wait_for_room(row, intent, limited, actor)
        except DATABASE_ERRORS as error:
            raise LedgerUnavailable("what is held back could not be recorded; nothing was sent") from error
    except transition.Pruned:
        return _pruned(row, intent, actor)
    except transition.TooOld:
        raise TooOld(spec) from None
    if claim is None:
        return _submitted_before(row, intent, actor)
    return dispatch(claim)


def row_of(intent: Intent, provider: Provider, spec: ActionSpec) -> dict[str, Any]:
    """The columns of a new operation that do not depend on its first state. Raises InvalidField."""
    identity = intent.identity
    if not isinstance(intent.request, dict):
        raise InvalidField("request", "must be a JSON object")
    shown, sealed = sealing.split(intent.request, spec.shown)
    amount, currency = _money(spec, intent.request)
    return {
        "tenant": identity.tenant,
        "workflow_type": identity.workflow_type,
        "workflow_id": identity.workflow_id,
        "step": identity.step,
        "business_object": str(identity.business_object),
        "intent_version": identity.intent_version,
        "lineage": "\\x" + keys.lineage_hash(identity).hex(),
        "key": keys.operation_key(identity),
        "run_id": intent.held.run_id if intent.held else intent.run_id,
        "provider": intent.provider,
        "account": provider.account,
        "action": intent.action,
        "fingerprint": keys.fingerprint(
            provider=intent.provider,
            account=provider.account,
            action=intent.action,
            request=intent.request,
            volatile=spec.volatile,
        ),
        "request_shown": shown,
        "request_sealed": sealed,
        "amount_minor": amount,
        "currency": currency,
        "requested_by": intent.requested_by,
        "on_behalf_of": intent.on_behalf_of,
        "intended_at": intent.intended_at.isoformat() if intent.intended_at else None,
        "retry_policy": intent.retry.text() if intent.retry else "",
        "undo_of_id": intent.undo_of,
        "spent_is_final": intent.spent_is_final,
        "ceiling_minor": _ceiling(spec, intent.request),
        "horizon": spec.keep.total_seconds(),
    }


def _ceiling(spec: ActionSpec, request: Json) -> int | None:
    if spec.ceiling is None:
        return None
    ceiling = request.get(spec.ceiling)
    if isinstance(ceiling, bool) or not isinstance(ceiling, int) or not 0 <= ceiling < 2**63:
        raise InvalidField(f"request.{spec.ceiling}", "must be the ceiling, as a whole number of minor units")
    return ceiling


def _money(spec: ActionSpec, request: Json) -> tuple[int | None, str]:
    if spec.money is None:
        return None, ""
    amount, currency = request.get(spec.money[0]), request.get(spec.money[1])
    if isinstance(amount, bool) or not isinstance(amount, int) or not abs(amount) < 2**63:
        raise InvalidField(f"request.{spec.money[0]}", "must be a whole number of minor units (4200 for 42.00)")
    if not isinstance(currency, str) or not 3 <= len(currency) <= 8:
        raise InvalidField(f"request.{spec.money[1]}", "must be a currency code such as USD")
    return amount, currency


# Asking


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
        _open(
            {**row, "state": State.AWAITING_APPROVAL, "consent": stored, "reason_code": "approval_requested"},
            intent, actor,
            fact=actor.fact("approval_requested", on_behalf_of=intent.on_behalf_of),
            ask=consent.request(
                fingerprint=row["fingerprint"],
                stored=stored,
                requested_by=intent.requested_by or actor.id,
                on_behalf_of=intent.on_behalf_of,
                owners=(*intent.owners, *actor.owners),
                seen=consent.kept(consent.look(provider, call), spec.shown),
            ),
        )  # fmt: skip


def _known(row: Mapping[str, Any]) -> bool:
    return Operation.objects.filter(
        lineage=bytes.fromhex(row["lineage"][2:]), intent_version=row["intent_version"]
    ).exists()


def _open(row: Mapping[str, Any], intent: Intent, actor: Actor, **facts: Any) -> Moved | None:
    """Record a new operation. An older intent that still waits for consent is void with its request (rule 9)."""
    held = intent.held.generation if intent.held else None
    facts = {"after": {}, "observed": [], **facts}
    try:
        return transition.open_operation(row=row, run_generation=held, **facts)
    except transition.OlderVersionWaiting as refusal:
        _supersede(Operation.objects.get(pk=refusal.pk or 0), refusal, actor)
    return transition.open_operation(row=row, run_generation=held, **facts)


def _supersede(older: Operation, refusal: TransitionRefused, actor: Actor) -> None:
    if older.state != State.AWAITING_APPROVAL:
        raise refusal
    transition.transition(
        older.subject,
        to=State.TERMINATED,
        version=older.version,
        patch={"reason_code": "superseded"},
        consent={"superseded": True},
        fact=actor.fact("superseded"),
    )


# Claiming


def _claim_new(
    row: Mapping[str, Any], intent: Intent, provider: Provider, spec: ActionSpec, actor: Actor
) -> Claim | None:
    nonce, started = uuid4(), boot_seconds()
    columns, after = _lease(spec, attempt=1, generation=1, nonce=nonce)
    once = _first_send(spec)
    moved = _write_claim(
        nonce,
        lambda: _open(
            {**row, **columns, "state": State.PENDING},
            intent,
            actor,
            after={**after, **once},
            observed=[_attempt_starts(attempt=1, generation=1)],
            fact=actor.fact("claimed", on_behalf_of=intent.on_behalf_of, attempt=1),
        ),
    )
    if moved is None:
        return None
    return Claim(
        subject=Subject(Kind.OPERATION, moved.pk),
        tenant=intent.identity.tenant,
        generation=1,
        attempt=1,
        nonce=nonce,
        provider=provider,
        action=intent.action,
        spec=spec,
        key=row["key"],
        request=sealing.in_order(intent.request),
        unknown=(),
        identical_replays=0,
        last_error="",
        send_by=started + _send_window(spec),
        at=moved.at,
        first_sent_at=None,
        same_key_until=None,
        retry=intent.retry or RetryPolicy(attempts=spec.attempts),
        spent_is_final=intent.spent_is_final,
    )


def _wait_for_room(row: Mapping[str, Any], intent: Intent, limited: transition.Limited, actor: Actor) -> Outcome:
    """What is held back is recorded as waiting: never lost, and no attempt. Above a ceiling a person must act."""
    for_good = limited.wait is None
    marked = {"escalation_reason": limited.code} if for_good else {}
    held = {"reason_code": limited.code, "held_code": limited.code, "held_by": limited.limit_id}
    moved = _open(
        {**row, **held, **marked, "state": State.READY}, intent, actor,
        after={"escalated_at": 0} if for_good else {"due_at": limited.wait or 0},
        observed=[Observed(kind="held_back", data={"code": limited.code, "limit": limited.limit_id})],
        fact=actor.fact(limited.code, on_behalf_of=intent.on_behalf_of, limit=limited.limit_id),
    )  # fmt: skip
    if moved is None:
        return _submitted_before(row, intent, actor)
    log.warning("held_back", operation=moved.pk, code=limited.code, limit=limited.limit_id)
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
    disposition = _DISPOSITIONS[state]
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
        if use is None:
            consent.ask_again(operation, actor=actor)
        raise
    except (transition.KeyForgotten, transition.NewerSent) as refusal:
        _call_a_person(operation, refusal.verdict, actor)
        raise
    except transition.Limited as limited:
        if limited.wait is None:
            _call_a_person(operation, limited.code, actor)
        raise
    return dispatch(claim)


def _call_a_person(operation: Operation, reason: str, actor: Actor) -> None:
    """What is proven not applied and may no longer be sent would be asked for ever; an unknown one is looked up."""
    if actor.kind == "person" or operation.state not in (State.READY, State.FAILED_RETRYABLE):
        return
    transition.transition(
        operation.subject,
        to=None,
        version=operation.version,
        patch={"escalation_reason": reason, "due_at": None},
        after={"escalated_at": 0},
        fact=actor.fact(reason),
    )


def _guards(operation: Operation, spec: ActionSpec, actor: Actor) -> list[str]:
    # A person may cut a back-off short; nobody may outlive the provider's memory of the key (rule 8).
    guards = [] if actor.kind == "person" or operation.state == State.AMBIGUOUS else ["due"]
    if spec.repeat is Repeat.KEYED and operation.first_sent_at is not None:
        guards.append("same_key")
    if spec.repeat is Repeat.NATURAL and operation.first_sent_at is not None:
        guards.append("no_newer")
    return guards


def claim_again(
    operation: Operation,
    *,
    actor: Actor,
    reason: str = "",
    held: Held | None = None,
    use: Mapping[str, Any] | None = None,
) -> Claim:
    """Claim a known operation for one more attempt. Raises the TransitionRefused that stood in the way.

    `use` names the approval by which a second person accepts that this may make a duplicate; the claim uses it up.
    """
    _outside_transactions()
    _on_record()
    spec = registry.spec(operation.provider, operation.action)
    request = operation.request  # opened before the claim: what cannot be read must not cost an attempt
    nonce, started = uuid4(), boot_seconds()
    attempt, generation = operation.attempts + 1, operation.generation + 1
    columns, after = _lease(spec, attempt=attempt, generation=generation, nonce=nonce)
    cleared = transition.unmarked(operation) if actor.kind == "person" else {}
    moved = _write_claim(
        nonce,
        lambda: transition.transition(
            operation.subject,
            to=State.PENDING,
            version=operation.version,
            patch={**columns, **cleared, "absent_reads": 0, "absent_read_at": None, "lease_ended_at": None},
            after=after,
            once=_first_send(spec),
            guard=_guards(operation, spec, actor) if use is None else (),
            observed=[_attempt_starts(attempt=attempt, generation=generation)],
            fact=actor.fact(_why_again(actor, use), reason=reason, attempt=attempt, **_asked(use)),
            run_generation=held.generation if held else None,
            consent={"use": use} if use else None,
        ),
    )
    assert moved is not None
    return Claim(
        subject=operation.subject,
        tenant=operation.tenant,
        generation=generation,
        attempt=attempt,
        nonce=nonce,
        provider=registry.provider(operation.provider),
        action=operation.action,
        spec=spec,
        key=operation.key,
        request=request,
        unknown=tuple(operation.unknown_attempts),
        identical_replays=operation.identical_replays,
        last_error=operation.error_class,
        send_by=started + _send_window(spec),
        at=moved.at,
        first_sent_at=operation.first_sent_at,
        same_key_until=operation.same_key_until,
        provider_operation_id=operation.provider_operation_id,
        retry=RetryPolicy.read(operation.retry_policy, spec),
        spent_is_final=operation.spent_is_final,
        cost=operation.cost_minor,
        agreed=consent.newest(operation) if operation.consent else None,
    )


def _why_again(actor: Actor, use: Mapping[str, Any] | None) -> str:
    if use is not None:
        return "sent_again"
    return "retry_requested" if actor.kind == "person" else "retried"


def _asked(use: Mapping[str, Any] | None) -> dict[str, Any]:
    """Both people stand in the audit log: who asked, and who agreed."""
    return {} if use is None else {name: use[name] for name in ("id", "asked_by", "approved_by")}


def _lease(spec: ActionSpec, *, attempt: int, generation: int, nonce: UUID) -> tuple[dict[str, Any], dict[str, float]]:
    seconds = policy.lease_seconds(spec)
    columns = {
        "attempts": attempt,
        "generation": generation,
        "claim_nonce": str(nonce),
        "lease_owner": workers.me(),
        "not_before": None,
    }
    return columns, {"lease_until": seconds, "due_at": seconds, "last_sent_at": 0}


def _first_send(spec: ActionSpec) -> dict[str, float]:
    once: dict[str, float] = {"first_sent_at": 0}
    if spec.repeat is Repeat.KEYED:
        once["same_key_until"] = policy.same_key_seconds(spec)
    return once


def _send_window(spec: ActionSpec) -> float:
    """Seconds after the claim in which the request may leave, so that its answer is due within the lease."""
    return max(policy.lease_seconds(spec) - spec.timeout.total_seconds(), 0.0)


def _attempt_starts(*, attempt: int, generation: int) -> Observed:
    return Observed(kind="attempt_started", attempt=attempt, generation=generation, observer=workers.me())


def _on_record() -> None:
    """This process is on record before it claims anything: its death must be provable. Raises LedgerUnavailable."""
    try:
        workers.me()
    except DATABASE_ERRORS as error:
        connections[transition.ALIAS].close()
        raise LedgerUnavailable("this worker cannot be put on record; nothing was sent") from error


def _write_claim(nonce: UUID, write: Any) -> Moved | None:
    """Commit a claim, or read back by its nonce whether it was committed although the COMMIT errored (rule 4).

    A database that only reads answers with an InternalError, one that took our rights away with a ProgrammingError.
    """
    try:
        moved: Moved | None = write()
    except (OperationalError, InterfaceError, InternalError, ProgrammingError) as error:
        return _read_back(nonce, error)
    return moved


def _read_back(nonce: UUID, error: Exception) -> Moved:
    connections[transition.ALIAS].close()
    try:
        mine = Operation.objects.filter(claim_nonce=nonce).only("pk", "version", "last_sent_at").first()
    except DATABASE_ERRORS as again:
        raise LedgerUnavailable("the ledger cannot be reached; nothing was sent") from again
    if mine is None or mine.last_sent_at is None:
        raise LedgerUnavailable("the claim was not written; nothing was sent") from error
    return Moved(pk=mine.pk, at=mine.last_sent_at, source="", version=mine.version)


def _outside_transactions() -> None:
    if connections[transition.ALIAS].in_atomic_block:
        raise RuntimeError("an operation may not be performed inside a transaction: the claim must be committed first")


# Dispatching and settling


def dispatch(claim: Claim) -> Outcome:
    """Send the claimed attempt once and settle what came of it."""
    _outside_transactions()
    try:
        now = consent.changed(claim.agreed, claim.provider, claim.call()) if not claim.unknown else None
    except NotSent as unchecked:
        return settle(claim, _judge(claim, unchecked))
    if now is not None:
        return _ask_anew(claim, now)
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
            fact=_me().fact("precondition_failed", attempt=claim.attempt),
        )  # fmt: skip
    except TransitionRefused as refusal:
        log.info("not_asked_anew", operation=claim.subject.pk, verdict=refusal.verdict)
    return stored_outcome(Operation.objects.get(pk=claim.subject.pk))


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
    if boot_seconds() >= claim.send_by:
        return NotSent("the time to send had passed before the request could leave")
    try:
        answer = claim.provider.perform(claim.call())
        return (
            storable.receipt(answer) if isinstance(answer, Receipt) else OutcomeUnknown("The adapter gave no receipt.")
        )
    except Exception as error:  # whatever an adapter raises is an answer; what no rule names is unknown
        log.info("attempt_unanswered", operation=claim.subject.pk, attempt=claim.attempt, error=type(error).__name__)
        return error


def settle(claim: Claim, judged: Judged) -> Outcome:
    """Write what came of an attempt. A receipt is evidence first: it is kept even where it can settle nothing."""
    try:
        moved = _write_settlement(claim, judged)
    except transition.ReportedApplied:
        # An earlier attempt has been reported as applied meanwhile: this refusal speaks for its own attempt only.
        return settle(claim, settlement.contradicted(claim, judged))
    except TransitionRefused as refusal:
        return _too_late(claim, judged, refusal)
    except IntegrityError as error:
        if judged.to is State.SUCCEEDED:
            # One effect at the provider proves one operation: this one is another's, which a person must sort out.
            return settle(claim, settlement.belongs_to_another(claim, judged))
        return _settle_once_more(claim, judged, error)
    except (DataError, ValueError) as error:  # it holds what no column can: the attempt is unknown, and looked up
        return _settle_once_more(claim, settlement.unreadable(claim), error)
    except DATABASE_ERRORS as error:
        return _settle_once_more(claim, judged, error)
    return Outcome(
        pk=claim.subject.pk,
        state=judged.to,
        disposition=Disposition.EXECUTED,
        result=judged.result,
        reason_code=judged.reason_code,
        at=moved.at,
    )


def _write_settlement(claim: Claim, judged: Judged) -> Moved:
    return transition.transition(
        claim.subject,
        to=judged.to,
        generation=claim.generation,
        guard=("held", "unreported") if judged.to in _FAILED and claim.attempt > 1 else ("held",),
        patch=judged.patch,
        after=judged.after,
        observed=[judged.observed],
        fact=_me().fact(judged.reason_code, attempt=claim.attempt),
    )


def _me() -> Actor:
    return Actor(id=workers.me(), kind="worker")


_FAILED = (State.FAILED_RETRYABLE, State.FAILED_TERMINAL)


def _settle_once_more(claim: Claim, judged: Judged, error: Exception) -> Outcome:
    """The COMMIT errored or the settlement was refused: it may have been written. Ask, then keep the receipt alone."""
    log.error("settlement_failed", operation=claim.subject.pk, attempt=claim.attempt, error=type(error).__name__)
    connections[transition.ALIAS].close()
    try:
        moved = _write_settlement(claim, judged)
    except TransitionRefused as refusal:
        return _too_late(claim, judged, refusal)
    except DATABASE_ERRORS:
        _keep_receipt(claim, judged)
        return _unsettled(claim)
    return replace(_unsettled(claim), state=judged.to, result=judged.result, at=moved.at)


def _keep_receipt(claim: Claim, judged: Judged) -> None:
    """Journal it alone; if that fails too, spool it. Nothing is sent again: the lease runs out into `ambiguous`."""
    connections[transition.ALIAS].close()
    _report(claim, judged)
    log.critical("receipt_kept_unsettled", operation=claim.subject.pk, attempt=claim.attempt)


def _report(claim: Claim, judged: Judged) -> None:
    report = replace(judged.observed, kind="late_report")
    try:
        transition.note(claim.subject, [report], look_soon=True)
    except DATABASE_ERRORS:
        spool.keep(claim.subject, report)


def _too_late(claim: Claim, judged: Judged, refusal: TransitionRefused) -> Outcome:
    """Another generation owns it now: what we saw is kept and judged by others. Unless our first write had landed."""
    try:
        if not _already_written(claim, judged):
            _report_late(claim, judged, refusal)
        return stored_outcome(Operation.objects.get(pk=claim.subject.pk))
    except DATABASE_ERRORS:
        _keep_receipt(claim, judged)
        return _unsettled(claim)


def _report_late(claim: Claim, judged: Judged, refusal: TransitionRefused) -> None:
    transition.note(claim.subject, [replace(judged.observed, kind="late_report")], look_soon=True)
    fact = _me().fact("stale_worker_refused", attempt=claim.attempt, verdict=refusal.verdict)
    transition.refuse(subject=claim.subject, tenant=claim.tenant, fact=fact)
    log.warning("stale_worker_refused", operation=claim.subject.pk, generation=claim.generation)


def _already_written(claim: Claim, judged: Judged) -> bool:
    """Whether this claim's settlement is on record; its late report, or somebody's finding, is not that."""
    return JournalEntry.objects.filter(
        operation_id=claim.subject.pk,
        generation=claim.generation,
        attempt=claim.attempt,
        kind=judged.observed.kind,
    ).exists()


def _unsettled(claim: Claim) -> Outcome:
    return Outcome(
        pk=claim.subject.pk,
        state=State.PENDING,
        disposition=Disposition.EXECUTED,
        result={},
        reason_code="settlement_failed",
    )


# What was submitted before


def _submitted_before(row: Mapping[str, Any], intent: Intent, actor: Actor) -> Outcome:
    operation = Operation.objects.filter(
        lineage=bytes.fromhex(row["lineage"][2:]), intent_version=intent.identity.intent_version
    ).first()
    if operation is None:  # pruned since the claim found it
        return _pruned(row, intent, actor)
    if operation.fingerprint != row["fingerprint"]:
        transition.refuse(
            subject=operation.subject,
            tenant=operation.tenant,
            fact=actor.fact("fingerprint_mismatch", stored=operation.fingerprint, offered=row["fingerprint"]),
        )
        raise FingerprintMismatch(pk=operation.pk, stored=operation.fingerprint, offered=row["fingerprint"])
    if operation.state in (State.READY, State.FAILED_RETRYABLE) and operation.escalated_at is None:
        return _go_on(operation, intent, actor)
    return _told(operation, actor)


def _go_on(operation: Operation, intent: Intent, actor: Actor) -> Outcome:
    """A waiting operation whose time has come is claimed by whoever submits it again; an early one waits on."""
    if operation.due_at is None:
        return _told(operation, actor)
    try:
        return attempt_again(operation, actor=actor, held=intent.held)
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


_DISPOSITIONS = {
    State.SUCCEEDED: Disposition.REPLAY,
    State.FAILED_TERMINAL: Disposition.REPLAY,
    State.TERMINATED: Disposition.STOPPED,
    State.PENDING: Disposition.IN_PROGRESS,
}


REFUSED_BY_PEOPLE = ("denied", "approval_expired")  # nothing was sent, and nothing will be


def stored_outcome(operation: Operation) -> Outcome:
    """What the ledger knows, marked as a stored answer with its time."""
    state = State(operation.state)
    disposition = _DISPOSITIONS.get(state, Disposition.WAIT)
    if state is State.FAILED_TERMINAL and operation.reason_code in REFUSED_BY_PEOPLE:
        disposition = Disposition.STOPPED
    return Outcome(
        pk=operation.pk,
        state=state,
        disposition=disposition,
        result=operation.result,
        reason_code=operation.reason_code,
        replayed=disposition is Disposition.REPLAY,
        at=operation.settled_at or operation.updated_at,
        sent=operation.attempts > 0,
    )
