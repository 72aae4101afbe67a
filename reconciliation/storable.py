"""What an adapter hands back, in values that every store can keep.

A provider's id may be a number beyond 2^53, a text may hold a NUL. That must not cost us the evidence: such values are
kept as text that says the same, and what cannot be said is replaced by a visible mark.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from .keys import EXACT
from .providers.base import Finding, Json, Receipt

DEEP = 20
TOO_DEEP = "[too deep]"


def receipt(answer: Receipt) -> Receipt:
    """The receipt with every value storable."""
    return Receipt(
        status=str(answer.status),
        provider_operation_id=_id(answer.provider_operation_id),
        result=_members(answer.result),
        observed=_members(answer.observed),
        cost=cost(answer.cost),
        replayed=answer.replayed,
    )


def finding(seen: Finding) -> Finding:
    """The finding with every value storable."""
    return replace(
        seen,
        provider_operation_id=_id(seen.provider_operation_id),
        observed=_members(seen.observed),
        candidates=tuple(_members(candidate) for candidate in seen.candidates),
        note=_text(seen.note),
        cost=cost(seen.cost),
    )


def cost(said: Any) -> int:
    """Minor units; what is no whole number, or more than any reader keeps, is none."""
    return said if type(said) is int and abs(said) <= EXACT else 0


def _id(value: Any) -> str | None:
    return None if value is None else _text(value)


def _members(value: Any) -> Json:
    return {_text(name): _kept(one) for name, one in value.items()} if isinstance(value, dict) else {}


def _kept(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) <= EXACT else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth >= DEEP:
        return TOO_DEEP
    if isinstance(value, dict):
        return {_text(name): _kept(one, depth + 1) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_kept(one, depth + 1) for one in value]
    return _text(value)


def _text(value: Any) -> str:
    if type(value) is str and value.isascii() and "\0" not in value:
        return value
    return str(value).replace("\0", "\ufffd").encode("utf-8", "replace").decode()
