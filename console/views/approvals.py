"""Approvals: what waits for a person's consent, exactly what would be sent, and the decision."""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.models import User
from django.db.models import F, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe

from audit.models import Entry
from console import access, live, pressing
from console.ledger import spec_of
from console.live import signed_in
from console.stories import Moment, decided_moment
from reconciliation import agreed, case_wording, consent, job_wording, keyless, sealing, second_person, wording
from reconciliation.actions import Actor, Permission
from reconciliation.models import Approval, Operation, Run
from reconciliation.states import APPROVAL_OPEN, ApprovalState
from reconciliation.transition import database_now

MOST = 200  # of one list; what is beyond it is said, and found by deciding what comes first
NEAR = timedelta(minutes=15)
TABS = {
    "you": "Waiting for you",
    "others": "Waiting for others",
    "yours": "Your requests",
    "decided": "Decided today",
    "ended": "Ended today",
}


@signed_in
@require_safe
def approvals(request: HttpRequest) -> HttpResponse:
    """One list, with its first request beside it."""
    access.require(request, Permission.VIEW)
    tenants, tab = access.places_of(request), _tab(request)
    first = _lists(request, tenants)[tab].first()
    if first is not None:
        return _answer(request, first, access.actor_for(request, first.tenant), tab=tab, index=True)
    facts = {**_listed(request, tenants, tab), "section": "approvals", "live_url": request.get_full_path()}
    return live.answer(request, page="approvals.html", part="_approvals.html", facts=facts)


@signed_in
@require_safe
def approval(request: HttpRequest, pk: int) -> HttpResponse:
    """One request for consent; `?done=<token>` shows how an earlier press ended."""
    found, actor = access.fetch_approval(request, pk, Permission.VIEW)
    return _answer(request, found, actor, tab=_tab(request))


@signed_in
@require_POST
def act(request: HttpRequest, pk: int) -> HttpResponse:
    """One press of one button."""
    found, actor = access.fetch_approval(request, pk, Permission.VIEW)
    return pressing.press(request, found, actor=actor, back=reverse("approval", args=[pk]))


def _answer(request: HttpRequest, found: Approval, actor: Actor, *, tab: str, index: bool = False) -> HttpResponse:
    here = reverse("approval", args=[found.pk])
    facts = {
        **_listed(request, access.places_of(request), tab),
        **_facts(found, actor),
        "answer": pressing.answered(request, actor=actor),
        "index": index,
        # The page follows this request, also where another one has become the first of its list meanwhile.
        "live_url": f"{here}?tab={tab}" if index else request.get_full_path(),
        "section": "approvals",
    }
    return live.answer(request, page="approvals.html", part="_approvals.html", facts=facts)


def _tab(request: HttpRequest) -> str:
    asked = request.GET.get("tab", "")
    return asked if asked in TABS else "you"


# Lists


def waiting_for(request: HttpRequest) -> QuerySet[Approval]:
    """What the signed-in person may decide, and nobody has decided yet."""
    return _waiting(request).exclude(forbidden__overlap=_names(request))


def _waiting(request: HttpRequest) -> QuerySet[Approval]:
    tenants = access.places_of(request, Permission.APPROVE)
    again = access.places_of(request, Permission.SEND_AGAIN)
    mine = Approval.objects.filter(state=ApprovalState.WAITING, tenant__in=tenants)
    return mine.filter(~Q(action__in=second_person.DUPLICATES) | Q(tenant__in=again))


def _names(request: HttpRequest) -> list[str]:
    return consent.names(access.actor_of(request.user, role=""))


def _lists(request: HttpRequest, tenants: list[str]) -> dict[str, QuerySet[Approval]]:
    own = Approval.objects.filter(tenant__in=tenants).select_related(
        "operation", "operation__run", "run", "limit", "job"
    )
    ours = own.filter(forbidden__overlap=_names(request))
    forme = waiting_for(request).values("pk")
    midnight = timezone.localtime().replace(hour=0, minute=0, second=0, microsecond=0)
    return {
        "you": own.filter(pk__in=forme).order_by("expires_at", "id"),
        "others": own.filter(state=ApprovalState.WAITING).exclude(pk__in=forme).order_by("expires_at", "id"),
        "yours": ours.filter(state__in=APPROVAL_OPEN).order_by("expires_at", "id"),
        "decided": own.filter(decided_at__gte=midnight).order_by("-decided_at", "-id"),
        "ended": own.filter(state__in=_ENDED, settled_at__gte=midnight).order_by("-settled_at", "-id"),
    }


