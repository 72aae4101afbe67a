"""Filters that show data as what it is, and times as the reader's."""

import unicodedata
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django import template
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

from console.zone import zone_of
from reconciliation import wording

register = template.Library()

# Besides control and format characters: separators that break lines, and what renders as nothing.
_INVISIBLE = {"\u2028", "\u2029", "\u115f", "\u1160", "\u3164", "\uffa0"}


def is_hidden(character: str) -> bool:
    """Whether a character would change or hide how its neighbours look: controls, bidi overrides, zero widths."""
    return unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Cn"} or character in _INVISIBLE


@register.filter
def seen(value: Any) -> SafeString:
    """Data for a page: escaped, and every character that would not be seen stands there as its code point."""
    return mark_safe("".join(_shown(character) for character in _text(value)))  # noqa: S308 - escaped by _shown


@register.filter
def seen_plain(value: Any) -> str:
    """The same for an attribute or a title, where no element can stand."""
    return "".join(f"[U+{ord(c):04X}]" if is_hidden(c) else c for c in _text(value))


def _shown(character: str) -> str:
    if character == "\n":
        return '<span class="cp">↵</span>\n'
    if is_hidden(character):
        return f'<span class="cp">U+{ord(character):04X}</span>'
    return escape(character)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


@register.filter
def clock(at: datetime | None) -> str:
    """A time in the reader's zone: `14:03:11` today, with the day before it otherwise."""
    if at is None:
        return ""
    local = timezone.localtime(at)
    today = timezone.localdate()
    if local.date() == today:
        return date_format(local, "H:i:s")
    return date_format(local, "j M H:i:s" if local.year == today.year else "j M Y H:i:s")


@register.filter
def when(at: datetime | None) -> SafeString:
    """A time as a `<time>` element with its exact instant."""
    if at is None:
        return mark_safe("")
    return mark_safe(f'<time datetime="{at.isoformat()}" title="{at.isoformat()}">{clock(at)}</time>')  # noqa: S308


@register.filter
def wall(at: datetime | None, zone: str) -> str:
    """A time by the clock of a zone, with the name of its offset: `Sun 8 Mar 2026 03:00 EDT`."""
    if at is None:
        return ""
    local = at.astimezone(zone_of(zone))
    seconds = ":s" if local.second else ""
    return f"{date_format(local, f'D j M Y H:i{seconds}')} {local.tzname()}"


@register.filter
def ago(at: datetime | None, now: datetime | None = None) -> str:
    """How long since (or until) a time."""
    return "" if at is None else wording.duration((now or timezone.now()) - at)


@register.filter
def lasting(value: timedelta) -> str:
    """A length of time in words."""
    return wording.duration(value)


@register.filter
def reason(code: str) -> str:
    """A reason code in words."""
    return wording.reason(code)


@register.filter
def held_back(code: str) -> str:
    """Why a claim was refused."""
    return wording.held_back(code)


@register.filter
def state_word(state: str) -> str:
    """The word of an operation's state."""
    return wording.state_label(state).word


@register.filter
def run_word(state: str) -> str:
    """The word of a run's state."""
    return wording.run_label(state).word


@register.filter
def slot_word(state: str) -> str:
    """What became of an expected run, in a word."""
    return wording.slot_label(state).word


@register.filter
def error(code: str) -> str:
    """An error class in words."""
    return wording.error(code)


@register.filter
def basis(code: str) -> str:
    """On what an outcome rests, in words."""
    return wording.BASES.get(code, code)


@register.filter
def amount(minor: int, currency: str) -> str:
    """Money from minor units."""
    return wording.money(minor, currency)


@register.filter
def item(values: Any, name: str) -> Any:
    """A member of a mapping by a name that is itself a variable."""
    return values.get(name)


@register.filter
def item_or(values: Any, name: str) -> Any:
    """The same where the mapping itself may be missing; empty text then."""
    return values.get(name, "") if values else ""


@register.filter
def short(value: str, size: int = 14) -> str:
    """The beginning of a long identifier."""
    return value if len(value) <= size else value[:size] + "…"


@register.simple_tag(takes_context=True)
def href(context: Any, **changes: Any) -> str:
    """This page's address with some parameters changed (None removes one); paging starts again."""
    parameters = {k: v for k, v in context["request"].GET.items() if k not in {"after", "before", "done"} and v}
    for name, value in changes.items():
        if value in (None, ""):
            parameters.pop(name, None)
        else:
            parameters[name] = value
    return "?" + urlencode(parameters)


@register.simple_tag(takes_context=True)
def set_href(context: Any, name: str, value: str) -> str:
    """The same with one parameter whose name is a variable."""
    return href(context, **{name: value})


@register.simple_tag(takes_context=True)
def remove_href(context: Any, name: str) -> str:
    """The same without that parameter."""
    return href(context, **{name: None})
