"""Runs: start one, and advance() it under a lease, step by step, reusing what is already settled.

advance() stops where a step is unknown, waits or failed; the transition that changes that step wakes the run in the
same transaction. A run's steps are claimed under the run's lease: whoever lost it can claim nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.conf import settings
from django.db import connections, transaction
from django.db.models import Sum

from . import choosing, compensation, consent, fence, keys, leases, registry, sealing, stepping, transition
from .actors import SYSTEM, Actor
from .claims import Held, Intent
from .keys import Identity, InvalidField
from .models import Operation, Run
from .policy import lease_seconds
from .progress import Progress, next_due
from .providers.base import ActionSpec, Json
from .states import RUN_TERMINAL, Kind, RunState, State
from .transition import Observed, TransitionRefused
from .workflows import Choice, Step, Workflow

log = structlog.get_logger(__name__)

AT_ONCE = 4  # independent steps of one run that are sent side by side


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
    intended_at: datetime | None = None,
) -> Run:
    """Record a run, due at once; the same id and input get the run that is already there.

    `intended_at` says when it was asked for: after a restore, what is shown to be newer than the release is sent
    without a look whether it was sent before; and an unknown run that was asked for before anything that is still known
    is refused (InvalidField). Raises registry.Unregistered, InvalidField, and RunMismatch for a known id with another
    input.
    """
    fence.stands()  # a ledger that is not empty must have been anchored; a start sends nothing by itself
    workflow = registry.workflow(workflow_name)
    row = _row(workflow, tenant=tenant, workflow_id=workflow_id, input=input)
    keep = _keep(workflow)
    try:
        moved = transition.open_run(
            row={
                **row,
                "state": RunState.PENDING,
                "requested_by": actor.id,
                "on_behalf_of": on_behalf_of,
                "owners": list(actor.owners),
                "intended_at": intended_at.isoformat() if intended_at else None,
            },
            after={"due_at": 0},
            fact=actor.fact("started", on_behalf_of=on_behalf_of, workflow_version=workflow.version),
            horizon=keep.total_seconds(),
        )
    except transition.TooOld:
        asked = {"workflow": workflow.name, "input": row["input_fingerprint"], "intended_at": str(intended_at)}
        fact = actor.fact("too_old", on_behalf_of=on_behalf_of, **asked)
        transition.refuse(subject="run:new", tenant=tenant, fact=fact)
        raise InvalidField(
            "intended_at",
            f"is more than {keep.days} days ago, too long to tell whether it was run already; "
            "find out at its providers, then start it under another id",
        ) from None
    if moved is not None:
        return Run.objects.get(pk=moved.pk)
    run = Run.objects.get(tenant=tenant, workflow_type=workflow.name, workflow_id=workflow_id)
    if run.input_fingerprint != row["input_fingerprint"]:
        transition.refuse(subject=run.subject, tenant=tenant, fact=actor.fact("input_mismatch"))
        raise RunMismatch(f"run {workflow_id!r} of {workflow.name} exists with another input; use another id")
    return run


def _keep(workflow: Workflow) -> timedelta:
    """How long something is known of a run: as long as its longest-kept step. Steps without a handler here keep as an
    action that declares nothing.
    """
    return max((_step_keep(step) for step in workflow.effects), default=ActionSpec().keep)


def _step_keep(step: Step) -> timedelta:
    try:
        return registry.spec(step.provider, step.action).keep
    except registry.Unregistered:
        return ActionSpec().keep


def _row(workflow: Workflow, *, tenant: str, workflow_id: str, input: Json) -> dict[str, Any]:
    if not isinstance(input, dict):
        raise InvalidField("input", "must be a JSON object")
    business_object = _declared(workflow.business_object, input, what="the business object")
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
        "workflow_digest": workflow.digest,
        "business_object": str(business_object),
        "lock": str(_declared(workflow.lock, input, what="the lock")) if workflow.lock else "",
        "input_shown": shown,
        "input_sealed": sealed,
        "input_fingerprint": keys.fingerprint(provider="-", account="-", action=workflow.name, request=input),
    }


def _declared(function: Any, input: Json, *, what: str) -> Any:
    """What the declaration makes of the input; a member that it misses is the input's fault, and is named."""
    try:
        return function(input)
    except KeyError as missing:
        raise InvalidField(f"input.{missing.args[0]}", f"is missing; {what} is taken from it") from missing


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
    if operation.stands_alone:
        yield None  # a person's single compensation of an ended run has no run to hold
        return
    if run.state in RUN_TERMINAL:  # the table lets a person set a cancelled run going again, and nobody else
        raise transition.RunNotHeld(kind=Kind.RUN, pk=run.pk, source=run.state, target=None)
    seconds = leases.with_margin(lease_seconds(registry.spec(operation.provider, operation.action)))
    undoing = operation.undo_of_id is not None
    if actor.kind != "person" and (_stopped(run) or (not undoing and _capped(run))):
        raise transition.RunNotHeld(kind=Kind.RUN, pk=run.pk, source=run.state, target=RunState.RUNNING)
    lease = leases.take(run, to=RunState.COMPENSATING if undoing else RunState.RUNNING, actor=actor, seconds=seconds)
    try:
        yield lease
    finally:
        leases.give_back(run, lease, actor=actor, undoing=undoing)


