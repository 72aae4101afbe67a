"""One press of a button: its one-time token, its stored answer, and the record of what was refused."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol
from uuid import UUID

from django.db import connections

from audit import log
from audit.models import Entry

from . import transition
from .actors import Actor
from .models import ActionToken, Approval, Operation, Run
from .states import State

LOST_AFTER = timedelta(minutes=2)  # no call of a provider may take longer than this from a page
JOIN_WITHIN = 1.0  # seconds that a retry waits for the claim of another one that has begun


class Verdict(StrEnum):
    """How a press ended."""

    DONE = "done"
    JOINED = "joined"  # somebody else's press is doing, or did, the same
    REFUSED = "refused"  # not permitted or not allowed: nothing changed
    CONFLICT = "conflict"  # it changed since the page was drawn: nothing changed
    WORKING = "working"  # the first press with this token is still at it, or was lost on the way


class Touched(Protocol):
    """What else a press may be about, such as a limit."""

    @property
    def tenant(self) -> str: ...
    @property
    def subject(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one press; the same token gets the same one again."""

    verdict: Verdict
    message: str  # one or two sentences for the person
    token: UUID


def take(token: UUID, *, action: str, subject: Operation | Run | Approval | Touched, actor: Actor) -> Answer | None:
    """Use up a token: None for its first press, the first answer for every later one.

    Inside a transaction a second press waits here for the first to commit.
    """
    with connections[transition.ALIAS].cursor() as cursor:
        cursor.execute(
            "INSERT INTO reconciliation_actiontoken"
            " (token, tenant, actor, action, subject, created_at, verdict, message)"
            " VALUES (%s, %s, %s, %s, %s, aftercall_now(), '', '') ON CONFLICT DO NOTHING",
            [token, subject.tenant, actor.id, action, str(subject.subject)],
        )
        if cursor.rowcount == 1:
            return None
    row = ActionToken.objects.get(pk=token)
    if (row.actor, row.action, row.subject) != (actor.id, action, str(subject.subject)):
        return Answer(
            verdict=Verdict.REFUSED, message="This form's token belongs to another press; reload it.", token=token
        )
    return _stored(row)


def answer_of(token: UUID, *, actor: Actor) -> Answer | None:
    """The stored answer of an earlier press by this actor, for the page that shows it (again)."""
    row = ActionToken.objects.filter(pk=token, actor=actor.id).first()
    return _stored(row) if row else None


def _stored(row: ActionToken) -> Answer:
    if row.verdict:
        return Answer(verdict=Verdict(row.verdict), message=row.message, token=row.token)
    if transition.database_now() - row.created_at > LOST_AFTER:
        message = "The answer to this press was lost on the way. The timeline shows whether it was done."
        return Answer(verdict=Verdict.REFUSED, message=message, token=row.token)
    return Answer(verdict=Verdict.WORKING, message="This is being done at this moment.", token=row.token)


def keep(token: UUID, verdict: Verdict, message: str) -> Answer:
    """Store the answer of a token's first press."""
    ActionToken.objects.filter(pk=token).update(verdict=verdict, message=message)
    return Answer(verdict=verdict, message=message, token=token)


def refuse(subject: Operation | Run | Approval, actor: Actor, *, action: str, why: str, reason: str) -> None:
    """Record a refused press, committed apart."""
    fact = actor.fact(why, reason=reason, action=action)
    transition.refuse(subject=subject.subject, tenant=subject.tenant, fact=fact)


def joined(subject: Operation | Run | Approval | Touched, actor: Actor, *, action: str, reason: str) -> None:
    """Record a press that found somebody else's at work."""
    fact = actor.fact("joined", reason=reason, action=action)
    log.append(subject=str(subject.subject), tenant=subject.tenant or ":all", event="joined", fact=fact)


def _entries_since(subject: Operation | Run | Approval, version: int) -> list[Entry]:
    entries = Entry.objects.filter(subject=str(subject.subject), event="transition", version__gt=version)
    return list(entries.order_by("seq")[:20])


def attempt_of_others(operation: Operation, version: int) -> str:
    """Which attempt was started since `version`, by whom and when; "" where none was.

    Whoever retries looks up first, then takes the run, then claims: three commits. A press that comes between them
    waits a moment for the claim, so that it can be told which attempt it has joined.
    """
    deadline = time.monotonic() + JOIN_WITHIN
    while True:
        soon = time.monotonic() < deadline and _about_to_start(operation)  # read first: the claim may come in between
        attempt = _attempt_since(operation, version)
        if attempt or not soon:
            return attempt
        time.sleep(0.05)


def _about_to_start(operation: Operation) -> bool:
    """Whether its run is held, or it changed a moment ago, and it may still be retried."""
    now, fresh = transition.database_now(), Operation.objects.select_related("run").get(pk=operation.pk)
    lease = fresh.run.lease_until if fresh.run else None
    newest = Entry.objects.filter(subject=str(operation.subject)).order_by("-seq").values_list("at", flat=True).first()
    held = lease is not None and lease > now
    just_changed = newest is not None and now - newest < timedelta(seconds=JOIN_WITHIN)
    return fresh.state in (State.FAILED_RETRYABLE, State.AMBIGUOUS) and (held or just_changed)


def _attempt_since(operation: Operation, version: int) -> str:
    for entry in _entries_since(operation, version):
        if entry.reason_code in ("retry_requested", "retried"):
            attempt = json.loads(bytes(entry.canonical))["body"]["details"].get("attempt")
            return f"attempt {attempt}, started by {who(entry)} at {time_of(entry.at)}."
    return ""


def changes_since(subject: Operation | Run | Approval, version: int) -> str:
    """What changed since `version`, by whom, when, in sentences."""
    told = [
        f"{entry.from_state or 'new'} to {entry.to_state} by {who(entry)} at {time_of(entry.at)} ({entry.reason_code})."
        for entry in _entries_since(subject, version)
    ]
    return " ".join(told) or "The version on the page is not one that this case has had."


def who(entry: Entry) -> str:
    """The name of who made an entry, as it was; their id where the name was erased."""
    name = entry.openings.filter(field="actor_name").values_list("value", flat=True).first()
    return str(name or entry.actor)


def time_of(at: datetime) -> str:
    """A moment as the stored answers write it."""
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"
