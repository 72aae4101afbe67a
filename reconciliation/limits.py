"""Stop switches, limits, and what they hold back.

They stand in the database and every claim reads them under its own transaction (sql/limits.sql). A stop switch and the
three limits are one kind of row: what they cover is named by tenant, provider, action, workflow and currency, where
nothing named covers everything. This module is their one writer; what a claim meets is `transition.Limited`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Q

from . import consent, places, pressing, second_person, transition, wording
from .actors import Actor, Permission
from .deeds import LONGEST_REASON, NotAllowed, check_reason
from .models import HeldBack, Limit, Operation
from .pressing import Answer, Verdict
from .states import Kind, State

KINDS = ("stop", "concurrency", "rate", "amount")
GUARD = "system:guard"  # who sets a stop switch when one kind of operation is triggered in masses
TRIES = 8  # at setting a limit that others set, change or take away at the same moment
SLIP = timedelta(minutes=15)  # in which whoever set a limit may loosen it alone: it restores what was before


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
        if self.currency and not 3 <= len(self.currency.upper()) <= 8:  # as it stands on operations
            return "A currency is a code of 3 to 8 letters, such as USD."
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
    names = ("tenant", "provider", "action", "workflow_type")
    placed = all(getattr(limit, name) in ("", getattr(operation, name)) for name in names)
    return placed and limit.currency.upper() in ("", operation.currency)


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
        problem = wanted.problem() or places.problem(
            tenant=wanted.tenant,
            provider=wanted.provider,
            action=wanted.action,
            workflow_type=wanted.workflow_type,
            currency=wanted.currency,
        )
        if problem:
            raise NotAllowed(problem)
    except NotAllowed as refusal:
        return _refused("limit:new", wanted.tenant, actor, reason, refusal)
    wanted = replace(wanted, currency=wanted.currency.upper())  # as it stands on operations
    for _ in range(TRIES):
        pk = _put(wanted, actor, reason)
        if pk is not None:
            return Verdict.DONE, f"Set. {_READ}"
        try:
            if standing := _in_its_place(wanted):
                return _onto(standing, wanted.most, actor, reason)
        except transition.StaleVersion:
            continue
    return Verdict.CONFLICT, _CHANGED


def _put(wanted: Wanted, actor: Actor, reason: str) -> int | None:
    columns = {name: value for name, value in vars(wanted).items() if value is not None}
    who = {"set_by": actor.id, "set_by_name": actor.name[:200], "reason": reason}
    return transition.set_limit(row={**columns, **who}, fact=actor.fact("limit_set", reason=reason, **columns))


def _in_its_place(wanted: Wanted) -> Limit | None:
    """What is in force where this one would stand; None where that was taken away a moment ago."""
    place = {name: value for name, value in vars(wanted).items() if name != "most"}
    return Limit.objects.filter(**place, lifted_at__isnull=True).first()


def _onto(limit: Limit, most: int | None, actor: Actor, reason: str) -> tuple[Verdict, str]:
    """Set what is set already: a smaller number holds from now on, a larger one is no way round a second person.

    Raises StaleVersion where somebody changes it at this moment.
    """
    before = wording.limit(limit).what
    if most is None or limit.most is None or most == limit.most:
        pressing.joined(limit, actor, action=f"set_{limit.kind}", reason=reason)
        return Verdict.JOINED, "The same one is set already; nothing was changed."
    if most > limit.most:
        by_two = ": a second person has to agree" if needs_two(limit, actor) else ""
        why = NotAllowed(f"Here {before} is in force already. To let more through, change that one{by_two}.")
        return _refused(limit.subject, limit.tenant, actor, reason, why)
    _set_most(limit, most, limit.version, actor, reason, use=None)
    limit.most = most
    return Verdict.DONE, f"Here {before} was in force; from now on it is {wording.limit(limit).what}. {_READ}"


def lift(limit: Limit, *, version: int, actor: Actor, reason: str, token: UUID) -> Answer:
    """Release a stop switch, whose work is done; take a limit away, or ask a second person for that."""
    with transaction.atomic():
        earlier = pressing.take(token, action="lift_limit", subject=limit, actor=actor)
        return earlier or pressing.keep(token, *_lift(limit, version, actor, reason))


def _lift(limit: Limit, version: int, actor: Actor, reason: str) -> tuple[Verdict, str]:
    try:
        _check(actor, reason)
        if limit.kind not in KINDS:
            raise NotAllowed("This is the restore fence; it ends with a release on its own page.")
        if needs_two(limit, actor):
            asked = second_person.ask(limit, second_person.LIFT_LIMIT, {}, version=version, reason=reason, actor=actor)
            return Verdict.DONE, asked
        return Verdict.DONE, _end(limit, version, actor, reason, use=None)
    except NotAllowed as refusal:
        return _refused(limit.subject, limit.tenant, actor, reason, refusal)
    except transition.StaleVersion:
        return Verdict.CONFLICT, _CHANGED


def lift_agreed(limit: Limit, *, use: Mapping[str, Any], actor: Actor, reason: str) -> str:
    """Take a limit away with a second person's consent, which is used up. Raises the TransitionRefused in the way."""
    return _end(limit, limit.version, actor, reason, use=use)