def _stopped(run: Run) -> bool:
    return run.escalated_at is not None and not _woken(run)


def _capped(run: Run) -> bool:
    """Whether the run has spent what it may: only a person sends more of it."""
    return bool(cap_reached(Progress.of(run, registry.workflow(run.workflow_type, run.workflow_version))))


# Advancing


def advance(pk: int, *, actor: Actor = SYSTEM) -> Run:
    """Walk the run as far as it goes. Does nothing where it has ended, is marked, or another holder has it."""
    run = Run.objects.get(pk=pk)
    if run.state in RUN_TERMINAL or _stopped(run):
        return run
    undoing = run.state == RunState.COMPENSATING
    try:
        workflow = registry.workflow(run.workflow_type, run.workflow_version)
        to = RunState.COMPENSATING if undoing else RunState.RUNNING
        lease = leases.take(run, to=to, actor=actor, seconds=leases.longest(workflow))
    except registry.Unregistered as missing:
        leases.leave_to_others(run, missing)
        return Run.objects.get(pk=pk)
    except transition.LockHeld:
        leases.wait_for_lock(run)
        return Run.objects.get(pk=pk)
    except TransitionRefused:
        return run
    try:
        if changed(run, workflow):
            back = RunState.COMPENSATING if undoing else RunState.PENDING
            leases.stop(run, lease, step="", reason="workflow_changed", to=back)
        else:
            (compensation.walk_back if undoing else _walk)(run, workflow, lease)
    except TransitionRefused as refusal:  # fenced: another holder goes on from what is settled
        log.info("run_lost", run=pk, verdict=refusal.verdict)
    return Run.objects.get(pk=pk)


def changed(run: Run, workflow: Workflow) -> bool:
    """Whether the declaration was edited under its version since the run began: a step that is gone would not be done,
    and nobody would know. Runs from before declarations had a digest are not checked."""
    return run.workflow_digest not in ("", workflow.digest)


def edited(run: Run) -> bool:
    """Whether its declaration is known here and was edited since the run began."""
    try:
        return changed(run, registry.workflow(run.workflow_type, run.workflow_version))
    except registry.Unregistered:
        return False  # left to a deployment that knows it


def _woken(run: Run) -> bool:
    """Whether a step of it has moved since it was marked, and that may be all it waits for."""
    return run.escalation_reason in leases.FOR_A_STEP and run.due_at is not None


def _walk(run: Run, workflow: Workflow, lease: Held) -> None:
    """Start what may start until nothing more does, or time is up; then leave the run where it stands."""
    tried: set[str] = set()
    begun, ends = False, time.monotonic() + leases.a_while()
    while True:
        progress = Progress.of(run, workflow)
        stop = cap_reached(progress) or ("" if not _blocked(progress) else "blocked")
        ready = [] if stop else [step for step in progress.startable() if step.name not in tried]
        if not ready:
            return _settle(progress, lease, cap=stop)
        if begun and time.monotonic() >= ends:
            return _hand_back(progress, lease)
        begun = True
        tried |= {step.name for step in ready if isinstance(step, Step)}  # one that is not decided is asked for again
        fault = _start_all(progress, ready, lease, ends=ends)
        if fault:
            return leases.stop(run, lease, step=fault[0], reason=fault[1])


def _hand_back(progress: Progress, lease: Held) -> None:
    """Leave the run to whoever has the time for its next step, at once."""
    to = RunState.UNCERTAIN if progress.unknown else RunState.PENDING
    leases.leave(progress.run.subject, lease, to=to, reason_code="handed_back", after={"due_at": 0})


