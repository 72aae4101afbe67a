# ruff: noqa: F811 - fixtures of another file
"""What a restore leads to: what may have been sent is unknown and looked up, and a person lets dispatch go on."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from audit import verify
from audit.models import Entry
from console.sagas import saga
from reconciliation import (
    actions,
    executor,
    fence,
    intents,
    limits,
    reconciler,
    registry,
    restore,
    retention,
    retrying,
    runs,
    schedules,
    settlement,
    settling,
    spool,
    sweeping,
    tasks,
    transition,
    watch,
)
from reconciliation.actors import Actor, Permission
from reconciliation.models import Approval, Job, JournalEntry, Limit, Operation, RestoreFence, Run, Signal, Slot
from reconciliation.pressing import Answer, Verdict
from reconciliation.providers.base import OutcomeUnknown, Rejected, Unavailable
from reconciliation.states import State
from tests import database, timetable
from tests.backups import Backup
from tests.book import Shelf, entry
from tests.cast import operation
from tests.database import Clock
from tests.ledger import changes_without_audit
from tests.scripted import AGENT, OLGA, Clerk, absent, applied, cannot_tell, found, kinds, order, row
from tests.test_approvals import ANN, BIG, POLICY, ROOT, do, press, the
from tests.test_sagas import DOWN, settle, start
from tests.test_two_people import CLEO, guarded, standing, take_away  # noqa: F401 - fixtures

ADA = Actor(id="person:7", kind="person", name="Ada Admin", permissions=frozenset(Permission))
OTTO = Actor(
    id="person:8", kind="person", name="Otto Operator", permissions=frozenset(Permission) - {Permission.RELEASE}
)


@pytest.fixture
def backup(superuser_connection: Any) -> Iterator[Callable[[], Backup]]:
    """Takes a backup of the database as it is when it is called."""
    taken: list[Backup] = []

    def take() -> Backup:
        fence.forward()
        taken.append(Backup(superuser_connection))
        return taken[-1]

    yield take
    for each in taken:
        each.drop()


def perform(number: int = 1, action: str = "keyed", *, intended_at: datetime | None = None, **parts: Any) -> Any:
    parts.setdefault("business_object", f"order-{number}")
    intent = replace(order(action, workflow_id=f"w{number}", **parts), intended_at=intended_at)
    return executor.perform(intent, actor=AGENT)


def lose(earlier: Backup) -> RestoreFence:
    """Something is decided, and the backup comes back: the fence is down."""
    perform(999)
    fence.forward()
    earlier.bring_back()
    fence.look()
    down = RestoreFence.objects.get()
    assert down.is_down
    return down


def mark_all() -> None:
    while restore.mark():
        pass


def release(actor: Actor = ADA, **given: Any) -> Answer:
    facts = {"version": RestoreFence.objects.get().version, "reason": "compared with the bank", "token": uuid.uuid4()}
    return restore.release(actor=actor, **{**facts, **given})


def restored(earlier: Backup) -> None:
    """The backup is back, everything is marked, and a person has released it."""
    lose(earlier)
    mark_all()
    assert release().verdict is Verdict.DONE


# What becomes unknown


def test_what_was_open_or_failed_lately_becomes_unknown_and_what_is_proven_stays(clerk: Clerk, backup: Any) -> None:
    states = ("ready", "pending", "failed_retryable", "ambiguous", "failed_terminal", "succeeded", "terminated")
    made = {state: operation(state=state, provider="clerk", action="keyed") for state in states}
    assert made["failed_terminal"].attempts == 1
    lose(backup())
    mark_all()
    now = {state: row(one.pk) for state, one in made.items()}
    unknown = {state for state, one in now.items() if one.state == State.AMBIGUOUS}
    assert unknown == {"ready", "pending", "failed_retryable", "ambiguous", "failed_terminal"}
    assert {one.reason_code for state, one in now.items() if state in unknown} == {"restored"}
    assert RestoreFence.objects.get().marked == 5


def test_an_old_failure_and_one_that_was_never_sent_stay_failed(clerk: Clerk, clock: Clock, backup: Any) -> None:
    old = operation(state="failed_terminal", provider="clerk", action="keyed", sent=5)
    clock.advance(days=31)
    unsent = operation(state="ready", provider="clerk", action="keyed")
    transition.transition(unsent.subject, to="failed_terminal", version=1, fact=OLGA.fact("denied"))
    lose(backup())
    mark_all()
    assert [row(one.pk).state for one in (old, unsent)] == [State.FAILED_TERMINAL] * 2


def test_an_attempt_of_the_lost_time_is_counted_and_may_have_left_at_any_time_since_the_backup(
    clerk: Clerk, clock: Clock, backup: Any
) -> None:
    waiting = operation(provider="clerk", action="keyed")
    flying = operation(state="pending", provider="clerk", action="keyed", sent=5)
    earlier = backup()
    taken_at = clock.now()
    clock.advance(hours=3)
    down = lose(earlier)
    mark_all()
    one, two = row(waiting.pk), row(flying.pk)
    assert (one.attempts, one.unknown_attempts) == (1, [1])
    assert (two.attempts, two.unknown_attempts) == (2, [1, 2])
    assert one.first_sent_at is not None
    assert one.last_sent_at is not None
    assert one.first_sent_at == down.known_until <= taken_at
    assert one.last_sent_at > taken_at + timedelta(hours=2)
    # The provider remembers the key from the earliest moment on.
    assert one.same_key_until == down.known_until + timedelta(days=1) - timedelta(seconds=600)
    assert kinds(waiting.pk) == ["restored"]


def test_marking_goes_in_bounded_steps_and_ends(clerk: Clerk, backup: Any) -> None:
    for _ in range(7):
        operation(provider="clerk", action="keyed")
    lose(backup())
    marked = []
    while restore.mark(limit=3):
        marked.append(Operation.objects.filter(state=State.AMBIGUOUS).count())
    assert marked == [3, 6, 7]
    assert RestoreFence.objects.get().is_marked


def test_two_beats_mark_nothing_twice(clerk: Clerk, backup: Any, superuser_connection: Any) -> None:
    made = operation(provider="clerk", action="keyed")
    lose(backup())
    mark_all()
    version = row(made.pk).version
    mark_all()
    assert row(made.pk).version == version
    assert changes_without_audit(superuser_connection) == []
    assert list(verify.verify(verify.registered_heads())) == []


def test_a_late_answer_of_the_lost_time_finds_no_claim_to_settle(clerk: Clerk, backup: Any) -> None:
    """Its worker claimed before the backup and answers after the restore: kept as a report, and no settlement."""
    intent, provider = order(workflow_id="w1"), registry.provider("clerk")
    spec = provider.actions["keyed"]
    claim = executor.claim_new(executor.row_of(intent, provider, spec), intent, provider, spec, AGENT)
    assert claim is not None
    lose(backup())
    mark_all()
    before = row(claim.subject.pk)
    settling.settle(claim, settlement.judge(claim, applied("r-9", order="1002", amount=4200)))
    after = row(claim.subject.pk)
    assert after.generation == before.generation > 1000
    assert (after.state, kinds(after.pk)[-1]) == (State.AMBIGUOUS, "late_report")


def test_a_run_that_somebody_held_is_held_by_nobody(clerk: Clerk, backup: Any, settings: Any) -> None:
    settings.AFTERCALL_WORKFLOWS = ["tests.scripted_workflows.first"]
    registry.forget()
    run = runs.start("damaged_item", tenant="acme", workflow_id="r1", input={"order": "1", "amount": 5}, actor=AGENT)
    run = timetable.take(run, seconds=600)
    lose(backup())
    mark_all()
    now = Run.objects.get(pk=run.pk)
    assert (now.state, now.lease_until, now.generation) == ("pending", None, run.generation + 1000)
    assert transition.heartbeat_run(run.subject, generation=run.generation, seconds=60) is None


def test_look_ups_go_on_while_it_is_down_and_prove_what_they_can(clerk: Clerk, clock: Clock, backup: Any) -> None:
    earlier = backup()
    perform(1)
    lose(earlier)
    perform(1)  # asked for again: it may have been sent
    assert Operation.objects.get(workflow_id="w1").state == State.AMBIGUOUS
    clerk.sees(found("r-1"))
    clock.advance(minutes=1)
    sweeping.sweep()
    assert Operation.objects.get(workflow_id="w1").state == State.SUCCEEDED
    assert len(clerk.calls) == 2


# Every road is closed while it is down


def test_no_new_operation_is_sent_and_it_enters_as_unknown(clerk: Clerk, backup: Any) -> None:
    lose(backup())
    sent = len(clerk.calls)
    outcome = perform(1, intended_at=datetime.now(UTC))
    assert (outcome.state, outcome.reason_code, outcome.outcome) == (State.AMBIGUOUS, "restored", "unknown")
    assert len(clerk.calls) == sent


def test_no_retry_is_made_by_automation_or_by_a_person(clerk: Clerk, clock: Clock, backup: Any) -> None:
    clerk.answers(Unavailable("down", status=503))
    pk = perform(1).pk
    earlier = backup()
    lose(earlier)
    sent = len(clerk.calls)
    clock.advance(hours=1)
    with pytest.raises(transition.Limited, match="restored"):
        retrying.retry(pk, actor=OLGA, version=row(pk).version)
    mark_all()
    clerk.sees(absent())
    for _ in range(6):
        clock.advance(minutes=2)
        sweeping.sweep()
    assert row(pk).state == State.FAILED_RETRYABLE  # proven not applied, and still not sent
    assert JournalEntry.objects.filter(operation_id=pk, kind="held_back").exists()
    with pytest.raises(transition.Limited, match="restored"):
        retrying.retry(pk, actor=OLGA, version=row(pk).version)
    assert len(clerk.calls) == sent


def test_no_same_key_repeat_of_an_unknown_one_is_made(clerk: Clerk, clock: Clock, backup: Any) -> None:
    clerk.answers(OutcomeUnknown("no answer"))
    pk = perform(1, "unlisted").pk
    lose(backup())
    mark_all()
    sent = len(clerk.calls)
    clock.advance(minutes=1)
    sweeping.sweep()
    assert (row(pk).state, len(clerk.calls)) == (State.AMBIGUOUS, sent)


def ask(action: str = "keyed", **parts: Any) -> Any:
    """Submit what needs a person's consent."""
    return executor.perform(replace(order(action, request=BIG, **parts), consent=POLICY), actor=AGENT)