def _end(limit: Limit, version: int, actor: Actor, reason: str, *, use: Mapping[str, Any] | None) -> str:
    fact = actor.fact("limit_lifted", reason=reason, **consent.both(use))
    with transaction.atomic():
        if not transition.lift_limit(limit.pk, version=version, by=actor.id, fact=fact):
            raise _stale(limit)
        transition.policy_changed(limit, use=use, fact=fact)
    return f"{'Released' if limit.kind == 'stop' else 'Taken away'}. What it held back is due now."


def change(limit: Limit, *, most: int | None, version: int, actor: Actor, reason: str, token: UUID) -> Answer:
    """Let less through from now on, or ask a second person to let more through."""
    with transaction.atomic():
        earlier = pressing.take(token, action="change_limit", subject=limit, actor=actor)
        return earlier or pressing.keep(token, *_change(limit, most, version, actor, reason))


def _change(limit: Limit, most: int | None, version: int, actor: Actor, reason: str) -> tuple[Verdict, str]:
    try:
        _check(actor, reason)
        if limit.most is None:
            raise NotAllowed("A stop switch lets nothing through; release it, or leave it.")
        if most is None or not 0 < most < 2**63 or most == limit.most:
            raise NotAllowed("Say how many, or how much in minor units, at most: another whole number above 0.")
        if most > limit.most and needs_two(limit, actor):
            given: dict[str, Any] = {"version": version, "reason": reason, "actor": actor}
            return Verdict.DONE, second_person.ask(limit, second_person.RAISE_LIMIT, {"most": most}, **given)
        return Verdict.DONE, _set_most(limit, most, version, actor, reason, use=None)
    except NotAllowed as refusal:
        return _refused(limit.subject, limit.tenant, actor, reason, refusal)
    except transition.StaleVersion:
        return Verdict.CONFLICT, _CHANGED


def change_agreed(limit: Limit, *, most: int, use: Mapping[str, Any], actor: Actor, reason: str) -> str:
    """Raise a limit with a second person's consent, which is used up. Raises the TransitionRefused in the way."""
    return _set_most(limit, most, limit.version, actor, reason, use=use)


def _set_most(
    limit: Limit, most: int, version: int, actor: Actor, reason: str, *, use: Mapping[str, Any] | None
) -> str:
    fact = actor.fact("limit_changed", reason=reason, most=most, before=limit.most, **consent.both(use))
    with transaction.atomic():
        if not transition.change_limit(limit.pk, version=version, most=most, fact=fact):
            raise _stale(limit)
        transition.policy_changed(limit, use=use, fact=fact)
    return f"Changed. {_READ}"


def needs_two(limit: Limit, actor: Actor) -> bool:
    """Whether letting more through needs a second person.

    A stop switch is pulled and released by one: what it held back still meets every guard. A limit stands between a
    mistake and everybody's money, so one person does not loosen it, except their own slip a moment ago.
    """
    if limit.kind == "stop":
        return False
    slip = limit.set_by == actor.id and limit.version == 1 and transition.database_now() - limit.since < SLIP
    return not slip


_CHANGED = "Nothing was changed: it was released or changed already."
_READ = "Every claim from now on reads it; what is in flight is not stopped."


def _stale(limit: Limit) -> transition.StaleVersion:
    return transition.StaleVersion(kind=Kind.APPROVAL, pk=limit.pk, source="set", target=None)


def _check(actor: Actor, reason: str) -> None:
    if not actor.may(Permission.STOP):
        raise NotAllowed("Your role does not allow this; it needs “stop” in every tenant that it covers.")
    check_reason(reason, missing="A reason is needed: it stands on every page that this touches, and in the audit log.")


def _refused(subject: str, tenant: str, actor: Actor, reason: str, why: NotAllowed) -> tuple[Verdict, str]:
    transition.refuse(
        subject=subject, tenant=tenant or ":all", fact=actor.fact("not_allowed", reason=reason[:LONGEST_REASON])
    )
    return Verdict.REFUSED, str(why)
