"""Missed starts: recorded as ranges of one row, passed over, run afterwards, answered by a person."""

from __future__ import annotations

from datetime import datetime

from . import expected, occurrences, slots, transition
from .actors import Actor
from .models import Job, Slot
from .occurrences import NotASchedule, Occurrence, Plan, SlotState
from .providers.base import Json
from .slots import BEAT


def pass_range(job: Job, plan: Plan, last: Occurrence | None, state: str, reason: str) -> None:
    """Record the occurrences from next_at to `last` as one row, and go on behind them."""
    if last is None or job.next_at is None or last.at < job.next_at:
        return
    window = slots.window_start(job, plan, job.next_at)
    first: Occurrence | None = expected.at(plan, job.next_at)
    while first is not None and first.at <= last.at and slots.has_slot(job, first):  # a person ran it before its time
        slots.insert(job, first, window_start=window, state=state, reason_code=reason)  # a row where zone data moved it
        first = plan.after(first.at)
    if first is not None and first.at <= last.at:
        count = plan.count(first.at, last.at) - _known(job, first.at, last.at)
        of_range: Json = {"until": last.at, "terms": _times(job)} if count > 1 else {}
        slots.insert(job, first, window_start=window, state=state, reason_code=reason, count=count, **of_range)
    slots.lost_to_gap(job, plan, job.next_at, last.at)
    slots.forward(job, plan, last.at)


def _known(job: Job, first: datetime, last: datetime) -> int:
    known = Slot.objects.filter(job=job, scheduled_for__range=(first, last), manual=False)
    return known.exclude(state=SlotState.SKIPPED_GAP).count()


def _times(job: Job) -> Json:
    return {"kind": job.kind, "expression": job.expression, "zone": job.zone, "anchor": job.anchor.isoformat()}


def pass_all_over(*, reason: str) -> None:
    """Do so for every job up to now, in the caller's transaction."""
    for job in Job.objects.select_for_update().order_by("pk"):
        pass_over(job, until=transition.database_now(), reason=reason)


def pass_over(job: Job, *, until: datetime, reason: str, actor: Actor = BEAT) -> None:
    """Record every occurrence up to `until` as missed, without a run: for a locked job of which nothing is to start.

    So is what was due and is not started yet: after a restore it may have been started in the past that was lost.
    """
    waiting = Slot.objects.filter(job=job, state__in=[SlotState.DUE, SlotState.QUEUED, SlotState.CATCHING_UP])
    for slot in waiting.order_by("scheduled_for"):
        slots.settle(slot, state=SlotState.MISSED, reason_code=reason)
        slots.record(job, slot, actor=actor)
    pass_due(job, until=until, reason=reason)


def pass_due(job: Job, *, until: datetime, reason: str) -> None:
    """Record the occurrences up to `until` that are not decided yet as missed, in one row.

    Where the zone is not known here, how many they are is not known either: the first of them stands for all.
    """
    if not job.enabled or job.next_at is None or job.next_at > until:
        return
    try:
        plan = expected.times_of(job)
    except NotASchedule:
        first = expected.promised(job, job.next_at)
        slots.insert(job, first, window_start=first.at, state=SlotState.MISSED, reason_code=reason)
        job.decided_until, job.problem = until, "zone_unknown"
        slots.save(job, "decided_until", "problem")
        return
    pass_range(job, plan, plan.latest(until), SlotState.MISSED, reason)
    slots.save(job, *expected.EXPECTED)


def _plan_of_range(job: Job, held: Slot) -> Plan:
    """The times of a range by the terms under which it was recorded: those of today may name other ones."""
    if held.terms is None:  # recorded before ranges kept their terms
        return expected.plan_of(job)
    return occurrences.plan(**{**held.terms, "anchor": datetime.fromisoformat(held.terms["anchor"])})


