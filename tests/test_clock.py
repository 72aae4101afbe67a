"""The database's clock is set, or a worker's is wrong: things may be over or unknown earlier, never again or later."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import time_machine
from django.db import connections

from audit.models import Entry
from reconciliation import (
    executor,
    fence,
    limits,
    reconciler,
    restore,
    retention,
    sweeping,
    timekeeping,
    transition,
    watch,
)
from reconciliation.executor import perform
from reconciliation.models import Clock, Limit, Operation, Signal, Tombstone
from reconciliation.pressing import Verdict
from reconciliation.providers.base import OutcomeUnknown
from reconciliation.states import ApprovalState, State
from tests.backups import Backup
from tests.scripted import AGENT, OLGA, absent, order, row
from tests.test_approvals import ANN, CLEO, ROOT, asked, do, press, the, unknown
from tests.test_restore import restored

LOST = OutcomeUnknown("no answer came")
HOUR = timedelta(hours=1)
DAY = 86_400


@pytest.fixture(autouse=True)
def _a_beat_that_looks(clerk: Any) -> Any:
    timekeeping.forget()
    timekeeping.keep()
    yield
    timekeeping.forget()


def looks() -> float:
    return timekeeping.keep()


def time_passes(monkeypatch: Any, clock: Any, seconds: float) -> None:
    """As it does where nobody sets a clock: by what the database tells, and by what is measured."""
    measured = timekeeping.boot_seconds() + seconds
    clock.jump(seconds)
    monkeypatch.setattr(timekeeping, "boot_seconds", lambda: measured)


def clock_entries() -> list[str]:
    return list(Entry.objects.filter(event="clock").order_by("id").values_list("reason_code", flat=True))


# Set back


@pytest.mark.parametrize("beat_has_looked", [False, True])
def test_a_consent_that_was_over_is_not_given_because_the_clock_was_set_back(clerk, clock, beat_has_looked):
    approval = the(asked().pk)
    clock.set(approval.expires_at)
    looks()
    clock.jump(-600)
    if beat_has_looked:
        assert looks() < -590
    assert press("approve", the(approval.operation_id), CLEO).verdict is Verdict.REFUSED
    with pytest.raises(transition.ApprovalExpired):
        transition.move_approval(
            the(approval.operation_id), to="approved", who=["person:3"], patch={"decided_by": "person:3"},
            operation_to="ready", fact=CLEO.fact("approved"),
        )  # fmt: skip
    looks()
    sweeping.sweep()
    assert (row(approval.operation_id).state, clerk.calls) == ("failed_terminal", [])


@pytest.mark.parametrize("beat_has_looked", [False, True])
def test_a_consent_past_its_use_by_is_not_used_because_the_clock_was_set_back(clerk, clock, beat_has_looked):
    pk = asked().pk
    press("approve", the(pk), CLEO)
    clock.set(the(pk).use_by)
    looks()
    clock.jump(-600)
    if beat_has_looked:
        looks()
    assert asked().state == "awaiting_approval"
    sweeping.sweep()
    assert (row(pk).state, clerk.calls) == ("awaiting_approval", [])


@pytest.mark.parametrize("beat_has_looked", [False, True])
def test_what_two_people_agreed_on_is_not_done_after_its_time_because_the_clock_was_set_back(
    clerk, clock, beat_has_looked
):
    case = unknown(clerk)
    do(case, "send_again", ANN)
    approval = the(case.pk, "send_again")
    transition.move_approval(approval, to="approved", who=[], patch={"decided_by": ROOT.id}, fact=ROOT.fact("approved"))
    clock.set(the(case.pk, "send_again").use_by)
    looks()
    clock.jump(-600)
    if beat_has_looked:
        looks()
    sweeping.sweep()
    do(case, "send_again", ANN)
    assert len(clerk.calls) == 1


def test_an_open_consent_does_not_live_longer_because_the_clock_was_set_back(clerk, clock):
    approval = the(asked().pk)
    left = approval.expires_at - clock.now()
    looks()
    clock.jump(-3600)
    looks()
    now_left = the(approval.operation_id).expires_at - clock.now()
    assert abs(now_left - left) < timedelta(seconds=5)
    clock.set(the(approval.operation_id).expires_at)
    sweeping.sweep()
    assert the(approval.operation_id).state == ApprovalState.EXPIRED


def test_a_key_is_not_remembered_longer_because_the_clock_was_set_back(clerk, clock):
    clerk.answers(LOST)
    pk = perform(order("unlisted"), actor=AGENT).pk
    executor.call_a_person(row(pk), "no_conclusive_answer")
    clock.set(row(pk).same_key_until)
    looks()
    clock.jump(-3600)
    for _ in range(2):
        assert do(row(pk), "retry", OLGA).verdict is Verdict.REFUSED
        looks()
    assert len(clerk.calls) == 1


def test_a_lease_does_not_last_longer_because_the_clock_was_set_back(clerk, clock, monkeypatch):
    from reconciliation import executor

    monkeypatch.setattr(executor, "settle", lambda claim, judged: None)
    perform(order("none"), actor=AGENT)
    looks()
    clock.jump(-3600)
    looks()
    clock.jump(40)
    sweeping.sweep()
    assert Operation.objects.get().state == "ambiguous"


# Set forward


def test_a_clock_that_is_set_forward_and_right_again_revives_no_consent(clerk, clock):
    waiting, agreed = asked(step="waiting").pk, asked(step="agreed").pk
    press("approve", the(agreed), CLEO)
    clock.jump(86_400)
    looks()
    sweeping.sweep()
    clock.jump(-86_400)
    looks()
    assert the(waiting).state == ApprovalState.EXPIRED
    assert press("approve", the(waiting), CLEO).verdict is Verdict.REFUSED
    sweeping.sweep()
    assert (the(agreed).state, row(agreed).state) == (ApprovalState.WAITING, "awaiting_approval")
    assert clerk.calls == []


def test_a_clock_that_is_set_forward_makes_a_call_in_flight_unknown_and_never_sends_it_again(clerk, clock):
    def meanwhile(call: Any) -> Any:
        clock.jump(86_400)
        looks()
        sweeping.sweep()
        assert Operation.objects.get().state == "ambiguous"
        return LOST

    clerk.answers(meanwhile)
    outcome = perform(order("lookup"), actor=AGENT)
    sweeping.sweep()
    assert (row(outcome.pk).state, len(clerk.calls)) == ("ambiguous", 1)


def test_time_that_a_clock_only_tells_of_proves_no_absence(clerk, clock, monkeypatch):
    clerk.answers(LOST)
    pk = perform(order("lookup"), actor=AGENT).pk
    clerk.sees(absent())
    clock.jump(3600)
    assert looks() > 3590
    for _ in range(2):
        reconciler.reconcile(pk)
        time_passes(monkeypatch, clock, 31)
        looks()
    assert (row(pk).state, row(pk).absent_reads) == ("ambiguous", 0)
    for _ in range(2):
        reconciler.reconcile(pk)
        time_passes(monkeypatch, clock, 31)
        looks()
    assert (row(pk).state, row(pk).reason_code) == ("failed_retryable", "absent")


def test_time_that_has_passed_proves_absence_as_ever(clerk, clock, monkeypatch):
    clerk.answers(LOST)
    pk = perform(order("lookup"), actor=AGENT).pk
    clerk.sees(absent())
    for _ in range(2):
        time_passes(monkeypatch, clock, 61)
        assert looks() == 0
        reconciler.reconcile(pk)
    assert row(pk).state == "failed_retryable"


@pytest.fixture
def backup(superuser_connection: Any) -> Any:
    """Takes a backup of the database as it is when it is called."""
    taken: list[Backup] = []

    def take() -> Backup:
        fence.forward()
        taken.append(Backup(superuser_connection))
        return taken[-1]

    yield take
    for each in taken:
        each.drop()


def released(earlier: Any) -> None:
    """After the restore and its release, by a beat of the restored database."""
    restored(earlier)
    timekeeping.forget()
    looks()


@pytest.mark.parametrize("beat_has_looked", [False, True])
def test_the_replay_window_does_not_end_because_the_clock_was_set_forward(clerk, clock, backup, beat_has_looked):
    earlier = backup()
    assert perform(order(), actor=AGENT).state == "succeeded"
    released(earlier)
    sent = len(clerk.calls)
    clock.jump(31 * DAY)
    if beat_has_looked:
        assert looks() > 30 * DAY
        restore.tend()
        assert Limit.objects.filter(kind="replay", lifted_at__isnull=True).exists()
        clock.jump(-31 * DAY)
        looks()
        restore.tend()
    again = perform(order(), actor=AGENT)
    assert (again.state, again.reason_code, len(clerk.calls)) == ("ambiguous", "restored", sent)


def test_the_replay_window_ends_by_time_that_has_passed_and_is_counted_anew_from_a_setting(
    clerk, clock, backup, monkeypatch
):
    released(backup())
    clock.jump(3600)
    assert looks() > 3590
    time_passes(monkeypatch, clock, 30 * DAY - 60)
    looks()
    restore.tend()
    assert Limit.objects.filter(kind="replay", lifted_at__isnull=True).exists()
    assert abs(restore.replays_until() - clock.now() - timedelta(seconds=60)) < timedelta(seconds=10)
    time_passes(monkeypatch, clock, 70)
    looks()
    restore.tend()
    assert not Limit.objects.filter(kind="replay", lifted_at__isnull=True).exists()
    assert perform(order(), actor=AGENT).state == "succeeded"


@pytest.mark.parametrize("beat_has_looked", [False, True])
def test_nothing_is_pruned_because_the_clock_was_set_forward(clerk, clock, monkeypatch, beat_has_looked):
    pk = perform(order(), actor=AGENT).pk
    clock.jump(400 * DAY)
    if beat_has_looked:
        looks()
    retention.tend()
    assert Operation.objects.filter(pk=pk).exists()
    looks()
    time_passes(monkeypatch, clock, 200 * DAY)
    looks()
    retention.tend()
    assert not Operation.objects.filter(pk=pk).exists()


def test_a_window_of_a_limit_is_not_over_because_the_clock_was_set_forward(clerk, clock, monkeypatch):
    sums = {"kind": "amount", "provider": "clerk", "currency": "USD", "most": 5_000, "window_seconds": DAY}
    limits.set_limit(limits.Wanted(**sums), actor=OLGA, reason="no more", token=uuid4())

    def pays(number):
        outcome = perform(order(workflow_id=f"w{number}", business_object=f"order-{number}"), actor=AGENT)
        return outcome.state, outcome.reason_code

    assert pays(1) == (State.SUCCEEDED, "receipt")
    clock.jump(3 * DAY)
    assert looks() > 2 * DAY
    retention.tend()
    assert pays(2) == (State.READY, "limit_amount")
    held = Operation.objects.get(workflow_id="w2")
    assert held.due_at - transition.database_now() > timedelta(minutes=50), "it is not asked for again every second"
    time_passes(monkeypatch, clock, DAY + 60)
    looks()
    assert pays(3) == (State.SUCCEEDED, "receipt")


def test_a_tombstone_is_not_forgotten_because_the_clock_was_set_forward(clerk, clock, monkeypatch):
    perform(order(), actor=AGENT)
    time_passes(monkeypatch, clock, 200 * DAY)
    looks()
    retention.tend()
    assert Tombstone.objects.count() == 1
    clock.jump(20_000 * DAY)
    looks()
    retention.tend()
    again = perform(order(), actor=AGENT)
    assert (again.reason_code, len(clerk.calls)) == ("pruned", 1)


# Looking


@pytest.mark.parametrize("seconds", [-4, 4])
def test_what_the_margins_allow_for_is_no_setting(clock, seconds):
    told = Clock.objects.get().told
    clock.jump(seconds)
    assert looks() == 0
    assert Clock.objects.get().told >= told
    assert clock_entries() == []


@pytest.mark.parametrize(("seconds", "code", "detail"), [(3600, "forward", "s forward"), (-3600, "back", "s back")])
def test_a_setting_is_on_record_and_shown_once_however_many_look(clock, seconds, code, detail):
    clock.jump(seconds)
    barrier, noticed = threading.Barrier(4), []

    def beat() -> None:
        try:
            barrier.wait(20)
            noticed.append(timekeeping.keep())
        finally:
            connections.close_all()

    crowd = [threading.Thread(target=beat) for _ in range(4)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert len([by for by in noticed if by]) == 1
    assert clock_entries() == [f"clock_set_{code}"]
    watch.look()
    signal = Signal.objects.get(kind="clock_set")
    assert (signal.subject, signal.detail.endswith(detail)) == ("clock:1", True)


def test_a_beat_that_starts_anew_still_sees_that_the_clock_was_set_back(clock):
    timekeeping.forget()
    clock.jump(-3600)
    assert looks() < -3590


@pytest.mark.parametrize(
    "other", ["DELETE FROM reconciliation_clock", "UPDATE reconciliation_clock SET told = told - interval '1 day'"]
)
def test_what_a_beat_knows_of_another_database_is_no_setting_of_this_ones_clock(clock, superuser_connection, other):
    clock.jump(3600)
    superuser_connection.execute(other)
    assert looks() == 0


# The clock of whoever decides


@pytest.mark.case("F3")
@pytest.mark.parametrize("skew", [-600, 600])
def test_a_wrong_clock_of_the_web_process_changes_no_consent(clerk, clock, skew):
    early, late = the(asked(step="early").pk), the(asked(step="late").pk)
    with time_machine.travel(time.time() + skew, tick=True):
        clock.set(early.expires_at - timedelta(seconds=2))
        assert press("approve", early, CLEO).verdict is Verdict.DONE
        clock.set(late.expires_at)
        assert press("approve", late, CLEO).verdict is Verdict.REFUSED
        agreed = the(early.operation_id)
        assert abs(agreed.use_by - agreed.decided_at - timedelta(minutes=30)) < timedelta(seconds=1)
        clock.set(agreed.use_by)
        assert asked(step="early").state == "awaiting_approval"
    assert clerk.calls == []
