"""The five failures of a scheduled run: before, during and after its call, triggered twice, and after a restore.

Each counts effects at the outside systems themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from reconciliation import fence, jobs, restore, schedules
from reconciliation.jobs import Terms
from reconciliation.models import Job, Operation, RestoreFence, Run, Slot
from reconciliation.pressing import Verdict
from tests.backups import Backup
from tests.nursery import Desk, Worker
from tests.test_run_kill import STEPS
from tests.three_steps import INPUT
from tests.timetable import OLGA

pytestmark = pytest.mark.processes


def nightly(desk: Desk) -> Job:
    """A job whose time has just come."""
    at = (desk.clock.now() + timedelta(minutes=2)).replace(second=0, microsecond=0)
    terms = Terms(expression=f"{at.minute} {at.hour} * * *", workflow="three_steps", input=INPUT)
    jobs.create(tenant="acme", name="nightly", terms=terms, token=uuid4(), actor=OLGA)
    desk.clock.set(at + timedelta(seconds=1))
    return Job.objects.get()


def beats(desk: Desk, boundary: str, **job: Any) -> Worker:
    worker = desk.worker(do="beat_and_sweep", stop_at=[boundary], **job)
    worker.reached(boundary)
    return worker


def check_ran_once(desk: Desk) -> None:
    """Others go on; the scheduled time has one run, and each step of it one effect."""
    for _ in range(3):
        schedules.tick()
        desk.come_to_rest()
    desk.check()
    slot, run = Slot.objects.get(), Run.objects.get()
    assert (slot.state, slot.run_id, run.state) == ("started", run.pk, "succeeded")
    assert run.workflow_id == schedules.run_id(Job.objects.get(), slot.scheduled_for)
    operations = Operation.objects.order_by("id")
    assert [(o.step, o.state, desk.effects(o)) for o in operations] == [(step, "succeeded", 1) for step in STEPS]
    assert desk.world.count() == 3


@pytest.mark.parametrize("boundary", ["ticking", "starting", "before_claim", "claimed"])
def test_1_killed_before_the_call_it_runs_once(desk: Desk, boundary: str) -> None:
    nightly(desk)
    beats(desk, boundary).kill()
    assert desk.world.count() == 0
    check_ran_once(desk)


def test_2_killed_during_the_call_it_runs_once(desk: Desk) -> None:
    nightly(desk)
    desk.world.pay.fault("hang_after_effect")
    worker = desk.worker(do="beat_and_sweep")
    desk.world.pay.await_waiting()
    worker.kill()
    desk.world.pay.release()
    check_ran_once(desk)


@pytest.mark.parametrize("boundary", ["answered", "settled"])
def test_3_killed_after_the_call_it_runs_once(desk: Desk, boundary: str) -> None:
    nightly(desk)
    beats(desk, boundary).kill()
    assert desk.world.count() == 1
    check_ran_once(desk)


def test_4_triggered_by_many_beats_at_once_it_runs_once(desk: Desk) -> None:
    nightly(desk)
    crowd = [beats(desk, "ticking") for _ in range(6)]
    for worker in crowd:
        worker.go_on("ticking")
    for worker in crowd:
        assert worker.ended(seconds=60)["event"] == "ended"
    check_ran_once(desk)


@pytest.fixture
def backup(desk: Desk, superuser_connection: Any) -> Iterator[Backup]:
    """Of the ledger as it is at the start of the test, unless it is taken again."""
    fence.look()
    made = Backup(superuser_connection)
    yield made
    made.drop()


def check_nothing_leaves_until_the_release(desk: Desk, *, calls: int) -> None:
    """Beats and workers of other processes do what they can; then an admin lets them."""
    for _ in range(3):
        assert desk.worker(do="beat_and_sweep").ended(seconds=60)["event"] == "ended"
        desk.clock.advance(minutes=5)
    assert RestoreFence.objects.get().is_down
    assert len([row for server in desk.world.servers.values() for row in server.requests()]) == calls
    while restore.mark():
        pass
    version = RestoreFence.objects.get().version
    answer = restore.release(actor=OLGA, version=version, reason="compared", token=uuid4())
    assert answer.verdict is Verdict.DONE


def calls(desk: Desk) -> int:
    return len([row for server in desk.world.servers.values() for row in server.requests()])


def test_5_restored_to_before_it_was_due_it_does_not_run_again(desk: Desk, backup: Backup) -> None:
    job = nightly(desk)
    backup.take()
    assert desk.worker(do="beat_and_sweep").ended(seconds=60)["event"] == "ended"
    desk.come_to_rest()
    sent = calls(desk)
    assert desk.world.count() == 3
    backup.bring_back()
    check_nothing_leaves_until_the_release(desk, calls=sent)
    for _ in range(3):
        schedules.tick()
        desk.come_to_rest()
    assert [(slot.state, slot.reason_code) for slot in Slot.objects.filter(job=job)] == [("missed", "restored")]
    assert (Run.objects.count(), desk.world.count(), calls(desk)) == (0, 3, sent)


@pytest.mark.parametrize("boundary", ["claimed", "settled"])
def test_5_restored_to_the_middle_of_it_each_step_is_done_once(desk: Desk, backup: Backup, boundary: str) -> None:
    nightly(desk)
    worker = beats(desk, boundary)
    backup.take()
    worker.go_on(boundary)
    worker.ended(seconds=60)
    desk.come_to_rest()
    sent = calls(desk)
    assert desk.world.count() == 3
    backup.bring_back()
    check_nothing_leaves_until_the_release(desk, calls=sent)
    desk.come_to_rest(rounds=300)
    assert desk.world.count() == 3
    assert {operation.step: desk.effects(operation) for operation in Operation.objects.all()} == dict.fromkeys(STEPS, 1)
    desk.check_audit()
