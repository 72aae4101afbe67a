"""How a sandbox provider may misbehave, as data. A fault is scripted per call through `POST /_control/faults`."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any


class End(Enum):
    """What the caller sees in the end."""

    ANSWER = auto()  # the true answer
    STATUS = auto()  # another status, with a body of the fault's own
    CLOSE = auto()  # the connection is closed in good order, without a byte
    RESET = auto()  # the connection is reset
    SILENCE = auto()  # nothing, until the caller gives up
    HALF = auto()  # the first half of the true answer
    EMPTY = auto()  # 200 without a body
    LOGIN = auto()  # 200 with an HTML page
    HUGE = auto()  # an error of five megabytes
    ECHO = auto()  # 401 that repeats the caller's Authorization and a customer's address


@dataclass(frozen=True)
class Fault:
    effect: bool  # whether the call is applied
    end: End = End.ANSWER
    status: int = 200
    stored: bool = False  # whether the error is remembered under the key and replayed
    hold: str = ""  # before | after: wait there until released through the control API


FAULTS = {
    "unavailable": Fault(False, End.STATUS, 503),
    "rate_limited": Fault(False, End.STATUS, 429),
    "reject": Fault(False, End.STATUS, 402, stored=True),
    "server_error": Fault(False, End.STATUS, 500, stored=True),
    "server_error_after": Fault(True, End.STATUS, 500, stored=True),
    "bad_gateway_before": Fault(False, End.STATUS, 502),
    "bad_gateway_after": Fault(True, End.STATUS, 502),
    "redirect": Fault(False, End.STATUS, 307),
    "lost": Fault(False, End.CLOSE),
    "close_after": Fault(True, End.CLOSE),
    "timeout_before": Fault(False, End.SILENCE),
    "timeout_after": Fault(True, End.SILENCE),
    "reset_before_body": Fault(False, End.RESET),
    "reset_before": Fault(False, End.RESET),
    "reset_after": Fault(True, End.RESET),
    "half_answer": Fault(True, End.HALF),
    "empty_answer": Fault(True, End.EMPTY),
    "wrong_amount": Fault(True, End.RESET),
    "html_login": Fault(False, End.LOGIN),
    "error_echo": Fault(False, End.ECHO, 401),
    "huge_error": Fault(False, End.HUGE, 500),
    "slow": Fault(True),
    "hang_before_effect": Fault(True, hold="before"),
    "hang_after_effect": Fault(True, hold="after"),
}

MATCHED = ("action", "order", "reference", "key", "id")


def check(rule: dict[str, Any]) -> str:
    """Why this rule cannot be taken, or an empty string."""
    if rule.get("fault") not in FAULTS:
        return f"unknown fault {rule.get('fault')!r}; known: {', '.join(sorted(FAULTS))}"
    unknown = set(rule) - {*MATCHED, "fault", "times", "status", "seconds", "change", "retry_after", "answered", "says"}
    return f"unknown fields: {', '.join(sorted(unknown))}" if unknown else ""


def matches(rule: dict[str, Any], facts: dict[str, Any]) -> bool:
    """Whether a call with these facts is meant. A rule without an action means calls that have an effect."""
    if "action" not in rule and not facts["effectful"]:
        return False
    return all(name not in rule or rule[name] == facts.get(name) for name in MATCHED)


@dataclass
class Held:
    """One request that waits for `POST /_control/release`."""

    facts: dict[str, Any]
    released: threading.Event = field(default_factory=threading.Event)
    drop: bool = False


class Waiting:
    """The requests that are being held, by number."""

    def __init__(self) -> None:
        self._lock, self._held, self._last = threading.Lock(), dict[int, Held](), 0

    def hold(self, facts: dict[str, Any], *, longest: float = 300.0) -> bool:
        """Wait for the release; False where the request is to be dropped."""
        held = Held(facts)
        with self._lock:
            self._last += 1
            number = self._last
            self._held[number] = held
        released = held.released.wait(longest)
        with self._lock:
            self._held.pop(number, None)
        return released and not held.drop

    def listed(self) -> list[dict[str, Any]]:
        with self._lock:
            return [{"number": number, **held.facts} for number, held in self._held.items()]

    def release(self, number: int | None = None, *, drop: bool = False) -> int:
        with self._lock:
            chosen = [held for held_as, held in self._held.items() if number in (None, held_as)]
        for held in chosen:
            held.drop = drop
            held.released.set()
        return len(chosen)
