"""Schedules: with backlog.py and slots.py the writer of jobs and slots. Every expected run becomes a row of its own.

`tick()` decides what is due and starts it. Any number of beats may call it: a job is worked on under its row's lock,
and the database has one slot an instant and one a local time. A slot is recorded first and its run is started after;
whoever dies in between leaves a slot that the next beat starts, under the id that follows from job and scheduled time.
Missed starts are in backlog.py, the next expected time in expected.py, rows in slots.py, people's presses in jobs.py.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import F, Q

from audit import log as audit
from audit.verify import Head

from . import (
    backlog,
    consent,
    expected,
    fence,
    keyless,
    keys,
    occurrences,
    registry,
    runs,
    slots,
    transition,
    wording,
)  # fmt: skip
from .actors import Actor
from .keys import InvalidField
from .models import Job, Run, Slot
from .occurrences import Missed as MissedPolicy
from .occurrences import NotASchedule, Occurrence, Overlap, Plan, SlotState
from .providers.base import Json
from .scrub import fault
from .sealing import CannotOpen
from .slots import BEAT
from .states import RUN_TERMINAL, RunState
from .transition import TransitionRefused

log = structlog.get_logger(__name__)

LOOK_FOR = 5.0  # seconds that one beat goes on looking at jobs; it has other duties
AT_ONCE = 10  # starts of one job in one transaction; what is left waits for the next beat


def run_id(job: Job, scheduled_for: datetime) -> str:
    """The id of the run for a scheduled time: whoever starts it, and however often, it is one run."""
    return f"{job.name}@{scheduled_for.astimezone(UTC).isoformat()}"


def grace() -> timedelta:
    """A start that is no later than this is on time: beats come every second, deployments take longer."""
    return timedelta(seconds=float(settings.AFTERCALL_SCHEDULE_GRACE))


# The beat's duty


def tick(*, limit: int = 50) -> int:
    """Decide and start what is due, for up to `limit` jobs. Returns how many jobs were looked at.

    Nothing is decided by a ledger that was restored, or may have been: what falls into that time is passed over at the
    release of its fence.
    """
    if not fence.stands():
        return 0
    now = transition.database_now()
    close_ended()
    looked = _look_at_all(now, limit)
    _mark_too_long(now)
    _recompute_times(now)
    return looked


def _look_at_all(now: datetime, limit: int) -> int:
    """Each job that is due once, as long as there is time; whoever was not reached comes first at the next beat."""
    ends, seen = time.monotonic() + LOOK_FOR, set[int]()
    while jobs := due(now, limit=limit, but=seen):
        for pk in jobs:
            _look_at(pk)
        seen.update(jobs)
        if time.monotonic() > ends:
            break
    return len(seen)


def _look_at(pk: int) -> None:
    done = [_guarded(duty, pk) for duty in (_decide_job, _start_job)]  # the second one whatever the first came to
    if all(done):
        Job.objects.filter(pk=pk).exclude(problem="").update(problem="")


def due(now: datetime, *, limit: int = 50, but: Collection[int] = ()) -> list[int]:
    """Jobs with an occurrence that is not decided yet, or a slot that is not started yet, and not those in `but`.

    Who was looked at longest ago comes first: many jobs that cannot move must not keep the others from their turn.
    """
    waiting = Slot.objects.filter(state__in=[SlotState.DUE, SlotState.QUEUED, SlotState.CATCHING_UP])
    found = Job.objects.filter(Q(next_at__lte=now) | Q(pk__in=waiting.values("job_id"))).exclude(pk__in=but)
    turn = found.order_by(F("looked_at").asc(nulls_first=True), "next_at", "pk")
    return list(turn.values_list("pk", flat=True)[:limit])


def _guarded(duty: Any, pk: int) -> bool:
    """One broken job must not stop the others; that it is broken is shown on its page, and is a signal.

    True where the duty was done; another beat may have the job.
    """
    try:
        with transaction.atomic():
            job = Job.objects.select_for_update(skip_locked=True).filter(pk=pk).first()
            if job is not None:
                duty(job)
            return job is not None
    except NotASchedule:
        _problem(pk, "zone_unknown")
    except registry.Unregistered:
        _problem(pk, "no_handler")
    except Exception as error:
        log.error("schedule_failed", job=pk, **fault(error))
        _problem(pk, wording.ERROR + type(error).__name__[:50])  # its class alone: a text may repeat what is hidden
    return False


def _problem(pk: int, code: str) -> None:
    Job.objects.filter(pk=pk).update(problem=code, looked_at=transition.database_now())


# Deciding: which occurrences are due, and what becomes of each


def _decide_job(job: Job) -> None:
    now = transition.database_now()
    # Under the lock that it has anyway: one taken for this alone would let another beat pass by a job that is due.
    Job.objects.filter(pk=job.pk).update(looked_at=now)
    decide(job, now)


def decide(job: Job, now: datetime) -> None:
    """Bring a locked job up to `now`: a slot or a range for each occurrence that is due. Bounded work a call.

    Raises NotASchedule and registry.Unregistered. While there is no handler nothing is decided, for nothing could be
    started: a slot that waits would look like a run, and when the handler is there the missed policy has its say.
    """
    if not job.enabled or job.next_at is None or job.next_at > now:
        return
    registry.workflow(job.workflow)
    plan = expected.times_of(job)
    if job.decided_until is not None and job.next_at <= job.decided_until:
        slots.forward(job, plan, job.decided_until)  # it was passed over while its zone was not known
    _too_old(job, plan, now)
    if not _missed(job, plan, now):
        _on_time(job, plan, now)
    slots.save(job, *expected.EXPECTED)


def _missed(job: Job, plan: Plan, now: datetime) -> bool:
    """Deal with starts that nobody was there to make. True where what follows waits its turn behind them."""
    if job.next_at is None or job.next_at > now - grace():
        return False
    policy = _missed_policy(job)
    _MISSED[MissedPolicy(policy)](job, plan, now)
    return policy == MissedPolicy.RUN_ALL


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Starts that are due and have no row yet."""

    since: datetime
    count: int
    in_order: bool  # each waits for the one before it, and `behind` for its end
    behind: Run | None


