"""Nothing but transition.py writes a state or mark, and nothing else can."""

import re

import pytest
from django.db import ProgrammingError, connection, transaction

from reconciliation import actions, deeds, reconciler, retrying, schema, sweeping, transition
from reconciliation.executor import perform
from reconciliation.providers.base import OutcomeUnknown
from reconciliation.states import State
from tests import source
from tests.ledger import changes_without_audit
from tests.scripted import AGENT, OLGA, found, order, row

# The source


@pytest.mark.case("H4")
def test_no_other_file_writes_the_ledger():
    wrong = {
        str(path.relative_to(source.ROOT)): found_there
        for path in source.files(*source.SHIPPED)
        if path.relative_to(source.ROOT).as_posix() not in ("reconciliation/transition.py", "reconciliation/schema.py")
        and (found_there := source.other_writers(path.read_text()))
    }
    # The outbox has a writer of its own, for its own table.
    ours = wrong.pop("reconciliation/outbox.py")
    assert {what.partition(": ")[2].split()[-1] for what in ours} == {"reconciliation_message"}
    assert not wrong


def test_a_function_that_no_code_calls_is_closed_to_the_application():
    """Each is a step of others, under checks and locks that those have taken before."""
    text = "".join(path.read_text() for path in schema.SQL.glob("*.sql"))
    named = set(re.findall(r"CREATE OR REPLACE FUNCTION ((?:ledger|fence)_\w+)", text))
    code = "".join(path.read_text() for path in source.files(*source.SHIPPED) if path.name != "schema.py")
    called = {*re.findall(r"\w+", code), "ledger_prune_operation", "ledger_prune_run"}  # named by the kind of subject
    assert named - called == set(schema.INTERNAL)


@pytest.mark.parametrize(
    "line",
    [
        "operation.save()",
        "Operation.objects.filter(pk=1).update(state='succeeded')",
        "Operation.objects.bulk_update([], ['state'])",
        "Run.objects.create(state='running')",
        "JournalEntry.objects.all().delete()",
        "Entry.objects.bulk_create([])",
        "Operation._default_manager.filter(tenant='x').update(version=1)",
        "operation.state = 'succeeded'",
        "run.escalated_at = None",
        "operation.version += 1",
        "cursor.execute('UPDATE reconciliation_operation SET due_at = NULL')",
        "cursor.execute('update \"reconciliation_run\" set state = %s')",
        "cursor.execute('INSERT INTO reconciliation_journalentry (at) VALUES (now())')",
        "cursor.execute('DELETE FROM audit_entry')",
        "cursor.execute('UPDATE reconciliation_message SET due_at = NULL')",
        "Message.objects.filter(pk=1).delete()",
        "cursor.execute('SELECT * FROM ledger_move_operation(1)')",
        "cursor.execute(f'SELECT ledger_note({x}, 1)')",
    ],
)
def test_a_second_writer_would_be_seen(line):
    assert source.other_writers(line)


@pytest.mark.parametrize(
    "line",
    [
        "Operation.objects.get(pk=1)",
        "user.save()",
        "facts.update(a=1)",
        "step.state = 1",
        "x = 'UPDATE other SET a = 1'",
        "Tenant.objects.create(slug='acme')",
    ],
)
def test_what_writes_something_else_is_left_alone(line):
    assert source.other_writers(line) == []


# The database

COLUMNS = {
    "reconciliation_operation": "state", "reconciliation_run": "state", "reconciliation_journalentry": "kind",
    "reconciliation_move": "target", "audit_entry": "to_state", "reconciliation_limit": "kind",
    "reconciliation_tombstone": "state", "reconciliation_restorefence": "found",
}  # fmt: skip


