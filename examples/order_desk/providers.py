"""The adapters of the order desk: four outside systems, told to Aftercall in the terms of its provider contract.

Read this as the pattern for an adapter of your own. Each action declares what its outside system promises, and nothing
that it does not; `perform` sends once; `look_up` says where the effect of a lost call would show. Settings:

    AFTERCALL_PROVIDERS = examples.order_desk.providers.pay,examples.order_desk.providers.carrier,...
    ORDER_DESK_PAY_URL, ORDER_DESK_PAY_TOKEN       and so on for CARRIER, MAIL, TICKETS
    ORDER_DESK_KEY_RETENTION                       seconds for which pay and carrier remember a key (86400)
    ORDER_DESK_SETTLES_AFTER                       seconds after which an effect shows in a consistent list (5)
    ORDER_DESK_ESCALATE_AFTER                      seconds after which an unknown outcome becomes a person's (900)
    ORDER_DESK_TIMEOUT                             seconds that a call may take (30)
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from reconciliation.providers.base import ActionSpec, Call, Finding, Receipt, Repeat, Verdict
from reconciliation.providers.http import HttpProvider, picked, segment
from reconciliation.providers.look_ups import Places, look_up_in_order

# These providers answer so before they begin. What a proxy in between may say (502, 504), or an application that broke
# off (500), is missing on purpose.
REFUSALS = frozenset({400, 401, 402, 403, 422, 429, 503})
ALWAYS_SHOWN = ("id", "order", "status", "created_at", "reference")
UNDONE = {"voided": Verdict.REMOVED, "cancelled": Verdict.REMOVED}


def pay() -> Pay:
    """The provider `pay`, from the environment."""
    return Pay(base_url=_setting("PAY_URL", "http://127.0.0.1:8701"), token=_setting("PAY_TOKEN", "sandbox-token"))


def carrier() -> Carrier:
    """The provider `carrier`, from the environment."""
    url, token = _setting("CARRIER_URL", "http://127.0.0.1:8702"), _setting("CARRIER_TOKEN", "sandbox-token")
    return Carrier(base_url=url, token=token)


def mail() -> Mail:
    """The provider `mail`, from the environment."""
    return Mail(base_url=_setting("MAIL_URL", "http://127.0.0.1:8703"), token=_setting("MAIL_TOKEN", "sandbox-token"))


def tickets() -> Tickets:
    """The provider `tickets`, from the environment."""
    url, token = _setting("TICKETS_URL", "http://127.0.0.1:8704"), _setting("TICKETS_TOKEN", "sandbox-token")
    return Tickets(base_url=url, token=token)


class Pay(HttpProvider):
    """Refunds. Remembers a key for a day; its list by order is strongly consistent."""

    name, probe = "pay", "/probe"

    def __init__(self, *, base_url: str, token: str, account: str = "main") -> None:
        super().__init__(base_url=base_url, token=token, account=account)
        self.actions = {
            "refund.create": _declared(
                repeat=Repeat.KEYED,
                key_retention=_seconds("KEY_RETENTION", 86400),
                absence_is_proof=True,
                shown=(*ALWAYS_SHOWN, "amount", "currency"),
                compare={"order": "order", "amount": "amount", "currency": "currency", "card": "card"},
                headline="Refund {amount} for order {order}",
                money=("amount", "currency"),
            )
        }

    def perform(self, call: Call) -> Receipt:
        """Refund once."""
        self.spec(call)
        wanted = picked(call.request, "order", "amount", "currency", "card")
        return self.applied(self.send(call, "/refunds", {**wanted, "reference": call.key}, keyed=True))

    def look_up(self, call: Call) -> Finding:
        """By key while the provider remembers it, then all refunds of the order."""
        order = str(call.request.get("order", ""))
        places = Places(
            by_id=lambda found: self.read_one(call, f"/refunds/{segment(found)}"),
            by_key=lambda: self.read_all(call, "/refunds", {"key": call.key}, authoritative=True),
            by_reference=lambda: self.read_all(call, "/refunds", {"order": order}, authoritative=True),
            control=lambda: self.control(call),
        )
        return look_up_in_order(call, self.spec(call), places)


class Carrier(HttpProvider):
    """Return labels and pickups, and their undoing. Remembers a key for a day; its lists are strongly consistent."""

    name, probe = "carrier", "/probe"

    def __init__(self, *, base_url: str, token: str, account: str = "main") -> None:
        super().__init__(base_url=base_url, token=token, account=account)
        self.actions = {
            "label.create": self._creation(
                compensate_with="label.void",
                shown=(*ALWAYS_SHOWN, "service"),
                compare={"order": "order", "sender": "sender", "service": "service"},
                headline="Create a return label for order {order}",
            ),
            "pickup.schedule": self._creation(
                compensate_with="pickup.cancel",
                shown=(*ALWAYS_SHOWN, "window"),
                compare={"order": "order", "address": "address", "window": "window"},
                headline="Schedule a pickup for order {order}",
            ),
            "label.void": self._undoing("Void label {id} of order {order}"),
            "pickup.cancel": self._undoing("Cancel pickup {id} of order {order}"),
        }

    def perform(self, call: Call) -> Receipt:
        """Create, or undo, once."""
        self.spec(call)
        if call.action in UNDOINGS:
            collection, verb, _ = UNDOINGS[call.action]
            path = f"/{collection}/{segment(picked(call.request, 'id')['id'])}/{verb}"
            return self.applied(self.send(call, path, {"reference": call.key}, keyed=True))
        collection, *fields = CREATIONS[call.action]
        body = {**picked(call.request, *fields), "reference": call.key}
        return self.applied(self.send(call, f"/{collection}", body, keyed=True))

    def look_up(self, call: Call) -> Finding:
        """A creation by key, then in the list of the order; an undoing by reading what it was to undo."""
        if call.action in UNDOINGS:
            collection, _, status = UNDOINGS[call.action]
            return _status_reached(self, call, f"/{collection}/", status=status)
        collection = CREATIONS[call.action][0]
        order = str(call.request.get("order", ""))
        places = Places(
            by_id=lambda found: self.read_one(call, f"/{collection}/{segment(found)}"),
            by_key=lambda: self.read_all(call, f"/{collection}", {"key": call.key}, authoritative=True),
            by_reference=lambda: self.read_all(call, f"/{collection}", {"order": order}, authoritative=True),
            control=lambda: self.control(call),
            statuses=UNDONE,
        )
        return look_up_in_order(call, self.spec(call), places)

    def _creation(
        self, *, compensate_with: str, shown: tuple[str, ...], compare: dict[str, str], headline: str
    ) -> ActionSpec:
        return _declared(
            repeat=Repeat.KEYED,
            key_retention=_seconds("KEY_RETENTION", 86400),
            absence_is_proof=True,
            compensate_with=compensate_with,
            shown=shown,
            compare=compare,
            headline=headline,
        )

    def _undoing(self, headline: str) -> ActionSpec:
        return _declared(
            repeat=Repeat.NATURAL,
            absence_is_proof=True,
            not_applied=REFUSALS | {404},
            shown=ALWAYS_SHOWN,
            compare={"id": "id"},
            headline=headline,
            id_names_target=True,
        )


CREATIONS = {
    "label.create": ("labels", "order", "sender", "service"),
    "pickup.schedule": ("pickups", "order", "address", "window"),
}
UNDOINGS = {"label.void": ("labels", "void", "voided"), "pickup.cancel": ("pickups", "cancel", "cancelled")}


class Mail(HttpProvider):
    """Messages. It knows no key. The operation key travels as the message's reference; the text is sent as submitted.

    `message.send` is for an account that only has the search: its index lags, so nothing ever proves that a message did
    not go out, and one that may have gone out waits for a person. `message.send_listed` is for an account whose list by
    reference is strongly consistent.
    """

    name, probe = "mail", "/probe"

    def __init__(self, *, base_url: str, token: str, account: str = "main") -> None:
        super().__init__(base_url=base_url, token=token, account=account)
        self.actions = {
            "message.send": self._sending(repeat=Repeat.NONE),
            "message.send_listed": self._sending(repeat=Repeat.LOOKUP, absence_is_proof=True),
        }

    def perform(self, call: Call) -> Receipt:
        """Send one message."""
        self.spec(call)
        message = picked(call.request, "order", "to", "subject", "body")
        return self.applied(self.send(call, "/messages", {**message, "reference": call.key}))

    def look_up(self, call: Call) -> Finding:
        """In the index, or in the list by reference where the account has one."""
        if call.action == "message.send":
            path, query, authoritative = "/messages/search", {"q": call.key}, False
        else:
            path, query, authoritative = "/messages", {"reference": call.key}, True
        places = Places(
            by_id=lambda found: self.read_one(call, f"/messages/{segment(found)}"),
            by_reference=lambda: self.read_all(call, path, query, authoritative=authoritative),
            control=lambda: self.control(call),
        )
        return look_up_in_order(call, self.spec(call), places)

    def _sending(self, *, repeat: Repeat, absence_is_proof: bool = False) -> ActionSpec:
        return _declared(
            repeat=repeat,
            absence_is_proof=absence_is_proof,
            shown=(*ALWAYS_SHOWN, "subject"),
            compare={"order": "order", "to": "to", "subject": "subject", "body": "body"},
            headline="Mail the customer about order {order}",
        )


class Tickets(HttpProvider):
    """Customer tickets. Closing one twice is the same as once; opening one twice makes two; only an index tells."""

    name, probe = "tickets", "/probe"

    def __init__(self, *, base_url: str, token: str, account: str = "main") -> None:
        super().__init__(base_url=base_url, token=token, account=account)
        self.actions = {
            "ticket.close": _declared(
                repeat=Repeat.NATURAL,
                absence_is_proof=True,
                not_applied=REFUSALS | {404},
                shown=(*ALWAYS_SHOWN, "ticket"),
                compare={"ticket": "id"},
                headline="Close ticket {ticket}",
                id_names_target=True,
            ),
            "ticket.open": _declared(
                repeat=Repeat.NONE,
                shown=(*ALWAYS_SHOWN, "title"),
                compare={"order": "order", "title": "title"},
                headline="Open a ticket for order {order}",
            ),
            "ticket.read": _declared(
                repeat=Repeat.READ,
                shown=(*ALWAYS_SHOWN, "ticket"),
                headline="Read ticket {ticket}",
                id_names_target=True,
            ),
        }

    def perform(self, call: Call) -> Receipt:
        """Close, open or read."""
        self.spec(call)
        if call.action == "ticket.open":
            body = {**picked(call.request, "order", "title"), "reference": call.key}
            return self.applied(self.send(call, "/tickets", body))
        path = f"/tickets/{segment(picked(call.request, 'ticket')['ticket'])}"
        if call.action == "ticket.close":
            return self.applied(self.send(call, f"{path}/close", {"reference": call.key}))
        return self.applied(self.read(call, path))

    def look_up(self, call: Call) -> Finding:
        """A closing by reading the ticket, an opening in the index."""
        if call.action == "ticket.close":
            return _status_reached(self, call, "/tickets/", status="closed", field="ticket")
        places = Places(
            by_id=lambda found: self.read_one(call, f"/tickets/{segment(found)}"),
            by_reference=lambda: self.read_all(call, "/tickets/search", {"q": call.key}, authoritative=False),
            control=lambda: self.control(call),
        )
        return look_up_in_order(call, self.spec(call), places)


def _status_reached(provider: HttpProvider, call: Call, path: str, *, status: str, field: str = "id") -> Finding:
    """Whether the object that the request names has the status that the call was to give it."""
    return provider.read_status(call, path + segment(picked(call.request, field)[field]), status=status)


def _declared(**promises: Any) -> ActionSpec:
    """What an action promises, beside what all actions here have in common."""
    common = {
        "settles_after": _seconds("SETTLES_AFTER", 5),
        "escalate_after": _seconds("ESCALATE_AFTER", 900),
        "timeout": _seconds("TIMEOUT", 30),
        "not_applied": REFUSALS,
    }
    return ActionSpec(**{**common, **promises})


def _setting(name: str, default: str) -> str:
    return os.environ.get(f"ORDER_DESK_{name}", default)


def _seconds(name: str, default: float) -> timedelta:
    return timedelta(seconds=float(_setting(name, str(default))))
