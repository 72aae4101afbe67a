"""One step of a run, forward or back: keep the lease, build the request, perform it, name what is in the way."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from . import claims, executor, leases, registry, sealing, transition, workers
from .actors import Actor
from .claims import Held, Intent
from .keys import InvalidField
from .models import Run
from .policy import lease_seconds
from .scrub import fault
from .states import Kind

log = structlog.get_logger(__name__)

# Refusals that waiting does not cure: the run would come back with the same one for ever.
STANDS_IN_THE_WAY = (
    transition.OlderVersionOpen, transition.OlderVersionWaiting, transition.NewerVersionExists, transition.Shredded,
)  # fmt: skip


class CannotBeBuilt(Exception):
    """The code that a workflow declares for a step raised; its cause is what it raised."""


def stay(run: Run, lease: Held, *, seconds: float) -> None:
    """Prolong the run's lease for what comes now. Raises StaleGeneration where it is over."""
    if transition.heartbeat_run(run.subject, generation=lease.generation, seconds=seconds) is None:
        raise transition.StaleGeneration(kind=Kind.RUN, pk=run.pk, source=run.state, target=None)


def send(run: Run, name: str, build: Callable[[], Intent], lease: Held) -> tuple[str, str] | None:
    """Perform the step that `build` describes, once. Returns (step, reason) where the run must stop for a person."""
    try:
        intent = built(build)
        stay(run, lease, seconds=leases.with_margin(lease_seconds(registry.spec(intent.provider, intent.action))))
        executor.perform(intent, actor=Actor(id=workers.me(), kind="worker"))
    except claims.FingerprintMismatch:
        return name, "request_changed"
    except STANDS_IN_THE_WAY as refusal:
        return name, refusal.verdict
    except sealing.CannotOpen:
        return name, "request_unreadable"
    except (InvalidField, registry.Unregistered, KeyError, TypeError, ValueError, CannotBeBuilt) as error:
        log.error("step_cannot_be_built", run=run.pk, step=name, **fault(error.__cause__ or error))
        return name, "step_cannot_be_built"
    return None


def built(build: Callable[[], Intent]) -> Intent:
    """The intent, by the declaration's own code, which may raise anything: unheard, it would run for ever."""
    try:
        return build()
    except (sealing.CannotOpen, *STANDS_IN_THE_WAY, *claims.DATABASE_ERRORS):
        raise
    except Exception as error:
        raise CannotBeBuilt from error
