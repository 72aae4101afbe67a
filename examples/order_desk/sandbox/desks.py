"""What each sandbox provider offers, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Create:
    """`POST /<collection>` makes one object. `keyed` ones honour `Idempotency-Key`."""

    action: str
    collection: str
    kind: str
    prefix: str
    fields: Mapping[str, type]
    keyed: bool = False
    status: str = "created"


@dataclass(frozen=True, kw_only=True)
class Change:
    """`POST /<collection>/{id}/<verb>` sets a status; the second time it is the same as the first."""

    action: str
    collection: str
    verb: str
    kind: str
    status: str
    keyed: bool = True


@dataclass(frozen=True, kw_only=True)
class Desk:
    name: str
    creates: tuple[Create, ...]
    changes: tuple[Change, ...] = ()
    searchable: frozenset[str] = frozenset()  # collections with `GET /<collection>/search?q=` over a lagging index
    implied: Mapping[str, re.Pattern[str]] = field(default_factory=dict)  # ids that exist without having been created

    def collections(self) -> set[str]:
        return {route.collection for route in self.creates} | {route.collection for route in self.changes}

    def route(self, path: str) -> tuple[Create | Change, str | None] | None:
        """The effectful route of a POST path and the id in it, or None."""
        parts = path.strip("/").split("/")
        if len(parts) == 1:
            return next(((route, None) for route in self.creates if route.collection == parts[0]), None)
        if len(parts) == 3:
            wanted = (parts[0], parts[2])
            return next(((way, parts[1]) for way in self.changes if (way.collection, way.verb) == wanted), None)
        return None


PAY = Desk(
    name="pay",
    creates=(
        Create(
            action="refund.create",
            collection="refunds",
            kind="refund",
            prefix="re",
            fields={"order": str, "amount": int, "currency": str, "card": str},
            keyed=True,
            status="succeeded",
        ),
    ),
)

CARRIER = Desk(
    name="carrier",
    creates=(
        Create(
            action="label.create",
            collection="labels",
            kind="label",
            prefix="lb",
            fields={"order": str, "sender": str, "service": str},
            keyed=True,
        ),
        Create(
            action="pickup.schedule",
            collection="pickups",
            kind="pickup",
            prefix="pu",
            fields={"order": str, "address": str, "window": str},
            keyed=True,
            status="scheduled",
        ),
    ),
    changes=(
        Change(action="label.void", collection="labels", verb="void", kind="label.void", status="voided"),
        Change(action="pickup.cancel", collection="pickups", verb="cancel", kind="pickup.cancel", status="cancelled"),
    ),
)

MAIL = Desk(
    name="mail",
    creates=(
        Create(
            action="message.send",
            collection="messages",
            kind="message",
            prefix="ms",
            fields={"to": str, "subject": str, "body": str},
            status="sent",
        ),
    ),
    searchable=frozenset({"messages"}),
)

TICKETS = Desk(
    name="tickets",
    creates=(
        Create(
            action="ticket.open",
            collection="tickets",
            kind="ticket",
            prefix="tk",
            fields={"title": str},
            status="open",
        ),
    ),
    changes=(
        Change(
            action="ticket.close",
            collection="tickets",
            verb="close",
            kind="ticket.close",
            status="closed",
            keyed=False,
        ),
    ),
    searchable=frozenset({"tickets"}),
    # Customers wrote these before our story begins: T-77 is open until somebody closes it.
    implied={"tickets": re.compile(r"T-[\w-]{1,40}")},
)

DESKS = {desk.name: desk for desk in (PAY, CARRIER, MAIL, TICKETS)}
