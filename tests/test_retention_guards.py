"""Each reason for which retention leaves an operation alone, by itself: what only one guard keeps."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from reconciliation import executor, retention, retrying, transition
from reconciliation.models import Operation
from reconciliation.pressing import Verdict
from reconciliation.providers.base import OutcomeUnknown
from reconciliation.states import State
from tests import cast
from tests.database import Clock
from tests.scripted import AGENT, KEYED, OLGA, Clerk, cannot_tell, order, row, spec
from tests.test_approvals import ANN, do, the, unknown

KEPT = OLGA.fact("kept")


@pytest.fixture
def settled(ledger_db: Any, clock: Clock) -> Callable[..., Operation]:
    """An operation that was settled more than a year ago, which nothing but what is asked for keeps."""

    def made(state: str = "succeeded", **facts: Any) -> Operation:
        operation = cast.operation(state=state, **facts)
        clock.advance(days=400)
        return operation

    return made


def pruned(operation: Operation) -> str:
    return transition.prune(operation.subject, keep=0, fact=KEPT)


def shredded(operation: Operation) -> str:
    return transition.shred(operation.subject, after=0, fact=KEPT)


def column(cleaner: Any, operation: Operation, change: str) -> None:
    """Puts a row as it could stand, where the way there is long."""
    cleaner.execute(f"UPDATE reconciliation_operation SET {change} WHERE id = %s", [operation.pk])


# Pruning


def test_nothing_but_its_age_speaks_for_an_operation_that_goes(settled: Any) -> None:
    assert pruned(settled()) == "pruned"


def test_what_may_be_sent_again_under_its_key_at_the_provider_stays(settled: Any, cleaner: Any) -> None:
    operation = settled()
    column(cleaner, operation, "same_key_until = aftercall_now() + interval '1 day'")
    assert pruned(operation) == "key_remembered"


def test_what_is_to_be_looked_at_once_more_stays(settled: Any, cleaner: Any) -> None:
    operation = settled("failed_terminal")
    column(cleaner, operation, "due_at = aftercall_now()")
    assert pruned(operation) == "due"


def test_what_a_person_is_asked_about_stays(clerk: Clerk, clock: Clock, cleaner: Any) -> None:
    case = unknown(clerk)
    do(case, "send_again", ANN)
    clock.advance(days=400)
    column(cleaner, case, "state = 'succeeded', unknown_attempts = '{}', due_at = NULL, escalated_at = NULL,"
           " escalate_at = NULL, basis = 'look_up', settled_at = aftercall_now() - interval '300 days'")  # fmt: skip
    assert the(case.pk, "send_again").state == "waiting"
    assert pruned(row(case.pk)) == "approval"


def test_what_somebody_holds_at_this_moment_is_left_for_the_next_round(
    settled: Any, superuser_connection: psycopg.Connection[Any]
) -> None:
    operation = settled()
    with superuser_connection.transaction():
        superuser_connection.execute(
            "SELECT 1 FROM reconciliation_operation WHERE id = %s FOR NO KEY UPDATE", [operation.pk]
        )
        assert (pruned(operation), shredded(operation)) == ("busy", "busy")
    assert pruned(operation) == "pruned"


def test_a_step_whose_run_somebody_holds_at_this_moment_is_left_for_the_next_round(
    settled: Any, superuser_connection: psycopg.Connection[Any]
) -> None:
    run = cast.run()
    step = settled(run=run)
    cast.run_stands(run, "succeeded")
    with superuser_connection.transaction():
        superuser_connection.execute("SELECT 1 FROM reconciliation_run WHERE id = %s FOR NO KEY UPDATE", [run.pk])
        assert pruned(step) == "busy"
    assert pruned(step) == "pruned"


# What other guards count


def test_a_ceiling_does_not_forget_what_was_given_back_long_ago(
    clerk: Clerk, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    capped = spec(**KEYED, money=("amount", "currency"), ceiling="charged")
    monkeypatch.setattr(clerk, "actions", {"capped": capped})

    def refund(workflow_id: str) -> executor.Outcome:
        request = {"order": "1002", "amount": 6000, "currency": "USD", "charged": 10_000}
        return executor.perform(order("capped", workflow_id=workflow_id, request=request), actor=AGENT)

    january = refund("january")
    clock.advance(days=200)
    assert retention.tend().pruned.total() == 0
    august = refund("august")
    assert (august.state, len(clerk.effects)) == (State.READY, 1)
    assert pruned(row(january.pk)) == "ceiling"


def test_what_an_older_one_would_undo_stays_while_that_is_open(clerk: Clerk, clock: Clock) -> None:
    clerk.answers(OutcomeUnknown("no answer"))
    clerk.sees(cannot_tell())
    older = executor.perform(order("natural", workflow_id="older"), actor=AGENT).pk
    newer = executor.perform(order("natural", workflow_id="newer"), actor=AGENT).pk
    clock.advance(days=210)
    assert retention.tend().kept["older_open"] == 1
    with pytest.raises(transition.NewerSent):
        retrying.retry(older, actor=AGENT)
    assert len(clerk.calls) == 2
    assert do(row(older), "terminate", ANN).verdict is Verdict.DONE
    assert retention.tend().pruned["operation"] == 1
    assert not Operation.objects.filter(pk=newer).exists()


@pytest.mark.parametrize("duty", ["pruned", "shredded"])
def test_what_stays_unknown_for_good_keeps_no_place_in_a_round_from_others(
    clerk: Clerk, clock: Clock, monkeypatch: pytest.MonkeyPatch, duty: str
) -> None:
    monkeypatch.setattr(clerk, "actions", {"keyed": spec(**KEYED, shred_after=timedelta(days=2))})
    done, last = executor.perform(order(workflow_id="done"), actor=AGENT).pk, []
    for name in ("stopped", "stopped too"):
        clerk.answers(OutcomeUnknown("no answer"))
        last.append(executor.perform(order(workflow_id=name, business_object=name), actor=AGENT).pk)
        assert do(row(last[-1]), "terminate", ANN).verdict is Verdict.DONE
    executor.perform(order(workflow_id="done too", business_object="2"), actor=AGENT)
    clock.advance(days=3 if duty == "shredded" else 400)
    for _ in range(4):
        retention.tend(limit=1)
    if duty == "pruned":
        assert list(Operation.objects.values_list("pk", flat=True)) == last
    else:
        assert row(done).shredded_at is not None
        assert Operation.objects.filter(shredded_at__isnull=True).count() == 2


# Shredding


def test_what_a_person_must_look_at_is_not_shredded(settled: Any, cleaner: Any) -> None:
    operation = settled()
    column(cleaner, operation, "escalated_at = aftercall_now(), escalation_reason = 'applied_after_all'")
    assert shredded(operation) == "escalated"


def test_what_is_to_be_looked_at_once_more_is_not_shredded(settled: Any, cleaner: Any) -> None:
    operation = settled()
    column(cleaner, operation, "due_at = aftercall_now()")
    assert shredded(operation) == "due"
    column(cleaner, operation, "due_at = NULL")
    assert shredded(operation) == "shredded"


def test_what_was_stopped_while_nobody_knew_is_not_shredded(settled: Any) -> None:
    stopped = cast._move(settled("ambiguous"), "terminated", {}, "terminated")
    assert row(stopped.pk).unknown_attempts
    assert shredded(stopped) == "unknown"


def test_a_step_from_whose_result_later_ones_are_built_is_not_shredded(settled: Any) -> None:
    run = cast.run()
    step = settled(run=run)
    assert shredded(step) == "run"
    cast.run_stands(run, "succeeded")
    assert shredded(step) == "shredded"
