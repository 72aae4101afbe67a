"""The database fails at the worst moment: what was sent is never forgotten, and what cannot be claimed is not sent."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.conf import settings as django_settings
from django.db import InterfaceError, OperationalError, connections

from audit.models import Entry
from reconciliation import executor, policy, reconciler, sealing, settling, spool, transition, workers
from reconciliation.actors import Actor
from reconciliation.executor import LedgerUnavailable
from reconciliation.models import JournalEntry, Operation
from reconciliation.providers import base
from reconciliation.providers.http import HttpProvider
from tests.nursery import Desk
from tests.test_kill import WRITING, intent
from tests.worker_driver import intent_of

pytestmark = pytest.mark.processes

ME = Actor(id="agent:1", kind="agent")


@pytest.fixture
def superuser(superuser_connection: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    return superuser_connection


@pytest.fixture(autouse=True)
def _spool_of_this_test(tmp_path: Path, settings: Any) -> None:
    settings.AFTERCALL_SPOOL = tmp_path


def perform(repeat: str = "keyed", **other: Any) -> executor.Outcome:
    return executor.perform(intent_of(intent(repeat, **other)), actor=ME)


def spooled() -> list[Path]:
    return sorted(spool.folder().glob("*.report"))


@contextmanager
def audit_refuses_settlements(superuser: psycopg.Connection[Any]) -> Iterator[None]:
    """Every audit entry of a settlement fails; a claim's does not."""
    superuser.execute(
        """
        CREATE FUNCTION no_audit() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN IF NEW.from_state = 'pending' AND NEW.reason_code <> 'lease_expired' THEN
            RAISE EXCEPTION 'the disk of the audit log is full'; END IF; RETURN NEW; END $$;
        CREATE TRIGGER no_audit BEFORE INSERT ON audit_entry FOR EACH ROW EXECUTE FUNCTION no_audit();
        """
    )
    try:
        yield
    finally:
        superuser.execute("DROP TRIGGER no_audit ON audit_entry; DROP FUNCTION no_audit()")


def refuse_writes(superuser: psycopg.Connection[Any], name: str, how: str) -> None:
    role = django_settings.AFTERCALL_APP_ROLE
    if how == "read_only":
        superuser.execute(f"ALTER ROLE {role} IN DATABASE {name} SET default_transaction_read_only = on")
    elif how == "revoked":
        superuser.execute("ALTER FUNCTION ledger_note(bigint, bigint, jsonb, boolean) RENAME TO ledger_note_away")
        for function in ("ledger_open", "ledger_move_operation", "ledger_note_away"):
            superuser.execute(f"REVOKE EXECUTE ON FUNCTION {function} FROM {role}")
    else:
        superuser.execute(f"REVOKE CONNECT ON DATABASE {name} FROM PUBLIC, {role}")
    hang_up(superuser, name)


def allow_writes(superuser: psycopg.Connection[Any], name: str, how: str) -> None:
    role = django_settings.AFTERCALL_APP_ROLE
    if how == "read_only":
        superuser.execute(f"ALTER ROLE {role} IN DATABASE {name} RESET default_transaction_read_only")
    elif how == "revoked":
        superuser.execute("ALTER FUNCTION ledger_note_away(bigint, bigint, jsonb, boolean) RENAME TO ledger_note")
        for function in ("ledger_open", "ledger_move_operation", "ledger_note"):
            superuser.execute(f"GRANT EXECUTE ON FUNCTION {function} TO {role}")
    else:
        superuser.execute(f"GRANT CONNECT ON DATABASE {name} TO PUBLIC, {role}")
    hang_up(superuser, name)


def hang_up(superuser: psycopg.Connection[Any], name: str) -> None:
    """End every connection of the application, as a restart would."""
    superuser.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND usename = %s",
        [name, django_settings.AFTERCALL_APP_ROLE],
    )
    connections.close_all()


@contextmanager
def writes_refused(superuser: psycopg.Connection[Any], name: str, how: str) -> Iterator[None]:
    refuse_writes(superuser, name, how)
    try:
        yield
    finally:
        allow_writes(superuser, name, how)


HOW = ["read_only", "revoked", "no_connection"]


# The settlement fails


@pytest.mark.parametrize("repeat", WRITING)
def test_a_settlement_whose_audit_entry_fails_keeps_the_receipt_and_never_sends_again(
    desk: Desk, superuser: Any, repeat: str
) -> None:
    with audit_refuses_settlements(superuser):
        outcome = perform(repeat)
        assert (outcome.state, outcome.reason_code) == ("pending", "settlement_failed")
        assert JournalEntry.objects.get(kind="late_report").attempt == 1
        assert perform(repeat).disposition == "in_progress"
        desk.clock.advance(41)
        desk.sweep()
    assert desk.sent(desk.operation()) == 1
    desk.come_to_rest()
    operation = desk.operation()
    assert (operation.state, operation.basis, operation.reason_code) == ("succeeded", "receipt", "late_report")
    assert desk.sent(operation) == 1
    assert not spooled()
    desk.check()


