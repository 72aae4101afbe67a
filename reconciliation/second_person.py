"""Presses that need a second person: asking, and what the move that follows must name. What is done is in agreed.py.

The consent is bound to the subject, the action, its inputs and what it would change, as far as that is known. Where
that has changed since it was asked, nobody can agree to it or use it any more. It is used up by the very move that it
allows. Should that move be refused at the moment of the consent, the sweep makes it as soon as it can be made, and
whoever asked may press again, while the consent holds.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from django.db.models import Exists, F, OuterRef, Q

from . import consent, keys, registry, run_deeds, transition
from .actors import Actor
from .models import Approval, Job, Limit, Operation, Run
from .progress import UNDO
from .providers.base import Json
from .states import APPROVAL_OPEN, ApprovalState
from .wording import duration

LASTS = timedelta(hours=4)  # in which a second person can agree
USE_WITHIN = timedelta(minutes=30)  # from the consent to the deed
SEND_AGAIN, WAIVE_UNDO, COMPENSATE_RUN = "send_again", "waive_undo", "compensate_run"
NEW_INTENT = "new_intent"  # after a person's bare word that the one before it was not applied
DUPLICATES = frozenset({SEND_AGAIN, NEW_INTENT})  # who agrees to these needs the permission for that
LIFT_LIMIT, RAISE_LIMIT, ACCEPT_REPEATS = "lift_limit", "raise_limit", "accept_repeats"
STANDS = "That an effect stands which cannot be undone is accepted by two people."
CHANGED = "What it is about has changed since it was asked: nothing was done. Ask for it again."
POLICIES = {
    SEND_AGAIN: "Sending again what may have been applied needs a second person who accepts a duplicate.",
    NEW_INTENT: "A new intent after a person's bare word needs a second person who accepts a duplicate.",
    WAIVE_UNDO: "An undo that was done by hand is vouched for by two people.",
    COMPENSATE_RUN: "What this run did is reversed by hand only if two people agree.",
    LIFT_LIMIT: "A limit that guards everybody is taken away by two people.",
    RAISE_LIMIT: "A limit that guards everybody is raised by two people.",
    ACCEPT_REPEATS: "That missed starts may act more often than is meant is accepted by two people.",
}
Subject = Operation | Run | Limit | Job


def open_request(subject: Subject, action: str, *, inputs: Json | None = None) -> Approval | None:
    """The open request for consent to this action, if there is one."""
    found = Approval.objects.filter(**_about(subject), action=action, state__in=APPROVAL_OPEN)
    if inputs is not None:
        found = found.filter(inputs=keys.canonical(inputs).decode())
    return found.order_by("-id").first()


def standing(subject: Subject) -> list[Approval]:
    """Every open request for a second person about this subject, the newest first."""
    found = Approval.objects.filter(**_about(subject), state__in=APPROVAL_OPEN)
    return list(found.exclude(action="").order_by("-id"))


def _about(subject: Subject) -> dict[str, Subject]:
    return {type(subject).__name__.lower(): subject}


def _fingerprint(subject: Subject, action: str, inputs: Json) -> str:
    bound = {"subject": str(subject.subject), "of": _identity_of(subject, action, inputs), "inputs": inputs}
    return keys.fingerprint(provider="-", account="-", action=action, request=bound)


def _identity_of(subject: Subject, action: str, inputs: Json) -> Any:
    """What must not have changed between the request and the deed.

    Raises Unregistered where only another deployment can tell which of a run's steps have an effect.
    """
    if isinstance(subject, Operation):
        state = [subject.state, subject.sighted] if action == NEW_INTENT else []
        return [subject.fingerprint, subject.run_is_over, *state]
    if not isinstance(subject, Run):
        return f"version {subject.version}"
    touched = concerned(subject, action, inputs)
    if action == WAIVE_UNDO:
        return [subject.settled_at is not None, *([each.pk, each.version] for each in touched)]
    for each in touched:
        registry.spec(each.provider, each.action)
    return [[each.pk, each.fingerprint, each.provider_operation_id] for each in touched]


def concerned(run: Run, action: str, inputs: Json) -> list[Operation]:
    """The operations that a request about a run is about: what would be undone, or the undo that would be waived."""
    if action == WAIVE_UNDO:
        undos = Operation.objects.filter(run=run, step=f"{UNDO}{inputs['step']}")
        return list(undos.order_by("-intent_version")[:1])
    return [each for each in run_deeds.account(run).standing if each.step not in run.waived]


def has_changed(approval: Approval) -> bool:
    """Whether what was asked for is about something else by now: then nobody can agree to it or use it any more.

    False where that cannot be told here; then it cannot be used here either.
    """
    subject = approval.operation or approval.run or approval.limit or approval.job
    assert subject is not None
    try:
        return approval.fingerprint != _fingerprint(subject, approval.action, json.loads(approval.inputs))
    except registry.Unregistered:
        return False


def may_have_changed(*, limit: int) -> list[Approval]:
    """Requests that nobody has decided, about what has moved since they were asked, whether or not it matters to them.

    What is asked about a limit or a schedule ends with the very change. They come in no order, so that those which go
    on waiting never keep the others from being looked at.
    """
    moved = Operation.objects.filter(run=OuterRef("run"), updated_at__gt=OuterRef("created_at"))
    about = Q(Exists(moved))
    for subject in ("operation", "operation__run", "run"):
        about |= Q(**{f"{subject}__updated_at__gt": F("created_at")})
    waiting = Approval.objects.filter(about, state=ApprovalState.WAITING).exclude(action="")
    return list(waiting.order_by("?")[:limit])


def end_changed(approval: Approval, actor: Actor) -> bool:
    """End a request that is about something else by now. Tells whether it was."""
    if approval.state not in APPROVAL_OPEN or not has_changed(approval):
        return False
    transition.move_approval(approval, to=ApprovalState.SUPERSEDED, fact=actor.fact("changed_since_asked"))
    return True


def ask(
    subject: Subject, action: str, inputs: Json, *, version: int, reason: str, actor: Actor, policy: str = ""
) -> str:
    """Ask for a second person's consent. The same request twice is one request; one about what was, before it changed,
    ends.
    """
    standing = open_request(subject, action, inputs=inputs)
    if standing is not None:
        end_changed(standing, actor)
    pk, new = transition.open_approval(
        subject,
        version=version,
        ask=consent.action_request(
            action=action,
            inputs=inputs,
            fingerprint=_fingerprint(subject, action, inputs),
            policy=policy or POLICIES[action],
            reason=reason,
            actor=actor,
            people=consent.people(subject) if isinstance(subject, Operation | Run) else (),
            lasts=LASTS,
            use_within=USE_WITHIN,
        ),
        fact=actor.fact("second_person_asked", reason=reason, action=action),
    )
    if not new:
        return f"It is asked for already (approval {pk}); another person decides."
    return f"Asked for (approval {pk}). It is done as soon as another person agrees, within {duration(LASTS)}."


def use(approval: Approval, subject: Subject) -> dict[str, Any]:
    """What the move names that uses the consent up. The fingerprint is worked out anew from what is known now."""
    return {
        "id": approval.pk,
        "action": approval.action,
        "fingerprint": _fingerprint(subject, approval.action, json.loads(approval.inputs)),
        "asked_by": approval.requested_by,
        "approved_by": approval.decided_by,
    }