def _blocked(progress: Progress) -> bool:
    """A step that failed for good or was stopped lets no new one start; independent unknown ones do not block."""
    return bool(progress.in_state(State.FAILED_TERMINAL, State.TERMINATED))


def cap_reached(progress: Progress) -> str:
    """The cap of the whole run that is reached, as a reason code; empty: none."""
    workflow, run = progress.workflow, progress.run
    if workflow.max_elapsed is not None and transition.database_now() - run.created_at >= workflow.max_elapsed:
        return "run_time_spent"
    if workflow.max_spend is not None:
        spent = Operation.objects.filter(run=run).aggregate(spent=Sum("cost_minor"))["spent"] or 0
        return "run_spend_cap" if spent >= workflow.max_spend else ""
    return ""


def _start_all(progress: Progress, ready: list[Step | Choice], lease: Held, *, ends: float) -> tuple[str, str] | None:
    """Each ready step once, side by side where there are several. Returns (step, reason) of a fault that stops it."""
    if len(ready) == 1:
        return _start(progress, ready[0], lease, ends=ends)
    with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(ready))) as pool:
        faults = list(pool.map(lambda step: _start_apart(progress, step, lease, ends=ends), ready))
    return next((fault for fault in faults if fault), None)


def _start_apart(progress: Progress, step: Step | Choice, lease: Held, *, ends: float) -> tuple[str, str] | None:
    try:
        return _start(progress, step, lease, ends=ends)
    finally:
        connections.close_all()  # a thread has connections of its own


def _start(progress: Progress, step: Step | Choice, lease: Held, *, ends: float) -> tuple[str, str] | None:
    if isinstance(step, Choice):
        return choosing.choose(progress, step, lease, ends=ends)
    return stepping.send(progress.run, step.name, lambda: _intent(progress, step, lease), lease)


def _intent(progress: Progress, step: Step, lease: Held) -> Intent:
    run, facts = progress.run, progress.facts
    return Intent(
        identity=Identity(
            tenant=run.tenant,
            workflow_type=run.workflow_type,
            workflow_id=run.workflow_id,
            step=step.name,
            business_object=step.business_object(facts) if step.business_object else run.business_object,
            intent_version=progress.version(step.name),
        ),
        provider=step.provider,
        action=step.action,
        request=step.request(facts),
        held=lease,
        requested_by=run.requested_by,
        on_behalf_of=run.on_behalf_of,
        owners=tuple(run.owners),
        consent=step.consent,
        retry=step.retry,
        # Up to the pivot a failure walks back; what waits for it must be done, so a person is called.
        spent_is_final=not progress.workflow.after_pivot(step),
    )


# Where the run stands when nothing more starts by itself


def _settle(progress: Progress, lease: Held, *, cap: str) -> None:
    run = progress.run
    if progress.finished:
        return leases.leave(run.subject, lease, to=RunState.SUCCEEDED, reason_code="all_steps_verified")
    if cap and cap != "blocked":
        to = RunState.UNCERTAIN if progress.unknown else RunState.PENDING
        return leases.stop(run, lease, step="", reason=cap, to=to, versions=progress.versions)
    if progress.unknown:
        return _uncertain(progress, lease)
    stopped = progress.in_state(State.TERMINATED)
    if stopped:
        return leases.stop(run, lease, step=stopped[0].step, reason="step_terminated")
    if progress.failed:
        return compensation.after_failure(progress, lease)
    return _wait(progress, lease)


def _uncertain(progress: Progress, lease: Held) -> None:
    """Its transition wakes the run. Where nothing but a person finds out, the run is marked as its steps are."""
    first = progress.unknown[0]
    if needs_a_person(progress):
        return leases.stop(
            progress.run, lease, step=first.step, reason="step_needs_person", to=RunState.UNCERTAIN,
            versions=progress.versions,
        )  # fmt: skip
    # One that another holder has in flight, or a second unknown one, is looked at again as well.
    watch = first.state == State.PENDING or len(progress.unknown) > 1
    in_flight = {"due_at": float(settings.AFTERCALL_TAKE_AGAIN)} if watch else {}
    leases.leave(
        progress.run.subject, lease, to=RunState.UNCERTAIN, reason_code="step_unknown", waiting_for=first.step,
        patch=_due(time_is_up(progress)), after=in_flight,
    )  # fmt: skip


def _due(*moments: datetime | None) -> dict[str, str | None]:
    first = min((moment for moment in moments if moment is not None), default=None)
    return {"due_at": first.isoformat() if first else None}


