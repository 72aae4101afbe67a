"""Pages by key instead of by offset: page one thousand costs what page one costs, and no row is skipped or shown twice
because others came in between."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.core.exceptions import BadRequest
from django.db.models import Q, QuerySet
from django.http import QueryDict


@dataclass(frozen=True)
class Page:
    """Rows, and the cursors to both sides ("" where there is nothing). `anchor` is the first page's own moment."""

    rows: list[Any]
    after: str = ""
    before: str = ""
    anchor: datetime | None = None


@dataclass(frozen=True)
class Cursor:
    """Where a page starts: the values of the order's fields at the row beside it."""

    values: tuple[Any, ...]
    backwards: bool
    anchor: datetime | None


def read(query: QueryDict, *, kinds: Sequence[type]) -> Cursor | None:
    """The cursor in `?after=` or `?before=`, a value of each kind. Raises BadRequest when it is not one of ours."""
    text = query.get("after") or query.get("before")
    if not text:
        return None
    try:
        anchor, *values = (_thaw(value) for value in json.loads(base64.urlsafe_b64decode(text.encode() + b"==")))
    except (ValueError, binascii.Error, TypeError, KeyError, RecursionError) as error:
        raise BadRequest("The address names no page of this list; start again at its first page.") from error
    if [type(value) for value in values] != list(kinds) or not isinstance(anchor, datetime | None):
        raise BadRequest("The address names a page of another list; start again at the first page.")
    return Cursor(tuple(values), backwards=not query.get("after"), anchor=anchor)


def page(
    rows: QuerySet[Any], *, order: Sequence[str], cursor: Cursor | None, size: int, anchor: datetime | None = None
) -> Page:
    """One page of `rows` in `order` (names that are never null, "-" for descending, the last one unique)."""
    backwards = bool(cursor and cursor.backwards)
    towards = [_turned(name) for name in order] if backwards else list(order)
    if cursor:
        rows = rows.filter(_beyond(towards, cursor.values))
    found = list(rows.order_by(*towards)[: size + 1])
    more, found = len(found) > size, found[:size]
    if backwards:
        found.reverse()
    before = more if backwards else cursor is not None
    after = cursor is not None if backwards else more
    ends = (_write(row, order, anchor) for row in (found[-1], found[0])) if found else ("", "")
    last, first = ends
    return Page(rows=found, after=last if after else "", before=first if before else "", anchor=anchor)


def _turned(name: str) -> str:
    return name[1:] if name.startswith("-") else f"-{name}"


def _beyond(order: Sequence[str], values: Sequence[Any]) -> Q:
    """Rows after `values`. The first field alone is repeated as a bound, so that an index on it can start there."""
    condition, same = Q(), Q()
    for name, value in zip(order, values, strict=True):
        field, compare = name.lstrip("-"), "lt" if name.startswith("-") else "gt"
        condition |= same & Q(**{f"{field}__{compare}": value})
        same &= Q(**{field: value})
    first = order[0]
    bound = Q(**{f"{first.lstrip('-')}__{'lte' if first.startswith('-') else 'gte'}": values[0]})
    return bound & condition


def _write(row: Any, order: Sequence[str], anchor: datetime | None) -> str:
    values = [anchor, *(getattr(row, name.lstrip("-")) for name in order)]
    return base64.urlsafe_b64encode(json.dumps([_freeze(value) for value in values]).encode()).decode().rstrip("=")


def _freeze(value: Any) -> Any:
    return {"t": value.isoformat()} if isinstance(value, datetime) else value


def _thaw(value: Any) -> Any:
    if isinstance(value, str) and "\0" in value.encode().decode():  # half a surrogate pair is no text either
        raise ValueError("no stored text holds a NUL")
    return moment(value["t"]) if isinstance(value, dict) else value


def moment(text: str) -> datetime:
    """The moment that an address names, in UTC. Raises ValueError where it is none that PostgreSQL could compare."""
    try:
        at = datetime.fromisoformat(text)
        if at.tzinfo is None:
            raise ValueError("a moment without its zone is none")
        return at.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("beyond all calendars") from error
