"""The processes of an installation, and those that the example adds."""

import contextlib
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from console.supervise import Command

WEB_THREADS = 16  # more than cores: a look-up from a page waits for a provider
# The outside world of the order desk. Its adapters find each server through ORDER_DESK_<NAME>_URL.
SANDBOX = {"pay": 8701, "carrier": 8702, "mail": 8703, "tickets": 8704}


def installation(*, host: str, port: int) -> list[Command]:
    """Return web, worker and beat."""
    return [
        Command(
            name="web",
            argv=[
                *(sys.executable, "-m", "granian", "console.wsgi:application", "--interface", "wsgi"),
                *("--host", host, "--port", str(port), "--workers", "1", "--blocking-threads", str(WEB_THREADS)),
                *("--respawn-failed-workers", "--workers-kill-timeout", "3", "--no-ws", "--log-level", "error"),
            ],
        ),
        Command(name="worker", argv=manage("qcluster")),
        Command(name="beat", argv=manage("beat")),
    ]


def manage(*words: str) -> list[str]:
    return [sys.executable, "manage.py", *words]


def sandbox_addresses() -> dict[str, str]:
    """Return a free address for each sandbox provider, by provider."""
    return {name: f"http://127.0.0.1:{_free_port(wish)}" for name, wish in SANDBOX.items()}


# The example lives faster than production, so that a lost answer becomes a case within half a minute.
HASTE = {
    "ORDER_DESK_TIMEOUT": "4",
    "ORDER_DESK_SETTLES_AFTER": "3",
    "ORDER_DESK_ESCALATE_AFTER": "12",
    "AFTERCALL_LEASE_MARGIN": "3",
    "AFTERCALL_ABSENCE_SPACING": "1",
    "AFTERCALL_BACK_OFF": "1",
    "AFTERCALL_TAKE_AGAIN": "15",
}


def sandbox_environ(addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the variables through which the example's adapters find the sandbox, and its pace."""
    return HASTE | {f"ORDER_DESK_{name.upper()}_URL": address for name, address in addresses.items()}


def sandbox_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the address of the page on which each sandbox provider lists what really happened there."""
    names = {name: f"ORDER_DESK_{name.upper()}_URL" for name in SANDBOX}
    return {name: environ[variable] for name, variable in names.items() if variable in environ}


def example(*, addresses: Mapping[str, str], var: Path) -> list[Command]:
    """Return the example's outside world, and the feed of its runs."""
    servers = [
        Command(
            name=name,
            argv=[
                *(sys.executable, "-m", "examples.order_desk.sandbox", "--provider", name),
                *("--port", str(urlsplit(address).port), "--data", str(var / "sandbox")),
            ],
        )
        for name, address in addresses.items()
    ]
    return [*servers, Command(name="feed", argv=manage("order_desk_feed"))]


def _free_port(wish: int) -> int:
    """Return `wish` where nothing listens there, and otherwise any free port."""
    for port in (wish, 0):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last start's connections still linger
            listener.bind(("127.0.0.1", port))
            return int(listener.getsockname()[1])
    raise OSError("no free port on 127.0.0.1")
