"""A worker that is stopped, not dead: it wakes up when another one has taken over, and must not act then."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings

from audit.models import Entry
from reconciliation import claims, executor, reconciler, retrying, settlement, transition, workers
from reconciliation.actors import Actor
from reconciliation.models import JournalEntry, Operation, Run
from reconciliation.policy import boot_seconds
from reconciliation.providers.http import Wire
from tests.nursery import Desk, Worker
from tests.processes import wait_until
from tests.test_five_of_scheduling import check_ran_once, nightly
from tests.test_kill import REQUESTS, WRITING, intent, submit_again
from tests.test_same_identity import open_in
from tests.worker_driver import intent_of

pytestmark = pytest.mark.processes

QUICK = {"AFTERCALL_LEASE_MARGIN": 0.3}  # so that the time to send passes while a test waits
OLGA = Actor(id="person:1", kind="person", name="Olga")


def frozen_at(desk: Desk, repeat: str, boundary: str, **job: Any) -> Worker:
    worker = desk.worker(do="perform", intent=intent(repeat), stop_at=[boundary], **job)
    worker.reached(boundary)
    worker.freeze()
    return worker


def past_the_time_to_send() -> None:
    until = boot_seconds() + 0.35
    wait_until(lambda: boot_seconds() > until)


def sweep_for(desk: Desk, rounds: int = 8) -> None:
    """Sweep on, each time when something is due, as far as automation gets in `rounds`."""
    for _ in range(rounds):
        desk.sweep()
        due = desk.next_due()
        if due is not None and due > desk.clock.now():
            desk.clock.set(due)


@pytest.mark.parametrize("repeat", WRITING)
@pytest.mark.parametrize("boundary", ["claimed", "sending"])
def test_a_worker_that_wakes_after_its_time_to_send_sends_nothing(desk: Desk, repeat: str, boundary: str) -> None:
    worker = frozen_at(desk, repeat, boundary, settings=QUICK)
    past_the_time_to_send()
    desk.clock.advance(31)
    sweep_for(desk)
    sent = desk.sent(desk.operation())
    assert sent == (1 if repeat in ("keyed", "natural") else 0), "with a key, or where twice is once, it goes on"
    worker.thaw()
    worker.go_on(boundary)
    worker.ended()
    assert desk.sent(desk.operation()) == sent, "the old worker sent nothing"
    desk.come_to_rest()
    desk.check()
    operation = desk.operation()
    assert operation.state == "succeeded", "heard from the old worker that it sent nothing, automation tries again"
    assert desk.sent(operation) == 1


@pytest.mark.case("D1")
@pytest.mark.parametrize("repeat", WRITING)
def test_a_worker_that_wakes_and_still_sends_makes_no_second_effect(desk: Desk, repeat: str) -> None:
    """The ledger's clock ran ahead of the worker's: its time to send has not passed."""
    worker = frozen_at(desk, repeat, "claimed")
    desk.clock.advance(41)
    sweep_for(desk)
    before = desk.operation()
    if repeat in ("lookup", "none"):
        assert before.state == "ambiguous"
        assert desk.sent(before) == 0, "nothing proves that the stopped worker will not send"
    worker.thaw()
    worker.go_on("claimed")
    worker.ended()
    desk.come_to_rest()
    desk.check()
    after = desk.operation()
    assert after.state == "succeeded"
    assert desk.effects(after) == 1
    if repeat in ("lookup", "none"):
        assert desk.sent(after) == 1
        assert after.attempts == 1
        assert (after.basis, after.reason_code) == ("receipt", "late_report")
    assert Entry.objects.filter(subject=str(after.subject), reason_code="stale_worker_refused").count() == 1


def test_a_stopped_worker_forbids_the_automatic_retry_and_calls_a_person(desk: Desk) -> None:
    frozen_at(desk, "lookup", "claimed")
    desk.clock.advance(41)
    desk.come_to_rest()
    operation = desk.operation()
    assert (operation.state, operation.escalation_reason) == ("ambiguous", "old_worker_may_still_send")
    assert desk.sent(operation) == 0
    desk.check()


def test_a_stopped_worker_that_is_killed_later_allows_it(desk: Desk) -> None:
    worker = frozen_at(desk, "lookup", "claimed")
    desk.clock.advance(41)
    sweep_for(desk, 5)
    assert desk.sent(desk.operation()) == 0
    worker.kill()
    desk.come_to_rest()
    desk.check()
    assert desk.operation().state == "succeeded"
    assert desk.sent(desk.operation()) == 1


def test_a_worker_whose_process_cannot_be_seen_is_not_called_dead(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc hides the processes of other users, an empty look is no proof."""
    frozen_at(desk, "lookup", "claimed")
    plain = workers._read
    monkeypatch.setattr(workers, "_read", lambda path: "" if path.endswith("/stat") else plain(path))
    assert workers.bury_dead() == 0