_ENDED = (ApprovalState.EXPIRED, ApprovalState.WITHDRAWN, ApprovalState.SUPERSEDED)


@dataclass(frozen=True)
class Row:
    """One request as the list shows it."""

    approval: Approval
    label: wording.Label
    headline: str
    detail: str
    asked_by: str
    left: str
    share: int
    near: bool
    own: bool


def _listed(request: HttpRequest, tenants: list[str], tab: str) -> dict[str, Any]:
    lists, now = _lists(request, tenants), database_now()
    found = list(lists[tab][:MOST])
    people = people_of(name for each in found for name in (each.requested_by, each.on_behalf_of))
    mine = set(_names(request))
    return {
        "tab": tab,
        "tabs": [(name, label, lists[name].count()) for name, label in TABS.items()],
        "rows": [_row(each, people, mine, now=now) for each in found],
        "now": now,
        "tenants": tenants,
    }


def _row(approval: Approval, people: dict[str, str], mine: set[str], *, now: datetime) -> Row:
    headline, detail = told(approval)
    left = (approval.use_by or approval.expires_at) - now
    whole = timedelta(seconds=approval.use_within) if approval.use_by else approval.expires_at - approval.created_at
    return Row(
        approval=approval,
        label=wording.approval_label(approval.state),
        headline=headline,
        detail=detail,
        asked_by=asked_by(approval, people),
        left=countdown(left) if approval.state in APPROVAL_OPEN else "",
        share=max(0, min(100, round(100 * left / whole))) if whole else 0,
        near=left < NEAR,
        own=bool(mine & set(approval.forbidden)),
    )


# Words


def told(approval: Approval) -> tuple[str, str]:
    """(what is asked for, on what)."""
    about = _about(approval)
    if approval.action == second_person.WAIVE_UNDO:
        step = json.loads(approval.inputs).get("step", "?")
        if approval.run is not None and agreed.lasts(approval.run, step):
            return f"Accept that {step} stands, which cannot be undone", about
        return f"Accept that the undo of {step} was done by hand", about
    return (ASKED[approval.action], about) if approval.action else (about, "")


ASKED = {
    second_person.SEND_AGAIN: "Send again, accepting a duplicate",
    second_person.NEW_INTENT: "Try again what is called not applied on a word, accepting a duplicate",
    second_person.COMPENSATE_RUN: "Undo by hand what this run applied",
    second_person.LIFT_LIMIT: "Take a limit away",
    second_person.RAISE_LIMIT: "Let more through a limit",
    second_person.ACCEPT_REPEATS: "Run every missed start although an action has no key",
}


def _about(approval: Approval) -> str:
    if approval.operation is not None:
        return case_wording.headline(approval.operation, spec_of(approval.operation))
    if approval.limit is not None:
        told = wording.limit(approval.limit)
        return f"{told.place}, {told.what}"
    if approval.job is not None:
        return f"schedule {approval.job.name}"
    return f"{approval.run.workflow_type} {approval.run.workflow_id}" if approval.run else ""


def countdown(left: timedelta) -> str:
    """`1:52` below an hour, `2 h 05 m` above; `over` when nothing is left."""
    seconds = int(left.total_seconds())
    if left <= timedelta(0):
        return "over"
    return f"{seconds // 60}:{seconds % 60:02}" if seconds < 3600 else wording.duration(left)


def people_of(names: Iterable[str]) -> dict[str, str]:
    """Ids of actors -> the names by which they are known here now."""
    wanted = set(names)
    numbers = {name.removeprefix("person:") for name in wanted if name.startswith("person:")}
    users = User.objects.filter(pk__in=[number for number in numbers if number.isdecimal() and len(number) < 10])
    known = {f"person:{user.pk}": user.get_username() for user in users}
    return {name: known.get(name) or name.removeprefix("person:").replace(":", " ") for name in wanted}


