"""A worker is killed, frozen or overtaken in the middle of a run: each step has one effect, and the run ends."""

from __future__ import annotations

from typing import Any

import pytest

from audit.models import Entry
from reconciliation import executor, leases, reconciler, runs, transition
from reconciliation.actors import Actor
from reconciliation.models import Operation, Run
from reconciliation.states import RunState
from tests.nursery import Desk, Worker
from tests.three_steps import INPUT, THREE

pytestmark = pytest.mark.processes

OLGA = Actor(id="person:1", kind="person", name="Olga")
STEPS = [step.name for step in THREE.steps]
SERVERS = [step.provider for step in THREE.steps]


def start() -> Run:
    return runs.start("three_steps", tenant="acme", workflow_id="w1", input=INPUT, actor=OLGA)


def walking(desk: Desk, run: Run, boundary: str, *, passing: int = 0, **job: Any) -> Worker:
    worker = desk.worker(do="advance", pk=run.pk, stop_at=[boundary], passing=passing, **job)
    worker.reached(boundary)
    return worker


def check_ended(desk: Desk) -> None:
    desk.come_to_rest()
    desk.check()
    assert Run.objects.get().state == "succeeded"
    assert [desk.effects(operation) for operation in Operation.objects.order_by("id")] == [1, 1, 1]
    assert list(Operation.objects.order_by("id").values_list("step", "state")) == [(s, "succeeded") for s in STEPS]


@pytest.mark.parametrize("step", range(3), ids=STEPS)
@pytest.mark.parametrize("boundary", ["before_claim", "claimed", "answered", "settled"])
def test_killed_in_a_step_another_worker_goes_on(desk: Desk, boundary: str, step: int) -> None:
    walking(desk, start(), boundary, passing=step).kill()
    assert Run.objects.get().state == "running"
    check_ended(desk)


@pytest.mark.parametrize("step", range(3), ids=STEPS)
def test_killed_in_the_call_of_a_step_another_worker_goes_on(desk: Desk, step: int) -> None:
    server = desk.world.servers[SERVERS[step]]
    server.fault("hang_after_effect")
    worker = desk.worker(do="advance", pk=start().pk)
    server.await_waiting()
    worker.kill()
    server.release()
    check_ended(desk)


def test_killed_after_the_last_step_the_run_ends(desk: Desk) -> None:
    walking(desk, start(), "leaving").kill()
    check_ended(desk)


@pytest.mark.parametrize("boundary", ["before_claim", "settled"])
def test_an_overtaken_worker_claims_no_further_step(desk: Desk, boundary: str) -> None:
    """It wakes with the run's old lease: right before the claim of a step, or right before it asks for more time."""
    worker = walking(desk, start(), boundary)
    worker.freeze()
    desk.clock.advance(120)
    held = leases.take(Run.objects.get(), to=RunState.RUNNING, actor=OLGA, seconds=300)
    claims = Operation.objects.count()
    worker.thaw()
    worker.go_on(boundary)
    worker.ended()
    assert Operation.objects.count() == claims
    assert Run.objects.get().generation == held.generation
    assert sum(len(server.requests()) for server in desk.world.servers.values()) == claims
    desk.clock.advance(301)
    check_ended(desk)


def test_what_a_run_is_about_to_wait_for_may_have_happened_already(desk: Desk) -> None:
    """Its step was unknown; before it says so and lets go, another worker has found it."""
    desk.world.mail.fault("reset_after")
    worker = walking(desk, start(), "leaving")
    reconciler.reconcile(Operation.objects.get(step="mail").pk)
    assert Operation.objects.get(step="mail").state == "succeeded"
    worker.go_on("leaving")
    assert worker.ended()["answer"] == "uncertain"
    check_ended(desk)


def cancel() -> None:
    run = Run.objects.get()
    transition.transition(run.subject, to="cancelled", version=run.version, fact=OLGA.fact("cancelled", reason="no"))


def test_a_cancelled_run_claims_no_further_step(desk: Desk) -> None:
    worker = walking(desk, start(), "before_claim", passing=1)
    cancel()
    worker.go_on("before_claim")
    worker.ended()
    desk.come_to_rest()
    assert Operation.objects.count() == 1
    assert desk.world.mail.requests() == []
    desk.check()


def test_a_due_retry_of_a_cancelled_run_is_not_sent_and_ends(desk: Desk) -> None:
    desk.world.mail.fault("unavailable")
    runs.advance(start().pk)
    assert Operation.objects.get(step="mail").state == "failed_retryable"
    cancel()
    desk.come_to_rest()
    operation = Operation.objects.get(step="mail")
    assert (operation.state, operation.reason_code) == ("failed_terminal", "run_ended")
    assert desk.sent(operation) == 1
    desk.check()


def test_an_unknown_step_of_a_cancelled_run_is_still_found_out(desk: Desk) -> None:
    desk.world.mail.fault("lost")
    runs.advance(start().pk)
    cancel()
    desk.come_to_rest()
    operation = Operation.objects.get(step="mail")
    assert (operation.state, desk.sent(operation)) == ("failed_terminal", 1)
    desk.check()


def test_many_workers_on_one_run_make_each_effect_once(desk: Desk) -> None:
    run = start()
    crowd = [desk.worker(do="advance", pk=run.pk) for _ in range(8)]
    for worker in crowd:
        assert worker.ended()["event"] == "ended"
    check_ended(desk)
    assert Entry.objects.filter(subject=str(run.subject), reason_code="taken").count() == 1


def test_two_starts_of_one_run_are_one(desk: Desk) -> None:
    assert start().pk == start().pk
    with pytest.raises(runs.RunMismatch):
        runs.start("three_steps", tenant="acme", workflow_id="w1", input={**INPUT, "amount": 1}, actor=OLGA)
    check_ended(desk)


@pytest.mark.case("D1")
def test_an_old_hold_on_a_run_is_good_for_nothing(desk: Desk) -> None:
    desk.world.mail.fault("unavailable")
    runs.advance(start().pk)
    old = leases.take(Run.objects.get(), to=RunState.RUNNING, actor=OLGA, seconds=30)
    desk.clock.advance(31)
    subject = Run.objects.get().subject
    assert transition.heartbeat_run(subject, generation=old.generation, seconds=30) is None, "it ran out"
    new = leases.take(Run.objects.get(), to=RunState.RUNNING, actor=OLGA, seconds=30)
    row, sent = Run.objects.values().get(), len(desk.world.mail.requests())

    assert transition.heartbeat_run(subject, generation=old.generation, seconds=300) is None
    for held in (old, None):
        with pytest.raises(transition.RunNotHeld):
            executor.claim_again(Operation.objects.get(step="mail"), actor=OLGA, held=held)
    with pytest.raises(transition.StaleGeneration):
        leases.leave(subject, old, to=RunState.PENDING, reason_code="old")
    with pytest.raises(transition.RunNotHeld), runs.holding(Operation.objects.get(step="mail"), held=None, actor=OLGA):
        pass
    assert Run.objects.values().get() == row
    assert len(desk.world.mail.requests()) == sent

    assert transition.heartbeat_run(subject, generation=new.generation, seconds=60) is not None
    desk.clock.advance(61)
    check_ended(desk)
