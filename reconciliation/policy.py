"""Error classes, the retry decision and the waiting times, as data and pure functions.

The table is design.md's "Retry decision". An error that no rule names is unknown.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import MappingProxyType

from django.conf import settings

from .providers import base
from .providers.base import ActionSpec, Repeat


class ErrorClass(StrEnum):
    """What an error says about the attempt that it answers."""

    NOT_SENT = "not_sent"
    OWN_FAULT = "own_fault"
    UNAVAILABLE = "unavailable"
    RATE_LIMITED = "rate_limited"
    UNKNOWN = "unknown"
    REJECTED = "rejected"
    INVALID = "invalid"
    UNAUTHORIZED = "unauthorized"
    KEY_IN_USE = "key_in_use"
    ROLLED_BACK = "rolled_back"


class Next(StrEnum):
    """What automation does after an attempt."""

    RETRY = "retry"  # proven not applied: again, after a back-off
    HOLD = "hold"  # proven not sent, and pointless until somebody repairs it
    FAIL = "fail"  # proven not applied, for good
    LOOK_UP = "look_up"  # unknown: find out
    REPEAT = "repeat"  # unknown, and sending it again changes nothing
    ESCALATE = "escalate"  # unknown, and nothing can find out: look up if there is a look-up, never send


_CLEAN = dict.fromkeys(Repeat, Next.RETRY)
_HELD = dict.fromkeys(Repeat, Next.HOLD)
_FINAL = dict.fromkeys(Repeat, Next.FAIL)
_UNKNOWN = {
    Repeat.KEYED: Next.LOOK_UP,
    Repeat.LOOKUP: Next.LOOK_UP,
    Repeat.NATURAL: Next.REPEAT,
    Repeat.READ: Next.REPEAT,
    Repeat.NONE: Next.ESCALATE,
    Repeat.LOCAL: Next.RETRY,  # one transaction: what did not commit was rolled back
}
DECISION: Mapping[ErrorClass, Mapping[Repeat, Next]] = MappingProxyType(
    {
        ErrorClass.NOT_SENT: _CLEAN,
        ErrorClass.UNAVAILABLE: _CLEAN,
        ErrorClass.RATE_LIMITED: _CLEAN,
        ErrorClass.OWN_FAULT: _HELD,
        ErrorClass.REJECTED: _FINAL,
        ErrorClass.INVALID: _FINAL,
        ErrorClass.UNAUTHORIZED: _FINAL,
        ErrorClass.UNKNOWN: _UNKNOWN,
        ErrorClass.KEY_IN_USE: _UNKNOWN | {Repeat.KEYED: Next.LOOK_UP},
        ErrorClass.ROLLED_BACK: _UNKNOWN,  # of a local effect only; see classify()
    }
)
NOT_APPLIED = frozenset(DECISION) - {ErrorClass.UNKNOWN, ErrorClass.KEY_IN_USE}

# The first match names the class; the order matters where one error is a kind of another.
_NAMES: tuple[tuple[type[base.ProviderError], ErrorClass], ...] = (
    (base.OwnFault, ErrorClass.OWN_FAULT),
    (base.NotSent, ErrorClass.NOT_SENT),
    (base.RateLimited, ErrorClass.RATE_LIMITED),
    (base.Unavailable, ErrorClass.UNAVAILABLE),
    (base.Unauthorized, ErrorClass.UNAUTHORIZED),
    (base.Rejected, ErrorClass.REJECTED),
    (base.Invalid, ErrorClass.INVALID),
    (base.KeyInUse, ErrorClass.KEY_IN_USE),
    (base.RolledBack, ErrorClass.ROLLED_BACK),
)


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often, how long and at what cost one step is tried. It is stored with the operation, as data.

    It governs every repeat by automation, after a clean failure and after an unknown attempt alike; no person's, and no
    look-up: those have a schedule of their own.

    Times are in seconds, spend in minor units of `cost`. `intervals` name the first waits exactly; after them
    the wait grows by `factor` up to `longest`, less a random part of up to `jitter` of it.
    """

    attempts: int = 3
    intervals: tuple[float, ...] = ()
    factor: float = 2.0
    longest: float | None = None  # defaults to AFTERCALL_BACK_OFF_CAP
    jitter: float = 0.5
    max_elapsed: float | None = None  # since the first claim
    max_spend: int | None = None
    never: frozenset[ErrorClass] = frozenset()  # classes that automation does not send again after

    def text(self) -> str:
        """As it is stored."""
        return json.dumps({**asdict(self), "never": sorted(self.never)}, sort_keys=True)

    @classmethod
    def read(cls, text: str, spec: ActionSpec) -> RetryPolicy:
        """What was stored, or what the action declares where nothing was."""
        if not text:
            return cls(attempts=spec.attempts)
        stored = json.loads(text)
        never = frozenset(ErrorClass(name) for name in stored.pop("never"))
        return cls(**{**stored, "intervals": tuple(stored["intervals"]), "never": never})

    def wait(self, attempt: int, *, retry_after: float | None = None) -> float:
        """Seconds until the attempt after `attempt`, never fewer than the provider asked for (capped)."""
        return max(self._own_wait(attempt), min(retry_after or 0.0, RETRY_AFTER_CAP))

    def _own_wait(self, attempt: int) -> float:
        if attempt <= len(self.intervals):
            return self.intervals[attempt - 1]
        grown = settings.AFTERCALL_BACK_OFF * self.factor ** min(attempt - 1 - len(self.intervals), 32)
        longest = min(grown, self.longest if self.longest is not None else settings.AFTERCALL_BACK_OFF_CAP)
        return float(longest * random.uniform(1 - self.jitter, 1.0))  # noqa: S311 - spreads load, guards nothing

    def spent(self, *, attempt: int, elapsed: float, spend: int) -> str:
        """Which cap is reached after `attempt`, or nothing."""
        if attempt >= self.attempts:
            return "budget_spent"
        if self.max_elapsed is not None and elapsed >= self.max_elapsed:
            return "time_spent"
        return "spend_cap" if self.max_spend is not None and spend >= self.max_spend else ""


