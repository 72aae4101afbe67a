"""Schedules: a list, one schedule with its expected runs, and the forms that change it."""

import uuid
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest
from typing import Any
from zoneinfo import available_timezones

from django.core.exceptions import BadRequest
from django.db import connections
from django.forms import Form
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from audit.models import Entry
from console import access, keyset, live, pressing, sagas
from console.job_forms import JobForm, NewJobForm, RunNowForm
from console.live import signed_in
from console.stories import Moment, decided_moment
from console.views import approvals, errors
from reconciliation import job_wording, jobs, occurrences, registry, slots, wording
from reconciliation import schedules as ledger
from reconciliation.actions import Actor, Answer, Permission, Verdict
from reconciliation.models import Job, Slot, Tombstone
from reconciliation.occurrences import NotASchedule, Occurrence, SlotState
from reconciliation.transition import ALIAS, database_now
from reconciliation.wording import Label

SIZE = 50
RECENT = 8  # expected runs that the list shows of each schedule
NEEDED = Label("▲", "needs a person", "person")
ON, OFF = Label("▸", "on", "good"), Label("■", "off", "calm")


@dataclass(frozen=True)
class Line:
    """One expected run as the pages draw it."""

    slot: Slot
    label: Label
    text: str
    pruned: str = ""  # how its run ended, where the run itself is gone


@signed_in
@require_safe
def schedules(request: HttpRequest) -> HttpResponse:
    """Schedules by name, each with its next run and what became of the last ones."""
    tenants = access.require(request, Permission.VIEW)
    rows = Job.objects.filter(tenant__in=tenants)
    page = keyset.page(rows, order=("name", "id"), cursor=keyset.read(request.GET, kinds=[str, int]), size=SIZE)
    asking, recent = _asking(page.rows), _recent(page.rows)
    facts = {
        "page": page,
        "rows": [(job, _label(job, asking), _said(job), recent[job.pk]) for job in page.rows],
        "tenants": tenants,
        "may_change": bool(access.tenants_of(request, Permission.SCHEDULE)),
        "section": "schedules",
        "now": database_now(),
    }
    return live.answer(request, page="schedules.html", part="_schedules.html", facts=facts)


def _label(job: Job, asking: set[int]) -> Label:
    if job.problem or job.pk in asking:
        return NEEDED
    return ON if job.enabled else OFF


def _asking(rows: list[Job]) -> set[int]:
    return set(Slot.objects.filter(job__in=rows, state=SlotState.ASKED).values_list("job_id", flat=True))


def _said(job: Job) -> str:
    return occurrences.in_words(job.kind, job.expression)


def _recent(rows: list[Job]) -> dict[int, list[Line]]:
    """The newest expected runs of each schedule, by one query."""
    newest: dict[int, list[Line]] = {job.pk: [] for job in rows}
    slots = Slot.objects.filter(pk__in=_newest(rows)).select_related("run").order_by("-scheduled_for")
    for line in _lines(list(slots)):
        newest[line.slot.job_id].append(line)
    return newest


