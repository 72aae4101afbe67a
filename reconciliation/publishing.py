"""Publishing: each message of the outbox becomes an ordinary operation, once.

Three commits: the message is taken, its operation is born, the message is marked. A publisher that is lost between two
of them is made up for by the next one: the operation has the message's identity, so its birth happens once. What cannot
be published goes to a person with the reason, and holds up nothing but what was asked to come after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import structlog
from django.conf import settings
from django.db import connections, transaction

from . import executor, outbox, pressing, registry, transition
from .actors import Actor, Permission
from .claims import DATABASE_ERRORS, FingerprintMismatch, LedgerUnavailable, TooOld
from .deeds import LONGEST_REASON, NotAllowed, check_reason
from .keys import InvalidField
from .models import Message
from .pressing import Answer, Verdict
from .scrub import fault
from .sealing import CannotOpen
from .states import MessageState

log = structlog.get_logger(__name__)

PUBLISHER = Actor(id="system:outbox", kind="system")
TRIES = 5  # of what a deployment that is just being rolled out may cure; some half a minute with the usual back-off
CAPPED = 1000  # counts stop here: beyond it, "1000+" says as much
OLDER = (transition.OlderVersionOpen, transition.OlderVersionWaiting)


def publish(*, limit: int) -> int:
    """Publish what may be published now, up to `limit`. Returns how many were handled. Two at once are harmless."""
    taken = outbox.take(limit=limit)
    for pk in taken:
        _publish(Message.objects.get(pk=pk))
    return len(taken)


def _publish(message: Message) -> None:
    if message.state != MessageState.WAITING:
        return
    try:
        outcome = executor.submit(outbox.intent_of(message), actor=PUBLISHER, message=message.pk)
        outbox.published(message, operation=outcome.pk)
    except OLDER as refusal:
        _wait_for_older(message, refusal)
    except (InvalidField, FingerprintMismatch, transition.NewerVersionExists) as final:
        _stick(message, _code(final), str(final))
    except registry.Unregistered as missing:
        _try_again(message, "no_handler", str(missing))
    except CannotOpen as sealed:
        _try_again(message, "request_unreadable", str(sealed))
    except (LedgerUnavailable, *DATABASE_ERRORS) as error:
        log.error("not_published", message=message.pk, **fault(error))  # it comes back by itself
    except Exception as error:  # one broken message must not stop the others
        log.error("not_published", message=message.pk, **fault(error))
        _try_again(message, "cannot_be_published", f"Publishing it raised {type(error).__name__}.")


def _code(error: Exception) -> str:
    if isinstance(error, TooOld):
        return "too_old"
    if isinstance(error, InvalidField):
        return "invalid_request"
    return "fingerprint_mismatch" if isinstance(error, FingerprintMismatch) else "newer_version_exists"


def _wait_for_older(message: Message, refusal: transition.TransitionRefused) -> None:
    """An older version of the intent is in flight, unknown or waiting: this one's time comes, but not for ever."""
    patience = timedelta(seconds=settings.AFTERCALL_STUCK_AFTER)
    if transition.database_now() - message.changed_at > patience:
        return _stick(message, refusal.verdict, refusal.sentence)
    outbox.later(message, problem=refusal.verdict, detail=refusal.sentence, seconds=settings.AFTERCALL_BACK_OFF * 5)


def _try_again(message: Message, problem: str, detail: str) -> None:
    if message.tries + 1 >= TRIES:
        return _stick(message, problem, detail)
    seconds = min(settings.AFTERCALL_BACK_OFF * 2.0**message.tries, settings.AFTERCALL_BACK_OFF_CAP)
    outbox.later(message, problem=problem, detail=detail, seconds=seconds)


def _stick(message: Message, problem: str, detail: str) -> None:
    fact = PUBLISHER.fact(problem, provider=message.provider, action=message.action)
    if outbox.stick(message, problem=problem, detail=detail, fact=fact):
        log.error("message_stuck", message=message.pk, problem=problem)


# What waits


