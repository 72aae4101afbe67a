"""A business of its own in the ledger's database: one table, and the local effects that write it.

    def test_an_entry_is_written_once(book):
        book.does(lambda call, cursor: 1 / 0)            # what the next effect does after its row is written
        ...
        assert book.rows(reference=key) == 1             # rows that are committed, as another connection sees them

The table (tests/database.py) takes any number of rows for one reference, so that a second effect would be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction

from reconciliation import outbox, registry
from reconciliation.actors import Actor
from reconciliation.claims import Intent
from reconciliation.policy import RetryPolicy
from reconciliation.providers.base import ActionSpec, Call, Json, Receipt, Repeat
from reconciliation.providers.sql import SqlProvider
from reconciliation.workflows import Consent, Step, StepKind, Undo, Workflow
from tests.database import TestDatabase
from tests.scripted import Clerk, identity

PROVIDER = "tests.book.BOOK"
ENTRY = {"order": "1002", "amount": 4200, "currency": "USD"}


def spec(**promises: Any) -> ActionSpec:
    common = {"repeat": Repeat.LOCAL, "shown": ("id", "order", "amount", "currency"), "money": ("amount", "currency")}
    return ActionSpec(**{**common, "headline": "Enter {amount} for order {order}", **promises})


class Book(SqlProvider):
    """What the tests call `book`."""

    name = "book"
    actions = {
        "enter": spec(),
        "strike": spec(headline="Strike the entry for order {order}"),
        "tell": spec(headline="Enter {amount} for order {order} and tell the customer"),
        "brief": spec(timeout=timedelta(milliseconds=500)),
        "compared": spec(compare={"amount": "amount"}),
    }

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.calls: list[Call] = []

    def does(self, *script: Callable[[Call, Any], Any] | BaseException | None) -> None:
        """What the next effects do once their row is written; one that is an exception is raised."""
        self.script = list(script)

    def apply(self, call: Call, cursor: Any) -> Any:
        self.calls.append(call)
        entered = write(call, cursor)
        if call.action == "tell":
            outbox.put(letter_of(call), actor=DESK)
        step = self.script.pop(0) if self.script else None
        if isinstance(step, BaseException):
            raise step
        answer = step(call, cursor) if step else None
        return answer if isinstance(answer, Receipt) else receipt(call, entered)


def write(call: Call, cursor: Any) -> int:
    """The effect: one row."""
    amount = -call.request["amount"] if call.action == "strike" else call.request["amount"]
    cursor.execute(
        "INSERT INTO test_book (reference, order_id, amount) VALUES (%s, %s, %s) RETURNING id",
        [call.key, call.request["order"], amount],
    )
    (entered,) = cursor.fetchone()
    return int(entered)


def receipt(call: Call, entered: int) -> Receipt:
    shown: Json = {"id": f"b-{entered}", "amount": call.request["amount"]}
    return Receipt(provider_operation_id=f"b-{entered}", result=shown, observed=shown)


def letter_of(call: Call) -> Intent:
    """What the effect "tell" asks for: a mail to the customer, by whoever is called mail here."""
    told = identity(tenant=call.tenant, workflow_type="desk", workflow_id=call.key[:40], step="tell")
    order = call.request["order"]
    mail = {"order": order, "to": "jo@example.com", "subject": "Entered", "body": "It is in the book."}
    return Intent(identity=told, provider="mail", action="message.send_listed", request=mail)


DESK = Actor(id="agent:desk", kind="agent")


def trade(intent: Intent, *, order: str = "", reference: str = "") -> int:
    """What business code does: its own row and the message, in one transaction. Returns the message's id."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO test_book (reference, order_id, amount) VALUES (%s, '1002', 1)",
                [reference or intent.identity.workflow_id],
            )
        return outbox.put(intent, actor=DESK, order=order)


BOOK = Book()
POSTED = Workflow(
    name="posted",
    business_object=lambda claim: str(claim["order"]),
    shown=("order", "amount", "currency"),
    steps=(
        Step(
            name="enter",
            provider="book",
            action="enter",
            request=lambda facts: {name: facts.input[name] for name in ENTRY},
            undo=Undo(action="strike", request=lambda facts, result: {name: facts.input[name] for name in ENTRY}),
        ),
        Step(
            name="refund",
            provider="clerk",
            action="keyed",
            request=lambda facts: {name: facts.input[name] for name in ENTRY},
            kind=StepKind.PIVOT,
        ),
    ),
)


def entry(action: str = "enter", *, consent: Consent | None = None, **parts: Any) -> Intent:
    """The one intent of the fixed cast, as a local effect."""
    retry = RetryPolicy(attempts=parts.pop("attempts"), jitter=0.0) if "attempts" in parts else None
    request = parts.pop("request", ENTRY)
    return Intent(
        identity=identity(**{"step": "enter", **parts}), provider="book", action=action, request=request,
        consent=consent, retry=retry,
    )  # fmt: skip


def committed(connection: psycopg.Connection[Any], *, reference: str = "") -> int:
    """How many rows are committed, all of them or those of one operation key."""
    statement = "SELECT count(*) FROM test_book WHERE %s IN ('', reference)"
    row = connection.execute(statement, [reference]).fetchone()
    assert row is not None
    return int(row[0])


class Shelf:
    """The book as a test sees it."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection, self.does, self.calls = connection, BOOK.does, BOOK.calls

    def rows(self, *, reference: str = "") -> int:
        """How many rows are committed, all of them or those of one operation key."""
        return committed(self._connection, reference=reference)

    def balance(self) -> int:
        row = self._connection.execute("SELECT coalesce(sum(amount), 0) FROM test_book").fetchone()
        assert row is not None
        return int(row[0])


@pytest.fixture
def book(
    ledger_db: TestDatabase, clerk: Clerk, superuser_connection: psycopg.Connection[Any], settings: Any
) -> Iterator[Shelf]:
    """The book, empty, beside the scripted clerk."""
    settings.AFTERCALL_PROVIDERS = [*settings.AFTERCALL_PROVIDERS, PROVIDER]
    settings.AFTERCALL_WORKFLOWS = ["tests.book.POSTED"]
    registry.forget()
    BOOK.does()
    BOOK.calls.clear()
    yield Shelf(superuser_connection)
    registry.forget()
