"""Choice steps: what a model, the clock or chance proposes is validated, stored once, and reused on every replay."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import structlog
from pydantic import BaseModel, PydanticUserError, ValidationError

from . import leases, sealing, transition, workers
from .claims import Held
from .keys import InvalidField, canonical
from .models import Chosen, JournalEntry, Run
from .progress import Progress
from .providers.base import Json
from .scrub import LIMIT, excerpt
from .states import RunState
from .workflows import Choice

log = structlog.get_logger(__name__)


GIVEN_UP = "decision_given_up"
MOST = 16_384  # bytes of a refused proposal that are kept
OTHER = "•"  # in place of a name that no declaration knows
INDICES = range(10_000)  # a larger number may be a key of the model's own


@dataclass(frozen=True)
class Kept:
    """What is stored of a proposal: what may be seen, a sealed token of the rest, and what of it was not kept."""

    shown: str = "{}"
    sealed: str = ""
    lost: str = ""


NOTHING = Kept()


class NotChosenAgain(Exception):
    """A fresh decision that may not be asked for. The text says why and what would allow it."""


def choose(progress: Progress, step: Choice, lease: Held, *, ends: float = math.inf) -> tuple[str, str] | None:
    """Ask once and store what was proposed; ask again, within a budget of its own, where the proposal is invalid.

    Each time is on record before it is asked, with a lease that leaves time for it: neither a slow model nor one that
    takes its worker down is asked without end. Nothing is asked again after `ends` (monotonic seconds): the step is not
    decided then. Returns (step, reason) where the run stops for a person.
    """
    run, version = progress.run, decided_version(progress.run, step.name) + 1
    try:
        facts = progress.facts
    except sealing.CannotOpen:
        return step.name, "request_unreadable"
    reason = reasons(run).get((step.name, version - 1), "")
    while _asked(run, step, lease, version):
        proposed: tuple[Any, ...] = ()
        try:
            proposed = (step.choose(facts),)
            value = _valid(step, *proposed)
        except Exception as error:  # a model that fails to answer has proposed nothing valid
            kept = _kept(step, *proposed) if proposed else NOTHING
            problem = "; ".join(filter(None, (_problem(step, error, answered=bool(proposed)), kept.lost)))
            _store(run, step, lease, version=version, valid=False, reason=reason, kept=kept, problem=problem)
            log.info("proposal_refused", run=run.pk, step=step.name, error=type(error).__name__)
            if time.monotonic() >= ends and not is_spent(run, step):
                return None
            continue
        kept = Kept(*sealing.split(value, step.shown))
        _store(run, step, lease, version=version, valid=True, reason=reason, kept=kept)
        return None
    return step.name, "no_valid_proposal"


def _asked(run: Run, step: Choice, lease: Held, version: int) -> int:
    """Which proposal may be asked for now; 0: as many were as may be. Raises RunNotHeld."""
    return transition.ask_for_proposal(
        run.subject,
        generation=lease.generation,
        seconds=leases.of_step(step),
        step=step.name,
        version=version,
        most=step.proposals,
        observer=workers.me(),
    )


# What is on record of a run's decisions


def asked_for(run: Run) -> Counter[tuple[str, int]]:
    """How often each version of each choice was asked for. From before that was on record, nothing."""
    return Counter((data["step"], data["version"]) for data in _told(run, "proposal_asked"))


def is_spent(run: Run, step: Choice) -> bool:
    """Whether the version that is to be decided was asked for as often as it may be."""
    version = decided_version(run, step.name) + 1
    refused = Chosen.objects.filter(run=run, step=step.name, version=version, valid=False).count()
    return max(refused, asked_for(run)[step.name, version]) >= step.proposals


def reasons(run: Run) -> dict[tuple[str, int], str]:
    """Why each version of a choice was given up that was."""
    return {(data["step"], data["version"]): data["reason"] for data in _told(run, GIVEN_UP)}


def _told(run: Run, kind: str) -> Iterator[Json]:
    entries = JournalEntry.objects.filter(run=run, kind=kind).order_by("id")
    return map(json.loads, entries.values_list("data", flat=True))


def decided_version(run: Run, name: str) -> int:
    """The newest version of a choice that was decided, or given up for a fresh one. 0: none yet."""
    valid = Chosen.objects.filter(run=run, step=name, valid=True).values_list("version", flat=True)
    given_up = [int(entry.rpartition("@")[2]) for entry in run.voided if entry.rpartition("@")[0] == name]
    return max([*valid, *given_up], default=0)


def give_up(progress: Progress, name: str) -> int:
    """The version that is given up to have a choice made anew. Raises NotChosenAgain where that is not allowed."""
    run, workflow = progress.run, progress.workflow
    step = next((step for step in workflow.steps if step.name == name), None)
    if not isinstance(step, Choice):
        raise NotChosenAgain(f"{name!r} is no decision of this workflow.")
    if run.state == RunState.COMPENSATING:
        raise NotChosenAgain("The run is being undone; nothing of it is decided anew.")
    followed = [other.name for other in workflow.steps if name in workflow.all_needs(other)]
    if any(other in progress.operations or other in progress.chosen for other in followed):
        raise NotChosenAgain("Steps already followed from this decision; undo the run instead.")
    if run.replans >= workflow.max_replans:
        raise NotChosenAgain(f"This run was decided anew {run.replans} times already, which is as often as it may be.")
    decided = decided_version(run, name)
    if name in progress.chosen:
        return decided
    # A version without any valid proposal is given up as well, but not one of which nobody was asked yet.
    refused = Chosen.objects.filter(run=run, step=name, version=decided + 1).exists()
    if not refused and not asked_for(run)[name, decided + 1]:
        raise NotChosenAgain(f"{name} was not asked for yet: it is decided when the run gets there.")
    return decided + 1


# One proposal


def _valid(step: Choice, proposal: Any) -> Json:
    """The proposal as plain JSON. Raises what is wrong with it."""
    if step.schema is not None:
        proposal = step.schema.model_validate(proposal).model_dump(mode="json")
    elif isinstance(proposal, BaseModel):
        proposal = proposal.model_dump(mode="json")
    if not isinstance(proposal, dict):
        raise InvalidField(step.name, "must propose a JSON object")
    canonical(proposal, field=step.name)
    return proposal


def _kept(step: Choice, proposal: Any) -> Kept:
    """What is kept of a refused proposal: plain values of shown fields can be seen, all else is sealed."""
    try:
        if isinstance(proposal, BaseModel):
            proposal = proposal.model_dump(mode="json")
        text = canonical(proposal, field=step.name)
    except Exception:
        return Kept(lost=f"not kept, since it is no JSON: {type(proposal).__name__}")
    if len(text) > MOST:
        begins = text[:MOST].decode(errors="ignore")
        return Kept(sealed=sealing.seal({OTHER: begins}), lost=f"the first {MOST} of its {len(text)} bytes are kept")
    if not isinstance(proposal, dict):
        return Kept(sealed=sealing.seal({OTHER: proposal}))
    return Kept(*sealing.split(proposal, (name for name in step.shown if _is_plain(proposal.get(name)))))


def _is_plain(value: Any) -> bool:
    """Whether a value has no names or long texts of the model's own in it."""
    return not isinstance(value, (dict, list)) and len(str(value)) <= LIMIT


