"""The reader's time zone: a cookie that the browser sets from its own clock, UTC where there is none."""

from collections.abc import Callable
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from django.http import HttpRequest, HttpResponse
from django.utils import timezone

COOKIE = "zone"


def reader_zone(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    """Middleware: times on pages are the reader's. Decisions never look at this."""

    def middleware(request: HttpRequest) -> HttpResponse:
        with timezone.override(zone_of(request.COOKIES.get(COOKIE, "UTC"))):
            return get_response(request)

    return middleware


def zone_of(name: str) -> ZoneInfo:
    """The zone of an IANA name; UTC for one that does not exist, for a cookie is not to break a page."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return ZoneInfo("UTC")
