"""What a person may do with a schedule: permission, version, token are checked here; schedules.py, backlog.py write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID

from django.db import IntegrityError, transaction

from . import (
    backlog,
    expected,
    fence,
    keyless,
    keys,
    occurrences,
    pressing,
    registry,
    schedules,
    sealing,
    second_person,
    slots,
    transition,
    wording,
)  # fmt: skip
from .actors import Actor, Permission
from .keys import InvalidField
from .models import Job, Slot
from .occurrences import JobKind, Missed, NotASchedule, Occurrence, Overlap, SlotState
from .pressing import Answer, Verdict
from .providers.base import Json

NAME_RULE = "A name has letters, digits, dot, dash and underscore, at most 80; it never changes."
LONGEST = timedelta(days=3660)
# Expected runs without a run of their own, which a person may still have made.
FILLABLE = (SlotState.MISSED, SlotState.TOO_OLD, SlotState.TOO_LATE, SlotState.SKIPPED_OVERLAP, SlotState.ASKED,
            SlotState.NOT_STARTED)  # fmt: skip
SHOWN_NEXT = 3


class Refused(Exception):
    """Terms that cannot be saved, or a press that is not possible. `field` names which part, "" the whole."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field, self.sentence = field, sentence


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a person sets. `input` None keeps what is there."""

    kind: str = JobKind.CRON
    expression: str
    zone: str = "UTC"
    workflow: str
    input: Json | None = None
    missed: str = Missed.LATEST_ONLY
    repeats_accepted: bool = False
    max_catch_up: timedelta | None = None
    overlap: str = Overlap.SKIP
    start_deadline: timedelta | None = None
    max_run_time: timedelta | None = None


@dataclass(frozen=True, kw_only=True)
class Change:
    """What saving would do to the times: the next ones as they are, and as they would be."""

    old: list[Occurrence]
    new: list[Occurrence]
    anchor: datetime  # the moment from which an interval's new times are counted
    warnings: list[str] = field(default_factory=list)


def terms_of(job: Job) -> Terms:
    """The terms as they stand."""
    names = ("kind", "expression", "zone", "workflow", "missed", "repeats_accepted", "max_catch_up", "overlap",
             "start_deadline", "max_run_time")  # fmt: skip
    return Terms(**{name: getattr(job, name) for name in names})


# What saving would do


def preview(job: Job | None, terms: Terms, *, now: datetime, anchor: datetime | None = None) -> Change:
    """Old and new next times, to be shown before saving; `anchor` is that of times that were shown before.

    Raises Refused where `terms` cannot be saved.
    """
    _check(job, terms, now)
    anchor = _anchor(job, terms, anchor or now)
    old = [] if job is None else _old_times(job, now)
    same = job is not None and job.enabled and not _other_times(job, terms)
    new = old if same else _new_times(job, _plan(terms, anchor), now)
    return Change(old=old, new=new, anchor=anchor, warnings=list(_warnings(job, new, now)))


def _old_times(job: Job, now: datetime) -> list[Occurrence]:
    try:
        return slots.coming(job, now, SHOWN_NEXT)
    except NotASchedule:  # its zone is not known here, which the edit may mend
        return []


def _new_times(job: Job | None, plan: occurrences.Plan, now: datetime) -> list[Occurrence]:
    found = occurrences.upcoming(plan, now, SHOWN_NEXT + 1)
    return (found if job is None else slots.without_slot(job, found))[:SHOWN_NEXT]


def _other_times(job: Job, terms: Terms) -> bool:
    return any(getattr(job, name) != getattr(terms, name) for name in ("kind", "expression", "zone"))


def _warnings(job: Job | None, new: list[Occurrence], now: datetime) -> Iterator[str]:
    if not new:
        yield "These terms name no time in the next fifty years: nothing will ever run."
    if job is not None and not job.enabled:
        yield "It is off, and saving does not switch it on."
    if job is None or not new:
        return
    last = Slot.objects.filter(job=job, state=SlotState.STARTED, manual=False).order_by("-scheduled_for").first()
    if last is not None and last.local[:10] == new[0].local[:10]:
        yield f"It ran for {last.local} already; with the new times it runs on that date once more."
    if job.enabled and job.next_at is not None and job.next_at <= now:
        yield "A run is due at this moment; it is decided by the old terms before the new ones count."


def _plan(terms: Terms, anchor: datetime) -> occurrences.Plan:
    return occurrences.plan(kind=terms.kind, expression=terms.expression, zone=terms.zone, anchor=anchor)


def _anchor(job: Job | None, terms: Terms, now: datetime) -> datetime:
    """An interval is counted from the moment at which it was set: where its times were shown first, from that one."""
    if job is not None and (job.kind, job.expression) == (terms.kind, terms.expression):
        return job.anchor
    return now.replace(microsecond=0)


def _check(job: Job | None, terms: Terms, now: datetime) -> None:
    for name, kind in (("kind", JobKind), ("missed", Missed), ("overlap", Overlap)):
        if getattr(terms, name) not in set(kind):
            raise Refused(name, f"It is one of {', '.join(kind)}.")
    try:
        _plan(terms, now)
    except NotASchedule as problem:
        raise Refused(problem.field, str(problem)) from problem
    for name in ("max_catch_up", "start_deadline", "max_run_time"):
        length = getattr(terms, name)
        if length is not None and not timedelta(0) < length <= LONGEST:
            raise Refused(name, "It lies between a second and ten years; leave it empty for no limit.")
    _check_workflow(job, terms, now)


def _check_workflow(job: Job | None, terms: Terms, now: datetime) -> None:
    try:
        workflow, risky = registry.workflow(terms.workflow), keyless.steps(terms.workflow)
    except registry.Unregistered as problem:
        raise Refused("workflow", f"There is {problem}.") from problem
    if terms.missed == Missed.RUN_ALL and risky and not terms.repeats_accepted:
        sentence = (
            f"{', '.join(risky)} has no key that its provider would remember, so running every missed start may act "
            "more often than is meant. Choose another policy, or accept it explicitly."
        )
        raise Refused("repeats_accepted", sentence)
    given = _input(job, terms)
    times = dict.fromkeys(("scheduled_for", "window_start", "window_end"), now.isoformat())
    try:
        workflow.business_object({**(given or {}), **times})
    except KeyError as missing:
        raise Refused("input", f"The workflow needs {missing} in its input.") from missing
    except (TypeError, ValueError, AttributeError) as wrong:
        raise Refused("input", "The workflow cannot name what it works on from this input.") from wrong


def _input(job: Job | None, terms: Terms) -> Json | None:
    """What a run would be started with. Raises Refused where that cannot be kept, or not be read."""
    try:
        if terms.input is not None:
            keys.canonical(terms.input, field="input")
        return terms.input if terms.input is not None or job is None else job.input
    except InvalidField as wrong:
        raise Refused("input", f"It {wrong.problem}.") from wrong
    except sealing.CannotOpen as sealed:
        raise Refused("input", f"What is there cannot be read: {sealed}. Or write it anew.") from sealed


# Writing


def create(
    *, tenant: str, name: str, terms: Terms, token: UUID, actor: Actor, reason: str = "", anchor: datetime | None = None
) -> Answer:
    """A new job, on from now; the same token gets the first answer. `anchor` is that of the times that were shown.

    Raises Refused for terms or a name that cannot be.
    """
    if not actor.may(Permission.SCHEDULE):
        raise Refused("", "Your role does not allow it; operator or admin does.")
    if not usable(name):
        raise Refused("name", NAME_RULE)
    fence.stands()  # a ledger that is not empty must have been anchored; where that cannot be, nothing starts anyway
    now = transition.database_now()
    _check(None, terms, now)
    if accepts_anew(None, terms):
        sentence = "This takes two people. Create it with another policy, then change that alone."
        raise Refused("repeats_accepted", sentence)
    try:
        blank = Job(tenant=tenant, name=name, enabled=True)
        return _created(blank, terms, now, anchor or now, token, actor, reason)
    except IntegrityError as error:
        if "job_name" not in str(error):
            raise
        earlier = pressing.answer_of(token, actor=actor)
        if earlier is None:
            raise Refused("name", "There is a job of this name already.") from error
        return earlier


@transaction.atomic
def _created(job: Job, terms: Terms, now: datetime, anchor: datetime, token: UUID, actor: Actor, reason: str) -> Answer:
    _set(job, terms, now, anchor)
    schedules.write(job, actor=actor, code="job_created", reason=reason, before=None)
    slots.look_ahead(job)
    pressing.take(token, action="create", subject=cast(Any, job), actor=actor)
    return pressing.keep(token, Verdict.DONE, f"{job.name} is on. {_next(job)}")


def usable(name: str) -> bool:
    """Whether a name can be part of a run's id and of an address."""
    return 0 < len(name) <= 80 and name.isascii() and all(c.isalnum() or c in "._-" for c in name)