def take_first(job: Job, held: Slot, *, reason: str = "caught_up") -> bool:
    """Give the first occurrence of a range a slot of its own that is due. False when that was the last."""
    following = _second(job, held)
    if following is None:
        slots.settle(held, state=SlotState.DUE, reason_code=reason, count=1, until=None)
        return False
    first = Occurrence(at=held.scheduled_for, local=held.local, shifted=held.shifted)
    left, window = held.count - 1, held.window_start
    until = held.until if left > 1 else None
    slots.settle(held, scheduled_for=following.at, local=following.local, shifted=following.shifted, count=left,
                 until=until, window_start=first.at)  # fmt: skip
    slots.insert(job, first, window_start=window, state=SlotState.DUE, reason_code=reason,
                 answered_by=held.answered_by)  # fmt: skip
    return True


def _second(job: Job, held: Slot) -> Occurrence | None:
    """The next occurrence of a range without a slot of its own; never one behind its end."""
    if held.count <= 1 or held.until is None:
        return None
    return _after(job, _plan_of_range(job, held), held.scheduled_for, held.until)


def _after(job: Job, plan: Plan, moment: datetime, end: datetime) -> Occurrence | None:
    """The first occurrence after a moment without a slot of its own, up to `end`."""
    found = plan.after(moment)
    while found is not None and found.at <= end:
        if not slots.has_slot(job, found):
            return found
        found = plan.after(found.at)
    return None


def take_latest(job: Job, held: Slot, *, reason: str, answered_by: str = "") -> Slot:
    """Give the last occurrence of a range (or the row itself) a slot of its own that is due."""
    if held.count == 1 or held.until is None:
        slots.settle(held, state=SlotState.DUE, reason_code=reason, behind=None, answered_by=answered_by)
        return held
    plan = _plan_of_range(job, held)
    latest, before = expected.at(plan, held.until), max(expected.before(plan, held.until), held.scheduled_for)
    slots.settle(held, count=held.count - 1, until=before if held.count > 2 else None)
    slot = slots.insert(job, latest, window_start=before, state=SlotState.DUE, reason_code=reason,
                        answered_by=answered_by)  # fmt: skip
    return slot or Slot.objects.get(job=job, scheduled_for=latest.at)


def take_one(job: Job, held: Slot, at: datetime, *, reason: str) -> Slot | None:
    """Give one occurrence of a range a slot of its own that is due; what lies behind it becomes a range of its own.

    None where `at` is no occurrence of the range, or has its slot already. Raises NotASchedule.
    """
    if held.until is None or held.count == 1:
        return take_latest(job, held, reason=reason) if at == held.scheduled_for else None
    if at == held.scheduled_for:
        return _take_front(job, held, reason=reason)
    plan = _plan_of_range(job, held)
    chosen = plan.latest(at) if held.scheduled_for < at <= held.until else None
    if chosen is None or chosen.at != at or slots.has_slot(job, chosen):
        return None
    behind, end = _after(job, plan, at, held.until), held.until
    follow = plan.count(behind.at, end) - _known(job, behind.at, end) if behind else 0
    before, left = max(expected.before(plan, at), held.scheduled_for), max(held.count - 1 - follow, 1)
    slots.settle(held, count=left, until=before if left > 1 else None)
    slot = slots.insert(job, chosen, window_start=before, state=SlotState.DUE, reason_code=reason)
    if behind is not None:
        of_range: Json = {"until": end, "terms": held.terms} if follow > 1 else {}
        slots.insert(job, behind, on_record=True, window_start=at, state=held.state, reason_code=held.reason_code,
                     count=follow, **of_range)  # fmt: skip
    return slot


def _take_front(job: Job, held: Slot, *, reason: str) -> Slot:
    at = held.scheduled_for
    if not take_first(job, held, reason=reason):
        return held
    return Slot.objects.get(job=job, scheduled_for=at)


def settle_asked(job: Job, asked: Slot, *, run_all: bool, actor: Actor, reason: str) -> None:
    """Write down a person's answer about missed starts."""
    if run_all:
        slots.settle(asked, state=SlotState.CATCHING_UP, reason_code="answered_run_all", answered_by=actor.id)
    else:
        slots.settle(asked, state=SlotState.MISSED, reason_code="answered_skip")
    slots.record(job, asked, actor=actor, reason=reason)
