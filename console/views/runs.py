"""Runs: a list, and one run with its steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from console import access, endings, keyset, live, pressing, sagas, search
from console.chips import Chip, worth_showing
from console.live import signed_in
from console.stories import story
from console.views import approvals
from console.views.cases import moment_of
from reconciliation import registry, run_wording, wording
from reconciliation.actions import Actor, Permission
from reconciliation.models import Run
from reconciliation.states import RUN_TERMINAL, RunState
from reconciliation.transition import database_now

SIZE = 50
MOST = 1000  # counts stop here
FILTERS = {"state": "state", "mark": "", "workflow": "workflow_type", "tenant": "tenant"}
OPEN = [state for state in RunState if state not in RUN_TERMINAL]
BACK = [RunState.COMPENSATING, RunState.COMPENSATED, RunState.CANCELLED, RunState.FAILED]


@dataclass(frozen=True)
class Tab:
    """One list of runs."""

    name: str
    label: str
    rows: Callable[[Any], QuerySet[Run]]
    counted: bool = False


TABS = (
    Tab("all", "All", lambda own: own),
    Tab("stopped", "Stopped for a person", lambda own: own.filter(escalated_at__isnull=False), counted=True),
    Tab("going", "Going on", lambda own: own.filter(state__in=OPEN, escalated_at__isnull=True)),
    Tab("back", "Undone, cancelled, failed", lambda own: own.filter(state__in=BACK)),
)


@signed_in
@require_safe
def runs(request: HttpRequest) -> HttpResponse:
    """Runs, newest first: a tab of them, narrowed by filters, or those that bear the name that is sought."""
    tenants = access.require(request, Permission.VIEW)
    own, sought = Run.objects.filter(tenant__in=tenants), request.GET.get("q", "").strip()
    tab = next((tab for tab in TABS if tab.name == request.GET.get("tab")), TABS[0])
    chosen = {name: request.GET[name] for name in FILTERS if request.GET.get(name)}
    rows = own.filter(_named(sought, tenants)) if sought else _filtered(tab.rows(own), chosen)
    page = keyset.page(rows, order=("-id",), cursor=keyset.read(request.GET, kinds=[int]), size=SIZE)
    now = database_now()
    facts = {
        "tab": tab,
        "tabs": [(each, _count(each.rows(own)) if each.counted else "") for each in TABS],
        "chosen": chosen,
        "chips": [] if sought else _chips(page.rows, chosen, tenants),
        "page": page,
        "rows": [(run, _label(run), run_wording.run_stands(run, now=now)) for run in page.rows],
        "declared": sagas.declared(),
        "tenants": tenants,
        "section": "runs",
        "now": now,
        "q": sought,
    }
    return live.answer(request, page="runs.html", part="_runs.html", facts=facts)


def _named(sought: str, tenants: list[str]) -> Q:
    number = f"run {sought}" if sought.isdecimal() else sought
    return (
        search.run_called(sought, tenants=tenants)
        | search.run_called(number, tenants=tenants)
        | Q(business_object=sought)
    )


def _filtered(rows: Any, chosen: dict[str, str]) -> Any:
    rows = rows.filter(**{FILTERS[name]: value for name, value in chosen.items() if FILTERS[name]})
    if chosen.get("mark"):
        rows = rows.filter(escalated_at__isnull=chosen["mark"] != "escalated")
    return rows


def _count(rows: Any) -> str:
    number = rows.order_by()[: MOST + 1].count()
    return f"{MOST}+" if number > MOST else str(number)


def _chips(rows: list[Run], chosen: dict[str, str], tenants: list[str]) -> list[Chip]:
    """Choices come from what is configured and what is on this page: no scan for distinct values."""
    names = sorted({name for name, _ in registry.workflows()} | {run.workflow_type for run in rows})
    choices = {
        "state": [(state.value, wording.run_label(state).word) for state in RunState],
        "mark": [("escalated", "escalated"), ("none", "not escalated")],
        "workflow": [(name, name) for name in names],
        "tenant": [(slug, slug) for slug in tenants] if len(tenants) > 1 else [],
    }
    return worth_showing([Chip(name, chosen.get(name, ""), choices[name]) for name in FILTERS])


def _label(run: Run) -> wording.Label:
    return wording.run_label(run.state, escalated=run.escalated_at is not None)


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
        "label": _label(run),
        "word": wording.run_label(run.state),
        "saga": drawn,
        "told": endings.told(run, with_names=may_read),
        "asked": approvals.standing(run),
        "limits": sagas.limits(run, now=now),
        "lede": run_wording.run_lede(run, drawn.operations),
        "story": story(moment_of(request), run=run, with_audit=may_read),
        "may_read_audit": may_read,
        "requested_by": approvals.requested_by(run, with_names=may_read),
        "panel": pressing.panel(run, actor=actor),
        "act_url": reverse("run_act", args=[run.pk]),
        "tenants": access.tenants_of(request),
        "section": "runs",
    }