@pytest.mark.case("J1")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("repeat", ["keyed", "none"])
def test_a_database_that_refuses_everything_after_the_claim_leaves_a_sealed_file(
    desk: Desk, superuser: Any, ledger_db: Any, monkeypatch: pytest.MonkeyPatch, repeat: str, how: str
) -> None:
    plain = executor._send

    def send_and_lose_the_database(claim: executor.Claim) -> Any:
        answer = plain(claim)
        refuse_writes(superuser, ledger_db.name, how)
        return answer

    monkeypatch.setattr(executor, "_send", send_and_lose_the_database)
    try:
        assert perform(repeat).reason_code == "settlement_failed"
        (file,) = spooled()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        for plain_text in (b"1002", b"late_report", b"applied"):
            assert plain_text not in file.read_bytes()
        monkeypatch.undo()
        with suppress(LedgerUnavailable):
            assert perform(repeat).disposition == "in_progress", "a database that only reads can still say so"
        if how != "revoked":
            assert spool.bring_in() == 0
        assert spooled() == [file], "it waits"
    finally:
        monkeypatch.undo()
        allow_writes(superuser, ledger_db.name, how)
    assert desk.world.count() == 1
    desk.come_to_rest()
    operation = desk.operation()
    assert (operation.state, operation.reason_code) == ("succeeded", "late_report")
    assert not spooled()
    assert desk.sent(operation) == 1
    desk.check()


@pytest.mark.case("J1")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("known", [True, False])
def test_where_the_claim_cannot_be_written_nothing_is_sent(
    desk: Desk, superuser: Any, ledger_db: Any, how: str, known: bool
) -> None:
    """Also by a process that the ledger does not know yet."""
    if known:
        workers.me()
    with writes_refused(superuser, ledger_db.name, how), pytest.raises(LedgerUnavailable):
        perform()
    assert sum(len(server.requests()) for server in desk.world.servers.values()) == 0
    assert Operation.objects.count() == 0
    assert perform().state == "succeeded"
    desk.check()