@pytest.mark.parametrize("table", COLUMNS)
@pytest.mark.parametrize("verb", ["UPDATE", "INSERT", "DELETE", "TRUNCATE", "UPDATE_ALL"])
def test_the_application_role_cannot_write_by_itself(ledger_db, table, verb):
    statement = {
        "UPDATE": f"UPDATE {table} SET {COLUMNS[table]} = 'succeeded'",
        "UPDATE_ALL": f"UPDATE {table} SET id = id",
        "INSERT": f"INSERT INTO {table} DEFAULT VALUES",
        "DELETE": f"DELETE FROM {table}",
        "TRUNCATE": f"TRUNCATE {table} CASCADE",
    }[verb]
    with (
        pytest.raises(ProgrammingError, match="permission denied"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute(statement)


@pytest.mark.parametrize(
    "function",
    [
        "ledger_journal(1, NULL, now(), '[]')",
        "ledger_patch('{}', '{}', '{}', '{}', now())",
        "ledger_applied_reported(1)",
    ],
)
def test_the_steps_of_the_functions_are_not_for_the_application(ledger_db, function):
    with pytest.raises(ProgrammingError, match="permission denied"), connection.cursor() as cursor:
        cursor.execute(f"SELECT {function}")


def test_the_application_role_may_set_no_state_through_a_column_grant(ledger_db, superuser_connection, settings):
    granted = superuser_connection.execute(
        "SELECT table_name, column_name, privilege_type FROM information_schema.column_privileges"
        " WHERE grantee IN (%s, 'PUBLIC') AND table_name = ANY (%s) AND privilege_type <> 'SELECT'",
        [settings.AFTERCALL_APP_ROLE, list(COLUMNS)],
    ).fetchall()
    assert granted == []


def test_the_journal_refuses_even_its_owner(ledger_db, clerk):
    from django.db import InternalError, connections

    perform(order(), actor=AGENT)
    for statement in ("UPDATE {} SET kind = 'x'", "DELETE FROM {}", "TRUNCATE {}"):
        with (
            pytest.raises((ProgrammingError, InternalError), match="append-only"),
            connections["owner"].cursor() as cursor,
        ):
            cursor.execute(statement.format("reconciliation_journalentry"))
        connections["owner"].close()


# Row and audit log


@pytest.mark.case("H4")
def test_every_change_has_its_audit_row_and_the_comparison_would_notice(clerk, clock, superuser_connection):
    clerk.answers(OutcomeUnknown("lost"))
    pk = perform(order(), actor=AGENT).pk
    clerk.sees(found())
    clock.advance(minutes=1)
    sweeping.sweep()
    assert row(pk).state == "succeeded"
    assert changes_without_audit(superuser_connection) == []
    superuser_connection.execute("UPDATE reconciliation_operation SET version = version + 1")
    assert changes_without_audit(superuser_connection) == [f"operation:{pk}"]


def test_a_move_and_its_audit_row_are_written_together_or_not_at_all(clerk, superuser_connection):
    clerk.answers(OutcomeUnknown("lost"))
    operation = row(perform(order(), actor=AGENT).pk)
    fact = OLGA.fact("stop")
    with transaction.atomic():
        transition.transition(operation.subject, to=State.TERMINATED, version=operation.version, fact=fact)
        transaction.set_rollback(True)
    assert row(operation.pk).state == "ambiguous"
    assert changes_without_audit(superuser_connection) == []


@pytest.mark.case("I3")
def test_of_two_moves_on_one_version_only_the_first_is_made(clerk):
    clerk.answers(OutcomeUnknown("lost"))
    operation = row(perform(order(), actor=AGENT).pk)
    move = {"to": None, "version": operation.version, "after": {"due_at": 5}}
    transition.transition(operation.subject, fact=OLGA.fact("first"), **move)
    with pytest.raises(transition.StaleVersion, match="It changed since it was read"):
        transition.transition(operation.subject, fact=OLGA.fact("second"), **move)


# One door


def test_the_sweep_and_the_buttons_run_the_same_functions():
    assert deeds.reconciler is sweeping.reconciler is reconciler
    assert deeds.retrying is sweeping.retrying is retrying
    assert {a.name: a.do for a in actions._OPERATION_ACTIONS}["look_up"] is deeds.look_up


def test_the_sweep_and_the_look_up_button_both_come_to_reconcile(clerk, clock, monkeypatch):
    came = []
    really = reconciler.reconcile

    def counted(pk, **arguments):
        came.append(arguments.get("actor", reconciler.SYSTEM).kind)
        return really(pk, **arguments)

    monkeypatch.setattr(reconciler, "reconcile", counted)
    clerk.answers(OutcomeUnknown("lost"))
    pk = perform(order("none"), actor=AGENT).pk
    clock.advance(minutes=1)
    sweeping.sweep()
    from uuid import uuid4

    press = actions.Press(action="look_up", token=uuid4(), version=row(pk).version)
    actions.act(row(pk), press, actor=OLGA)
    assert came == ["system", "person"]
