"""Nothing that was submitted in confidence, or echoed by a provider, can be read anywhere."""

import json
import logging
import subprocess

import pytest

from audit.models import Entry
from console import embedded
from reconciliation import actions, reconciler, spool, sweeping
from reconciliation.executor import perform
from reconciliation.models import JournalEntry, Operation
from reconciliation.providers.base import OutcomeUnknown, Rejected, Unauthorized
from reconciliation.transition import Observed
from tests import database, source
from tests.scripted import AGENT, OLGA, applied, cannot_tell, found, order, row

CANARIES = ("CANARY1", "CANARY2", "CANARY3", "CANARY4", "jane.roe@example.com")
SECRET = {
    "order": "1002", "amount": 4200, "currency": "USD",
    "token": "sk-live-CANARY1", "header": "Bearer CANARY2", "note": "password=CANARY3",
    "callback": {"url": "https://user:CANARY4@hooks.invalid/x", "to": ["jane.roe@example.com"]},
}  # fmt: skip
ECHO = "".join(f"{value} " for value in ("sk-live-CANARY1", "Bearer CANARY2", "password=CANARY3",
               "https://user:CANARY4@hooks.invalid/x", "jane.roe@example.com"))  # fmt: skip


def everything_stored(superuser):
    """The text of every column of every table."""
    tables = superuser.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
    rows = (superuser.execute(f'SELECT t::text FROM "{name}" t').fetchall() for (name,) in tables)
    text = "\n".join(one for table in rows for (one,) in table)
    canonical = b"\n".join(bytes(entry.canonical) for entry in Entry.objects.all())
    return text + canonical.decode()


def leaks(text):
    return [canary for canary in CANARIES if canary in text]


def flows(clerk, clock):
    """Success, failure, unknown, found, mismatch, a bug of the adapter, a late report, a person's actions."""
    answers = {
        "success": applied("r-1", **SECRET),
        "failure": Rejected(ECHO, status=402, excerpt=ECHO, request_id=ECHO),
        "bug": ValueError(ECHO),
        "unknown": OutcomeUnknown(ECHO, excerpt=ECHO),
        "found": OutcomeUnknown("lost"),
        "mismatch": applied("r-9", **{**SECRET, "amount": 1}),
    }
    pks = {}
    for step, answer in answers.items():
        clerk.answers(answer)
        pks[step] = perform(order(step=step, request=SECRET), actor=AGENT).pk
    clerk.sees(found("r-2", **SECRET))
    reconciler.reconcile(pks["found"])
    for sight in (cannot_tell(ECHO), ValueError(ECHO), Unauthorized(ECHO, status=401)):
        clerk.sees(sight)
        reconciler.reconcile(pks["unknown"], actor=OLGA)
    clock.advance(minutes=1)
    sweeping.sweep()
    return pks


@pytest.mark.case("K1")
def test_no_canary_can_be_read_in_any_table_log_or_dump(clerk, clock, caplog, superuser_connection, ledger_db):
    caplog.set_level(logging.DEBUG)
    pks = flows(clerk, clock)
    assert row(pks["success"]).state == row(pks["found"]).state == "succeeded"
    assert clerk.calls[0].request == {**SECRET}
    stored = everything_stored(superuser_connection)
    assert "order" in stored
    assert leaks(stored) == []
    assert leaks(caplog.text) == []
    assert leaks("".join(str(vars(record)) for record in caplog.records)) == []


@pytest.mark.case("K1")
def test_no_canary_is_in_a_dump_of_the_database(clerk, clock, ledger_db):
    tool = embedded.binaries() / "pg_dump"  # of the server's own version
    if not tool.exists():
        pytest.skip("no pg_dump here; the test above reads every column")
    flows(clerk, clock)
    url = ledger_db.superuser().info
    dump = subprocess.run(
        [tool, "--host", url.host, "--port", str(url.port), "--username", url.user, "--dbname", ledger_db.name],
        capture_output=True, text=True, env={"PGPASSWORD": database.server().get("password", "")}, check=True,
    ).stdout  # fmt: skip
    assert "reconciliation_operation" in dump
    assert leaks(dump) == []


@pytest.mark.case("K1")
def test_no_canary_is_in_what_a_person_is_shown_before_he_acts(clerk, clock):
    for pk in flows(clerk, clock).values():
        assert leaks(repr(actions.previews(row(pk), actor=OLGA))) == []


@pytest.mark.case("K1")
def test_a_spooled_receipt_is_sealed(clerk, monkeypatch):
    report = Observed(kind="late_report", data={"note": ECHO})
    path = spool.keep(row(perform(order(request=SECRET), actor=AGENT).pk).subject, report)
    try:
        assert leaks(path.read_bytes().decode()) == []
        assert path.stat().st_mode & 0o077 == 0
    finally:
        path.unlink()


def test_what_is_sealed_opens_to_the_bytes_that_were_accepted(clerk):
    operation = row(perform(order(request=SECRET), actor=AGENT).pk)
    assert operation.request == SECRET


@pytest.mark.case("K3")
def test_an_error_that_echoes_our_header_and_a_customer_is_kept_without_them(shop):
    shop.pay.fault("error_echo", order="1002")
    request = {"order": "1002", "amount": 4200, "currency": "USD", "card": "4242424242424242"}
    pk = perform(order("refund.create", provider="pay", request=request), actor=AGENT).pk
    operation = row(pk)
    assert (operation.state, operation.error_class) == ("failed_terminal", "unauthorized")
    kept = json.loads(JournalEntry.objects.get(operation=operation, kind="not_applied").data)
    whole = json.dumps(kept) + "".join(bytes(entry.canonical).decode() for entry in Entry.objects.all())
    assert "sandbox-token" not in whole
    assert "jane.roe@example.com" not in whole
    assert len(kept["excerpt"]) <= 300
    assert kept["status"] == 401


@pytest.mark.case("K3")
def test_a_huge_error_is_cut(shop):
    shop.pay.fault("huge_error", order="1002")
    request = {"order": "1002", "amount": 4200, "currency": "USD", "card": "4242424242424242"}
    pk = perform(order("refund.create", provider="pay", request=request), actor=AGENT).pk
    assert row(pk).state == "ambiguous"
    assert len(JournalEntry.objects.get(operation_id=pk, kind="no_answer").data) < 1500


def test_no_log_line_of_the_domain_carries_an_exceptions_text():
    for path in source.files("reconciliation", "audit"):
        text = path.read_text()
        assert "log.exception(" not in text, path
        assert "exc_info" not in text, path


def test_there_is_one_operation_a_flow(clerk, clock):
    assert Operation.objects.count() == 0
    assert len(flows(clerk, clock)) == Operation.objects.count()
