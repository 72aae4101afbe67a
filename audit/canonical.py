"""The one byte form of what is hashed: RFC 8785, for the values that the audit log allows."""

import json
from collections.abc import Mapping
from typing import Any

import rfc8785

# RFC 8785 numbers are IEEE doubles: beyond this an integer would not come back as it went in.
LARGEST = 2**53 - 1


class Unwritable(ValueError):
    """A value that the audit log refuses, with the path to it; the message never repeats the value."""


def canonical(value: Any) -> str:
    """Return the RFC 8785 text of `value`.

    Allowed are str, int, bool, None and lists and mappings of them, with text as keys. Raises Unwritable for
    anything else: floats, integers that a double cannot hold, NUL and lone surrogates.
    """
    if _check(value, "value"):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return rfc8785.dumps(value).decode()


def _check(value: Any, path: str) -> bool:
    """Refuse what has no exact form; say whether code-point order of all keys is also their UTF-16 order."""
    if value is None or value is True or value is False:
        return True
    if isinstance(value, str):
        return _check_text(value, path)
    if isinstance(value, int):
        return _check_integer(value, path)
    if isinstance(value, list | tuple):
        return all([_check(item, f"{path}[{place}]") for place, item in enumerate(value)])
    if isinstance(value, dict):
        return all([_check_member(key, item, path) for key, item in value.items()])
    raise Unwritable(f"{path} is a {type(value).__name__}: only text, integers, true, false, null, lists and objects.")


def _check_member(key: Any, value: Any, path: str) -> bool:
    if not isinstance(key, str):
        raise Unwritable(f"{path} has a key that is not text.")
    _check_text(key, path)
    return _check(value, f"{path}.{key}") and key.isascii()


def _check_text(value: str, path: str) -> bool:
    if "\0" in value:
        raise Unwritable(f"{path} holds a NUL character, which PostgreSQL cannot store.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Unwritable(f"{path} holds a lone surrogate, which has no UTF-8 form.") from None
    return True


def _check_integer(value: int, path: str) -> bool:
    if not -LARGEST <= value <= LARGEST:
        raise Unwritable(f"{path} is an integer beyond 2^53 - 1: write it as text.")
    return True


def plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping of any kind as the dict that `canonical` takes."""
    return value if isinstance(value, dict) else dict(value)
