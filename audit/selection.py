"""Which entries a reader asks for: the same filters and bounds for the page and for the export."""

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from django.contrib.postgres.expressions import ArraySubquery
from django.db.models import F, Func, OuterRef, QuerySet, TextField, Value
from django.db.models.functions import JSONObject

from audit.models import Entry, Opening

TENANT = re.compile(r"[a-z0-9_.:-]{1,64}\Z")  # as the table has it
FILTERS = ("subject", "actor", "event", "reason_code", "batch")


class InvalidSelection(ValueError):
    """The reader asked for something that has no meaning; the message is for the reader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Entries of one tenant, in whole days of the reader's zone, and equal to each filter that is given.

    `first_day` is included, `end_day` is not (half-open); None leaves that side open. Raises InvalidSelection.
    """

    tenant: str
    first_day: date | None = None
    end_day: date | None = None
    zone: str = "UTC"
    subject: str | None = None
    actor: str | None = None
    event: str | None = None
    reason_code: str | None = None
    batch: str | None = None

    def __post_init__(self) -> None:
        zone_of(self.zone)
        if not TENANT.match(self.tenant):
            raise InvalidSelection("A tenant's name has small letters, digits and _ . : - only, 64 at most.")
        if self.first_day and self.end_day and self.end_day < self.first_day:
            raise InvalidSelection(f"The range ends on {self.end_day}, before it begins on {self.first_day}.")

    @property
    def since(self) -> datetime | None:
        return day_start(self.first_day, zone=self.zone) if self.first_day else None

    @property
    def until(self) -> datetime | None:
        return day_start(self.end_day, zone=self.zone) if self.end_day else None

    @property
    def filters(self) -> dict[str, str]:
        """The filters that are given, by name."""
        return {name: getattr(self, name) for name in FILTERS if getattr(self, name) is not None}

    def entries(self) -> QuerySet[Entry]:
        """The entries, in no order."""
        bounds: dict[str, Any] = {"at__gte": self.since, "at__lt": self.until}
        given = {name: value for name, value in bounds.items() if value is not None}
        return Entry.objects.filter(tenant=self.tenant, **given, **self.filters)


def zone_of(name: str) -> ZoneInfo:
    """The zone of that IANA name. Raises InvalidSelection."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidSelection(
            f"There is no time zone called {name!r}: use an IANA name such as Europe/Berlin."
        ) from None


def day_start(day: date, *, zone: str) -> datetime:
    """The first instant of that day there, in UTC.

    Where midnight is skipped, the offset before the change gives the instant of the change, which is the day's first;
    where midnight comes twice, the first one counts. Both are what fold=0 means.
    """
    return datetime.combine(day, time.min, tzinfo=zone_of(zone)).astimezone(UTC)


def instant(at: datetime) -> str:
    """A time as it stands in the hashed bytes: UTC with microseconds."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def page(selection: Selection, *, before: int | None = None, size: int = 50) -> list[Entry]:
    """One page, newest first, of the entries with an id below `before`; openings are loaded with them.

    The id of the last one is the next `before`; fewer than `size` means that there are no more.
    """
    entries = selection.entries() if before is None else selection.entries().filter(id__lt=before)
    return list(entries.order_by("-id").prefetch_related("openings")[:size])


def with_openings(entries: QuerySet[Entry]) -> QuerySet[Entry, Any]:
    """Add `openings_json`: a list of `{field, salt (hex), value}` for every entry, in the same statement."""
    salt = Func(F("salt"), Value("hex"), function="encode", output_field=TextField())
    each = Opening.objects.filter(entry=OuterRef("pk")).order_by("field")
    opened = each.values(json=JSONObject(field="field", salt=salt, value="value"))
    return entries.annotate(openings_json=ArraySubquery(opened))
