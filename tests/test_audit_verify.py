"""Tampering with the log, as somebody who gets past every grant and trigger, and what audit_verify says of it."""

import hashlib
import json
from dataclasses import replace
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from audit import log
from audit.log import Fact
from audit.models import Entry
from audit.verify import Head, Tally, registered_heads, verify

WORKER = Fact(actor="worker:4f2a", actor_kind="worker", reason_code="claimed", details={"attempt": 1})
OLGA = Fact(actor="person:7", actor_kind="person", actor_name="Olga", reason_code="asserted", reason="Seen in the shop")
STORY = [("pending", WORKER), ("ambiguous", WORKER), ("succeeded", OLGA)]
HEADS = [Head(subject=f"operation:{number}", version=3, state="succeeded") for number in (1, 2, 10)]

MOVE = ("operation:1", "acme", "transition", "succeeded", "succeeded", 4, log.body(WORKER)[0])

LAST = {"subject": "operation:1", "seq": 3}


def heads():
    """What the settings of a test name as the owner's word; plain tuples are allowed."""
    return [tuple(head) for head in HEADS]


@pytest.fixture
def stories(ledger_db):
    """Three operations that went the same way, one of them with a refusal in between: 10 entries."""
    for number in (1, 2, 10):
        before = None
        for version, (state, fact) in enumerate(STORY, start=1):
            move = {"from_state": before, "to_state": state, "version": version}
            log.append(subject=f"operation:{number}", tenant="acme", event="transition", fact=fact, **move)
            before = state
    refusal = replace(OLGA, reason_code="stale_version")
    log.append(subject="operation:2", tenant="acme", event="refused", fact=refusal, from_state="succeeded")


@pytest.fixture
def tamper(stories, superuser_connection):
    """Runs statements behind every guard."""
    superuser_connection.execute("SET session_replication_role = replica")
    return superuser_connection.execute


def findings(heads=HEADS):
    return [str(finding) for finding in verify(heads)]


def test_a_clean_log_has_no_findings(stories):
    tally = Tally()
    assert list(verify(HEADS, tally=tally)) == []
    assert (tally.entries, tally.subjects, tally.heads, tally.erased) == (10, 3, 3, 0)


def test_an_empty_log_has_no_findings(ledger_db):
    assert list(verify()) == []


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tenant", "'other'"),
        ("at", "at + interval '1 microsecond'"),
        ("event", "'refused'"),
        ("from_state", "NULL"),
        ("to_state", "'failed_terminal'"),
        ("version", "NULL"),
        ("actor", "'person:8'"),
        ("actor_kind", "'system'"),
        ("on_behalf_of", "'person:9'"),
        ("reason_code", "'receipt'"),
        ("batch", "'batch:1'"),
    ],
)
def test_an_edited_copy_is_found(tamper, column, value):
    tamper(f"UPDATE audit_entry SET {column} = {value} WHERE subject = 'operation:1' AND seq = 2")
    assert f"operation:1 seq 2: the column {column} differs from the hashed bytes." in findings()


def test_edited_bytes_are_found(tamper):
    tamper("""UPDATE audit_entry SET canonical = convert_to(replace(convert_from(canonical, 'UTF8'),
        '"attempt":1', '"attempt":2'), 'UTF8') WHERE subject = 'operation:1' AND seq = 2""")
    assert findings() == ["operation:1 seq 2: the hash is not that of the stored bytes."]


def test_edited_bytes_with_a_new_hash_are_found_by_the_next_entry(tamper):
    tamper("""UPDATE audit_entry SET canonical = convert_to(replace(convert_from(canonical, 'UTF8'),
        '"attempt":1', '"attempt":2'), 'UTF8') WHERE subject = 'operation:1' AND seq = 2""")
    tamper("UPDATE audit_entry SET hash = sha256(canonical) WHERE subject = 'operation:1' AND seq = 2")
    sentence = "it does not follow the record before it (the hash named as previous is another)."
    assert findings() == [f"operation:1 seq 3: {sentence}"]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"attempt":1', '"attempt": 1', "not in canonical form"),
        ('"attempt":1', '"attempt":1.0', "not the JSON of a record"),
        ('"attempt":1', '"attempt":1,"attempt":1', "not the JSON of a record"),
        ('"v":1', '"v":2', "do not have the members of a record"),
        ('{"at"', '["at"', "not the JSON of a record"),
    ],
)
def test_bytes_that_were_never_written_by_us_are_found(tamper, old, new, sentence):
    replaced = "convert_to(replace(convert_from(canonical, 'UTF8'), %s, %s), 'UTF8')"
    tamper(f"UPDATE audit_entry SET canonical = {replaced} WHERE subject = 'operation:1' AND seq = 3", [old, new])
    tamper(f"UPDATE audit_entry SET canonical = {replaced} WHERE subject = 'operation:1' AND seq = 2", [old, new])
    tamper("UPDATE audit_entry SET hash = sha256(canonical) WHERE subject = 'operation:1'")
    assert any(finding.startswith("operation:1 seq 2") and sentence in finding for finding in findings())


