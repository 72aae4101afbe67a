"""A real worker is killed at every boundary of one operation, for every class of action."""

from __future__ import annotations

from typing import Any

import pytest

from reconciliation import executor, reconciler, workers
from reconciliation.actors import Actor
from reconciliation.models import JournalEntry, Operation
from tests.nursery import Desk
from tests.worker_driver import intent_of

pytestmark = pytest.mark.processes

REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "keyed": ("pay", "refund.create", {"order": "1002", "amount": 4200, "currency": "USD", "card": "card_1"}),
    "lookup": ("mail", "message.send_listed", {"order": "1002", "to": "jo@example.com", "subject": "Hi", "body": "b"}),
    "none": ("mail", "message.send", {"order": "1002", "to": "jo@example.com", "subject": "Hi", "body": "b"}),
    "natural": ("tickets", "ticket.close", {"ticket": "T-77"}),
    "read": ("tickets", "ticket.read", {"ticket": "T-77"}),
}
CLASSES = list(REQUESTS)
WRITING = [name for name in CLASSES if name != "read"]


def intent(repeat: str, *, workflow_id: str = "w1", step: str = "act", **other: Any) -> dict[str, Any]:
    """One intent of that class, as a job carries it."""
    provider, action, request = REQUESTS[repeat]
    identity = {
        "tenant": "acme",
        "workflow_type": "claim",
        "workflow_id": workflow_id,
        "step": step,
        "business_object": "order:1002",
    }
    return {"identity": identity, "provider": provider, "action": action, "request": request, **other}


def submit_again(repeat: str) -> executor.Outcome:
    """What a task runner does that knows nothing: the same task once more."""
    return executor.perform(intent_of(intent(repeat)), actor=Actor(id=workers.me(), kind="worker"))


def rest_and_check(desk: Desk, repeat: str) -> Operation:
    desk.come_to_rest()
    desk.check()
    again = submit_again(repeat)
    operation = desk.operation()
    assert again.state == operation.state
    assert again.disposition in ("replay", "wait"), "a settled or unknown operation is not sent by asking again"
    desk.come_to_rest()
    desk.check()
    return operation


def kill_at(desk: Desk, repeat: str, boundary: str) -> None:
    worker = desk.worker(do="perform", intent=intent(repeat), stop_at=[boundary])
    worker.reached(boundary)
    worker.kill()


@pytest.mark.parametrize("repeat", CLASSES)
def test_killed_before_the_claim_nothing_is_known_and_nothing_was_sent(desk: Desk, repeat: str) -> None:
    kill_at(desk, repeat, "before_claim")
    assert Operation.objects.count() == 0
    assert submit_again(repeat).state == "succeeded"
    desk.come_to_rest()
    desk.check()
    assert desk.sent(desk.operation()) == (0 if repeat == "read" else 1)


@pytest.mark.parametrize("repeat", CLASSES)
@pytest.mark.parametrize("boundary", ["claimed", "sending"])
def test_killed_before_sending_it_is_done_once_or_handed_to_a_person(desk: Desk, repeat: str, boundary: str) -> None:
    kill_at(desk, repeat, boundary)
    assert desk.operation().state == "pending"
    operation = rest_and_check(desk, repeat)
    if repeat == "none":
        assert (operation.state, operation.escalation_reason) == ("ambiguous", "no_conclusive_answer")
        assert desk.sent(operation) == 0
    else:
        assert operation.state == "succeeded"
        assert operation.attempts == 2


@pytest.mark.case("D5")
@pytest.mark.parametrize("repeat", WRITING)
@pytest.mark.parametrize("what", ["dropped", "applied"])
def test_killed_in_the_call_before_the_effect(desk: Desk, repeat: str, what: str) -> None:
    server = desk.world.servers[REQUESTS[repeat][0]]
    server.fault("hang_before_effect")
    worker = desk.worker(do="perform", intent=intent(repeat))
    server.await_waiting()
    worker.kill()
    server.release(drop=what == "dropped")
    operation = rest_and_check(desk, repeat)
    if what == "applied":
        assert (operation.state, operation.basis) == ("succeeded", "look_up")
        assert desk.sent(operation) == 1, "what was found is not sent again"
    elif repeat == "none":
        assert operation.state == "ambiguous"
        assert operation.escalated_at
        assert desk.sent(operation) == 1
    else:
        assert operation.state == "succeeded"
        assert desk.sent(operation) == 2


@pytest.mark.case("A1", "D5")
@pytest.mark.parametrize("repeat", WRITING)
def test_killed_in_the_call_after_the_effect_it_is_found(desk: Desk, repeat: str) -> None:
    server = desk.world.servers[REQUESTS[repeat][0]]
    server.fault("hang_after_effect")
    worker = desk.worker(do="perform", intent=intent(repeat))
    server.await_waiting()
    worker.kill()
    server.release()
    operation = rest_and_check(desk, repeat)
    assert (operation.state, operation.basis) == ("succeeded", "look_up")
    assert operation.escalated_at is None, "it was unknown, never called absent"
    assert desk.sent(operation) == 1


@pytest.mark.case("A1")
@pytest.mark.parametrize("repeat", CLASSES)
@pytest.mark.parametrize("boundary", ["answered", "judged"])
def test_killed_after_the_answer_it_is_found(desk: Desk, repeat: str, boundary: str) -> None:
    kill_at(desk, repeat, boundary)
    operation = rest_and_check(desk, repeat)
    assert operation.state == "succeeded"
    assert desk.sent(operation) == (0 if repeat == "read" else 1)


@pytest.mark.parametrize("repeat", CLASSES)
def test_killed_after_the_settlement_it_is_settled(desk: Desk, repeat: str) -> None:
    kill_at(desk, repeat, "settled")
    assert desk.operation().state == "succeeded"
    operation = rest_and_check(desk, repeat)
    assert operation.version == 2
    assert JournalEntry.objects.filter(kind="receipt").count() == 1


@pytest.mark.case("D5")
@pytest.mark.parametrize("repeat", CLASSES)
def test_no_age_of_a_claim_makes_it_failed(desk: Desk, repeat: str) -> None:
    kill_at(desk, repeat, "claimed")
    desk.clock.advance(days=400)
    outcome = submit_again(repeat)
    assert outcome.state == "pending"
    assert outcome.disposition == "in_progress"
    assert desk.world.count() == 0
    desk.come_to_rest()
    desk.check()


@pytest.mark.parametrize("repeat", ["keyed", "lookup"])
def test_one_empty_look_is_no_proof_and_nor_is_an_early_one(desk: Desk, repeat: str) -> None:
    """Lease 40 s; absence counts 30 s (the time-out) and 5 s (until effects show) after its end, twice, 30 s apart."""
    kill_at(desk, repeat, "claimed")
    desk.clock.advance(41)
    for seconds, reads in ((0, 0), (34, 0), (2, 1), (1, 1), (28, 1)):
        desk.clock.advance(seconds)
        workers.bury_dead()
        reconciler.reconcile(desk.operation().pk)
        assert (desk.operation().state, desk.operation().absent_reads) == ("ambiguous", reads)
    desk.clock.advance(2)
    reconciler.reconcile(desk.operation().pk)
    assert (desk.operation().state, desk.operation().reason_code) == ("failed_retryable", "absent")
    desk.come_to_rest()
    desk.check()
    assert desk.sent(desk.operation()) == 1
