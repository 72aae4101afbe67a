"""Stop switches, limits, and what they hold back.

They stand in the database and every claim reads them under its own transaction (sql/limits.sql). A stop switch and the
three limits are one kind of row: what they cover is named by tenant, provider, action, workflow and currency, where
nothing named covers everything. This module is their one writer; what a claim meets is `transition.Limited`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from django.db import transaction
from django.db.models import Q

from . import pressing, transition
from .actors import Actor, Permission
from .deeds import LONGEST_REASON, NotAllowed, check_reason
from .models import HeldBack, Limit, Operation
from .pressing import Answer, Verdict
from .states import State

KINDS = ("stop", "concurrency", "rate", "amount")
GUARD = "system:guard"  # who sets a stop switch when one kind of operation is triggered in masses


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A limit to be. `most` is calls, or minor units of `currency`; a stop switch has neither number."""

    kind: str
    tenant: str = ""
    provider: str = ""
    action: str = ""
    workflow_type: str = ""
    currency: str = ""
    most: int | None = None
    window_seconds: int | None = None

    def problem(self) -> str:
        """What is wrong with it, as a sentence; empty where nothing is."""
        if self.kind not in KINDS:
            return f"A limit is one of {', '.join(KINDS)}."
        if self.kind == "stop":
            return "A stop switch takes no number." if self.most is not None or self.window_seconds is not None else ""
        if self.most is None or not 0 < self.most < 2**63:
            return "Say how many, or how much in minor units, at most: a whole number above 0."
        if self.kind != "concurrency" and (self.window_seconds is None or not 0 < self.window_seconds <= 31_536_000):
            return "Say how long the window is, in seconds: from 1 to a year."
        if self.kind == "concurrency" and self.window_seconds is not None:
            return "What is in flight at once has no window."
        return "A sum needs one currency." if self.kind == "amount" and not self.currency else ""


@dataclass(frozen=True)
class New:
    """The subject of a press that sets a limit: there is no row yet."""

    tenant: str
    subject: str = "limit:new"


def in_force(tenants: Iterable[str]) -> list[Limit]:
    """Every limit that touches one of these tenants, stop switches first, oldest first."""
    rows = Limit.objects.filter(Q(tenant="") | Q(tenant__in=list(tenants)), lifted_at__isnull=True)
    return sorted(rows, key=lambda limit: (limit.kind != "stop", limit.pk))


def stops(tenants: Iterable[str]) -> list[Limit]:
    """The stop switches among them."""
    return [limit for limit in in_force(tenants) if limit.kind == "stop"]


def covers(limit: Limit, operation: Operation) -> bool:
    """Whether a limit covers an operation."""
    names = ("tenant", "provider", "action", "workflow_type", "currency")
    return all(getattr(limit, name) in ("", getattr(operation, name)) for name in names)


def holding(operation: Operation) -> list[HeldBack]:
    """What holds a waiting operation back, as far as it has been refused by what is still in force."""
    if operation.state not in (State.READY, State.FAILED_RETRYABLE, State.AMBIGUOUS):
        return []
    rows = HeldBack.objects.filter(operation_id=operation.pk).select_related("limit").order_by("pk")
    return [row for row in rows if row.limit is None or row.limit.lifted_at is None]


def set_limit(wanted: Wanted, *, actor: Actor, reason: str, token: UUID) -> Answer:
    """Set a stop switch or a limit. The token's second press gets the first answer."""
    with transaction.atomic():
        earlier = pressing.take(token, action=f"set_{wanted.kind}", subject=New(wanted.tenant), actor=actor)
        return earlier or pressing.keep(token, *_set(wanted, actor, reason))


def _set(wanted: Wanted, actor: Actor, reason: str) -> tuple[Verdict, str]:
    try:
        _check(actor, reason)
        if wanted.problem():
            raise NotAllowed(wanted.problem())
    except NotAllowed as refusal:
        return _refused("limit:new", wanted.tenant, actor, reason, refusal)
    columns = {name: value for name, value in vars(wanted).items() if value is not None}
    who = {"set_by": actor.id, "set_by_name": actor.name[:200], "reason": reason}
    fact = actor.fact("limit_set", reason=reason, **columns)
    pk = transition.set_limit(row={**columns, **who}, fact=fact)
    if pk is None:
        return Verdict.JOINED, "The same one is set already; nothing was changed."
    return Verdict.DONE, "Set. Every claim from now on reads it; what is in flight is not stopped."


def lift(limit: Limit, *, version: int, actor: Actor, reason: str, token: UUID) -> Answer:
    """Release a stop switch or take a limit away; what it held back is due at once."""
    with transaction.atomic():
        earlier = pressing.take(token, action="lift_limit", subject=limit, actor=actor)
        return earlier or pressing.keep(token, *_lift(limit, version, actor, reason))


def _lift(limit: Limit, version: int, actor: Actor, reason: str) -> tuple[Verdict, str]:
    try:
        _check(actor, reason)
        if limit.kind not in KINDS:
            raise NotAllowed("This is the restore fence; it ends with a release on its own page.")
    except NotAllowed as refusal:
        return _refused(limit.subject, limit.tenant, actor, reason, refusal)
    fact = actor.fact("limit_lifted", reason=reason)
    lifted = transition.lift_limit(limit.pk, version=version, by=actor.id, fact=fact)
    if not lifted:
        return Verdict.CONFLICT, "Nothing was changed: it was released or changed already."
    return Verdict.DONE, "Released. What it held back is due now."


def _check(actor: Actor, reason: str) -> None:
    if not actor.may(Permission.STOP):
        raise NotAllowed("Your role does not allow this; it needs “stop” in every tenant that it covers.")
    check_reason(reason, missing="A reason is needed: it stands on every page that this touches, and in the audit log.")


def _refused(subject: str, tenant: str, actor: Actor, reason: str, why: NotAllowed) -> tuple[Verdict, str]:
    transition.refuse(
        subject=subject, tenant=tenant or ":all", fact=actor.fact("not_allowed", reason=reason[:LONGEST_REASON])
    )
    return Verdict.REFUSED, str(why)
