"""What a beat owes every schedule: its turn, bounded work, a mark only once, windows without gap or overlap."""

import json
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import transaction

from audit.models import Entry
from reconciliation import backlog, jobs, runs, schedules
from reconciliation.models import Job, Run
from reconciliation.states import RunState
from tests import timetable
from tests.test_schedules import going_on, office, press, utc  # noqa: F401
from tests.timetable import OLGA, edit, job, slots, tick, told, work

# Its turn


def stuck(clock, number):
    """Jobs that are due, cannot move, and were due before all others."""
    for name in range(number):
        job(f"stuck-{name}", at=utc("2026-06-10T00:30"), clock=clock)
    Job.objects.update(workflow="gone")


@pytest.mark.parametrize(("time_left", "ticks"), [(True, 1), (False, 3)])
def test_many_jobs_that_cannot_move_keep_no_other_from_its_turn(office, clock, monkeypatch, time_left, ticks):  # noqa: F811
    stuck(clock, 10)
    healthy = job("healthy", at=utc("2026-06-10T02:30"), clock=clock, expression="0 * * * *")
    clock.set(utc("2026-06-10T03:00:01"))
    if not time_left:
        monkeypatch.setattr(schedules, "LOOK_FOR", 0.0)
    for _ in range(ticks):
        schedules.tick(limit=4)
    assert told(healthy) == [("06-10 03:00", "started", "on_time", 1)]


def test_a_long_grace_is_worked_through_a_few_starts_at_a_time(office, clock, settings):  # noqa: F811
    settings.AFTERCALL_SCHEDULE_GRACE = 86_400
    often = job(at=utc("2026-06-10T00:00"), clock=clock, kind="interval", expression="10 s", overlap="allow")
    clock.set(utc("2026-06-10T00:05"))
    tick()
    assert len(slots(often)) == schedules.AT_ONCE
    for _ in range(2):
        tick()
    assert {slot.state for slot in slots(often)} == {"started"}
    assert len(slots(often)) == 30


# The longest run


def too_long(clock):
    """A run beyond the longest run of its job, marked, and resumed by a person."""
    minutely, run = going_on(clock, max_run_time=timedelta(minutes=10), overlap="skip")
    clock.advance(minutes=11)
    tick()
    run.refresh_from_db()
    assert run.escalation_reason == "max_run_time"
    runs.resume(run.pk, actor=OLGA, version=run.version, reason="it is nearly done")
    return minutely, run


def test_a_run_that_a_person_lets_go_on_is_not_marked_for_its_length_again(office, clock):  # noqa: F811
    _, run = too_long(clock)
    for _ in range(2):
        tick()
        clock.advance(minutes=30)
    run.refresh_from_db()
    assert (run.escalated_at, run.state) == (None, "pending")
    work()
    run.refresh_from_db()
    assert run.state == RunState.SUCCEEDED


def test_a_cancelled_run_that_is_being_undone_counts_as_one_that_goes_on(office, clock):  # noqa: F811
    minutely, run = going_on(clock, max_run_time=timedelta(minutes=10), overlap="skip")
    run = runs.cancel(run.pk, actor=OLGA, version=run.version, reason="wrong day")
    clock.advance(minutes=60)
    tick()
    assert slots(minutely, open=True) != slots(minutely, run=run)
    for other in Run.objects.exclude(pk=run.pk):
        timetable.end(other)
    run = runs.compensate(run.pk, actor=OLGA, version=run.version, reason="undo it")
    timetable.hold(run)
    clock.advance(minutes=1)
    tick()
    assert (slots(minutely)[-1].state, slots(minutely)[-1].behind) == ("skipped_overlap", run)
    run.refresh_from_db()
    assert run.escalated_at is None, "its length is counted from the undo"
    clock.advance(minutes=11)
    tick()
    run.refresh_from_db()
    assert run.escalation_reason == "max_run_time"


# A zone that is not known here


