"""Four beats in processes of their own, one of them killed at the worst moments: each expected run is made once.

The beats go round without a pause, so that all of them are at the same slot at once; effects are counted at the outside
systems.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from uuid import uuid4

import pytest

from reconciliation import jobs
from reconciliation.jobs import Terms
from reconciliation.models import Job, Operation, Run, Slot
from tests.nursery import Desk, Worker
from tests.processes import wait_until
from tests.test_same_identity import ALL_ROUNDS
from tests.three_steps import INPUT
from tests.timetable import OLGA

pytestmark = pytest.mark.processes

SLOTS = 200 if ALL_ROUNDS else 20
LAST = 10 * SLOTS  # which of four beats comes first is chance, and a busy machine does not share it out evenly
OTHERS = 3


def every_minute(desk: Desk) -> datetime:
    """A job that runs every minute, whatever the run before is doing; gives its first time."""
    first = (desk.clock.now() + timedelta(minutes=2)).replace(second=0, microsecond=0)
    desk.clock.set(first - timedelta(seconds=30))
    terms = Terms(expression="* * * * *", workflow="three_steps", overlap="allow", input=INPUT)
    jobs.create(tenant="acme", name="minutely", terms=terms, token=uuid4(), actor=OLGA)
    return first


def started() -> int:
    return Slot.objects.filter(state="started").count()


def stands_at(boundary: str, before: int) -> bool:
    """Whether ledger and clock are where a beat at `boundary` has left them."""
    slot = Slot.objects.order_by("-scheduled_for").first()
    assert slot is not None
    if boundary == "ticked":
        return True
    return (slot.state, slot.run_id, Run.objects.count()) == ("due", None, before)


@pytest.mark.case("E7")
@pytest.mark.parametrize("boundary", ["slot_made", "run_made", "ticked"])
def test_four_beats_of_which_one_is_killed_make_each_expected_run_once(desk: Desk, boundary: str) -> None:
    first = every_minute(desk)
    doomed: Worker | None = desk.worker(do="beat", stop_at=[boundary], passing=1)
    beats = [desk.worker(do="beat") for _ in range(OTHERS)]
    for beat in (doomed, *beats):
        beat.reached("began")
    made = 0
    while made < SLOTS or doomed is not None:
        assert made < LAST, "the beat that was to be killed never came first"
        desk.clock.set(first + timedelta(minutes=made, seconds=1))
        wait_until(partial(moved_on, made + 1, doomed, boundary), seconds=30)
        if doomed is not None and doomed.has_reached(boundary):
            assert stands_at(boundary, made)
            doomed.kill()
            doomed = None
            beats.append(desk.worker(do="beat"))  # as a deployment would start another one
            beats[-1].reached("began")
            wait_until(partial(moved_on, made + 1, None, boundary), seconds=30)
        made += 1
    for beat in beats:
        beat.stop()
    assert min(beat.ended()["answer"] for beat in beats) > 0
    check_each_ran_once(desk, made)


def moved_on(due: int, doomed: Worker | None, boundary: str) -> bool:
    """Whether every slot so far is started, or the beat that is to be killed waits for it."""
    return started() == due or (doomed is not None and doomed.has_reached(boundary))


def check_each_ran_once(desk: Desk, made: int) -> None:
    """As many slots as minutes, one run each, and one effect for each step of a run."""
    assert Slot.objects.filter(job=Job.objects.get()).count() == started() == made
    runs = Run.objects.filter(workflow_type="three_steps")
    assert runs.count() == runs.values("workflow_id").distinct().count() == made
    assert Slot.objects.exclude(run=None).values("run").distinct().count() == made
    desk.come_to_rest(rounds=made + 20)
    desk.check()
    assert set(runs.values_list("state", flat=True)) == {"succeeded"}
    assert Operation.objects.count() == 3 * made
    assert (desk.world.pay.count(), desk.world.mail.count()) == (made, made)
