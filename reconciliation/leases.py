"""The lease on a run: take it, leave the run where it stands, stop it for a person."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import structlog
from django.conf import settings

from audit.log import Fact

from . import registry, transition, workers
from .actors import SYSTEM, Actor
from .claims import Held
from .models import Run
from .policy import lease_seconds
from .states import Kind, RunState, Subject
from .transition import TransitionRefused
from .workflows import Choice, Step, Workflow

log = structlog.get_logger(__name__)

# With these marks a run is looked at again when one of its steps moves, without being told to (ledger.sql).
FOR_A_STEP = ("step_needs_person", "undo_incomplete", "run_time_spent", "run_spend_cap")

# How `waiting_for` begins where a run waits for no step of its own.
LOCK = "lock: "
HANDLER = "handler: "


def with_margin(seconds: float) -> float:
    """A run's lease outlives the operation's under it, so that a late settlement does not fence the walk."""
    return seconds + float(settings.AFTERCALL_LEASE_MARGIN)


def a_while() -> float:
    """Seconds after which one walk begins nothing more: a task that had the time for its first step, and that step's
    margin, would be ended by the queue in the middle of another one."""
    return float(settings.AFTERCALL_LEASE_MARGIN) / 2


def of_step(step: Step | Choice) -> float:
    """Seconds that one step may hold its run."""
    if isinstance(step, Choice):
        return with_margin(step.timeout.total_seconds())
    return of_action(step.provider, step.action)


def of_action(provider: str, action: str) -> float:
    """Seconds that one attempt of an action may hold its run. Raises registry.Unregistered."""
    return with_margin(lease_seconds(registry.spec(provider, action)))


def longest(workflow: Workflow) -> float:
    """Seconds of the first lease: enough for any one step.

    Raises registry.Unregistered where a handler of a step or of an undo is missing here.
    """
    undos = [of_action(step.undo.provider or step.provider, step.undo.action) for step in workflow.effects if step.undo]
    return max([*map(of_step, workflow.steps), *undos], default=with_margin(0))


def take(run: Run, *, to: RunState, actor: Actor, seconds: float) -> Held:
    """Hold the run. Raises RunNotHeld where it has ended or another holder has it, LockHeld where its lock is taken."""
    try:
        transition.transition(
            run.subject,
            to=to,
            version=run.version,
            patch={"generation": run.generation + 1, "lease_owner": workers.me(), **_looked_at_again(run)},
            after={"lease_until": seconds, "due_at": seconds},
            guard=("not_held",),
            fact=actor.fact("taken", generation=run.generation + 1),
        )
    except (transition.NotInTable, transition.LeaseLive, transition.StaleVersion) as refusal:
        raise transition.RunNotHeld(kind=Kind.RUN, pk=run.pk, source=refusal.source, target=to) from None
    return Held(run_id=run.pk, generation=run.generation + 1)


def _looked_at_again(run: Run) -> dict[str, Any]:
    return transition.unmarked(run) if run.escalation_reason in FOR_A_STEP else {}


def give_back(run: Run, lease: Held, *, actor: Actor, undoing: bool) -> None:
    """After one attempt outside the walk: the run is due, and goes on from what is settled."""
    to = RunState.COMPENSATING if undoing else RunState.PENDING
    clear = transition.unmarked(run) if actor.kind == "person" else {}
    try:
        leave(
            run.subject, lease, to=to, reason_code="step_attempted", actor=actor,
            patch={"lease_until": None, **clear}, after={"due_at": 0},
        )  # fmt: skip
    except TransitionRefused as refusal:  # the lease ran out meanwhile: the run is due again by itself
        log.info("run_not_given_back", run=run.pk, verdict=refusal.verdict)


def wait_for_lock(run: Run) -> None:
    """Leave the run pending and say what it waits for."""
    holder = _holder(run)
    _say_once(run, _waits_for(holder), SYSTEM.fact("lock_held", holder=holder.pk if holder else None))


def _holder(run: Run) -> Run | None:
    return Run.objects.filter(tenant=run.tenant, lock=run.lock, lock_held=True).only("pk", "workflow_id").first()


def _waits_for(holder: Run | None) -> str:
    return f"{LOCK}held by run {holder.workflow_id if holder else '?'}"[:200]


def leave_to_others(run: Run, missing: registry.Unregistered) -> None:
    """This process has no handler for it: leave it where it stands to one that has, and say so."""
    log.warning("run_left_to_others", run=run.pk, why=str(missing))
    if not _others_said(run):
        _say_once(run, f"{HANDLER}{missing}"[:200], SYSTEM.fact("left_to_others", missing=str(missing)))


def _others_said(run: Run) -> bool:
    """Whether another worker has said what the run waits for, and that still holds.

    Two that lack different handlers, or one that lacks one and one that finds the lock taken, would say it by turns.
    """
    if run.waiting_for.startswith(LOCK):
        return (holder := _holder(run)) is not None and run.waiting_for == _waits_for(holder)
    lately = transition.database_now() - timedelta(seconds=settings.AFTERCALL_STUCK_AFTER)
    return run.waiting_for.startswith(HANDLER) and run.updated_at > lately


def _say_once(run: Run, waits: str, fact: Fact) -> None:
    """Say what the run waits for, unless it says so already. The sweep brings it back.

    Nothing is said of a run that is marked: a person is called to it already, and a move of it would take away the due
    time by which a step that moved has woken it, and with that the only thing that brings it back.
    """
    if run.waiting_for == waits or run.escalated_at is not None:
        return
    try:
        transition.transition(
            run.subject,
            to=None,
            version=run.version,
            patch={"waiting_for": waits},
            after={"due_at": float(settings.AFTERCALL_TAKE_AGAIN)},
            fact=fact,
        )
    except TransitionRefused as refusal:
        log.info("wait_not_recorded", run=run.pk, verdict=refusal.verdict)


def stop(
    run: Run, lease: Held, *, step: str, reason: str, to: RunState = RunState.PENDING, versions: int | None = None
) -> None:
    """The run cannot go on by itself: it is marked where it stands, and a person must act.

    `versions` is Progress.versions, where the mark stands for those of steps: one that moved since is looked at anew.
    """
    leave(
        run.subject, lease, to=to, reason_code=reason, waiting_for=step,
        patch={"escalation_reason": reason}, after={"escalated_at": 0},
        guard=() if versions is None else (f"as_read:{versions}",),
    )  # fmt: skip


def leave(
    subject: Subject,
    lease: Held,
    *,
    to: RunState,
    reason_code: str,
    waiting_for: str = "",
    actor: Actor = SYSTEM,
    patch: dict[str, Any] | None = None,
    after: dict[str, float] | None = None,
    guard: tuple[str, ...] = (),
) -> None:
    """Give the lease up and leave the run in `to`. Raises StaleGeneration where the lease is already another's."""
    transition.transition(
        subject,
        to=to,
        generation=lease.generation,
        guard=("held", *guard),
        patch={
            "reason_code": reason_code, "waiting_for": waiting_for[:200], "due_at": None, "lease_until": None,
            **(patch or {}),
        },
        after=after,
        fact=actor.fact(reason_code, step=waiting_for),
    )  # fmt: skip