def waiting(job: Job, now: datetime) -> Waiting | None:
    """What is due and not decided: missed starts that are run in order, or what no beat has looked at.

    Raises NotASchedule and registry.Unregistered.
    """
    if not job.enabled or job.next_at is None or job.next_at > now - grace():
        return None
    in_order = _missed_policy(job) == MissedPolicy.RUN_ALL and job.overlap != Overlap.ALLOW
    count = expected.times_of(job).count(job.next_at, now)
    return Waiting(since=job.next_at, count=count, in_order=in_order, behind=_active(job).first() if in_order else None)


def _missed_policy(job: Job) -> str:
    """A workflow that got an action without a key since the job was saved is not run for every missed start."""
    if job.missed == MissedPolicy.RUN_ALL and not job.repeats_accepted and keyless.steps(job.workflow):
        return MissedPolicy.LATEST_ONLY
    return job.missed


def _limits(job: Job) -> list[tuple[timedelta, str, str]]:
    """How late a start may be made, the longest first, each with what becomes of a later one."""
    limits = [
        (job.max_catch_up, SlotState.TOO_OLD, "too_old_to_catch_up"),
        (job.start_deadline, SlotState.TOO_LATE, "start_deadline_passed"),
    ]
    return sorted(((limit, state, code) for limit, state, code in limits if limit is not None), reverse=True)


def _too_old(job: Job, plan: Plan, now: datetime) -> None:
    for length, state, reason in _limits(job):
        edge = now - length
        if job.next_at is not None and job.next_at < edge:
            backlog.pass_range(job, plan, plan.latest(edge - timedelta(microseconds=1)), state, reason)


def _skip_missed(job: Job, plan: Plan, now: datetime) -> None:
    backlog.pass_range(job, plan, plan.latest(now - grace()), SlotState.MISSED, "missed_skipped")


def _ask_missed(job: Job, plan: Plan, now: datetime) -> None:
    backlog.pass_range(job, plan, plan.latest(now - grace()), SlotState.ASKED, "missed_asked")


def _latest_missed(job: Job, plan: Plan, now: datetime) -> None:
    latest = plan.latest(now)
    if latest is None:
        return
    backlog.pass_range(job, plan, plan.latest(latest.at - expected.SECOND), SlotState.MISSED, "missed_superseded")
    _place(job, plan, latest)


def _run_all_missed(job: Job, plan: Plan, now: datetime) -> None:
    """In order, a few at a time; without `allow` each waits for the one before it, so that none is skipped."""
    for _ in range(AT_ONCE):
        if job.next_at is None or job.next_at > now or (job.overlap != Overlap.ALLOW and _busy(job)):
            return
        _place(job, plan, expected.at(plan, job.next_at))


