"""One case: its evidence, its story, and what may be done."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from console import access, keyset, live, pressing
from console.ledger import spec_of
from console.live import signed_in
from console.sagas import run_steps
from console.stories import story
from console.templatetags.words import clock
from console.views import approvals
from reconciliation import case_wording, limits, sealing, wording
from reconciliation.actions import Actor, Permission
from reconciliation.models import JournalEntry, Operation
from reconciliation.providers.base import ActionSpec, Json
from reconciliation.transition import database_now

EVIDENCE = ("finding", "receipt", "late_report", "evidence")
TALE = 40  # journal entries from which lede and verdict are told


@signed_in
@require_safe
def case(request: HttpRequest, pk: int) -> HttpResponse:
    """The case page; `?done=<token>` shows how an earlier press ended."""
    operation, actor = access.fetch_operation(request, pk, Permission.VIEW)
    facts = _facts(request, operation, actor) | {"answer": pressing.answered(request, actor=actor)}
    return live.answer(request, page="case.html", part="_case.html", facts=facts)


@signed_in
@require_POST
def act(request: HttpRequest, pk: int) -> HttpResponse:
    """One press of one button on the case."""
    operation, actor = access.fetch_operation(request, pk, Permission.VIEW)
    return pressing.press(request, operation, actor=actor, back=reverse("case", args=[pk]))


def _facts(request: HttpRequest, operation: Operation, actor: Actor) -> dict[str, Any]:
    spec, now = spec_of(operation), database_now()
    entries = list(JournalEntry.objects.filter(operation=operation).order_by("-id")[:TALE])
    evidence = next((entry for entry in entries if entry.kind in EVIDENCE), None)
    may_read = Permission.VIEW_AUDIT in actor.permissions
    story_page = story(moment_of(request), operation=operation, with_audit=may_read)
    return {
        "operation": operation,
        "spec": spec,
        "now": now,
        "label": wording.state_label(operation.state, escalated=operation.escalated_at is not None),
        "word": wording.state_label(operation.state),
        "headline": case_wording.headline(operation, spec),
        "lede": case_wording.lede(operation, entries, clock=clock, spec=spec),
        "local": case_wording.is_local(spec),
        "dispatch": case_wording.dispatch(operation, entries, spec),
        "held": limits.holding(operation),
        "asked": approvals.standing(operation),
        "steps": run_steps(operation.run) if operation.run else [],
        "run_label": _run_label(operation),
        "undos": list(operation.undos.order_by("id")),
        "evidence": _evidence(operation, spec, evidence),
        "deadlines": [_Deadline(each, now) for each in case_wording.deadlines(operation, spec)],
        "story": story_page,
        "may_read_audit": may_read,
        "requested_by": approvals.requested_by(operation, with_names=may_read),
        "panel": pressing.panel(operation, actor=actor),
        "act_url": reverse("case_act", args=[operation.pk]),
        "tenants": access.tenants_of(request),
        "section": "queue",
    }


def _run_label(operation: Operation) -> wording.Label | None:
    run = operation.run
    return wording.run_label(run.state, escalated=run.escalated_at is not None) if run else None


@dataclass(frozen=True)
class _Deadline:
    """A deadline and how far it is."""

    told: case_wording.Deadline
    now: datetime

    @property
    def left(self) -> str:
        distance = wording.duration(self.told.at - self.now)
        return f"in {distance}" if self.told.at > self.now else f"{distance} ago"

    @property
    def near(self) -> bool:
        return 0 < (self.told.at - self.now).total_seconds() < 3600


@dataclass(frozen=True)
class Evidence:
    """Asked and found, and where the finding comes from."""

    rows: list[case_wording.Compared]
    entry: JournalEntry | None
    verdict: str
    source: str
    note: str
    candidates: list[Json]
    candidate_fields: list[str]
    scope: str


def _evidence(operation: Operation, spec: ActionSpec | None, entry: JournalEntry | None) -> Evidence:
    data = case_wording.facts(entry) if entry else {}
    seen = data.get("observed")
    candidates = [each for each in data.get("candidates") or [] if isinstance(each, dict)]
    rows = case_wording.comparison(
        operation,
        spec,
        hidden=_hidden(operation),
        seen=seen if isinstance(seen, dict) and seen else None,
        judged=data.get("compared") or {},
    )
    return Evidence(
        rows=rows,
        entry=entry,
        verdict=wording.FINDINGS.get(str(data.get("verdict", "")), "") or (entry.kind if entry else ""),
        source=wording.SOURCES.get(str(data.get("source", "")), ""),
        note=str(data.get("note") or data.get("sentence") or ""),
        candidates=candidates,
        candidate_fields=sorted({name for each in candidates for name in each}),
        scope=_scope(data),
    )


def _scope(data: Json) -> str:
    if "authoritative" not in data or data.get("verdict") == "cannot_tell":
        return ""
    source = "authoritative source" if data["authoritative"] else "not an authoritative source"
    return f"{source}, {'read to its end' if data.get('complete') else 'not read to its end'}"


def _hidden(operation: Operation) -> tuple[str, ...]:
    try:
        return sealing.hidden_names(operation.request_sealed)
    except sealing.CannotOpen:
        return ("(sealed under a key that is not configured)",)


def moment_of(request: HttpRequest) -> datetime | None:
    """Where in a timeline the page starts; None is its newest end."""
    text = request.GET.get("before")
    try:
        return keyset.moment(text) if text else None
    except ValueError as error:
        raise BadRequest("The address names no part of this timeline.") from error