def test_no_consent_is_used_up_and_it_is_void_afterwards(clerk: Clerk, backup: Any) -> None:
    asked = ask()
    press("approve", the(asked.pk), ROOT)
    earlier = backup()
    lose(earlier)
    sent = len(clerk.calls)
    ask()
    assert (the(asked.pk).state, len(clerk.calls)) == ("approved", sent)
    mark_all()
    assert (the(asked.pk).state, row(asked.pk).state) == ("superseded", State.AMBIGUOUS)


@pytest.mark.parametrize("agreed", [False, True])
def test_requests_about_limits_and_runs_are_void_as_well_since_the_lost_time_may_have_used_them(
    standing: Limit, guarded: Clerk, clock: Clock, backup: Any, agreed: bool
) -> None:
    guarded.answers(applied("r-1"), DOWN)
    run = start("saga")
    sweeping.sweep()
    do(run, "cancel", ROOT)
    settle(clock)
    do(run, "compensate_run", ANN)
    take_away(standing)
    if agreed:  # and not done yet
        for each in Approval.objects.all():
            transition.move_approval(each, to="approved", who=[], patch={"decided_by": CLEO.id}, fact=CLEO.fact("yes"))
    open_ones = {each.action for each in Approval.objects.filter(state="approved" if agreed else "waiting")}
    assert open_ones == {"compensate_run", "lift_limit"}
    earlier = backup()
    perform(999)
    fence.forward()
    earlier.bring_back()
    fence.look()
    assert RestoreFence.objects.get().is_down
    mark_all()
    assert set(Approval.objects.values_list("state", flat=True)) == {"superseded"}
    assert release().verdict is Verdict.DONE
    for each in Approval.objects.all():
        assert press("approve", each, CLEO).verdict is not Verdict.DONE
    sweeping.sweep()
    standing.refresh_from_db()
    assert (standing.lifted_at, Operation.objects.filter(step__startswith="undo:").count()) == (None, 0)
    assert "Asked for" in take_away(standing).message, "who still wants it asks anew"


