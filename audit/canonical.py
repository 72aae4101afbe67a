"""The one byte form of what is hashed: RFC 8785, for the values that the audit log allows."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
import rfc8785

# RFC 8785 numbers are IEEE doubles: beyond this an integer would not come back as it went in.
LARGEST = 2**53 - 1
_write = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode
_FAST = orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER
_LEAVES = frozenset({str, int, bool, type(None)})


class Unwritable(ValueError):
    """A value that the audit log refuses, with the path to it; the message never repeats the value."""


def canonical(value: Any) -> str:
    """Return the RFC 8785 text of `value`.

    Allowed are str, int, bool, None and lists and mappings of them, with text as keys. Raises Unwritable for
    anything else: floats, integers that a double cannot hold, NUL and lone surrogates.
    """
    return _canonical_of_common(value) or _canonical_of_any(value)


def _canonical_of_common(value: Any) -> str:
    """The fast way of nearly every value; "" where the slow way must look, and say what is wrong."""
    if type(value) not in _LEAVES and not _is_common(value):
        return ""
    try:
        text = orjson.dumps(value, option=_FAST).decode()
    except TypeError:
        return ""
    return text if text.isascii() and "\\u0000" not in text else ""


def _is_common(value: Any) -> bool:
    """Whether it is built of nothing but plain JSON types: orjson would take dates, and floats, as well."""
    kind = type(value)
    if kind is not dict and kind is not list and kind is not tuple:
        return False
    members: Iterable[Any] = value.values() if kind is dict else value
    if _LEAVES.issuperset(map(type, members)):
        return True
    return all(type(one) in _LEAVES or _is_common(one) for one in members)


def _canonical_of_any(value: Any) -> str:
    _check(value, "value")
    text = _write(value)
    # Keys sort by UTF-16 code units there and by code points here: the same as long as all is ASCII.
    return text if text.isascii() else rfc8785.dumps(value).decode()


def _check(value: Any, path: str) -> None:
    if value is None or value is True or value is False:
        return
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, int):
        _check_integer(value, path)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            _check(item, f"{path}[{place}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_member(key, item, path)
    else:
        kind = type(value).__name__
        raise Unwritable(f"{path} is a {kind}: only text, integers, true, false, null, lists and objects are written.")


def _check_member(key: Any, value: Any, path: str) -> None:
    if not isinstance(key, str):
        raise Unwritable(f"{path} has a key that is not text.")
    _check_text(key, f"a key of {path}")
    _check(value, f"{path}.{key}")


def _check_text(value: str, path: str) -> None:
    if "\0" in value:
        raise Unwritable(f"{path} holds a NUL character, which PostgreSQL cannot store.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Unwritable(f"{path} holds a lone surrogate, which has no UTF-8 form.") from None


def _check_integer(value: int, path: str) -> None:
    if not -LARGEST <= value <= LARGEST:
        raise Unwritable(f"{path} is an integer beyond 2^53 - 1: write it as text.")


def plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping of any kind as the dict that `canonical` takes."""
    return value if isinstance(value, dict) else dict(value)