def test_one_job_of_an_unknown_zone_does_not_keep_the_others_from_being_passed_over(office, clock):  # noqa: F811
    lost, other = (job(name, at=utc("2026-06-10T00:30"), clock=clock, expression="0 * * * *") for name in ("a", "b"))
    Job.objects.filter(pk=lost.pk).update(zone="Mars/Base")
    clock.set(utc("2026-06-10T03:30"))
    with transaction.atomic():
        backlog.pass_all_over(reason="restored")
    assert told(lost) == [("06-10 01:00", "missed", "restored", 1)]
    assert told(other) == [("06-10 01:00", "missed", "restored", 3)]
    assert Job.objects.get(pk=lost.pk).problem == "zone_unknown"
    Job.objects.filter(pk=lost.pk).update(zone="UTC")  # the zone data are newer now
    tick()
    assert not Run.objects.exists(), "nothing of the lost time is run"
    clock.set(utc("2026-06-10T04:00:01"))
    tick()
    assert told(lost)[1:] == [("06-10 04:00", "started", "on_time", 1)]


def test_a_job_of_an_unknown_zone_can_be_switched_off_and_mended(office, clock):  # noqa: F811
    lost = job(at=utc("2026-06-10T00:30"), clock=clock, expression="0 * * * *")
    Job.objects.update(zone="Mars/Base")
    clock.set(utc("2026-06-10T03:30"))
    tick()
    assert edit(lost, zone="UTC").verdict == "done"
    assert told(lost) == [("06-10 01:00", "missed", "terms_changed", 1)]
    Job.objects.update(zone="Mars/Base", next_at=utc("2026-06-10T04:00"))
    clock.set(utc("2026-06-10T04:30"))
    done = jobs.switch(Job.objects.get(), on=False, version=2, token=uuid4(), actor=OLGA, reason="broken")
    assert done.verdict == "done"
    assert told(lost)[1:] == [("06-10 04:00", "missed", "job_disabled", 1)]


# What an edit leaves behind


def test_an_edit_of_the_input_alone_can_be_told_from_none(office, clock):  # noqa: F811
    daily = job(at=utc("2026-06-10T18:00"), clock=clock, input={"order": "1002", "card": "4242"})
    edit(daily, input={"order": "1002", "card": "4243"})
    edit(daily, overlap="allow")
    changed, kept = Entry.objects.filter(subject=daily.subject, reason_code="job_edited").order_by("seq")
    bodies = [json.loads(bytes(entry.canonical))["body"]["details"] for entry in (changed, kept)]
    assert [body["before"]["input"] != body["after"]["input"] for body in bodies] == [True, False]
    assert "4243" not in bytes(changed.canonical).decode()
    assert bodies[0]["after"]["anchor"] == "2026-06-10T18:00:00+00:00"


@pytest.mark.parametrize(
    ("edited", "begins"),
    [
        ({"expression": "30 * * * *"}, "10:00"),
        ({"expression": "*/15 * * * *"}, "10:00"),
        ({"expression": "0 12 * * *"}, "10:00"),
        ({"kind": "interval", "expression": "90 s"}, "10:00"),
    ],
)
def test_the_first_window_after_an_edit_begins_where_the_last_one_ended(office, clock, edited, begins):  # noqa: F811
    hourly = job(at=utc("2026-06-10T09:30"), clock=clock, expression="0 * * * *")
    clock.set(utc("2026-06-10T10:00:01"))
    tick()
    work()
    clock.set(utc("2026-06-10T10:10"))
    edit(hourly, **edited)
    clock.set(Job.objects.get().next_at + timedelta(seconds=1))
    tick()
    first, second = slots(hourly)
    assert (f"{first.window_start:%H:%M}", f"{first.scheduled_for:%H:%M}") == ("09:00", "10:00")
    assert f"{second.window_start:%H:%M}" == begins
    assert second.run.input["window_start"] == f"2026-06-10T{begins}:00+00:00"


def test_the_window_behind_a_range_begins_at_its_end(office, clock):  # noqa: F811
    hourly = job(at=utc("2026-06-10T09:30"), clock=clock, expression="0 * * * *", missed="skip")
    clock.set(utc("2026-06-10T12:30"))
    tick()
    assert press(hourly, None).verdict == "done"
    assert slots(hourly, manual=True)[0].run.input["window_start"] == "2026-06-10T12:00:00+00:00"