def declared(step: Choice) -> frozenset[str]:
    """The names that the declaration gives to fields, at any depth: every other name is the model's own word."""
    return frozenset(step.shown) | (_names_of(step.schema) if step.schema is not None else frozenset())


@lru_cache(maxsize=64)
def _names_of(schema: type[BaseModel]) -> frozenset[str]:
    names = set(schema.model_fields)
    for by_alias in (True, False):
        try:
            names |= set(_properties(schema.model_json_schema(by_alias=by_alias)))
        except PydanticUserError:  # a type that has no JSON schema: the names at the top are known all the same
            continue
    return frozenset(names)


def _properties(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        schema = dict(enumerate(schema))
    if isinstance(schema, dict):
        named = schema.get("properties")
        yield from named if isinstance(named, dict) else ()
        for part in schema.values():
            yield from _properties(part)


def _problem(step: Choice, error: Exception, *, answered: bool) -> str:
    """Why a proposal was refused, without repeating what it proposed, nor a name that it made up."""
    if isinstance(error, ValidationError):
        names = declared(step)
        return excerpt("; ".join(f"{_place(one['loc'], names)}: {one['type']}" for one in error.errors()[:10]))
    if answered and isinstance(error, InvalidField):
        return excerpt(str(error))
    return f"the {'schema' if answered else 'chooser'} raised {type(error).__name__}"


def _place(loc: tuple[int | str, ...], names: frozenset[str]) -> str:
    parts = (str(part) if part in names or part in INDICES else OTHER for part in loc)
    return ".".join(parts) or "proposal"


def _store(
    run: Run, step: Choice, lease: Held, *, version: int, valid: bool, reason: str, kept: Kept, problem: str = ""
) -> None:
    transition.choose(
        run.subject,
        generation=lease.generation,
        row={
            "step": step.name,
            "version": version,
            "valid": valid,
            "problem": problem,
            "reason": reason,
            "value_shown": kept.shown,
            "value_sealed": kept.sealed,
        },
    )