def test_sending_again_with_a_second_person_is_refused(clerk: Clerk, backup: Any) -> None:
    clerk.answers(OutcomeUnknown("no answer"))
    pk = perform(1, "none").pk
    lose(backup())
    sent = len(clerk.calls)
    assert "Asked for" in do(row(pk), "send_again", ANN).message
    refused = press("approve", the(pk, "send_again"), ROOT)
    assert (row(pk).state, len(clerk.calls)) == (State.AMBIGUOUS, sent)
    assert "restored" in refused.message


def test_no_undo_is_sent(clerk: Clerk, backup: Any, settings: Any) -> None:
    settings.AFTERCALL_WORKFLOWS = ["tests.scripted_workflows.agreed"]
    registry.forget()
    run = runs.start("agreed", tenant="acme", workflow_id="r1", input={"order": "1", "amount": 5}, actor=AGENT)
    runs.advance(run.pk)
    label = Operation.objects.get(step="label")
    assert Run.objects.get(pk=run.pk).state == "succeeded"
    lose(backup())
    sent = len(clerk.calls)
    clerk.sees(found("r-1", order="1", amount=0))
    do(label, "compensate", OLGA)
    assert len(clerk.calls) == sent


def walks_back(clerk: Clerk, settings: Any) -> Run:
    """A run whose pivot was refused, so that two steps are to be undone."""
    settings.AFTERCALL_WORKFLOWS = ["tests.saga_workflows.SAGA"]
    registry.forget()
    clerk.answers(applied("r-1"), applied("c-1"), Rejected("no", status=402))
    run = start("saga")
    sweeping.sweep()
    return run


def test_a_run_that_walks_back_undoes_nothing_while_a_step_of_it_is_unknown_again(
    clerk: Clerk, clock: Clock, backup: Any, settings: Any
) -> None:
    run = walks_back(clerk, settings)
    run.refresh_from_db()
    assert run.state == "compensating"
    restored(backup())
    ship = Operation.objects.get(step="ship")
    assert ship.state == State.AMBIGUOUS
    clerk.sees(cannot_tell())
    sent = len(clerk.calls)
    for _ in range(3):
        clock.advance(5)
        sweeping.sweep()
    run.refresh_from_db()
    assert (run.state, run.waiting_for, len(clerk.calls)) == ("compensating", "ship", sent)
    assert next(each.text for each in saga(run).obstacles).startswith("ship is unknown, and is being looked up.")
    clerk.sees(absent())
    settle(clock, seconds=60)
    run.refresh_from_db()
    assert run.state == "compensated"
    undos = Operation.objects.filter(step__startswith="undo:")
    assert [clerk.effects.count(undo.key) for undo in undos] == [1, 1]