RETRY_AFTER_CAP = 3600.0  # seconds; a provider that asks for more is asked again after an hour
IDENTICAL_REPLAYS = 2  # the provider replays one stored error: asking again with the key tells nothing new


def classify(error: BaseException, spec: ActionSpec) -> ErrorClass:
    """The class of what `perform` raised.

    A status speaks only where the action declares it as proof of "not applied" (rule 10): proxies answer 502 to 504
    after effects. Only what commits with its settlement can be rolled back.
    """
    for kind, name in _NAMES:
        if isinstance(error, kind):
            if name is ErrorClass.ROLLED_BACK and spec.repeat is not Repeat.LOCAL:
                return ErrorClass.UNKNOWN
            undeclared = error.status is not None and error.status not in spec.not_applied
            return ErrorClass.UNKNOWN if undeclared and name in NOT_APPLIED else name
    return ErrorClass.UNKNOWN


def decide(error_class: ErrorClass, spec: ActionSpec) -> Next:
    """The row and column of the table."""
    return DECISION[error_class][spec.repeat]


def nothing_can_find_out(error_class: ErrorClass, spec: ActionSpec, provider: object) -> bool:
    """Whether an unknown attempt stays unknown whatever automation does: a person is called at once, not later.

    The table has nothing but a look-up for it, and the provider offers none, so waiting for one would hide it.
    """
    return decide(error_class, spec) is Next.ESCALATE and not hasattr(provider, "look_up")


def covers_earlier(error_class: ErrorClass, spec: ActionSpec) -> bool:
    """Whether a refusal under the same key also settles earlier unknown attempts.

    Only where the action declares it, and never a refused credential: that is checked before the key is looked at.
    """
    return spec.same_key_covers_earlier and error_class in (ErrorClass.REJECTED, ErrorClass.INVALID)


def boot_seconds() -> float:
    """Seconds since boot, suspension included: the clock of send-by deadlines. It never steps back."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def lease_seconds(spec: ActionSpec) -> float:
    """How long a claim holds: the call's time-out and a margin, never longer than the action may take."""
    return min(spec.timeout.total_seconds() + settings.AFTERCALL_LEASE_MARGIN, spec.max_duration.total_seconds())


def look_up_delay(look_ups: int, *, provable_in: float | None = None) -> float:
    """Seconds until the next look-up: doubling, but there when absence becomes provable; no policy changes it."""
    longest = min(settings.AFTERCALL_BACK_OFF * 2.0 ** min(look_ups, 16), settings.AFTERCALL_BACK_OFF_CAP)
    waited = longest * random.uniform(0.75, 1.0)  # noqa: S311 - spreads load, guards nothing
    if provable_in is not None and 0 < provable_in < waited * 2:
        return provable_in + 0.05
    return waited


def same_key_seconds(spec: ActionSpec) -> float:
    """Seconds from the first send during which a same-key retry is safe (rule 8). Zero or less: never."""
    return spec.key_retention.total_seconds() - settings.AFTERCALL_RETENTION_MARGIN
