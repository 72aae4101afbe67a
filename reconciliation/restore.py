"""What a restore leads to: what may have been sent since the backup becomes unknown, and a person lets dispatch go on.

While the fence is down (fence.py) nothing is sent by anybody. `mark()` makes operations unknown in bounded steps, so
that look-ups find out what became of them; no start of a schedule that fell into the lost time is made up for; and
after the release, what is not shown to be new is looked up before it is sent, until the replay window has passed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import structlog
from django.conf import settings
from django.db import connections, transaction

from audit import log as audit

from . import anchor, backlog, fence, lost_time, pressing, timekeeping, transition
from .actors import Actor, Permission
from .anchor import AnchorUnreadable, Known
from .deeds import LONGEST_REASON, NotAllowed, check_reason
from .lost_time import GENERATIONS
from .models import Limit, Operation, RestoreFence, Run
from .pressing import Answer, Verdict
from .states import RUN_TERMINAL, RunState, State
from .transition import StaleVersion

log = structlog.get_logger(__name__)

BATCH = 200  # rows in one transaction of the marking
STEPS = 5  # batches in one round of the beat
OPEN = (State.READY, State.AWAITING_APPROVAL, State.PENDING, State.FAILED_RETRYABLE, State.AMBIGUOUS)


class Pressed:
    """What a press on the page is about, for its one-time token."""

    tenant, subject = ":all", "fence:1"


# The beat's duty


@dataclass(frozen=True)
class Tended:
    """What a round of the beat's duty came to."""

    down: bool  # nothing may be sent
    done: bool  # the anchor knows what is committed, or must not learn it while the fence is down


def tend() -> Tended:
    """Look, mark a batch where the fence is down, and write the anchor forward where it is not."""
    fence.forget()
    fence.look()
    down = fence.current()
    if down is not None and down.is_down:
        for _ in range(STEPS):
            if not mark():
                break
        return Tended(down=True, done=True)
    done = fence.forward()
    _end_replays()
    return Tended(down=False, done=done)


def _end_replays() -> None:
    body, _none = audit.body(fence.SYSTEM.fact("replay_window_over"))
    if Limit.objects.filter(kind="replay", lifted_at__isnull=True).exists():
        fence.call("SELECT fence_end_replays(%s)", [body])


# Marking


def mark(*, limit: int = BATCH) -> bool:
    """Make the next operations and runs unknown that may have gone on since the backup. True while some are left."""
    with transaction.atomic(using=transition.ALIAS):
        if not _alone():
            return True
        down = fence.current()
        if down is None or not down.is_down or not down.marking:
            return False
        if lost_time.void_requests(down, limit=limit):
            return True
        if down.is_marked:
            return False
        may_go_on = Operation.objects.filter(state__in=[*OPEN, State.FAILED_TERMINAL])
        operations = _next(may_go_on, down.operations_to, down.operations_end, limit)
        marked = sum(_mark_operation(pk, down) for pk in operations)
        going = Run.objects.exclude(state__in=RUN_TERMINAL)
        runs = _next(going, down.runs_to, down.runs_end, limit) if not operations else []
        for pk in runs:
            _mark_run(pk)
        operations_to = operations[-1] if operations else down.operations_end
        runs_to = down.runs_to if operations else runs[-1] if runs else down.runs_end
        fence.call("SELECT fence_marked(%s, %s, %s, %s)", [down.version, operations_to, runs_to, marked])
    return True


def _alone() -> bool:
    """Two beats do not mark the same batch."""
    return bool(fence.call("SELECT pg_try_advisory_xact_lock(%s)", [fence.LOCK + 1]))


def _next(rows: Any, after: int, end: int, limit: int) -> list[int]:
    return list(rows.filter(pk__gt=after, pk__lte=end).order_by("pk").values_list("pk", flat=True)[:limit])


def _mark_operation(pk: int, down: RestoreFence) -> bool:
    for _ in range(5):  # it may move meanwhile: a look-up found it, an answer came
        operation = Operation.objects.filter(pk=pk).first()
        if operation is None or not concerned(operation, down):
            return False
        try:
            lost_time.make_unknown(operation, down)
        except StaleVersion:
            continue
        return True
    raise StaleVersion(kind="operation", pk=pk, source="", target=State.AMBIGUOUS)


