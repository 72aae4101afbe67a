"""The log against the true ledger: clean after eight writers, and a tail or subject that went missing is found."""

import threading
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from audit.models import Entry
from reconciliation.models import Operation
from tests import cast


def verified():
    """The exit code of audit_verify as it is set up here, and what it said."""
    said = StringIO()
    try:
        call_command("audit_verify", stdout=said)
    except CommandError as error:
        return error.returncode, said.getvalue()
    return 0, said.getvalue()


def audited(operation):
    """The operation's name in the log."""
    return f"operation:{operation.pk}"


@pytest.fixture
def settled(ledger_db):
    """An operation that went through the ledger, beside one that is ambiguous and a run."""
    cast.operation(state="ambiguous")
    cast.run()
    return cast.operation(state="succeeded")


@pytest.fixture
def tamper(settled, superuser_connection):
    superuser_connection.execute("SET session_replication_role = replica")
    return superuser_connection.execute


def test_what_the_ledger_wrote_is_clean(settled):
    code, said = verified()
    assert (code, "No findings.") == (0, said.splitlines()[-1])
    assert "3 subjects against where the owner stands" in said


def test_eight_threads_on_the_ledger_leave_a_clean_log(ledger_db):
    errors = []

    def work():
        try:
            for _ in range(5):
                cast.operation(state="succeeded")
        except Exception as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert Operation.objects.filter(state="succeeded").count() == 40
    assert verified()[0] == 0


def test_every_version_of_the_ledger_has_exactly_one_entry(settled):
    for operation in Operation.objects.all():
        moves = Entry.objects.filter(subject=audited(operation), version__isnull=False)
        assert sorted(moves.values_list("version", flat=True)) == list(range(1, operation.version + 1))


def test_a_cut_tail_of_an_operation_is_found(settled, tamper):
    tamper("DELETE FROM audit_entry WHERE subject = %s AND version = %s", [audited(settled), settled.version])
    code, said = verified()
    assert code == 1
    assert f"{audited(settled)} seq {settled.version - 1}: the log ends at version {settled.version - 1}" in said


def test_an_operation_that_is_missing_from_the_log_is_found(settled, tamper):
    tamper("DELETE FROM audit_entry WHERE subject = %s", [audited(settled)])
    code, said = verified()
    assert code == 1
    assert f"{audited(settled)}: its owner has it at version {settled.version}, but the log has no move of it" in said


def test_a_state_that_was_changed_past_the_ledger_is_found(settled, tamper):
    tamper("UPDATE reconciliation_operation SET state = 'ready' WHERE id = %s", [settled.pk])
    code, said = verified()
    assert code == 1
    assert "the log ends in succeeded, but its owner says ready" in said
