"""Jobs through deployments, nights without power, clock changes and many beats: each expected run once, or a reason."""

import threading
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import uuid4

import pytest
from cryptography.fernet import Fernet
from django.db import connections, transaction

from audit import verify
from audit.models import Entry
from reconciliation import job_wording, jobs, occurrences, registry, runs, schedules, tasks, transition
from reconciliation.keys import InvalidField
from reconciliation.models import Job, Run, Slot
from reconciliation.states import RunState
from tests import cast, timetable
from tests.timetable import OLGA, edit, job, slots, tick, told, work


def utc(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.fixture
def office(clerk, settings):
    """The scripted provider, and workflows that call it once."""
    settings.AFTERCALL_WORKFLOWS = ["tests.timetable.WORKFLOWS"]
    registry.forget()
    yield clerk
    registry.forget()


# A start on time


def test_a_job_runs_at_its_time_and_its_run_knows_which_time_it_stands_for(office, clock):
    daily = job(at=utc("2026-06-10T11:00"), clock=clock, expression="0 12 * * *", input={"order": "1002"})
    tick()
    assert slots(daily) == []
    clock.set(utc("2026-06-10T12:00:01"))
    tick()
    (slot,) = slots(daily)
    assert (slot.state, slot.reason_code) == ("started", "on_time")
    assert slot.run.workflow_id == "nightly@2026-06-10T12:00:00+00:00"
    assert slot.run.input == {
        "order": "1002",
        "scheduled_for": "2026-06-10T12:00:00+00:00",
        "window_start": "2026-06-09T12:00:00+00:00",
        "window_end": "2026-06-10T12:00:00+00:00",
    }
    assert slot.run.on_behalf_of == "person:1"
    work()
    tick()
    assert len(office.effects) == 1
    assert Job.objects.get().next_at == utc("2026-06-11T12:00")


def test_the_beat_does_it(office, clock):
    job(at=utc("2026-06-10T11:59:59"), clock=clock)
    clock.advance(2)
    tasks.beat_once()
    assert Run.objects.count() == 1


# Nights without power


OFF, BACK = utc("2026-06-10T08:29:30"), utc("2026-06-10T10:20:30")


@pytest.mark.case("E5")
def test_skip_records_111_missed_starts_in_one_row_and_goes_on(office, clock):
    minutely = job(at=OFF, clock=clock, missed="skip")
    clock.set(BACK)
    tick()
    assert told(minutely) == [("06-10 08:30", "missed", "missed_skipped", 111)]
    assert slots(minutely)[0].until == utc("2026-06-10T10:20")
    assert not Run.objects.exists()
    goes_on(minutely, clock)


@pytest.mark.case("E5")
def test_latest_only_makes_one_run_for_the_newest_missed_start(office, clock):
    minutely = job(at=OFF, clock=clock, missed="latest_only")
    clock.set(BACK)
    tick()
    assert told(minutely) == [
        ("06-10 08:30", "missed", "missed_superseded", 110),
        ("06-10 10:20", "started", "late", 1),
    ]
    work()
    goes_on(minutely, clock)


@pytest.mark.case("E5")
@pytest.mark.parametrize("overlap", ["allow", "skip"])
def test_run_all_makes_every_missed_run_in_order_and_a_few_at_a_time(office, clock, overlap):
    minutely = job(at=OFF, clock=clock, missed="run_all", overlap=overlap)
    clock.set(BACK)
    seen = [0]
    for _ in range(130):
        if Job.objects.get().next_at > BACK:
            break
        clock.set(BACK)  # it goes on by itself, and the next minute is not the test's
        tick()
        seen.append(Run.objects.count())
        work()
    at_once = {later - earlier for earlier, later in pairwise(seen)}
    assert max(at_once) == (schedules.AT_ONCE if overlap == "allow" else 1)
    started = list(Run.objects.order_by("pk").values_list("workflow_id", flat=True))
    assert started == [f"nightly@{OFF.replace(second=0) + timedelta(minutes=n):%Y-%m-%dT%H:%M}:00+00:00"
                       for n in range(1, 112)]  # fmt: skip
    assert len(office.effects) == 111
    goes_on(minutely, clock)


def goes_on(minutely, clock):
    clock.set(utc("2026-06-10T10:21:00"))
    tick()
    assert told(minutely)[-1] == ("06-10 10:21", "started", "on_time", 1)


@pytest.mark.case("E5")
@pytest.mark.parametrize("missed", ["skip", "latest_only", "run_all", "ask"])
def test_four_hundred_days_down_are_decided_in_bounded_work(office, clock, missed):
    minutely = job(at=utc("2025-01-01T00:00:30"), clock=clock, missed=missed, zone="America/New_York", overlap="allow")
    clock.set(utc("2026-02-05T00:00:30"))
    began = time.monotonic()
    tick()
    assert time.monotonic() - began < 5
    assert len(slots(minutely)) <= schedules.AT_ONCE
    if missed in ("skip", "ask"):
        assert slots(minutely)[0].count == 576_000


@pytest.mark.case("E6")
@pytest.mark.parametrize(
    ("terms", "days"),
    [
        ({"missed": "latest_only"}, ["05"]),
        ({"missed": "run_all"}, ["03", "04", "05"]),
        ({"missed": "skip"}, []),
        ({"missed": "run_all", "max_catch_up": timedelta(hours=24)}, ["05"]),
        ({}, ["05"]),  # the default is not "run all"
    ],
)
def test_runs_after_three_days_know_their_day_and_mail_once_each(office, clock, terms, days):
    daily = job(at=utc("2026-01-02T12:00"), clock=clock, expression="1 0 * * *", **terms)
    clock.set(utc("2026-01-05T10:00"))
    for _ in range(6):
        tick()
        work()
        registry.forget()  # the scheduler is started anew
    ran = slots(daily, state="started")
    assert [f"{slot.run.input['scheduled_for']:.10}"[-2:] for slot in ran] == days
    windows = [(slot.run.input["window_start"], slot.run.input["window_end"]) for slot in ran]
    assert windows == [(f"2026-01-{int(d) - 1:02}T00:01:00+00:00", f"2026-01-{d}T00:01:00+00:00") for d in days]
    assert len(office.effects) == len(set(office.effects)) == len(days)
    assert sum(slot.count for slot in slots(daily)) == 3, "each missed start is on record"


@pytest.mark.case("E6")
def test_a_job_whose_action_has_no_key_never_runs_all_by_default(office, clock):
    with pytest.raises(jobs.Refused, match="act has no key") as refusal:
        job(at=utc("2026-01-02T12:00"), clock=clock, workflow="telegram", missed="run_all")
    assert refusal.value.field == "repeats_accepted"
    assert jobs.Terms(expression="* * * * *", workflow="telegram").missed == "latest_only"


def test_a_workflow_that_lost_its_key_later_is_not_run_for_every_missed_start(office, clock):
    hourly = job(at=utc("2026-01-02T12:30"), clock=clock, expression="0 * * * *", missed="run_all")
    Job.objects.filter(pk=hourly.pk).update(workflow="telegram")
    clock.set(utc("2026-01-02T15:30"))
    tick()
    assert told(hourly) == [("01-02 13:00", "missed", "missed_superseded", 2), ("01-02 15:00", "started", "late", 1)]


def test_a_start_deadline_leaves_out_what_is_too_late(office, clock):
    hourly = job(at=utc("2026-01-02T12:30"), clock=clock, expression="0 * * * *", missed="run_all", overlap="allow",
                 start_deadline=timedelta(minutes=90))  # fmt: skip
    clock.set(utc("2026-01-02T16:10"))
    tick()
    assert told(hourly) == [
        ("01-02 13:00", "too_late", "start_deadline_passed", 2),
        ("01-02 15:00", "started", "late", 1),
        ("01-02 16:00", "started", "late", 1),
    ]


@pytest.mark.parametrize(
    ("answer", "states"),
    [
        ("none", [("missed", 3)]),
        ("latest", [("missed", 2), ("started", 1)]),
        ("all", [("started", 1), ("started", 1), ("started", 1)]),
    ],
)
def test_a_job_that_asks_does_what_the_person_says(office, clock, answer, states):
    hourly = job(at=utc("2026-01-02T12:30"), clock=clock, expression="0 * * * *", missed="ask")
    clock.set(utc("2026-01-02T15:30"))
    tick()
    (asked,) = slots(hourly)
    assert (asked.state, asked.count) == ("asked", 3)
    assert not Run.objects.exists()
    said = jobs.answer_missed(hourly, slot=asked.pk, run=answer, version=1, token=uuid4(), actor=OLGA, reason="told")
    assert said.verdict == "done"
    for _ in range(4):
        tick()
        work()
    assert [(slot.state, slot.count) for slot in slots(hourly)] == states
    assert len(office.effects) == sum(state == "started" for state, _ in states)


# Overlap


def going_on(clock, **terms):
    """A minutely job whose first run still goes on."""
    minutely = job(at=utc("2026-06-10T07:59:30"), clock=clock, **terms)
    clock.set(utc("2026-06-10T08:00:01"))
    tick()
    return minutely, timetable.hold(Run.objects.get())


def test_skip_says_behind_which_run(office, clock):
    minutely, run = going_on(clock, overlap="skip")
    clock.set(utc("2026-06-10T08:01:01"))
    tick()
    skipped = slots(minutely)[-1]
    assert (skipped.state, skipped.reason_code, skipped.behind) == ("skipped_overlap", "previous_still_runs", run)
    assert Entry.objects.filter(subject=minutely.subject, event="slot", reason_code="previous_still_runs").exists()


def test_queue_one_lets_one_wait_and_skips_the_others(office, clock):
    minutely, run = going_on(clock, overlap="queue_one")
    for minute in (1, 2):
        clock.set(utc(f"2026-06-10T08:0{minute}:01"))
        tick()
    assert [slot.state for slot in slots(minutely)] == ["started", "queued", "skipped_overlap"]
    timetable.end(run)
    tick()
    assert [slot.state for slot in slots(minutely)] == ["started", "started", "skipped_overlap"]
    assert slots(minutely)[1].reason_code == "waits_for_previous"


def test_a_queued_start_is_given_up_at_its_deadline(office, clock):
    minutely, _ = going_on(clock, overlap="queue_one", start_deadline=timedelta(seconds=30))
    clock.set(utc("2026-06-10T08:01:01"))
    tick()
    clock.set(utc("2026-06-10T08:01:31"))
    tick()
    assert told(minutely)[1] == ("06-10 08:01", "too_late", "start_deadline_passed", 1)


def test_allow_starts_beside_the_other(office, clock):
    going_on(clock, overlap="allow")
    clock.set(utc("2026-06-10T08:01:01"))
    tick()
    assert Run.objects.count() == 2


def test_cancel_previous_cancels_before_it_starts(office, clock):
    minutely, run = going_on(clock, overlap="cancel_previous")
    clock.set(utc("2026-06-10T08:01:01"))
    tick()
    run.refresh_from_db()
    assert run.state == RunState.CANCELLED
    assert [slot.state for slot in slots(minutely)] == ["started", "started"]


def test_cancel_previous_waits_and_says_so_while_the_other_cannot_be_cancelled(office, clock, monkeypatch):
    def refuses(pk, **_):
        raise schedules.transition.LeaseLive(kind="run", pk=pk, source="running", target="cancelled")

    monkeypatch.setattr(runs, "cancel", refuses, raising=False)
    minutely, run = going_on(clock, overlap="cancel_previous")
    clock.set(utc("2026-06-10T08:01:01"))
    tick()
    waiting = slots(minutely)[-1]
    assert (waiting.state, waiting.reason_code, waiting.behind) == ("due", "previous_not_cancelled", run)
    timetable.end(run)
    tick()
    assert slots(minutely)[-1].state == "started"


@pytest.mark.parametrize("stands", ["walks back", "is marked"])
def test_cancel_previous_leaves_a_run_alone_that_walks_back_or_waits_for_a_person(office, clock, stands):
    minutely, run = going_on(clock, overlap="cancel_previous")
    if stands == "walks back":
        cast.run_stands(run, RunState.COMPENSATING)
    else:
        cast.run_stands(run, None, escalated_at=clock.now(), escalation_reason="step_terminated")
    before = Run.objects.values().get()
    for minute in (1, 2, 3):
        clock.set(utc(f"2026-06-10T08:0{minute}:01"))
        tick()
    assert Run.objects.values().get() == before
    assert [(slot.state, slot.reason_code, slot.behind) for slot in slots(minutely)[1:]] == [
        ("skipped_overlap", "previous_needs_person", run),
        ("skipped_overlap", "previous_needs_person", run),
        ("due", "previous_needs_person", run),
    ]
    run.refresh_from_db()
    runs.cancel(run.pk, actor=OLGA, version=run.version, reason="It is dealt with.")
    tick()
    assert [slot.state for slot in slots(minutely)[1:]] == ["skipped_overlap", "skipped_overlap", "started"]


def test_a_run_beyond_its_maximum_time_waits_for_a_person(office, clock):
    _, run = going_on(clock, max_run_time=timedelta(minutes=10), overlap="skip")
    clock.advance(minutes=9)
    tick()
    run.refresh_from_db()
    assert run.escalated_at is None
    clock.advance(minutes=2)
    tick()
    tick()
    run.refresh_from_db()
    assert (run.escalation_reason, run.due_at) == ("max_run_time", None)


def test_a_run_that_somebody_holds_is_not_marked_under_their_hands(office, clock):
    job(at=utc("2026-06-10T07:59:30"), clock=clock, expression="0 8 * * *", max_run_time=timedelta(minutes=10))
    clock.set(utc("2026-06-10T08:00:01"))
    tick()
    clock.advance(minutes=11)
    run = timetable.take(Run.objects.get(), seconds=60)
    tick()
    run.refresh_from_db()
    assert run.escalated_at is None
    clock.advance(61)
    tick()
    run.refresh_from_db()
    assert run.escalation_reason == "max_run_time"


# Many beats


@pytest.mark.case("E7")
def test_four_schedulers_and_two_hundred_slots_make_two_hundred_runs_and_effects(office, clock):
    minutely = job(at=utc("2026-06-10T11:59:30"), clock=clock, overlap="allow")
    barrier, faults = threading.Barrier(4), []
    begin = utc("2026-06-10T12:00:01")

    def beats():
        try:
            for number in range(200):
                if barrier.wait(30) == 0:
                    clock.set(begin + timedelta(minutes=number))
                barrier.wait(30)
                tick()
        except Exception as fault:  # shown by the test's own thread
            faults.append(fault)
            barrier.abort()
        finally:
            connections.close_all()

    threads = [threading.Thread(target=beats) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    tick()
    work()
    assert Run.objects.count() == Run.objects.values("workflow_id").distinct().count() == 200
    assert {slot.state for slot in slots(minutely)} == {"started"}
    assert len(slots(minutely)) == len(office.effects) == len(set(office.effects)) == 200


@pytest.mark.case("E7")
def test_a_scheduler_killed_between_slot_and_run_or_before_the_wake_up_loses_nothing(office, clock):
    minutely = job(at=utc("2026-06-10T11:59:30"), clock=clock)
    clock.set(utc("2026-06-10T12:00:01"))
    with transaction.atomic():
        schedules.decide(Job.objects.select_for_update().get(), clock.now())
    assert [slot.state for slot in slots(minutely)] == ["due"]  # and here it dies
    tick()
    tick()
    assert Run.objects.count() == 1
    assert Run.objects.get().due_at is not None, "nobody was told; the sweep finds it"
    work()
    assert len(office.effects) == 1


@pytest.mark.case("E7")
def test_a_slot_is_one_in_the_database_whatever_the_code_does(office, clock):
    minutely = job(at=utc("2026-06-10T11:59:30"), clock=clock)
    clock.set(utc("2026-06-10T12:00:01"))
    tick()
    for local in (slots(minutely)[0].local, "the same instant by another name"):
        Slot.objects.update(local=local)
        Job.objects.update(next_at=utc("2026-06-10T12:00"))  # an older version takes it for due once more
        tick()
        assert len(slots(minutely)) == Run.objects.count() == 1


@pytest.mark.case("E1")
def test_one_local_time_runs_once_even_where_other_zone_data_moves_it(office, clock):
    daily = job(at=utc("2026-06-09T17:00"), clock=clock, expression="30 16 * * *")
    clock.set(utc("2026-06-10T16:30:01"))
    tick()
    Slot.objects.update(scheduled_for=utc("2026-06-10T15:30"))  # what other zone data called 16:30
    Job.objects.update(next_at=utc("2026-06-10T16:30"), decided_until=utc("2026-06-10T15:30"))
    tick()
    assert [slot.state for slot in slots(daily)] == ["started", "skipped_repeat"]
    assert Run.objects.count() == 1


# Clock changes and zones


@pytest.mark.case("E1")
def test_the_days_of_the_clock_change_in_new_york_are_told(office, clock):
    daily = job(at=utc("2026-03-07T12:00"), clock=clock, expression="30 2 * * *", zone="America/New_York")
    for moment in ("2026-03-08T06:30:01", "2026-03-08T07:00:01", "2026-03-08T07:30:01", "2026-03-09T06:30:01"):
        clock.set(utc(moment))
        tick()
        work()
    assert [(f"{slot.scheduled_for:%d %H:%M}", slot.shifted) for slot in slots(daily)] == [
        ("08 07:00", True),
        ("09 06:30", False),
    ]
    assert len(office.effects) == 2


@pytest.mark.case("E1")
def test_a_named_hour_in_the_gap_leaves_a_row_where_the_instant_decides(office, clock):
    even = job(at=utc("2026-03-08T04:30"), clock=clock, expression="0 */2 * * *", zone="America/New_York")
    clock.set(utc("2026-03-08T05:00:01"))
    tick()
    assert told(even) == [
        ("03-08 05:00", "started", "on_time", 1),
        ("03-08 06:59", "skipped_gap", "gap_of_clock_change", 1),
    ]


@pytest.mark.case("E10")
@pytest.mark.parametrize(
    ("expression", "ran", "at", "zone", "expected"),
    [
        ("30 16 * * *", "2026-06-10T16:30:01", "2026-06-10T18:00", "America/New_York",
         ["2026-06-10T20:30", "2026-06-11T20:30"]),
        ("0 5 1 * *", "2016-05-01T05:00:01", "2016-05-17T16:00", "Europe/Berlin", ["2016-06-01T03:00"]),
    ],
)  # fmt: skip
def test_another_zone_runs_nothing_at_once_and_the_next_run_by_its_clock(
    office, clock, expression, ran, at, zone, expected
):
    edited = job(at=utc(ran) - timedelta(hours=1), clock=clock, expression=expression)
    clock.set(utc(ran))
    tick()
    work()
    clock.set(utc(at))
    now = clock.now()
    terms = jobs.Terms(expression=expression, zone=zone, workflow="mailing")
    change = jobs.preview(edited, terms, now=now)
    assert change.new[0].at == utc(expected[0])
    assert change.old[0].at != change.new[0].at
    if expected[0][:10] == ran[:10]:
        assert "on that date once more" in change.warnings[0]
    assert edit(edited, zone=zone).verdict == "done"
    tick()
    assert Run.objects.count() == 1
    found = []
    for _ in expected:
        found.append(f"{Job.objects.get().next_at:%Y-%m-%dT%H:%M}")
        clock.set(Job.objects.get().next_at + timedelta(seconds=1))
        tick()
        work()
    assert found == expected
    assert Run.objects.count() == 1 + len(expected)


@pytest.mark.case("E10")
def test_edit_unedit_and_edit_again_within_a_minute_runs_nothing_and_is_told(office, clock):
    daily = job(at=utc("2026-06-10T18:00"), clock=clock, expression="30 16 * * *")
    for zone in ("America/New_York", "UTC", "America/New_York", "Asia/Tokyo", "UTC"):
        edit(daily, zone=zone)
        tick()
        clock.advance(5)
    assert not Run.objects.exists()
    assert slots(daily) == []
    entries = Entry.objects.filter(subject=daily.subject, reason_code="job_edited").order_by("seq")
    told_next = [bytes(entry.canonical).decode() for entry in entries]
    assert len(told_next) == 5
    assert '"next_at":"2026-06-11T16:30:00+00:00"' in told_next[0]
    assert '"next_at":"2026-06-10T20:30:00+00:00"' in told_next[0]


def test_what_is_due_at_the_moment_of_an_edit_is_run_by_the_old_terms(office, clock):
    daily = job(at=utc("2026-06-10T16:00"), clock=clock, expression="30 16 * * *")
    clock.set(utc("2026-06-10T16:30:01"))
    edit(daily, zone="Asia/Tokyo")
    tick()
    assert told(daily) == [("06-10 16:30", "started", "on_time", 1)]


def test_new_zone_data_moves_what_is_to_come_and_is_audited(office, clock, monkeypatch):
    daily = job(at=utc("2026-06-10T18:00"), clock=clock, expression="0 9 * * *", zone="America/Vancouver")
    Job.objects.update(zone_data="2025b", next_at=utc("2026-06-11T17:00"))
    tick()
    fresh = Job.objects.get()
    assert (fresh.zone_data, fresh.next_at) == (occurrences.ZONE_DATA, utc("2026-06-11T16:00"))
    entry = Entry.objects.get(subject=daily.subject, event="recomputed")
    assert '"next_at":["2026-06-11T17:00:00+00:00","2026-06-11T16:00:00+00:00"]' in bytes(entry.canonical).decode()
    tick()
    assert Entry.objects.filter(event="recomputed").count() == 1
    monkeypatch.setattr(occurrences, "ZONE_DATA", "2025b")  # an older process of a rolling deployment
    tick()
    assert Job.objects.get().zone_data == fresh.zone_data


# People


def test_a_viewer_may_not_and_the_attempt_is_on_record(office, clock):
    daily = job(at=utc("2026-06-10T18:00"), clock=clock)
    answer = jobs.switch(daily, on=False, version=1, token=uuid4(), actor=timetable.EVE, reason="")
    assert answer.verdict == "refused"
    assert Job.objects.get().enabled
    assert Entry.objects.filter(subject=daily.subject, event="refused", reason_code="not_allowed").exists()


def test_a_stale_page_changes_nothing_and_a_double_press_changes_once(office, clock):
    daily = job(at=utc("2026-06-10T18:00"), clock=clock)
    token = uuid4()
    first = edit(daily, expression="0 1 * * *", token=token)
    assert edit(daily, expression="0 1 * * *", version=1, token=token) == first
    late = edit(daily, expression="0 2 * * *", version=1)
    assert late.verdict == "conflict"
    assert "Olga Operator" in late.message
    fresh = Job.objects.get()
    assert (fresh.version, fresh.expression) == (2, "0 1 * * *")


def test_a_job_that_was_off_has_missed_nothing(office, clock):
    minutely = job(at=utc("2026-06-10T18:00:30"), clock=clock)
    jobs.switch(minutely, on=False, version=1, token=uuid4(), actor=OLGA, reason="repair")
    clock.advance(hours=5)
    tick()
    jobs.switch(minutely, on=True, version=2, token=uuid4(), actor=OLGA, reason="repaired")
    tick()
    assert slots(minutely) == []
    assert Job.objects.get().next_at > clock.now()


def press(job, fill, **more):
    fresh = Job.objects.get(pk=job.pk)
    given = {"version": fresh.version, "token": uuid4(), "actor": OLGA, "reason": "asked for", **more}
    return jobs.run_now(fresh, fill=fill, **given)


def test_filling_a_slot_uses_the_id_of_its_time_and_a_new_intent_one_of_its_own(office, clock):
    hourly = job(at=utc("2026-06-10T08:30"), clock=clock, expression="0 * * * *", missed="skip")
    clock.set(utc("2026-06-10T11:30"))
    tick()
    (missed,) = jobs.fillable(hourly)
    assert press(hourly, missed.pk).verdict == "done"
    assert told(hourly) == [
        ("06-10 09:00", "missed", "missed_skipped", 2),
        ("06-10 11:00", "started", "filled_by_hand", 1),
    ]
    assert Run.objects.get().workflow_id == "nightly@2026-06-10T11:00:00+00:00"
    assert press(hourly, slots(hourly)[-1].pk).verdict == "refused"
    assert press(hourly, None).verdict == "done"
    assert press(hourly, None).verdict == "done"
    assert Run.objects.filter(workflow_id__startswith="nightly@hand:").count() == 2
    work()
    assert len(office.effects) == 3


def test_a_start_that_is_too_long_ago_says_so_and_what_can_be_done(office, clock):
    yearly = job(at=utc("2026-01-31T00:00"), clock=clock, expression="0 0 1 2 *")
    clock.set(utc("2026-12-20T00:00"))
    tick()
    assert told(yearly) == [("02-01 00:00", "not_started", "run_too_old", 1)]
    (slot,) = slots(yearly)
    assert "longer ago than anything about its steps is kept" in job_wording.slot_story(slot)
    answer = press(yearly, slot.pk)
    assert (answer.verdict, "run it once more as a new intent" in answer.message) == ("refused", True)
    assert press(yearly, None).verdict == "done"


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (runs.RunMismatch("another input"), "run_mismatch"),
        (transition.Pruned(kind="run", pk=1, source="", target="pending"), "run_pruned"),
        (InvalidField("input.order", "is missing"), "run_refused"),
    ],
    ids=["mismatch", "pruned", "refused"],
)
def test_a_start_that_is_refused_says_why(office, clock, monkeypatch, refusal, code):
    def refuse(*args, **given):
        raise refusal

    hourly = job(at=utc("2026-06-10T08:30"), clock=clock, expression="0 * * * *")
    monkeypatch.setattr(runs, "start", refuse)
    clock.set(utc("2026-06-10T09:00:01"))
    tick()
    assert told(hourly) == [("06-10 09:00", "not_started", code, 1)]
    assert not job_wording.slot_story(slots(hourly)[0]).startswith("Run ")


