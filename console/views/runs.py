"""Runs: a list, and one run with its steps."""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from console import access, keyset, live, pressing, sagas
from console.live import signed_in
from console.stories import story
from console.views.cases import moment_of
from reconciliation import wording
from reconciliation.actions import Actor, Permission
from reconciliation.models import Run
from reconciliation.states import RunState
from reconciliation.transition import database_now

SIZE = 50
STATES = [(state.value, wording.run_label(state).word) for state in RunState]


@signed_in
@require_safe
def runs(request: HttpRequest) -> HttpResponse:
    """Runs, newest first; `?open=1` leaves the ended ones out."""
    tenants = access.require(request, Permission.VIEW)
    rows = Run.objects.filter(tenant__in=tenants)
    state = request.GET.get("state", "")
    if state == "escalated":
        rows = rows.filter(escalated_at__isnull=False)
    elif state:
        rows = rows.filter(state=state)
    page = keyset.page(rows, order=("-id",), cursor=keyset.read(request.GET, fields=1), size=SIZE)
    rows_shown = [(run, wording.run_label(run.state, escalated=run.escalated_at is not None)) for run in page.rows]
    facts = {"page": page, "rows": rows_shown, "tenants": tenants, "state": state, "states": STATES, "section": "runs"}
    return live.answer(request, page="runs.html", part="_runs.html", facts=facts | {"now": database_now()})


@signed_in
@require_safe
def run(request: HttpRequest, pk: int) -> HttpResponse:
    """One run; `?done=<token>` shows how an earlier press ended."""
    found, actor = access.fetch_run(request, pk, Permission.VIEW)
    facts = _facts(request, found, actor) | {"answer": pressing.answered(request, actor=actor)}
    return live.answer(request, page="run.html", part="_run.html", facts=facts)


@signed_in
@require_POST
def act(request: HttpRequest, pk: int) -> HttpResponse:
    """One press of one button on the run."""
    found, actor = access.fetch_run(request, pk, Permission.VIEW)
    return pressing.press(request, found, actor=actor, back=reverse("run", args=[pk]))


def _facts(request: HttpRequest, run: Run, actor: Actor) -> dict[str, Any]:
    drawn, now = sagas.saga(run), database_now()
    may_read = Permission.VIEW_AUDIT in actor.permissions
    return {
        "run": run,
        "now": now,
        "label": wording.run_label(run.state, escalated=run.escalated_at is not None),
        "word": wording.run_label(run.state),
        "saga": drawn,
        "told": sagas.told(run),
        "limits": sagas.limits(run, now=now),
        "lede": wording.run_lede(run, drawn.operations),
        "story": story(moment_of(request), run=run, with_audit=may_read),
        "may_read_audit": may_read,
        "panel": pressing.panel(run, actor=actor),
        "act_url": reverse("run_act", args=[run.pk]),
        "tenants": access.tenants_of(request),
        "section": "runs",
    }