def concerned(operation: Operation, down: RestoreFence) -> bool:
    """Whether it may have been sent since the backup, or whether its failure may not be the newest that was known.

    What has succeeded stays proven, and what a person stopped is sent no more. A failure that is older than the replay
    window is not asked about again, nor is what failed before anything was sent.
    """
    if operation.state in OPEN:
        return True
    assert down.known_until is not None
    recent = down.known_until - timedelta(seconds=settings.AFTERCALL_REPLAY_WINDOW)
    failed = operation.state == State.FAILED_TERMINAL and operation.attempts > 0
    return failed and operation.settled_at is not None and operation.settled_at >= recent


def _mark_run(pk: int) -> None:
    """Whoever held it holds it no more; its steps wake it when they are known."""
    for _ in range(5):
        run = Run.objects.get(pk=pk)
        if run.state in RUN_TERMINAL:
            return
        try:
            transition.transition(
                run.subject,
                to=RunState.PENDING if run.state == RunState.RUNNING else None,
                version=run.version,
                patch={"generation": run.generation + GENERATIONS, "lease_until": None, "lease_owner": ""},
                after={} if run.escalated_at else {"due_at": 0},
                fact=fence.SYSTEM.fact("restored", was=run.state),
            )
        except StaleVersion:
            continue
        return
    log.warning("run_not_marked", run=pk)  # its steps are unknown all the same


# What a person does


def release(*, actor: Actor, version: int, reason: str, token: UUID) -> Answer:
    """Let dispatch go on: what was found out is found out, the rest stays unknown."""
    return _pressed("release_fence", _release, actor=actor, version=version, reason=reason, token=token)


def adopt(*, actor: Actor, version: int, reason: str, token: UUID) -> Answer:
    """Take this ledger for what it is: nothing of it was lost. Only where nothing says otherwise."""
    return _pressed("adopt_ledger", _adopt, actor=actor, version=version, reason=reason, token=token)


def begin(*, actor: Actor, version: int, reason: str, token: UUID) -> Answer:
    """Say that an unanchored ledger was restored: what may have been sent since becomes unknown."""
    return _pressed("begin_restore", _begin, actor=actor, version=version, reason=reason, token=token)


def _pressed(action: str, do: Any, **facts: Any) -> Answer:
    try:
        answer = _press(action, do, **facts)
    except AnchorUnreadable as problem:
        refused = facts["actor"].fact("anchor_unreadable", reason=facts["reason"][:LONGEST_REASON], action=action)
        transition.refuse(subject=Pressed.subject, tenant=Pressed.tenant, fact=refused)
        return Answer(verdict=Verdict.REFUSED, message=f"{problem} Nothing was changed.", token=facts["token"])
    if answer.verdict is Verdict.DONE:
        _settle_anchor()
    return answer


def _press(action: str, do: Any, *, actor: Actor, version: int, reason: str, token: UUID) -> Answer:
    with fence.deciding(), transaction.atomic(using=transition.ALIAS):
        earlier = pressing.take(token, action=action, subject=Pressed(), actor=actor)
        if earlier is not None:
            return earlier
        try:
            _check(actor, reason)
            message = do(actor=actor, version=version, reason=reason)
        except NotAllowed as refusal:
            fact = actor.fact("not_allowed", reason=reason[:LONGEST_REASON], action=action)
            transition.refuse(subject=Pressed.subject, tenant=Pressed.tenant, fact=fact)
            return pressing.keep(token, Verdict.REFUSED, str(refusal))
        except StaleVersion:
            return pressing.keep(token, Verdict.CONFLICT, "Nothing was changed: somebody else has decided meanwhile.")
        return pressing.keep(token, Verdict.DONE, message)


def _check(actor: Actor, reason: str) -> None:
    if not actor.may(Permission.RELEASE):
        raise NotAllowed("Your role does not allow this; it needs “release” in every tenant: the role admin.")
    check_reason(reason, missing="A reason is needed: what was compared with the providers, and by whom.")


def _release(*, actor: Actor, version: int, reason: str) -> str:
    down = fence.current()
    if down is None or not down.is_down or down.version != version:
        raise StaleVersion(kind="fence", pk=1, source="", target=None)
    if not down.is_marked:
        raise NotAllowed(
            "Say first what this ledger is." if not down.marking else
            "Operations are still being marked as unknown; the beat does so within moments. Press again then."
        )  # fmt: skip
    _check_clock()
    backlog.pass_all_over(reason="restored")
    _up(actor, version, reason, adopt=False, fact_code="restore_released")
    return "Released. What is still unknown goes on being looked up; everything else may be sent."