def test_a_run_is_not_called_undone_whose_step_was_given_up_while_it_was_unknown(
    clerk: Clerk, clock: Clock, backup: Any, settings: Any
) -> None:
    run = walks_back(clerk, settings)
    restored(backup())
    ship = Operation.objects.get(step="ship")
    clerk.sees(cannot_tell())
    do(ship, "terminate", OLGA)
    settle(clock, seconds=60)
    run.refresh_from_db()
    assert (run.state, run.waiting_for, run.escalation_reason) == ("compensating", "ship", "step_terminated")
    assert not Operation.objects.filter(step__startswith="undo:", attempts__gt=0).exists()
    assert "what nobody can find out leaves a cancel" in saga(run).obstacles[0].help
    assert "ship was stopped by a person while nobody knew" in do(run, "resume", OLGA).message
    clerk.sees(absent())
    while ship.unknown_attempts:
        clock.advance(60)
        do(ship, "look_up", OLGA)
        ship.refresh_from_db()
    do(run, "resume", OLGA)
    settle(clock, seconds=60)
    run.refresh_from_db()
    assert run.state == "compensated"


def test_no_schedule_is_decided_or_started(clerk: Clerk, clock: Clock, backup: Any, timed: Any) -> None:
    job = timetable.job(at=datetime(2026, 3, 1, 10, 0, 30, tzinfo=UTC), clock=clock)
    lose(backup())
    clock.set(datetime(2026, 3, 1, 10, 1, 1, tzinfo=UTC))
    assert schedules.tick() == 0
    assert not Slot.objects.filter(job=job).exists()
    assert not Run.objects.exists()


def test_a_beat_that_comes_first_looks_before_it_starts_anything(
    clerk: Clerk, clock: Clock, backup: Any, timed: Any
) -> None:
    job = timetable.job(at=at(1, 10, 0, 30), clock=clock)
    earlier = backup()
    perform(1)
    clock.set(at(1, 10, 1, 1))
    earlier.bring_back()
    assert schedules.tick() == 0
    assert not Slot.objects.filter(job=job).exists()


@pytest.fixture
def timed(settings: Any, clerk: Clerk) -> None:
    """Workflows that jobs start."""
    settings.AFTERCALL_WORKFLOWS = ["tests.timetable.WORKFLOWS"]
    registry.forget()


# The release


def test_a_release_needs_the_permission_a_reason_the_version_and_a_finished_marking(clerk: Clerk, backup: Any) -> None:
    operation(provider="clerk", action="keyed")
    lose(backup())
    assert release(OTTO).verdict is Verdict.REFUSED
    assert release(reason=" ").verdict is Verdict.REFUSED
    unmarked = release()
    assert (unmarked.verdict, "being marked" in unmarked.message) == (Verdict.REFUSED, True)
    mark_all()
    assert release(version=77).verdict is Verdict.CONFLICT
    assert release(OTTO).verdict is Verdict.REFUSED
    assert RestoreFence.objects.get().is_down
    assert release().verdict is Verdict.DONE
    assert not RestoreFence.objects.get().is_down
    refused = Entry.objects.filter(subject="fence:1", event="refused").count()
    assert refused == 4


def test_one_token_is_one_release_and_a_second_person_is_told(clerk: Clerk, backup: Any) -> None:
    lose(backup())
    mark_all()
    token, version = uuid.uuid4(), RestoreFence.objects.get().version
    first = release(token=token, version=version)
    again = release(token=token, version=version)
    assert (first.verdict, again.message) == (Verdict.DONE, first.message)
    assert release(OLGA, version=version).verdict is Verdict.CONFLICT


def test_after_the_release_dispatch_goes_on_and_the_anchor_knows_the_new_identity(clerk: Clerk, backup: Any) -> None:
    before = RestoreFence.objects.get().database
    restored(backup())
    now = RestoreFence.objects.get()
    assert now.database != before
    assert fence.anchor.current().read().database == str(now.database)
    sent = len(clerk.calls)
    assert perform(5, intended_at=transition.database_now()).state == State.SUCCEEDED
    assert len(clerk.calls) == sent + 1
    fence.forget()
    fence.look()
    assert not RestoreFence.objects.get().is_down


def test_a_release_whose_process_died_before_it_wrote_the_anchor_is_completed(
    clerk: Clerk, backup: Any, monkeypatch: Any
) -> None:
    lose(backup())
    mark_all()
    monkeypatch.setattr(restore, "_settle_anchor", lambda: None)
    release()
    assert fence.anchor.current().read().pending
    fence.forget()
    assert perform(5, intended_at=transition.database_now()).state == State.SUCCEEDED
    assert not RestoreFence.objects.get().is_down