@pytest.mark.parametrize(
    ("seqs", "sentence"),
    [
        ((2,), "operation:1 seq 3: records before this one are missing: seq 2."),
        ((1,), "operation:1 seq 2: the beginning is missing: seq 1."),
        ((1, 2), "operation:1 seq 3: the beginning is missing: seq 1 to 2."),
    ],
)
def test_deleted_entries_are_found(tamper, seqs, sentence):
    tamper("DELETE FROM audit_entry WHERE subject = 'operation:1' AND seq = ANY(%s)", [list(seqs)])
    assert findings() == [sentence]


def test_a_deletion_whose_gap_was_closed_is_found(tamper):
    tamper("DELETE FROM audit_entry WHERE subject = 'operation:1' AND seq = 2")
    tamper("UPDATE audit_entry SET seq = 2 WHERE subject = 'operation:1' AND seq = 3")
    assert any("the column seq differs" in finding for finding in findings())


def test_swapped_entries_are_found(tamper):
    tamper("UPDATE audit_entry SET seq = seq + 100 WHERE subject = 'operation:1' AND seq IN (1, 2)")
    tamper("UPDATE audit_entry SET seq = 103 - seq WHERE subject = 'operation:1' AND seq > 100")
    assert {"operation:1 seq 1: the column seq differs from the hashed bytes."} <= set(findings())


def test_swapped_bytes_are_found_though_every_copy_agrees(tamper, superuser_connection):
    """The two entries change places with everything, and their numbers are rewritten in the bytes too."""
    rows = superuser_connection.execute(
        "SELECT seq, canonical FROM audit_entry WHERE subject = 'operation:1' AND seq < 3 ORDER BY seq"
    ).fetchall()
    for (seq, _), (_, other) in zip(rows, reversed(rows), strict=True):
        forge(superuser_connection, "operation:1", seq, other, seq=seq)
    found = findings()
    assert any("does not follow" in finding for finding in found)


def test_an_inserted_entry_is_found(tamper, superuser_connection):
    """Behind the last: the next true number is taken, or the version is ahead of the owner's."""
    last = superuser_connection.execute(
        "SELECT canonical, hash FROM audit_entry WHERE subject = 'operation:1' AND seq = 3"
    ).fetchone()
    insert(superuser_connection, last[0], seq=4, prev=last[1].hex(), version=4)
    assert findings() == [
        "operation:1 seq 4: it starts from ambiguous, but the state before it was succeeded.",
        "operation:1 seq 4: the log goes on to version 4, but its owner is at 3.",
    ]


def test_a_move_that_left_no_entry_is_found_by_the_next_one(stories):
    log.append(subject="operation:1", tenant="acme", event="transition", fact=OLGA, version=5)
    assert findings(heads=[]) == ["operation:1 seq 4: it made version 5, but the last version before it was 3."]


def test_an_entry_inserted_between_two_is_found(tamper, superuser_connection):
    rows = superuser_connection.execute(
        "SELECT canonical, hash FROM audit_entry WHERE subject = 'operation:1' ORDER BY seq"
    ).fetchall()
    tamper("UPDATE audit_entry SET seq = 4 WHERE subject = 'operation:1' AND seq = 3")
    forge(superuser_connection, "operation:1", 4, rows[2][0], seq=4)
    insert(superuser_connection, rows[1][0], seq=3, prev=rows[1][1].hex(), version=None)
    assert any("seq 4: it does not follow" in finding for finding in findings())


def test_an_entry_moved_to_another_subject_is_found(tamper):
    tamper("UPDATE audit_entry SET subject = 'operation:9' WHERE subject = 'operation:1' AND seq = 3")
    assert "operation:9 seq 3: the column subject differs from the hashed bytes." in findings()


def test_a_cut_tail_is_found_by_the_owners_version(tamper):
    tamper("DELETE FROM audit_entry WHERE subject = 'operation:10' AND seq = 3")
    assert findings() == ["operation:10 seq 2: the log ends at version 2, but its owner is at 3: the tail is missing."]
    assert findings(heads=[]) == []


