"""The outside world of a crash sweep, in memory: doubles of a deployment's providers that promise what it declares.

A double keeps the contract of its action (a keyed one remembers keys, a natural one does nothing twice, one without
either makes an effect at every call) and counts what it really did. Nothing leaves the process.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from reconciliation import policy
from reconciliation.providers.base import (
    ActionSpec,
    Call,
    Finding,
    Json,
    KeyInUse,
    NotSent,
    OutcomeUnknown,
    OwnFault,
    ProviderError,
    RateLimited,
    Receipt,
    Rejected,
    Repeat,
    Source,
    Unauthorized,
    Unavailable,
    Verdict,
)


class Oops(Exception):
    """A fault that no rule names, such as a bug in an adapter."""


@dataclass(frozen=True)
class Fault:
    """What happens to one call: whether the effect comes (at once, or late), and what the caller is told."""

    effect: str = "none"  # none | at_once | late
    error: Callable[[], Exception] | None = None
    silent: bool = False  # the caller waits until its time-out
    looks: tuple[str, ...] = ()  # what the next look-ups get instead of the truth: down | in_progress | cannot_tell


FAULTS: dict[str, Fault] = {
    "no fault": Fault("at_once"),
    "not sent": Fault(error=lambda: NotSent("refused connection")),
    "own fault": Fault(error=lambda: OwnFault("malformed credential")),
    "unavailable": Fault(error=lambda: Unavailable("later", status=503)),
    "rate limited": Fault(error=lambda: RateLimited("slower", status=429, retry_after=7)),
    "rejected": Fault(error=lambda: Rejected("no", status=402)),
    "unauthorized": Fault(error=lambda: Unauthorized("who are you", status=401)),
    "time-out before the effect": Fault(error=lambda: OutcomeUnknown("no answer"), silent=True),
    "time-out after the effect": Fault("at_once", lambda: OutcomeUnknown("no answer"), silent=True),
    "time-out, effect comes late": Fault("late", lambda: OutcomeUnknown("no answer"), silent=True),
    "reset before the effect": Fault(error=lambda: OutcomeUnknown("reset")),
    "reset after the effect": Fault("at_once", lambda: OutcomeUnknown("reset")),
    "proxy's 502 after the effect": Fault("at_once", lambda: Unavailable("bad gateway", status=502)),
    "bug of the adapter after the effect": Fault("at_once", lambda: Oops("NoneType")),
    "key in use": Fault("late", lambda: KeyInUse("still at it", status=409)),
    "silence, and look-ups that fail": Fault(
        "at_once", lambda: OutcomeUnknown("no answer"), silent=True, looks=("down", "cannot_tell", "in_progress")
    ),
    "silence, and look-ups that fail for ever": Fault(
        "at_once", lambda: OutcomeUnknown("no answer"), silent=True, looks=("down",) * 1000
    ),
}
LATE = timedelta(seconds=3)  # below what the actions declare as `settles_after`


@dataclass
class Effect:
    """One thing that really happened."""

    provider: str
    action: str
    key: str
    observed: Json
    at: datetime


@dataclass
class World:
    """Everything outside: what happened, which keys are remembered, what is still on its way, what is scripted."""

    now: Callable[[], datetime]
    name: str = "w"  # part of every id: an object proves one operation, ever
    effects: list[Effect] = field(default_factory=list)
    keys: dict[str, tuple[str, Effect, datetime]] = field(default_factory=dict)
    coming: list[tuple[datetime, Callable[[], Effect]]] = field(default_factory=list)
    script: dict[str, list[str]] = field(default_factory=dict)
    looks: dict[str, list[str]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    rows: Callable[[str], int] = lambda key: 0  # committed rows of a local effect, see book.py
    calls: Counter[str] = field(default_factory=Counter)

    def at(self, action: str, *faults: str) -> None:
        """Script the next calls of `action`."""
        self.script.setdefault(action, []).extend(faults)

    def count(self, key: str) -> int:
        """How often the operation with this key really happened."""
        return sum(effect.key == key for effect in self.effects) + self.rows(key)

    def is_so(self, action: str, request: Json) -> bool:
        """Whether the target of a natural action is in the state that was asked for, whoever brought it there."""
        known = self.keys.get(_body(action, request))
        return known is not None and known[1] in self.effects

    def time_passes(self) -> None:
        """Let what is on its way arrive, as far as its time has come."""
        now, due = self.now(), self.coming
        self.coming = [one for one in due if one[0] > now]
        for moment, land in due:
            if moment <= now:
                land()

    def land(self, provider: str, spec: ActionSpec, call: Call) -> Effect:
        """Do it, as the provider's promise has it: at most once a key, or a target, or every time."""
        now, body = self.now(), _body(call.action, call.request)
        name = call.key if spec.repeat is Repeat.KEYED else body
        known = self.keys.get(name) if spec.repeat in (Repeat.KEYED, Repeat.NATURAL) else None
        if known and (spec.repeat is Repeat.NATURAL or now - known[2] < spec.key_retention):
            if known[0] != body:
                raise Rejected("this key was used with another request", status=422)
            return known[1]
        made = {"id": f"{call.action.split('.')[0]}_{self.name}_{len(self.keys) + len(self.effects)}", "status": "done"}
        shown = {field: call.request[asked] for asked, field in spec.compare.items() if asked in call.request}
        effect = Effect(provider, call.action, call.key, {**call.request, **made, **shown}, now)
        if spec.repeat is not Repeat.READ:
            self.effects.append(effect)
        self.keys[name] = (body, effect, now)
        return effect


