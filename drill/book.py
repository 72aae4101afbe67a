"""Effects in the ledger's own database, for the crash sweep: a table that takes any number of rows for one key.

A local effect cannot be played in memory: what is to be seen is that its row and its settlement commit together. So a
double of such a provider really writes, and the sweep counts the committed rows from another connection. Where the
request says so it also puts a message into the outbox, in the same transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from drill.world import FAULTS, World
from reconciliation import outbox
from reconciliation.actors import Actor
from reconciliation.claims import Intent
from reconciliation.keys import Identity
from reconciliation.providers.base import ActionSpec, Call, Receipt, Repeat
from reconciliation.providers.sql import SqlProvider

TABLE = """
CREATE TABLE IF NOT EXISTS drill_book (id bigserial PRIMARY KEY, reference text NOT NULL, action text NOT NULL);
CREATE INDEX IF NOT EXISTS drill_book_reference ON drill_book (reference);
GRANT SELECT, INSERT ON drill_book TO PUBLIC;
GRANT USAGE ON drill_book_id_seq TO PUBLIC;
"""
BY_MESSAGE = "drill_outbox"  # workflow type of what the messages ask for
DESK_AGENT = Actor(id="agent:drill-desk", kind="agent")


class Desk(SqlProvider):
    """What the drill declares of a desk's own records; what is played is a double of it."""

    name = "desk"
    actions = {
        "outcome.record": ActionSpec(repeat=Repeat.LOCAL, shown=("order", "id"), compensate_with="outcome.strike"),
        "outcome.strike": ActionSpec(repeat=Repeat.LOCAL, shown=("order", "id")),
    }


DESK = Desk()


class BookDouble(SqlProvider):
    """A double of a local provider: one row an effect, and whatever fault is scripted for the call."""

    def __init__(
        self, name: str, account: str, actions: Mapping[str, ActionSpec], world: World, boundary: Callable[[str], None]
    ) -> None:
        self.name, self.account, self.actions = name, account, actions
        self.world, self.boundary = world, boundary

    def wait(self, seconds: Any) -> None:
        """Time passes in the middle of the transaction. The sweep puts its clock here."""

    def apply(self, call: Call, cursor: Any) -> Receipt:
        """Write, then do as the script says; whatever is raised takes the row with it."""
        self.boundary(f"{call.action}: in its transaction")
        waiting = self.world.script.get(call.action)
        fault = FAULTS[waiting.pop(0)] if waiting else FAULTS["no fault"]
        self.world.calls[call.key] += 1
        cursor.execute(
            "INSERT INTO drill_book (reference, action) VALUES (%s, %s) RETURNING id", [call.key, call.action]
        )
        made = {"id": f"{self.world.name}-{call.action}-{cursor.fetchone()[0]}", "status": "done"}
        if "tell" in call.request:
            outbox.put(_told(call), actor=DESK_AGENT)
        self.boundary(f"{call.action}: written, not committed")
        if fault.silent:
            self.wait(self.actions[call.action].timeout)
        if fault.error is not None:
            raise fault.error()
        seen = {**call.request, **made}
        return Receipt(provider_operation_id=made["id"], result=seen, observed=seen)


def _told(call: Call) -> Intent:
    """The message: its identity is that of the effect that asks."""
    tell, order = call.request["tell"], str(call.request["order"])
    identity = Identity(
        tenant=call.tenant, workflow_type=BY_MESSAGE, workflow_id=call.key, step=tell["action"], business_object=order
    )
    return Intent(identity=identity, provider=tell["provider"], action=tell["action"], request=tell["request"])


def rows(superuser: Any, key: str) -> int:
    """How many committed rows there are for one operation."""
    found = superuser.execute("SELECT count(*) FROM drill_book WHERE reference = %s", [key]).fetchone()
    return int(found[0])