_MISSED = {
    MissedPolicy.SKIP: _skip_missed,
    MissedPolicy.ASK: _ask_missed,
    MissedPolicy.LATEST_ONLY: _latest_missed,
    MissedPolicy.RUN_ALL: _run_all_missed,
}


def _on_time(job: Job, plan: Plan, now: datetime) -> None:
    for _ in range(AT_ONCE):
        if job.next_at is not None and now - grace() < job.next_at <= now:
            _place(job, plan, expected.at(plan, job.next_at))


def _place(job: Job, plan: Plan, occurrence: Occurrence) -> None:
    """The slot of one occurrence that is to run now, by the overlap policy."""
    state, reason, behind = _by_overlap(job)
    window = slots.window_start(job, plan, occurrence.at)
    slots.insert(job, occurrence, window_start=window, state=state, reason_code=reason, behind=behind)
    slots.forward(job, plan, occurrence.at)


def _by_overlap(job: Job) -> tuple[str, str, Run | None]:
    behind = _active(job).first()
    if job.overlap in (Overlap.ALLOW, Overlap.CANCEL_PREVIOUS) or not _busy(job):
        return SlotState.DUE, "", behind if job.overlap == Overlap.CANCEL_PREVIOUS else None
    if job.overlap == Overlap.QUEUE_ONE and not Slot.objects.filter(job=job, state=SlotState.QUEUED).exists():
        return SlotState.QUEUED, "waits_for_previous", behind
    queued = job.overlap == Overlap.QUEUE_ONE
    return SlotState.SKIPPED_OVERLAP, "one_waits_already" if queued else "previous_still_runs", behind


def _busy(job: Job) -> bool:
    return _active(job).exists() or Slot.objects.filter(job=job, state=SlotState.DUE).exists()


def _active(job: Job) -> Any:
    """Runs of the job that have not ended, oldest first."""
    return Run.objects.filter(slots__job=job, slots__open=True).exclude(state__in=RUN_TERMINAL).order_by("pk")


# Starting


def _start_job(job: Job) -> None:
    """Start the slots of a locked job that wait, in the order of their times."""
    _peel(job)
    waiting = Slot.objects.filter(job=job, state__in=[SlotState.DUE, SlotState.QUEUED]).order_by("scheduled_for")
    for slot in waiting[:AT_ONCE]:
        if slot.state == SlotState.QUEUED and _busy(job):
            _late_for_good(job, slot)
            continue
        if not _late_for_good(job, slot) and _out_of_the_way(job, slot):
            start(job, slot)


def _late_for_good(job: Job, slot: Slot) -> bool:
    if slot.manual or slot.reason_code in ("filled_by_hand", "caught_up"):
        return False
    late = transition.database_now() - slot.scheduled_for
    for length, state, reason in _limits(job):
        if late > length:
            slots.settle(slot, state=state, reason_code=reason)
            slots.record(job, slot, actor=BEAT)
            return True
    return False


def _out_of_the_way(job: Job, slot: Slot) -> bool:
    """Cancel the runs before it, where the job says so. False while one of them cannot be cancelled."""
    if job.overlap != Overlap.CANCEL_PREVIOUS:
        return True
    before = list(_active(job))
    kept = next((run for run in before if run.state == RunState.COMPENSATING or run.escalated_at is not None), None)
    if kept is not None:
        _wait_for_a_person(job, slot, behind=kept)
        return False
    for run in before:
        if not _cancelled(run, because=f"{run_id(job, slot.scheduled_for)} is due"):
            slots.settle(slot, reason_code="previous_not_cancelled", behind=run)
            return False
    return True


def _wait_for_a_person(job: Job, slot: Slot, *, behind: Run) -> None:
    """What walks back, and what a person was called for, is no schedule's to cancel: the case would be gone, and what
    was applied would stay. Only the newest start waits for it, so that they do not all begin when it is over.
    """
    newer = Slot.objects.filter(job=job, state=SlotState.DUE, manual=False, scheduled_for__gt=slot.scheduled_for)
    if slot.manual or not newer.exists():
        slots.settle(slot, reason_code="previous_needs_person", behind=behind)
        return
    slots.settle(slot, state=SlotState.SKIPPED_OVERLAP, reason_code="previous_needs_person", behind=behind)
    slots.record(job, slot, actor=BEAT)


