"""Stop switches and limits: what is in force, and the forms that set and release it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core.exceptions import BadRequest
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from console import access, live, pressing
from console.forms import ChangeLimitForm, LiftForm, LimitForm
from console.live import signed_in
from console.views import approvals
from reconciliation import limits as domain
from reconciliation import places, wording
from reconciliation.actions import Actor, Answer, Permission, Verdict
from reconciliation.models import Approval, Limit

LIFTED = 20  # of the past, as many as fit a glance


@signed_in
@require_safe
def limits(request: HttpRequest) -> HttpResponse:
    """What is in force for this person's tenants; `?done=<token>` shows how an earlier press ended."""
    access.require(request, Permission.VIEW_HEALTH)
    return live.answer(request, page="limits.html", part="_limits.html", facts=_facts(request))


@signed_in
@require_safe
def stops(request: HttpRequest) -> HttpResponse:
    """The banner of stop switches alone, for pages that are open."""
    return render(request, "_stops.html")


@signed_in
@require_POST
def set_limit(request: HttpRequest) -> HttpResponse:
    """Set a stop switch or a limit."""
    form = LimitForm(request.POST)
    if not form.is_valid():
        return _unreadable(request, form)
    wanted = form.wanted()
    if wanted.tenant and wanted.tenant not in access.tenants_of(request):
        raise Http404(access.NOT_FOUND)
    actor = access.actor_for(request, wanted.tenant or access.EVERYWHERE)
    clean = form.cleaned_data
    answer = domain.set_limit(wanted, actor=actor, reason=clean["reason"], token=clean["token"])
    if answer.verdict is Verdict.REFUSED and actor.may(Permission.STOP):
        return _not_set(request, f"{answer.message} The attempt is on record.", clean)
    return _answered(request, answer, reason=clean["reason"], allowed=actor.may(Permission.STOP))


@signed_in
@require_POST
def lift(request: HttpRequest, pk: int) -> HttpResponse:
    """Release a stop switch, or take a limit away; that may ask a second person."""
    limit, actor, clean = _pressed(request, pk, LiftForm(request.POST))
    answer = domain.lift(limit, version=clean["version"], actor=actor, reason=clean["reason"], token=clean["token"])
    return _answered(request, answer, reason=clean["reason"], allowed=actor.may(Permission.STOP))


@signed_in
@require_POST
def change(request: HttpRequest, pk: int) -> HttpResponse:
    """Let less through, or ask a second person to let more through."""
    limit, actor, clean = _pressed(request, pk, ChangeLimitForm(request.POST))
    answer = domain.change(limit, most=clean["most"], version=clean["version"], actor=actor, reason=clean["reason"],
                           token=clean["token"])  # fmt: skip
    return _answered(request, answer, reason=clean["reason"], allowed=actor.may(Permission.STOP))


def _unreadable(request: HttpRequest, form: LimitForm) -> HttpResponse:
    if not form.is_of_page or not access.tenants_of(request, Permission.STOP):
        raise BadRequest(form.problem())
    return _not_set(request, form.problem(), form.typed())


def _not_set(request: HttpRequest, why: str, typed: dict[str, Any]) -> HttpResponse:
    """The page again, with what was typed in its form and what is wrong with it."""
    form = "stop" if typed["kind"] == "stop" else "limit"
    typed = {name: "" if value is None else value for name, value in typed.items()}
    facts = _facts(request) | {"refused": why, "typed": {form: typed}}
    return live.answer(request, page="limits.html", part="_limits.html", facts=facts, status=422)


def _pressed(request: HttpRequest, pk: int, form: LiftForm) -> tuple[Limit, Actor, dict[str, Any]]:
    limit = Limit.objects.filter(pk=pk, tenant__in=["", *access.tenants_of(request)]).first()
    if limit is None or not access.tenants_of(request):
        raise Http404(access.NOT_FOUND)
    if not form.is_valid():
        raise BadRequest(form.problem())
    return limit, access.actor_for(request, limit.tenant or access.EVERYWHERE), form.cleaned_data


def _answered(request: HttpRequest, answer: Answer, *, reason: str, allowed: bool) -> HttpResponse:
    return pressing.said(request, answer, back=(reverse("limits"), "the limits"), reason=reason, allowed=allowed)


@dataclass(frozen=True)
class Row:
    """One limit as the page draws it: with a token for each form where this person may press."""

    limit: Limit
    told: wording.LimitTold
    tokens: tuple[uuid.UUID, uuid.UUID] | None
    by_two: bool
    asked: list[tuple[Approval, str, str]]


def _row(request: HttpRequest, limit: Limit, *, may: bool) -> Row:
    actor = access.actor_for(request, limit.tenant or access.EVERYWHERE)
    tokens = (uuid.uuid4(), uuid.uuid4()) if may else None
    asked = approvals.standing(limit) if limit.tenant or actor.may(Permission.VIEW) else []
    return Row(limit, wording.limit(limit), tokens, domain.needs_two(limit, actor), asked)


def _idle(rows: list[Row]) -> list[tuple[Row, str]]:
    """What holds nothing back, and why. A name that nothing bears is sought in the whole record."""
    names = ("tenant", "provider", "action", "workflow_type", "currency")
    told = [(row, places.idle(**{name: getattr(row.limit, name) for name in names})) for row in rows]
    return [(row, why) for row, why in told if why]


def _may_lift(limit: Limit, mine: list[str], everywhere: bool) -> bool:
    """The restore fence is no limit that is lifted: it has a page of its own."""
    return limit.kind in domain.KINDS and (limit.tenant in mine or (not limit.tenant and everywhere))


def _facts(request: HttpRequest) -> dict[str, Any]:
    tenants = access.tenants_of(request)
    mine = access.tenants_of(request, Permission.STOP)
    everywhere = access.actor_for_all(request).may(Permission.STOP)
    rows = [_row(request, limit, may=_may_lift(limit, mine, everywhere)) for limit in domain.in_force(tenants)]
    lifted = Limit.objects.filter(tenant__in=["", *tenants], lifted_at__isnull=False).order_by("-lifted_at")[:LIFTED]
    some = mine[0] if mine else ""
    return {
        "rows": rows,
        "lifted": [(limit, wording.limit(limit)) for limit in lifted],
        "answer": pressing.answered(request, actor=access.actor_for(request, some)),
        "mass_limit": f"{settings.AFTERCALL_MASS_LIMIT:,}",
        "mine": mine,
        "everywhere": everywhere,
        "tokens": {"stop": uuid.uuid4(), "limit": uuid.uuid4()},
        # Asked for by the page alone, and not by its live part.
        "idle": lambda: _idle(rows),
        "names": lambda: places.known(None if everywhere else mine),
        "kinds": [
            ("concurrency", "in flight at once"),
            ("rate", "attempts in a window"),
            ("amount", "sum in a window"),
        ],
        "section": "health",
    }
