"""A schedule's ended runs go after their time; what was expected, and what became of it, stays and runs once."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest

from audit.verify import registered_heads, verify
from reconciliation import retention, runs, schedules, transition
from reconciliation.models import Job, Operation, Run, Slot, Tombstone
from tests import cast, timetable
from tests.database import Clock
from tests.scripted import OLGA
from tests.test_schedules import going_on, office, press, utc  # noqa: F401
from tests.timetable import job, slots, tick, told, work


@pytest.fixture
def pruned(office: Any, clock: Clock) -> tuple[Job, Run]:  # noqa: F811
    """A daily job that expects nothing since, whose first run succeeded half a year ago, and was pruned today."""
    daily = job(at=utc("2026-01-10T07:30"), clock=clock, expression="0 8 * * *")
    clock.set(utc("2026-01-10T08:00:01"))
    tick()
    work()
    (run,) = Run.objects.all()
    tick()
    Job.objects.filter(pk=daily.pk).update(next_at=None)
    clock.advance(days=179)
    assert retention.tend().pruned.total() == 0
    clock.advance(days=2)
    tally = retention.tend()
    assert (tally.pruned["operation"], tally.pruned["run"]) == (1, 1)
    return daily, run


def test_the_run_goes_and_what_was_expected_stays(pruned: tuple[Job, Run]) -> None:
    daily, run = pruned
    assert not Run.objects.exists()
    assert told(daily) == [("01-10 08:00", "started", "on_time", 1)]
    (slot,) = Slot.objects.select_related("run")
    assert (slot.run_id, slot.run, slot.open) == (run.pk, None, False)
    assert Tombstone.objects.get(kind="run").state == "succeeded"
    assert list(verify(registered_heads())) == []


def test_its_time_is_never_run_again_whoever_asks(pruned: tuple[Job, Run], office: Any, clock: Clock) -> None:  # noqa: F811
    daily, run = pruned
    (slot,) = Slot.objects.all()
    sent = len(office.calls)
    with pytest.raises(transition.Pruned):
        runs.start("mailing", tenant="acme", workflow_id=run.workflow_id, input=run.input, actor=OLGA)
    assert press(daily, slot.pk).verdict == "refused"
    Job.objects.filter(pk=daily.pk).update(
        next_at=slot.scheduled_for, decided_until=None, missed="run_all", max_catch_up=None
    )
    for _ in range(3):
        tick()
        work()
    (mine,) = Slot.objects.filter(pk=slot.pk)
    assert (mine.state, mine.run_id) == ("started", run.pk)
    assert not Slot.objects.filter(scheduled_for=slot.scheduled_for).exclude(pk=slot.pk).exists()
    assert not Run.objects.filter(workflow_id=run.workflow_id).exists()
    assert not Operation.objects.filter(workflow_id=run.workflow_id).exists()
    assert len(office.calls) > sent, "the beat went on behind it"


def test_what_a_schedule_still_counts_as_going_on_stays(office: Any, clock: Clock) -> None:  # noqa: F811
    job(at=utc("2026-01-10T07:30"), clock=clock, expression="0 8 * * *")
    clock.set(utc("2026-01-10T08:00:01"))
    tick()
    work()
    clock.advance(days=200)  # and no beat came by
    tally = retention.tend()
    assert (tally.pruned["operation"], tally.pruned["run"], tally.kept["schedule"]) == (1, 0, 1)
    schedules.close_ended()
    assert retention.tend().pruned["run"] == 1


def test_pages_say_how_a_pruned_run_ended_and_behind_which_a_start_was_left_out(
    office: Any,  # noqa: F811
    clock: Clock,
) -> None:
    minutely, run = going_on(clock, overlap="skip", tenant="t_acme")
    clock.advance(minutes=1)
    tick()
    timetable.end(cast.run_stands(run, "failed"))
    tick()
    Job.objects.update(next_at=None)
    clock.advance(days=200)
    assert retention.tend().pruned["run"] >= 1
    left_out = next(slot for slot in slots(minutely) if slot.state == "skipped_overlap")
    assert left_out.behind_id == run.pk
    browser = cast.client(cast.people()["vi_eve"])
    for page in (f"/schedules/{minutely.pk}", "/schedules"):
        answer = browser.get(page)
        assert answer.status_code == 200
        said = html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.content.decode())))
        assert "failed" in said
        if page != "/schedules":
            assert f"Run {run.pk} ended: failed. It was pruned since." in said
            assert (
                f"Before it: run {run.pk} , pruned since ." in said or f"Before it: run {run.pk}, pruned since." in said
            )
            assert f"/runs/{run.pk}" not in answer.content.decode()
