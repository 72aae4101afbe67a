"""Identity -> key, request -> fingerprint.

Both start from the RFC 8785 form, so that the same facts give the same bytes whatever wrote them. Identity fields are
refused unless they are in Unicode NFC (RFC 8785 itself must not normalise): two spellings of one name would be two
keys and two effects. Request values are never rewritten.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import rfc8785
from django.conf import settings

from audit.canonical import Unwritable
from audit.canonical import canonical as plain_canonical

from .providers.base import Json

LONGEST = 200  # characters in one identity field: what a B-tree entry and a person can hold
TENANT = re.compile(r"[a-z0-9_.:-]{1,64}")
EXACT = 2**53 - 1  # integers beyond it are not the same number in every JSON implementation (RFC 8785 3.2.2.3)


class InvalidField(ValueError):
    """A field that cannot be accepted. `field` names it; the text says what is wrong and what would be right."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What makes an operation this operation. Numbers and booleans are values of their own; null and blank are none."""

    tenant: str
    workflow_type: str
    workflow_id: str
    step: str
    business_object: str | int | bool
    intent_version: int = 1

    def __post_init__(self) -> None:
        for name in _LINEAGE:
            _check_part(name, getattr(self, name))
        _check_version(self.intent_version)
        if not TENANT.fullmatch(self.tenant):
            raise InvalidField("tenant", "must be 1 to 64 of a-z, 0-9, '_', '.', ':' and '-'")

    @cached_property
    def lineage(self) -> Json:
        """The identity without its version: all versions of one intent share it."""
        return {name: getattr(self, name) for name in _LINEAGE}


_LINEAGE = tuple(field.name for field in fields(Identity) if field.name != "intent_version")


def _check_version(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**31 - 1:
        raise InvalidField("intent_version", f"must be a whole number from 1 to {2**31 - 1}")


def _check_part(name: str, value: Any) -> None:
    if type(value) is str and 0 < len(value) <= LONGEST and value.isascii() and value.isprintable():
        if value.isspace():
            raise InvalidField(name, "is blank; it must name something")
        return  # nearly all of them; what follows can refuse no such text
    if name == "business_object" and isinstance(value, bool | int):
        if abs(value) > EXACT:
            raise InvalidField(name, f"must lie within ±{EXACT}; send larger numbers as text")
        return
    if value is None:
        raise InvalidField(name, "is missing; it must name something")
    if not isinstance(value, str):
        raise InvalidField(
            name, "must be text" + (", a whole number or a boolean" if name == "business_object" else "")
        )
    if not any(c.isprintable() and not c.isspace() for c in value):
        raise InvalidField(name, "is blank; it must name something")
    if len(value) > LONGEST:
        raise InvalidField(name, f"is longer than {LONGEST} characters")
    if not unicodedata.is_normalized("NFC", value):
        raise InvalidField(name, "is not in Unicode NFC; normalise it before it is sent, so that one name has one key")
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in value):
        raise InvalidField(name, "holds a control character or half of a surrogate pair")


def canonical(value: Any, *, field: str = "request") -> bytes:
    """The RFC 8785 form of `value`.

    Raises InvalidField for what JSON cannot hold exactly: NaN, Infinity, integers beyond 2^53 - 1, lone surrogates.
    """
    try:
        return plain_canonical(value).encode()
    except (Unwritable, UnicodeEncodeError, RecursionError):
        return _canonical_of_any(value, field)


def _canonical_of_any(value: Any, field: str) -> bytes:
    """The slow way: takes numbers with a fraction, and says what cannot be taken."""
    try:
        return rfc8785.dumps(value)
    except rfc8785.IntegerDomainError as error:
        raise InvalidField(field, f"holds a whole number beyond ±{EXACT}; send it as text") from error
    except rfc8785.FloatDomainError as error:
        raise InvalidField(field, "holds NaN or Infinity, which JSON has no form for") from error
    except (rfc8785.CanonicalizationError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidField(field, "cannot be written as JSON (RFC 8785)") from error


def parse(text: str | bytes, *, field: str = "request") -> Any:
    """Read JSON strictly: a duplicate member, NaN or Infinity is refused instead of being chosen from."""
    try:
        return json.loads(text, object_pairs_hook=_members_once(field), parse_constant=_no_constant(field))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidField(field, "is not JSON") from error


def _members_once(field: str) -> Any:
    def build(pairs: list[tuple[str, Any]]) -> Json:
        built = dict(pairs)
        if len(built) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidField(field, f"holds the member {twice!r} twice; which one is meant cannot be known")
        return built

    return build


def _no_constant(field: str) -> Any:
    def refuse(constant: str) -> None:
        raise InvalidField(field, f"holds {constant}, which JSON has no form for")

    return refuse


@lru_cache(maxsize=4)
def _secret(purpose: str, secret: bytes) -> bytes:
    return hmac.digest(secret, purpose.encode(), "sha256")


def _keyed(purpose: str, message: bytes) -> str:
    return hmac.digest(_secret(purpose, settings.AFTERCALL_KEY_SECRET), message, "sha256").hex()


def operation_key(identity: Identity) -> str:
    """The idempotency key of an operation. Derived once, stored, never recomputed."""
    whole = {**identity.lineage, "intent_version": identity.intent_version}
    return "ac1-" + _keyed("operation key", canonical(whole, field="identity"))


def lineage_hash(identity: Identity) -> bytes:
    """32 bytes that all intent versions of one identity share; with the version they are unique in the ledger."""
    return hashlib.sha256(canonical(identity.lineage, field="identity")).digest()


def fingerprint(*, provider: str, account: str, action: str, request: Json, volatile: Iterable[str] = ()) -> str:
    """Keyed hash of what would be sent. Keyed, so that a low-entropy secret in it cannot be guessed."""
    left_out = frozenset(volatile)
    kept: Mapping[str, Any] = {k: v for k, v in request.items() if k not in left_out} if left_out else request
    whole = {"account": account, "action": action, "provider": provider, "request": kept}
    return "f1-" + _keyed("fingerprint", canonical(whole))
