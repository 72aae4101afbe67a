"""Retention: what is settled goes after its time, and a tombstone answers for it.

An action says how long its operations stay (`ActionSpec.keep`: the longest of replay window, the provider's memory of
keys, dispute window and message lifetime). Open work, unfinished runs, what is unknown or escalated, and what an undo
still refers to stay whatever their age: sql/retention.sql asks that again under the row's lock. Every subject is one
small transaction, so that pruning can be stopped anywhere and may run twice at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db import IntegrityError
from django.db.models import Count, Q

from . import fence, reconciler, registry, transition
from .actors import Actor
from .models import Chosen, Operation, Run
from .providers.base import ActionSpec
from .states import RUN_TERMINAL, TERMINAL, State, Subject
from .workflows import Workflow

log = structlog.get_logger(__name__)

KEEPER = Actor(id="system:retention", kind="system")
BATCH = 500  # of each action and kind in one round; the queue's next task takes the next ones
_RESTORED = "the ledger was restored, and waits for its release"
_NO_ANCHOR = "the anchor cannot be read, so this may be a restored ledger"
LEAST = timedelta(days=1)  # what the database insists on, whatever an action declares


@dataclass
class Tally:
    """What one round did, or would do: by subject kind and verdict."""

    pruned: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    shredded: int = 0
    proposals: int = 0  # runs whose refused proposals were shredded
    forgotten: int = 0
    messages: int = 0
    full: bool = False  # as much of something went as may go in one round, so there may be more
    fenced: str = ""  # why nothing was touched: what may be wanted as evidence stays until a release

    def told(self) -> str:
        """In one sentence."""
        if self.fenced:
            return f"Nothing was pruned: {self.fenced}."
        gone = f"{self.pruned['operation']} operations and {self.pruned['run']} runs pruned, {self.shredded} shredded"
        gone += f", and what {self.proposals} runs refused" if self.proposals else ""
        kept = ", ".join(f"{number} {why.replace('_', ' ')}" for why, number in sorted(self.kept.items()) if number)
        over = f"{self.forgotten} tombstones and counts and {self.messages} messages forgotten"
        return f"{gone}; {over}; kept for now: {kept or 'none that was due'}."


def tend(*, limit: int = BATCH, dry_run: bool = False) -> Tally:
    """One round: shred, prune operations (undos before what they undo), prune runs, forget. `limit` of each."""
    if not fence.stands():  # it looks: in an archive that was loaded just now nobody else may have looked yet
        return Tally(fenced=_RESTORED if fence.is_down() else _NO_ANCHOR)
    tally = Tally()
    for operation, spec in _shreddable(limit):
        assert spec.shred_after is not None
        if dry_run or _shred(operation.subject, spec.shred_after) == "shredded":
            tally.shredded += 1
    for run, after in _refused_proposals(limit):
        if dry_run or _shred(run.subject, after) == "shredded":
            tally.proposals += 1
    for operation, spec in _prunable(limit):
        _count(tally, "operation", "pruned" if dry_run else _prune(operation.subject, spec.keep))
    tally.kept.update({"no handler": _without_handler()})
    for run in _prunable_runs(limit):
        _count(tally, "run", "pruned" if dry_run else _prune(run.subject, _run_keep()))
    if not dry_run:
        tally.forgotten = transition.forget(tombstones_older=settings.AFTERCALL_TOMBSTONES, limit=limit)
        keep = {"older": settings.AFTERCALL_OUTBOX_KEEP, "discarded": settings.AFTERCALL_TOMBSTONES}
        tally.messages = transition.forget_messages(**keep, limit=limit)
    went = (*tally.pruned.values(), tally.shredded, tally.proposals, tally.forgotten, tally.messages)
    tally.full = max(went, default=0) >= limit
    return tally


def _count(tally: Tally, kind: str, verdict: str) -> None:
    if verdict == "pruned":
        tally.pruned[kind] += 1
    else:
        tally.kept[verdict] += 1


def _prune(subject: Subject, keep: timedelta) -> str:
    try:
        return transition.prune(subject, keep=keep.total_seconds(), fact=KEEPER.fact("pruned"))
    except IntegrityError:  # something else in the ledger still refers to it
        log.info("not_pruned", subject=str(subject), why="referred to")
        return "referred_to"


def _shred(subject: Subject, after: timedelta) -> str:
    return transition.shred(subject, after=after.total_seconds(), fact=KEEPER.fact("shredded"))


_UNKNOWN = ~Q(unknown_attempts=[]) & ~Q(state=State.SUCCEEDED)  # stopped while nobody knew


def _settled() -> Iterator[tuple[tuple[str, str], ActionSpec]]:
    """Each action that the ledger holds settled operations of, with what it promises. One without a handler here is
    left out: it may promise to keep for longer than anything that could be taken for it."""
    names = Operation.objects.filter(state__in=TERMINAL).values_list("provider", "action").distinct().order_by()
    for provider, action in names:
        spec = reconciler.spec_or_none(Operation(provider=provider, action=action))
        if spec is not None:
            yield (provider, action), spec


def _without_handler() -> int:
    """How many operations stay that an action which declares nothing would give: nothing here says for how long."""
    old = Operation.objects.filter(
        state__in=TERMINAL, settled_at__lt=_before(transition.database_now(), ActionSpec().keep)
    )
    counted = old.order_by().values_list("provider", "action").annotate(number=Count("pk"))
    return sum(
        number for provider, action, number in counted
        if reconciler.spec_or_none(Operation(provider=provider, action=action)) is None
    )  # fmt: skip


def _prunable(limit: int) -> Iterator[tuple[Operation, ActionSpec]]:
    now = transition.database_now()
    for (provider, action), spec in _settled():
        rows = Operation.objects.filter(
            provider=provider, action=action, state__in=TERMINAL, escalated_at__isnull=True, due_at__isnull=True,
            settled_at__lt=_before(now, spec.keep),
        )  # fmt: skip
        # An undo is younger than what it undoes and goes first. What runs and ceilings still need, and what stays
        # unknown for good, is passed over by the query, for there may be more of it than one round takes.
        gone = rows.exclude(run__settled_at__isnull=True, run__isnull=False).exclude(_UNKNOWN).order_by("-id")
        gone = gone.exclude(ceiling_minor__isnull=False, state=State.SUCCEEDED)
        for operation in gone.only("pk", "provider", "action")[:limit]:
            yield operation, spec


def _before(now: datetime, keep: timedelta) -> datetime:
    return now - max(keep, LEAST)


def _shreddable(limit: int) -> Iterator[tuple[Operation, ActionSpec]]:
    now = transition.database_now()
    for (provider, action), spec in _settled():
        if spec.shred_after is None:
            continue
        rows = Operation.objects.filter(
            provider=provider, action=action, state__in=TERMINAL, escalated_at__isnull=True, due_at__isnull=True,
            settled_at__lt=now - spec.shred_after, shredded_at__isnull=True,
        )  # fmt: skip
        known = rows.exclude(run__settled_at__isnull=True, run__isnull=False).exclude(_UNKNOWN)
        for operation in known.only("pk", "provider", "action")[:limit]:
            yield operation, spec


def _refused_proposals(limit: int) -> Iterator[tuple[Run, timedelta]]:
    """Ended runs that hold sealed proposals which were refused: they go with the first request that the run may shred,
    for they say the same of the same people."""
    now = transition.database_now()
    holding = Chosen.objects.filter(valid=False).exclude(value_sealed="").values("run")
    runs = Run.objects.filter(pk__in=holding, state__in=RUN_TERMINAL, escalated_at__isnull=True)
    for name, version in runs.values_list("workflow_type", "workflow_version").distinct().order_by():
        after = _shred_after(registry.workflows().get((name, version)))
        if after is None:
            continue
        rows = runs.filter(workflow_type=name, workflow_version=version, settled_at__lt=now - after)
        for run in rows.only("pk").order_by("pk")[:limit]:
            yield run, after


def _shred_after(workflow: Workflow | None) -> timedelta | None:
    calls = [(step.provider, step.action) for step in workflow.effects] if workflow else []
    specs = [reconciler.spec_or_none(Operation(provider=provider, action=action)) for provider, action in calls]
    return min((spec.shred_after for spec in specs if spec and spec.shred_after is not None), default=None)


def _run_keep() -> timedelta:
    """A run stays for as long as an action that declares nothing: its id may come again as late."""
    return ActionSpec().keep


def _prunable_runs(limit: int) -> list[Run]:
    before = _before(transition.database_now(), _run_keep())
    rows = Run.objects.filter(
        state__in=RUN_TERMINAL, settled_at__lt=before, escalated_at__isnull=True, operations__isnull=True,
    )  # fmt: skip
    return list(rows.only("pk").order_by("pk")[:limit])
