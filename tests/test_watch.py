"""Signals: noticed once, shown until they are over, told once each way, and never in the way of anything."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management import CommandError, call_command

from reconciliation import tasks, watch
from reconciliation.models import Signal, Tick
from tests import cast
from tests.database import Clock
from tests.scripted import Clerk
from tests.test_limits import perform, put
from tests.test_same_identity import Crowd

TOLD: list[dict[str, Any]] = []


def hook(payload: dict[str, Any]) -> None:
    TOLD.append(payload)


def broken_hook(payload: dict[str, Any]) -> None:
    TOLD.append(payload)
    raise RuntimeError("the pager is down")


@pytest.fixture
def told(settings: Any) -> list[dict[str, Any]]:
    settings.AFTERCALL_NOTIFY = "tests.test_watch.hook"
    TOLD.clear()
    return TOLD


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


def test_a_run_that_hangs_is_a_signal(ledger_db: Any, clock: Clock) -> None:
    run = cast.run()
    clock.advance(minutes=5)
    watch.look()
    assert open_now()["run_lease_overdue"] == f"run:{run.pk}"
    clock.advance(hours=2)
    watch.look()
    assert open_now()["run_stuck"] == f"run:{run.pk}"


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


def test_the_guard_against_mass_triggering_raises_the_alarm(
    clerk: Clerk, settings: Any, told: list[dict[str, Any]]
) -> None:
    settings.AFTERCALL_MASS_LIMIT = 2
    for number in range(4):
        perform(number)
    watch.look()
    assert [(each["event"], each["kind"], each["tenant"]) for each in told] == [("opened", "mass_trigger", "acme")]


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


def test_the_hook_hears_once_of_the_opening_and_once_of_the_end(
    ledger_db: Any, clock: Clock, told: list[dict[str, Any]]
) -> None:
    lost = cast.operation(state="pending", hidden={"card": "sk-live-CANARY1"})
    clock.advance(minutes=2)
    for _ in range(3):
        watch.look()
    cast._move(lost, "ambiguous", {"unknown_attempts": [1], "due_at": clock.now()}, "worker_lost")
    for _ in range(3):
        watch.look()
    mine = [each for each in told if each["kind"] == "lease_overdue"]
    assert [each["event"] for each in mine] == ["opened", "cleared"]
    assert mine[0]["subject"] == f"operation:{lost.pk}"
    text = str(told)
    assert "CANARY" not in text
    assert lost.key not in text


def test_a_hook_that_fails_breaks_nothing_and_is_not_called_again(ledger_db: Any, clock: Clock, settings: Any) -> None:
    settings.AFTERCALL_NOTIFY = "tests.test_watch.broken_hook"
    TOLD.clear()
    cast.operation(state="pending")
    clock.advance(minutes=2)
    tasks.beat_once()
    watch.look()
    assert Tick.objects.filter(name="beat").exists()
    assert [each["kind"] for each in TOLD].count("lease_overdue") == 1


def test_a_condition_that_fails_hides_no_other(ledger_db: Any, clock: Clock, monkeypatch: Any) -> None:
    bad = watch.Condition("broken", "Broken", "SELECT no_such_column FROM reconciliation_run")
    monkeypatch.setattr(watch, "CONDITIONS", (bad, *watch.CONDITIONS))
    cast.operation(state="pending")
    clock.advance(minutes=2)
    watch.look()
    assert "lease_overdue" in open_now()


def test_beats_side_by_side_open_one_signal_and_tell_it_once(
    ledger_db: Any, clock: Clock, told: list[dict[str, Any]]
) -> None:
    cast.operation(state="pending")
    clock.advance(minutes=2)
    crowd = Crowd(6)
    answers = crowd.all_at_once(watch.look)
    crowd.leave()
    assert all(isinstance(answer, tuple) for answer in answers), answers
    assert Signal.objects.filter(kind="lease_overdue").count() == 1
    assert [each["kind"] for each in told].count("lease_overdue") == 1


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


def test_runs_left_out_for_overlap_are_a_signal(ledger_db: Any, superuser_connection: Any) -> None:
    superuser_connection.execute("SET session_replication_role = replica")
    job = _job(superuser_connection, "nightly")
    for day in (2, 1):
        _slot(superuser_connection, job, day, state="skipped_overlap")
    watch.look()
    assert open_now()["job_skipped"] == f"job:{job}"
    assert Signal.objects.get(kind="job_skipped").detail == "nightly: 2 left out"
