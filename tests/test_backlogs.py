"""Missed starts that wait: what an edit, a switch, a missing handler and a person's answer make of them, row by row."""

import time
from datetime import timedelta
from itertools import pairwise
from uuid import uuid4

import pytest

from audit.models import Entry
from reconciliation import jobs, registry, schedules
from reconciliation.models import Job, Run, Slot
from tests import timetable
from tests.test_schedules import office, utc  # noqa: F401
from tests.timetable import OLGA, edit, job, slots, tick, told, work

ANN = timetable.Actor(id="person:2", kind="person", name="Ann Other", permissions=OLGA.permissions)


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


def without_handlers(settings):
    settings.AFTERCALL_WORKFLOWS = []
    registry.forget()


def with_handlers(settings):
    settings.AFTERCALL_WORKFLOWS = ["tests.timetable.WORKFLOWS"]
    registry.forget()


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


# A range is read by the terms under which it was recorded


def test_a_range_is_run_by_the_times_under_which_it_was_missed(office, clock):  # noqa: F811
    made = hourly(clock, missed="ask")
    clock.set(utc("2026-06-10T03:30"))
    tick()
    edit(made, expression="0 0 * * *", zone="Asia/Tokyo")
    answer(made, "all")
    for _ in range(5):
        tick()
        work()
    assert told(made) == [(f"06-10 0{hour}:00", "started", "caught_up", 1) for hour in (1, 2, 3)]
    windows = [slot.run.input["window_start"][11:16] for slot in slots(made)]
    assert windows == ["00:00", "01:00", "02:00"]


def test_the_latest_of_a_range_is_the_latest_of_the_times_under_which_it_was_missed(office, clock):  # noqa: F811
    made = hourly(clock, missed="ask")
    clock.set(utc("2026-06-10T03:30"))
    tick()
    edit(made, kind="interval", expression="7 h")
    answer(made, "latest")
    tick()
    assert told(made) == [
        ("06-10 01:00", "missed", "answered_skip", 2),
        ("06-10 03:00", "started", "filled_by_hand", 1),
    ]
    assert slots(made)[0].until == utc("2026-06-10T02:00")
    assert slots(made)[1].run.input["window_start"] == "2026-06-10T02:00:00+00:00"


def test_a_range_ends_with_its_last_time_whatever_its_number_says(office, clock):  # noqa: F811
    made = hourly(clock, missed="ask", overlap="allow")
    clock.set(utc("2026-06-10T03:30"))
    tick()
    Slot.objects.update(count=9)
    answer(made, "all")
    tick()
    tick()
    assert [f"{slot.scheduled_for:%H:%M}" for slot in slots(made, state="started")] == ["01:00", "02:00", "03:00"]
    assert len(slots(made)) == 3


# One of a range


def fill(job, at, *, slot=None):
    fresh = Job.objects.get(pk=job.pk)
    slot = slot or slots(job)[0].pk
    given = {"version": fresh.version, "token": uuid4(), "actor": OLGA, "reason": "asked for"}
    return jobs.run_now(fresh, fill=slot, at=at, **given)


def windows(job):
    """[(first, last, number)] of what is told of each time, and the windows follow each other."""
    rows = slots(job)
    for earlier, later in pairwise(rows):
        assert later.window_start == (earlier.until or earlier.scheduled_for)
    return [(f"{s.scheduled_for:%H:%M}", f"{s.until or s.scheduled_for:%H:%M}", s.count) for s in rows]


@pytest.mark.parametrize("missed", ["skip", "ask"])
def test_any_of_a_range_is_run_by_hand_when_its_time_is_named(office, clock, missed):  # noqa: F811
    made = hourly(clock, missed=missed)
    clock.set(utc("2026-06-10T07:30"))
    tick()
    assert windows(made) == [("01:00", "07:00", 7)]
    assert fill(made, "2026-06-10T04:00").verdict == "done"
    assert windows(made) == [("01:00", "03:00", 3), ("04:00", "04:00", 1), ("05:00", "07:00", 3)]
    assert fill(made, "2026-06-10T01:00:00").verdict == "done"
    assert fill(made, "2026-06-10T07:00", slot=slots(made)[-1].pk).verdict == "done"
    assert windows(made) == [
        ("01:00", "01:00", 1), ("02:00", "03:00", 2), ("04:00", "04:00", 1), ("05:00", "06:00", 2),
        ("07:00", "07:00", 1),
    ]  # fmt: skip
    assert fill(made, "2026-06-10T03:00", slot=slots(made)[1].pk).verdict == "done"
    assert fill(made, "2026-06-10T02:00", slot=slots(made)[1].pk).verdict == "done"
    assert [slot.run.workflow_id[-14:-9] for slot in slots(made, state="started")] == [
        "01:00", "02:00", "03:00", "04:00", "07:00",
    ]  # fmt: skip
    assert {slot.state for slot in slots(made)} == {"started", "asked" if missed == "ask" else "missed"}


