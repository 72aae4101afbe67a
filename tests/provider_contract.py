"""What the contract suite needs to know of an adapter: one sample for each action that has an effect.

An adapter of your own joins the suite with a sample and a sandbox that can misbehave; see test_provider_contract.py.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from examples.order_desk import providers
from reconciliation.providers.base import Call, Json
from reconciliation.providers.http import HttpProvider
from tests.world import TOKEN, Server, World

KEY = "ac1-7f3e9b0c5d"
REFUND = {"order": "1002", "amount": 4200, "currency": "USD", "card": "card_of_jane"}


@dataclass(frozen=True)
class Sample:
    server: str
    make: Callable[..., HttpProvider]
    action: str
    request: Json
    consistent: bool = True  # whether a look-up can prove absence
    needs: str | None = None  # kind of object that must be there first, named by the request's `id`
    already: Json = field(default_factory=dict)

    def __str__(self) -> str:
        return self.action

    def at(self, world: World) -> Server:
        return world.servers[self.server]

    def provider(self, world: World, *, token: str = TOKEN) -> HttpProvider:
        return self.make(base_url=self.at(world).url, token=token)

    def ready(self, world: World) -> Json:
        """The request, with what it acts on in place."""
        if self.needs is None:
            return self.request
        return {**self.request, "id": self.at(world).plant(self.needs, **self.already)["id"]}


LABEL = {"order": "1002", "sender": "Jane Roe, 1 Main St", "service": "ground"}
PICKUP = {"order": "1002", "address": "1 Main St", "window": "2026-12-01 morning"}
MESSAGE = {"order": "1002", "to": "jane.roe@example.com", "subject": "Your refund", "body": "Cafe\u0301 owes you 42."}
SAMPLES = (
    Sample("pay", providers.Pay, "refund.create", REFUND),
    Sample("carrier", providers.Carrier, "label.create", LABEL),
    Sample("carrier", providers.Carrier, "pickup.schedule", PICKUP),
    Sample("carrier", providers.Carrier, "label.void", {"order": "1002"}, needs="label", already=LABEL),
    Sample("carrier", providers.Carrier, "pickup.cancel", {"order": "1002"}, needs="pickup", already=PICKUP),
    Sample("mail", providers.Mail, "message.send", MESSAGE, consistent=False),
    Sample("mail", providers.Mail, "message.send_listed", MESSAGE),
    Sample("tickets", providers.Tickets, "ticket.close", {"ticket": "T-77"}),
    Sample("tickets", providers.Tickets, "ticket.open", {"order": "1002", "title": "Broken cup"}, consistent=False),
)


def a_call(action: str = "refund.create", request: Json | None = None, **facts: Any) -> Call:
    """A call as the ledger would make it."""
    known = {"action": action, "request": REFUND if request is None else request, "key": KEY, "tenant": "t_acme"}
    return Call(**{**known, "attempt": 1, **facts})


@contextmanager
def recorder() -> Iterator[tuple[str, list[bytes]]]:
    """An address that takes each request to its end, keeps its bytes and closes without an answer."""
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        threading.Thread(target=_record, args=(listener, received), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", received


def _record(listener: socket.socket, received: list[bytes]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            received.append(_whole_request(connection))


def _whole_request(connection: socket.socket) -> bytes:
    connection.settimeout(5)
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def endless(head: bytes) -> Iterator[str]:
    """An address that answers with `head` and then with a body that never ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        threading.Thread(target=_stream, args=(listener, head), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def _stream(listener: socket.socket, head: bytes) -> None:
    connection, _ = listener.accept()
    with connection, suppress(OSError):
        _whole_request(connection)
        connection.sendall(head)
        while True:
            connection.sendall(b"x" * 65536)
