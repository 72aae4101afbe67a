"""The way of the two hot statements: what it sends, reads and says is what a cursor would."""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
import pytest
from django.db import IntegrityError, OperationalError, connection, connections

from audit import log
from reconciliation import prepared, transition
from reconciliation.executor import perform
from reconciliation.models import JournalEntry, Operation
from reconciliation.states import Kind, Subject
from reconciliation.transition import Observed
from tests.scripted import AGENT, applied, order, row
from tests.test_states import put

FACT = log.Fact(actor="system:test", actor_kind="system", reason_code="test")
EVERY_TYPE = "SELECT %s::text, %s::bigint, %s::int, %s::timestamptz, %s::text[] = '{held,due}'::text[] AND NULL::bool"


@pytest.fixture
def raw(ledger_db):
    connection.ensure_connection()
    return connection.connection


def test_values_come_back_as_a_cursor_gives_them(raw):
    at = datetime(2026, 11, 30, 3, 4, 5, 678901, tzinfo=UTC)
    values = ["a 'quoted' \\ text, é", -(2**62), -7, at.isoformat(), ["held", "due"]]
    assert prepared.row(raw, EVERY_TYPE, values) == (values[0], -(2**62), -7, at, None)
    assert prepared.row(raw, EVERY_TYPE, [None] * 5) == (None, None, None, None, None)


@pytest.mark.parametrize("text", ["a\0b", "half \ud800 of a pair"])
def test_a_text_that_the_wire_would_cut_or_cannot_hold_is_refused_and_nothing_is_sent(raw, text):
    with pytest.raises((psycopg.DataError, UnicodeEncodeError)):
        prepared.row(raw, "SELECT %s::text", [text])
    assert prepared.row(raw, "SELECT %s::text", ["whole"]) == ("whole",)


def test_an_error_of_the_database_is_the_drivers_and_the_connection_goes_on(raw):
    with pytest.raises(psycopg.errors.DivisionByZero):
        prepared.row(raw, "SELECT 1 / %s::int", [0])
    assert prepared.row(raw, "SELECT 1 / %s::int", [1]) == (1,)


def test_errors_leave_no_statements_behind_in_the_server(raw):
    for _ in range(3):
        with pytest.raises(psycopg.errors.DivisionByZero):
            prepared.row(raw, "SELECT 1 / %s::int", [0])
    held = raw.execute("SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'SELECT 1 / $1%'").fetchone()
    assert held == (1,)


def test_a_statement_that_the_server_has_forgotten_is_prepared_anew(raw):
    assert prepared.row(raw, "SELECT %s::int", [1]) == (1,)
    raw.execute("DEALLOCATE ALL")
    with pytest.raises(psycopg.errors.InvalidSqlStatementName):
        prepared.row(raw, "SELECT %s::int", [2])
    assert prepared.row(raw, "SELECT %s::int", [3]) == (3,)


def test_a_function_that_a_migration_has_changed_is_prepared_anew(raw, superuser_connection):
    make = "CREATE FUNCTION changing(OUT a int{more}) LANGUAGE sql AS 'SELECT 1{value}'"
    superuser_connection.execute(make.format(more="", value=""))
    try:
        assert prepared.row(raw, "SELECT * FROM changing()", []) == (1,)
        superuser_connection.execute("DROP FUNCTION changing()")
        superuser_connection.execute(make.format(more=", OUT b int", value=", 2"))
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="cached plan"):
            prepared.row(raw, "SELECT * FROM changing()", [])
        assert prepared.row(raw, "SELECT * FROM changing()", []) == (1, 2)
    finally:
        superuser_connection.execute("DROP FUNCTION changing()")


def test_a_lost_connection_is_told_as_djangos_own_error_and_the_next_one_works(clerk, superuser_connection):
    perform(order(step="warm_up"), actor=AGENT)
    pid = connection.connection.info.backend_pid
    superuser_connection.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
    with pytest.raises(OperationalError):
        transition._call(transition.MOVE, [0, 1, None, None, "{}", None, None, [], "[]", "{}", None, None, None])
    connections["default"].close()
    clerk.answers(applied("r-9"))
    assert row(perform(order(step="after"), actor=AGENT).pk).state == "succeeded"


# What a foreign key would ask at every commit


def test_nothing_is_born_that_refers_to_what_is_not_there(ledger_db):
    for reference in ({"run_id": 404}, {"undo_of_id": 404}):
        with pytest.raises(IntegrityError, match="to refer to"):
            transition.open_operation(row={**reference, "state": "ready"}, after={}, observed=[], fact=FACT)
    assert not Operation.objects.exists()


def test_nothing_is_noted_about_what_was_never_there(ledger_db):
    for subject in (Subject(Kind.OPERATION, 404), Subject(Kind.RUN, 404)):
        with pytest.raises(IntegrityError, match="to note this about"):
            transition.note(subject, [Observed(kind="finding")])
    assert not JournalEntry.objects.exists()


def test_nobody_deletes_an_operation_from_under_its_journal(clerk, superuser_connection):
    outcome = perform(order(), actor=AGENT)
    with pytest.raises(psycopg.errors.ForeignKeyViolation, match="still referred to"):
        superuser_connection.execute("DELETE FROM reconciliation_operation WHERE id = %s", [outcome.pk])
    assert row(outcome.pk)


@pytest.mark.parametrize("by", ["a step", "its journal", "an undo"])
def test_nobody_deletes_what_a_row_refers_to(superuser_connection, by):
    table = "reconciliation_operation" if by == "an undo" else "reconciliation_run"
    referred = put(superuser_connection, table, state="succeeded", **({"basis": "receipt"} if by == "an undo" else {}))
    if by == "its journal":
        put(superuser_connection, "reconciliation_journalentry", run_id=referred)
    else:
        refers = {"undo_of_id" if by == "an undo" else "run_id": referred}
        put(superuser_connection, "reconciliation_operation", state="ready", key="other", lineage=b"1" * 32, **refers)
    superuser_connection.execute("RESET session_replication_role")
    with pytest.raises(psycopg.errors.ForeignKeyViolation, match="still referred to"):
        superuser_connection.execute(f"DELETE FROM {table} WHERE id = %s", [referred])


def test_a_second_birth_of_one_subject_is_refused_by_the_chain(clerk, superuser_connection):
    outcome = perform(order(), actor=AGENT)
    body, _ = log.body(FACT)
    with pytest.raises(psycopg.errors.UniqueViolation):
        superuser_connection.execute(
            "SELECT audit_append(%s, 'acme', 'transition', NULL, 'pending', 1, %s, NULL)",
            [f"operation:{outcome.pk}", body],
        )