def time_is_up(progress: Progress) -> datetime | None:
    """When the run will have taken as long as it may: a person is called then, whatever it waits for."""
    longest = progress.workflow.max_elapsed
    return progress.run.created_at + longest if longest is not None else None


def needs_a_person(progress: Progress) -> bool:
    """Whether steps are unsettled, and automation has stopped with each of them."""
    unsettled = (*progress.unknown, *progress.waiting)
    return bool(unsettled) and all(o.escalated_at is not None for o in unsettled)


def _wait(progress: Progress, lease: Held) -> None:
    waiting = progress.waiting
    if needs_a_person(progress):
        return leases.stop(
            progress.run, lease, step=waiting[0].step, reason="step_needs_person", versions=progress.versions
        )
    due = next_due(waiting)  # none: held or awaiting a person, woken by the transition that ends it
    asks = waiting and all(o.state == State.AWAITING_APPROVAL for o in waiting)
    leases.leave(
        progress.run.subject,
        lease,
        to=RunState.AWAITING_APPROVAL if asks else RunState.PENDING,
        reason_code="step_awaits_approval" if asks else "step_waits",
        waiting_for=waiting[0].step if waiting else "",
        patch=_due(due, time_is_up(progress)),
    )


# Resuming


def resume(pk: int, *, actor: Actor, version: int, reason: str) -> Run:
    """Let automation go on with a run that was marked. What a step's state forbids stays forbidden."""
    run = Run.objects.get(pk=pk)
    keeps = run.state in (RunState.PENDING, RunState.COMPENSATING)
    transition.transition(
        run.subject,
        to=None if keeps else RunState.PENDING,
        version=version,
        patch=transition.unmarked(run),
        after={"due_at": 0},
        fact=actor.fact("resumed", reason=reason),
    )
    return Run.objects.get(pk=pk)


# Ending early


def cancel(pk: int, *, actor: Actor, version: int, reason: str) -> Run:
    """Stop all new work of a run: due retries and steps that wait for consent end, undos too, and nothing is claimed.

    What is in flight or unknown is left to look-ups; what was applied stays applied. Raises StaleVersion, NotInTable.
    One transaction: either the run is cancelled and nothing of it waits, or nothing has changed.
    """
    run = Run.objects.get(pk=pk)
    with transaction.atomic(using=transition.ALIAS):
        transition.transition(
            run.subject,
            to=RunState.CANCELLED,
            version=version,
            patch={"reason_code": "cancelled", **transition.unmarked(run)},
            fact=actor.fact("cancelled", reason=reason),
        )
        compensation.end_waiting(run, reason_code="run_cancelled", actor=actor, reason=reason, undos=True)
    return Run.objects.get(pk=pk)


def compensate(pk: int, *, actor: Actor, version: int, reason: str, use: Mapping[str, Any] | None = None) -> Run:
    """Have what the run applied undone. Raises StepUnknown while something of it is in flight or unknown.

    `use` names the approval by which a second person agreed; the move uses it up.
    """
    run = Run.objects.get(pk=pk)
    transition.transition(
        run.subject,
        to=RunState.COMPENSATING,
        version=version,
        patch={"reason_code": "compensation_asked", **transition.unmarked(run)},
        after={"due_at": 0},
        guard=("nothing_unknown", "not_held"),
        consent={"use": use} if use else None,
        fact=actor.fact("compensation_asked", reason=reason, **consent.both(use)),
    )
    return Run.objects.get(pk=pk)


def choose_again(pk: int, *, step: str, actor: Actor, version: int, reason: str) -> Run:
    """Ask for a fresh decision of a choice step: a new version, with a reason, before anything followed from the old.

    Raises choosing.NotChosenAgain where steps already followed from it or the run has asked too often.
    """
    run = Run.objects.get(pk=pk)
    progress = Progress.of(run, registry.workflow(run.workflow_type, run.workflow_version))
    given_up = choosing.give_up(progress, step)
    transition.transition(
        run.subject,
        to=None if run.state == RunState.PENDING else RunState.PENDING,
        version=version,
        patch={
            "replans": run.replans + 1,
            **transition.unmarked(run),
            "voided": [*run.voided, f"{step}@{given_up}"],
        },
        after={"due_at": 0},
        guard=("not_held",),
        observed=[Observed(kind=choosing.GIVEN_UP, data={"step": step, "version": given_up, "reason": reason})],
        fact=actor.fact("chosen_again", reason=reason, step=step),
    )
    return Run.objects.get(pk=pk)
