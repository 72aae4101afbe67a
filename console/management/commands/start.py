"""Runs Aftercall: database (its own, or the one of DATABASE_URL), console, worker and beat, until Ctrl-C."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.core import checks
from django.core.management import call_command, get_commands
from django.core.management.base import BaseCommand, CommandParser
from django.db import DatabaseError, connections

from console import address as addresses
from console import embedded, preflight, processes, setup, tether
from console.preflight import CannotStart
from console.supervise import Supervisor
from reconciliation import fence

ANSWERS_WITHIN = 30.0  # seconds that the console has to listen, before the address is printed anyway


class Command(BaseCommand):
    help = __doc__
    requires_system_checks: list[str] = []  # run below, so that their sentence stands alone

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default="127.0.0.1", help="where to listen; this machine only by default")
        parser.add_argument("--port", type=int, default=8000)
        parser.add_argument("--example", action="store_true", help="add the order desk, its outside world and people")
        parser.add_argument("--end-with-parent", action="store_true", help="end when the process above ends (Linux)")

    def handle(self, *args: Any, host: str, port: int, example: bool, **options: Any) -> None:
        if options["end_with_parent"]:
            tether.tie(with_signal=signal.SIGTERM)
        try:
            self._run(host, port, example)
        except (CannotStart, embedded.EmbeddedError) as problem:
            self.stderr.write(str(problem))
            raise SystemExit(1) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None

    def _run(self, host: str, port: int, example: bool) -> None:
        with_environment(host, port, example)
        preflight.check_folder(settings.AFTERCALL_VAR)
        preflight.check_port(host, port)
        run_system_checks(self.say)
        with only_one(settings.AFTERCALL_VAR / "start.lock"), running_database() as tend_database:
            prepare_database()
            sends = fence.stands()  # before any process writes: in use and without an anchor, it would look restored
            call_command("collectstatic", interactive=False, verbosity=0)
            commands = [*processes.installation(host=host, port=port), *(example_processes() if example else [])]
            address = example_link() if example else settings.AFTERCALL_URL
            addresses.leave()
            next_step = hint(example) + ("" if sends else held(settings.AFTERCALL_URL))
            connections.close_all()
            supervisor = Supervisor(commands, folder=settings.BASE_DIR, say=self.say)
            with supervisor.signals():
                try:
                    supervisor.start()
                    wait_for_console(host, port, supervisor)
                    self.say(f"\nAftercall is at {address}\n{next_step}Ctrl-C ends it.\n")
                    supervisor.watch(also=tend_database)
                finally:
                    supervisor.stop()
        self.say("Ended.")

    def say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()


def with_environment(host: str, port: int, example: bool) -> None:
    """Begin again with the environment that the arguments ask for, so that every process reads the same settings."""
    wanted = {}
    if example:
        if not is_loopback(host):
            raise CannotStart(f"The example lets anybody in, so it listens on this machine only, not on {host}.")
        wanted = {"AFTERCALL_EXAMPLE": "1"}
    if not os.environ.get("AFTERCALL_URL"):
        wanted["AFTERCALL_URL"] = console_url(host, port)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        if example:
            wanted |= processes.sandbox_environ(processes.sandbox_addresses())
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def console_url(host: str, port: int) -> str:
    """Return the address for people's browsers. Raises CannotStart where `host` is no address to reach."""
    if host in {"0.0.0.0", "::"}:  # noqa: S104
        raise CannotStart(
            f"With --host {host} Aftercall cannot know its address; "
            "set AFTERCALL_URL to the one that people type, such as https://aftercall.example.com."
        )
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached from this machine only."""
    with contextlib.suppress(ValueError):
        return ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def run_system_checks(say: Any) -> None:
    """Say the warnings of Django's checks and ours; refuse to start with the first error."""
    for message in sorted(checks.run_checks(), key=lambda message: -message.level):
        sentence = " ".join(filter(None, (message.msg, message.hint)))
        if message.is_serious():
            raise CannotStart(sentence)
        say(f"Warning: {sentence}")


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold the folder for this process; the lock ends with it, however it ends."""
    with open(path, "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CannotStart(
                f"Aftercall already runs from {path.parent}; end it first, or set AFTERCALL_VAR to another folder."
            ) from None
        yield


@contextlib.contextmanager
def running_database() -> Iterator[Any]:
    """Run the embedded database, or check the given one; yields what keeps it running."""
    if not settings.AFTERCALL_DATABASE_EMBEDDED:
        preflight.check_server(settings.DATABASES["owner"], name="DATABASE_OWNER_URL or DATABASE_URL")
        yield lambda: None
        return
    database = _Database(settings.AFTERCALL_VAR / "postgres")
    try:
        preflight.check_server(preflight.embedded_superuser(settings.AFTERCALL_VAR), name="the embedded server")
        yield database.tend
    finally:
        embedded.stop(database.process)


class _Database:
    def __init__(self, data: Path) -> None:
        self.data = data
        self.process: subprocess.Popen[bytes] = embedded.start(data)

    def tend(self) -> None:
        """Start the server again when it died."""
        if self.process.poll() is not None:
            with contextlib.suppress(embedded.EmbeddedError):
                self.process = embedded.start(self.data)


def prepare_database() -> None:
    """Bring the database into shape and check it as the role that will use it."""
    try:
        setup.set_up()
    except DatabaseError as error:
        role, first = settings.AFTERCALL_OWNER_ROLE, str(error).strip().splitlines()[0]
        raise CannotStart(
            f"The role {role} cannot bring the database into shape ({first}); let DATABASE_OWNER_URL name a role "
            "that owns the database, and create the role of DATABASE_URL if that one may not."
        ) from error
    preflight.check_server(settings.DATABASES["default"], name="DATABASE_URL")


def example_processes() -> list[Any]:
    """Return the example's processes, as far as this installation has them."""
    commands = processes.example(addresses=processes.sandbox_pages(os.environ), var=settings.AFTERCALL_VAR)
    return [command for command in commands if command.name != "feed" or "order_desk_feed" in get_commands()]


def example_link() -> str:
    """Make the example's people, and return an address that signs one of them in, once."""
    if find_spec("console.example") is None:
        return str(settings.AFTERCALL_URL)
    module = import_module("console.example")
    module.prepare()
    return str(module.sign_in_link())


def hint(example: bool) -> str:
    """Return what a reader of the address needs to know next."""
    if example:
        pay = processes.sandbox_pages(os.environ).get("pay", "")
        return f"The link works once. What the outside world saw of the refunds is at {pay}\n"
    return "" if User.objects.exists() else "Nobody may sign in yet; see `manage.py give_role --help`.\n"


def held(address: str) -> str:
    """Return where to read why nothing is sent."""
    return f"Nothing is sent until a person has looked at {address}/restore\n"


def wait_for_console(host: str, port: int, supervisor: Supervisor) -> None:
    """Return when the console listens, or when waiting is no use."""
    deadline = time.monotonic() + ANSWERS_WITHIN
    while time.monotonic() < deadline and not supervisor.stopping.wait(0.1):
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), timeout=1).close()
            return
