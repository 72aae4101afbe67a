"""Runs the processes of one installation: starts them, prefixes their lines, restarts what dies, ends everything.

Each child leads a session of its own, so that Ctrl-C reaches only this process, which then asks each leader to end (a
cluster of django-q hangs when its whole group is told). Each is tied to this process (see tether.py), so that a killed
one leaves nothing behind. Children are started by the main thread: the tie is to the thread that forked.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from console import tether

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a child that died is started again
STEADY_AFTER = 60.0  # a child that ran so long begins again with the first pause
GRACE = 3.5  # seconds that children have to end by themselves


@dataclass(frozen=True, kw_only=True)
class Command:
    """A process to keep running. `name` prefixes its lines."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)


class Supervisor:
    """Keeps `commands` running until it is told to stop."""

    def __init__(self, commands: Sequence[Command], *, folder: Path, say: Callable[[str], None]) -> None:
        self.say = say
        self.stopping = threading.Event()
        width = max(len(command.name) for command in commands)
        self.children = [_Child(command, folder=folder, say=say, width=width) for command in commands]

    def start(self) -> None:
        """Start every process once."""
        for child in self.children:
            child.start()

    def watch(self, *, also: Callable[[], None] = lambda: None) -> None:
        """Start again whatever dies, until `stopping` is set; call `also` each time round."""
        while not self.stopping.wait(0.1):
            also()
            for child in self.children:
                child.tend()

    def stop(self) -> None:
        """Ask every process to end, and kill what has not within the grace period."""
        for child in self.children:
            child.ask_to_end()
        deadline = time.monotonic() + GRACE
        for child in self.children:
            child.end(by=deadline)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Take Ctrl-C, SIGTERM and a closed terminal as the wish to stop."""
        caught = {one: signal.signal(one, self._asked) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for one, before in caught.items():
                signal.signal(one, before)

    def _asked(self, number: int, frame: object) -> None:
        self.stopping.set()


class _Child:
    def __init__(self, command: Command, *, folder: Path, say: Callable[[str], None], width: int) -> None:
        self.command, self.folder, self.say = command, folder, say
        self.prefix = f"{command.name.ljust(width)} | "
        self.process: subprocess.Popen[str] | None = None
        self.started = self.due = 0.0
        self.pause = FIRST_PAUSE

    def start(self) -> None:
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            tether.command(*self.command.argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=self.folder,
            env={**os.environ, **self.command.environ, "AFTERCALL_TETHERED": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        threading.Thread(target=self._pass_on, args=(self.process,), daemon=True).start()

    def tend(self) -> None:
        """Notice that the process died, and start it again when its pause is over."""
        if self.process is not None and self.process.poll() is not None:
            self._mourn(self.process.returncode)
        if self.process is None and time.monotonic() >= self.due:
            self.start()

    def ask_to_end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def end(self, *, by: float) -> None:
        if self.process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, by - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _mourn(self, code: int) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its own children, if it left any
        self.process = None
        if time.monotonic() - self.started > STEADY_AFTER:
            self.pause = FIRST_PAUSE
        self.due = time.monotonic() + self.pause
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        self.say(f"{self.prefix}{how}; it is started again in {self.pause:g} s")
        self.pause = min(self.pause * 2, LONGEST_PAUSE)

    def _pass_on(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.say(f"{self.prefix}{line.rstrip()}")
