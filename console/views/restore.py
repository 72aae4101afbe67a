"""The restore fence: what was found, what is unknown by it, and the forms that let dispatch go on."""

from __future__ import annotations

import uuid
from typing import Any

from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from console import access, live, pressing
from console.forms import FenceForm
from console.live import signed_in
from reconciliation import fence, fence_wording
from reconciliation import restore as domain
from reconciliation.actions import Permission
from reconciliation.anchor import AnchorUnreadable
from reconciliation.models import Operation, RestoreFence
from reconciliation.states import State

DEEDS = {"release": domain.release, "adopt": domain.adopt, "begin": domain.begin}


@signed_in
@require_safe
def restore(request: HttpRequest) -> HttpResponse:
    """Where the fence stands; `?done=<token>` shows how an earlier press ended."""
    tenants = access.require(request, Permission.VIEW_HEALTH)
    fence.forget()  # this page shows what is so now
    return live.answer(request, page="restore.html", part="_restore.html", facts=_facts(request, tenants))


@signed_in
@require_POST
def act(request: HttpRequest) -> HttpResponse:
    """Release, adopt, or say that it was restored."""
    access.require(request, Permission.VIEW_HEALTH)
    form = FenceForm(request.POST)
    if not form.is_valid() or form.cleaned_data["deed"] not in DEEDS:
        raise BadRequest("The form cannot be read, so nothing was done. Open the page again and press there.")
    clean, actor = form.cleaned_data, access.actor_for_all(request)
    answer = DEEDS[clean["deed"]](actor=actor, version=clean["version"], reason=clean["reason"], token=clean["token"])
    back, allowed = (reverse("restore"), "what was found"), actor.may(Permission.RELEASE)
    return pressing.said(request, answer, back=back, reason=clean["reason"], allowed=allowed)


def _facts(request: HttpRequest, tenants: list[str]) -> dict[str, Any]:
    problem = banner()[1]
    now = fence.current()
    return {
        "fence": now,
        "problem": problem,
        "told": fence_wording.told(domain.found(now)) if now and now.reason else [],
        "why": fence_wording.LONG.get(now.reason, now.reason) if now else "",
        "unknown": _unknown(tenants),
        "may": access.actor_for_all(request).may(Permission.RELEASE),
        "who_may": " and ".join(access.roles_that_may(Permission.RELEASE)),
        "tokens": {name: uuid.uuid4() for name in DEEDS},
        "replays_until": domain.replays_until(),
        "keeps_it_open": domain.keeps_it_open(),
        "answer": pressing.answered(request, actor=access.actor_for_all(request)),
        "section": "health",
    }


def _unknown(tenants: list[str]) -> dict[str, int]:
    """How many of this person's cases became unknown by a restore and are so still, and how many wait for a person."""
    rows = Operation.objects.of_tenants(tenants).filter(state=State.AMBIGUOUS, reason_code="restored")
    return {"all": rows.count(), "person": rows.filter(escalated_at__isnull=False).count()}


def banner() -> tuple[RestoreFence | None, str]:
    """(the fence while it is down, what is wrong with the anchor), for every page."""
    try:
        fence.look()
    except AnchorUnreadable as problem:
        return None, str(problem)
    now = fence.current()
    return (now if now is not None and now.is_down else None), ""
