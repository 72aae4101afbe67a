"""The audit log: what was decided, by whom, and the file of it."""

import json
from datetime import date, timedelta
from typing import Any

from django.core.exceptions import BadRequest, PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from audit import selection
from audit.export import Export, Format
from audit.log import Fact
from audit.models import Entry
from audit.selection import InvalidSelection, Selection
from console import access, stories
from console.forms import AuditForm
from console.live import signed_in
from reconciliation.actions import Permission

SIZE = 50
TYPES = {"csv": "text/csv; charset=utf-8", "jsonl": "application/jsonl; charset=utf-8"}


@signed_in
@require_safe
def entries(request: HttpRequest) -> HttpResponse:
    """Entries of one tenant, newest first."""
    tenants = access.require(request, Permission.VIEW_AUDIT)
    form = AuditForm(request.GET)
    if not form.is_valid():
        return render(request, "audit.html", _frame(request, form, tenants), status=422)
    chosen = _selection(form.cleaned_data, tenants)
    found = selection.page(chosen, before=_before(request), size=SIZE + 1)
    facts = _frame(request, form, tenants) | {
        "chosen": chosen,
        "rows": [_row(entry) for entry in found[:SIZE]],
        "next": found[SIZE - 1].pk if len(found) > SIZE else None,
        "paged": _before(request) is not None,
        "may_export": Permission.EXPORT_AUDIT in access.actor_for(request, chosen.tenant).permissions,
    }
    return render(request, "audit.html", facts)


def _row(entry: Entry) -> tuple[Entry, str, stories.Moment]:
    moment = stories.decided_moment(entry)
    return entry, stories.deed_of(entry, moment), moment


@signed_in
@require_safe
def entry(request: HttpRequest, pk: int) -> HttpResponse:
    """One entry: its columns, what its commitments stand for, the bytes that were hashed, and their place."""
    tenants = access.require(request, Permission.VIEW_AUDIT)
    found = Entry.objects.filter(pk=pk, tenant__in=tenants).prefetch_related("openings").first()
    if found is None:
        raise Http404(access.NOT_FOUND)
    record = json.loads(bytes(found.canonical))
    opened = {opening.field: opening for opening in found.openings.all()}
    facts = {
        "entry": found,
        "moment": stories.decided_moment(found),
        "record": record,
        "details": record["body"].get("details") or {},
        "commitments": [(name, opened.get(name)) for name in record["body"].get("commitments") or {}],
        "canonical": bytes(found.canonical).decode(),
        "hash": bytes(found.hash).hex(),
        "neighbours": Entry.objects.filter(subject=found.subject, seq__in=(found.seq - 1, found.seq + 1)).only("seq"),
        "section": "audit",
    }
    return render(request, "audit_entry.html", facts)


@signed_in
@require_safe
def export(request: HttpRequest) -> HttpResponse | StreamingHttpResponse:
    """The same selection as a file, streamed; the export itself is on record before its first byte."""
    form = AuditForm(request.GET)
    if not form.is_valid():
        raise BadRequest("The filters cannot be read; set them on the audit page.")
    chosen = _selection(form.cleaned_data, access.require(request, Permission.VIEW_AUDIT))
    actor = access.actor_for(request, chosen.tenant)
    if Permission.EXPORT_AUDIT not in actor.permissions:
        raise PermissionDenied(access.NEEDED[Permission.EXPORT_AUDIT])
    kind: Format = "jsonl" if request.GET.get("format") == "jsonl" else "csv"
    by = Fact(actor=actor.id, actor_kind=actor.kind, actor_name=actor.name, reason_code="export_requested")
    response = StreamingHttpResponse(Export(chosen, format=kind, by=by), content_type=TYPES[kind])
    response["Content-Disposition"] = f'attachment; filename="{_name(chosen)}.{kind}"'
    response["Cache-Control"] = "no-store"
    return response


def _selection(clean: dict[str, Any], tenants: list[str]) -> Selection:
    tenant = clean["tenant"] or tenants[0]
    if tenant not in tenants:
        raise Http404(access.NOT_FOUND)
    last: date | None = clean["last"]
    try:
        return Selection(
            tenant=tenant,
            first_day=clean["first"],
            end_day=last + timedelta(days=1) if last else None,
            zone=timezone.get_current_timezone_name(),
            **{name: clean[name] or None for name in selection.FILTERS},
        )
    except InvalidSelection as error:
        raise BadRequest(str(error)) from error


def _before(request: HttpRequest) -> int | None:
    text = request.GET.get("before", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def _name(chosen: Selection) -> str:
    days = [str(day) for day in (chosen.first_day, chosen.end_day and chosen.end_day - timedelta(days=1)) if day]
    return "-".join(["aftercall-audit", chosen.tenant.replace(":", "_"), *days])


def _frame(request: HttpRequest, form: AuditForm, tenants: list[str]) -> dict[str, Any]:
    given = {name: value for name, value in request.GET.items() if value and name in form.fields}
    return {"form": form, "tenants": tenants, "given": given, "section": "audit"}