def _check_clock() -> None:
    """Slots are passed over up to now. By a clock that lags behind, those of the lost time would still come."""
    known, now = anchor.current().read(), transition.database_now()
    decided = datetime.fromisoformat(known.at) if known is not None and known.at else None
    if decided is not None and now < decided:
        raise NotAllowed(
            "The database's clock is behind: the newest decision that the anchor knows is of "
            f"{_minute(decided)}, and it is {_minute(now)} by that clock. Set the clock right first, else schedules "
            "would start once more what they started in the time that was lost."
        )


def _minute(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _adopt(*, actor: Actor, version: int, reason: str) -> str:
    known, here, _trails = fence.compare()
    problem = fence.judge(known, here)
    if problem is None:
        raise NotAllowed("This is the ledger that the anchor knows; there is nothing to adopt.")
    if problem.code not in ("unanchored", "no_anchor", "moved"):
        raise NotAllowed("The anchor shows that this ledger lost something; it can be released, and not adopted.")
    if here.state == "down" and (down := fence.current()) is not None and down.marking:
        raise NotAllowed("The fence is down and operations became unknown by it; it can be released, and not adopted.")
    _up(actor, version, reason, adopt=True, fact_code="ledger_adopted")
    return "Adopted. The anchor knows this ledger from now on, and everything may be sent."


def _begin(*, actor: Actor, version: int, reason: str) -> str:
    body, openings = audit.body(actor.fact("restore_begun", reason=reason))
    if not fence.call("SELECT fence_begin(%s, %s, %s::jsonb)", [version, body, audit.openings_json(openings)]):
        raise StaleVersion(kind="fence", pk=1, source="", target=None)
    return "What may have been sent since the backup is becoming unknown, and is looked up."


def _up(actor: Actor, version: int, reason: str, *, adopt: bool, fact_code: str) -> None:
    """The anchor says beforehand which identity the ledger gets, so that a crash in between is made good by a look."""
    name = str(uuid4())
    known = anchor.current().read() or Known(database="")
    anchor.current().write(Known(**{**vars(known), "pending": name}))
    body, openings = audit.body(actor.fact(fact_code, reason=reason))
    window = 0 if adopt else round(settings.AFTERCALL_REPLAY_WINDOW)
    verdict = fence.call(
        "SELECT fence_up(%s, %s, %s, %s, %s, %s, %s, %s, %s::jsonb)",
        [version, UUID(name), adopt, window, actor.id, actor.name[:200], reason, body, audit.openings_json(openings)],
    )
    if verdict != "moved":
        raise StaleVersion(kind="fence", pk=1, source="", target=None)
    log.warning("restore_fence_up", adopted=adopt, by=actor.id)


def _settle_anchor() -> None:
    """After the commit, and outside the lock: the anchor learns what the ledger is called now."""
    fence.forget()
    try:
        fence.look()
    except AnchorUnreadable as error:  # the next look, by whomever, does it
        log.error("anchor_not_settled", why=str(error))


# Reading


def replays_until() -> datetime | None:
    """Until when what is not shown to be new is looked up first; None where no replay window is open."""
    window = Limit.objects.filter(kind="replay", lifted_at__isnull=True).first()
    if window is None:
        return None
    since = max(window.since, timekeeping.put_forward_at() or window.since)
    return since + timedelta(seconds=window.window_seconds or 0)


def keeps_it_open() -> str:
    """What keeps a replay window open that would be over by its time; empty where nothing does, or it is not over."""
    since, until = fence.replays_since(), replays_until()
    if since is None or until is None or transition.database_now() < until:
        return ""
    with connections[transition.ALIAS].cursor() as cursor:
        cursor.execute("SELECT runs, messages, waiting FROM fence_open_since(%s)", [since])
        counts = zip(("run", "message of the outbox", "waiting operation"), cursor.fetchone(), strict=True)
    told = [f"{name}: {count}" for name, count in counts if count]
    return ", ".join(told)


def found(down: RestoreFence) -> dict[str, Any]:
    """What the fence came down for, as it was recorded."""
    told: dict[str, Any] = json.loads(down.found)
    return told