def test_the_next_slot_filled_before_its_time_is_not_run_again_at_its_time(office, clock):
    hourly = job(at=utc("2026-06-10T08:30"), clock=clock, expression="0 * * * *")
    assert press(hourly, "next").verdict == "done"
    work()
    clock.set(utc("2026-06-10T09:00:01"))
    tick()
    assert told(hourly) == [("06-10 09:00", "started", "filled_by_hand", 1)]
    assert Job.objects.get().next_at == utc("2026-06-10T10:00")
    assert len(office.effects) == 1


def test_a_workflow_that_is_not_here_yet_waits_and_is_named(office, clock, settings):
    minutely = job(at=utc("2026-06-10T08:59:30"), clock=clock)
    settings.AFTERCALL_WORKFLOWS = []
    registry.forget()
    clock.set(utc("2026-06-10T09:00:01"))
    tick()
    assert slots(minutely) == [], "nothing is decided of which nothing could be started"
    assert Job.objects.get().problem == "no_handler"
    settings.AFTERCALL_WORKFLOWS = ["tests.timetable.WORKFLOWS"]
    registry.forget()
    tick()
    assert [slot.state for slot in slots(minutely)] == ["started"]
    assert Job.objects.get().problem == ""


def test_a_job_that_fails_in_a_way_that_nobody_foresaw_is_named_by_the_class_alone_until_it_starts(
    office, clock, settings, capsys
):
    hidden = {"order": "1002", "card": "sk-live-CANARY1"}
    minutely = job(at=utc("2026-06-10T08:59:30"), clock=clock, input=hidden)
    other = job("other", at=utc("2026-06-10T08:59:30"), clock=clock)
    keys, settings.AFTERCALL_SEAL_KEYS = settings.AFTERCALL_SEAL_KEYS, [Fernet.generate_key().decode()]
    clock.set(utc("2026-06-10T09:00:01"))
    tick()
    assert [slot.state for slot in slots(minutely)] == ["due"]
    assert [slot.state for slot in slots(other)] == ["started"]
    assert dict(Job.objects.values_list("name", "problem")) == {"nightly": "error:CannotOpen", "other": ""}
    assert "CANARY" not in capsys.readouterr().out
    settings.AFTERCALL_SEAL_KEYS = keys
    tick()
    assert [slot.state for slot in slots(minutely)] == ["started"]
    assert not Job.objects.exclude(problem="").exists()