def standing(subject: second_person.Subject) -> list[tuple[Approval, str, str]]:
    """Open requests for a second person about this subject, each with the names of who asked and of who agreed."""
    found = second_person.standing(subject)
    people = people_of(name for each in found for name in (each.requested_by, each.decided_by) if name)
    return [(each, people.get(each.requested_by, ""), people.get(each.decided_by, "")) for each in found]


def requested_by(row: Operation | Run, *, with_names: bool) -> str:
    """Who asked for an operation or a run, and for whom; `with_names`: whether the reader may see who decides here."""
    names = [name for name in (row.requested_by, row.on_behalf_of) if name]
    people = people_of(name for name in names if name.startswith("person:")) if with_names else {}
    return asked_by(row, {name: people.get(name, name) for name in names})


def asked_by(row: Approval | Operation | Run, people: dict[str, str]) -> str:
    """Who asked, and for whom."""
    who, whom = people.get(row.requested_by, ""), people.get(row.on_behalf_of, "")
    return f"{who} for {whom}" if whom and whom != who else who


# One request


@dataclass(frozen=True)
class Sent:
    """One field of what will be sent."""

    name: str
    value: str
    hidden: bool = False


@dataclass(frozen=True)
class Rests:
    """One field of what the action rests on: as shown now it was asked, and as it was asked before."""

    name: str
    now: str
    before: str | None

    @property
    def changed(self) -> bool:
        return self.before is not None and self.before != self.now


@dataclass(frozen=True)
class Touched:
    """One operation that a request about a run is about."""

    operation: Operation
    title: str
    part: str
    amount: str
    label: wording.Label
    why: str
    changed: bool  # since it was asked


def _facts(found: Approval, actor: Actor) -> dict[str, Any]:
    operation, now = found.operation, database_now()
    run = found.run or (operation.run if operation else None)
    headline, detail = told(found)
    people = people_of([found.requested_by, found.on_behalf_of, found.decided_by])
    left = (found.use_by or found.expires_at) - now
    return {
        "approval": found,
        "headline": headline,
        "detail": detail,
        "label": wording.approval_label(found.state),
        "asked_by": people.get(found.requested_by, ""),
        "asked_for": people.get(found.on_behalf_of, ""),
        "decided_by": people.get(found.decided_by, ""),
        "operation": operation,
        "run": run,
        "left": countdown(left),
        "near": left < NEAR,
        "waiting": found.state == ApprovalState.WAITING,
        "sent": _sent(operation) if operation else [],
        "rests": _rests(found),
        "change": _change(found) if found.state == ApprovalState.WAITING else None,
        "again": found.replaces is not None,
        "others": _others(found),
        "touched": _touched(found),
        "touched_head": TOUCHED.get(found.action, ""),
        "moved_on": bool(found.action) and found.state in APPROVAL_OPEN and second_person.has_changed(found),
        "moments": _moments(found, actor),
        "panel": pressing.panel(found, actor=actor),
        "act_url": reverse("approval_act", args=[found.pk]),
    }


def _sent(operation: Operation) -> list[Sent]:
    spec, shown = spec_of(operation), case_wording.shown_request(operation)
    rows = [Sent(name, case_wording.field(name, value, spec, shown)) for name, value in shown.items()]
    try:
        hidden = sealing.hidden_names(operation.request_sealed)
    except sealing.CannotOpen:
        hidden = ("(sealed under a key that is not configured)",)
    return rows + [Sent(name, "", hidden=True) for name in hidden]


def _change(found: Approval) -> tuple[str, str, str, str] | None:
    """What a guard for everybody is, and what it would be: (what, now, then, what follows)."""
    if found.limit is not None:
        now = wording.limit(found.limit)
        if found.action != second_person.RAISE_LIMIT:
            return now.place, now.what, "nothing of it stays", ""
        raised = copy(found.limit)
        raised.most = json.loads(found.inputs)["most"]
        return now.place, now.what, wording.limit(raised).what, ""
    if found.job is not None:
        steps = ", ".join(keyless.steps(found.job.workflow)) or "no step"
        follows = f"Each missed start acts once more: no provider remembers a key for {steps}."
        now_run = job_wording.MISSED_POLICIES.get(found.job.missed, found.job.missed)
        return "Missed starts", now_run, job_wording.MISSED_POLICIES["run_all"], follows
    return None


