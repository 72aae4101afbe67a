"""Choice steps: what a model, the clock or chance proposes is validated, stored once, and reused on every replay."""

from __future__ import annotations

from typing import Any

import structlog
from pydantic import BaseModel, ValidationError

from . import leases, sealing, transition, workers
from .claims import Held
from .keys import InvalidField, canonical
from .models import Chosen, Run
from .progress import Progress
from .providers.base import Json
from .scrub import excerpt
from .workflows import Choice

log = structlog.get_logger(__name__)


class NotChosenAgain(Exception):
    """A fresh decision that may not be asked for. The text says why and what would allow it."""


def choose(progress: Progress, step: Choice, lease: Held) -> tuple[str, str] | None:
    """Ask once and store what was proposed; ask again, within a budget of its own, where the proposal is invalid.

    Each time is on record before it is asked, with a lease that leaves time for it: neither a slow model nor one that
    takes its worker down is asked without end. Returns (step, reason) where the run stops for a person.
    """
    run, version = progress.run, decided_version(progress.run, step.name) + 1
    try:
        facts = progress.facts
    except sealing.CannotOpen:
        return step.name, "request_unreadable"
    while _asked(run, step, lease, version):
        try:
            value = _valid(step, step.choose(facts))
        except Exception as error:  # a model that fails to answer has proposed nothing valid
            _store(run, step, lease, version=version, problem=_problem(error))
            log.info("proposal_refused", run=run.pk, step=step.name, error=type(error).__name__)
            continue
        _store(run, step, lease, version=version, value=value)
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


def decided_version(run: Run, name: str) -> int:
    """The newest version of a choice that was decided, or given up for a fresh one. 0: none yet."""
    valid = Chosen.objects.filter(run=run, step=name, valid=True).values_list("version", flat=True)
    given_up = [int(entry.rpartition("@")[2]) for entry in run.voided if entry.rpartition("@")[0] == name]
    return max([*valid, *given_up], default=0)


def give_up(progress: Progress, name: str) -> str:
    """What `Run.voided` takes to have a choice made anew. Raises NotChosenAgain where that is not allowed."""
    run, workflow = progress.run, progress.workflow
    step = next((step for step in workflow.steps if step.name == name), None)
    if not isinstance(step, Choice):
        raise NotChosenAgain(f"{name!r} is no decision of this workflow.")
    followed = [other.name for other in workflow.steps if name in workflow.all_needs(other)]
    if any(other in progress.operations or other in progress.chosen for other in followed):
        raise NotChosenAgain("Steps already followed from this decision; undo the run instead.")
    if run.replans >= workflow.max_replans:
        raise NotChosenAgain(f"This run was decided anew {run.replans} times already, which is as often as it may be.")
    undecided = 0 if name in progress.chosen else 1  # a version without any valid proposal is given up as well
    return f"{name}@{decided_version(run, name) + undecided}"


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


def _problem(error: Exception) -> str:
    """Why a proposal was refused, without repeating what it proposed."""
    if isinstance(error, ValidationError):
        places = (f"{'.'.join(map(str, one['loc'])) or 'proposal'}: {one['type']}" for one in error.errors()[:10])
        return excerpt("; ".join(places))
    if isinstance(error, InvalidField):
        return excerpt(str(error))
    return f"the chooser raised {type(error).__name__}"


def _store(
    run: Run, step: Choice, lease: Held, *, version: int, value: Json | None = None, problem: str = "", reason: str = ""
) -> None:
    shown, sealed = sealing.split(value, step.shown) if value is not None else ("{}", "")
    transition.choose(
        run.subject,
        generation=lease.generation,
        row={
            "step": step.name,
            "version": version,
            "valid": value is not None,
            "problem": problem,
            "reason": reason,
            "value_shown": shown,
            "value_sealed": sealed,
        },
    )
