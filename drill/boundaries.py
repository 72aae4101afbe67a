"""Where a worker can be stopped: before and after each write to the ledger, and around each call to the outside.

Between two of these nothing outside the process changes, so a crash there is the same as a crash at one of them. The
functions are wrapped here, in the drill's own process; nothing that is shipped knows of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from audit import log as audit_log
from reconciliation import local, outbox, policy, registry, schedules, settlement, transition

READS = frozenset({"aftercall_now"})


class Killed(BaseException):
    """The worker is dead. No `except Exception` and no database write of its own comes after it."""


@dataclass
class Tape:
    """What the workers of one case did to the outside, in order, and where they are to be disturbed."""

    disturb: dict[int, Callable[[], None]] = field(default_factory=dict)
    on: dict[str, Callable[[], None]] = field(default_factory=dict)  # once, at the first boundary of that name
    passed: list[str] = field(default_factory=list)
    dead: bool = False

    def boundary(self, name: str) -> None:
        """Say where we are. A dead worker gets no further."""
        if self.dead:
            raise Killed
        self.passed.append(name)
        disturbance = self.disturb.pop(len(self.passed) - 1, None) or self.on.pop(name, None)
        if disturbance is not None:
            disturbance()

    def kill(self) -> None:
        """SIGKILL, as far as the outside can tell: from here on this worker does nothing any more."""
        self.dead = True
        raise Killed


class Moved:
    """Seconds by which the drill's clock runs ahead of the machine's."""

    seconds = 0.0


_tape: list[Tape] = []


def current() -> Tape | None:
    """The tape that runs."""
    return _tape[-1] if _tape else None


@contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Let `tape` hear of every boundary."""
    _tape.append(tape)
    try:
        yield
    finally:
        _tape.pop()


@contextmanager
def installed() -> Iterator[None]:
    """Wrap the ledger's one way to the database, the judgement of an answer, and the clock of send-by deadlines."""
    kept = [(m, n, getattr(m, n)) for m, n in WRAPPED]
    _around(transition, "_call", _named)
    _around(audit_log, "append", lambda *_, **__: "audit entry alone")
    _around(settlement, "judge", lambda *_, **__: "answer judged")
    _around(local, "_commit", lambda *_, **__: "local effect")
    _around(outbox, "published", lambda *_, **__: "message marked")
    for duty, does in (("_decide_job", "decides"), ("_start_job", "starts"), ("_guarded", "is at a job")):
        _around(schedules, duty, lambda *_, does=does, **__: f"the beat {does}")
    plain_clock = policy.boot_seconds
    policy.boot_seconds = lambda: plain_clock() + Moved.seconds  # type: ignore[assignment]
    transition.take_due = _told_of(transition.take_due, "due {}s taken")  # type: ignore[assignment]
    outbox.take = _told_of(outbox.take, "messages taken")  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, name, plain in kept:
            setattr(module, name, plain)


WRAPPED: tuple[tuple[Any, str], ...] = (
    (transition, "_call"), (transition, "take_due"), (audit_log, "append"), (settlement, "judge"),
    (policy, "boot_seconds"), (registry, "providers"),
    (local, "_commit"), (outbox, "published"), (outbox, "take"),
    (schedules, "_decide_job"), (schedules, "_start_job"), (schedules, "_guarded"),
)  # fmt: skip


def _told_of(take: Callable[..., list[int]], what: str) -> Callable[..., list[int]]:
    def told(*args: Any, **named: Any) -> list[int]:
        taken = take(*args, **named)
        if taken:
            _tell(what.format(*args))
        return taken

    return told


def _named(statement: str, values: Any) -> str:
    found = re.search(r"(\w+)\(", statement.replace("SELECT * FROM", ""))
    name = found[1] if found else statement
    if name in READS:
        return ""
    target = next((str(one) for one in values[3:4] if name.startswith("ledger_move")), "")
    return f"{name} {target}".strip()


def _around(module: Any, name: str, describe: Callable[..., str]) -> None:
    plain = getattr(module, name)

    def wrapped(*args: Any, **named: Any) -> Any:
        what = describe(*args, **named)
        if what:
            _tell(f"before {what}")
        answer = plain(*args, **named)
        if what:
            _tell(f"after {what}")
        return answer

    setattr(module, name, wrapped)


def _tell(name: str) -> None:
    tape = current()
    if tape is not None:
        tape.boundary(name)
