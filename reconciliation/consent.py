"""Consent to one exact action: when it is needed, what the request for it holds, and who may never give it.

The words of the decision and its door are in `approvals.py`; this module is what the executor needs of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import structlog

from . import keys, registry, sealing, transition
from .actors import Actor
from .models import Approval, Operation, Run
from .providers.base import Call, Json, NotSent, Provider
from .scrub import fault
from .states import State
from .workflows import Consent

log = structlog.get_logger(__name__)

UNREADABLE: Json = {"unreadable": True}  # the provider could not be asked: whatever it shows later is something else


def needed(consent: Consent | None, request: Json) -> bool:
    """Whether this request may be sent only after a person agreed to it.

    Raises InvalidField where the declared condition raises: what nobody can judge is neither sent nor asked about.
    """
    if consent is None or consent.when is None:
        return consent is not None
    try:
        return bool(consent.when(request))
    except Exception as error:
        raise keys.InvalidField("consent", "cannot be judged: its condition raised") from error


def text(consent: Consent) -> str:
    """As it is stored with the operation, so that it can be asked for again after the declaration has changed."""
    stored = {
        "policy": consent.policy,
        "expires_after": round(consent.expires_after.total_seconds()),
        "use_within": round(consent.use_within.total_seconds()),
    }
    return json.dumps(stored, sort_keys=True, ensure_ascii=False)


def request(
    *,
    fingerprint: str,
    stored: str,
    requested_by: str,
    on_behalf_of: str,
    owners: Iterable[str] = (),
    seen: tuple[str, str] = ("", ""),
    reason: str = "",
) -> Json:
    """What is asked of a person before an operation is sent (the columns of an Approval)."""
    return {
        **json.loads(stored),
        "fingerprint": fingerprint,
        "requested_by": requested_by,
        "on_behalf_of": on_behalf_of,
        "forbidden": forbidden(requested_by, on_behalf_of, *owners),
        "seen_shown": seen[0],
        "seen_sealed": seen[1],
        "reason": reason,
    }


def forbidden(*people: str) -> list[str]:
    """Who may never approve: who asks, for whom it is asked, who owns and who made the token. Whatever their role.

    Names are compared without regard to case, as people may write them when they sign in.
    """
    return sorted({folded(one) for one in people if one.strip()})


def folded(name: str) -> str:
    """A name as it is compared with others."""
    return name.strip().casefold()


def names(actor: Actor) -> list[str]:
    """Every name under which an actor may stand among those who may never approve."""
    own = [name for name in (actor.name, *actor.emails) if name]
    return forbidden(actor.id, *own, *(f"person:{name}" for name in own), *actor.owners)


def people(subject: Operation | Run) -> list[str]:
    """Who answers for what was done: who asked for it, for whom, and who owns or made the token that asked.

    They may no more agree to what another person asks about it than to what they ask for themselves.
    """
    own = [subject.requested_by, subject.on_behalf_of, *subject.owners]
    if isinstance(subject, Operation):
        last = newest(subject)
        own += [*(last.forbidden if last else ()), *(people(subject.run) if subject.run else ())]
    return forbidden(*own)


# What the action rests on


def look(provider: Provider, call: Call) -> Json | None:
    """What the provider shows of what the action rests on (an etag, a total). None: it declares nothing of the kind."""
    hook = getattr(provider, "precondition", None)
    if hook is None:
        return None
    try:
        seen = hook(call)
        return None if seen is None else json.loads(keys.canonical(seen))
    except Exception as error:  # an adapter may raise anything; a read that failed showed nothing
        log.warning("precondition_unreadable", provider=provider.name, action=call.action, **fault(error))
        return UNREADABLE


def kept(seen: Json | None, shown: Iterable[str]) -> tuple[str, str]:
    """(what of it may be seen, a sealed token of the rest), for the request for consent."""
    return ("", "") if seen is None else sealing.split(seen, (*shown, *UNREADABLE))


def changed(agreed: Approval | None, provider: Provider, call: Call) -> Json | None:
    """What the provider shows now, where that is not what it showed when consent was asked for; else None.

    Raises NotSent where it cannot be read now: what was agreed to is sent only after it was compared.
    """
    if agreed is None or not (agreed.seen_shown or agreed.seen_sealed):
        return None
    now = look(provider, call)
    if now == UNREADABLE:
        raise NotSent("What was agreed to could not be compared with what the provider shows now.")
    return None if now == agreed.seen else (now or {})


# Asking again


def newest(operation: Operation) -> Approval | None:
    """The newest request for consent to send this operation."""
    return Approval.objects.filter(operation=operation, action="").order_by("-id").first()


def again(last: Approval, *, stored: str, seen: tuple[str, str], never: Iterable[str] = ()) -> Json:
    """The same request for consent once more, with what the provider shows now; `never` may not approve it either."""
    asked = request(
        fingerprint=last.fingerprint,
        stored=stored,
        requested_by=last.requested_by,
        on_behalf_of=last.on_behalf_of,
        seen=seen,
        reason=last.reason,
    )
    return {**asked, "forbidden": sorted({*last.forbidden, *never})}


def anew(operation: Operation, *, requester: str, never: Iterable[str], reason: str) -> Json:
    """The request for consent to a new intent with the same request: who asks for it may not approve it either."""
    last, provider = newest(operation), registry.provider(operation.provider)
    assert last is not None
    shown = registry.spec(operation.provider, operation.action).shown
    asked = again(last, stored=operation.consent, seen=kept(look(provider, call_of(operation)), shown), never=never)
    return {**asked, "requested_by": requester, "reason": reason}


def ask_again(operation: Operation, *, actor: Actor) -> None:
    """The consent went past its use-by before anything was sent under it: back to a person, and not to one who had it
    sent, for that asks for it.

    Raises StaleVersion where the operation moved on meanwhile.
    """
    last, provider = newest(operation), registry.provider(operation.provider)
    assert last is not None
    seen = look(provider, call_of(operation))
    shown = registry.spec(operation.provider, operation.action).shown
    never = names(actor) if actor.kind in ("person", "agent") else ()
    transition.transition(
        operation.subject,
        to=State.AWAITING_APPROVAL,
        version=operation.version,
        patch={"reason_code": "approval_past_use_by", "due_at": None, "not_before": None},
        consent={"ask": again(last, stored=operation.consent, seen=kept(seen, shown), never=never)},
        fact=actor.fact("approval_past_use_by"),
    )


def call_of(operation: Operation) -> Call:
    """The call as it would be sent, for a read of what it rests on."""
    return Call(
        action=operation.action,
        key=operation.key,
        request=operation.request,
        tenant=operation.tenant,
        attempt=operation.attempts,
    )


def action_request(
    *, action: str, inputs: Json, fingerprint: str, policy: str, reason: str, actor: Actor, people: Iterable[str],
    lasts: timedelta, use_within: timedelta,
) -> dict[str, Any]:  # fmt: skip
    """What is asked of a second person before an operator action is done (the columns of an Approval)."""
    return {
        "action": action,
        "inputs": keys.canonical(inputs).decode(),
        "fingerprint": fingerprint,
        "policy": policy,
        "reason": reason,
        "requested_by": actor.id,
        "forbidden": forbidden(*names(actor), *people),
        "expires_after": round(lasts.total_seconds()),
        "use_within": round(use_within.total_seconds()),
    }


def both(use: Mapping[str, Any] | None) -> dict[str, Any]:
    """Both people stand in the audit log of what needed two: who asked, and who agreed. Nothing where one sufficed."""
    return {} if use is None else {name: use[name] for name in ("id", "asked_by", "approved_by")}
