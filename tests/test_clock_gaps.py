"""Local times that the clock skips when it is put forward: each is on record, however the schedule comes by it."""

from datetime import UTC, datetime
from uuid import uuid4

import pytest

from reconciliation import jobs, occurrences, registry
from reconciliation.models import Job
from tests import timetable
from tests.timetable import OLGA, edit, slots, tick, told


def utc(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.fixture(autouse=True)
def office(clerk, settings):
    settings.AFTERCALL_WORKFLOWS = ["tests.timetable.WORKFLOWS"]
    registry.forget()
    yield clerk
    registry.forget()


EVEN = {"expression": "0 */2 * * *", "zone": "America/New_York"}
GAP = ("03-08 06:59", "skipped_gap", "gap_of_clock_change", 1)


def job(clock, at, **terms):
    return timetable.job(at=utc(at), clock=clock, **terms)


def switch(job, *, on):
    fresh = Job.objects.get(pk=job.pk)
    return jobs.switch(fresh, on=on, version=fresh.version, token=uuid4(), actor=OLGA, reason="as agreed")


def test_a_sunday_job_that_loses_its_whole_hour_says_so_a_week_before_its_next_run(clock):
    sundays = job(clock, "2026-03-01T06:50", expression="*/15 2 * * 0", zone="America/New_York", overlap="allow")
    clock.set(utc("2026-03-01T07:45:01"))
    tick()
    assert told(sundays)[-1] == ("03-08 06:59", "skipped_gap", "gap_of_clock_change", 4)
    assert Job.objects.get().next_at == utc("2026-03-15T06:00")


@pytest.mark.parametrize("missed", ["skip", "ask", "latest_only", "run_all"])
def test_a_gap_within_a_range_of_missed_starts_has_its_row(clock, missed):
    even = job(clock, "2026-03-07T05:30", missed=missed, overlap="allow", **EVEN)
    clock.set(utc("2026-03-09T05:00"))
    for _ in range(5):
        tick()
    assert GAP in told(even)


@pytest.mark.parametrize("way", ["create", "edit", "switch on", "new zone data"])
def test_a_next_run_that_is_named_beyond_a_gap_leaves_a_row_for_it(clock, way, monkeypatch):
    even = job(clock, "2026-03-08T05:30", **(EVEN if way == "create" else {"expression": "0 5 * * *"}))
    if way == "edit":
        edit(even, **EVEN)
    if way == "switch on":
        switch(even, on=False)
        edit(even, **EVEN)
        switch(even, on=True)
    if way == "new zone data":
        Job.objects.update(**EVEN)
        monkeypatch.setattr(occurrences, "ZONE_DATA", "2099z")
        tick()
    assert told(even) == [GAP]


def test_a_gap_that_was_told_ahead_keeps_no_run_of_other_terms_from_its_start(clock):
    nightly = job(clock, "2026-03-08T05:30", **EVEN)
    edit(nightly, expression="0 2 * * *")
    clock.set(utc("2026-03-08T07:00:01"))
    tick()
    assert told(nightly) == [GAP, ("03-08 07:00", "started", "on_time", 1)]


def test_a_planned_time_that_meets_a_later_one_at_the_end_of_the_gap_says_so(clock):
    twice = job(clock, "2026-03-08T05:30", expression="0 2,3 * * *", zone="America/New_York")
    clock.set(utc("2026-03-08T07:00:01"))
    tick()
    (slot,) = slots(twice)
    assert (slot.shifted, slot.local) == (True, "2026-03-08T02:00 America/New_York")
