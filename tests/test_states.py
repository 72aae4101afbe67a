"""The transition table: as drawn in the design, as the database guards it, as the docs show it."""

import json
from itertools import product
from pathlib import Path

import pytest

from audit import log
from audit.log import Fact
from reconciliation import states, transition
from reconciliation.models import AllowedMove
from reconciliation.states import MOVES, PAIRS, RUN_TERMINAL, Kind, RunState, State, Subject
from reconciliation.transition import NotInTable

DOC = Path(__file__).resolve().parent.parent / "docs" / "states.md"
FACT = Fact(actor="system:test", actor_kind="system", reason_code="tried")

# The drawing in the design, and a few moves more (docs/decisions/proof-of-what-was-to-be-retried.md and
# docs/decisions/what-a-restore-makes-unknown.md).
DRAWN = {
    None: {"ready", "awaiting_approval", "pending"},
    "awaiting_approval": {"ready", "pending", "failed_terminal", "terminated", "ambiguous"},
    "ready": {"pending", "awaiting_approval", "failed_terminal", "terminated", "ambiguous"},
    "failed_retryable": {"pending", "awaiting_approval", "failed_terminal", "terminated", "succeeded", "ambiguous"},
    "pending": {"succeeded", "failed_retryable", "failed_terminal", "ambiguous", "awaiting_approval"},
    "ambiguous": {"succeeded", "failed_retryable", "failed_terminal", "pending", "terminated"},
    "failed_terminal": {"succeeded", "ambiguous"},
    "terminated": {"succeeded"},
    "succeeded": set(),
}


def test_the_table_is_the_drawing():
    table = {
        source: {m.target for m in MOVES if m.kind is Kind.OPERATION and m.source == source}
        for source in (None, *State)
    }
    assert table == DRAWN


def test_the_database_has_the_same_pairs_and_no_others(ledger_db):
    loaded = {(m.kind, m.source or None, m.target) for m in AllowedMove.objects.all()}
    assert loaded == PAIRS


def test_every_state_can_be_reached_and_every_move_is_told_once():
    assert {m.target for m in MOVES if m.kind is Kind.OPERATION} == set(State)
    assert {m.target for m in MOVES if m.kind is Kind.RUN} == set(RunState)
    assert len(PAIRS) == len(MOVES)
    assert all(m.when for m in MOVES)


def test_nothing_unknown_or_settled_goes_back_to_being_never_sent():
    sent = set(State) - {State.READY, State.AWAITING_APPROVAL}
    assert not [m for m in MOVES if m.source in sent and m.target == State.READY]


def test_a_run_that_has_ended_moves_no_more_but_what_a_cancelled_one_applied_may_be_undone():
    onward = {(m.source, m.target) for m in MOVES if m.kind is Kind.RUN and m.source in RUN_TERMINAL}
    assert onward == {("cancelled", "compensating")}


BLANK = {
    "ARRAY": [], "boolean": False, "integer": 0, "bigint": 0, "text": "", "character varying": "",
    "timestamp with time zone": "2026-01-01Z", "bytea": b"0" * 32,
}  # fmt: skip


def put(superuser, table, **columns):
    """A row in some state, behind every guard; what must not be null is blank."""
    needed = superuser.execute(
        "SELECT column_name, data_type FROM information_schema.columns WHERE table_schema = 'public'"
        " AND table_name = %s AND is_nullable = 'NO' AND is_identity = 'NO'",
        [table],
    )
    row = {name: BLANK[kind] for name, kind in needed.fetchall()} | columns
    superuser.execute("SET session_replication_role = replica")
    statement = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join(['%s'] * len(row))}) RETURNING id"
    return superuser.execute(statement, list(row.values())).fetchone()[0]


def operation_in(superuser, state):
    held = {"lease_until": "2027-01-01Z", "claim_nonce": "00000000-0000-4000-8000-000000000000"}
    return put(
        superuser, "reconciliation_operation", state=state, version=1, tenant="acme", due_at="2027-01-01Z",
        basis="receipt" if state == "succeeded" else "", **(held if state == "pending" else {}),
    )  # fmt: skip


def run_in(superuser, state):
    lease = "2027-01-01Z" if state == "running" else None
    return put(superuser, "reconciliation_run", state=state, version=1, tenant="acme", lease_until=lease)


def drop(superuser, table):
    superuser.execute(f"DELETE FROM {table}")