def _newest(rows: list[Job]) -> list[int]:
    """Ids, read along the index from the newest of each schedule."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(
            "SELECT s.id FROM unnest(%s::bigint[]) AS j (id), LATERAL (SELECT id FROM reconciliation_slot"
            " WHERE job_id = j.id ORDER BY scheduled_for DESC LIMIT %s) AS s",
            [[job.pk for job in rows], RECENT],
        )
        return [row[0] for row in cursor.fetchall()]


def _lines(slots: list[Slot]) -> list[Line]:
    gone = [slot.run_id for slot in slots if slot.run_id is not None and slot.run is None]
    stones = Tombstone.objects.filter(kind="run", subject_id__in=gone) if gone else []
    ended = {stone.subject_id: stone.state for stone in stones}
    return [_line(slot, ended.get(slot.run_id or 0, "")) for slot in slots]


def _line(slot: Slot, pruned: str) -> Line:
    state = slot.run.state if slot.run is not None else pruned
    if state and (slot.open or state != "succeeded"):
        label = wording.run_label(state, escalated=slot.run is not None and slot.run.escalated_at is not None)
    else:
        label = wording.slot_label(slot.state)
    return Line(slot, label, job_wording.slot_story(slot), wording.run_label(pruned).word if pruned else "")


@signed_in
@require_safe
def schedule(request: HttpRequest, pk: int) -> HttpResponse:
    """One schedule; `?done=<token>` shows how an earlier press ended."""
    job, actor = access.fetch_job(request, pk, Permission.VIEW)
    facts = _facts(request, job, actor) | {"answer": pressing.answered(request, actor=actor)}
    return live.answer(request, page="schedule.html", part="_schedule.html", facts=facts)


def _facts(request: HttpRequest, job: Job, actor: Actor) -> dict[str, Any]:
    rows = Slot.objects.filter(job=job).select_related("run", "behind")
    page = keyset.page(rows, order=("-scheduled_for",), cursor=keyset.read(request.GET, kinds=[datetime]), size=SIZE)
    now = database_now()
    may_read = Permission.VIEW_AUDIT in actor.permissions
    fillable = [(str(slot.pk), slot) for slot in jobs.fillable(job)]
    return {
        "job": job,
        "now": now,
        "label": _label(job, _asking([job])),
        "said": _said(job),
        "waiting": _waiting(job, now),
        "coming": _coming(job, now) if not request.GET.get("after") else [],
        "page": page,
        "lines": _lines(page.rows),
        "terms": job_wording.job_terms(job),
        "acts_for": approvals.people_of([job.changed_by])[job.changed_by] if may_read else job.changed_by,
        "never": sagas.never(job.workflow),
        "asked": list(Slot.objects.filter(job=job, state=SlotState.ASKED).order_by("scheduled_for")[:3]),
        "fillable": fillable,
        "several": any(slot.count > 1 for _, slot in fillable),
        "history": _history(job) if may_read else [],
        "may_read_audit": may_read,
        "may_change": Permission.SCHEDULE in actor.permissions,
        "zone_data": occurrences.ZONE_DATA,
        "tokens": [uuid.uuid4() for _ in range(8)],
        "token": uuid.uuid4(),
        "asked_of_two": approvals.standing(job),
        "tenants": access.tenants_of(request),
        "section": "schedules",
        "expected": wording.EXPECTED,
    }


def _coming(job: Job, now: datetime) -> list[Occurrence]:
    try:
        return slots.coming(job, now, 5)[::-1]
    except NotASchedule:
        return []


def _waiting(job: Job, now: datetime) -> ledger.Waiting | None:
    try:
        return ledger.waiting(job, now)
    except (NotASchedule, registry.Unregistered):  # the page says so, and that nothing is decided
        return None


def _history(job: Job, *, since: int = 0) -> list[Moment]:
    entries = Entry.objects.filter(subject=job.subject).exclude(event="slot")
    if since:
        entries = entries.filter(version__gt=since)
    return [decided_moment(entry) for entry in entries.order_by("-seq").prefetch_related("openings")[:20]]


# Forms


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def new(request: HttpRequest) -> HttpResponse:
    """A new schedule: its times are shown before it is saved."""
    tenants = access.require(request, Permission.SCHEDULE)
    blank = {"zone": "UTC", "missed": "latest_only", "overlap": "skip", "version": 0, "token": uuid.uuid4()}
    form = NewJobForm(request.POST or None, initial=blank, workflows=_workflows(), tenants=tenants)
    if request.method != "POST" or not form.is_valid():
        return _form(request, form, job=None, status=422 if form.is_bound else 200)
    clean, anchor = form.cleaned_data, form.seen_from()
    actor = access.actor_for(request, clean["tenant"])
    try:
        change = jobs.preview(None, form.terms(), now=database_now(), anchor=anchor)
        if anchor is None or not request.POST.get("confirm"):
            return _times(request, form, job=None, change=change)
        answer = jobs.create(tenant=clean["tenant"], name=clean["name"], terms=form.terms(), token=clean["token"],
                             actor=actor, reason=clean["reason"], anchor=anchor)  # fmt: skip
    except jobs.Refused as refused:
        return _refused_terms(request, form, refused, job=None)
    made = Job.objects.get(tenant=clean["tenant"], name=clean["name"])
    return redirect(f"{reverse('schedule', args=[made.pk])}?done={answer.token}")


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def edit(request: HttpRequest, pk: int) -> HttpResponse:
    """Change a schedule: old and new times are shown before it is saved."""
    job, actor = access.fetch_job(request, pk, Permission.SCHEDULE)
    stands = {**vars(jobs.terms_of(job)), "input": "", "version": job.version, "token": uuid.uuid4()}
    form = JobForm(request.POST or None, initial=stands, workflows=_workflows(job.workflow), about=str(pk))
    if request.method != "POST" or not form.is_valid():
        return _form(request, form, job=job, status=422 if form.is_bound else 200)
    clean, anchor = form.cleaned_data, form.seen_from()
    try:
        change = jobs.preview(job, form.terms(), now=database_now(), anchor=anchor)
        if anchor is None or not request.POST.get("confirm"):
            return _times(request, form, job=job, change=change)
        answer = jobs.edit(job, terms=form.terms(), version=clean["version"], token=clean["token"], actor=actor,
                           reason=clean["reason"], anchor=anchor)  # fmt: skip
    except jobs.Refused as refused:
        return _refused_terms(request, form, refused, job=job)
    if answer.verdict is Verdict.CONFLICT:
        return _form_anew(request, form, job, change, answer)
    return redirect(f"{reverse('schedule', args=[pk])}?done={answer.token}")


def _workflows(*also: str) -> list[str]:
    return sorted({name for name, _ in registry.workflows()} | set(also))


def _form(request: HttpRequest, form: Form, *, job: Job | None, status: int = 200, **more: Any) -> HttpResponse:
    facts = {
        "form": form,
        "job": job,
        "section": "schedules",
        "zones": sorted(available_timezones()),
        "shown": job.input_shown if job else "",
        "hidden": job_wording.hidden_input(job) if job else (),
        "job_zone": form["zone"].value(),
        "never": sagas.never(form["workflow"].value() or ""),
    }
    change: jobs.Change | None = more.get("change")
    if change is not None:
        facts["pairs"] = list(zip_longest(change.old, change.new))
    return render(request, "schedule_form.html", facts | more, status=status)


def _times(request: HttpRequest, form: JobForm, *, job: Job | None, change: jobs.Change) -> HttpResponse:
    """The times of the terms, which may be saved under them. Save for other terms than those shown saves nothing."""
    unseen = bool(request.POST.get("confirm"))
    form.show(anchor=change.anchor)
    return _form(request, form, job=job, status=422 if unseen else 200, change=change, unseen=unseen)


def _refused_terms(request: HttpRequest, form: Form, refused: jobs.Refused, *, job: Job | None) -> HttpResponse:
    form.add_error(refused.field if refused.field in form.fields else None, refused.sentence)
    return _form(request, form, job=job, status=422)


def _form_anew(request: HttpRequest, form: JobForm, job: Job, change: jobs.Change, answer: Answer) -> HttpResponse:
    """409: what changed since; what was typed is kept, and may be sent with the new version."""
    since = form.cleaned_data["version"]
    job.refresh_from_db()
    form.show(anchor=change.anchor, version=str(job.version), token=str(uuid.uuid4()))
    return _form(request, form, job=job, status=409, change=change, conflict=answer,
                 changes=_history(job, since=since))  # fmt: skip


@signed_in
@require_POST
def act(request: HttpRequest, pk: int) -> HttpResponse:
    """One press of one button on the schedule."""
    job, actor = access.fetch_job(request, pk, Permission.VIEW)
    form = RunNowForm(request.POST)
    if not form.is_valid():
        raise BadRequest("The form came without what it needs, so nothing was done. Open the page again.")
    answer = _deed(job, form.cleaned_data, actor)
    back = reverse("schedule", args=[pk])
    if answer.verdict is Verdict.CONFLICT:
        facts = {"answer": answer, "subject": job, "changes": _history(job, since=form.cleaned_data["version"]),
                 "reason": form.cleaned_data["reason"], "back": back}  # fmt: skip
        return render(request, "conflict.html", facts, status=409)
    if answer.verdict is Verdict.REFUSED:
        status = 422 if Permission.SCHEDULE in actor.permissions else 403
        title = "Not done" if status == 422 else "Your role does not allow this"
        return errors.page(request, status, title, answer.message, "Nothing was changed.", back=back,
                           back_label="Back to the schedule", reason=form.cleaned_data["reason"])  # fmt: skip
    return redirect(f"{back}?done={answer.token}")


def _deed(job: Job, clean: dict[str, Any], actor: Actor) -> Answer:
    given = {"version": clean["version"], "token": clean["token"], "actor": actor, "reason": clean["reason"]}
    action, slot = clean["action"], clean["slot"]
    if action in ("enable", "disable"):
        return jobs.switch(job, on=action == "enable", **given)
    if action == "new_intent":
        return jobs.run_now(job, fill=None, **given)
    if not (slot.isdecimal() or (action == "fill" and slot == "next")):
        raise BadRequest("The form names no expected run, so nothing was done.")
    if action == "fill":
        return jobs.run_now(job, fill=slot, at=clean["at"], **given)
    return jobs.answer_missed(job, slot=int(slot), run=clean["run"], **given)
