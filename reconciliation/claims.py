"""Claims: the right to send one attempt, written and committed before a byte leaves.

A claim is an insert or one guarded move with "attempt n starts" in the journal; its lease and its generation fence
every later write. A COMMIT that errors is read back by the claim's nonce before anything is sent (rule 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from django.db import (
    DatabaseError,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
    connections,
)

from . import consent, fence, here, keys, policy, registry, sealing, transition, workers
from .actors import Actor
from .anchor import AnchorUnreadable
from .keys import Identity, InvalidField
from .models import Approval, JournalEntry, Operation
from .policy import RetryPolicy
from .providers.base import ActionSpec, Call, Json, Provider, Repeat
from .states import Kind, State, Subject
from .transition import Moved, Observed, TransitionRefused
from .workflows import Consent

DATABASE_ERRORS = (DatabaseError, InterfaceError)  # Django's InterfaceError is no DatabaseError


class LedgerUnavailable(Exception):
    """The claim could not be written, so nothing was sent."""

    @property
    def sentence(self) -> str:
        """As a person is told it."""
        return f"{str(self)[:1].upper()}{str(self)[1:].rstrip('.')}."


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
    reason: str = ""  # why a person asks for it, for the audit log and for who must agree


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
    tried_since: datetime | None = None  # when it was first claimed, where its policy asks for that
    spent_is_final: bool = True
    cost: int = 0  # minor units, of the attempts before this one
    agreed: Approval | None = None  # the consent under which it is sent, where it needs one
    held: Held | None = None  # the lease on its run under which it was claimed

    @property
    def elapsed(self) -> float:
        """Seconds from the first claim to this one, where its policy asks for that."""
        return (self.at - self.tried_since).total_seconds() if self.tried_since else 0.0

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
        **({"owners": sorted(set(intent.owners))} if intent.owners else {}),
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
    # One spelling for ceilings and limits; the request is sent as it was given.
    code = currency.strip().upper() if isinstance(currency, str) else ""
    if not 3 <= len(code) <= 8:
        raise InvalidField(f"request.{spec.money[1]}", "must be a currency code such as USD")
    return amount, code


def record(row: Mapping[str, Any], intent: Intent, actor: Actor, **facts: Any) -> Moved | None:
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


def claim_new(
    row: Mapping[str, Any], intent: Intent, provider: Provider, spec: ActionSpec, actor: Actor
) -> Claim | None:
    nonce, started = uuid4(), policy.boot_seconds()
    columns, after = _lease(spec, attempt=1, generation=1, nonce=nonce)
    once = _first_send(spec)
    moved = _write_claim(
        nonce,
        lambda: record(
            {**row, **columns, "state": State.PENDING},
            intent,
            actor,
            after={**after, **once},
            observed=[_attempt_starts(spec, attempt=1, generation=1)],
            fact=actor.fact("claimed", reason=intent.reason, on_behalf_of=intent.on_behalf_of, attempt=1),
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
        held=intent.held,
    )


def _guards(
    operation: Operation, spec: ActionSpec, actor: Actor, retry: RetryPolicy, since: datetime | None
) -> list[str]:
    # A person may cut a back-off short or pass a cap; nobody may outlive the provider's memory of the key (rule 8).
    guards = [] if actor.kind == "person" else ["due", *_caps(operation, retry, since)]
    if spec.repeat is Repeat.KEYED and operation.first_sent_at is not None:
        guards.append("same_key")
    if spec.repeat is Repeat.NATURAL and operation.first_sent_at is not None:
        guards.append("no_newer")
    return guards


def _caps(operation: Operation, retry: RetryPolicy, since: datetime | None) -> Iterator[str]:
    """What its step's policy says that may be reached while it waits: time passes, and late reports tell of costs."""
    if operation.state == State.READY:  # a person has agreed to it since, or it was never tried
        return
    if since is not None and retry.max_elapsed is not None:
        yield f"before:{(since + timedelta(seconds=retry.max_elapsed)).isoformat()}"
    if retry.max_spend is not None:
        yield f"below:{retry.max_spend}"


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
    outside_transactions()
    on_record()
    spec = registry.spec(operation.provider, operation.action)
    request = operation.request  # opened before the claim: what cannot be read must not cost an attempt
    retry = RetryPolicy.read(operation.retry_policy, spec)
    since = tried_since(operation, retry)
    nonce, started = uuid4(), policy.boot_seconds()
    attempt, generation = operation.attempts + 1, operation.generation + 1
    columns, after = _lease(spec, attempt=attempt, generation=generation, nonce=nonce)
    cleared = transition.unmarked(operation) if actor.kind == "person" or use else {}  # two people decided about it
    moved = _write_claim(
        nonce,
        lambda: transition.transition(
            operation.subject,
            to=State.PENDING,
            version=operation.version,
            patch={**columns, **cleared, "absent_reads": 0, "absent_read_at": None, "lease_ended_at": None},
            after=after,
            once=_first_send(spec),
            guard=_guards(operation, spec, actor, retry, since) if use is None else (),
            observed=[_attempt_starts(spec, attempt=attempt, generation=generation)],
            fact=actor.fact(_why_again(actor, use, attempt), reason=reason, attempt=attempt, **consent.both(use)),
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
        retry=retry,
        tried_since=since,
        spent_is_final=operation.spent_is_final,
        cost=operation.cost_minor,
        agreed=consent.newest(operation) if operation.consent else None,
        held=held,
    )


def tried_since(operation: Operation, retry: RetryPolicy) -> datetime | None:
    """When it was first claimed; None where nothing was, or where its policy does not ask for that.

    Not `first_sent_at`: that is when the provider's memory of the key began, and a refused connection begins none.
    """
    if retry.max_elapsed is None or operation.attempts == 0:
        return None
    starts = JournalEntry.objects.filter(operation=operation, kind="attempt_started").order_by("id")
    return starts.values_list("at", flat=True).first() or operation.first_sent_at


def _why_again(actor: Actor, use: Mapping[str, Any] | None, attempt: int) -> str:
    if use is not None:
        return "sent_again"
    if actor.kind == "person":
        return "retry_requested"
    return "retried" if attempt > 1 else "claimed"


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


def _attempt_starts(spec: ActionSpec, *, attempt: int, generation: int) -> Observed:
    # What an attempt was is on record, and does not follow from what the action declares later.
    how = {"local": True} if spec.repeat is Repeat.LOCAL else {}
    return Observed(kind="attempt_started", attempt=attempt, generation=generation, observer=workers.me(), data=how)


def on_record() -> None:
    """This process is on record before it claims anything, for its death must be provable; and on this connection is
    the ledger that the anchor knows, or the fence is down. Raises LedgerUnavailable.
    """
    try:
        fence.look()
        workers.me()
    except AnchorUnreadable as error:
        raise LedgerUnavailable(f"{error} Nothing was sent.") from error
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


def outside_transactions() -> None:
    connection = here.connection()
    # Without autocommit the first statement opens a transaction, and no atomic block says so. This is asked of a
    # connection that is there: one that cannot be made is found where it is needed, and told as such.
    if connection.in_atomic_block or (connection.connection is not None and not connection.autocommit):
        raise RuntimeError("an operation may not be performed inside a transaction: the claim must be committed first")
