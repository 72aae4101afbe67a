"""Many callers, one intent: one effect and one answer; and another request under the same name is refused."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connections

from audit.models import Entry
from reconciliation import executor, reconciler, retrying, transition, workers
from reconciliation.actors import Actor
from reconciliation.executor import FingerprintMismatch
from reconciliation.models import JournalEntry, Operation
from reconciliation.states import State
from reconciliation.transition import StaleVersion, TransitionRefused
from tests.nursery import Desk
from tests.test_kill import REQUESTS, intent
from tests.worker_driver import final_answer, intent_of

ALL_ROUNDS = bool(os.environ.get("AFTERCALL_TEST_ALL_ROUNDS"))  # the numbers in full: some minutes
ME = Actor(id="agent:1", kind="agent")
OLGA = Actor(id="person:1", kind="person", name="Olga")
OMAR = Actor(id="person:2", kind="person", name="Omar")


def perform(job: dict[str, Any]) -> executor.Outcome:
    return executor.perform(intent_of(job), actor=ME)


class Crowd:
    """Callers that all start at once, each on a connection of its own."""

    def __init__(self, callers: int) -> None:
        self.callers, self.barrier = callers, threading.Barrier(callers)
        self._pool = ThreadPoolExecutor(callers)

    def all_at_once(self, *duties: Any) -> list[Any]:
        """What each duty returned or raised; the same duty for everybody where there is one."""
        chosen = duties * self.callers if len(duties) == 1 else duties
        return [done.result() for done in [self._pool.submit(self._one, duty) for duty in chosen]]

    def _one(self, duty: Any) -> Any:
        connections["default"].ensure_connection()
        self.barrier.wait()
        try:
            return duty()
        except Exception as error:
            return error

    def leave(self) -> None:
        def close() -> None:
            self.barrier.wait()
            connections.close_all()

        for left in [self._pool.submit(close) for _ in range(self.callers)]:
            left.result()
        self._pool.shutdown()


@pytest.mark.parametrize(("repeat", "rounds"), [("none", 50), ("keyed", 50 if ALL_ROUNDS else 10)])
def test_twenty_callers_make_one_effect_and_get_one_answer(desk: Desk, repeat: str, rounds: int) -> None:
    workers.me()
    crowd = Crowd(20)
    for number in range(rounds):
        job = intent(repeat, workflow_id=f"w{number}")
        answers = crowd.all_at_once(lambda job=job: final_answer(job))
        assert all(answer == answers[0] for answer in answers), answers
        assert answers[0][0] == "succeeded"
        operation = desk.operation(workflow_id=f"w{number}")
        assert operation.attempts == 1
        assert desk.sent(operation) == 1
    crowd.leave()
    desk.check()


@pytest.mark.processes
def test_a_hundred_callers_in_ten_processes_make_one_effect(desk: Desk) -> None:
    for number in range(50 if ALL_ROUNDS else 2):
        job = intent("none", workflow_id=f"w{number}")
        desk.folder = desk.folder.parent / f"round-{number}"
        crowd = [desk.worker(do="callers", threads=10, intent=job) for _ in range(10)]
        for worker in crowd:
            worker.reached("ready")
        (desk.folder / "start").touch()
        answers = [answer for worker in crowd for answer in worker.ended(seconds=60)["answer"]]
        assert len(answers) == 100
        assert all(answer == answers[0] for answer in answers)
        operation = desk.operation(workflow_id=f"w{number}")
        assert (operation.state, operation.attempts, desk.sent(operation)) == ("succeeded", 1, 1)
    desk.check()


# Another request under the same identity


def _ready(desk: Desk) -> None:
    open_in("ready", due_at=0)


def _awaiting_approval(desk: Desk) -> None:
    open_in("awaiting_approval")


def open_in(state: str, **after: float) -> None:
    """Record the keyed intent in that state, unsent."""
    wanted = intent_of(intent("keyed"))
    provider = executor.registry.provider("pay")
    row = executor.row_of(wanted, provider, provider.actions["refund.create"])
    transition.open_operation(row={**row, "state": state}, after=after, observed=[], fact=ME.fact("recorded"))


def _pending(desk: Desk) -> None:
    open_in("ready", due_at=0)
    executor.claim_again(Operation.objects.get(), actor=ME)


def _failed_retryable(desk: Desk) -> None:
    desk.world.pay.fault("unavailable")
    perform(intent("keyed"))


def _failed_terminal(desk: Desk) -> None:
    desk.world.pay.fault("reject")
    perform(intent("keyed"))


def _ambiguous(desk: Desk) -> None:
    desk.world.pay.fault("reset_after")
    perform(intent("keyed"))


def _succeeded(desk: Desk) -> None:
    perform(intent("keyed"))


def _terminated(desk: Desk) -> None:
    _failed_retryable(desk)
    operation = Operation.objects.get()
    transition.transition(
        operation.subject, to="terminated", version=operation.version, fact=OLGA.fact("terminated", reason="enough")
    )


INTO: dict[State, Any] = {
    State.READY: _ready,
    State.AWAITING_APPROVAL: _awaiting_approval,
    State.PENDING: _pending,
    State.FAILED_RETRYABLE: _failed_retryable,
    State.AMBIGUOUS: _ambiguous,
    State.SUCCEEDED: _succeeded,
    State.FAILED_TERMINAL: _failed_terminal,
    State.TERMINATED: _terminated,
}


def others() -> dict[str, dict[str, Any]]:
    """The same identity with another amount, another action, another provider."""
    same = intent("keyed")
    label = {"order": "1002", "sender": "jo", "service": "parcel"}
    return {
        "amount": {**same, "request": {**same["request"], "amount": 6000}},
        "member more": {**same, "request": {**same["request"], "note": "x"}},
        "action": {**same, "provider": "mail", "action": "message.send", "request": REQUESTS["none"][2]},
        "provider": {**same, "provider": "carrier", "action": "label.create", "request": label},
    }


@pytest.mark.case("A7")
@pytest.mark.parametrize("state", list(INTO))
@pytest.mark.parametrize("other", list(others()))
def test_another_request_under_a_known_identity_is_refused_in_every_state(desk: Desk, state: State, other: str) -> None:
    INTO[state](desk)
    before = Operation.objects.values().get()
    assert before["state"] == state
    sent = sum(len(server.requests()) for server in desk.world.servers.values())
    with pytest.raises(FingerprintMismatch):
        perform(others()[other])
    assert Operation.objects.values().get() == before
    assert sum(len(server.requests()) for server in desk.world.servers.values()) == sent
    assert Entry.objects.filter(event="refused", reason_code="fingerprint_mismatch").count() == 1


@pytest.mark.case("A7")
def test_a_slow_success_pressed_again_is_one_effect(desk: Desk) -> None:
    desk.world.pay.fault("hang_before_effect")
    first = desk.worker(do="perform", intent=intent("keyed"))
    desk.world.pay.await_waiting()
    second = perform(intent("keyed"))
    assert (second.state, second.disposition) == ("pending", "in_progress")
    desk.world.pay.release()
    assert first.ended()["answer"]["state"] == "succeeded"
    third = perform(intent("keyed"))
    assert (third.state, third.replayed, third.result["amount"]) == ("succeeded", True, 4200)
    with pytest.raises(FingerprintMismatch) as refused:
        perform(others()["amount"])
    assert refused.value.stored != refused.value.offered
    assert desk.world.count() == 1
    newer = intent("keyed")
    newer["identity"]["intent_version"] = 2
    assert perform(newer).state == "succeeded"
    assert desk.world.count() == 2
    desk.check()


# Retrying


def _absent(desk: Desk) -> Operation:
    desk.world.mail.fault("lost")
    perform(intent("lookup"))
    while desk.operation().state != "failed_retryable":
        desk.clock.set(max(desk.next_due(), desk.clock.now()))
        reconciler.reconcile(desk.operation().pk)
    return desk.operation()


@pytest.mark.case("I5")
def test_two_people_and_the_sweep_retry_in_the_same_second(desk: Desk) -> None:
    workers.me()
    operation = _absent(desk)
    journal = list(JournalEntry.objects.filter(attempt=1).values())
    crowd = Crowd(3)
    answers = crowd.all_at_once(
        lambda: retrying.retry(operation.pk, actor=OLGA, version=operation.version, reason="again"),
        lambda: retrying.retry(operation.pk, actor=OMAR, version=operation.version, reason="again"),
        desk.sweep,
    )
    crowd.leave()
    refused = [a for a in answers if isinstance(a, Exception)]
    assert all(isinstance(a, TransitionRefused | retrying.NotRetryable) for a in refused), refused
    after = desk.operation()
    assert (after.attempts, after.state) == (2, "succeeded")
    assert desk.effects(after) == 1
    assert desk.sent(after) == 2
    assert JournalEntry.objects.filter(kind="attempt_started", attempt=2).count() == 1
    assert list(JournalEntry.objects.filter(attempt=1).values()) == journal, "the old attempt stays as it was"
    desk.check()


@pytest.mark.case("I5")
def test_a_retry_where_none_is_allowed_says_why(desk: Desk) -> None:
    _succeeded(desk)
    with pytest.raises(retrying.NotRetryable, match="It has succeeded"):
        retrying.retry(desk.operation().pk, actor=OLGA, reason="again")


def test_many_sweeps_at_once_send_what_is_due_once(desk: Desk) -> None:
    workers.me()
    crowd = Crowd(8)
    for number in range(10):
        desk.world.pay.fault("unavailable")
        perform(intent("keyed", workflow_id=f"w{number}"))
    desk.clock.set(max(Operation.objects.values_list("due_at", flat=True)))
    crowd.all_at_once(desk.sweep)
    crowd.leave()
    desk.come_to_rest()
    assert {(o.attempts, o.state, desk.sent(o)) for o in Operation.objects.all()} == {(2, "succeeded", 2)}
    desk.check()


def test_two_look_ups_at_once_move_it_once(desk: Desk) -> None:
    workers.me()
    _ambiguous(desk)
    operation = desk.operation()
    crowd = Crowd(2)
    answers = crowd.all_at_once(lambda: reconciler.reconcile(operation.pk, actor=OLGA, version=operation.version))
    crowd.leave()
    assert sum(isinstance(answer, StaleVersion) for answer in answers) <= 1
    assert desk.operation().state == "succeeded"
    assert JournalEntry.objects.filter(kind="finding").count() == 2, "what the second one saw is kept"
    desk.check()


@pytest.mark.case("A1")
def test_one_step_does_not_eat_the_budget_of_another(desk: Desk) -> None:
    desk.world.pay.fault("unavailable", times=2)
    perform(intent("keyed", step="a"))
    desk.come_to_rest()
    desk.world.pay.fault("unavailable", times=2)
    perform(intent("keyed", step="b"))
    desk.come_to_rest()
    assert {(o.step, o.attempts, o.state) for o in Operation.objects.all()} == {
        ("a", 3, "succeeded"),
        ("b", 3, "succeeded"),
    }
    desk.check()