def test_a_fault_that_is_gone_is_not_shown_any_more_where_nothing_is_started_either(office, clock, monkeypatch):
    minutely = job(at=utc("2026-06-10T08:59:30"), clock=clock, overlap="skip")
    clock.set(utc("2026-06-10T09:00:01"))
    tick()
    with monkeypatch.context() as broken:
        broken.setattr(schedules, "_by_overlap", lambda job: 1 / 0)
        clock.set(utc("2026-06-10T09:01:01"))
        tick()
    assert Job.objects.get().problem == "error:ZeroDivisionError"
    tick()
    assert [slot.state for slot in slots(minutely)] == ["started", "skipped_overlap"]
    assert Job.objects.get().problem == ""


def test_the_audit_log_of_jobs_verifies_and_a_job_whose_last_edit_was_cut_out_is_found(office, clock):
    daily = job(at=utc("2026-06-10T08:30"), clock=clock)
    edit(daily, expression="0 1 * * *")
    assert list(verify.verify(verify.registered_heads())) == []
    Job.objects.update(version=3)
    (finding,) = verify.verify(verify.registered_heads())
    assert daily.subject in str(finding)


@pytest.mark.parametrize("table", ["reconciliation_job", "reconciliation_slot"])
@pytest.mark.parametrize("change", ["DELETE FROM", "TRUNCATE"])
def test_the_application_cannot_forget_what_was_expected(office, table, change):
    from django.db import ProgrammingError, connection

    with pytest.raises(ProgrammingError, match="permission denied"), connection.cursor() as cursor:
        cursor.execute(f"{change} {table}")


def test_no_other_module_writes_jobs_or_slots():
    from pathlib import Path

    for path in Path(schedules.__file__).parent.glob("*.py"):
        text = path.read_text()
        writers = ("schedules.py", "slots.py", "backlog.py")
        if path.name not in (*writers, "models.py", "jobs.py"):
            assert "Slot(" not in text, path
            assert "Job.objects" not in text, path
        if path.name not in writers:
            assert "Slot.objects.create" not in text, path
            assert ".save(" not in text or path.name not in ("jobs.py",), path