@pytest.mark.parametrize("repeat", WRITING)
def test_a_worker_stopped_in_the_call_makes_no_second_effect(desk: Desk, repeat: str) -> None:
    server = desk.world.servers[REQUESTS[repeat][0]]
    server.fault("hang_before_effect")
    worker = desk.worker(do="perform", intent=intent(repeat))
    server.await_waiting()
    worker.freeze()
    desk.clock.advance(41)
    sweep_for(desk)
    server.release()
    wait_until(lambda: desk.effects(desk.operation()) == 1)
    worker.thaw()
    worker.ended()
    desk.come_to_rest()
    desk.check()
    operation = desk.operation()
    if repeat == "keyed" and operation.state != "succeeded":
        assert operation.escalated_at
        reconciler.reconcile(operation.pk, actor=OLGA)
        operation = desk.operation()
    assert operation.state == "succeeded"
    if repeat in ("lookup", "none"):
        assert desk.sent(operation) == 1


@pytest.mark.case("D1")
def test_every_write_of_an_old_generation_is_refused(desk: Desk) -> None:
    old = frozen_at(desk, "keyed", "claimed")
    desk.clock.advance(41)
    stale = desk.operation()
    reconciler.expire(stale)
    claim = executor.claim_again(desk.operation(), actor=OLGA, reason="takeover")
    row = Operation.objects.values().get()
    subject = stale.subject
    fact = Actor(id="worker:old", kind="worker").fact("progress")

    assert transition.heartbeat(subject, generation=stale.generation, seconds=30, longest=900) is None
    for guard in ("held", "lease_live"):
        for target in ("succeeded", "ambiguous", "failed_retryable", "failed_terminal", None):
            with pytest.raises(transition.StaleGeneration):
                transition.transition(
                    subject, to=target, generation=stale.generation, guard=(guard,), fact=fact,
                    patch={"basis": "receipt", "error_class": "old", "reason_code": "old"},
                )  # fmt: skip
    with pytest.raises(transition.StaleVersion):
        transition.transition(subject, to="ambiguous", version=stale.version, fact=fact)
    with pytest.raises(transition.LeaseLive):
        reconciler.expire(desk.operation())
    transition.note(subject, [transition.Observed(kind="late_report", attempt=1, generation=1)], look_soon=True)
    assert Operation.objects.values().get() == row, "the row shows the new owner's data only"

    old.thaw()
    old.go_on("claimed")
    assert old.ended()["answer"]["state"] == "pending", "it learns that it is no longer the owner"
    assert Operation.objects.values().get() == row
    assert Entry.objects.filter(event="refused", reason_code="stale_worker_refused").count() == 1

    assert executor.dispatch(claim).state == "succeeded"
    desk.check()
    assert desk.effects(desk.operation()) == 1


def test_a_heartbeat_prolongs_a_live_lease_only_and_never_beyond_the_longest(desk: Desk) -> None:
    frozen_at(desk, "keyed", "claimed")
    operation = desk.operation()
    until = transition.heartbeat(operation.subject, generation=1, seconds=300, longest=900)
    assert until is not None
    assert until - desk.clock.now() > timedelta(seconds=290)
    last = transition.heartbeat(operation.subject, generation=1, seconds=3000, longest=900)
    assert last == operation.last_sent_at + timedelta(seconds=900)
    desk.clock.set(last)
    assert transition.heartbeat(operation.subject, generation=1, seconds=300, longest=9000) is None
    desk.come_to_rest()
    desk.check()


@pytest.mark.case("D3")
@pytest.mark.parametrize("skew", [{"clock": 25}, {"clock": -25}, {"jump": -3600}, {"jump": 3600}])
def test_a_wrong_clock_of_the_worker_changes_nothing(desk: Desk, skew: dict[str, float]) -> None:
    worker = desk.worker(do="perform", intent=intent("keyed"), stop_at=["claimed"], **skew)
    worker.reached("claimed")
    operation = desk.operation()
    assert operation.lease_until - operation.last_sent_at == timedelta(seconds=40)
    assert abs(desk.clock.now() - operation.created_at) < timedelta(seconds=15), "times in rows are the database's"
    with pytest.raises(transition.LeaseLive):
        reconciler.reconcile(operation.pk)
    assert submit_again("keyed").disposition == "in_progress"
    worker.go_on("claimed")
    assert worker.ended()["answer"]["state"] == "succeeded"
    assert desk.sent(operation) == 1
    desk.come_to_rest()
    desk.check()


@pytest.mark.case("D3")
@pytest.mark.parametrize("skew", [3600, -3600])
def test_a_sweep_with_a_wrong_clock_ends_a_lease_when_the_database_says_so(desk: Desk, skew: float) -> None:
    worker = desk.worker(do="perform", intent=intent("keyed"), stop_at=["claimed"])
    worker.reached("claimed")
    assert desk.worker(do="sweep", clock=skew).ended()["answer"] == 0
    assert desk.operation().state == "pending"
    worker.kill()
    desk.clock.advance(41)
    desk.worker(do="sweep", clock=skew).ended()
    assert desk.operation().state == "ambiguous"
    desk.come_to_rest()
    desk.check()


