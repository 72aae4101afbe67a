"""A provider inside the test: its answers are scripted, and what it applied is counted.

    clerk.answers(OutcomeUnknown("..."), applied("r-1"))     # what the next calls get; then every call is applied
    clerk.sees(absent(), found("r-1", order="1002"))         # what the next look-ups see; the last one repeats

`order()` is the one intent of the fixed cast: Acme's damaged-item claim 1002, step `refund`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from reconciliation import registry
from reconciliation.actors import Actor, Permission
from reconciliation.executor import Held, Intent
from reconciliation.keys import Identity
from reconciliation.models import JournalEntry, Operation
from reconciliation.providers.base import ActionSpec, Call, Finding, Receipt, Repeat, Source, Verdict
from tests.database import TestDatabase
from tests.world import PROVIDERS, World

AGENT = Actor(id="agent:claims", kind="agent")
OLGA = Actor(id="person:1", kind="person", name="Olga Operator", permissions=frozenset(Permission))
REFUSALS = frozenset({401, 402, 422, 429, 503})


def spec(**promises: Any) -> ActionSpec:
    common = {
        "settles_after": timedelta(seconds=60),
        "escalate_after": timedelta(minutes=30),
        "not_applied": REFUSALS,
        "shown": ("id", "order", "amount", "currency"),
        "compare": {"order": "order", "amount": "amount"},
    }
    return ActionSpec(**{**common, **promises})


KEYED = {"repeat": Repeat.KEYED, "key_retention": timedelta(days=1)}
LISTED = {"absence_is_proof": True}


class Clerk:
    """What the tests call `clerk`: one account, one action for each kind of repeatability."""

    name, account = "clerk", "main"

    def __init__(self) -> None:
        self.actions = {
            "keyed": spec(**KEYED, **LISTED, money=("amount", "currency")),
            "covering": spec(**KEYED, same_key_covers_earlier=True),
            "unlisted": spec(**KEYED),
            "forgetful": spec(repeat=Repeat.KEYED),
            "lookup": spec(repeat=Repeat.LOOKUP, **LISTED),
            "natural": spec(repeat=Repeat.NATURAL, id_names_target=True),
            "read": spec(repeat=Repeat.READ),
            "none": spec(),
            "noisy": spec(**KEYED, volatile=("client_attempt_id", "sent_at", "ciphertext")),
        }
        self.clear()

    def clear(self) -> None:
        self.script: list[Any] = []
        self.sights: list[Any] = []
        self.calls: list[Call] = []
        self.look_ups: list[Call] = []
        self.effects: list[str] = []

    def answers(self, *script: Any) -> None:
        self.script = list(script)

    def sees(self, *sights: Any) -> None:
        self.sights = list(sights)

    def perform(self, call: Call) -> Any:
        self.calls.append(call)
        step = self.script.pop(0) if self.script else applied(f"r-{len(self.calls)}", **call.request)
        if callable(step):
            step = step(call)
        if isinstance(step, Receipt):
            self.effects.append(call.key)
        if isinstance(step, BaseException):
            raise step
        return step

    def look_up(self, call: Call) -> Any:
        self.look_ups.append(call)
        sight = self.sights.pop(0) if len(self.sights) > 1 else self.sights[0] if self.sights else cannot_tell()
        if isinstance(sight, BaseException):
            raise sight
        return sight


class Blind:
    """A provider that can tell nothing afterwards."""

    name, account = "blind", "main"

    def __init__(self) -> None:
        repeated = {"natural": spec(repeat=Repeat.NATURAL, id_names_target=True), "read": spec(repeat=Repeat.READ)}
        self.actions = {"none": spec(), "keyed": spec(**KEYED), **repeated}

    def perform(self, call: Call) -> Receipt:
        return clerk_.perform(call)


clerk_, blind = Clerk(), Blind()


def applied(effect: str | None = "r-1", **observed: Any) -> Receipt:
    shown = {"id": effect, **observed}
    return Receipt(provider_operation_id=effect, result=shown, observed=shown)


def found(effect: str = "r-1", **observed: Any) -> Finding:
    shown = {"id": effect, "order": "1002", "amount": 4200, **observed}
    return Finding(verdict=Verdict.FOUND, source=Source.BY_KEY, provider_operation_id=effect, observed=shown)


def absent(**facts: Any) -> Finding:
    whole = {"authoritative": True, "complete": True, **facts}
    return Finding(verdict=Verdict.ABSENT, source=Source.BY_KEY, **whole)


def saw(verdict: Verdict, **facts: Any) -> Finding:
    return Finding(verdict=verdict, source=Source.BY_REFERENCE, **facts)


def cannot_tell(note: str = "the index lags") -> Finding:
    return saw(Verdict.CANNOT_TELL, note=note)


def identity(**parts: Any) -> Identity:
    whole = {"tenant": "acme", "workflow_type": "damaged_item", "workflow_id": "1002", "step": "refund"}
    return Identity(**{**whole, "business_object": "order-1002", **parts})


def order(
    action: str = "keyed", *, provider: str = "clerk", held: Held | None = None, request: Any = None, **parts: Any
) -> Intent:
    if request is None:
        request = {"order": "1002", "amount": 4200, "currency": "USD"}
    return Intent(identity=identity(**parts), provider=provider, action=action, request=request, held=held)


def row(pk: int) -> Operation:
    return Operation.objects.get(pk=pk)


def kinds(pk: int) -> list[str]:
    """What the journal holds of an operation, in order."""
    return list(JournalEntry.objects.filter(operation_id=pk).order_by("id").values_list("kind", flat=True))


@pytest.fixture
def clerk(ledger_db: TestDatabase, settings: Any) -> Iterator[Clerk]:
    """The scripted provider, with nothing scripted and nothing counted."""
    settings.AFTERCALL_PROVIDERS = ["tests.scripted.clerk_", "tests.scripted.blind"]
    registry.forget()
    clerk_.clear()
    yield clerk_
    registry.forget()


@pytest.fixture
def shop(ledger_db: TestDatabase, world: World, settings: Any) -> Iterator[World]:
    """The order desk's own adapters, pointed at the sandbox world."""
    settings.AFTERCALL_PROVIDERS = [f"examples.order_desk.providers.{name}" for name in PROVIDERS]
    registry.forget()
    yield world
    registry.forget()