@pytest.mark.parametrize(
    ("at", "says"),
    [
        ("2026-06-10T04:30", "No start that was missed in this row has that time"),
        ("2026-06-10T00:00", "No start that was missed in this row has that time"),
        ("2026-06-10T08:00", "No start that was missed in this row has that time"),
        ("tomorrow", "A time looks like 2026-06-10T08:30."),
        ("9999-12-31T23:59", "No start that was missed in this row has that time"),
        ("0001-01-01T00:00", "No start that was missed in this row has that time"),
    ],
)
def test_a_time_that_is_none_of_a_range_starts_nothing(office, clock, at, says):  # noqa: F811
    made = hourly(clock, missed="skip")
    clock.set(utc("2026-06-10T07:30"))
    tick()
    answer = fill(made, at)
    assert (answer.verdict, says in answer.message) == ("refused", True)
    assert (windows(made), Run.objects.exists()) == ([("01:00", "07:00", 7)], False)
    assert fill(made, "2026-06-10T04:00", slot="next").verdict == "refused"


def test_a_time_that_has_its_run_is_not_run_out_of_its_range_again(office, clock):  # noqa: F811
    made = hourly(clock, missed="skip")
    clock.set(utc("2026-06-10T07:30"))
    tick()
    fill(made, "2026-06-10T04:00")
    assert fill(made, "2026-06-10T04:00", slot=slots(made)[-1].pk).verdict == "refused"
    assert Run.objects.count() == 1


def test_a_time_is_named_by_the_clock_of_the_zone_and_twice_where_that_is_put_back(office, clock):  # noqa: F811
    made = job(at=utc("2026-10-24T22:30"), clock=clock, expression="0 * * * *", zone="Europe/Berlin", missed="skip")
    clock.set(utc("2026-10-25T05:30"))
    tick()
    assert fill(made, "2026-10-25T02:00").verdict == "done"
    assert fill(made, "2026-10-25T02:00", slot=slots(made)[-1].pk).verdict == "done"
    assert [slot.scheduled_for for slot in slots(made, state="started")] == [
        utc("2026-10-25T00:00"), utc("2026-10-25T01:00"),
    ]  # fmt: skip


def test_four_hundred_days_are_one_row_also_when_one_of_them_is_run(office, clock):  # noqa: F811
    made = hourly(clock, missed="skip", expression="* * * * *")
    clock.advance(days=400)
    tick()
    begun = time.monotonic()
    assert fill(made, (utc("2026-06-10T00:00") + timedelta(days=395)).isoformat()[:16]).verdict == "done"
    assert time.monotonic() - begun < 5
    assert (len(slots(made)), sum(slot.count for slot in slots(made))) == (
        4,
        400 * 24 * 60,
    )  # and the minute that is now


# No handler


def test_while_there_is_no_handler_nothing_is_decided_and_then_the_missed_policy_decides(office, clock, settings):  # noqa: F811
    made = job(at=utc("2026-06-10T08:00:30"), clock=clock, workflow="telegram", overlap="allow")
    without_handlers(settings)
    for minutes in (1, 120, 300):
        clock.set(utc("2026-06-10T08:00:30") + timedelta(minutes=minutes))
        tick()
    assert slots(made) == []
    assert Job.objects.get().problem == "no_handler"
    with_handlers(settings)
    for _ in range(3):
        tick()
        work()
    assert told(made) == [
        ("06-10 08:01", "missed", "missed_superseded", 299),
        ("06-10 13:00", "started", "late", 1),
    ]
    assert len(office.effects) == 1
    assert Job.objects.get().problem == ""


def test_without_a_handler_no_start_is_skipped_for_a_run_that_is_not_there(office, clock, settings):  # noqa: F811
    made = hourly(clock, overlap="skip")
    without_handlers(settings)
    for hour in ("01", "02", "03"):
        clock.set(utc(f"2026-06-10T{hour}:00:01"))
        tick()
    assert slots(made, state="skipped_overlap") == []