def _set(job: Job, terms: Terms, now: datetime, anchor: datetime) -> None:
    """Put the terms in place. Missed starts that wait their turn go on waiting, unless the times are other ones."""
    anew = not job.pk or _other_times(job, terms)
    if anew and job.pk:
        backlog.pass_due(job, until=now, reason="terms_changed")
    job.anchor = _anchor(job if job.pk else None, terms, anchor)
    for name in ("kind", "expression", "zone", "workflow", "missed", "max_catch_up", "overlap", "start_deadline",
                 "max_run_time"):  # fmt: skip
        setattr(job, name, getattr(terms, name))
    job.repeats_accepted = _accepts(terms)
    if terms.input is not None or not job.pk:
        shown = registry.workflow(terms.workflow).shown
        job.input_shown, job.input_sealed = sealing.split(terms.input or {}, shown)
    if job.enabled and (anew or job.next_at is None):
        expected.expect_from(job, now)


def _accepts(terms: Terms) -> bool:
    """Kept only where it needed two people, so that it does not count later for a workflow that lost its keys."""
    return terms.repeats_accepted and terms.missed == Missed.RUN_ALL and bool(keyless.steps(terms.workflow))


def _next(job: Job) -> str:
    return f"Next run at {job.next_at:%Y-%m-%d %H:%M:%S} UTC." if job.next_at else "Nothing is due."


