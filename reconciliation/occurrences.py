"""When a job is meant to run: pure functions of an expression, a zone and the zone data of this process.

A cron expression with a fixed minute and hour follows the wall clock of its zone. A local time that does not exist
runs at the first instant after the gap; one that comes twice runs the first time. Where minute or hour begins with a
star, and for intervals, the instant decides: real time goes on evenly. See docs/schedules.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from enum import StrEnum
from functools import cached_property
from typing import Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import tzdata
from cronsim import CronSim, CronSimError

SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)
FARTHEST = 9 * 366  # days; 29 February may be eight years away
SHORTEST = 10  # seconds between two runs of an interval; a beat comes every second
LONGEST = 366 * 86_400
UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}
ZONE_DATA: str = tzdata.IANA_VERSION


class JobKind(StrEnum):
    """How the expression of a job is read."""

    CRON = "cron"
    INTERVAL = "interval"


class Missed(StrEnum):
    """What is done about starts that nobody was there to make."""

    RUN_ALL = "run_all"
    LATEST_ONLY = "latest_only"
    SKIP = "skip"
    ASK = "ask"


class Overlap(StrEnum):
    """What is done when the run before it still goes on."""

    SKIP = "skip"
    QUEUE_ONE = "queue_one"
    CANCEL_PREVIOUS = "cancel_previous"
    ALLOW = "allow"


class SlotState(StrEnum):
    """What became of one expected run, or of a range of them."""

    DUE = "due"  # recorded, its run is not started yet
    QUEUED = "queued"  # waits for the run before it
    STARTED = "started"
    MISSED = "missed"
    TOO_OLD = "too_old"
    TOO_LATE = "too_late"
    SKIPPED_OVERLAP = "skipped_overlap"
    SKIPPED_GAP = "skipped_gap"
    SKIPPED_REPEAT = "skipped_repeat"
    ASKED = "asked"
    CATCHING_UP = "catching_up"  # a person said: run them all
    NOT_STARTED = "not_started"  # its run was refused


class NotASchedule(ValueError):
    """An expression or zone that names no times. `field` says which, the text what would be right."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


@dataclass(frozen=True, kw_only=True)
class Occurrence:
    """One time at which a job is meant to run."""

    at: datetime  # UTC
    local: str  # what makes it one occurrence for people: the planned wall time and its zone
    shifted: bool = False  # `local` does not exist; this is the first instant after the gap, for others of it too


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Named local times that fall into a gap of the clock, where the instant decides: nothing stands for them."""

    at: datetime  # the last second before the gap
    local: str  # the first of them
    count: int


class Plan(Protocol):
    """The times of a job."""

    def after(self, moment: datetime) -> Occurrence | None:
        """The first occurrence after `moment`."""

    def latest(self, moment: datetime) -> Occurrence | None:
        """The last occurrence at or before `moment`."""

    def count(self, first: datetime, last: datetime) -> int:
        """How many occurrences lie from `first` to `last`, both included, without walking through them."""

    def lost(self, first: datetime, last: datetime) -> list[Lost]:
        """Local times between two occurrences that do not exist and for which nothing runs; one entry a gap."""


def plan(*, kind: str, expression: str, zone: str, anchor: datetime) -> Plan:
    """The times that an expression names. Raises NotASchedule."""
    if kind == JobKind.INTERVAL:
        return Every(seconds=_seconds(expression), anchor=anchor)
    zone_of(zone)
    parts = expression.split()
    if len(parts) != 5:
        raise NotASchedule("expression", "A cron expression has five fields: minute hour day month weekday.")
    made = Cron(expression=" ".join(parts), zone=zone)
    try:
        made.fields  # noqa: B018 - parsed here, so that a fault is found here
    except CronSimError as error:
        raise NotASchedule("expression", f"This is no cron expression: {error}.") from error
    return made


def _seconds(expression: str) -> int:
    match = re.fullmatch(r"(?:every )?(\d{1,9}) ?(s|min|h|d)", expression.strip())
    if not match:
        raise NotASchedule("expression", "An interval looks like 30 s, 15 min, 2 h or 1 d.")
    seconds = int(match[1]) * UNITS[match[2]]
    if not SHORTEST <= seconds <= LONGEST:
        raise NotASchedule("expression", f"An interval lies between {SHORTEST} s and 366 d.")
    return seconds


def zone_of(name: str) -> tzinfo:
    """The zone of an IANA name. Raises NotASchedule where the zone data here do not know it."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        message = f"There is no time zone {name!r} in the zone data {ZONE_DATA}; it looks like Europe/Berlin."
        raise NotASchedule("zone", message) from error