def test_a_missing_subject_is_found_by_the_owners_version(tamper):
    tamper("DELETE FROM audit_entry WHERE subject = 'operation:10'")
    sentence = "its owner has it at version 3, but the log has no move of it: the subject is missing."
    assert findings() == [f"operation:10: {sentence}"]


def test_a_state_that_was_changed_behind_the_log_is_found(stories):
    told = [Head(subject="operation:1", version=3, state="failed_terminal")]
    assert findings(told) == ["operation:1 seq 3: the log ends in succeeded, but its owner says failed_terminal."]


def test_an_edited_opening_is_found(tamper):
    tamper("UPDATE audit_opening SET value = 'Never seen' WHERE field = 'reason'")
    assert "operation:1 seq 3: reason is not the text that was committed to." in findings()


def test_an_opening_that_nothing_commits_to_is_found(tamper):
    tamper(
        "INSERT INTO audit_opening (entry_id, field, salt, value) SELECT id, 'note', 'x', 'y' FROM audit_entry"
        " WHERE subject = 'operation:1' AND seq = 1"
    )
    assert findings() == ["operation:1 seq 1: note is kept beside the record, which commits to no such field."]


def test_erased_text_is_counted_and_breaks_no_proof(tamper):
    tamper("DELETE FROM audit_opening WHERE field = 'reason'")
    tally = Tally()
    assert list(verify(HEADS, tally=tally)) == []
    assert tally.erased == 4


def test_log_and_owners_are_read_in_one_snapshot(stories, superuser_connection):
    """A move that is made while the check runs stands in neither side, so a running system gives no false finding."""

    def lazy_heads():
        yield Head(subject="operation:1", version=Entry.objects.get(**LAST).version, state="succeeded")
        superuser_connection.execute("SELECT audit_append(%s, %s, %s, %s, %s, %s, %s, NULL)", MOVE)

    assert list(verify(lazy_heads())) == []
    assert Entry.objects.filter(subject="operation:1").count() == 4


def run(*arguments):
    out = StringIO()
    try:
        call_command("audit_verify", *arguments, stdout=out)
    except CommandError as error:
        return error.returncode, out.getvalue()
    return 0, out.getvalue()


def test_the_command_says_clean_and_what_is_not_covered(stories, settings):
    settings.AFTERCALL_AUDIT_HEADS = ["tests.test_audit_verify.heads"]
    code, said = run()
    assert code == 0
    assert "Checked 10 entries about 3 subjects, and 3 subjects against where the owner stands." in said
    assert "is not sealed: sealing is not set up" in said
    assert said.endswith("No findings.\n")


def test_the_command_names_every_finding_and_fails(tamper, settings):
    settings.AFTERCALL_AUDIT_HEADS = ["tests.test_audit_verify.heads"]
    tamper("DELETE FROM audit_entry WHERE subject = 'operation:10'")
    code, said = run()
    assert code == 1
    assert said.startswith("operation:10: its owner has it at version 3")


def test_the_command_says_when_it_could_not_check(ledger_db, tmp_path):
    assert run("--file", str(tmp_path / "none.jsonl"))[0] == 2


def test_registered_heads_are_read_from_the_settings(settings):
    settings.AFTERCALL_AUDIT_HEADS = ["tests.test_audit_verify.heads"]
    assert list(registered_heads()) == HEADS


def forge(connection, subject, at_seq, canonical, **changes):
    """Put other bytes, their true hash and agreeing copies into a row."""
    record = json.loads(canonical) | changes
    data = json.dumps(record, separators=(",", ":"), sort_keys=True).encode()
    body = record["body"]
    connection.execute(
        "UPDATE audit_entry SET canonical = %s, hash = %s, at = %s, event = %s, from_state = %s, to_state = %s,"
        " version = %s, actor = %s, reason_code = %s WHERE subject = %s AND seq = %s",
        [
            data,
            hashlib.sha256(data).digest(),
            record["at"],
            record["event"],
            record["from"],
            record["to"],
            record["version"],
            body["actor"],
            body["reason_code"],
            subject,
            at_seq,
        ],
    )


def insert(connection, canonical, *, seq, **changes):
    """A forged row of operation:1 with a true hash and agreeing copies."""
    connection.execute(
        "INSERT INTO audit_entry (subject, seq, tenant, at, event, from_state, to_state, version, actor, actor_kind,"
        " reason_code, canonical, hash) SELECT subject, %s, tenant, at, event, from_state, to_state, version, actor,"
        " actor_kind, reason_code, canonical, hash FROM audit_entry WHERE canonical = %s",
        [seq, canonical],
    )
    forge(connection, "operation:1", seq, canonical, seq=seq, **changes)
