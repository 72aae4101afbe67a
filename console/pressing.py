"""From a form to `actions.act()` and back: the same for cases and runs. Nothing is decided here."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from audit.models import Entry
from console import access
from console.forms import PressForm
from console.stories import Moment, decided_moment
from console.views import errors
from reconciliation import actions
from reconciliation.actions import Actor, Answer, Press, Preview, Verdict
from reconciliation.models import Approval, Operation, Run

ON_RECORD = "The attempt is on record. Nothing changed."


@dataclass(frozen=True)
class Panel:
    """What can be done, what cannot and why not; each form has a token of its own."""

    allowed: list[tuple[Preview, uuid.UUID]]
    others: list[Preview]
    lacking: list[tuple[str, str]]  # (the roles that may, the actions that this person's role does not reach)


def panel(subject: Operation | Run | Approval, *, actor: Actor) -> Panel:
    """The previews of every action on `subject`, for one drawing of the page."""
    every = actions.previews(subject, actor=actor)
    first = sorted((each for each in every if each.allowed), key=lambda each: not each.recommended)
    # What an approval says of its approvers is about persons as well as roles, and stays line by line.
    beyond = [] if isinstance(subject, Approval) else [each for each in every if not actor.may(each.permission)]
    beyond = [each for each in beyond if not each.allowed]
    others = [each for each in every if not each.allowed and each not in beyond]
    return Panel([(each, uuid.uuid4()) for each in first], others, _lacking(beyond))


def _lacking(beyond: list[Preview]) -> list[tuple[str, str]]:
    by_roles: dict[str, list[str]] = {}
    for each in beyond:
        by_roles.setdefault(" and ".join(access.roles_that_may(each.permission)), []).append(each.label)
    return [(roles, ", ".join(labels)) for roles, labels in by_roles.items()]


def answered(request: HttpRequest, *, actor: Actor) -> Answer | None:
    """How the press that led to this page ended."""
    try:
        token = uuid.UUID(request.GET.get("done", ""))
    except ValueError:
        return None
    return actions.answer_of(token, actor=actor)


def press(request: HttpRequest, subject: Operation | Run | Approval, *, actor: Actor, back: str) -> HttpResponse:
    """Carry out what the form carries, and say how it ended."""
    form = PressForm(request.POST)
    if not form.is_valid():
        raise BadRequest(form.problem())
    pressed = form.press()
    if pressed.action not in {each.action for each in actions.previews(subject, actor=actor)}:
        raise BadRequest(f"There is no action called {pressed.action!r} here. Nothing was done.")
    answer = actions.act(subject, pressed, actor=actor)
    if answer.verdict is Verdict.CONFLICT:
        return _conflict(request, subject, pressed, answer, actor=actor, back=back)
    if answer.verdict is Verdict.REFUSED:
        return _refused(request, subject, pressed, answer, actor=actor, back=back)
    return redirect(f"{back}?done={answer.token}")


def said(request: HttpRequest, answer: Answer, *, back: tuple[str, str], reason: str, allowed: bool) -> HttpResponse:
    """How a press ended on what is no case (a limit, a message, the fence). `back`: (address, label) of its page."""
    facts = {"back": back[0], "back_label": f"Back to {back[1]}", "reason": reason}
    if answer.verdict is Verdict.CONFLICT:
        return errors.page(request, 409, "It changed since you looked", answer.message, "See it as it is now.", **facts)
    if answer.verdict is Verdict.REFUSED:
        status, title = (422, "Not done") if allowed else (403, "Your role does not allow this")
        return errors.page(request, status, title, answer.message, ON_RECORD, **facts)
    return redirect(f"{back[0]}?done={answer.token}")


def _conflict(
    request: HttpRequest,
    subject: Operation | Run | Approval,
    pressed: Press,
    answer: Answer,
    *,
    actor: Actor,
    back: str,
) -> HttpResponse:
    """409: what changed since, by whom and when; the typed reason is kept, and may be sent with the new version."""
    subject.refresh_from_db()
    facts = {
        "answer": answer,
        "told": answer.message if isinstance(subject, Approval) else "",
        "subject": subject,
        "changes": _since(subject, pressed.version),
        "preview": _still_allowed(subject, pressed.action, actor),
        "reason": pressed.reason,
        "typed": pressed.inputs,
        "token": uuid.uuid4(),
        "back": back,
        "act_url": request.path,
    }
    return render(request, "conflict.html", facts, status=409)


def _since(subject: Operation | Run | Approval, version: int) -> list[Moment]:
    newer = Entry.objects.filter(subject=str(subject.subject), version__gt=version)
    return [decided_moment(entry) for entry in newer.order_by("-seq").prefetch_related("openings")[:20]]


def _still_allowed(subject: Operation | Run | Approval, action: str, actor: Actor) -> Preview | None:
    every = actions.previews(subject, actor=actor)
    return next((each for each in every if each.action == action and each.allowed), None)


def _refused(
    request: HttpRequest,
    subject: Operation | Run | Approval,
    pressed: Press,
    answer: Answer,
    *,
    actor: Actor,
    back: str,
) -> HttpResponse:
    """403 where the role does not reach, 422 where the case does not allow it; what was typed is kept to be mended."""
    facts: dict[str, Any] = {"back": back, "back_label": "Back to the case", "reason": pressed.reason}
    every = actions.previews(subject, actor=actor)
    status = 422 if any(each.permitted for each in every if each.action == pressed.action) else 403
    still = _still_allowed(subject, pressed.action, actor)
    if status == 422 and still is not None:
        facts |= {"preview": still, "version": pressed.version, "typed": pressed.inputs, "token": uuid.uuid4()}
        facts |= {"act_url": request.path, "why": answer.message}
        return render(request, "not_done.html", facts, status=status)
    title = "Your role does not allow this" if status == 403 else "Not done"
    next = "The attempt is on record. Nothing else changed."
    return errors.page(request, status, title, answer.message, next, **facts)