def test_nobody_lifts_the_fence_as_if_it_were_a_limit(clerk: Clerk, backup: Any) -> None:
    lose(backup())
    limit = Limit.objects.get(kind="restored")
    lifted = limits.lift(limit, version=limit.version, actor=ADA, reason="go", token=uuid.uuid4())
    assert lifted.verdict is not Verdict.DONE
    assert Limit.objects.get(pk=limit.pk).lifted_at is None
    assert not transition.lift_limit(limit.pk, version=limit.version, by="person:7", fact=ADA.fact("limit_lifted"))
    with pytest.raises(Exception, match="set by the fence alone"):
        transition.set_limit(row={"kind": "restored"}, fact=ADA.fact("limit_set"))


def test_everything_about_it_is_in_the_audit_log(clerk: Clerk, backup: Any, superuser_connection: Any) -> None:
    operation(provider="clerk", action="keyed")
    restored(backup())
    told = [(e.from_state, e.to_state, e.reason_code) for e in Entry.objects.filter(subject="fence:1").order_by("seq")]
    assert told == [("up", "down", "fence_came_down"), ("down", "up", "restore_released")]
    assert changes_without_audit(superuser_connection) == []
    assert list(verify.verify(verify.registered_heads())) == []


# What is new after the release


def test_a_new_identity_in_the_replay_window_is_looked_up_before_it_is_sent(
    clerk: Clerk, clock: Clock, backup: Any
) -> None:
    earlier = backup()
    perform(1)
    restored(earlier)
    sent = len(clerk.calls)
    again = perform(1)
    assert (again.state, again.reason_code, len(clerk.calls)) == (State.AMBIGUOUS, "restored", sent)
    clerk.sees(found("r-1"))
    clock.advance(minutes=1)
    sweeping.sweep()
    assert (row(again.pk).state, len(clerk.calls)) == (State.SUCCEEDED, sent)


def test_what_the_look_up_proves_absent_is_sent_once(clerk: Clerk, clock: Clock, backup: Any) -> None:
    restored(backup())
    sent = len(clerk.calls)
    pk = perform(1).pk
    clerk.sees(absent())
    for _ in range(6):
        clock.advance(minutes=2)
        sweeping.sweep()
    assert (row(pk).state, len(clerk.calls)) == (State.SUCCEEDED, sent + 1)


@pytest.mark.parametrize(("seconds", "state"), [(-5, State.AMBIGUOUS), (5, State.SUCCEEDED), (900, State.AMBIGUOUS)])
def test_what_is_shown_to_originate_after_the_release_is_sent_and_a_future_moment_shows_nothing(
    clerk: Clerk, clock: Clock, backup: Any, seconds: float, state: State
) -> None:
    restored(backup())
    released = RestoreFence.objects.get().released_at
    assert released is not None
    clock.advance(60)
    assert perform(1, intended_at=released + timedelta(seconds=seconds)).state == state


def test_after_the_replay_window_what_is_new_is_new(clerk: Clerk, clock: Clock, backup: Any) -> None:
    restored(backup())
    assert perform(1).state == State.AMBIGUOUS
    clock.advance(days=30, seconds=1)
    assert perform(2).state == State.SUCCEEDED
    restore.tend()
    assert Limit.objects.get(kind="replay").lifted_at is not None


def test_the_window_of_the_newest_release_counts(clerk: Clerk, clock: Clock, backup: Any) -> None:
    restored(backup())
    clock.advance(days=1)
    restored(backup())
    first, second = Limit.objects.filter(kind="replay").order_by("pk")
    assert (first.lifted_at is None, second.lifted_at is None) == (False, True)


def test_a_consent_to_what_may_have_been_sent_does_not_send_it(clerk: Clerk, backup: Any) -> None:
    """What needs consent waits first; when a person has agreed, the claim finds that it may be a repetition."""
    restored(backup())
    sent = len(clerk.calls)
    asked = ask(workflow_id="w7")
    assert asked.state == State.AWAITING_APPROVAL
    press("approve", the(asked.pk), ROOT)
    sweeping.sweep()
    assert (row(asked.pk).state, len(clerk.calls)) == (State.AMBIGUOUS, sent)


def test_an_unknown_one_to_which_nobody_is_known_to_have_agreed_is_not_repeated(
    clerk: Clerk, clock: Clock, backup: Any
) -> None:
    asked = ask("unlisted")
    restored(backup())
    sent = len(clerk.calls)
    for _ in range(30):
        clock.advance(minutes=2)
        sweeping.sweep()
    assert (row(asked.pk).state, len(clerk.calls)) == (State.AMBIGUOUS, sent)  # though the same key would be safe


def test_one_that_is_proven_absent_is_asked_for_again(clerk: Clerk, clock: Clock, backup: Any) -> None:
    asked = ask()
    restored(backup())
    sent = len(clerk.calls)
    clerk.sees(absent())
    for _ in range(8):
        clock.advance(minutes=2)
        sweeping.sweep()
    assert (row(asked.pk).state, len(clerk.calls)) == (State.AWAITING_APPROVAL, sent)
    newest = Approval.objects.filter(operation_id=asked.pk).order_by("-pk")
    assert [approval.state for approval in newest] == ["waiting", "superseded"]


