"""What an action does not list as shown is encrypted at rest.

AES-256-GCM with a random nonce, under keys derived from AFTERCALL_SEAL_KEYS: the first one seals, all of them open, so
that a key can be rotated by putting a new one in front. One key may seal 2^32 values (NIST SP 800-38D, 8.3). Tokens
without the mark are Fernet's, which sealed before; they are opened with the same keys.
"""

from __future__ import annotations

import json
import os
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from functools import lru_cache

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings

from .keys import canonical
from .providers.base import Json

MARK = "2."  # the form of the token; part of what is authenticated
NONCE = 12  # bytes
_PURPOSE = b"aftercall sealed fields"


class CannotOpen(Exception):
    """A sealed value whose key is not among AFTERCALL_SEAL_KEYS."""


@lru_cache(maxsize=4)
def _ciphers(seal_keys: tuple[str, ...]) -> tuple[AESGCM, ...]:
    return tuple(
        AESGCM(HKDF(algorithm=SHA256(), length=32, salt=None, info=_PURPOSE).derive(urlsafe_b64decode(key)))
        for key in seal_keys
    )


@lru_cache(maxsize=4)
def _fernet(seal_keys: tuple[str, ...]) -> MultiFernet:
    return MultiFernet([Fernet(key) for key in seal_keys])


def seal(value: Json) -> str:
    """Encrypt a JSON object."""
    return seal_bytes(canonical(value))


def seal_bytes(value: bytes) -> str:
    """Encrypt bytes into an ASCII token."""
    nonce = os.urandom(NONCE)
    sealed = _ciphers(tuple(settings.AFTERCALL_SEAL_KEYS))[0].encrypt(nonce, value, MARK.encode())
    return MARK + urlsafe_b64encode(nonce + sealed).decode()


def open_bytes(token: str | bytes) -> bytes:
    """Decrypt a token. Raises CannotOpen where no configured key fits."""
    text = token.decode("ascii", "replace") if isinstance(token, bytes) else token
    keys = tuple(settings.AFTERCALL_SEAL_KEYS)
    opened = _opened(text.removeprefix(MARK), keys) if text.startswith(MARK) else _opened_by_fernet(text, keys)
    if opened is None:
        raise CannotOpen("no key in AFTERCALL_SEAL_KEYS opens this value; put the key that sealed it back")
    return opened


def _opened(text: str, keys: tuple[str, ...]) -> bytes | None:
    try:
        sealed = urlsafe_b64decode(text)
    except ValueError:
        return None
    for cipher in _ciphers(keys):
        try:
            return cipher.decrypt(sealed[:NONCE], sealed[NONCE:], MARK.encode())
        except (InvalidTag, ValueError):
            continue
    return None


def _opened_by_fernet(text: str, keys: tuple[str, ...]) -> bytes | None:
    try:
        return _fernet(keys).decrypt(text)
    except InvalidToken:
        return None


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
