"""Slots, row by row: one for each expected run, once, with the end of the window before it and a word in the audit log.

For the modules of schedules alone (schedules.py, backlog.py), which decide what becomes of a slot.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Q

from audit import log as audit

from . import expected, occurrences, transition
from .actors import Actor
from .models import Job, Slot
from .occurrences import Occurrence, Plan, SlotState

BEAT = Actor(id="system:schedule", kind="system")


def insert(job: Job, occurrence: Occurrence, *, on_record: bool = False, **columns: Any) -> Slot | None:
    """One row, once; what is not to be started is a decision and goes into the audit log, if it is not `on_record`."""
    now = transition.database_now()
    row = Slot(job=job, scheduled_for=occurrence.at, local=occurrence.local, shifted=occurrence.shifted,
               created_at=now, updated_at=now, **columns)  # fmt: skip
    if not _inserted(row):
        if Slot.objects.filter(job=job, scheduled_for=occurrence.at).exists():
            return None
        # Other zone data puts the same local time to another instant; it has had its run.
        row = Slot(job=job, scheduled_for=occurrence.at, local=f"{occurrence.local} again", created_at=now,
                   updated_at=now, state=SlotState.SKIPPED_REPEAT, reason_code="local_time_ran_already",
                   window_start=columns["window_start"])  # fmt: skip
        if not _inserted(row):
            return None
    if row.state not in (SlotState.DUE, SlotState.QUEUED) and not on_record:
        record(job, row, actor=BEAT)
    return row


def _inserted(slot: Slot) -> bool:
    try:
        with transaction.atomic():
            slot.save(force_insert=True)
    except IntegrityError as error:
        if "slot_once" in str(error) or "slot_local_once" in str(error):
            return False
        raise
    return True


def has_slot(job: Job, occurrence: Occurrence) -> bool:
    """Whether something became of it already, under its instant or under its local time."""
    found = Slot.objects.filter(Q(scheduled_for=occurrence.at) | Q(local=occurrence.local), job=job)
    return found.exclude(state=SlotState.SKIPPED_GAP).exists()


def coming(job: Job, now: datetime, number: int) -> list[Occurrence]:
    """The next occurrences after `now`, without those that a person ran before their time. Raises NotASchedule."""
    if not job.enabled or job.next_at is None:
        return []
    plan = expected.times_of(job)
    following = occurrences.upcoming(plan, max(now, job.next_at), number)
    return without_slot(job, [expected.at(plan, job.next_at), *following] if job.next_at > now else following)[:number]


def without_slot(job: Job, found: list[Occurrence]) -> list[Occurrence]:
    """Those of which nothing became yet."""
    mine = Slot.objects.filter(job=job).exclude(state=SlotState.SKIPPED_GAP)
    instants, locals_ = [each.at for each in found], [each.local for each in found]
    known = mine.filter(Q(scheduled_for__in=instants) | Q(local__in=locals_)).values_list("scheduled_for", "local")
    taken = {value for row in known for value in row}
    return [each for each in found if each.at not in taken and each.local not in taken]


def window_start(job: Job, plan: Plan, moment: datetime) -> datetime:
    """The end of the window before, whatever the terms were then: no moment is in two windows or in none."""
    earlier = Slot.objects.filter(job=job, manual=False, scheduled_for__lt=moment)
    last = earlier.exclude(state__in=_NO_WINDOW).order_by("-scheduled_for").first()
    return min(last.until or last.scheduled_for, moment) if last else expected.before(plan, moment)


_NO_WINDOW = (SlotState.SKIPPED_GAP, SlotState.SKIPPED_REPEAT)


def forward(job: Job, plan: Plan, decided: datetime) -> None:
    """Go on behind what was decided, with a row for local times on the way that do not exist. To be saved."""
    following = plan.after(decided)
    expected.expect(job, following, decided)
    if following is not None:
        lost_to_gap(job, plan, decided, following.at)


def look_ahead(job: Job) -> None:
    """The same for a job whose next run was named anew: nothing may lie unsaid before it."""
    if job.enabled and job.next_at is not None and job.decided_until is not None:
        lost_to_gap(job, expected.plan_of(job), job.decided_until, job.next_at)


def lost_to_gap(job: Job, plan: Plan, first: datetime, last: datetime) -> None:
    """A row for each gap of the clock between two instants into which planned times fall; once.

    Its local time is no occurrence: other terms may have one there, which must not look as if it had run.
    """
    for lost in plan.lost(first, last):
        occurrence = Occurrence(at=lost.at, local=f"{lost.local} does not exist")
        insert(job, occurrence, window_start=first, state=SlotState.SKIPPED_GAP, reason_code="gap_of_clock_change",
               count=lost.count)  # fmt: skip


def save(job: Job, *columns: str) -> None:
    """Save what a beat changed of a locked job; no edit, and no version."""
    job.updated_at = transition.database_now()
    job.save(update_fields=[*columns, "updated_at"])


def settle(slot: Slot, **columns: Any) -> None:
    """Say what became of a slot; its job is locked."""
    for name, value in columns.items():
        setattr(slot, name, value)
    slot.updated_at = transition.database_now()
    slot.save(update_fields=[*columns, "updated_at"])


def record(job: Job, slot: Slot, *, actor: Actor, reason: str = "") -> None:
    """Put into the audit log what became of a slot."""
    fact = actor.fact(slot.reason_code, reason=reason, scheduled_for=text(slot.scheduled_for), state=str(slot.state),
                      count=slot.count, until=text(slot.until), behind=slot.behind_id)  # fmt: skip
    audit.append(subject=job.subject, tenant=job.tenant, event="slot", fact=fact)


def text(moment: datetime | None) -> str | None:
    """A moment as the audit log and the ids of runs write it."""
    return moment.astimezone(UTC).isoformat() if moment else None
