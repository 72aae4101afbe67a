"""When a job is expected to run: read from its terms, and from what other zone data promised."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from . import occurrences
from .models import Job
from .occurrences import Occurrence, Plan

SECOND = timedelta(seconds=1)


def plan_of(job: Job) -> Plan:
    """The times of a job. Raises NotASchedule where its zone is not in the zone data here."""
    return occurrences.plan(kind=job.kind, expression=job.expression, zone=job.zone, anchor=job.anchor)


def times_of(job: Job) -> Plan:
    """The same from its next occurrence on, which stands as it was named, whatever the zone data here make of it."""
    plan = plan_of(job)
    assert job.next_at is not None
    found = plan.latest(job.next_at)
    if found is not None and found.at == job.next_at:
        return plan
    return Promised(plan=plan, first=promised(job, job.next_at))


def promised(job: Job, next_at: datetime) -> Occurrence:
    """The next occurrence as it was named."""
    return Occurrence(at=next_at, local=job.next_local or next_at.astimezone(UTC).isoformat())


@dataclass(frozen=True, kw_only=True)
class Promised:
    """Times of which the first was named by other zone data than those of `plan`.

    It is one occurrence with whatever `plan` calls by the same local time. Otherwise a beat with older data would run
    that local time once more, at its own instant of it.
    """

    plan: Plan
    first: Occurrence

    def after(self, moment: datetime) -> Occurrence | None:
        """The first occurrence after `moment`, which is not before the first."""
        found = self.plan.after(moment)
        return self.plan.after(found.at) if found is not None and found.local == self.first.local else found

    def latest(self, moment: datetime) -> Occurrence | None:
        """The last occurrence at or before `moment`."""
        found = self.plan.latest(moment)
        if moment < self.first.at:
            return found
        return self.first if found is None or found.at < self.first.at or found.local == self.first.local else found

    def count(self, first: datetime, last: datetime) -> int:
        """How many occurrences lie from `first` to `last`, both included."""
        twin = self.plan.after(self.first.at)
        twice = twin is not None and twin.local == self.first.local and first <= twin.at <= last
        return self.plan.count(first, last) + (first <= self.first.at <= last) - twice

    def lost(self, first: datetime, last: datetime) -> list[occurrences.Lost]:
        """Local times between two occurrences that do not exist."""
        return self.plan.lost(first, last)


def at(plan: Plan, moment: datetime) -> Occurrence:
    """The occurrence of a moment that is one."""
    found = plan.latest(moment)
    if found is None or found.at != moment:  # the zone data changed under it: the time itself was promised
        return Occurrence(at=moment, local=moment.astimezone(UTC).isoformat())
    return found


def before(plan: Plan, moment: datetime) -> datetime:
    """The occurrence before a moment; the moment itself where there is none."""
    earlier = plan.latest(moment - SECOND)
    return earlier.at if earlier else moment


EXPECTED = ("next_at", "next_local", "decided_until", "zone_data")  # what expect() sets


def expect(job: Job, following: Occurrence | None, decided: datetime | None) -> None:
    """What comes next, by the zone data here; a process with newer data works it out anew."""
    job.next_at, job.next_local = (following.at, following.local) if following else (None, "")
    job.decided_until, job.zone_data = decided, min(job.zone_data, occurrences.ZONE_DATA)


def expect_from(job: Job, now: datetime) -> None:
    """For new terms. Never in the past: what was not expected before is not missed now."""
    job.zone_data = occurrences.ZONE_DATA
    expect(job, plan_of(job).after(now), now)