def test_a_new_intent_after_a_restore_leaves_out_the_versions_of_the_lost_time(
    clerk: Clerk, clock: Clock, backup: Any
) -> None:
    clerk.answers(executor.NotSent("refused"))
    pk = perform(1).pk
    restored(backup())
    clerk.sees(absent())
    old = row(pk)
    for _ in range(8):
        clock.advance(minutes=2)
        reconciler.reconcile(pk)
    old = row(pk)
    transition.transition(old.subject, to="failed_terminal", version=old.version, fact=OLGA.fact("held"))
    newer = intents.next_version(row(pk), actor=OLGA, reason="once more")
    assert newer.intent_version == 1001
    said = why_of("new_intent", pk)
    assert "a newer intent may have been made" in said
    assert newer.key != old.key
    sent = len(clerk.calls)
    sweeping.sweep()
    assert (row(newer.pk).state, len(clerk.calls)) == (
        State.SUCCEEDED,
        sent + 1,
    )  # a person wanted it after the release


@pytest.mark.parametrize("over", ["denied", "failed long ago"])
def test_a_new_intent_of_what_was_not_marked_is_looked_up_under_the_key_that_the_lost_time_used(
    clerk: Clerk, clock: Clock, backup: Any, over: str
) -> None:
    if over == "denied":
        pk = ask().pk
        press("deny", the(pk), ROOT)
    else:
        clerk.answers(Rejected("no", status=422))
        pk = perform(1).pk
        clock.advance(days=31)
        perform(2)
    assert row(pk).state == State.FAILED_TERMINAL
    earlier = backup()
    lost = intents.next_version(row(pk), actor=OLGA, reason="the customer called")
    if over == "denied":
        press("approve", the(lost.pk), ROOT)
    sweeping.sweep()
    key = row(lost.pk).key
    assert clerk.effects.count(key) == 1
    restored(earlier)
    assert "looked up before it is sent" in why_of("new_intent", pk)
    newer = intents.next_version(row(pk), actor=OLGA, reason="the customer called")
    assert (newer.intent_version, newer.key) == (2, key)
    if over == "denied":
        press("approve", the(newer.pk), ROOT)
    clerk.sees(found("r-1", amount=row(pk).request["amount"]))
    for _ in range(4):
        sweeping.sweep()
        clock.advance(minutes=1)
    assert (row(newer.pk).state, row(newer.pk).basis, clerk.effects.count(key)) == (State.SUCCEEDED, "look_up", 1)


def test_a_new_intent_of_what_is_newer_than_the_release_is_sent_at_once(
    clerk: Clerk, clock: Clock, backup: Any
) -> None:
    restored(backup())
    clock.advance(1)
    clerk.answers(Rejected("no", status=422))
    pk = perform(1, intended_at=clock.now()).pk
    assert row(pk).state == State.FAILED_TERMINAL
    newer = intents.next_version(row(pk), actor=OLGA, reason="once more")
    sweeping.sweep()
    assert (row(newer.pk).state, row(newer.pk).basis) == (State.SUCCEEDED, "receipt")


def why_of(action: str, pk: int) -> str:
    """What the button's text says to a person."""
    return next(p.why for p in actions.previews(row(pk), actor=OLGA) if p.action == action)


# Schedules


def at(*parts: int) -> datetime:
    return datetime(2026, 3, *parts, tzinfo=UTC)


def test_no_slot_of_the_lost_time_runs_and_the_range_says_so(
    clerk: Clerk, clock: Clock, backup: Any, timed: Any
) -> None:
    job = timetable.job(at=at(1, 10, 0, 30), clock=clock, missed="latest_only")
    earlier = backup()
    clock.set(at(1, 10, 1, 1))
    schedules.tick()  # this one ran, and is forgotten
    assert Run.objects.count() == 1
    lose(earlier)
    mark_all()
    clock.set(at(1, 10, 30, 40))
    assert release().verdict is Verdict.DONE
    schedules.tick()
    assert timetable.told(job) == [("03-01 10:01", "missed", "restored", 30)]
    assert not Run.objects.exists()
    clock.set(at(1, 10, 31, 1))
    schedules.tick()
    assert [run.workflow_id for run in Run.objects.all()] == ["nightly@2026-03-01T10:31:00+00:00"]


def test_a_slot_that_was_due_at_the_backup_is_not_started_either(
    clerk: Clerk, clock: Clock, backup: Any, timed: Any, monkeypatch: Any
) -> None:
    job = timetable.job(at=at(1, 10, 0, 30), clock=clock)
    clock.set(at(1, 10, 1, 1))
    monkeypatch.setattr(schedules, "_start_job", lambda job: None)  # the beat died in between
    schedules.tick()
    monkeypatch.undo()
    assert Slot.objects.get().state == "due"
    restored(backup())
    schedules.tick()
    assert [one[1:3] for one in timetable.told(job)] == [("missed", "restored")]
    assert not Run.objects.exists()