def edit(
    job: Job, *, terms: Terms, version: int, token: UUID, actor: Actor, reason: str, anchor: datetime | None = None
) -> Answer:
    """Save new terms. What is due is decided by the old ones first; nothing is run for times that have passed.

    `anchor` is that of the times that were shown.

    That missed starts may act more often than is meant is not accepted by one person: a second one is asked for it.
    Raises Refused for terms that cannot be.
    """
    _check(job, terms, transition.database_now())

    def deed(fresh: Job, now: datetime) -> str:
        if accepts_anew(fresh, terms):
            return _ask_for_repeats(fresh, terms, version=version, actor=actor, reason=reason)
        return _write(fresh, "job_edited", actor, reason, lambda: _set(fresh, terms, now, anchor or now))

    return _press(job, "edit", deed, version=version, token=token, actor=actor, reason=reason)


def accepts_anew(job: Job | None, terms: Terms) -> bool:
    """Whether these terms accept, for the first time, that missed starts of actions without a key are all run."""
    if terms.missed != Missed.RUN_ALL or not keyless.steps(terms.workflow):
        return False
    return job is None or (job.missed, job.repeats_accepted, job.workflow) != (Missed.RUN_ALL, True, terms.workflow)


def _ask_for_repeats(job: Job, terms: Terms, *, version: int, actor: Actor, reason: str) -> str:
    stands = replace(terms_of(job), missed=terms.missed, repeats_accepted=terms.repeats_accepted)
    if terms != stands:
        sentence = "This takes two people, so change it alone: save the rest with another policy first."
        raise Refused("repeats_accepted", sentence)
    if not reason.strip():
        raise Refused("reason", "Another person is asked; say why it should be so.")
    return second_person.ask(job, second_person.ACCEPT_REPEATS, {}, version=version, reason=reason, actor=actor)


