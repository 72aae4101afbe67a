"""What is settled goes after its time and is still known; what is open, unknown or referred to stays."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import connections

from audit.models import Entry
from audit.verify import registered_heads, verify
from reconciliation import executor, reconciler, registry, retention, retrying, tasks, transition
from reconciliation.executor import Disposition, TooOld
from reconciliation.models import JournalEntry, Operation, Run, Signal, Tick, Tombstone
from reconciliation.providers.base import ActionSpec, OutcomeUnknown, Rejected, Unavailable
from reconciliation.retention import LEAST
from reconciliation.states import Kind, State, Subject
from reconciliation.transition import Observed
from tests import cast
from tests.database import Clock
from tests.scripted import AGENT, KEYED, OLGA, Clerk, found, order, row, spec
from tests.test_same_identity import Crowd

MONTH = {"replay_window": timedelta(days=30), "dispute_window": timedelta(days=30)}


@pytest.fixture
def monthly(clerk: Clerk, clock: Clock) -> Any:
    """The clerk, whose operations stay for thirty days."""
    before = dict(clerk.actions)
    clerk.actions = {name: spec(**KEYED, **MONTH) for name in ("keyed", "shredded")}
    clerk.actions["shredded"] = spec(**KEYED, **MONTH, shred_after=timedelta(days=2))
    yield clerk
    clerk.actions = before


def perform(**parts: Any) -> executor.Outcome:
    return executor.perform(order(**parts), actor=AGENT)


def verified() -> list[Any]:
    return list(verify(registered_heads()))


# How long


def test_an_action_keeps_for_the_longest_of_its_windows() -> None:
    assert ActionSpec().keep == timedelta(days=180)
    short = {"replay_window": timedelta(1), "dispute_window": timedelta(2), "message_lifetime": timedelta(3)}
    assert ActionSpec(**short).keep == timedelta(days=3)
    assert ActionSpec(**short, key_retention=timedelta(days=9)).keep == timedelta(days=9)


def test_what_is_settled_for_long_enough_goes_with_its_journal_and_leaves_a_tombstone(
    monthly: Clerk, clock: Clock
) -> None:
    done = row(perform().pk)
    clock.advance(days=29)
    assert retention.tend().pruned.total() == 0
    clock.advance(days=2)
    assert retention.tend().pruned["operation"] == 1
    assert not Operation.objects.exists()
    assert not JournalEntry.objects.exists()
    stone = Tombstone.objects.get()
    assert (stone.subject_id, stone.state, stone.settled_at, bytes(stone.lineage), stone.intent_version) == (
        done.pk, "succeeded", done.settled_at, bytes(done.lineage), 1,
    )  # fmt: skip
    assert len(stone.key_hash) == 32
    assert done.key not in str(stone.__dict__)


def test_the_audit_log_keeps_everything_and_ends_with_the_pruning(monthly: Clerk, clock: Clock) -> None:
    done = row(perform().pk)
    clock.advance(days=31)
    retention.tend()
    entries = list(Entry.objects.filter(subject=f"operation:{done.pk}").order_by("seq"))
    assert [entry.event for entry in entries] == ["transition", "transition", "pruned"]
    assert (entries[-1].actor, entries[-1].to_state, entries[-1].version) == ("system:retention", "pruned", 3)
    assert verified() == []


def test_a_missing_end_of_a_pruned_subject_is_found(
    monthly: Clerk, clock: Clock, superuser_connection: psycopg.Connection[Any]
) -> None:
    pk = perform().pk
    clock.advance(days=31)
    retention.tend()
    superuser_connection.execute("SET session_replication_role = replica")
    superuser_connection.execute("DELETE FROM audit_entry WHERE event = 'pruned'")
    assert [finding.subject for finding in verified()] == [f"operation:{pk}"]
    superuser_connection.execute("DELETE FROM audit_opening")
    superuser_connection.execute("DELETE FROM audit_entry WHERE subject = %s", [f"operation:{pk}"])
    assert [finding.subject for finding in verified()] == [f"operation:{pk}"]


# What stays


@pytest.mark.case("J4")
@pytest.mark.parametrize("state", ["ready", "awaiting_approval", "pending", "failed_retryable", "ambiguous"])
def test_open_work_is_never_pruned(ledger_db: Any, clock: Clock, state: str) -> None:
    made = cast.operation(state=state)
    clock.advance(days=4000)
    retention.tend()
    assert row(made.pk).state == state
    assert transition.prune(made.subject, keep=0, fact=OLGA.fact("pruned")) == "open"


def test_what_is_escalated_or_stopped_without_being_known_stays(ledger_db: Any, clock: Clock) -> None:
    now = transition.database_now()
    marked = cast.operation(state="succeeded", escalated_at=now, escalation_reason="applied_after_all")
    stopped = cast.operation(state="ambiguous")
    cast._move(stopped, "terminated", {}, "terminated")
    clock.advance(days=4000)
    retention.tend()
    assert {row(marked.pk).state, row(stopped.pk).state} == {"succeeded", "terminated"}
    assert transition.prune(marked.subject, keep=0, fact=OLGA.fact("pruned")) == "escalated"
    assert transition.prune(stopped.subject, keep=0, fact=OLGA.fact("pruned")) == "unknown"


@pytest.mark.case("J4")
def test_steps_of_an_unfinished_run_stay_and_go_with_it_when_it_has_ended(
    till: Any, ledger_db: Any, clock: Clock
) -> None:
    run = cast.run()
    step = cast.operation(run=run, state="succeeded")
    clock.advance(days=400)
    retention.tend()
    assert transition.prune(step.subject, keep=0, fact=OLGA.fact("pruned")) == "run"
    cast.run_stands(Run.objects.get(pk=run.pk), "succeeded")
    clock.advance(days=200)
    tally = retention.tend()
    assert (tally.pruned["operation"], tally.pruned["run"]) == (1, 1)
    assert not Run.objects.exists()
    assert verified() == []


def test_what_an_undo_refers_to_stays_as_long_as_the_undo(till: Any, ledger_db: Any, clock: Clock) -> None:
    done = cast.operation(state="succeeded")
    undo = _undo_of(done)
    clock.advance(days=400)
    retention.tend()
    assert transition.prune(done.subject, keep=0, fact=OLGA.fact("pruned")) == "undo"
    cast._move(undo, "terminated", {}, "terminated")
    clock.advance(days=400)
    assert retention.tend().pruned["operation"] == 2  # the undo first, then what it undid


def _undo_of(done: Operation) -> Operation:
    names = ("tenant", "workflow_type", "workflow_id", "business_object", "provider", "account", "action")
    facts = {name: getattr(done, name) for name in (*names, "amount_minor", "currency", "fingerprint", "request_shown")}
    facts |= {"step": "undo:refund", "intent_version": 1, "lineage": "\\x" + "ab" * 32, "key": "ac1-undo"}
    moved = transition.open_operation(
        row={**facts, "undo_of_id": done.pk, "state": "ready"}, after={"due_at": 0}, observed=[],
        fact=OLGA.fact("recorded"),
    )  # fmt: skip
    assert moved is not None
    return row(moved.pk)


def test_a_process_without_the_handler_prunes_and_shreds_nothing_of_it_and_says_so(
    monthly: Clerk, clock: Clock, settings: Any
) -> None:
    """Its action may promise to keep for longer than anything that could be taken for it."""
    monthly.actions["keyed"] = spec(**KEYED, dispute_window=timedelta(days=365))
    pk = perform().pk
    clock.advance(days=200)
    settings.AFTERCALL_PROVIDERS = ["tests.scripted.blind"]
    registry.forget()
    tally = retention.tend()
    assert (tally.pruned.total(), tally.kept["no handler"], row(pk).shredded_at) == (0, 1, None)
    assert "kept for now: 1 no handler" in tally.told()
    clock.advance(days=200)
    settings.AFTERCALL_PROVIDERS = ["tests.scripted.clerk_"]
    registry.forget()
    assert "no handler" not in (told := retention.tend()).told()
    assert told.pruned["operation"] == 1


def test_nothing_younger_than_a_day_goes_whatever_is_asked(monthly: Clerk) -> None:
    done = row(perform().pk)
    assert transition.prune(done.subject, keep=0, fact=OLGA.fact("pruned")) == "young"
    assert timedelta(days=1) == LEAST


# What comes again


@pytest.mark.case("J4")
def test_a_pruned_identity_is_answered_from_its_tombstone_and_not_executed(monthly: Clerk, clock: Clock) -> None:
    first = perform()
    clock.advance(days=40)
    retention.tend()
    again = perform()
    assert (again.state, again.disposition, again.replayed, again.pk) == (
        State.SUCCEEDED, Disposition.REPLAY, True, first.pk,
    )  # fmt: skip
    assert (again.reason_code, again.result, again.outcome) == ("pruned", {}, "succeeded")
    assert len(monthly.effects) == 1


@pytest.mark.case("J4")
def test_pruning_the_older_version_leaves_the_newer_one_in_force(monthly: Clerk, clock: Clock) -> None:
    monthly.answers(Rejected("no", status=422))
    old = perform()
    clock.advance(days=40)
    new = perform(intent_version=2)
    clock.advance(hours=1)
    assert retention.tend().pruned["operation"] == 1
    assert [operation.pk for operation in Operation.objects.all()] == [new.pk]
    assert (perform(intent_version=2).pk, perform(intent_version=2).state) == (new.pk, State.SUCCEEDED)
    again = perform()
    assert (again.pk, again.state) == (old.pk, State.FAILED_TERMINAL)
    assert len(monthly.effects) == 1


def test_another_request_under_a_pruned_identity_is_refused(monthly: Clerk, clock: Clock) -> None:
    perform()
    clock.advance(days=40)
    retention.tend()
    with pytest.raises(executor.FingerprintMismatch):
        perform(request={"order": "1002", "amount": 6000, "currency": "USD"})
    assert len(monthly.effects) == 1


def test_an_older_version_than_a_pruned_one_is_void(monthly: Clerk, clock: Clock) -> None:
    perform(intent_version=3)
    clock.advance(days=40)
    retention.tend()
    with pytest.raises(transition.NewerVersionExists):
        perform(intent_version=2)
    assert perform(intent_version=4).state is State.SUCCEEDED


@pytest.mark.case("J4")
def test_an_intent_older_than_anything_that_is_known_is_refused_and_a_new_one_is_not(
    monthly: Clerk, clock: Clock, settings: Any
) -> None:
    intended = clock.now()
    intent = order()
    old = replace(intent, intended_at=intended)
    assert executor.perform(old, actor=AGENT).state is State.SUCCEEDED
    clock.advance(days=31)
    retention.tend()
    assert executor.perform(old, actor=AGENT).reason_code == "pruned"
    settings.AFTERCALL_TOMBSTONES = 1
    clock.advance(days=31)
    retention.tend()
    assert not Tombstone.objects.exists()
    with pytest.raises(TooOld, match="intended_at"):
        executor.perform(old, actor=AGENT)
    with pytest.raises(TooOld):
        executor.submit(old, actor=AGENT)
    refused = Entry.objects.filter(subject="operation:new", event="refused")
    assert list(refused.values_list("tenant", "actor", "reason_code")) == [("acme", AGENT.id, "too_old")] * 2
    assert len(monthly.effects) == 1
    newer = replace(order(intent_version=2), intended_at=clock.now())
    assert executor.perform(newer, actor=AGENT).state is State.SUCCEEDED


def test_a_run_that_was_pruned_is_not_started_again(ledger_db: Any, clock: Clock, settings: Any) -> None:
    settings.AFTERCALL_WORKFLOWS = ["tests.three_steps.THREE_STEPS"]
    run = cast.run()
    cast.run_stands(run, "succeeded")
    clock.advance(days=200)
    assert retention.tend().pruned["run"] == 1
    same = {"tenant": run.tenant, "workflow_type": run.workflow_type, "workflow_id": run.workflow_id}
    fresh = {"workflow_version": 1, "business_object": "1002", "input_fingerprint": "f1", "state": "pending"}
    with pytest.raises(transition.Pruned):
        transition.open_run(row={**same, **fresh}, after={"due_at": 0}, fact=OLGA.fact("started"))
    assert not Run.objects.exists()


# At the same time


@pytest.mark.case("J4")
def test_two_prunings_at_once_do_no_harm(monthly: Clerk, clock: Clock) -> None:
    for number in range(12):
        perform(workflow_id=f"w{number}")
    clock.advance(days=31)
    crowd = Crowd(4)
    tallies = crowd.all_at_once(retention.tend)
    crowd.leave()
    assert sum(tally.pruned["operation"] for tally in tallies) == 12
    assert Tombstone.objects.count() == 12
    assert verified() == []


@pytest.mark.case("J4")
def test_callers_that_come_again_while_it_is_pruned_make_no_second_effect(monthly: Clerk, clock: Clock) -> None:
    for number in range(20):
        perform(workflow_id=f"w{number}")
    clock.advance(days=31)
    crowd = Crowd(6)
    again = [lambda: [perform(workflow_id=f"w{n}").state for n in range(20)]] * 5
    answers = crowd.all_at_once(retention.tend, *again)
    crowd.leave()
    assert all(answer == [State.SUCCEEDED] * 20 for answer in answers[1:]), answers
    assert len(monthly.effects) == 20
    assert Tombstone.objects.count() == 20


def _tend_apart() -> int:
    try:
        return retention.tend().pruned["operation"]
    finally:
        connections.close_all()


@pytest.mark.case("J4")
def test_a_pruning_waits_for_a_claim_of_the_same_intent_that_is_under_way(
    monthly: Clerk, clock: Clock, superuser_connection: psycopg.Connection[Any]
) -> None:
    """Else that claim could miss the tombstone first and the row afterwards, and do it again."""
    done = row(perform().pk)
    clock.advance(days=31)
    waits = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with ThreadPoolExecutor(1) as pool:
        with superuser_connection.transaction():
            superuser_connection.execute("SELECT ledger_lock_lineage(%s)", [bytes(done.lineage)])  # as a claim does
            pruning = pool.submit(_tend_apart)
            while not superuser_connection.execute(waits).fetchone():
                assert not pruning.done(), "it did not wait"
        assert pruning.result(timeout=60) == 1
    assert not Operation.objects.exists()


@pytest.mark.case("J4")
def test_what_a_look_up_saw_while_the_row_was_pruned_is_kept_and_shown(monthly: Clerk, clock: Clock) -> None:
    monthly.answers(Rejected("no", status=422))
    pk = perform().pk
    clock.advance(days=31)

    def pruned_meanwhile(*_: Any) -> Any:
        retention.tend()
        return found("r-9")

    clerk_look_up, monthly.look_up = monthly.look_up, pruned_meanwhile  # type: ignore[method-assign]
    with pytest.raises((transition.Gone, Operation.DoesNotExist)):
        reconciler.reconcile(pk, actor=OLGA)
    monthly.look_up = clerk_look_up  # type: ignore[method-assign]
    kept = JournalEntry.objects.get(kind="finding")
    assert json.loads(kept.data)["verdict"] == "found"
    assert Signal.objects.get().subject == f"operation:{pk}"


def test_a_late_report_about_what_was_pruned_is_kept_and_shown(monthly: Clerk, clock: Clock) -> None:
    pk = perform().pk
    clock.advance(days=31)
    retention.tend()
    transition.note(Subject(Kind.OPERATION, pk), [Observed(kind="late_report", data={"status": "applied"})])
    assert Signal.objects.get(kind="heard_after_pruning").subject == f"operation:{pk}"


# Nobody else


def test_the_journal_still_refuses_the_application_and_the_owner(monthly: Clerk) -> None:
    perform()
    for alias in ("default", "owner"):
        for statement in (
            "DELETE FROM reconciliation_journalentry",
            "UPDATE reconciliation_journalentry SET kind = 'x'",
        ):
            with pytest.raises(Exception, match=r"append-only|permission denied"):
                connections[alias].cursor().execute(statement)
            connections[alias].close()
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT set_config('aftercall.pruning', 'operation:1', false)")
        with pytest.raises(Exception, match="permission denied"):
            cursor.execute("DELETE FROM reconciliation_journalentry")
    connections["default"].close()


# Shredding


def test_what_is_sealed_is_shredded_before_the_row_goes(monthly: Clerk, clock: Clock) -> None:
    secret = {"order": "1002", "amount": 4200, "currency": "USD", "card": "4242-CANARY"}
    pk = perform(action="shredded", request=secret).pk
    kept = perform(workflow_id="other", request=secret).pk
    clock.advance(days=3)
    assert retention.tend().shredded == 1
    shredded = row(pk)
    assert (shredded.request_sealed, shredded.result_sealed, shredded.shredded_at is not None) == ("", "", True)
    assert shredded.request == {"order": "1002", "amount": 4200, "currency": "USD"}
    assert not JournalEntry.objects.filter(operation_id=pk).exclude(sealed="").exists()
    assert row(kept).request["card"] == "4242-CANARY"
    assert Entry.objects.filter(subject=f"operation:{pk}").order_by("-seq")[0].event == "shredded"
    assert verified() == []


def test_a_shredded_request_is_not_sent_again_and_says_why(monthly: Clerk, clock: Clock, cleaner: Any) -> None:
    monthly.answers(Unavailable("down", status=503))
    pk = perform(action="shredded").pk
    cleaner.execute("UPDATE reconciliation_operation SET shredded_at = now() WHERE id = %s", [pk])
    assert "shredded" in retrying.why_not_retryable(row(pk))
    with pytest.raises(transition.Shredded, match="shredded"):
        executor.claim_again(row(pk), actor=OLGA)
    assert len(monthly.calls) == 1


def test_what_is_open_is_not_shredded(monthly: Clerk, clock: Clock) -> None:
    monthly.answers(OutcomeUnknown("?"))
    pk = perform(action="shredded").pk
    clock.advance(days=300)
    assert retention.tend().shredded == 0
    assert transition.shred(row(pk).subject, after=0, fact=OLGA.fact("shredded")) == "open"


# Who calls it


def test_a_dry_run_counts_and_touches_nothing(monthly: Clerk, clock: Clock, capsys: Any) -> None:
    perform()
    clock.advance(days=31)
    call_command("retention", "--dry-run")
    assert "Would do: 1 operations and 0 runs pruned" in capsys.readouterr().out
    assert Operation.objects.count() == 1
    call_command("retention")
    assert Operation.objects.count() == 0


def test_what_does_not_go_in_one_round_goes_in_the_next_without_waiting_for_an_hour(
    monthly: Clerk, clock: Clock, monkeypatch: Any
) -> None:
    for number in range(5):
        perform(workflow_id=f"w{number}")
    clock.advance(days=31)
    asked: list[str] = []
    monkeypatch.setattr(tasks, "async_task", lambda name, **_: asked.append(name))
    monkeypatch.setattr(retention, "tend", partial(retention.tend, limit=2))
    left = []
    for _ in range(3):
        tasks.retain()
        left.append((Operation.objects.count(), len(asked)))
    assert left == [(3, 1), (1, 2), (0, 2)]
    assert set(asked) == {"reconciliation.tasks.retain"}


def test_the_beat_asks_for_it_once_an_hour(monthly: Clerk, clock: Clock, monkeypatch: Any) -> None:
    asked: list[str] = []
    monkeypatch.setattr(tasks, "async_task", lambda name, **_: asked.append(name))
    for _ in range(3):
        tasks.beat_once()
    clock.advance(hours=1, minutes=1)
    tasks.beat_once()
    assert asked.count("reconciliation.tasks.retain") == 1
    assert "pruned" in tasks.retain()
    assert Tick.objects.filter(name="retention").exists()