def _rests(found: Approval) -> list[Rests]:
    seen = _shown(found)
    before = _shown(found.replaces) if found.replaces is not None else None
    names = [*seen, *(name for name in before or {} if name not in seen)]
    return [
        Rests(name, seen.get(name, "not shown"), None if before is None else before.get(name, "not shown"))
        for name in names
    ]


def _shown(approval: Approval) -> dict[str, str]:
    shown = json.loads(approval.seen_shown) if approval.seen_shown else {}
    about = approval.operation
    spec, request = (spec_of(about), case_wording.shown_request(about)) if about else (None, {})
    told = {name: case_wording.field(name, value, spec, request) for name, value in shown.items()}
    if approval.seen_sealed:
        told["other fields"] = "hidden; compared before sending"
    return told


def _others(found: Approval) -> list[tuple[Operation, str, wording.Label, bool]]:
    """What else was done or is open for the same thing, and whether that changed since it was asked: a second refund
    stands out here.
    """
    operation = found.operation
    if operation is None:
        return []
    same = Operation.objects.filter(tenant=operation.tenant, business_object=operation.business_object)
    rows = list(same.exclude(pk=operation.pk).order_by("-id")[:8])
    since = _changed_since(found, rows)
    return [(row, case_wording.headline(row, spec_of(row)), _label(row), row.pk in since) for row in rows]


def _changed_since(found: Approval, rows: Iterable[Operation]) -> set[int]:
    """Which of these are in another state than when it was asked. A look-up that told nothing is no change."""
    subjects = {str(row.subject): row.pk for row in rows}
    moves = Entry.objects.filter(subject__in=list(subjects), event="transition", at__gt=found.created_at)
    moved = moves.exclude(from_state=F("to_state")).values_list("subject", flat=True)
    return {subjects[subject] for subject in moved}


TOUCHED = {second_person.COMPENSATE_RUN: "What would be undone", second_person.WAIVE_UNDO: "What would be waived"}


def _touched(found: Approval) -> list[Touched]:
    """The exact effects that a request about a run is about, as they stand now."""
    run, inputs = found.run, json.loads(found.inputs)
    if run is None:
        return []
    rows = [(each, _part(run, each)) for each in second_person.concerned(run, found.action, inputs)]
    if found.action == second_person.WAIVE_UNDO:
        done = Operation.objects.filter(run=run, step=inputs["step"]).order_by("-intent_version")[:1]
        rows = [*((each, "applied") for each in done), *((each, "its undo") for each, _ in rows)]
    since = _changed_since(found, (each for each, _ in rows))
    return [_touch(each, part, changed=each.pk in since) for each, part in rows]


def _part(run: Run, operation: Operation) -> str:
    return "cannot be undone" if agreed.lasts(run, operation.step) else "applied"


def _touch(operation: Operation, part: str, *, changed: bool) -> Touched:
    counted = operation.amount_minor is not None
    return Touched(
        operation=operation,
        title=case_wording.headline(operation, spec_of(operation)),
        part=part,
        amount=wording.money(operation.amount_minor or 0, operation.currency) if counted else "",
        label=_label(operation),
        why=wording.reason(operation.escalation_reason or operation.reason_code) if part == "its undo" else "",
        changed=changed,
    )


def _label(row: Operation) -> wording.Label:
    return wording.state_label(row.state, escalated=row.escalated_at is not None)


def _moments(found: Approval, actor: Actor) -> list[Moment]:
    if Permission.VIEW_AUDIT not in actor.permissions:
        return []
    entries = Entry.objects.filter(subject=str(found.subject)).order_by("-seq").prefetch_related("openings")
    return [decided_moment(entry) for entry in entries[:20]]