@dataclass(frozen=True)
class Backlog:
    """How much waits in the outbox, and since when. Numbers are capped at CAPPED + 1."""

    waiting: int
    since: datetime | None  # when the oldest one that waits was put in
    stuck: int
    late: int  # waiting, due, behind nothing, and not taken since `before`


_BACKLOG = f"""
SELECT (SELECT count(*) FROM (SELECT 1 FROM reconciliation_message WHERE state = 'waiting' LIMIT %(most)s) AS w),
       (SELECT min(created_at) FROM reconciliation_message WHERE state = 'waiting'),
       (SELECT count(*) FROM (SELECT 1 FROM reconciliation_message WHERE state = 'stuck' LIMIT %(most)s) AS s),
       (SELECT count(*) FROM (SELECT 1 FROM reconciliation_message d WHERE {outbox.PUBLISHABLE} LIMIT %(most)s) AS l)
"""  # noqa: S608 - of constants


def backlog(*, before: datetime) -> Backlog:
    """What waits; `late` counts what should have been taken before that moment."""
    with connections[transition.ALIAS].cursor() as cursor:
        cursor.execute(_BACKLOG, {"before": before, "most": CAPPED + 1})
        return Backlog(*cursor.fetchone())


def anything_due() -> bool:
    """Whether a publisher would find something now."""
    statement = f"SELECT EXISTS (SELECT 1 FROM reconciliation_message d WHERE {outbox.PUBLISHABLE})"  # noqa: S608
    with connections[transition.ALIAS].cursor() as cursor:
        cursor.execute(statement, {"before": transition.database_now()})
        return bool(cursor.fetchone()[0])


def stuck(tenants: Iterable[str]) -> int:
    """How many messages of these tenants wait for a person."""
    return Message.objects.filter(tenant__in=list(tenants), state=MessageState.STUCK)[: CAPPED + 1].count()


# What a person may do


def release(message: Message, *, version: int, actor: Actor, reason: str, token: UUID) -> Answer:
    """Have a stuck message tried again. The token's second press gets the first answer."""
    return _pressed(message, "release_message", Permission.RETRY, version, actor, reason, token)


def discard(message: Message, *, version: int, actor: Actor, reason: str, token: UUID) -> Answer:
    """Say that a stuck message is not to be published."""
    return _pressed(message, "discard_message", Permission.TERMINATE, version, actor, reason, token)


def _pressed(
    message: Message, action: str, needed: Permission, version: int, actor: Actor, reason: str, token: UUID
) -> Answer:
    with transaction.atomic(using=transition.ALIAS):
        earlier = pressing.take(token, action=action, subject=message, actor=actor)
        return earlier or pressing.keep(token, *_done(message, action, needed, version, actor, reason))


def _done(
    message: Message, action: str, needed: Permission, version: int, actor: Actor, reason: str
) -> tuple[Verdict, str]:
    fresh = Message.objects.get(pk=message.pk)
    try:
        _check(actor, needed, reason)
    except NotAllowed as refusal:
        fact = actor.fact("not_allowed", reason=reason[:LONGEST_REASON], action=action)
        transition.refuse(subject=fresh.subject, tenant=fresh.tenant, fact=fact)
        return Verdict.REFUSED, str(refusal)
    again = action == "release_message"
    fact = actor.fact("message_released" if again else "message_discarded", reason=reason)
    if fresh.version != version or fresh.state != MessageState.STUCK:
        return Verdict.CONFLICT, "Nothing was changed: somebody has dealt with it already."
    if not (outbox.release if again else outbox.discard)(fresh, fact=fact):
        return Verdict.CONFLICT, "Nothing was changed: somebody has dealt with it already."
    if again:
        outbox.wake_at_commit()
        return Verdict.DONE, "It is tried again now."
    return Verdict.DONE, "Discarded. It is not published; what was to come after it goes on."


def _check(actor: Actor, needed: Permission, reason: str) -> None:
    if not actor.may(needed):
        raise NotAllowed(f"Your role does not allow this; it needs “{needed.replace('_', ' ')}”.")
    check_reason(reason, missing="A reason is needed: it goes into the audit log with your name.")
