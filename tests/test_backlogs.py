"""Missed starts that wait: what an edit, a switch, a missing handler and a person's answer make of them, row by row."""

from datetime import timedelta
from uuid import uuid4

import pytest

from reconciliation import jobs
from reconciliation.models import Job, Run, Slot
from tests import timetable
from tests.test_schedules import office, utc  # noqa: F401
from tests.timetable import OLGA, edit, job, slots, tick, told, work


def switch(job, *, on):
    fresh = Job.objects.get(pk=job.pk)
    return jobs.switch(fresh, on=on, version=fresh.version, token=uuid4(), actor=OLGA, reason="repair")


def answer(job, run, *, actor=OLGA):
    fresh, asked = Job.objects.get(pk=job.pk), Slot.objects.get(job=job, state="asked")
    return jobs.answer_missed(
        fresh, slot=asked.pk, run=run, version=fresh.version, token=uuid4(), actor=actor, reason="as agreed"
    )


def hourly(clock, **terms):
    """A job of each full hour, made at 00:30."""
    return job(at=utc("2026-06-10T00:30"), clock=clock, **{"expression": "0 * * * *", **terms})


def after_a_night(clock, **terms):
    """Of 01:00 to 08:00, all to be run in order, the first goes on; the others wait behind it."""
    made = hourly(clock, missed="run_all", **terms)
    clock.set(utc("2026-06-10T08:30"))
    tick()
    timetable.hold(Run.objects.get())
    tick()
    assert told(made) == [("06-10 01:00", "started", "late", 1)]
    return made


# Edits and switches


def test_an_edit_of_something_else_leaves_the_missed_starts_waiting_for_their_turn(office, clock):  # noqa: F811
    made = after_a_night(clock)
    assert edit(made, max_run_time=timedelta(hours=3)).verdict == "done"
    timetable.end(Run.objects.get())
    for _ in range(8):
        tick()
        work()
    assert [slot.state for slot in slots(made)] == ["started"] * 8
    assert len(office.effects) == 8


@pytest.mark.parametrize("terms", [{"expression": "30 * * * *"}, {"zone": "Asia/Tokyo"}])
def test_an_edit_of_the_times_puts_the_missed_starts_that_waited_on_record(office, clock, terms):  # noqa: F811
    made = after_a_night(clock)
    assert edit(made, **terms).verdict == "done"
    assert told(made) == [("06-10 01:00", "started", "late", 1), ("06-10 02:00", "missed", "terms_changed", 7)]
    assert slots(made)[-1].until == utc("2026-06-10T08:00")
    assert slots(made)[-1] in jobs.fillable(made)
    assert Job.objects.get().next_at > clock.now()


def test_switching_off_puts_the_missed_starts_that_waited_on_record(office, clock):  # noqa: F811
    made = after_a_night(clock)
    assert switch(made, on=False).verdict == "done"
    assert told(made)[1:] == [("06-10 02:00", "missed", "job_disabled", 7)]
    assert slots(made)[-1] in jobs.fillable(made)
    assert Job.objects.get().next_at is None


@pytest.mark.parametrize("overlap", ["skip", "allow"])
def test_a_catch_up_that_has_begun_is_stopped_by_switching_off(office, clock, overlap):  # noqa: F811
    made = hourly(clock, missed="ask", overlap=overlap)
    clock.set(utc("2026-06-10T20:30"))
    tick()
    answer(made, "all")
    tick()
    begun = Run.objects.count()
    assert switch(made, on=False).verdict == "done"
    for _ in range(3):
        tick()
        work()
    assert Run.objects.count() == begun < 20
    stopped = slots(made, reason_code="job_disabled")
    assert {slot.state for slot in stopped} == {"missed"}
    assert sum(slot.count for slot in slots(made)) == 20
    assert set(stopped) <= set(jobs.fillable(made))


def test_a_start_that_waits_for_another_run_is_not_made_once_its_job_is_off(office, clock):  # noqa: F811
    made = hourly(clock, overlap="queue_one")
    clock.set(utc("2026-06-10T01:00:01"))
    tick()
    run = timetable.hold(Run.objects.get())
    clock.set(utc("2026-06-10T02:00:01"))
    tick()
    assert slots(made)[-1].state == "queued"
    switch(made, on=False)
    timetable.end(run)
    tick()
    assert told(made)[-1] == ("06-10 02:00", "missed", "job_disabled", 1)


def test_a_job_that_is_off_runs_no_range_whole(office, clock):  # noqa: F811
    made = hourly(clock, missed="ask")
    clock.set(utc("2026-06-10T05:30"))
    tick()
    switch(made, on=False)
    refused = answer(made, "all")
    assert refused.verdict == "refused"
    assert "Switch it on" in refused.message
    assert answer(made, "latest").verdict == "done"
    tick()
    assert told(made)[-1] == ("06-10 05:00", "started", "filled_by_hand", 1)
