"""Processes with other zone data beside each other: a local time runs once, by whichever comes first, and never not."""

import json
from contextlib import contextmanager
from datetime import timedelta, timezone

import pytest
from django.db import transaction

from audit.models import Entry
from reconciliation import occurrences, schedules
from reconciliation.models import Job, Run
from tests.test_schedules import office, utc  # noqa: F401
from tests.timetable import job, slots, tick, told, work

WINTER, SUMMER = -8, -7


@pytest.fixture
def data(monkeypatch):
    """Let a block be of a process whose zone data have this version and put Vancouver at so many hours."""

    @contextmanager
    def process(version, hours):
        with monkeypatch.context() as patch:
            patch.setattr(occurrences, "ZONE_DATA", version)
            patch.setattr(occurrences, "zone_of", lambda name: timezone(timedelta(hours=hours)))
            yield

    return process


def daily(clock, **terms):
    return job(at=utc("2026-12-01T12:00"), clock=clock, expression="0 9 * * *", zone="America/Vancouver", **terms)


def decide_and_die():
    with transaction.atomic():
        schedules.decide(Job.objects.select_for_update().get(), schedules.transition.database_now())


@pytest.mark.case("E7")
@pytest.mark.parametrize("missed", ["skip", "latest_only", "run_all", "ask"])
@pytest.mark.parametrize("later", [("2025b", WINTER), ("2026b", SUMMER)])
def test_a_beat_with_older_data_that_comes_first_makes_the_one_run_of_the_day(office, clock, data, later, missed):  # noqa: F811
    with data("2026b", SUMMER):
        made = daily(clock, missed=missed)
    assert Job.objects.get().next_at == utc("2026-12-01T16:00")
    clock.set(utc("2026-12-01T16:00:01"))
    with data("2025b", WINTER):
        decide_and_die()
    assert told(made) == [("12-01 16:00", "due", "", 1)]
    assert slots(made)[0].local == "2026-12-01T09:00 America/Vancouver"
    with data(*later):
        for moment in ("16:00:02", "17:00:01", "17:30:00"):
            clock.set(utc(f"2026-12-01T{moment}"))
            tick()
            work()
        assert Run.objects.count() == 1
        clock.set(Job.objects.get().next_at + timedelta(seconds=1))
        tick()
        work()
    hour = "17" if later[1] == WINTER else "16"
    assert [slot.run.workflow_id for slot in slots(made, state="started")] == [
        "nightly@2026-12-01T16:00:00+00:00",
        f"nightly@2026-12-02T{hour}:00:00+00:00",
    ]
    assert len(office.effects) == 2


@pytest.mark.case("E7")
@pytest.mark.parametrize("missed", ["latest_only", "run_all"])
def test_missed_starts_of_which_newer_data_named_the_first_are_each_on_record_once(office, clock, data, missed):  # noqa: F811
    with data("2026b", SUMMER):
        made = daily(clock, missed=missed)
    clock.set(utc("2026-12-03T17:30"))
    with data("2025b", WINTER):
        for _ in range(4):
            tick()
            work()
    days = {slot.local[:10] for slot in slots(made)}
    assert sum(slot.count for slot in slots(made)) == 3
    assert "2026-12-01" in days
    assert Run.objects.count() == (1 if missed == "latest_only" else 3)


@pytest.mark.case("E7")
def test_a_run_that_new_data_put_into_the_past_is_made_late(office, clock, data):  # noqa: F811
    with data("2025b", WINTER):
        made = daily(clock)
        clock.set(utc("2026-12-01T16:30"))
        tick()
    with data("2026b", SUMMER):
        tick()
        tick()
        work()
        clock.set(utc("2026-12-01T17:00:01"))
        tick()
    assert told(made) == [("12-01 16:00", "started", "late", 1)]
    entry = Entry.objects.get(subject=made.subject, event="recomputed")
    assert json.loads(bytes(entry.canonical))["body"]["details"]["next_at"] == [
        "2026-12-01T17:00:00+00:00",
        "2026-12-01T16:00:00+00:00",
    ]


@pytest.mark.case("E7")
@pytest.mark.parametrize("missed", ["skip", "latest_only", "run_all", "ask"])
def test_a_run_that_was_made_is_not_made_again_at_a_later_instant_of_new_data(office, clock, data, missed):  # noqa: F811
    with data("2025b", SUMMER):
        made = daily(clock, missed=missed)
        clock.set(utc("2026-12-01T16:00:01"))
        tick()
        work()
    with data("2026b", WINTER):
        clock.set(utc("2026-12-01T20:00"))
        tick()
        tick()
        work()
    assert told(made) == [
        ("12-01 16:00", "started", "on_time", 1),
        ("12-01 17:00", "skipped_repeat", "local_time_ran_already", 1),
    ]
    assert Job.objects.get().next_at == utc("2026-12-02T17:00")
    assert len(office.effects) == 1
