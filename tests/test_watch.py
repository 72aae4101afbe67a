"""Signals: noticed once and shown until they are over, each condition by itself. How they are told: test_telling.py."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone
from django_q.models import OrmQ

from reconciliation import registry, retention, schedules, sweeping, tasks, transition, watch
from reconciliation.actions import Verdict
from reconciliation.actors import SYSTEM
from reconciliation.models import Approval, Job, Limit, Run, Signal
from tests import cast, timetable
from tests.database import Clock
from tests.scripted import Clerk
from tests.test_approvals import CLEO, asked, press
from tests.test_limits import perform, put, release
from tests.test_same_identity import Crowd
from tests.timetable import OLGA


def open_now() -> dict[str, str]:
    """Kind -> subject of what is open."""
    return dict(Signal.objects.filter(cleared_at=None).values_list("kind", "subject"))


def test_nothing_is_signalled_where_all_is_well(ledger_db: Any) -> None:
    cast.operation(state="succeeded")
    cast.run()
    assert watch.look() == (0, 0)
    assert not Signal.objects.exists()


def test_an_expired_lease_that_nobody_looks_at_is_a_signal_until_somebody_does(ledger_db: Any, clock: Clock) -> None:
    lost = cast.operation(state="pending")
    clock.advance(minutes=3)
    watch.look()
    assert open_now()["lease_overdue"] == f"operation:{lost.pk}"
    signal = Signal.objects.get(kind="lease_overdue")
    assert (signal.since, signal.tenant) == (lost.lease_until, "t_acme")
    cast._move(lost, "ambiguous", {"unknown_attempts": [1], "due_at": clock.now()}, "worker_lost")
    watch.look()
    assert "lease_overdue" not in open_now()
    assert Signal.objects.get(kind="lease_overdue").cleared_at is not None


# Runs without a step forward


def taken_again(run: Run, to: str = "running") -> Run:
    """The run as another worker took it after the last one died."""
    transition.transition(
        run.subject,
        to=to,
        version=run.version,
        patch={"generation": run.generation + 1, "lease_owner": "w-4"},
        after={"lease_until": 60, "due_at": 60},
        fact=SYSTEM.fact("taken"),
    )
    return Run.objects.get(pk=run.pk)


def waiting_run(**columns: Any) -> Run:
    """A run that is due, and that nobody has taken yet."""
    row = {"tenant": "t_acme", "workflow_type": "damaged_item", "workflow_id": f"W-{uuid.uuid4().hex[:8]}"}
    row |= {"workflow_version": 1, "business_object": "1002", "state": "pending", "input_fingerprint": "fp1-x"}
    moved = transition.open_run(row=row | columns, after={"due_at": 0}, fact=SYSTEM.fact("started"))
    assert moved is not None
    return Run.objects.get(pk=moved.pk)


def seen_of(run: Run) -> dict[str, Any]:
    """Kind -> since, of what a look tells of this run."""
    watch.look()
    return dict(Signal.objects.filter(cleared_at=None, subject=f"run:{run.pk}").values_list("kind", "since"))


def test_a_run_that_hangs_is_a_signal(ledger_db: Any, clock: Clock) -> None:
    run = cast.run()
    clock.advance(minutes=5)
    assert "run_lease_overdue" in seen_of(run)
    clock.advance(hours=2)
    assert "run_stuck" in seen_of(run)


@pytest.mark.parametrize("state", ["running", "uncertain", "compensating"])
def test_a_run_whose_workers_die_again_and_again_gets_no_younger_by_being_taken(
    ledger_db: Any, clock: Clock, state: str
) -> None:
    run = cast.run()
    begun = run.created_at
    for _ in range(7):
        clock.advance(minutes=10)
        run = cast.run_stands(taken_again(run), "uncertain") if state == "uncertain" else taken_again(run, to=state)
        assert "run_stuck" not in seen_of(run) or clock.now() - begun > timedelta(hours=1)
    assert seen_of(run)["run_stuck"] == begun


def test_a_step_that_was_sent_a_choice_and_a_persons_press_are_steps_forward_and_a_look_up_is_none(
    ledger_db: Any, clock: Clock
) -> None:
    run, moments = cast.run(), []

    def fifty_minutes_later() -> Run:
        clock.advance(minutes=50)
        moments.append(clock.now())
        return taken_again(run)

    run = fifty_minutes_later()
    sent = cast.operation(run=run, state="ambiguous", sent=0)
    run = fifty_minutes_later()
    assert "run_stuck" not in seen_of(run)
    row = {"step": "choose", "version": 1, "valid": True, "problem": "", "reason": "", "value_shown": "{}"}
    transition.choose(run.subject, generation=run.generation, row=row | {"value_sealed": ""})
    run = fifty_minutes_later()
    assert "run_stuck" not in seen_of(run)
    transition.refuse(subject=run.subject, tenant=run.tenant, fact=OLGA.fact("not_allowed"))
    run = fifty_minutes_later()
    cast._move(sent, None, {"look_ups": 1}, "looked", (cast.finding("cannot_tell"),))
    assert "run_stuck" not in seen_of(run)
    clock.advance(minutes=15)
    assert seen_of(run)["run_stuck"] >= moments[2]


def test_a_run_that_no_worker_has_a_handler_for_is_a_signal_after_an_hour(ledger_db: Any, clock: Clock) -> None:
    run = waiting_run()
    for _ in range(6):
        sweeping.sweep()
        clock.advance(minutes=9)
    assert "run_not_going_on" not in seen_of(run)
    for _ in range(2):
        sweeping.sweep()
        clock.advance(minutes=9)
    assert seen_of(run)["run_not_going_on"] == run.created_at
    assert "damaged_item version 1" in Signal.objects.get(kind="run_not_going_on").detail
    taken_again(Run.objects.get(pk=run.pk))
    assert "run_not_going_on" not in seen_of(run)


@pytest.mark.parametrize(
    ("state", "columns"),
    [
        ("awaiting_approval", {}),
        ("failed_retryable", {}),  # held until somebody presses retry
        ("failed_retryable", {"due_at": timedelta(hours=3), "not_before": timedelta(hours=3)}),
    ],
)
def test_a_run_that_waits_for_a_person_or_for_its_time_is_no_signal(
    ledger_db: Any, clock: Clock, state: str, columns: dict[str, timedelta]
) -> None:
    run = cast.run()
    cast.operation(run=run, state=state, **{name: clock.now() + after for name, after in columns.items()})
    run = cast.run_stands(run, "pending", waiting_for="issue_refund", due_at=clock.now() + timedelta(hours=3))
    clock.advance(hours=2)
    assert seen_of(run) == {}


def test_a_run_whose_step_waits_for_a_limit_is_told_of_with_the_limit_alone(
    ledger_db: Any, clock: Clock, superuser_connection: Any
) -> None:
    run = cast.run()
    step = cast.operation(run=run, state="ready", due_at=clock.now())
    run = cast.run_stands(run, "pending", due_at=clock.now())
    put()
    superuser_connection.execute(
        "INSERT INTO reconciliation_heldback (operation_id, limit_id, code, first_at, last_at, times)"
        " SELECT %s, id, 'stopped', aftercall_now(), aftercall_now(), 1 FROM reconciliation_limit",
        [step.pk],
    )
    clock.advance(hours=2)
    assert seen_of(run) == {}
    assert "held_for_long" in open_now()
    release(Limit.objects.get())
    assert seen_of(run) == {}, "it can be taken from now on"
    clock.advance(minutes=61)
    assert set(seen_of(run)) == {"run_not_going_on"}


def test_a_run_that_nobody_takes_after_the_consent_is_a_signal_an_hour_later(ledger_db: Any, clock: Clock) -> None:
    run = cast.run()
    step = cast.operation(run=run, state="awaiting_approval")
    run = cast.run_stands(run, "awaiting_approval", waiting_for="issue_refund")
    clock.advance(hours=3)
    assert seen_of(run) == {}
    cast._move(step, "ready", {"due_at": clock.now()}, "approved")
    assert seen_of(run) == {}, "it can be taken from now on"
    clock.advance(minutes=61)
    assert set(seen_of(run)) == {"run_not_going_on"}


def test_a_run_that_waits_long_for_what_another_one_holds_is_a_signal_of_its_own(ledger_db: Any, clock: Clock) -> None:
    holder, second = waiting_run(lock="order-1002"), waiting_run(lock="order-1002")
    elsewhere = waiting_run(lock="order-1002", tenant="t_beta")
    taken_again(holder)
    clock.advance(minutes=70)
    assert set(seen_of(second)) == {"run_locked_out"}
    assert set(seen_of(elsewhere)) == {"run_not_going_on"}
    cast.run_stands(Run.objects.get(pk=holder.pk), "succeeded")
    assert seen_of(second) == {}, "it can be taken from now on"
    clock.advance(minutes=61)
    assert set(seen_of(second)) == {"run_not_going_on"}


def test_runs_that_have_ended_are_not_read_at_every_look(ledger_db: Any, superuser_connection: Any) -> None:
    superuser_connection.execute("SET enable_seqscan = off")
    moments = dict.fromkeys(("now", "late", "stuck", "soon", "day", "month"), "2026-11-30T00:00Z")
    for condition in watch.CONDITIONS:
        if "standing" in condition.sql or condition.kind == "run_lease_overdue":
            statement = "EXPLAIN " + watch._WRITE.replace("{sql}", condition.sql)
            plan = superuser_connection.execute(statement, {**moments, "kind": condition.kind, "most": 1}).fetchall()
            assert "run_open" in str(plan), condition.kind


# Outcomes, keys, approvals, due work


def test_a_key_that_will_soon_be_forgotten_is_a_signal_before_and_not_after(ledger_db: Any, clock: Clock) -> None:
    unknown = cast.operation(state="ambiguous", sent=0)
    watch.look()
    assert "key_soon_forgotten" not in open_now()
    clock.advance(hours=23, minutes=45)
    watch.look()
    assert open_now()["key_soon_forgotten"] == f"operation:{unknown.pk}"
    assert open_now()["unknown_long"] == f"operation:{unknown.pk}"
    clock.advance(hours=1)
    watch.look()
    assert "key_soon_forgotten" not in open_now()


def test_a_request_that_will_soon_expire_is_a_signal_and_so_is_one_that_did_for_a_day(
    clerk: Clerk, clock: Clock
) -> None:
    asked()
    approval = Approval.objects.get()
    subject = f"approval:{approval.pk}"
    clock.set(approval.expires_at - timedelta(minutes=31))
    watch.look()
    assert "approval_expiring" not in open_now()
    clock.advance(minutes=2)
    watch.look()
    assert open_now()["approval_expiring"] == subject
    assert "approval_expired" not in open_now()
    clock.set(approval.expires_at)
    sweeping.sweep()
    watch.look()
    assert "approval_expiring" not in open_now()
    assert open_now()["approval_expired"] == subject
    assert Signal.objects.get(kind="approval_expired").since == approval.expires_at
    clock.advance(hours=25)
    watch.look()
    assert "approval_expired" not in open_now()


def test_a_request_that_a_person_decided_does_not_count_as_unanswered(clerk: Clerk, clock: Clock) -> None:
    asked()
    approval = Approval.objects.get()
    assert press("deny", approval, CLEO).verdict == Verdict.DONE
    for moment in (approval.expires_at - timedelta(minutes=1), approval.expires_at + timedelta(minutes=1)):
        clock.set(moment)
        watch.look()
        assert not {"approval_expiring", "approval_expired"} & set(open_now())


def test_work_that_is_due_and_not_taken_is_one_signal_with_its_number(ledger_db: Any, clock: Clock) -> None:
    first = cast.operation(state="ambiguous", sent=1)
    cast.operation(state="ambiguous", sent=1)
    waiting_run()
    clock.set(first.due_at + timedelta(seconds=watch.OVERDUE.total_seconds() - 5))
    watch.look()
    assert Signal.objects.get(kind="overdue").detail == "1 due"  # the run: it has been due since it was started
    clock.advance(minutes=5)
    watch.look()
    assert Signal.objects.get(kind="overdue").detail == "3 due"
    sweeping.sweep()
    watch.look()
    assert "overdue" not in open_now()


def test_a_wake_up_that_nobody_takes_is_a_signal_and_one_that_a_worker_has_is_none(ledger_db: Any) -> None:
    taken = {"key": "aftercall", "payload": "x", "lock": timezone.now() + timedelta(minutes=3)}
    OrmQ.objects.create(**taken)
    OrmQ.objects.create(**{**taken, "lock": timezone.now() - timedelta(minutes=1)})
    watch.look()
    assert "queue_old" not in open_now()
    OrmQ.objects.create(**{**taken, "lock": timezone.now() - timedelta(minutes=3)})
    watch.look()
    assert open_now()["queue_old"] == "queue"
    OrmQ.objects.filter(lock__lt=timezone.now()).delete()
    watch.look()
    assert "queue_old" not in open_now()


def test_the_guard_against_mass_triggering_raises_the_alarm(clerk: Clerk, settings: Any) -> None:
    settings.AFTERCALL_MASS_LIMIT = 2
    for number in range(4):
        perform(number)
    watch.look()
    assert list(Signal.objects.values_list("kind", "tenant")) == [("mass_trigger", "acme")]


def test_receipts_on_disk_are_a_signal(ledger_db: Any, settings: Any, tmp_path: Any) -> None:
    settings.AFTERCALL_SPOOL = tmp_path
    (tmp_path / "a.report").write_text("x")
    watch.look()
    assert Signal.objects.get(kind="spool_waits").detail == "1 reports wait, 0 cannot be read"


def test_what_waits_long_for_a_limit_is_one_signal_for_the_limit(clerk: Clerk, clock: Clock) -> None:
    put()
    perform(1), perform(2)
    clock.advance(hours=2)
    watch.look()
    assert Signal.objects.get(kind="held_for_long").detail == "2 wait"


def test_a_beat_that_was_silent_is_noticed_from_outside(ledger_db: Any, clock: Clock, capsys: Any) -> None:
    tasks.tick("beat", by="w-1", handled=0)
    clock.advance(minutes=5)
    with pytest.raises(CommandError, match="open"):
        call_command("watch")
    assert "No beat" in capsys.readouterr().out
    tasks.tick("beat", by="w-1", handled=0)
    call_command("watch")


# Many of a kind


def test_many_of_one_tenant_hide_none_of_another_and_are_counted(
    ledger_db: Any, clock: Clock, monkeypatch: Any
) -> None:
    monkeypatch.setattr(watch, "MOST", 2)
    mine = [f"operation:{cast.operation(state='pending').pk}" for _ in range(5)]
    theirs = cast.operation(state="pending", tenant="t_beta")
    clock.advance(minutes=3)
    watch.look()
    signals = Signal.objects.filter(kind="lease_overdue", cleared_at=None)
    told = {signal.subject: (signal.tenant, signal.detail) for signal in signals}
    assert set(told) == {*mine[:2], f"operation:{theirs.pk}", "more:t_acme"}
    assert told["more:t_acme"] == ("t_acme", "and 3 more")
    page = cast.client(cast.people()["vi_eve"]).get("/health").content.decode()
    assert (page.count("A lease ran out"), "and 3 more" in page, "more:" in page) == (3, True, False)
    watch.look()
    assert not Signal.objects.exclude(cleared_at=None).exists()


def test_what_still_holds_is_not_over_because_older_ones_came_before_it(
    ledger_db: Any, clock: Clock, monkeypatch: Any, superuser_connection: Any
) -> None:
    monkeypatch.setattr(watch, "MOST", 2)
    lost = [cast.operation(state="pending") for _ in range(3)]
    clock.advance(minutes=3)
    watch.look()
    superuser_connection.execute(  # an older one that was not seen before
        "UPDATE reconciliation_operation SET lease_until = lease_until - interval '1 hour' WHERE id = %s", [lost[2].pk]
    )
    watch.look()
    still = Signal.objects.filter(kind="lease_overdue", cleared_at=None).values_list("subject", flat=True)
    assert set(still) == {f"operation:{one.pk}" for one in lost}
    assert Signal.objects.get(subject="more:t_acme").cleared_at is not None
    cast._move(lost[0], "ambiguous", {"unknown_attempts": [1], "due_at": clock.now()}, "worker_lost")
    watch.look()
    assert Signal.objects.get(kind="lease_overdue", subject=f"operation:{lost[0].pk}").cleared_at is not None
    assert Signal.objects.filter(kind="lease_overdue", cleared_at=None).count() == 2


def test_a_condition_that_fails_hides_no_other(ledger_db: Any, clock: Clock, monkeypatch: Any) -> None:
    bad = watch.Condition("broken", "Broken", "SELECT no_such_column FROM reconciliation_run")
    monkeypatch.setattr(watch, "CONDITIONS", (bad, *watch.CONDITIONS))
    cast.operation(state="pending")
    clock.advance(minutes=2)
    watch.look()
    assert "lease_overdue" in open_now()


def test_beats_side_by_side_open_one_signal(ledger_db: Any, clock: Clock) -> None:
    for _ in range(20):
        cast.operation(state="pending")
    clock.advance(minutes=2)
    crowd = Crowd(6)
    answers = crowd.all_at_once(watch.look)
    crowd.leave()
    assert all(isinstance(answer, tuple) for answer in answers), answers
    assert Signal.objects.filter(kind="lease_overdue").count() == 20
    assert sum(opened for opened, _cleared in answers) == Signal.objects.count()


def test_the_beat_watches_at_a_modest_pace(ledger_db: Any, clock: Clock, monkeypatch: Any) -> None:
    looks: list[int] = []
    monkeypatch.setattr(watch, "look", lambda: (looks.append(1), (0, 0))[1])
    for _ in range(5):
        tasks.beat_once()
    assert len(looks) == 1
    clock.advance(seconds=tasks.WATCH_EVERY)
    tasks.beat_once()
    assert len(looks) == 2


def _job(superuser: Any, name: str) -> int:
    cursor = superuser.execute(
        "INSERT INTO reconciliation_job (tenant, name, kind, expression, zone, anchor, workflow, input_shown,"
        " input_sealed, missed, repeats_accepted, overlap, enabled, problem, version, zone_data, changed_by,"
        " created_at, updated_at) VALUES ('t_acme', %s, 'cron', '0 9 * * *', 'UTC', now(), 'w', '{}', '',"
        " 'latest_only', false, 'skip', true, '', 1, '2026b', 'x', now(), now()) RETURNING id",
        [name],
    )
    return int(cursor.fetchone()[0])


def _slot(superuser: Any, job: int, day: int, *, state: str = "started", run: int | None = None) -> None:
    superuser.execute(
        "INSERT INTO reconciliation_slot (job_id, scheduled_for, local, shifted, manual, state, reason_code, count,"
        " run_id, window_start, open, created_at, updated_at) VALUES (%s, now() - %s * interval '1 day', %s, false,"
        " false, %s, '', 1, %s, now(), false, now(), now())",
        [job, day, f"day {day}", state, run],
    )


def test_a_job_that_fails_three_times_in_a_row_is_a_signal_and_one_good_run_ends_it(
    ledger_db: Any, superuser_connection: Any
) -> None:
    superuser_connection.execute("SET session_replication_role = replica")
    job = _job(superuser_connection, "nightly")
    for day in (4, 3, 2):
        _slot(superuser_connection, job, day, run=cast.run_stands(cast.run(), "failed").pk)
    watch.look()
    assert open_now()["job_failing"] == f"job:{job}"
    _slot(superuser_connection, job, 1, run=cast.run_stands(cast.run(), "succeeded").pk)
    watch.look()
    assert "job_failing" not in open_now()


def test_a_job_that_runs_once_a_year_still_fails_three_times_in_a_row_when_its_runs_were_pruned(
    ledger_db: Any, superuser_connection: Any, clock: Clock
) -> None:
    superuser_connection.execute("SET session_replication_role = replica")
    job = _job(superuser_connection, "yearly")
    for day in (4, 3, 2):
        _slot(superuser_connection, job, day, run=cast.run_stands(cast.run(), "failed").pk)
    clock.advance(days=300)
    assert retention.tend().pruned["run"] == 3
    watch.look()
    assert open_now()["job_failing"] == f"job:{job}"
    _slot(superuser_connection, job, 1, run=cast.run_stands(cast.run(), "succeeded").pk)
    clock.advance(days=300)
    assert retention.tend().pruned["run"] == 1
    watch.look()
    assert "job_failing" not in open_now()


@pytest.fixture
def office(clerk: Clerk, settings: Any) -> Any:
    settings.AFTERCALL_WORKFLOWS = ["tests.timetable.WORKFLOWS"]
    registry.forget()
    yield clerk
    registry.forget()


def test_a_job_whose_workflow_is_not_here_is_a_signal_until_it_starts(office: Any, clock: Clock, settings: Any) -> None:
    nightly = timetable.job(at=clock.now(), clock=clock, tenant="t_acme")
    due = nightly.next_at
    settings.AFTERCALL_WORKFLOWS = []
    registry.forget()
    clock.set(due + timedelta(seconds=30))
    timetable.tick()
    watch.look()
    assert "job_cannot_start" not in open_now(), "a deployment that is being rolled out takes a minute"
    clock.set(due + timedelta(seconds=62))
    timetable.tick()
    watch.look()
    assert open_now()["job_cannot_start"] == f"job:{nightly.pk}"
    signal = Signal.objects.get(kind="job_cannot_start")
    assert (signal.since, signal.tenant, signal.detail) == (due, "t_acme", "nightly: no handler")
    settings.AFTERCALL_WORKFLOWS = ["tests.timetable.WORKFLOWS"]
    registry.forget()
    timetable.tick()
    watch.look()
    assert "job_cannot_start" not in open_now()


def test_a_job_whose_workflow_refuses_three_starts_is_a_signal_and_one_start_ends_it(
    office: Any, clock: Clock, monkeypatch: Any
) -> None:
    nightly = timetable.job(at=clock.now(), clock=clock, tenant="t_acme")
    monkeypatch.setattr(schedules, "input_of", lambda job, slot: {"order": "1002"})  # what it needs is not in it
    moments = []
    for number in (1, 2, 3):
        assert "job_cannot_start" not in open_now(), number
        moments.append(Job.objects.get().next_at)
        clock.set(moments[-1] + timedelta(seconds=1))
        timetable.tick()
        watch.look()
    assert [slot.state for slot in timetable.slots(nightly)] == ["not_started"] * 3
    assert open_now()["job_cannot_start"] == f"job:{nightly.pk}"
    assert Signal.objects.get(kind="job_cannot_start").since == moments[0]
    monkeypatch.undo()
    clock.set(Job.objects.get().next_at + timedelta(seconds=1))
    timetable.tick()
    watch.look()
    assert "job_cannot_start" not in open_now()


def test_a_signal_of_a_job_leads_to_its_page(ledger_db: Any, superuser_connection: Any) -> None:
    eve = cast.client(cast.people()["vi_eve"])
    superuser_connection.execute("SET session_replication_role = replica")
    job = _job(superuser_connection, "nightly")
    _slot(superuser_connection, job, 1, state="skipped_overlap")
    watch.look()
    assert f'<a href="/schedules/{job}">job:{job}</a>' in eve.get("/health").content.decode()
    assert eve.get(f"/schedules/{job}").status_code == 200


def test_runs_left_out_for_overlap_are_a_signal(ledger_db: Any, superuser_connection: Any) -> None:
    superuser_connection.execute("SET session_replication_role = replica")
    job = _job(superuser_connection, "nightly")
    for day in (2, 1):
        _slot(superuser_connection, job, day, state="skipped_overlap")
    watch.look()
    assert open_now()["job_skipped"] == f"job:{job}"
    assert Signal.objects.get(kind="job_skipped").detail == "nightly: 2 left out"