def _body(action: str, request: Json) -> str:
    """What is asked, and of what: two calls with one body want the same state of the same target."""
    return json.dumps([action, request], sort_keys=True)


@dataclass
class Double:
    """A provider that cannot be asked afterwards."""

    name: str
    account: str
    actions: Mapping[str, ActionSpec]
    world: World
    boundary: Callable[[str], None]

    def perform(self, call: Call) -> Receipt:
        """One call: a boundary before the effect, one after it, and what the script says in between."""
        spec, world = self.actions[call.action], self.world
        self.boundary(f"{call.action}: about to leave")
        if call.send_by is not None and policy.boot_seconds() >= call.send_by:
            raise NotSent("the time to send had passed")
        self.boundary(f"{call.action}: under way")
        waiting = world.script.get(call.action)
        fault = FAULTS[waiting.pop(0)] if waiting else FAULTS["no fault"]
        world.calls[call.key] += 1
        world.time_passes()
        if call.key in world.refused:
            raise Rejected("no", status=402, replayed=True)
        effect = self._come_true(fault, spec, call)
        world.looks.setdefault(call.key, []).extend(fault.looks)
        self.boundary(f"{call.action}: done there, not answered")
        if fault.silent:
            self.wait(spec.timeout)
        if fault.error is not None:
            error = fault.error()
            if isinstance(error, Rejected) and spec.repeat is Repeat.KEYED:
                world.refused.add(call.key)  # such a provider keeps its answer under the key, a refusal too
            raise error
        assert effect is not None
        return Receipt(
            provider_operation_id=str(effect.observed["id"]), result=effect.observed, observed=effect.observed
        )

    def wait(self, seconds: timedelta) -> None:
        """Time passes while a call is not answered. The sweep puts its clock here."""

    def _come_true(self, fault: Fault, spec: ActionSpec, call: Call) -> Effect | None:
        if fault.effect == "at_once":
            return self.world.land(self.name, spec, call)
        if fault.effect == "late":
            late = min(LATE, spec.settles_after * 0.9) + (spec.timeout if fault.silent else timedelta(0))
            self.world.coming.append((self.world.now() + late, lambda: self.world.land(self.name, spec, call)))
        return None


class SeeingDouble(Double):
    """A provider that shows what it did."""

    def look_up(self, call: Call) -> Finding:
        """The truth, unless something else is scripted; absence counts only where the action declares it."""
        self.boundary(f"{call.action}: looked up")
        spec = self.actions[call.action]
        self.world.time_passes()
        scripted = self.world.looks.get(call.key)
        if scripted:
            return _disturbed(scripted.pop(0))
        found = [effect for effect in self.world.effects if effect.key == call.key]
        if spec.repeat is Repeat.NATURAL and not found:
            body = _body(call.action, call.request)
            found = [self.world.keys[body][1]] if body in self.world.keys else []
        sure = spec.absence_is_proof
        if not found:
            verdict = Verdict.ABSENT if sure else Verdict.CANNOT_TELL
            return Finding(verdict=verdict, source=Source.BY_REFERENCE, authoritative=sure, complete=True)
        if len(found) > 1:
            seen = tuple(effect.observed for effect in found)
            return Finding(verdict=Verdict.SEVERAL, source=Source.BY_REFERENCE, candidates=seen)
        seen_as = found[0].observed
        return Finding(
            verdict=Verdict.FOUND, source=Source.BY_KEY, provider_operation_id=str(seen_as["id"]), observed=seen_as,
            authoritative=True, complete=True,
        )  # fmt: skip


def _disturbed(how: str) -> Finding:
    if how == "down":
        raise ProviderError("the provider does not answer")
    verdict = Verdict.IN_PROGRESS if how == "in_progress" else Verdict.CANNOT_TELL
    return Finding(verdict=verdict, source=Source.BY_KEY, note="scripted")


def doubles(of: Mapping[str, Any], world: World, boundary: Callable[[str], None]) -> dict[str, Double]:
    """A double of each provider, with exactly its declarations."""
    return {
        name: (SeeingDouble if hasattr(real, "look_up") else Double)(name, real.account, real.actions, world, boundary)
        for name, real in of.items()
    }