def _cancelled(run: Run, *, because: str) -> bool:
    try:
        with transaction.atomic():
            runs.cancel(run.pk, actor=BEAT, version=run.version, reason=because)
    except TransitionRefused as refusal:  # held or just moved: tried again at the next beat
        log.info("previous_not_cancelled", run=run.pk, verdict=refusal.verdict)
        return False
    return True


def start(job: Job, slot: Slot, *, actor: Actor = BEAT) -> None:
    """Start the run of a slot, in the caller's transaction. A refused run is said so on the slot."""
    name = f"{job.name}@hand:{slots.text(slot.scheduled_for)}" if slot.manual else run_id(job, slot.scheduled_for)
    try:
        with transaction.atomic():
            run = runs.start(job.workflow, tenant=job.tenant, workflow_id=name, input=input_of(job, slot),
                             actor=_asked_by(slot) or actor, on_behalf_of=job.changed_by,
                             intended_at=slot.scheduled_for)  # fmt: skip
    except (InvalidField, runs.RunMismatch, transition.Pruned) as refused:
        log.warning("slot_not_started", job=job.pk, slot=slot.pk, **fault(refused))
        slots.settle(slot, state=SlotState.NOT_STARTED, reason_code=_why_refused(refused))
        slots.record(job, slot, actor=actor)
        return
    now = transition.database_now()
    reason = slot.reason_code if slot.reason_code in _KEPT else _punctual(slot, now)
    slots.settle(slot, state=SlotState.STARTED, run=run, started_at=now, counted_from=now, reason_code=reason,
                 open=run.state not in RUN_TERMINAL)  # fmt: skip
    if job.problem:
        Job.objects.filter(pk=job.pk).update(problem="")


def _why_refused(refused: Exception) -> str:
    if isinstance(refused, InvalidField):
        return "run_too_old" if refused.field == "intended_at" else "run_refused"
    return "run_pruned" if isinstance(refused, transition.Pruned) else "run_mismatch"


def _asked_by(slot: Slot) -> Actor | None:
    """Who answered that a missed start is to be run has asked for the run, and may not agree to a step of it."""
    return Actor(id=slot.answered_by, kind="person") if slot.answered_by else None


_KEPT = ("filled_by_hand", "started_by_hand", "caught_up", "waits_for_previous")


def _punctual(slot: Slot, now: datetime) -> str:
    return "on_time" if now - slot.scheduled_for <= grace() else "late"


def input_of(job: Job, slot: Slot) -> Json:
    """What the run is started with: the job's own input, and the time that it stands for."""
    return {
        **job.input,
        "scheduled_for": slot.scheduled_for.astimezone(UTC).isoformat(),
        "window_start": slot.window_start.astimezone(UTC).isoformat(),
        "window_end": slot.scheduled_for.astimezone(UTC).isoformat(),
    }


def _peel(job: Job) -> None:
    """Take the next starts out of the ranges that a person wants run whole."""
    for held in Slot.objects.filter(job=job, state=SlotState.CATCHING_UP).order_by("scheduled_for")[:1]:
        for _ in range(AT_ONCE):
            if (job.overlap != Overlap.ALLOW and _busy(job)) or not backlog.take_first(job, held):
                return


def by_hand(job: Job, now: datetime) -> Slot:
    """A slot for a new intent of a person, beside the schedule."""
    latest = Slot.objects.filter(job=job, manual=False, scheduled_for__lte=now).order_by("-scheduled_for").first()
    begin = (latest.until or latest.scheduled_for) if latest else now
    occurrence = Occurrence(at=now, local=f"by hand {slots.text(now)}")
    slot = slots.insert(
        job, occurrence, window_start=begin, manual=True, state=SlotState.DUE, reason_code="started_by_hand"
    )
    assert slot is not None, "the database's clock gives each press a microsecond of its own"
    return slot


def ahead_of_time(job: Job) -> Slot:
    """The slot of the next occurrence, before its time; at its time there is nothing left to start."""
    assert job.next_at is not None
    plan = expected.times_of(job)
    occurrence = expected.at(plan, job.next_at)
    window = slots.window_start(job, plan, occurrence.at)
    slot = slots.insert(job, occurrence, window_start=window, state=SlotState.DUE, reason_code="filled_by_hand")
    slots.forward(job, plan, occurrence.at)
    slots.save(job, *expected.EXPECTED)
    return slot or Slot.objects.get(job=job, scheduled_for=occurrence.at)


# What else the beat sees to