def test_a_refused_report_of_a_stale_worker_is_spooled(
    desk: Desk, superuser: Any, ledger_db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settlement is refused for its generation, and right after that the database goes away."""
    plain = settling._already_written

    def lost(*args: Any) -> bool:
        answer = plain(*args)
        refuse_writes(superuser, ledger_db.name, "no_connection")
        return answer

    worker = desk.worker(do="perform", intent=intent("none"), stop_at=["claimed"])
    worker.reached("claimed")
    worker.kill()
    operation = desk.operation()
    provider = executor.registry.provider("mail")
    claim = executor.Claim(
        subject=operation.subject, tenant="acme", generation=1, attempt=1, nonce=operation.claim_nonce,
        provider=provider, action="message.send", spec=provider.actions["message.send"], key=operation.key,
        request=operation.request, unknown=(), identical_replays=0, last_error="",
        send_by=policy.boot_seconds() + 10, at=operation.last_sent_at, first_sent_at=None, same_key_until=None,
    )  # fmt: skip
    desk.clock.advance(41)
    reconciler.expire(operation)
    monkeypatch.setattr(settling, "_already_written", lost)
    try:
        assert executor.dispatch(claim).reason_code == "settlement_failed"
        assert len(spooled()) == 1
    finally:
        allow_writes(superuser, ledger_db.name, "no_connection")
    desk.come_to_rest()
    assert desk.operation().state == "succeeded"
    desk.check()


# COMMIT errors


def _dies_after(superuser: Any, name: str, plain: Any) -> Any:
    """The statement commits, and the connection dies before the answer is read."""

    def call(**named: Any) -> Any:
        plain(**named)
        hang_up(superuser, name)
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    return call


def test_a_commit_that_errors_is_read_back_by_its_nonce_and_sent_once(
    desk: Desk, superuser: Any, ledger_db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.me()
    monkeypatch.setattr(transition, "open_operation", _dies_after(superuser, ledger_db.name, transition.open_operation))
    assert perform("none").state == "succeeded"
    assert desk.sent(desk.operation()) == 1
    desk.check()


def test_a_connection_that_dies_before_the_claim_is_written_sends_nothing(
    desk: Desk, superuser: Any, ledger_db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.me()
    monkeypatch.setattr(transition, "open_operation", _dies_after(superuser, ledger_db.name, lambda **_: None))
    with pytest.raises(LedgerUnavailable, match="not written"):
        perform("none")
    assert desk.world.count() == 0
    assert Operation.objects.count() == 0


def test_a_nonce_of_another_claim_is_not_ours(
    desk: Desk, superuser: Any, ledger_db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else claimed the same intent just before our connection died."""
    workers.me()
    worker = desk.worker(do="perform", intent=intent("none"), stop_at=["claimed"])
    worker.reached("claimed")
    monkeypatch.setattr(transition, "open_operation", _raise_operational)
    with pytest.raises(LedgerUnavailable):
        perform("none")
    monkeypatch.undo()
    worker.go_on("claimed")
    worker.ended()
    assert desk.sent(desk.operation()) == 1


def _raise_operational(**_: Any) -> None:
    raise OperationalError("server closed the connection unexpectedly")


@pytest.mark.parametrize("error", [OperationalError, InterfaceError])
def test_a_settlement_that_landed_although_it_errored_is_not_reported_as_late(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    plain = settling._write_settlement
    tries = []

    def landed_but_errored(*args: Any) -> Any:
        moved = plain(*args)
        tries.append(moved)
        raise error("the connection was lost")

    monkeypatch.setattr(settling, "_write_settlement", lambda *a: plain(*a) if tries else landed_but_errored(*a))
    outcome = perform()
    assert (outcome.state, outcome.replayed) == ("succeeded", True)
    assert not JournalEntry.objects.filter(kind="late_report").exists()
    assert not Entry.objects.filter(event="refused").exists()
    desk.check()


@pytest.mark.parametrize("error", [OperationalError, InterfaceError])
def test_a_settlement_that_errored_once_is_written_the_second_time(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    plain, tries = settling._write_settlement, []

    def errored(*args: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise error("the connection was lost")
        return plain(*args)

    monkeypatch.setattr(settling, "_write_settlement", errored)
    outcome = perform()
    assert (outcome.state, outcome.result["amount"]) == ("succeeded", 4200)
    desk.check()


# Answers and files that nothing can hold


@pytest.mark.parametrize(
    "spoil",
    [{"order": "10\x0002"}, {"order": "\ud800"}, {"order": float("nan")}, {"order": {1, 2}}, {"cost": float("nan")}],
    ids=str,
)
def test_an_answer_that_no_ledger_can_hold_is_settled_all_the_same(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, spoil: dict[str, Any]
) -> None:
    """An adapter of somebody else may hand us anything."""
    plain = HttpProvider.applied

    def spoilt(self: HttpProvider, *args: Any, **named: Any) -> base.Receipt:
        receipt = plain(self, *args, **named)
        return replace(receipt, observed={**receipt.observed, **spoil}, result={**receipt.result, **spoil})

    monkeypatch.setattr(HttpProvider, "applied", spoilt)
    assert perform("none").state in ("ambiguous", "succeeded")
    monkeypatch.undo()
    desk.come_to_rest()
    operation = desk.operation()
    assert operation.state == "succeeded" or operation.escalated_at
    assert desk.sent(operation) == 1
    assert not spooled()
    desk.check()


def test_a_report_that_nothing_can_take_does_not_stand_in_the_way_of_the_others(desk: Desk) -> None:
    perform()
    operation = desk.operation()
    entry = transition.Observed(kind="receipt", attempt=1, generation=1, data={"status": "applied"})
    ours = spool.keep(operation.subject, entry)
    unknown = spool.keep(replace(operation.subject, pk=10**9), entry)
    torn = spool.folder() / "0torn.report"
    torn.write_bytes(ours.read_bytes()[:40])
    nul = spool.folder() / "0nul.report"
    row = {**entry.row(), "data": json.dumps({"status": "a\x00"})}
    nul.write_text(sealing.seal_bytes(json.dumps({"operation": operation.pk, "entry": row}).encode()))
    bad = spool.folder() / "0bad.report"
    bad.write_text(sealing.seal_bytes(b'{"operation": 1}'))
    assert spool.bring_in() == 2, "ours, and the one whose NUL was replaced"
    assert not spooled()
    assert {path.stem for path in spool.folder().glob("*.unreadable")} >= {unknown.stem, "0torn", "0bad"}
    assert JournalEntry.objects.filter(kind="late_report").exists()


def test_a_process_that_finds_a_report_taken_by_another_goes_on(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    perform()
    spool.keep(desk.operation().subject, transition.Observed(kind="receipt", attempt=1, data={}))
    monkeypatch.setattr(Path, "read_bytes", _gone)
    assert spool.bring_in() == 0


def _gone(self: Path) -> bytes:
    raise FileNotFoundError(self)


def test_what_may_no_longer_be_sent_with_its_key_goes_to_a_person(desk: Desk) -> None:
    desk.world.pay.fault("unavailable")
    assert perform().state == "failed_retryable"
    desk.clock.advance(hours=30)
    desk.come_to_rest()
    operation = desk.operation()
    assert (operation.state, operation.escalation_reason) == ("failed_retryable", "key_forgotten")
    assert desk.sent(operation) == 1
    desk.check()
