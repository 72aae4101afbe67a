"""Runs: start one, and advance() it under a lease, step by step, reusing what is already settled.

advance() stops where a step is unknown, waits or failed; the transition that changes that step wakes the run in the
same transaction. A run's steps are claimed under the run's lease: whoever lost it can claim nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from django.conf import settings

from . import executor, keys, registry, sealing, transition, workers
from .actors import SYSTEM, Actor
from .executor import Disposition, Held, Intent, Outcome
from .keys import Identity, InvalidField
from .models import Operation, Run
from .policy import lease_seconds
from .providers.base import Json
from .scrub import fault
from .states import RUN_TERMINAL, Kind, RunState, State, Subject
from .transition import TransitionRefused
from .workflows import Facts, Step, Workflow

log = structlog.get_logger(__name__)


class RunMismatch(Exception):
    """A known run identity with another input. Nothing was started."""


# Starting


def start(
    workflow_name: str,
    *,
    tenant: str,
    workflow_id: str,
    input: Json,
    actor: Actor,
    on_behalf_of: str = "",
) -> Run:
    """Record a run, due at once; the same id and input get the run that is already there.

    Raises registry.Unregistered, InvalidField, and RunMismatch for a known id with another input.
    """
    workflow = registry.workflow(workflow_name)
    row = _row(workflow, tenant=tenant, workflow_id=workflow_id, input=input)
    moved = transition.open_run(
        row={**row, "state": RunState.PENDING, "requested_by": actor.id, "on_behalf_of": on_behalf_of},
        after={"due_at": 0},
        fact=actor.fact("started", on_behalf_of=on_behalf_of, workflow_version=workflow.version),
    )
    if moved is not None:
        return Run.objects.get(pk=moved.pk)
    run = Run.objects.get(tenant=tenant, workflow_type=workflow.name, workflow_id=workflow_id)
    if run.input_fingerprint != row["input_fingerprint"]:
        transition.refuse(subject=run.subject, tenant=tenant, fact=actor.fact("input_mismatch"))
        raise RunMismatch(f"run {workflow_id!r} of {workflow.name} exists with another input; use another id")
    return run


def _row(workflow: Workflow, *, tenant: str, workflow_id: str, input: Json) -> dict[str, Any]:
    if not isinstance(input, dict):
        raise InvalidField("input", "must be a JSON object")
    try:
        business_object = workflow.business_object(input)
    except (KeyError, TypeError, ValueError) as missing:
        raise InvalidField("input", "lacks what the workflow needs to name its business object") from missing
    # The identity of a first step is checked here, so that a run that could never send is not started.
    Identity(
        tenant=tenant, workflow_type=workflow.name, workflow_id=workflow_id, step="-", business_object=business_object
    )
    shown, sealed = sealing.split(input, workflow.shown)
    return {
        "tenant": tenant,
        "workflow_type": workflow.name,
        "workflow_id": workflow_id,
        "workflow_version": workflow.version,
        "business_object": str(business_object),
        "input_shown": shown,
        "input_sealed": sealed,
        "input_fingerprint": keys.fingerprint(provider="-", account="-", action=workflow.name, request=input),
    }


# Holding


@contextmanager
def holding(operation: Operation, *, held: Held | None, actor: Actor) -> Iterator[Held | None]:
    """The lease on the operation's run, for one attempt outside advance(). The run goes on afterwards.

    Raises RunNotHeld where the run has ended or another holder has it: a stopped run sends nothing more.
    """
    if operation.run_id is None or held is not None:
        yield held
        return
    run = Run.objects.get(pk=operation.run_id)
    spec = registry.spec(operation.provider, operation.action)
    lease = _take(run, actor=actor, seconds=_step_lease(lease_seconds(spec)))
    try:
        yield lease
    finally:
        _give_back(run, lease, actor)


def _take(run: Run, *, actor: Actor, seconds: float) -> Held:
    try:
        transition.transition(
            run.subject,
            to=RunState.RUNNING,
            version=run.version,
            patch={"generation": run.generation + 1, "lease_owner": workers.me()},
            after={"lease_until": seconds, "due_at": seconds},
            guard=("not_held",),
            fact=actor.fact("taken", generation=run.generation + 1),
        )
    except (transition.NotInTable, transition.LeaseLive, transition.StaleVersion) as refusal:
        raise transition.RunNotHeld(kind=Kind.RUN, pk=run.pk, source=refusal.source, target=RunState.RUNNING) from None
    return Held(run_id=run.pk, generation=run.generation + 1)


def _give_back(run: Run, lease: Held, actor: Actor) -> None:
    try:
        _leave(run.subject, lease, to=RunState.PENDING, reason_code="step_attempted", actor=actor, after={"due_at": 0})
    except TransitionRefused as refusal:  # the lease ran out meanwhile: the run is due again by itself
        log.info("run_not_given_back", run=run.pk, verdict=refusal.verdict)


def _step_lease(step_seconds: float) -> float:
    return step_seconds + float(settings.AFTERCALL_LEASE_MARGIN)


# Advancing


def advance(pk: int, *, actor: Actor = SYSTEM) -> Run:
    """Walk the run as far as it goes. Does nothing where it has ended, is marked, or another holder has it."""
    run = Run.objects.get(pk=pk)
    if run.state in RUN_TERMINAL or run.escalated_at is not None:
        return run
    try:
        workflow = registry.workflow(run.workflow_type, run.workflow_version)
        lease = _take(run, actor=actor, seconds=_first_lease(workflow))
    except registry.Unregistered as missing:
        log.warning("run_left_to_others", run=pk, why=str(missing))
        return run
    except transition.RunNotHeld:
        return run
    try:
        _walk(run, workflow, lease)
    except TransitionRefused as refusal:  # fenced: another holder goes on from what is settled
        log.info("run_lost", run=pk, verdict=refusal.verdict)
    return Run.objects.get(pk=pk)


def _first_lease(workflow: Workflow) -> float:
    return max((_seconds_of(step) for step in workflow.steps), default=float(settings.AFTERCALL_LEASE_MARGIN))


def _seconds_of(step: Step) -> float:
    return _step_lease(lease_seconds(registry.spec(step.provider, step.action)))


def _walk(run: Run, workflow: Workflow, lease: Held) -> None:
    facts = Facts(input=run.input, results={})
    for step in workflow.steps:
        outcome = _step(run, step, facts, lease)
        if outcome is None or not _goes_on(run, step, outcome, lease):
            return
        facts = Facts(input=facts.input, results={**facts.results, step.name: outcome.result})
    _leave(run.subject, lease, to=RunState.SUCCEEDED, reason_code="all_steps_verified")


def _step(run: Run, step: Step, facts: Facts, lease: Held) -> Outcome | None:
    """Perform one step, or None where the run stopped because of a fault in its declaration or input."""
    if transition.heartbeat_run(run.subject, generation=lease.generation, seconds=_seconds_of(step)) is None:
        return None
    try:
        intent = _intent(run, step, facts, lease)
        return executor.perform(intent, actor=Actor(id=workers.me(), kind="worker"))
    except executor.LedgerUnavailable:
        raise
    except executor.FingerprintMismatch:
        _stop(run, step, lease, reason="request_changed")
    except _STANDS_IN_THE_WAY as refusal:
        _stop(run, step, lease, reason=refusal.verdict)
    except sealing.CannotOpen:
        _stop(run, step, lease, reason="request_unreadable")
    except (InvalidField, registry.Unregistered, KeyError, TypeError, ValueError) as error:
        log.error("step_cannot_be_built", run=run.pk, step=step.name, **fault(error))
        _stop(run, step, lease, reason="step_cannot_be_built")
    return None


# Refusals that waiting does not cure: the run would come back with the same one for ever.
_STANDS_IN_THE_WAY = (
    transition.OlderVersionOpen, transition.OlderVersionWaiting, transition.NewerVersionExists,
)  # fmt: skip


def _intent(run: Run, step: Step, facts: Facts, lease: Held) -> Intent:
    return Intent(
        identity=Identity(
            tenant=run.tenant,
            workflow_type=run.workflow_type,
            workflow_id=run.workflow_id,
            step=step.name,
            business_object=step.business_object(facts) if step.business_object else run.business_object,
        ),
        provider=step.provider,
        action=step.action,
        request=step.request(facts),
        held=lease,
        requested_by=run.requested_by,
        on_behalf_of=run.on_behalf_of,
    )


def _goes_on(run: Run, step: Step, outcome: Outcome, lease: Held) -> bool:
    """Whether the next step may start; otherwise leaves the run where it now stands."""
    if outcome.state is State.SUCCEEDED:
        return True
    if outcome.state in (State.READY, State.FAILED_RETRYABLE):
        _wait(run, step, outcome, lease)
    elif outcome.state in (State.AMBIGUOUS, State.PENDING):
        _leave(
            run.subject, lease, to=RunState.UNCERTAIN, reason_code="step_unknown", waiting_for=step.name,
            after=_watched(outcome),
        )  # fmt: skip
    elif outcome.state is State.FAILED_TERMINAL and not _anything_applied(run):
        _leave(run.subject, lease, to=RunState.FAILED, reason_code="step_failed", waiting_for=step.name)
    else:
        reason = "step_terminated" if outcome.state is State.TERMINATED else "step_failed_after_effects"
        _stop(run, step, lease, reason=reason)
    return False


def _watched(outcome: Outcome) -> dict[str, float]:
    # Its transition wakes the run; a step that another holder has in flight is looked at again as well.
    in_flight = outcome.disposition in (Disposition.IN_PROGRESS, Disposition.EXECUTED)
    return {"due_at": float(settings.AFTERCALL_TAKE_AGAIN)} if in_flight and outcome.state is State.PENDING else {}


def _wait(run: Run, step: Step, outcome: Outcome, lease: Held) -> None:
    operation = Operation.objects.only("due_at", "escalated_at").get(pk=outcome.pk)
    due = operation.due_at.isoformat() if operation.due_at else None  # held: woken when somebody repairs it
    _leave(
        run.subject, lease, to=RunState.PENDING, reason_code="step_waits", waiting_for=step.name, patch={"due_at": due}
    )


def _anything_applied(run: Run) -> bool:
    applied = Operation.objects.filter(run=run, state=State.SUCCEEDED)
    return any(registry.spec(o.provider, o.action).repeat != "read" for o in applied.only("provider", "action"))


def _stop(run: Run, step: Step, lease: Held, *, reason: str) -> None:
    """The run cannot go on by itself: it is marked where it stands, and a person must act."""
    _leave(
        run.subject, lease, to=RunState.PENDING, reason_code=reason, waiting_for=step.name,
        patch={"escalation_reason": reason}, after={"escalated_at": 0},
    )  # fmt: skip


def _leave(
    subject: Subject,
    lease: Held,
    *,
    to: RunState,
    reason_code: str,
    waiting_for: str = "",
    actor: Actor = SYSTEM,
    patch: dict[str, Any] | None = None,
    after: dict[str, float] | None = None,
) -> None:
    transition.transition(
        subject,
        to=to,
        generation=lease.generation,
        guard=("held",),
        patch={"reason_code": reason_code, "waiting_for": waiting_for, "due_at": None, **(patch or {})},
        after=after,
        fact=actor.fact(reason_code, step=waiting_for),
    )


# Resuming


def resume(pk: int, *, actor: Actor, version: int, reason: str) -> Run:
    """Let automation go on with a run that was marked. What a step's state forbids stays forbidden."""
    run = Run.objects.get(pk=pk)
    transition.transition(
        run.subject,
        to=None if run.state == RunState.PENDING else RunState.PENDING,
        version=version,
        patch={"escalated_at": None, "escalation_reason": ""},
        after={"due_at": 0},
        fact=actor.fact("resumed", reason=reason),
    )
    return Run.objects.get(pk=pk)