def test_a_scheduled_run_from_after_the_release_is_shown_to_be_new(
    clerk: Clerk, clock: Clock, backup: Any, timed: Any
) -> None:
    timetable.job(at=at(1, 10, 0, 30), clock=clock)
    restored(backup())
    sent = len(clerk.calls)
    clock.set(at(1, 10, 1, 1))
    schedules.tick()
    timetable.work()
    assert (Run.objects.get().state, len(clerk.calls)) == ("succeeded", sent + 1)


def test_a_release_by_a_clock_that_lags_behind_is_refused_since_slots_of_the_lost_time_would_still_come(
    clerk: Clerk, clock: Clock, backup: Any, timed: Any
) -> None:
    job = timetable.job(at=at(1, 10, 0, 30), clock=clock)
    earlier = backup()
    clock.set(at(1, 10, 1, 1))
    schedules.tick()
    assert Run.objects.count() == 1
    lose(earlier)
    mark_all()
    clock.set(at(1, 10, 0, 40))
    refused = release()
    assert (refused.verdict, RestoreFence.objects.get().is_down) == (Verdict.REFUSED, True)
    assert "2026-03-01 10:01:01 UTC" in refused.message
    assert "2026-03-01 10:00:4" in refused.message
    assert "Set the clock right first" in refused.message
    clock.set(at(1, 10, 1, 20))
    assert release().verdict is Verdict.DONE
    schedules.tick()
    assert timetable.told(job) == [("03-01 10:01", "missed", "restored", 1)]
    assert not Run.objects.exists()


def test_a_job_whose_zone_is_unknown_here_keeps_no_ledger_from_its_release(
    clerk: Clerk, clock: Clock, backup: Any, timed: Any
) -> None:
    lost = timetable.job(at=at(1, 10, 0, 30), clock=clock)
    Job.objects.update(zone="Mars/Base")
    earlier = backup()
    clock.set(at(1, 10, 30, 40))
    restored(earlier)
    assert timetable.told(lost) == [("03-01 10:01", "missed", "restored", 1)]
    assert not Run.objects.exists()


# Alarms


def test_a_failed_step_of_an_ended_run_that_was_applied_after_all_calls_a_person(
    clerk: Clerk, clock: Clock, backup: Any, settings: Any
) -> None:
    failed = operation(state="failed_terminal", provider="clerk", action="keyed", sent=5)
    restored(backup())
    clerk.sees(found("r-1"))
    clock.advance(minutes=1)
    sweeping.sweep()
    now = row(failed.pk)
    assert (now.state, now.escalation_reason) == (State.SUCCEEDED, "applied_after_all")


def test_its_run_stays_failed_and_is_not_taken_up_again(clerk: Clerk, clock: Clock, backup: Any, settings: Any) -> None:
    settings.AFTERCALL_WORKFLOWS = ["tests.scripted_workflows.first"]
    registry.forget()
    clerk.answers(Rejected("no", status=422))
    run = runs.start("damaged_item", tenant="acme", workflow_id="r1", input={"order": "1", "amount": 5}, actor=AGENT)
    assert runs.advance(run.pk).state == "failed"
    restored(backup())
    sent = len(clerk.calls)
    clerk.sees(found("r-1", order="1", amount=0))
    clock.advance(minutes=1)
    sweeping.sweep()
    label = Operation.objects.get(step="label")
    assert (label.state, label.escalation_reason) == (State.SUCCEEDED, "applied_after_all")
    assert (Run.objects.get().state, len(clerk.calls)) == ("failed", sent)


def test_a_press_that_an_unreadable_anchor_stops_changes_nothing_and_is_on_record(clerk: Clerk, backup: Any) -> None:
    lose(backup())
    mark_all()
    fence.anchor.current().path.write_text("{")
    answer = release()
    assert (answer.verdict, RestoreFence.objects.get().is_down) == (Verdict.REFUSED, True)
    assert "cannot be read" in answer.message
    refused = Entry.objects.get(subject="fence:1", event="refused")
    assert (refused.actor, refused.reason_code) == (ADA.id, "anchor_unreadable")


def test_that_it_is_down_is_a_signal_until_the_release(clerk: Clerk, backup: Any) -> None:
    lose(backup())
    watch.look()
    assert Signal.objects.get(kind="restored").cleared_at is None
    mark_all()
    release()
    watch.look()
    assert Signal.objects.get(kind="restored").cleared_at is not None


# The beat


def test_the_beat_marks_and_does_not_write_the_anchor_while_it_is_down(clerk: Clerk, backup: Any) -> None:
    made = operation(provider="clerk", action="keyed")
    lose(backup())
    mark = fence.anchor.current().read().mark
    tasks.beat_once()
    assert row(made.pk).state == State.AMBIGUOUS
    assert fence.anchor.current().read().mark == mark


def test_a_marking_of_an_earlier_coming_down_does_not_count_for_a_later_one(clerk: Clerk, backup: Any) -> None:
    made = operation(provider="clerk", action="keyed")
    down = lose(backup())
    fence.call("SELECT fence_marked(%s, %s, %s, %s)", [down.version - 1, down.operations_end, down.runs_end, 9])
    now = RestoreFence.objects.get()
    assert (now.operations_to, now.marked, now.is_marked) == (0, 0, False)
    mark_all()
    assert row(made.pk).state == State.AMBIGUOUS