@pytest.mark.case("D3")
@pytest.mark.parametrize("skew", [3600, -3600])
def test_a_wrong_clock_of_whoever_looks_proves_absence_neither_sooner_nor_later(desk: Desk, skew: float) -> None:
    desk.world.mail.fault("reset_before")
    executor.perform(intent_of(intent("lookup")), actor=Actor(id=workers.me(), kind="worker"))
    sent = desk.operation()
    for _ in range(12):
        if desk.operation().state != "ambiguous":
            break
        desk.clock.set(desk.next_due())
        assert desk.worker(do="sweep", clock=skew).ended()["event"] == "ended"
    last = JournalEntry.objects.filter(kind="finding").order_by("id").values_list("at", flat=True)[:20]
    settled = [at for at in last if at >= sent.last_sent_at + timedelta(seconds=5)]
    assert len(settled) >= 2
    assert settled[-1] - settled[0] >= timedelta(seconds=settings.AFTERCALL_ABSENCE_SPACING)
    assert (desk.operation().state, desk.operation().absences) == ("failed_retryable", 1)
    desk.come_to_rest()
    desk.check()


@pytest.mark.case("D3")
@pytest.mark.parametrize("skew", [3600, -3600, 30, -30])
def test_a_beat_with_a_wrong_clock_starts_nothing_early_and_nothing_twice(desk: Desk, skew: float) -> None:
    job = nightly(desk)
    due = desk.clock.now()
    desk.clock.set(due - timedelta(seconds=55))
    desk.worker(do="beat_and_sweep", clock=skew).ended()
    assert not Run.objects.exists(), "it is not due by the database's clock"
    desk.clock.set(due)
    for wrong in (0.0, skew):
        desk.worker(do="beat_and_sweep", clock=wrong).ended()
    assert Run.objects.get().workflow_id.startswith(f"{job.name}@")
    check_ran_once(desk)


@pytest.mark.case("D5")
@pytest.mark.parametrize("left", [0.0, -0.68])
def test_no_time_left_means_no_call_and_not_no_limit(desk: Desk, monkeypatch: pytest.MonkeyPatch, left: float) -> None:
    monkeypatch.setattr(claims, "_send_window", lambda spec: left)
    monkeypatch.setattr(Wire, "check", lambda self: None)  # also for an adapter that does not look at the time itself
    outcome = executor.perform(intent_of(intent("none")), actor=Actor(id=workers.me(), kind="worker"))
    assert outcome.state == "failed_retryable"
    assert desk.sent(desk.operation()) == 0
    monkeypatch.undo()
    desk.come_to_rest()
    assert desk.operation().state == "succeeded"
    desk.check()


def test_a_late_success_after_absence_was_taken_as_proven_is_seen(desk: Desk) -> None:
    """The world lied (a consistent list that was not): the report of the worker that did it outranks it."""
    worker = frozen_at(desk, "keyed", "answered")
    key_hidden = desk.operation()
    desk.world.pay.set(lookup_down=True)
    desk.clock.advance(41)
    reconciler.expire(desk.operation())
    operation = desk.operation()
    transition.transition(
        operation.subject,
        to="failed_retryable",
        version=operation.version,
        patch={"unknown_attempts": [], "reason_code": "absent", "due_at": None},
        after={"not_before": 3600, "due_at": 3600},
        fact=OLGA.fact("absent"),
    )
    worker.thaw()
    worker.go_on("answered")
    worker.ended()
    with pytest.raises(transition.ReportedApplied):
        retrying.retry(key_hidden.pk, actor=OLGA, reason="again")
    desk.sweep()
    operation = desk.operation()
    assert (operation.state, operation.basis, operation.escalation_reason) == (
        "succeeded", "receipt", "applied_after_all",
    )  # fmt: skip
    assert desk.sent(operation) == 1
    assert JournalEntry.objects.filter(kind="late_report").count() == 1
    desk.check_audit()


@pytest.mark.case("D1")
def test_a_claim_settles_once_and_what_it_says_later_is_a_late_report(desk: Desk) -> None:
    open_in("ready", due_at=0)
    claim = executor.claim_again(desk.operation(), actor=OLGA, reason="now")
    receipt = claim.provider.perform(claim.call())
    assert executor.settle(claim, settlement.judge(claim, TimeoutError())).state == "ambiguous"
    assert executor.settle(claim, settlement.judge(claim, receipt)).state == "ambiguous"
    assert JournalEntry.objects.filter(kind="late_report").count() == 1
    desk.come_to_rest()
    assert (desk.operation().state, desk.operation().reason_code) == ("succeeded", "late_report")
    desk.check()