NEEDED = {
    "operation:pending": {"lease_until": 60, "due_at": 60},
    "operation:ambiguous": {"due_at": 60},
    "run:running": {"lease_until": 60},
}
# Moves of the table that the database makes only while the fence is down or the replay window lasts.
OF_A_RESTORE = {
    (m.source, m.target)
    for m in MOVES
    if m.kind is Kind.OPERATION and m.target == State.AMBIGUOUS and m.source != State.PENDING
}
NONCE = {"claim_nonce": "00000000-0000-4000-8000-000000000001", "basis": "receipt"}


def answers(superuser, kind, table, put_in, all_states):
    """For each pair of states: whether the database made the move."""
    made = {}
    for source, target in product(all_states, all_states):
        subject = Subject(kind, put_in(superuser, source))
        patch = NONCE if kind is Kind.OPERATION else {}
        after = NEEDED.get(f"{kind}:{target}")
        try:
            transition.transition(subject, to=target, version=1, patch=patch, after=after, fact=FACT)
            made[source, target] = True
        except NotInTable as refused:
            named = (refused.source, refused.target, refused.pk)
            made[source, target] = None if named != (source, target, subject.pk) else False
        drop(superuser, table)
    return made


@pytest.mark.parametrize(
    ("kind", "table", "put_in", "all_states"),
    [
        (Kind.OPERATION, "reconciliation_operation", operation_in, State),
        (Kind.RUN, "reconciliation_run", run_in, RunState),
    ],
)
def test_the_database_makes_every_move_of_the_table_and_refuses_every_other(
    superuser_connection, kind, table, put_in, all_states
):
    made = answers(superuser_connection, kind, table, put_in, [str(s) for s in all_states])
    assert made == {(a, b): (kind, a, b) in PAIRS and (a, b) not in OF_A_RESTORE for a, b in made}


@pytest.mark.parametrize("in_force", ["restored", "replay"])
def test_what_is_known_becomes_unknown_while_a_restore_lasts_and_not_else(superuser_connection, in_force):
    put(
        superuser_connection, "reconciliation_limit", kind=in_force,
        window_seconds=60 if in_force == "replay" else None,
        since="2026-11-01Z", reason="test", version=1,
    )  # fmt: skip
    for source, target in sorted(OF_A_RESTORE):
        subject = Subject(Kind.OPERATION, operation_in(superuser_connection, source))
        transition.transition(subject, to=target, version=1, patch=NONCE, after={"due_at": 60}, fact=FACT)
        drop(superuser_connection, "reconciliation_operation")


def birth_of_an_operation(state):
    with transition.connections["default"].cursor() as cursor:
        body, _ = log.body(FACT)
        row = json.dumps({"lineage": "\\x00", "intent_version": 1, "state": state})
        cursor.execute("SELECT verdict FROM ledger_open(%s, NULL, '[]', %s, NULL, NULL)", [row, body])
        return cursor.fetchone()[0]


@pytest.mark.parametrize("state", sorted(set(State) - {m.target for m in MOVES if m.source is None}))
def test_an_operation_is_not_born_in_a_later_state(ledger_db, state):
    assert birth_of_an_operation(state) == "not_in_table"


@pytest.mark.parametrize("state", sorted(set(RunState) - {RunState.PENDING}))
def test_a_run_is_not_born_in_a_later_state(ledger_db, state):
    row = {"tenant": "acme", "workflow_type": "w", "workflow_id": "1", "workflow_version": 1, "business_object": "o",
           "input_fingerprint": "f", "state": state}  # fmt: skip
    with pytest.raises(NotInTable):
        transition.open_run(row=row, after={}, fact=FACT)


def test_a_move_names_the_version_or_the_generation_on_which_it_rests(ledger_db):
    with pytest.raises(ValueError, match="version"):
        transition.transition(Subject(Kind.OPERATION, 1), to=State.TERMINATED, fact=FACT)
    with pytest.raises(ValueError, match="version"):
        transition.transition(Subject(Kind.OPERATION, 1), to=State.TERMINATED, generation=1, fact=FACT)


def test_a_move_of_what_is_not_there_says_so(ledger_db):
    with pytest.raises(transition.Gone, match="operation 7: new -> terminated: There is no such row"):
        transition.transition(Subject(Kind.OPERATION, 7), to=State.TERMINATED, version=1, fact=FACT)


def test_the_docs_show_the_table_as_it_is():
    assert states.drawn() in DOC.read_text()
