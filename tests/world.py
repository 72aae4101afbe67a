"""The outside world for tests: the order desk's sandbox providers, as real processes on free ports.

    def test_a_refund_is_made_once(world):
        world.pay.fault("reset_after", order="1002")          # the next refund of order 1002: applied, no answer
        ...
        assert world.pay.count(order="1002") == 1             # effects, as the world counts them

`world` is empty at the start of each test. `world.pay`, `world.carrier`, `world.mail` and `world.tickets` are servers
(see `Server`); the addresses are in the environment (`ORDER_DESK_PAY_URL`, ...), for this process and its children.
One set of servers serves one pytest process (one xdist worker) and dies with it, however that ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.processes import wait_until

ROOT = Path(__file__).resolve().parent.parent
PROVIDERS = ("pay", "carrier", "mail", "tickets")
TOKEN = "sandbox-token"
Row = dict[str, Any]


class Server:
    """One sandbox provider process."""

    def __init__(self, name: str, data: Path) -> None:
        self.name, self.data, self.port = name, data, 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # --- the process

    def launch(self) -> None:
        """Start the process without waiting for it, on the same port as before where there was one."""
        command = [sys.executable, "-m", "examples.order_desk.sandbox", "--provider", self.name]
        options = ["--port", str(self.port), "--data", str(self.data), "--parent", str(os.getpid()), "--token", TOKEN]
        self._process = subprocess.Popen([*command, *options], cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def await_start(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert "listens on" in line, f"the sandbox provider {self.name} did not start: {line!r}"
        self.port = int(line.rsplit(":", 1)[1])

    def start(self) -> None:
        self.launch()
        self.await_start()

    def kill(self) -> None:
        """SIGKILL: from now on a connection is refused. What it remembers is on disk."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def restart(self) -> None:
        """SIGKILL, then the same port and the same storage again."""
        self.kill()
        self.start()

    # --- scripting

    def fault(self, fault: str, *, times: int = 1, **rule: Any) -> None:
        """Script the next `times` calls that match `action`, `order`, `reference`, `key`, `id` (all optional).

        The kinds are in `examples/order_desk/sandbox/faults.py`. Without an action a rule means calls that have an
        effect; `action="look_up"` means reads, `action="probe"` the control read. `seconds` for slow, `status` for
        reject (and `says`, its words), `retry_after`, `change={...}` for what is recorded in place of what was asked.
        """
        self.control("POST", "faults", {"fault": fault, "times": times, **rule})

    def clear_faults(self) -> None:
        self.control("DELETE", "faults", {})

    def set(self, **settings: Any) -> None:
        """Change settings: lag, key_retention, page_size, lookup_down, scope_lost."""
        self.control("POST", "settings", settings)

    def advance(self, seconds: float) -> None:
        """Move this provider's clock, for its lag and its key retention."""
        self.control("POST", "clock", {"advance": seconds})

    def waiting(self) -> list[Row]:
        """The requests that are being held by `hang_before_effect` or `hang_after_effect`."""
        held: list[Row] = self.control("GET", "waiting")["waiting"]
        return held

    def await_waiting(self, number: int = 1, *, seconds: float = 10) -> list[Row]:
        """Wait until `number` requests are being held."""
        wait_until(lambda: len(self.waiting()) >= number, seconds=seconds)
        return self.waiting()

    def release(self, number: int | None = None, *, drop: bool = False) -> int:
        """Let held requests go on, or drop them (reset, and no effect where it was held before that)."""
        released: int = self.control("POST", "release", {"number": number, "drop": drop})["released"]
        return released

    def plant(self, kind: str, *, status: str | None = None, **fields: Any) -> Row:
        """Put an object there that somebody else made. It can be found and is not counted as an effect."""
        return self.control("POST", "plant", {"kind": kind, "fields": fields} | ({"status": status} if status else {}))

    def remove(self, object_id: str) -> None:
        """Take an object away: a read by id answers 410, the index still shows it for `lag` seconds."""
        self.control("POST", "remove", {"id": object_id})

    # --- counting

    def effects(self, **filters: str) -> list[Row]:
        """True effects, oldest first; filter by order, reference, key, kind or id. The fields are under `fields`."""
        rows: list[Row] = self.control("GET", "effects", **filters)["effects"]
        return rows

    def count(self, **filters: str) -> int:
        """How many true effects there are (see `effects`)."""
        return len(self.effects(**filters))

    def requests(self, **filters: str) -> list[Row]:
        """Every call with an effect that arrived with its body, whatever became of it; filter by key, order, action."""
        rows: list[Row] = self.control("GET", "requests", **filters)["requests"]
        return rows

    def control(self, method: str, name: str, body: Row | None = None, **query: str) -> Row:
        """Call the control side: `POST /_control/<name>`."""
        address = f"{self.url}/_control/{name}" + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            address, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with _direct.open(request, timeout=10) as answer:
                told: Row = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{self.name} refused {name}: {error.read().decode()}") from None
        return told

    def page(self, path: str = "/") -> str:
        """The page on which a person counts."""
        with _direct.open(self.url + path, timeout=10) as answer:
            text: str = answer.read().decode()
        return text


class World:
    """All four providers."""

    def __init__(self, data: Path) -> None:
        self.servers = {name: Server(name, data) for name in PROVIDERS}
        self.pay, self.carrier, self.mail, self.tickets = self.servers.values()

    def start(self) -> None:
        for server in self.servers.values():
            server.launch()
        for server in self.servers.values():
            server.await_start()
            os.environ[f"ORDER_DESK_{server.name.upper()}_URL"] = server.url
            os.environ[f"ORDER_DESK_{server.name.upper()}_TOKEN"] = TOKEN

    def reset(self) -> None:
        """An empty world: no objects, effects, keys, faults, settings; nothing held; every server up."""
        for server in self.servers.values():
            if server._process is None or server._process.poll() is not None:
                server.start()
            server.control("POST", "reset", {})

    def stop(self) -> None:
        for server in self.servers.values():
            server.kill()

    def count(self, **filters: str) -> int:
        """How many true effects there are in the whole world."""
        return sum(server.count(**filters) for server in self.servers.values())


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture(scope="session")
def whole_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The servers of this pytest process."""
    world = World(tmp_path_factory.mktemp("world"))
    world.start()
    yield world
    world.stop()


@pytest.fixture
def world(whole_world: World) -> World:
    """The outside world, empty."""
    whole_world.reset()
    return whole_world
