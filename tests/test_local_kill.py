"""A real worker is killed, frozen or cut off at every boundary of a local effect: one row in the end, never unknown."""

from __future__ import annotations

from typing import Any

import pytest

from audit.models import Entry
from reconciliation import executor, workers
from reconciliation.actors import Actor
from reconciliation.models import LocalEffect, Operation
from tests.book import committed
from tests.nursery import Desk, Worker
from tests.processes import wait_until
from tests.test_same_identity import Crowd
from tests.worker_driver import intent_of

pytestmark = pytest.mark.processes

INTENT: dict[str, Any] = {
    "identity": {
        "tenant": "acme", "workflow_type": "c", "workflow_id": "w1", "step": "enter", "business_object": "order-1002",
    },
    "provider": "book", "action": "enter", "request": {"order": "1002", "amount": 4200, "currency": "USD"},
}  # fmt: skip
INSIDE = ["claimed", "opened", "in_effect", "unfenced", "fenced", "written"]


def stopped_at(desk: Desk, boundary: str) -> Worker:
    worker = desk.worker(do="perform", intent=INTENT, stop_at=[boundary])
    worker.reached(boundary)
    return worker


def submit_again() -> executor.Outcome:
    return executor.perform(intent_of(INTENT), actor=Actor(id=workers.me(), kind="worker"))


def done_once(desk: Desk) -> Operation:
    desk.come_to_rest()
    desk.check()
    operation = desk.operation()
    assert (operation.state, desk.effects(operation), committed(desk.clock.connection)) == ("succeeded", 1, 1)
    assert submit_again().disposition == "replay"
    assert committed(desk.clock.connection) == 1
    assert not Entry.objects.filter(to_state="ambiguous").exists(), "it is never unknown"
    assert LocalEffect.objects.count() == 0
    return operation


def test_killed_before_the_claim_nothing_is_known_and_nothing_was_done(desk: Desk) -> None:
    stopped_at(desk, "before_claim").kill()
    assert (Operation.objects.count(), committed(desk.clock.connection)) == (0, 0)
    submit_again()
    assert done_once(desk).attempts == 1


@pytest.mark.parametrize("boundary", INSIDE)
def test_killed_before_the_commit_nothing_was_done_and_it_is_done_again(desk: Desk, boundary: str) -> None:
    stopped_at(desk, boundary).kill()
    assert (desk.operation().state, committed(desk.clock.connection)) == ("pending", 0)
    assert done_once(desk).attempts == 2


def test_killed_after_the_commit_it_is_done_and_settled(desk: Desk) -> None:
    stopped_at(desk, "committed").kill()
    assert (desk.operation().state, committed(desk.clock.connection)) == ("succeeded", 1)
    operation = done_once(desk)
    assert (operation.attempts, operation.version) == (1, 2)


@pytest.mark.parametrize("boundary", INSIDE)
def test_a_worker_that_froze_while_another_did_it_changes_nothing_when_it_wakes(desk: Desk, boundary: str) -> None:
    """The lease is 40 s by the ledger's clock; the transaction may go on, but not be committed."""
    frozen = stopped_at(desk, boundary)
    frozen.freeze()
    if boundary in ("fenced", "written"):  # it holds the row: the others wait for it, or for the server to end it
        _cut_off(desk)
    desk.come_to_rest()
    assert committed(desk.clock.connection) == 1
    frozen.thaw()
    frozen.go_on(boundary)
    assert frozen.ended()["answer"]["state"] == "succeeded", "it is told what another one did"
    assert Entry.objects.filter(event="refused", reason_code="stale_worker_refused").count() == 1
    assert done_once(desk).attempts == 2


def _cut_off(desk: Desk) -> None:
    """What the server does by itself when the lease's time is over."""
    query = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = %s"
    )
    name = desk.clock.connection.info.dbname
    wait_until(lambda: desk.clock.connection.execute(query, [name]).fetchone())
    locks = "SELECT 1 FROM pg_locks l JOIN pg_class c ON c.oid = l.relation WHERE c.relname = 'test_book'"
    wait_until(lambda: desk.clock.connection.execute(locks).fetchone() is None)


@pytest.mark.parametrize("boundary", INSIDE[1:])
def test_a_connection_that_is_cut_before_the_commit_is_a_rollback(desk: Desk, boundary: str) -> None:
    worker = stopped_at(desk, boundary)
    _cut_off(desk)
    worker.go_on(boundary)
    assert worker.ended()["answer"]["state"] == "failed_retryable"
    assert committed(desk.clock.connection) == 0
    assert done_once(desk).attempts == 2


def test_two_deaths_in_a_row_are_two_attempts_and_one_row(desk: Desk) -> None:
    stopped_at(desk, "in_effect").kill()
    desk.clock.set(desk.operation().due_at)
    desk.sweep()
    desk.clock.set(desk.operation().due_at)
    worker = desk.worker(do="sweep", stop_at=["written"])
    worker.reached("written")
    worker.kill()
    assert done_once(desk).attempts == 3


def test_twenty_at_once_write_one_row(desk: Desk) -> None:
    workers.me()
    crowd = Crowd(20)
    answers = crowd.all_at_once(lambda: str(submit_again().state))
    crowd.leave()
    assert set(answers) <= {"succeeded", "pending"}
    assert done_once(desk).attempts == 1
