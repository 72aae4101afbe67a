"""The queue: what needs a decision, most urgent first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import Case, DateTimeField, F, Min, Q, QuerySet, Sum, Value, When
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils import timezone
from django.views.decorators.http import require_safe

from console import access, keyset, live, sagas, search
from console.chips import Chip, worth_showing
from console.ledger import spec_of
from console.live import signed_in
from reconciliation import case_wording, publishing, registry, run_wording, wording
from reconciliation.actions import Permission
from reconciliation.models import JournalEntry, Operation
from reconciliation.states import State
from reconciliation.transition import database_now

SIZE = 50
MOST = 1000  # counts stop here: beyond it, "1000+" says as much and costs no scan of a million rows
NEVER = datetime(9999, 1, 1, tzinfo=UTC)
AGES = {"15m": ("older than 15 min", timedelta(minutes=15)), "1h": ("older than 1 h", timedelta(hours=1)),
        "1d": ("older than 1 day", timedelta(days=1))}  # fmt: skip
FILTERS = ("state", "mark", "provider", "action", "workflow", "tenant", "error", "cause", "age")
COLUMNS = {"provider": "provider", "action": "action", "workflow": "workflow_type", "tenant": "tenant",
           "error": "error_class", "cause": "reason_code", "state": "state"}  # fmt: skip
SORTS = {"urgent": "deadline", "age": "age", "money": "money at risk"}


@dataclass(frozen=True)
class Tab:
    """One list of the queue."""

    name: str
    label: str
    rows: Callable[[Any], QuerySet[Operation]]
    by_urgency: bool = True


TABS = (
    Tab("decide", "Needs a decision", lambda own: own.needing_decision()),
    Tab("looking", "Being looked up", lambda own: own.being_looked_up()),
    Tab("approval", "Awaiting approval", lambda own: own.filter(state=State.AWAITING_APPROVAL)),
    Tab("flight", "In flight", lambda own: own.in_flight()),
    Tab("closed", "Closed today", lambda own: own.filter(settled_at__gte=_midnight()), by_urgency=False),
    Tab("all", "All", lambda own: own, by_urgency=False),
)


@signed_in
@require_safe
def queue(request: HttpRequest) -> HttpResponse:
    """The list, or where one search hit leads."""
    tenants = access.require(request, Permission.VIEW)
    sought = request.GET.get("q", "").strip()
    own = Operation.objects.of_tenants(tenants)
    if sought:
        found = search.find(sought, tenants=tenants)
        if found.only:
            return redirect(found.only)
        return live.answer(request, page="queue.html", part="_queue.html", facts=_found(found, sought, tenants))
    return live.answer(request, page="queue.html", part="_queue.html", facts=_listed(request, own, tenants))


def _found(found: search.Found, sought: str, tenants: list[str]) -> dict[str, Any]:
    now = database_now()
    return {"q": sought, "found": found, "groups": _groups(_rows(found.operations, now=now)), "tenants": tenants}


def _listed(request: HttpRequest, own: Any, tenants: list[str]) -> dict[str, Any]:
    tab = next((tab for tab in TABS if tab.name == request.GET.get("tab")), TABS[0])
    chosen = {name: request.GET[name] for name in FILTERS if request.GET.get(name)}
    now = database_now()
    page = _page(request, _filtered(tab.rows(own), chosen, now=now), tab, now=now)
    rows = _rows(page.rows, now=now)
    stopped = sagas.stopped(tenants)
    stuck = publishing.stuck(tenants)
    return {
        "tab": tab,
        "tabs": [(each, _count(each, own, also=stopped.number + stuck)) for each in TABS],
        "figures": _figures(own, now=now, stopped_since=stopped.since),
        "stuck": stuck if tab.name == "decide" else 0,
        "stopped": _stopped(request, tab, chosen, stopped, now=now),
        "now": now,
        "chips": _chips(page.rows, chosen, tenants),
        "chosen": chosen,
        "sort": request.GET.get("sort", "urgent"),
        "sorts": SORTS,
        "page": page,
        "groups": _groups(rows, titled=tab.by_urgency),
        "tenants": tenants,
    }


def _page(request: HttpRequest, rows: Any, tab: Tab, *, now: datetime) -> keyset.Page:
    if not tab.by_urgency:
        newest = ("-settled_at", "-id") if tab.name == "closed" else ("-id",)
        return keyset.page(rows, order=newest, cursor=keyset.read(request.GET, kinds=_kinds(newest)), size=SIZE)
    order = {"age": ("since", "id"), "money": ("-money", "since", "id")}.get(
        request.GET.get("sort", ""), ("deadline", "since", "id")
    )
    cursor = keyset.read(request.GET, kinds=_kinds(order))
    anchor = (cursor.anchor if cursor else None) or now
    return keyset.page(_urgency(rows, anchor=anchor), order=order, cursor=cursor, size=SIZE, anchor=anchor)


def _kinds(order: tuple[str, ...]) -> list[type]:
    return [int if name.lstrip("-") in ("id", "money") else datetime for name in order]


def _urgency(rows: Any, *, anchor: datetime) -> Any:
    """A deadline that has passed presses no longer; the anchor keeps that judgement the same from page to page."""
    ahead = When(same_key_until__gt=anchor, then=F("same_key_until"))
    return rows.annotate(
        deadline=Case(ahead, default=Value(NEVER), output_field=DateTimeField()),
        since=Coalesce("first_sent_at", "created_at"),
        money=Coalesce("amount_minor", Value(-1)),
    )


def _filtered(rows: Any, chosen: dict[str, str], *, now: datetime) -> Any:
    exact = {COLUMNS[name]: value for name, value in chosen.items() if name in COLUMNS}
    rows = rows.filter(**exact)
    if chosen.get("mark"):
        rows = rows.filter(escalated_at__isnull=chosen["mark"] != "escalated")
    if chosen.get("age") in AGES:
        rows = rows.filter(created_at__lt=now - AGES[chosen["age"]][1])
    return rows


def _count(tab: Tab, own: Any, *, also: int) -> str:
    """How many a tab holds. Runs that stopped and messages that are stuck need a decision as well."""
    if tab.name == "all":
        return ""
    number = tab.rows(own).order_by()[: MOST + 1].count() + (also if tab.name == "decide" else 0)
    return f"{MOST}+" if number > MOST else str(number)


RUNS_SHOWN = 5
OF_RUNS = {"tenant": "tenant", "workflow": "workflow_type"}  # the filters that mean something for a run


def _stopped(
    request: HttpRequest, tab: Tab, chosen: dict[str, str], stopped: sagas.Stopped, *, now: datetime
) -> dict[str, Any] | None:
    """The runs that stand above the first page of what needs a decision. Filters of operations leave them out."""
    paged = "after" in request.GET or "before" in request.GET
    if tab.name != "decide" or paged or not stopped.number or set(chosen) - {*OF_RUNS, "mark"}:
        return None
    if chosen.get("mark", "escalated") != "escalated":
        return None
    rows = stopped.rows.filter(**{OF_RUNS[name]: value for name, value in chosen.items() if name in OF_RUNS})
    found = list(rows.order_by("id")[: RUNS_SHOWN + 1])
    shown = [(run, run_wording.run_stands(run, now=now)) for run in found[:RUNS_SHOWN]]
    return {"rows": shown, "more": len(found) > RUNS_SHOWN} if shown else None


def _midnight() -> datetime:
    return timezone.localtime().replace(hour=0, minute=0, second=0, microsecond=0)


def _figures(own: Any, *, now: datetime, stopped_since: datetime | None) -> dict[str, Any]:
    """What the strip says: money whose fate is unknown, the oldest open case, the first key to be forgotten."""
    unsure = own.filter(Q(state=State.AMBIGUOUS) | Q(escalated_at__isnull=False))
    money = unsure.filter(amount_minor__isnull=False, state=State.AMBIGUOUS).order_by()
    sums = money.values("currency").annotate(sum=Sum("amount_minor")).order_by("-sum")
    ends = unsure.aggregate(
        oldest=Min(Coalesce("first_sent_at", "created_at"), filter=Q(escalated_at__isnull=False)),
        first_key=Min("same_key_until", filter=Q(same_key_until__gt=now, state=State.AMBIGUOUS)),
    )
    oldest = min(filter(None, (ends["oldest"], stopped_since)), default=None)
    at_risk = [wording.money(row["sum"], row["currency"]) for row in sums[:3]]
    return {
        "at_risk": at_risk,
        "oldest": now - oldest if oldest else None,
        "first_key": ends["first_key"] - now if ends["first_key"] else None,
    }


def _chips(rows: list[Operation], chosen: dict[str, str], tenants: list[str]) -> list[Chip]:
    """Choices come from what is configured and what is on this page: no scan for distinct values."""
    providers = registry.providers()
    seen = {name: {getattr(row, column) for row in rows} for name, column in COLUMNS.items()}
    seen["provider"] |= set(providers)
    seen["action"] |= {action for provider in providers.values() for action in provider.actions}
    choices = {name: [(value, value) for value in sorted(values) if value] for name, values in seen.items()}
    choices["error"] = [(value, wording.error(value)) for value, _ in choices["error"]]
    choices["cause"] = [(value, wording.reason(value)) for value, _ in choices["cause"]]
    choices["state"] = [(state.value, wording.state_label(state).word) for state in State]
    choices["tenant"] = [(slug, slug) for slug in tenants] if len(tenants) > 1 else []
    choices["mark"] = [("escalated", "escalated"), ("none", "not escalated")]
    choices["age"] = [(value, label) for value, (label, _) in AGES.items()]
    return worth_showing([Chip(name, chosen.get(name, ""), choices.get(name, [])) for name in FILTERS])


@dataclass(frozen=True)
class Row:
    """One operation as the list shows it."""

    operation: Operation
    label: wording.Label
    headline: str
    known: str
    detail: str
    differs: bool
    same_key: str
    share: int | None
    age: timedelta


def _rows(operations: list[Operation], *, now: datetime) -> list[Row]:
    newest = _newest_entries(operations)
    return [_row(operation, newest.get(operation.pk, []), now=now) for operation in operations]


def _newest_entries(operations: list[Operation]) -> dict[int, list[JournalEntry]]:
    """Operation id -> its newest entry of each kind that a line can tell, in one query."""
    kinds = ("finding", "receipt", "no_answer", "not_applied", "late_report", "lease_expired", "restored")
    entries = JournalEntry.objects.filter(operation__in=[each.pk for each in operations], kind__in=kinds)
    newest: dict[int, list[JournalEntry]] = {}
    for entry in entries.order_by("operation_id", "kind", "-id").distinct("operation_id", "kind"):
        newest.setdefault(entry.operation_id or 0, []).append(entry)
    return newest


def _row(operation: Operation, entries: list[JournalEntry], *, now: datetime) -> Row:
    spec = spec_of(operation)
    known, detail, differs = case_wording.known(operation, entries, spec, now=now)
    return Row(
        operation=operation,
        label=wording.state_label(operation.state, escalated=operation.escalated_at is not None),
        headline=case_wording.headline(operation, spec),
        known=known,
        detail=detail,
        differs=differs,
        same_key=case_wording.same_key(operation, spec, now=now),
        share=case_wording.share_left(operation, now=now),
        age=now - (operation.first_sent_at or operation.created_at),
    )


@dataclass(frozen=True)
class Group:
    """Rows of this page that share provider, action and kind of trouble. Other pages may hold more of them."""

    title: str
    rows: list[Row]

    @property
    def since(self) -> datetime:
        return min(row.operation.first_sent_at or row.operation.created_at for row in self.rows)

    @property
    def money(self) -> list[str]:
        sums: dict[str, int] = {}
        for row in self.rows:
            if row.operation.amount_minor is not None:
                currency = row.operation.currency
                sums[currency] = sums.get(currency, 0) + row.operation.amount_minor
        return [wording.money(minor, currency) for currency, minor in sorted(sums.items())]


def _trouble(operation: Operation) -> str:
    """Why a person is asked, where one is; else how the last attempt ended."""
    if operation.escalated_at and operation.escalation_reason:
        return wording.reason(operation.escalation_reason)
    return wording.error(operation.error_class)


def _groups(rows: list[Row], *, titled: bool = True) -> list[Group]:
    """The page's rows by kind of trouble; the kind with the most urgent row first. No titles where none repeats."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        operation = row.operation
        title = f"{operation.provider} · {operation.action} · {_trouble(operation)}"
        kinds.setdefault(title, []).append(row)
    if not titled or all(len(same) == 1 for same in kinds.values()):
        return [Group("", rows)] if rows else []
    return [Group(title, same) for title, same in kinds.items()]