def test_a_job_without_a_handler_can_be_edited_and_switched_off(office, clock, settings):  # noqa: F811
    settings.AFTERCALL_WORKFLOWS = ["tests.timetable.WORKFLOWS"]
    made, other = hourly(clock), hourly(clock, name="other", workflow="sweep")
    settings.AFTERCALL_WORKFLOWS = ["tests.timetable.KEYED"]
    registry.forget()
    clock.set(utc("2026-06-10T03:30"))
    tick()
    assert Job.objects.get(pk=other.pk).problem == "no_handler"
    assert edit(other, workflow="mailing").verdict == "done"
    tick()
    assert told(other) == [("06-10 01:00", "missed", "missed_superseded", 2), ("06-10 03:00", "started", "late", 1)]
    without_handlers(settings)
    clock.set(utc("2026-06-10T04:30"))
    assert switch(made, on=False).verdict == "done"
    assert told(made)[-1] == ("06-10 04:00", "missed", "job_disabled", 1)


@pytest.mark.parametrize("state", ["due", "queued"])
def test_what_waits_longer_than_the_job_catches_up_on_is_not_run(office, clock, state):  # noqa: F811
    made = hourly(clock, overlap="queue_one", max_catch_up=timedelta(hours=2))
    clock.set(utc("2026-06-10T01:00:01"))
    tick()
    timetable.hold(Run.objects.get())
    clock.set(utc("2026-06-10T02:00:01"))
    tick()
    Slot.objects.filter(state="queued").update(state=state)
    clock.set(utc("2026-06-10T04:00:02"))
    tick()
    assert told(made)[1] == ("06-10 02:00", "too_old", "too_old_to_catch_up", 1)


# Two people, and who asked


def asking_telegrams(clock):
    made = hourly(clock, missed="ask", workflow="telegram")
    clock.set(utc("2026-06-10T03:30"))
    tick()
    return made


def test_one_person_does_not_have_every_missed_start_of_an_action_without_a_key_run(office, clock):  # noqa: F811
    made = asking_telegrams(clock)
    refused = answer(made, "all")
    assert refused.verdict == "refused"
    assert "act has no key" in refused.message
    assert "two people" in refused.message
    assert [slot.state for slot in slots(made)] == ["asked"]
    Job.objects.update(missed="run_all", repeats_accepted=True)  # as two people accepted it
    assert answer(made, "all").verdict == "done"


def test_what_is_accepted_where_nothing_needs_it_is_not_kept_for_later(office, clock):  # noqa: F811
    made = hourly(clock, missed="run_all", repeats_accepted=True)
    assert not Job.objects.get().repeats_accepted
    edit(made, repeats_accepted=True)
    assert not Job.objects.get().repeats_accepted
    Job.objects.update(workflow="telegram")  # as if the workflow got a step without a key
    clock.set(utc("2026-06-10T03:30"))
    tick()
    assert told(made)[0] == ("06-10 01:00", "missed", "missed_superseded", 2)


def test_what_is_accepted_beside_another_policy_is_not_kept_either(office, clock):  # noqa: F811
    made = asking_telegrams(clock)
    edit(made, repeats_accepted=True)
    assert not Job.objects.get().repeats_accepted
    assert answer(made, "all").verdict == "refused"


@pytest.mark.parametrize("run", ["latest", "all"])
def test_who_has_missed_starts_run_asked_for_those_runs(office, clock, run):  # noqa: F811
    made = hourly(clock, missed="ask", overlap="allow")
    clock.set(utc("2026-06-10T03:30"))
    tick()
    answer(made, run, actor=ANN)
    tick()
    tick()
    asked_by = set(Run.objects.values_list("requested_by", "on_behalf_of"))
    assert asked_by == {("person:2", "person:1")}
    assert Run.objects.count() == (1 if run == "latest" else 3)
    clock.set(utc("2026-06-10T04:00:01"))
    tick()
    assert Run.objects.latest("pk").requested_by == schedules.BEAT.id


@pytest.mark.parametrize("hour", [1, 3])
def test_the_reason_of_an_answer_is_in_the_audit_log(office, clock, hour):  # noqa: F811
    made = hourly(clock, missed="ask")
    clock.set(utc(f"2026-06-10T0{hour}:30"))
    tick()
    answer(made, "latest", actor=ANN)
    entries = Entry.objects.filter(subject=made.subject, event="slot", actor="person:2").prefetch_related("openings")
    assert len(entries) == (1 if hour == 1 else 2)
    assert {entry.openings.get(field="reason").value for entry in entries} == {"as agreed"}