def repeats_agreed(job: Job, *, use: Mapping[str, Any], actor: Actor, reason: str) -> str:
    """Run every missed start from now on, with a second person's consent, which is used up.

    Raises the TransitionRefused in the way.
    """
    with transaction.atomic():
        fresh = Job.objects.select_for_update().get(pk=job.pk)
        with suppress(NotASchedule, registry.Unregistered):
            schedules.decide(fresh, transition.database_now())  # what is due is decided by the old terms first
        before = schedules.told(fresh)
        fresh.missed, fresh.repeats_accepted = Missed.RUN_ALL, True
        schedules.write(fresh, actor=actor, code="job_edited", reason=reason, before=before, use=use)
    return f"{fresh.name} runs every missed start from now on."


def switch(job: Job, *, on: bool, version: int, token: UUID, actor: Actor, reason: str) -> Answer:
    """Switch a job on or off. The time in which it is off expects nothing, so nothing of it is missed.

    What waits to be started when it is switched off is recorded as missed instead, and can be filled by hand.
    """

    def deed(fresh: Job, now: datetime) -> str:
        if fresh.enabled == on:
            raise Refused("", f"It is {'on' if on else 'off'} already.")

        def change() -> None:
            if not on:
                backlog.pass_over(fresh, until=now, reason="job_disabled", actor=actor)
            fresh.enabled, fresh.next_at = on, None
            if on:
                expected.expect_from(fresh, now)

        return _write(fresh, "job_enabled" if on else "job_disabled", actor, reason, change)

    return _press(job, "enable" if on else "disable", deed, version=version, token=token, actor=actor, reason=reason)


def _write(job: Job, code: str, actor: Actor, reason: str, change: Callable[[], None]) -> str:
    before = schedules.told(job)
    change()
    schedules.write(job, actor=actor, code=code, reason=reason, before=before)
    slots.look_ahead(job)
    return _next(job) if job.enabled else "It is off: nothing more is started of it; runs that are started go on."


# Running by hand


def fillable(job: Job, *, number: int = 20) -> list[Slot]:
    """Expected runs that were not made, newest first; of a range the last one."""
    return list(Slot.objects.filter(job=job, state__in=FILLABLE).order_by("-scheduled_for")[:number])


def run_now(
    job: Job, *, fill: int | str | None, at: str = "", version: int, token: UUID, actor: Actor, reason: str
) -> Answer:
    """Start a run by hand: for an expected run (`fill`: its slot, or "next"), or as a new intent (None).

    `at` names one of several missed starts in one row, by the clock of the job's zone (`2026-06-10T08:30`); empty is
    the last of them.

    The run for an expected time has the id of that time, so there is one, whoever starts it. A new intent has an id of
    its own and takes nothing away from the schedule.
    """

    def deed(fresh: Job, now: datetime) -> str:
        if fill == "next" and at.strip():
            raise Refused(
                "", "The next run has a time of its own; choose the row in which the time that you name lies."
            )
        if fill == "next":
            slot = _slot_of_next(fresh, now)
        elif fill is not None:
            slot = _slot_to_fill(fresh, int(fill), at)
        else:
            slot = schedules.by_hand(fresh, now)
        schedules.start(fresh, slot, actor=actor)
        slots.record(fresh, slot, actor=actor, reason=reason)
        if slot.run is None:
            raise Refused("", f"No run was started: {wording.reason(slot.reason_code)}.")
        return f"Run {slot.run.workflow_id} is started."

    action = "new_intent" if fill is None else "fill"
    return _press(job, action, deed, version=version, token=token, actor=actor, reason=reason)


def _slot_to_fill(job: Job, pk: int, at: str) -> Slot:
    slot = Slot.objects.filter(job=job, pk=pk, state__in=FILLABLE).first()
    if slot is None:
        raise Refused("", "This expected run has its run already, or waits for it.")
    if not at.strip():
        return backlog.take_latest(job, slot, reason="filled_by_hand")
    for moment in _moments(job, at):
        chosen = backlog.take_one(job, slot, moment, reason="filled_by_hand")
        if chosen is not None:
            return chosen
    raise Refused("", "No start that was missed in this row has that time, or it has its run already.")


