"""Writing to the audit log: what is written, who may write, and that nothing written changes."""

import json
import threading
from dataclasses import replace
from importlib import import_module

import psycopg
import pytest
import rfc8785
from django.db import DatabaseError, connection, connections, transaction
from hypothesis import given
from hypothesis import strategies as st

from audit import log
from audit.canonical import Unwritable, canonical
from audit.log import Fact
from audit.models import Entry
from audit.verify import Tally, verify

WORKER = Fact(actor="worker:4f2a", actor_kind="worker", reason_code="claimed", details={"attempt": 1})
OLGA = Fact(
    actor="person:7",
    actor_kind="person",
    actor_name="Olga Öhm",
    reason_code="asserted",
    reason="Kunde sagt: „nie angekommen“",
    evidence="ab" * 32,
    batch="batch:1",
)

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
integers = st.integers(min_value=-(2**53) + 1, max_value=2**53 - 1)
values = st.recursive(
    st.none() | st.booleans() | integers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def write(subject="operation:1", *, fact=WORKER, version=None, **states):
    return log.append(subject=subject, tenant="acme", event="transition", fact=fact, version=version, **states)


@given(values)
def test_what_is_written_is_rfc_8785(value):
    assert canonical(value).encode() == rfc8785.dumps(value)


def test_keys_are_in_the_order_of_their_utf_16_units():
    """The emoji is the larger code point and the smaller in UTF-16: a sort by code points gets it wrong."""
    assert canonical({"\ufb33": 1, "\U0001f600": 2}) == '{"\U0001f600":2,"\ufb33":1}'


@given(details=st.dictionaries(texts, values, max_size=3), actor=texts, reason=texts)
def test_a_body_is_rfc_8785(details, actor, reason):
    text, openings = log.body(replace(OLGA, details=details, actor=actor, reason=reason))
    assert rfc8785.dumps(json.loads(text)) == text.encode()
    assert [opening["value"] for opening in openings] == [told for told in ("Olga Öhm", reason) if told]


@pytest.mark.parametrize(
    ("details", "sentence"),
    [
        ({"a": 1, "amount": 12.5}, "value.amount is a float"),
        ({"n": 2**53}, r"value.n is an integer beyond"),
        ({"list": ["fine", "\ud800"]}, r"value.list\[1\] holds a lone surrogate"),
        ({"\ud800": 1}, "a key of value holds a lone surrogate"),
        ({"text": "a\0b"}, "value.text holds a NUL"),
        ({"raw": b"bytes"}, "value.raw is a bytes"),
        ({1: "one"}, "a key that is not text"),
    ],
)
def test_what_has_no_exact_form_is_refused(details, sentence):
    with pytest.raises(Unwritable, match=sentence):
        log.body(replace(WORKER, details=details))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"actor_kind": "robot"}, "actor_kind is none of agent, person, system, worker"),
        ({"evidence": "AB" * 32}, "evidence is not a SHA-256"),
        ({"reason": "\udfff"}, "reason holds a lone surrogate"),
        ({"actor": "person:\0"}, "actor holds a NUL"),
    ],
)
def test_a_fact_that_cannot_stand_is_refused(changes, sentence):
    with pytest.raises(Unwritable, match=sentence):
        log.body(replace(WORKER, **changes))


def test_an_entry_is_chained_to_the_one_before_it(ledger_db):
    first = Entry.objects.get(id=write(version=1, to_state="pending"))
    second = Entry.objects.get(id=write(version=2, from_state="pending", to_state="ambiguous"))
    record = json.loads(bytes(second.canonical))
    assert (first.seq, second.seq) == (1, 2)
    assert json.loads(bytes(first.canonical))["prev"] == ""
    assert record["prev"] == bytes(first.hash).hex()
    assert (record["from"], record["to"], record["version"]) == ("pending", "ambiguous", 2)


def test_personal_and_free_text_is_not_in_the_bytes(ledger_db):
    entry = Entry.objects.get(id=write(fact=OLGA))
    assert "Olga" not in bytes(entry.canonical).decode()
    assert "Kunde" not in bytes(entry.canonical).decode()
    assert (entry.told("actor_name"), entry.told("reason")) == (OLGA.actor_name, OLGA.reason)


def test_the_same_text_twice_is_committed_to_differently():
    (one, _), (two, _) = log.body(OLGA), log.body(OLGA)
    assert json.loads(one)["commitments"]["reason"] != json.loads(two)["commitments"]["reason"]


def test_an_opening_of_another_text_is_refused_by_the_database(ledger_db):
    text, openings = log.body(OLGA)
    openings[0]["value"] = "Somebody else"
    values = ("operation:1", "acme", "transition", None, None, None, text, log.openings_json(openings))
    with pytest.raises(DatabaseError, match="does not open its commitment"), connection.cursor() as cursor:
        cursor.execute(log.APPEND, values)


def test_an_entry_is_undone_with_its_transaction(ledger_db):
    with transaction.atomic():
        write(fact=OLGA)
        transaction.set_rollback(True)
    assert not Entry.objects.exists()


def test_the_time_is_that_of_the_database(ledger_db, clock):
    clock.advance(days=400)
    before = clock.now()
    assert before <= Entry.objects.get(id=write()).at <= clock.now()


