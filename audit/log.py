"""Writing to the audit log: one decision, one row, in the transaction of the decision."""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from django.db import connections

from audit.canonical import Unwritable, canonical, plain

ACTOR_KINDS = frozenset({"person", "system", "worker", "agent"})
APPEND = "SELECT audit_append(%s, %s, %s, %s, %s, %s, %s, %s::jsonb)"
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """Who decided, and why.

    `actor` and `on_behalf_of` are ids (`person:7`, `worker:4f2a`), for they cannot be erased. `actor_name` and `reason`
    enter the bytes as salted commitments only. `evidence` is the SHA-256 (hex) of the evidence's bytes. `details` holds
    text, integers, booleans, null, lists and objects of them: never a secret, never a raw payload, never a float.
    """

    actor: str
    actor_kind: str
    actor_name: str = ""
    on_behalf_of: str | None = None
    reason_code: str
    reason: str = ""
    evidence: str | None = None
    batch: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


def body(fact: Fact) -> tuple[str, list[dict[str, str]]]:
    """Return the RFC 8785 text of the fact, and the openings of its commitments: `{field, salt (hex), value}` each.

    Raises Unwritable when something in the fact has no exact form.
    """
    _check(fact)
    openings = _openings(fact)
    # The members stand in the order of RFC 8785; each value is canonical by itself.
    return (
        f'{{"actor":{_text("actor", fact.actor)},"actor_kind":"{fact.actor_kind}"'
        f',"batch":{_text("batch", fact.batch)}'
        f',"commitments":{_commitments(openings) if openings else "{}"}'
        f',"details":{canonical(plain(fact.details)) if fact.details else "{}"}'
        f',"evidence":{_text("evidence", fact.evidence)}'
        f',"on_behalf_of":{_text("on_behalf_of", fact.on_behalf_of)}'
        f',"reason_code":{_text("reason_code", fact.reason_code)}}}'
    ), openings


def append(
    *,
    subject: str,
    tenant: str,
    event: str,
    fact: Fact,
    from_state: str | None = None,
    to_state: str | None = None,
    version: int | None = None,
    using: str = "default",
) -> int:
    """Write one entry on the current connection, inside the transaction that is open there, and return its id.

    `version` is the subject's version after a move, and None where nothing moved (a refusal, an export). The time, the
    number within the subject and the hash come from the database. The subject stays locked until the commit: take
    several subjects in one order everywhere, and no more than some thousands in one transaction. Raises Unwritable, or
    the database's error when a name does not have the form that the table allows.
    """
    text, openings = body(fact)
    with connections[using].cursor() as cursor:
        cursor.execute(APPEND, (subject, tenant, event, from_state, to_state, version, text, openings_json(openings)))
        return int(cursor.fetchone()[0])


def openings_json(openings: list[dict[str, str]]) -> str | None:
    """The openings as `audit_append` takes them; None where there are none."""
    return json.dumps(openings) if openings else None


def commitment(*, salt: bytes, value: str) -> str:
    """What stands in the bytes in place of a personal or free text."""
    return hashlib.sha256(salt + value.encode()).hexdigest()


def _check(fact: Fact) -> None:
    if fact.actor_kind not in ACTOR_KINDS:
        raise Unwritable(f"actor_kind is none of {', '.join(sorted(ACTOR_KINDS))}.")
    if fact.evidence is not None and not _SHA256.match(fact.evidence):
        raise Unwritable("evidence is not a SHA-256 in lower-case hex.")


def _text(name: str, value: str | None) -> str:
    if value is None:
        return "null"
    if value.isascii() and "\0" not in value:
        return encode_basestring(value)
    return canonical_text(name, value)


def canonical_text(name: str, value: str) -> str:
    """The slow way of a text that is not plain ASCII: says which field cannot be written."""
    try:
        return canonical(value)
    except Unwritable as problem:
        raise Unwritable(str(problem).replace("value", name, 1)) from None


def _openings(fact: Fact) -> list[dict[str, str]]:
    return [
        {"field": name, "salt": secrets.token_hex(16), "value": value}
        for name, value in (("actor_name", fact.actor_name), ("reason", fact.reason))
        if value and canonical_text(name, value)
    ]


def _commitments(openings: list[dict[str, str]]) -> str:
    return canonical(
        {each["field"]: commitment(salt=bytes.fromhex(each["salt"]), value=each["value"]) for each in openings}
    )
