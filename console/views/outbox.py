"""The outbox: what waits to be published, what cannot be, and what a person says about that."""

from __future__ import annotations

import uuid
from typing import Any

from django.core.exceptions import BadRequest
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from console import access, live, pressing
from console.forms import LiftForm
from console.live import signed_in
from reconciliation import publishing
from reconciliation.actions import Actor, Answer, Permission
from reconciliation.models import Message
from reconciliation.states import MessageState
from reconciliation.transition import database_now

SHOWN = 50  # of each list, as many as fit a page


@signed_in
@require_safe
def outbox(request: HttpRequest) -> HttpResponse:
    """The messages of this person's tenants; `?done=<token>` shows how an earlier press ended."""
    tenants = access.require(request, Permission.VIEW)
    return live.answer(request, page="outbox.html", part="_outbox.html", facts=_facts(request, tenants))


@signed_in
@require_POST
def release(request: HttpRequest, pk: int) -> HttpResponse:
    """Have a stuck message tried again."""
    return _press(request, pk, publishing.release, Permission.RETRY)


@signed_in
@require_POST
def discard(request: HttpRequest, pk: int) -> HttpResponse:
    """Say that a stuck message is not to be published."""
    return _press(request, pk, publishing.discard, Permission.TERMINATE)


def _press(request: HttpRequest, pk: int, verb: Any, needed: Permission) -> HttpResponse:
    message = Message.objects.filter(pk=pk, tenant__in=access.tenants_of(request)).first()
    if message is None:
        raise Http404(access.NOT_FOUND)
    form = LiftForm(request.POST)
    if not form.is_valid():
        raise BadRequest(form.problem())
    actor, clean = access.actor_for(request, message.tenant), form.cleaned_data
    answer = verb(message, version=clean["version"], actor=actor, reason=clean["reason"], token=clean["token"])
    return _answered(request, answer, reason=clean["reason"], allowed=actor.may(needed))


def _answered(request: HttpRequest, answer: Answer, *, reason: str, allowed: bool) -> HttpResponse:
    return pressing.said(request, answer, back=(reverse("outbox"), "the outbox"), reason=reason, allowed=allowed)


def _facts(request: HttpRequest, tenants: list[str]) -> dict[str, Any]:
    own, now = Message.objects.filter(tenant__in=tenants), database_now()
    stuck = list(own.filter(state=MessageState.STUCK).order_by("changed_at", "id")[:SHOWN])
    waiting = list(own.filter(state=MessageState.WAITING).order_by("due_at", "id")[:SHOWN])
    over = own.filter(state__in=[MessageState.PUBLISHED, MessageState.DISCARDED]).order_by("-id")
    actors = {slug: access.actor_for(request, slug) for slug in tenants}
    return {
        "now": now,
        "stuck": [(message, _buttons(actors[message.tenant])) for message in stuck],
        "waiting": waiting,
        "over": list(over[:SHOWN]),
        "shown": SHOWN,
        "tenants": tenants,
        "answer": pressing.answered(request, actor=next(iter(actors.values()))),
        "section": "health",
    }


def _buttons(actor: Actor) -> dict[str, uuid.UUID]:
    """The presses that this person's role reaches, each with a token of its own."""
    needed = {"release": Permission.RETRY, "discard": Permission.TERMINATE}
    return {name: uuid.uuid4() for name, permission in needed.items() if actor.may(permission)}