def close_ended() -> None:
    """Forget that a run may still go on, once it has ended; one that was cancelled goes on when it is undone."""
    Slot.objects.filter(open=True, run__state__in=RUN_TERMINAL).update(open=False)
    again = Slot.objects.filter(open=False, run__state=RunState.COMPENSATING)
    again.update(open=True, counted_from=transition.database_now())


def _mark_too_long(now: datetime) -> None:
    """A run beyond its maximum time is not cancelled, for that may leave half of it done: a person is called.

    Once a run: a person who lets it go on has seen how long it takes.
    """
    late = Slot.objects.filter(open=True, counted_from__lt=now - F("job__max_run_time"), run__escalated_at__isnull=True)
    for slot in late.exclude(run__state__in=RUN_TERMINAL).select_related("run")[:50]:
        assert slot.run is not None
        try:
            with transaction.atomic():
                _mark(slot.run)
                slots.settle(slot, counted_from=None)
        except TransitionRefused as refusal:  # a holder is at work: looked at again at the next beat
            log.info("run_held_beyond_its_time", run=slot.run.pk, verdict=refusal.verdict)


def _mark(run: Run) -> None:
    transition.transition(
        run.subject,
        to=None,
        version=run.version,
        patch={"escalation_reason": "max_run_time"},
        after={"escalated_at": 0},
        guard=["not_held"],
        fact=BEAT.fact("max_run_time"),
    )


def _recompute_times(now: datetime) -> None:
    """New zone data may move what is still to come. Older data than a job has seen changes nothing."""
    for pk in Job.objects.filter(zone_data__lt=occurrences.ZONE_DATA).values_list("pk", flat=True)[:50]:
        _guarded(_recompute, pk)


def _recompute(job: Job) -> None:
    now, old = transition.database_now(), job.next_at
    if old is not None and old <= now:
        return  # what is due is decided first
    if old is not None:
        # From what was decided last, not from now: a time that the new data put into the past was not decided by any.
        decided = job.decided_until or now
        expected.expect(job, expected.plan_of(job).after(decided), decided)
    seen, job.zone_data = job.zone_data, occurrences.ZONE_DATA
    slots.save(job, *expected.EXPECTED)
    slots.look_ahead(job)
    fact = BEAT.fact(
        "zone_data_changed", zone_data=[seen, job.zone_data], next_at=[slots.text(old), slots.text(job.next_at)]
    )
    audit.append(subject=job.subject, tenant=job.tenant, event="recomputed", fact=fact)


# Writing


def write(
    job: Job, *, actor: Actor, code: str, reason: str, before: Json | None, use: Mapping[str, Any] | None = None
) -> None:
    """Save an edit of a locked job as its next version, with what it was and what it is in the audit log.

    `use` names the approval by which a second person agreed; it is used up, and the other requests about it end.
    """
    now = transition.database_now()
    job.updated_at, job.changed_by, job.problem = now, actor.id, ""
    if before is None:
        job.created_at = now
        job.save(force_insert=True)
    else:
        job.version += 1
        job.save()
    fact = actor.fact(code, reason=reason, before=before, after=told(job), **consent.both(use))
    audit.append(
        subject=job.subject,
        tenant=job.tenant,
        event="transition",
        from_state=None if before is None else ("on" if before["enabled"] else "off"),
        to_state="on" if job.enabled else "off",
        version=job.version,
        fact=fact,
    )
    if before is not None:
        transition.policy_changed(job, use=use, fact=fact)


def told(job: Job) -> Json:
    """A job as the audit log tells it: no input, only a keyed hash by which one can be told from another."""
    lengths = {name: str(getattr(job, name) or "") for name in ("max_catch_up", "start_deadline", "max_run_time")}
    names = ("kind", "expression", "zone", "workflow", "missed", "repeats_accepted", "overlap", "enabled")
    moments = {name: slots.text(getattr(job, name)) for name in ("anchor", "next_at")}
    return {**{name: getattr(job, name) for name in names}, **lengths, **moments, "input": _input_hash(job)}


def _input_hash(job: Job) -> str:
    try:
        return keys.fingerprint(provider="-", account="-", action="schedule", request=job.input)
    except (InvalidField, CannotOpen):
        return "unreadable"


def audit_heads() -> Iterator[Head]:
    """Where each job stands, for the proof that no audit row is missing."""
    for pk, version, enabled in Job.objects.values_list("pk", "version", "enabled").iterator(chunk_size=2000):
        yield Head(f"job:{pk}", version, "on" if enabled else "off")
