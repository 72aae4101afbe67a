"""Base of providers whose effects are rows of this very database.

A local effect commits in one transaction with its settlement, so it can never be half done: a worker that dies anywhere
leaves both or neither. `apply` is given a cursor inside that transaction and the call; whatever it writes through the
cursor, or through Django's ORM on the default connection, is part of it. Whatever it does by other means is not: no
network call, no second connection, no file. A message to the outside goes through `outbox.put()`.

The transaction is the ledger's to end. Django refuses `commit()` and `rollback()` inside it; statements that end or
begin a transaction are refused here by the leash, and whatever gets past both the database itself refuses to commit
(sql/local.sql).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections

from .base import ActionSpec, Call, OwnFault, Receipt

_opened: ContextVar[str] = ContextVar("opened", default="")

# Savepoints are not meant: they are how a nested atomic block works. A word that ends a transaction counts at the
# beginning of the text and behind a semicolon, for one string may hold several statements.
_ENDS = re.compile(
    r"(?:\A|;)(?:\s|--[^\n]*(?:\n|\Z)|/\*.*?\*/|;)*"
    r"(commit|abort|rollback(?!\s+(?:(?:work|transaction)\s+)?to\b)|prepare\s+transaction)\b",
    re.I | re.S,
)
_BEGINS = re.compile(r"\A(?:\s|--[^\n]*(?:\n|\Z)|/\*.*?\*/|;)*(begin|start\s+transaction|end)\b", re.I | re.S)


class SqlProvider:
    """What all its actions do is done in this database. Each of them declares `repeat=Repeat.LOCAL`."""

    name: str = ""
    account: str = "here"
    actions: Mapping[str, ActionSpec] = {}

    def apply(self, call: Call, cursor: Any) -> Receipt:
        """Do it, with `cursor` (Django's, of the default connection). Called once an attempt.

        Raise Rejected, Invalid or Unauthorized where it must not be done, Unavailable where it may be tried later,
        OwnFault where a person must repair something first. Any other exception rolls back as well, and is tried
        again within the budget: what was rolled back is proven not applied.
        """
        raise NotImplementedError(f"{type(self).__name__} has no apply()")

    def perform(self, call: Call) -> Receipt:
        """What the ledger calls. Raises OwnFault outside the transaction that settles it."""
        if not _opened.get():
            raise OwnFault(
                f"{self.name}/{call.action} is a local effect: only its settlement's transaction may hold it."
            )
        with connections[DEFAULT_DB_ALIAS].cursor() as cursor:
            return self.apply(call, cursor)


class _Leash:
    """Refuses statements that would end the transaction, before they are sent; and remembers that it did."""

    def __init__(self, action: str) -> None:
        self.action, self.refused = action, ""

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        text = sql if isinstance(sql, str) else str(sql)
        found = _ENDS.search(text) or _BEGINS.search(text)
        if found:
            word = " ".join(found[1].upper().split())
            self.refused = f"{self.action} tried to {word}: its transaction is ended by its settlement alone."
            raise OwnFault(self.refused)
        return execute(sql, params, many, context)


@contextmanager
def opened(action: str) -> Iterator[None]:
    """Let `action` ("desk/outcome.record") act in the transaction that is open on the default connection.

    Raises OwnFault where it tried to end that transaction, also if it took no notice of the refusal.
    """
    leash, token = _Leash(action), _opened.set(action)
    try:
        with connections[DEFAULT_DB_ALIAS].execute_wrapper(leash):
            yield
    finally:
        _opened.reset(token)
    if leash.refused:
        raise OwnFault(leash.refused)