def _moments(job: Job, at: str) -> list[datetime]:
    """The instants of a time by the wall clock: two, the earlier one first, where the clock is put back."""
    zone = occurrences.zone_of(job.zone)
    try:
        named = datetime.fromisoformat(at.strip())
        both = [named] if named.tzinfo else [named.replace(tzinfo=zone, fold=fold) for fold in (0, 1)]
        return sorted({moment.astimezone(UTC) for moment in both})
    except (ValueError, OverflowError):
        raise Refused("", "A time looks like 2026-06-10T08:30.") from None


def _slot_of_next(job: Job, now: datetime) -> Slot:
    if not job.enabled or job.next_at is None:
        raise Refused("", "Nothing is expected next: the job is off.")
    return schedules.ahead_of_time(job)


def answer_missed(job: Job, *, slot: int, run: str, version: int, token: UUID, actor: Actor, reason: str) -> Answer:
    """Say what becomes of missed starts about which the job asks: `run` is "all", "latest" or "none"."""

    def deed(fresh: Job, now: datetime) -> str:
        asked = Slot.objects.filter(job=fresh, pk=slot, state=SlotState.ASKED).first()
        if asked is None or run not in ("all", "latest", "none"):
            raise Refused("", "Nothing is asked about this any more.")
        if run == "latest":
            chosen = backlog.take_latest(fresh, asked, reason="filled_by_hand", answered_by=actor.id)
            slots.record(fresh, chosen, actor=actor, reason=reason)
            if chosen.pk != asked.pk:
                backlog.settle_asked(fresh, asked, run_all=False, actor=actor, reason=reason)
            return "The latest of them is being started, the others are not run."
        if run == "all":
            _check_run_all(fresh)
        backlog.settle_asked(fresh, asked, run_all=run == "all", actor=actor, reason=reason)
        return "They are being run in order." if run == "all" else "None of them is run."

    return _press(job, "answer", deed, version=version, token=token, actor=actor, reason=reason)


def _check_run_all(job: Job) -> None:
    if not job.enabled:
        raise Refused("", "The job is off, so nothing is run in order. Switch it on first, or run the latest.")
    risky = keyless.steps(job.workflow)
    if risky and not job.repeats_accepted:
        sentence = (
            f"{', '.join(risky)} has no key that its provider would remember, so running every missed start may act "
            "more often than is meant. Run the latest; or have two people accept it first, by an edit of the policy "
            "to run all missed starts."
        )
        raise Refused("", sentence)


# One press


def _press(
    job: Job,
    action: str,
    deed: Callable[[Job, datetime], str],
    *,
    version: int,
    token: UUID,
    actor: Actor,
    reason: str,
) -> Answer:
    """Permission, token, version, deed, stored answer; what was refused is on record, committed apart."""
    subject = cast(Any, job)
    if not actor.may(Permission.SCHEDULE):
        pressing.refuse(subject, actor, action=action, why="not_allowed", reason=reason)
        sentence = "Your role does not allow it; operator or admin does. The attempt is on record."
        return Answer(verdict=Verdict.REFUSED, message=sentence, token=token)
    with transaction.atomic():
        earlier = pressing.take(token, action=action, subject=subject, actor=actor)
        if earlier is not None:
            return earlier
        fresh = Job.objects.select_for_update().get(pk=job.pk)
        if fresh.version != version:
            pressing.refuse(subject, actor, action=action, why="stale_version", reason=reason)
            return pressing.keep(token, Verdict.CONFLICT, pressing.changes_since(subject, version))
        return pressing.keep(token, *_done(fresh, action, deed, actor, reason))


def _done(
    fresh: Job, action: str, deed: Callable[[Job, datetime], str], actor: Actor, reason: str
) -> tuple[Verdict, str]:
    try:
        with transaction.atomic():
            now = transition.database_now()
            # Terms that name no times, or no workflow that is here, decide nothing, and can be mended.
            with suppress(NotASchedule, registry.Unregistered):
                schedules.decide(fresh, now)  # what is due is decided by the terms that held when it became due
            return Verdict.DONE, deed(fresh, now)
    except (Refused, NotASchedule, registry.Unregistered, InvalidField, sealing.CannotOpen) as why:
        pressing.refuse(cast(Any, fresh), actor, action=action, why="not_allowed", reason=reason)
        return Verdict.REFUSED, str(why)