@dataclass(frozen=True, kw_only=True)
class Every:
    """Every so many seconds of real time, counted from `anchor`."""

    seconds: int
    anchor: datetime

    def _number(self, number: int) -> Occurrence:
        at = (self.anchor + timedelta(seconds=self.seconds * number)).astimezone(UTC)
        return Occurrence(at=at, local=at.isoformat())

    def after(self, moment: datetime) -> Occurrence | None:
        """The first occurrence after `moment`."""
        return self._number(max(0, (moment - self.anchor) // timedelta(seconds=self.seconds) + 1))

    def latest(self, moment: datetime) -> Occurrence | None:
        """The last occurrence at or before `moment`."""
        number = (moment - self.anchor) // timedelta(seconds=self.seconds)
        return self._number(number) if number >= 0 else None

    def count(self, first: datetime, last: datetime) -> int:
        """How many occurrences lie from `first` to `last`, both included."""
        step = timedelta(seconds=self.seconds)
        before = (first - self.anchor - timedelta(microseconds=1)) // step
        return int((last - self.anchor) // step - before)

    def lost(self, first: datetime, last: datetime) -> list[Lost]:
        """Real time has no gaps."""
        return []


@dataclass(frozen=True)
class Cron:
    """A cron expression in a zone."""

    expression: str
    zone: str

    @cached_property
    def tz(self) -> tzinfo:
        """The zone."""
        return zone_of(self.zone)

    @cached_property
    def fields(self) -> CronSim:
        """The parsed fields; it is asked which days match, never stepped."""
        return CronSim(self.expression, datetime(2000, 1, 1))

    @property
    def real_time(self) -> bool:
        """Whether the instant decides: minute or hour begins with a star."""
        minute, hour = self.expression.split()[:2]
        return minute.startswith("*") or hour.startswith("*")

    def after(self, moment: datetime) -> Occurrence | None:
        """The first occurrence after `moment`; None where the next fifty years have none."""
        for wall in CronSim(self.expression, moment.astimezone(self.tz)):
            at = wall.astimezone(UTC)
            if at > moment:  # in the second pass of a repeated hour the first pass comes up again
                return self._occurrence(at)
        return None

    def latest(self, moment: datetime) -> Occurrence | None:
        """The last occurrence at or before `moment`."""
        day = moment.astimezone(self.tz).date()
        for back in range(FARTHEST):
            found = [at for at in self._of_day(day - back * DAY) if at <= moment]
            if found:
                return self._occurrence(max(found))
        return None

    def count(self, first: datetime, last: datetime) -> int:
        """How many occurrences lie from `first` to `last`, both included: whole days are multiplied, not walked."""
        begin, end = first.astimezone(self.tz).date(), last.astimezone(self.tz).date()
        total, day = 0, begin
        while day <= end:
            if begin < day < end and self._even(day):
                total += len(self.fields.hours) * len(self.fields.minutes) if self._matches(day) else 0
            else:
                total += sum(first <= at <= last for at in self._of_day(day))
            day += DAY
        return total

    def lost(self, first: datetime, last: datetime) -> list[Lost]:
        """Where the instant decides, planned wall times of a gap at whose place in real time nothing runs either."""
        if not self.real_time:
            return []
        found = []
        for at, begin, end in self._gaps(first, last):
            walls = [wall for wall in self._walls(begin, end) if not self._made_after(wall, end - begin)]
            if walls:
                local = f"{walls[0]:%Y-%m-%dT%H:%M} {self.zone}"
                found.append(Lost(at=at - SECOND, local=local, count=len(walls)))
        return found

    def _made_after(self, wall: datetime, gap: timedelta) -> bool:
        """Whether every hour is named and the run at that instant has another wall time: nothing is lost then."""
        return len(self.fields.hours) == 24 and self._planned(wall + gap)

    def _gaps(self, first: datetime, last: datetime) -> Iterator[tuple[datetime, datetime, datetime]]:
        """(instant, wall time at which it begins, wall time at which it ends) of each gap between two instants.

        Looked for a day at a time, by the offsets at its two ends: no zone puts its clock forward and back within one.
        """
        begin = first
        while begin < last:
            end = min(begin + DAY, last)
            gap = self._offset(end) - self._offset(begin)
            if gap > timedelta():
                change = self._change(begin, end)
                wall = change.astimezone(self.tz).replace(tzinfo=None, fold=0)
                yield change, wall - gap, wall
            begin = end

    def _change(self, begin: datetime, end: datetime) -> datetime:
        """The first second at which the offset is that of `end`."""
        before, after = begin.replace(microsecond=0), end.replace(microsecond=0)
        while after - before > SECOND:
            middle = (before + (after - before) / 2).replace(microsecond=0)
            if self._offset(middle) == self._offset(end):
                after = middle
            else:
                before = middle
        return after

    def _offset(self, at: datetime) -> timedelta:
        return at.astimezone(self.tz).utcoffset() or timedelta()

    def _walls(self, begin: datetime, end: datetime) -> Iterator[datetime]:
        """Planned wall times from `begin` (included) to `end` (not)."""
        for wall in CronSim(self.expression, begin - SECOND):
            if wall >= end:
                return
            yield wall

    def _planned(self, wall: datetime) -> bool:
        return wall.hour in self.fields.hours and wall.minute in self.fields.minutes and self._matches(wall.date())

    def _matches(self, day: date) -> bool:
        return day.month in self.fields.months and bool(self.fields.match_day(day))

    def _start(self, day: date) -> datetime:
        return datetime.combine(day, time(), tzinfo=self.tz).astimezone(UTC)

    def _even(self, day: date) -> bool:
        """Whether the zone's offset does not change within the day, nor at its beginning."""
        start, end = self._start(day), self._start(day + DAY)
        offsets = {at.astimezone(self.tz).utcoffset() for at in (start - SECOND, start, end - SECOND)}
        return end - start == DAY and len(offsets) == 1

    def _of_day(self, day: date) -> list[datetime]:
        """The instants of one local day."""
        start, end = self._start(day), self._start(day + DAY)
        if self._even(day):
            if not self._matches(day):
                return []
            hours, minutes = sorted(self.fields.hours), sorted(self.fields.minutes)
            return [start + timedelta(hours=h, minutes=m) for h in hours for m in minutes]
        found, at = [], start - SECOND
        while (one := self.after(at)) is not None and one.at < end:
            found.append(one.at)
            at = one.at
        return found

    def _occurrence(self, at: datetime) -> Occurrence:
        wall = at.astimezone(self.tz)
        if self.real_time:
            return Occurrence(at=at, local=f"{wall.isoformat(timespec='minutes')} {self.zone}")
        planned, shifted = wall.replace(tzinfo=None, fold=0), False
        gap = self._offset(at) - self._offset(at - SECOND)
        if gap > timedelta() and (first := next(self._walls(planned - gap, planned), None)) is not None:
            planned, shifted = first, True  # also where a planned time stands at the end of the gap: it is one run
        return Occurrence(at=at, local=f"{planned:%Y-%m-%dT%H:%M} {self.zone}", shifted=shifted)


def in_words(kind: str, expression: str) -> str:
    """An expression as a person would say it."""
    if kind == JobKind.INTERVAL:
        return f"Every {expression.removeprefix('every ')}"
    try:
        return str(CronSim(expression, datetime(2000, 1, 1)).explain())
    except CronSimError:
        return expression


def upcoming(times: Plan, moment: datetime, number: int) -> list[Occurrence]:
    """The next occurrences after `moment`."""
    found: list[Occurrence] = []
    while len(found) < number and (one := times.after(found[-1].at if found else moment)) is not None:
        found.append(one)
    return found