def test_nothing_is_pruned_while_it_is_down_whoever_asks(clerk: Clerk, clock: Clock, backup: Any) -> None:
    perform(1)
    earlier = backup()
    clock.advance(days=400)
    lose(earlier)
    mark_all()
    assert retention.tend().told() == "Nothing was pruned: the ledger was restored, and waits for its release."
    assert Operation.objects.count() == 1
    release()
    assert retention.tend().pruned["operation"] == 1


def test_the_beat_writes_the_anchor_forward_when_something_was_decided(clerk: Clerk, clock: Clock) -> None:
    tasks.beat_once()
    perform(1)
    before = fence.anchor.current().read()
    clock.advance(5)
    tasks.beat_once()
    after = fence.anchor.current().read()
    assert after.mark == before.mark + 1
    assert after.position == Entry.objects.order_by("-id").values_list("id", flat=True)[0]
    clock.advance(5)
    tasks.beat_once()
    assert fence.anchor.current().read().mark == after.mark


# An upgrade


def test_a_ledger_from_before_there_were_anchors_waits_for_a_person_and_changes_nothing(
    clerk: Clerk, superuser_connection: Any
) -> None:
    made = operation(provider="clerk", action="keyed")
    superuser_connection.execute("DELETE FROM reconciliation_restorefence")
    database.weigh_anchor()
    fence.forget()
    assert perform(1).state == State.AMBIGUOUS
    tasks.beat_once()
    assert (RestoreFence.objects.get().reason, row(made.pk).state, clerk.calls) == ("unanchored", State.READY, [])
    assert release().verdict is Verdict.REFUSED
    version = RestoreFence.objects.get().version
    answer = restore.adopt(actor=ADA, version=version, reason="upgraded", token=uuid.uuid4())
    assert answer.verdict is Verdict.DONE
    assert perform(2).state == State.SUCCEEDED
    assert row(made.pk).state == State.READY
    assert not Limit.objects.filter(lifted_at__isnull=True).exists()


def test_a_person_may_say_that_an_unanchored_ledger_was_restored(clerk: Clerk, superuser_connection: Any) -> None:
    made = operation(provider="clerk", action="keyed")
    superuser_connection.execute("DELETE FROM reconciliation_restorefence")
    database.weigh_anchor()
    fence.forget()
    fence.look()
    version = RestoreFence.objects.get().version
    assert restore.begin(actor=OTTO, version=version, reason="it was", token=uuid.uuid4()).verdict is Verdict.REFUSED
    assert restore.begin(actor=ADA, version=version, reason="it was", token=uuid.uuid4()).verdict is Verdict.DONE
    mark_all()
    assert row(made.pk).state == State.AMBIGUOUS
    version = RestoreFence.objects.get().version
    assert restore.adopt(actor=ADA, version=version, reason="no", token=uuid.uuid4()).verdict is Verdict.REFUSED
    assert release().verdict is Verdict.DONE


def test_what_is_behind_its_anchor_is_never_adopted(clerk: Clerk, backup: Any) -> None:
    lose(backup())
    version = RestoreFence.objects.get().version
    answer = restore.adopt(actor=ADA, version=version, reason="it is fine", token=uuid.uuid4())
    assert (answer.verdict, "lost something" in answer.message) == (Verdict.REFUSED, True)


def test_a_spooled_report_of_the_lost_time_meets_no_other_operation(
    clerk: Clerk, backup: Any, settings: Any, tmp_path: Any
) -> None:
    settings.AFTERCALL_SPOOL = tmp_path
    earlier = backup()
    lost = perform(1)
    spool.keep(row(lost.pk).subject, transition.Observed(kind="late_report", data={"status": "applied"}))
    restored(earlier)
    new = perform(2, intended_at=transition.database_now())
    spool.bring_in()
    assert kinds(new.pk) == ["attempt_started", "receipt"]
    assert list(spool.folder().glob("*.unreadable"))


# Local effects


def test_a_local_effect_was_lost_with_its_ledger_so_it_is_done_again_after_the_release(
    book: Shelf, clerk: Clerk, clock: Clock, backup: Any
) -> None:
    earlier = backup()
    lost = executor.perform(entry(), actor=AGENT)
    assert (lost.state, book.rows()) == (State.SUCCEEDED, 1)
    restored(earlier)
    assert book.rows() == 0
    again = executor.perform(entry(), actor=AGENT)
    assert again.state == State.AMBIGUOUS
    for _ in range(4):
        clock.advance(minutes=1)
        sweeping.sweep()
    assert (row(again.pk).state, book.rows()) == (State.SUCCEEDED, 1)


def test_what_nothing_can_find_out_calls_a_person_at_once(clerk: Clerk, backup: Any) -> None:
    restored(backup())
    outcome = executor.perform(order("none", provider="blind"), actor=AGENT)
    assert row(outcome.pk).escalation_reason == "nothing_can_find_out"
