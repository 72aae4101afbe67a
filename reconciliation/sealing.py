"""What an action does not list as shown is encrypted at rest.

Fernet tokens (AES-128-CBC with HMAC-SHA256) under the keys of AFTERCALL_SEAL_KEYS: the first one seals, all of them
open, so that a key can be rotated by putting a new one in front.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache

import orjson
from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings

from .keys import canonical
from .providers.base import Json


class CannotOpen(Exception):
    """A sealed value whose key is not among AFTERCALL_SEAL_KEYS."""


@lru_cache(maxsize=4)
def _fernet(seal_keys: tuple[str, ...]) -> MultiFernet:
    return MultiFernet([Fernet(key) for key in seal_keys])


def seal(value: Json) -> str:
    """Encrypt a JSON object."""
    return seal_bytes(canonical(value))


def seal_bytes(value: bytes) -> str:
    """Encrypt bytes into an ASCII token."""
    return _fernet(tuple(settings.AFTERCALL_SEAL_KEYS)).encrypt(value).decode()


def open_bytes(token: str | bytes) -> bytes:
    """Decrypt a token. Raises CannotOpen where no configured key fits."""
    try:
        return _fernet(tuple(settings.AFTERCALL_SEAL_KEYS)).decrypt(token)
    except InvalidToken as error:
        raise CannotOpen("no key in AFTERCALL_SEAL_KEYS opens this value; put the key that sealed it back") from error


def split(value: Json, shown: Iterable[str]) -> tuple[str, str]:
    """(text of the shown fields, token of all others or "")."""
    names = frozenset(shown)
    hidden = {k: v for k, v in value.items() if k not in names}
    if not hidden:
        return canonical(value).decode(), ""
    return canonical({k: v for k, v in value.items() if k in names}).decode(), seal(hidden)


def join(shown: str, sealed: str) -> Json:
    """The whole value again, in order."""
    value: Json = json.loads(shown) if shown else {}
    if not sealed:
        return value
    value |= json.loads(open_bytes(sealed))
    return dict(sorted(value.items(), key=lambda item: item[0].encode("utf-16-be")))


def in_order(value: Json) -> Json:
    """The members in the order of RFC 8785, which is the order of every send and re-send: same key, same bytes."""
    ordered: Json = orjson.loads(canonical(value))
    return ordered


def hidden_names(sealed: str) -> tuple[str, ...]:
    """The names of the sealed fields, for a page that shows them masked."""
    return tuple(sorted(json.loads(open_bytes(sealed)))) if sealed else ()
