"""Times of jobs, against the IANA data: what does not exist, what comes twice, what goes on evenly."""

import os
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from reconciliation.occurrences import NotASchedule, plan, upcoming


def cron(expression, zone="UTC"):
    return plan(kind="cron", expression=expression, zone=zone, anchor=datetime(2026, 1, 1, tzinfo=UTC))


def utc(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def instants(expression, zone, start, number):
    return [f"{each.at:%m-%d %H:%M}" for each in upcoming(cron(expression, zone), utc(start), number)]


@pytest.mark.case("E1")
def test_a_daily_job_in_new_york_runs_once_on_each_day_of_both_clock_changes():
    spring = upcoming(cron("30 2 * * *", "America/New_York"), utc("2026-03-07"), 3)
    assert [each.at for each in spring] == [utc("2026-03-07T07:30"), utc("2026-03-08T07:00"), utc("2026-03-09T06:30")]
    assert [each.shifted for each in spring] == [False, True, False]
    assert spring[1].local == "2026-03-08T02:30 America/New_York"
    autumn = upcoming(cron("30 1 * * *", "America/New_York"), utc("2026-10-31"), 3)
    assert [each.at for each in autumn] == [utc("2026-10-31T05:30"), utc("2026-11-01T05:30"), utc("2026-11-02T06:30")]
    assert len({each.local for each in spring + autumn}) == 6


@pytest.mark.case("E1")
def test_asked_within_the_second_pass_of_a_repeated_hour_the_next_time_is_that_of_tomorrow():
    nightly = cron("30 1 * * *", "America/New_York")
    for moment in ("2026-11-01T05:30", "2026-11-01T06:10", "2026-11-01T06:30", "2026-11-01T06:50"):
        assert nightly.after(utc(moment)).at == utc("2026-11-02T06:30")


@pytest.mark.case("E1")
def test_the_zone_of_the_host_moves_no_job_that_runs_by_utc():
    before = os.environ.get("TZ")
    os.environ["TZ"] = "Europe/London"
    time.tzset()
    try:
        found = [
            instants(expression, "UTC", "2022-10-30T00:00", 1)
            for expression in ("59 0 * * *", "0 1 * * *", "1 1 * * *", "30 1 * * *", "59 1 * * *", "0 2 * * *")
        ]
    finally:
        os.environ.pop("TZ") if before is None else os.environ.__setitem__("TZ", before)
        time.tzset()
    assert [times[0] for times in found] == [
        f"10-30 {clock}" for clock in ("00:59", "01:00", "01:01", "01:30", "01:59", "02:00")
    ]


@pytest.mark.parametrize(
    ("zone", "expression", "start", "expected"),
    [
        # A gap of half an hour: 02:00 to 02:30 on Lord Howe.
        ("Australia/Lord_Howe", "15 2 * * *", "2026-10-02", ["10-02 15:45", "10-03 15:30", "10-04 15:15"]),
        # A day that did not exist: Samoa left out 30 December 2011.
        ("Pacific/Apia", "0 12 * * *", "2011-12-29", ["12-29 22:00", "12-30 10:00", "12-30 22:00"]),
        # Morocco goes back to UTC for Ramadan and forward again after it.
        ("Africa/Casablanca", "30 2 * * *", "2026-02-14", ["02-14 01:30", "02-15 01:30", "02-16 02:30"]),
        ("Africa/Casablanca", "30 2 * * *", "2026-03-21", ["03-21 02:30", "03-22 02:00", "03-23 01:30"]),
        # Ireland's summer time is its standard time; its winter is a negative change.
        ("Europe/Dublin", "30 1 * * *", "2026-03-28", ["03-28 01:30", "03-29 01:00", "03-30 00:30"]),
        ("Europe/Dublin", "30 1 * * *", "2026-10-24", ["10-24 00:30", "10-25 00:30", "10-26 01:30"]),
        # The clock jumps at midnight in Lebanon.
        ("Asia/Beirut", "30 0 * * *", "2026-03-27T23:00", ["03-28 22:00", "03-29 21:30", "03-30 21:30"]),
        # British Columbia stays on summer time from 2026 on (zone data 2026b and later).
        ("America/Vancouver", "0 9 * * *", "2026-11-30", ["11-30 16:00", "12-01 16:00", "12-02 16:00"]),
    ],
)
def test_local_times_in_many_zones(zone, expression, start, expected):
    assert instants(expression, zone, start, 3) == expected


def test_a_star_in_minute_or_hour_goes_on_evenly_through_both_changes():
    for start in ("2026-03-08T04:00", "2026-11-01T03:00"):
        found = [each.at for each in upcoming(cron("*/30 * * * *", "America/New_York"), utc(start), 12)]
        assert {later - earlier for earlier, later in pairwise(found)} == {timedelta(minutes=30)}
    twice = upcoming(cron("*/30 * * * *", "America/New_York"), utc("2026-11-01T04:59"), 4)
    assert len({each.local for each in twice}) == 4, "the text of a repeated hour carries its offset"


def test_a_named_hour_that_falls_into_the_gap_is_told_where_the_instant_decides():
    even_hours = cron("0 */2 * * *", "America/New_York")
    assert instants("0 */2 * * *", "America/New_York", "2026-03-08T04:59", 2) == ["03-08 05:00", "03-08 08:00"]
    (lost,) = even_hours.lost(utc("2026-03-08T05:00"), utc("2026-03-08T08:00"))
    assert (lost.local, lost.count) == ("2026-03-08T02:00 America/New_York", 1)
    assert even_hours.lost(utc("2026-03-08T08:00"), utc("2026-03-08T10:00")) == []
    assert cron("*/5 * * * *", "America/New_York").lost(utc("2026-03-08T06:55"), utc("2026-03-08T07:00")) == []


@pytest.mark.parametrize(
    ("zone", "expression", "begin", "end", "expected"),
    [
        # A week and more between two runs.
        ("America/New_York", "*/15 2 * * 0", "2026-03-01T07:45", "2026-03-15T06:00", [("03-08T02:00", 4)]),
        # Several years: one entry for each.
        ("America/New_York", "0 */2 * * *", "2024-01-01", "2027-01-01",
         [("03-10T02:00", 1), ("03-09T02:00", 1), ("03-08T02:00", 1)]),
        # Half an hour is lost, and no run stands where 02:15 would have been.
        ("Australia/Lord_Howe", "15 * * * *", "2026-10-03T14:45", "2026-10-03T16:15", [("10-04T02:15", 1)]),
        # A whole Friday.
        ("Pacific/Apia", "0 * * * 5", "2011-12-24T09:00", "2012-01-06T10:00", [("12-30T00:00", 24)]),
        # Every hour is named: the run at 03:00 is the one that would have been at 02:00.
        ("America/New_York", "0 * * * *", "2026-03-01", "2026-03-15", []),
        # The clock is put back.
        ("America/New_York", "0 */2 * * *", "2026-10-25", "2026-11-05", []),
    ],
)  # fmt: skip
def test_what_falls_into_a_gap_is_told_however_far_the_two_runs_are_apart(zone, expression, begin, end, expected):
    found = cron(expression, zone).lost(utc(begin), utc(end))
    assert [(lost.local[5:16], lost.count) for lost in found] == expected


def test_gaps_of_nine_years_are_found_in_a_moment():
    began = time.monotonic()
    assert len(cron("*/30 2 29 2 *", "America/New_York").lost(utc("2024-02-29T07:30"), utc("2033-02-28"))) == 0
    assert len(cron("*/30 2 * * *", "America/New_York").lost(utc("2026-01-01"), utc("2035-01-01"))) == 9
    assert time.monotonic() - began < 3


def test_a_planned_time_in_a_gap_is_told_where_another_one_stands_at_its_end():
    three = upcoming(cron("0 2,3 * * *", "America/New_York"), utc("2026-03-08T05:00"), 2)
    assert [(f"{each.at:%d %H:%M}", each.shifted) for each in three] == [("08 07:00", True), ("09 06:00", False)]
    assert three[0].local == "2026-03-08T02:00 America/New_York"
    (alone,) = upcoming(cron("0 3 * * *", "America/New_York"), utc("2026-03-08T05:00"), 1)
    assert (alone.shifted, alone.local) == (False, "2026-03-08T03:00 America/New_York")


def test_intervals_keep_real_time_from_their_beginning():
    anchor = utc("2026-03-08T06:10")
    every = plan(kind="interval", expression="90 min", zone="America/New_York", anchor=anchor)
    found = upcoming(every, anchor - timedelta(seconds=1), 3)
    assert [each.at for each in found] == [anchor, anchor + timedelta(minutes=90), anchor + timedelta(minutes=180)]
    assert every.latest(anchor + timedelta(minutes=179)) == found[1]
    assert every.latest(anchor - timedelta(seconds=1)) is None
    assert every.count(anchor, anchor + timedelta(minutes=180)) == 3


ZONES = ("America/New_York", "Australia/Lord_Howe", "Pacific/Apia", "Asia/Beirut", "America/Asuncion",
         "America/Havana", "Antarctica/Troll", "UTC")  # fmt: skip


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("expression", ["0,30 2 * * *", "15 */2 * * *", "0 0 * * *", "5,45 0-3 * * 1-5", "0 * * * *"])
def test_counting_and_stepping_back_agree_with_walking(zone, expression):
    for start in ("2026-03-20T17:23", "2026-10-01T00:01", "2011-12-28T09:01"):
        begin, end = utc(start), utc(start) + timedelta(days=6)
        times = cron(expression, zone)
        walked, at = [], begin
        while (one := times.after(at)) is not None and one.at <= end:
            walked.append(one)
            at = one.at
        assert times.count(begin, end) == len(walked)
        assert len({each.local for each in walked}) == len(walked)
        assert times.latest(end) == walked[-1]


def test_four_hundred_days_of_minutes_are_counted_in_a_moment():
    began = time.monotonic()
    assert cron("* * * * *", "America/New_York").count(utc("2025-01-01"), utc("2026-02-05")) == 576_001
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("terms", "field", "says"),
    [
        ({"expression": "* * * *"}, "expression", "five fields"),
        ({"expression": "0 0 0 * * *"}, "expression", "five fields"),
        ({"expression": "99 * * * *"}, "expression", "no cron expression"),
        ({"expression": "0 0 30 2 *"}, "expression", "no cron expression"),
        ({"zone": "Europe/Bärlin"}, "zone", "looks like Europe/Berlin"),
        ({"zone": "../etc/passwd"}, "zone", "no time zone"),
        ({"kind": "interval", "expression": "often"}, "expression", "15 min"),
        ({"kind": "interval", "expression": "1 s"}, "expression", "between 10 s"),
    ],
)
def test_what_names_no_times_is_refused_in_a_sentence(terms, field, says):
    with pytest.raises(NotASchedule, match=says) as problem:
        plan(**{"kind": "cron", "expression": "* * * * *", "zone": "UTC", "anchor": utc("2026-01-01"), **terms})
    assert problem.value.field == field
