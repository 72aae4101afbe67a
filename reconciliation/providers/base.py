"""The contract between the ledger and the outside world.

A provider is an adapter to one account at one outside system. It performs an action or says, with one of the errors
below, exactly how much it knows; and, where the outside system allows it, it looks up what became of an earlier call.
An adapter never retries, never follows redirects and never guesses: whatever it does not know it raises as
`OutcomeUnknown`, and whatever it raises that is not named here counts as unknown too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Protocol

Json = dict[str, Any]


class Repeat(StrEnum):
    """What it means to send the same call twice (design: retry decision)."""

    READ = "read"  # has no effect
    NATURAL = "natural"  # setting a value: twice is the same as once
    KEYED = "keyed"  # the provider deduplicates by the operation key, for `key_retention`
    LOOKUP = "lookup"  # twice is two effects, but absence can be proven by looking
    NONE = "none"  # twice is two effects, and nothing proves absence
    LOCAL = "local"  # the effect and its settlement are one transaction in this database


class Verdict(StrEnum):
    """What one look-up saw."""

    FOUND = "found"
    REMOVED = "removed"  # it existed and was taken away since
    ABSENT = "absent"  # nothing there; whether that proves anything is judged elsewhere
    IN_PROGRESS = "in_progress"
    SEVERAL = "several"  # more than one candidate fits
    MISMATCH = "mismatch"  # something is there under our reference, but it is not what was asked
    CANNOT_TELL = "cannot_tell"


class Source(StrEnum):
    """How a look-up went about it, from the strongest to the weakest."""

    BY_KEY = "by_key"
    BY_ID = "by_id"
    BY_REFERENCE = "by_reference"
    BY_WINDOW = "by_window"


@dataclass(frozen=True, kw_only=True)
class ActionSpec:
    """What one action of a provider promises. Whatever is not declared is taken at its most cautious."""

    repeat: Repeat = Repeat.NONE
    key_retention: timedelta = timedelta(0)  # how long the provider remembers a key, from the first send
    same_key_covers_earlier: bool = False  # an answer under the key also settles earlier unknown attempts
    settles_after: timedelta = timedelta(minutes=10)  # in-flight time plus index lag; before it nothing proves absence
    absence_is_proof: bool = False  # an authoritative, complete, empty answer proves absence
    absence_reads: int = 2  # complete empty reads, spaced, before absence counts
    not_applied: frozenset[int] = frozenset()  # HTTP statuses that prove "not applied"
    timeout: timedelta = timedelta(seconds=30)
    max_duration: timedelta = timedelta(minutes=15)  # no lease outlives it
    escalate_after: timedelta = timedelta(minutes=15)  # unknown for so long: a person must act
    attempts: int = 3  # budget: calls sent for one operation, before it escalates (unknown) or fails (clean)
    compensate_with: str | None = None
    undo_by: str | None = None  # permission needed to reverse it by hand
    undo_second_person: bool = False  # and another person's consent to that
    volatile: tuple[str, ...] = ()  # request fields left out of the fingerprint; never one that is compared
    shown: tuple[str, ...] = ()  # request, result and observed fields that may be seen; all others are encrypted
    compare: Mapping[str, str] = field(default_factory=dict)  # request field -> field of what the provider shows
    headline: str = ""  # "Refund {amount} for order {order}"; {amount} is rendered as money when it is `money[0]`
    money: tuple[str, str] | None = None  # request fields of minor units and currency
    ceiling: str | None = None  # request field: minor units that all of this action on one object may come to
    # A settled operation stays for the longest of key_retention and these; then a tombstone answers for it.
    replay_window: timedelta = timedelta(days=30)  # how late the same request may come again
    dispute_window: timedelta = timedelta(days=180)  # how long somebody may ask what was done, and for proof
    message_lifetime: timedelta = timedelta(days=14)  # how long a queue or a webhook may still deliver it
    shred_after: timedelta | None = None  # settled for so long: what is sealed is emptied; None: when the row goes
    id_names_target: bool = False  # the provider's id names the thing acted on, so it may recur across operations

    def __post_init__(self) -> None:
        if self.repeat is Repeat.LOOKUP and not self.absence_is_proof:
            raise ValueError("an action that is repeated after a look-up needs absence_is_proof")
        for name in self.volatile:
            if name in self.compare:
                raise ValueError(f"{name!r} is compared with what the provider shows, so it cannot be volatile")

        if self.ceiling is not None and (self.money is None or self.ceiling in self.volatile):
            raise ValueError("a ceiling needs money, and cannot be volatile: it is what the sum is held against")

    @property
    def id_names_effect(self) -> bool:
        """Whether the provider's id belongs to one operation alone. What was only read may be read again."""
        return not self.id_names_target and self.repeat is not Repeat.READ

    @property
    def keep(self) -> timedelta:
        """How long a settled operation stays, and how old an intent may be that nothing here knows."""
        return max(self.replay_window, self.key_retention, self.dispute_window, self.message_lifetime)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One attempt to perform, or one look-up of, an operation.

    `key` is the stored operation key. `send_by` is a reading of the boot-time clock in seconds
    (`policy.boot_seconds()`); the adapter compares it as the last thing before it writes to the socket.
    """

    action: str
    key: str
    request: Json
    tenant: str
    attempt: int
    provider_operation_id: str | None = None
    first_sent_at: datetime | None = None
    last_sent_at: datetime | None = None
    send_by: float | None = None


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The provider's answer. `accepted` means that it took the order, not that it was done: it is looked up."""

    status: str = "applied"  # applied | accepted
    provider_operation_id: str | None = None
    result: Json = field(default_factory=dict)
    observed: Json = field(default_factory=dict)
    cost: int = 0  # minor units; what was accepted counts as well
    replayed: bool = False


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one look-up saw. `authoritative` and `complete` say whether an empty answer could prove anything."""

    verdict: Verdict
    source: Source
    provider_operation_id: str | None = None
    observed: Json = field(default_factory=dict)
    authoritative: bool = False  # a strongly consistent source, not an index
    complete: bool = False  # read to its end
    candidates: tuple[Json, ...] = ()
    note: str = ""
    cost: int = 0  # minor units that what it saw has cost, where it shows that; counted once for one effect


class ProviderError(Exception):
    """Base of what an adapter may raise. `status` is the HTTP status where there was one; `excerpt` is untrusted.

    `replayed` says that the provider marked the answer as a stored one, `retry_after` after how many seconds it wants
    to hear from us again, where it said so in a form that can be read, `cost` what the call cost all the same, in minor
    units.
    """

    def __init__(
        self,
        sentence: str = "",
        *,
        status: int | None = None,
        excerpt: str = "",
        request_id: str = "",
        replayed: bool = False,
        retry_after: float | None = None,
        cost: int = 0,
    ) -> None:
        super().__init__(sentence)
        self.sentence, self.status, self.excerpt = sentence, status, excerpt
        self.request_id, self.replayed = request_id, replayed
        self.retry_after, self.cost = retry_after, cost


class NotSent(ProviderError):
    """No byte of the request left this machine."""


class OwnFault(NotSent):
    """Nothing was sent because of a fault of our own that only a person repairs: a malformed credential, a setting."""


class Unavailable(ProviderError):
    """The provider declared that it did not apply the call and may do so later."""


class RateLimited(ProviderError):
    """The provider declared that it did not apply the call because there were too many."""


class OutcomeUnknown(ProviderError):
    """The call may or may not have been applied."""


class Rejected(ProviderError):
    """The provider refused the call for good, and declared that as proof that it was not applied."""


class Invalid(ProviderError):
    """The provider (or the adapter, before sending) found the request malformed."""


class Unauthorized(ProviderError):
    """The provider refused our credential."""


class KeyInUse(ProviderError):
    """The provider is still working on an earlier call with this key."""


class RolledBack(ProviderError):
    """A local effect was rolled back, so nothing of it was applied. The ledger itself says so; an adapter cannot."""


class Provider(Protocol):
    """One account at one outside system."""

    name: str
    account: str  # part of the fingerprint and of effect uniqueness
    actions: Mapping[str, ActionSpec]

    def perform(self, call: Call) -> Receipt:
        """Send the call once and say what came of it."""
        ...


class LookUpProvider(Provider, Protocol):
    """A provider that can say what became of an earlier call."""

    def look_up(self, call: Call) -> Finding:
        """Look for the effect of `call`: by key, then by stored id, then by a narrow reference and time window.

        Raises ProviderError where the provider does not answer; that is `cannot_tell`.
        """
        ...


class CheckingProvider(Provider, Protocol):
    """A provider that can show what an action rests on, before it is sent under a person's consent."""

    def precondition(self, call: Call) -> Json | None:
        """Read what must not change between the consent and the send: an etag, a version, a total. None: nothing.

        Asked when consent is asked for, and once more just before the request leaves; must have no effect. Where both
        answers differ nothing is sent, and the person is asked again and shown what changed.
        """
        ...


def compare(spec: ActionSpec, request: Json, observed: Json) -> dict[str, str]:
    """Each compared request field: equal, differs, or not_shown by the provider. Exact, never "similar enough"."""
    return {name: _seen(request[name], observed, shown) for name, shown in spec.compare.items() if name in request}


def _seen(asked: Any, observed: Json, shown: str) -> str:
    if shown not in observed:
        return "not_shown"
    return "equal" if _same(asked, observed[shown]) else "differs"


def differences(spec: ActionSpec, request: Json, observed: Json) -> dict[str, tuple[Any, Any]]:
    """Compared request fields that the provider shows otherwise, or not at all: field -> (asked, shown)."""
    verdicts = compare(spec, request, observed)
    return {
        name: (request[name], observed.get(spec.compare[name])) for name, said in verdicts.items() if said != "equal"
    }


def _same(asked: Any, shown: Any) -> bool:
    """Equal in value and kind: 1, "1" and true are three things, 1 and 1.0 are one."""
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (asked, shown))
    return bool(asked == shown) and (numbers or type(asked) is type(shown))