@pytest.mark.parametrize("name", ["", "Operation:1", 'operation:1","x":"', "operation:1\n", "x" * 121])
def test_a_name_that_could_change_the_record_is_refused(ledger_db, name):
    with pytest.raises(DatabaseError, match="audit_entry_subject_form"):
        write(name)


@pytest.mark.parametrize("body", ["", "{}", '{"actor":"a"},"to":"x"', '{"actor":', '["person:7"]'])
def test_a_body_that_would_break_out_of_its_place_is_refused(ledger_db, body):
    with pytest.raises(DatabaseError), connection.cursor() as cursor:
        cursor.execute(log.APPEND, ("operation:1", "acme", "transition", None, None, None, body, None))
    assert not Entry.objects.exists()


CHANGES = [
    "UPDATE audit_entry SET actor = 'nobody'",
    "DELETE FROM audit_entry",
    "TRUNCATE audit_entry CASCADE",
    "UPDATE audit_opening SET value = 'else'",
    "DELETE FROM audit_opening",
    "TRUNCATE audit_opening",
]
INSERT = """INSERT INTO audit_entry (subject, seq, tenant, at, event, actor, actor_kind, reason_code, canonical, hash)
SELECT subject, seq + 1, tenant, at, event, actor, actor_kind, reason_code, canonical, hash FROM audit_entry"""


@pytest.mark.parametrize("statement", [*CHANGES, INSERT, "ALTER TABLE audit_entry DISABLE TRIGGER ALL"])
def test_the_application_role_has_no_right_to_change_the_log(ledger_db, statement):
    write(fact=OLGA)
    with pytest.raises(DatabaseError, match=r"permission denied|must be owner"), connection.cursor() as cursor:
        cursor.execute(statement)


@pytest.mark.parametrize("statement", CHANGES)
def test_the_triggers_stop_the_owner_and_the_superuser_too(ledger_db, superuser_connection, statement):
    write(fact=OLGA)
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="is append-only"):
        superuser_connection.execute(statement)
    with pytest.raises(DatabaseError, match="is append-only"), connections["owner"].cursor() as cursor:
        cursor.execute(statement)


def test_nobody_else_may_append(ledger_db, superuser_connection):
    rights = "SELECT proname, proacl::text FROM pg_proc WHERE proname IN ('audit_append', 'audit_open')"
    granted = dict(superuser_connection.execute(rights).fetchall())
    assert granted.keys() == {"audit_append", "audit_open"}
    assert not any(each.startswith("{=") or ",=" in each for each in granted.values())


def test_an_object_of_the_callers_cannot_stand_in_for_one_of_ours(ledger_db, superuser_connection):
    superuser_connection.execute("""CREATE SCHEMA evil; GRANT USAGE ON SCHEMA evil TO PUBLIC;
        CREATE FUNCTION evil.sha256(bytea) RETURNS bytea LANGUAGE sql AS $$ SELECT $1 $$;""")
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET LOCAL search_path = evil, pg_catalog, public")
            cursor.execute(log.APPEND, call())
        assert list(verify()) == []
    finally:
        superuser_connection.execute("DROP SCHEMA evil CASCADE")


def test_the_shipped_clock_moves_inside_a_transaction(ledger_db, superuser_connection):
    """A lease that is granted after a wait must not begin before it, as it would by the transaction's time."""
    shipped = import_module("audit.migrations.0001_initial").CLOCK.replace("aftercall_now", "shipped_now")
    with superuser_connection.transaction(force_rollback=True):
        superuser_connection.execute(shipped)
        read = "SELECT public.shipped_now() > now(), pg_sleep(0.001), public.shipped_now() > statement_timestamp()"
        assert superuser_connection.execute(read).fetchone()[::2] == (True, True)


def call(subject="operation:1"):
    return (subject, "acme", "transition", None, "ready", None, log.body(WORKER)[0], None)


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Apia", "America/St_Johns"])
def test_the_zone_of_the_session_is_not_in_the_bytes(ledger_db, zone):
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT set_config('TimeZone', %s, true), set_config('DateStyle', 'SQL, DMY', true)", [zone])
        write()
    assert list(verify()) == []


@pytest.mark.parametrize("subjects", [1, 3])
def test_eight_writers_at_once_leave_a_clean_log(ledger_db, subjects):
    start, errors = threading.Barrier(8), []

    def run(writer):
        try:
            start.wait()
            for turn in range(25):
                write(f"operation:{(writer + turn) % subjects}", fact=OLGA if turn % 5 == 0 else WORKER)
        except Exception as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tally = Tally()
    assert errors == []
    assert list(verify(tally=tally)) == []
    assert (tally.entries, tally.subjects) == (200, subjects)


def test_37_decisions_of_one_batch_are_37_entries_or_none(ledger_db):
    fact = replace(OLGA, batch="batch:37")
    with transaction.atomic():
        for number in range(36):
            write(f"operation:{number}", fact=fact)
        transaction.set_rollback(True)
    assert not Entry.objects.exists()
    with transaction.atomic():
        for number in range(37):
            write(f"operation:{number}", fact=fact)
    assert Entry.objects.filter(batch="batch:37").count() == 37
