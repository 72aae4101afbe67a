"""Handing the log out: the exact bytes, the bounds, the snapshot, the memory, and the record of the export itself."""

import csv
import io
import json
from datetime import date, datetime
from zoneinfo import ZoneInfo

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.http import StreamingHttpResponse

from audit import export, log
from audit.export import CSV_COLUMNS, Export
from audit.log import Fact
from audit.models import Entry
from audit.selection import InvalidSelection, Selection, day_start, page
from benchmarks import audit_export

SYSTEM = Fact(actor="system:beat", actor_kind="system", reason_code="due", details={"late_by": 3})
AUDITOR = Fact(actor="person:9", actor_kind="person", actor_name="Ada", reason_code="audit_export")
HOSTILE = Fact(
    actor="person:7",
    actor_kind="person",
    actor_name="+4912345",
    reason_code="@SUM(A1:A9)",
    reason='=HYPERLINK("http://x.invalid","pay")\r\n',
)
ACME = Selection(tenant="acme")


def write(subject="operation:1", *, tenant="acme", event="transition", fact=SYSTEM):
    return log.append(subject=subject, tenant=tenant, event=event, fact=fact)


def exported(selection=ACME, *, format="jsonl"):
    with Export(selection, format=format, by=AUDITOR) as out:
        return b"".join(out)


def entries(selection=ACME):
    lines = [json.loads(line) for line in exported(selection).splitlines()]
    return [json.loads(line["canonical"]) for line in lines[1:-1]]


def csv_rows(data):
    return list(csv.DictReader(io.StringIO(data.decode(), newline="")))


@pytest.mark.case("H1")
def test_a_csv_line_is_exactly_this():
    fields = (
        '=HYPERLINK("http://x.invalid","pay")',
        "+4912345",
        "-2+3",
        "@SUM(A1:A9)",
        "\t=1+1",
        'a"b,c',
        "line1\r\nline2",
        -5,
    )
    assert export.csv_line(fields) == (
        b'"\'=HYPERLINK(""http://x.invalid"",""pay"")",\'+4912345,\'-2+3,\'@SUM(A1:A9),'
        b'\'\t=1+1,"a""b,c","line1\r\nline2",-5\r\n'
    )


@pytest.mark.case("H1")
@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("\rx", b'"\'\rx"'),
        ("\nx", b'"\'\nx"'),
        ("\0x", b"'\0x"),
        ("normal = text", b"normal = text"),
        ("0012", b"0012"),
        ("", b""),
        (None, b""),
        (-5, b"-5"),
        ("Öl ⇥", "Öl ⇥".encode()),
    ],
)
def test_only_text_that_begins_like_a_formula_is_prefixed(value, field):
    assert export.csv_line([value]) == field + b"\r\n"


@pytest.mark.case("H1")
def test_a_csv_reads_back_as_one_row_an_event_and_says_what_was_prefixed(ledger_db):
    write()
    write(fact=HOSTILE)
    data = exported(format="csv")
    plain, hostile, _ = rows = csv_rows(data)
    assert data.startswith(",".join(CSV_COLUMNS).encode() + b"\r\n")
    assert len(rows) == Entry.objects.filter(event__in=["transition", "export"]).count() == 3
    assert (plain["csv_prefixed_fields"], plain["details"]) == ("", '{"late_by":3}')
    assert hostile["csv_prefixed_fields"] == "actor_name reason_code reason"
    for name, raw in (("actor_name", "+4912345"), ("reason_code", "@SUM(A1:A9)"), ("reason", HOSTILE.reason)):
        assert hostile[name] == f"'{raw}"


@pytest.mark.case("H1")
def test_a_jsonl_holds_the_raw_text_and_the_hashed_bytes(ledger_db):
    pk = write(fact=HOSTILE)
    entry = json.loads(exported().splitlines()[1])
    stored = Entry.objects.get(id=pk)
    assert entry["canonical"].encode() == bytes(stored.canonical)
    assert entry["hash"] == bytes(stored.hash).hex()
    assert {name: opening["value"] for name, opening in entry["openings"].items()} == {
        "actor_name": HOSTILE.actor_name,
        "reason": HOSTILE.reason,
    }


def test_erased_text_is_said_to_be_erased(ledger_db, superuser_connection):
    write(fact=HOSTILE)
    superuser_connection.execute("SET session_replication_role = replica")
    superuser_connection.execute("DELETE FROM audit_opening")
    assert csv_rows(exported(format="csv"))[0]["reason"] == "(erased)"


def test_other_tenants_are_not_in_it(ledger_db):
    write()
    write("operation:2", tenant="other")
    assert {entry["tenant"] for entry in entries()} == {"acme"}


@pytest.mark.parametrize(
    ("filters", "subjects"),
    [
        ({"subject": "operation:2"}, {"operation:2"}),
        ({"actor": "person:7"}, {"operation:2"}),
        ({"event": "refused"}, {"operation:3"}),
        ({"reason_code": "@SUM(A1:A9)"}, {"operation:2"}),
        ({"batch": "none"}, set()),
    ],
)
def test_the_page_and_the_export_filter_alike(ledger_db, filters, subjects):
    write()
    write("operation:2", fact=HOSTILE)
    write("operation:3", event="refused")
    selection = Selection(tenant="acme", **filters)
    assert {entry.subject for entry in page(selection)} == subjects
    assert {entry["subject"] for entry in entries(selection)} == subjects


def test_pages_follow_each_other_without_gap_or_repeat(ledger_db):
    written = [write() for _ in range(7)]
    seen, before = [], None
    while batch := page(ACME, before=before, size=3):
        seen += [entry.id for entry in batch]
        before = batch[-1].id
    assert seen == written[::-1]


@pytest.mark.parametrize(
    ("zone", "day", "instant"),
    [
        ("UTC", date(2026, 3, 29), "2026-03-29T00:00+00:00"),
        ("Europe/Berlin", date(2026, 3, 29), "2026-03-28T23:00+00:00"),  # 23 hours long
        ("Europe/Berlin", date(2026, 3, 30), "2026-03-29T22:00+00:00"),
        ("Europe/Berlin", date(2026, 10, 25), "2026-10-24T22:00+00:00"),  # 25 hours long
        ("Europe/Berlin", date(2026, 10, 26), "2026-10-25T23:00+00:00"),
        ("Asia/Kathmandu", date(2026, 1, 1), "2025-12-31T18:15+00:00"),
        ("Africa/Cairo", date(2026, 4, 24), "2026-04-23T22:00+00:00"),  # midnight is skipped: begins at 01:00
        ("America/Havana", date(2026, 11, 1), "2026-11-01T04:00+00:00"),  # midnight comes twice: the first
        ("Pacific/Apia", date(2011, 12, 30), "2011-12-30T10:00+00:00"),  # a day that never was: empty
        ("Pacific/Apia", date(2011, 12, 31), "2011-12-30T10:00+00:00"),
    ],
)
def test_a_day_begins_at_its_first_instant_there(zone, day, instant):
    begin = day_start(day, zone=zone)
    assert begin == datetime.fromisoformat(instant)
    assert begin.astimezone(ZoneInfo(zone)).date() >= day


def test_days_are_half_open_in_the_readers_zone(ledger_db, superuser_connection):
    superuser_connection.execute("SET session_replication_role = replica")
    for number, moment in enumerate(["29T22:59:59.999999", "29T23:00:00", "30T21:59:59.999999", "30T22:00:00"]):
        pk, at = write(f"operation:{number}"), f"2031-03-{moment}Z"
        superuser_connection.execute("UPDATE audit_entry SET at = %s WHERE id = %s", [at, pk])
    asked = Selection(
        tenant="acme", first_day=date(2031, 3, 30), end_day=date(2031, 3, 31), zone="Europe/Berlin", event="transition"
    )
    assert [entry["subject"] for entry in entries(asked)] == ["operation:1", "operation:2"]


@pytest.mark.parametrize(
    "asked",
    [
        {"zone": "Berlin"},
        {"zone": "../../etc/passwd"},
        {"zone": ""},
        {"tenant": "ACME"},
        {"first_day": date(2026, 2, 1), "end_day": date(2026, 1, 1)},
    ],
)
def test_a_question_without_meaning_is_refused(asked):
    with pytest.raises(InvalidSelection):
        Selection(**{"tenant": "acme", **asked})


def test_the_first_line_says_what_was_asked_and_the_last_what_there_must_be(ledger_db):
    write()
    asked = Selection(tenant="acme", first_day=date(2026, 1, 1), zone="Europe/Berlin", event="transition")
    first, entry, last = [json.loads(line) for line in exported(asked).splitlines()]
    assert (first["kind"], first["aftercall_audit_export"]) == ("manifest", 1)
    assert (first["since"], first["until"]) == ("2025-12-31T23:00:00.000000Z", None)
    assert (first["zone"], first["filters"]) == ("Europe/Berlin", {"event": "transition"})
    assert (last["kind"], last["rows"], last["last_hash"]) == ("trailer", 1, entry["hash"])


def test_the_export_is_on_record_before_its_first_byte(ledger_db, superuser_connection):
    write()
    out = Export(Selection(tenant="acme", actor="system:beat"), format="csv", by=AUDITOR)
    recorded = superuser_connection.execute("SELECT canonical FROM audit_entry WHERE event = 'export'").fetchall()
    out.close()
    (record,) = [json.loads(bytes(canonical)) for (canonical,) in recorded]
    assert record["subject"] == out.name
    assert record["body"]["actor"] == "person:9"
    assert record["body"]["details"]["filters"] == {"actor": "system:beat"}
    assert record["body"]["details"]["format"] == "csv"


def test_the_end_of_an_export_is_on_record_with_what_it_adds_up_to(ledger_db):
    write()
    with Export(ACME, format="csv", by=AUDITOR) as out:
        size = sum(len(chunk) for chunk in out)
    finished = Entry.objects.get(event="export_finished")
    assert finished.subject == out.name
    assert finished.body["details"] == {
        "rows": 2,
        "bytes": size,
        "sha256": out.manifest["sha256"],
        "last_hash": out.manifest["last_hash"],
    }


def test_nothing_is_handed_out_when_it_cannot_be_recorded(ledger_db, superuser_connection):
    superuser_connection.execute("ALTER TABLE audit_entry ADD CONSTRAINT no_room CHECK (event <> 'export') NOT VALID")
    try:
        with pytest.raises(psycopg.errors.CheckViolation, match="no_room") as kept:  # the error holds on to the export
            Export(ACME, format="csv", by=AUDITOR)
    finally:
        superuser_connection.execute("ALTER TABLE audit_entry DROP CONSTRAINT no_room")
    assert kept.tb is not None
    assert open_exports(superuser_connection, expected=0)


def test_rows_that_are_written_during_an_export_are_not_in_it(ledger_db):
    for _ in range(500):
        write()
    with Export(ACME, format="csv", by=AUDITOR) as out:
        head = next(out)
        write("operation:late")
        rows = csv_rows(head + b"".join(out))
    assert len({row["id"] for row in rows}) == len(rows) == 501
    assert "operation:late" not in {row["subject"] for row in rows}


@pytest.mark.case("H7")
def test_cursor_and_connection_are_closed_when_the_reader_leaves(ledger_db, superuser_connection):
    for _ in range(600):
        write()
    response = StreamingHttpResponse(Export(ACME, format="jsonl", by=AUDITOR))
    stream = iter(response)
    next(stream), next(stream)
    assert open_exports(superuser_connection, expected=1)
    response.close()
    assert open_exports(superuser_connection, expected=0)
    left = Entry.objects.get(event="export_cut_off")
    assert 0 < left.body["details"]["rows"] < 600


def test_an_export_that_nobody_began_to_read_is_closed_too(ledger_db, superuser_connection):
    write()
    Export(ACME, format="jsonl", by=AUDITOR).close()
    assert open_exports(superuser_connection, expected=0)
    assert Entry.objects.filter(event="export_cut_off").count() == 1


def open_exports(connection, *, expected):
    """How many connections of exports are open; a backend takes a moment to end after its client has gone."""
    for _ in range(200):
        count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND datname = current_database()"
        (found,) = connection.execute(count, [export.APPLICATION_NAME]).fetchone()
        if found == expected:
            break
        connection.execute("SELECT pg_sleep(0.01)")
    return found == expected


@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_the_command_writes_a_file_that_audit_verify_accepts(ledger_db, tmp_path, format):
    write(fact=HOSTILE)
    out, said = tmp_path / f"log.{format}", io.StringIO()
    call_command("audit_export", "--tenant", "acme", "--format", format, "--out", str(out), stdout=said)
    call_command("audit_verify", "--file", str(out), stdout=said)
    assert "2 entries in" in said.getvalue()
    assert said.getvalue().endswith("No findings.\n")


def test_the_command_refuses_a_question_without_meaning(ledger_db, tmp_path):
    asked = ["--tenant", "acme", "--zone", "Berlin", "--format", "csv", "--out", str(tmp_path / "log.csv")]
    with pytest.raises(CommandError, match="IANA name") as refused:
        call_command("audit_export", *asked)
    assert refused.value.returncode == 2
    assert not (tmp_path / "log.csv").exists()


def test_the_command_never_replaces_a_file(ledger_db, tmp_path):
    (tmp_path / "log.csv").write_text("kept")
    with pytest.raises(CommandError, match="is there already"):
        call_command("audit_export", "--tenant", "acme", "--format", "csv", "--out", str(tmp_path / "log.csv"))
    assert (tmp_path / "log.csv").read_text() == "kept"
    assert not Entry.objects.exists()


@pytest.mark.case("H7")
@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_memory_does_not_grow_with_the_number_of_rows(ledger_db, database_url_env, superuser_connection, format):
    audit_export.seed(superuser_connection, rows=20_000)
    seen = audit_export.measure(format, env=database_url_env)
    assert seen["rows"] >= 20_000
    assert seen["bytes"] > 32_000_000
    assert seen["grown_mb"] < 16
    assert seen["first_byte_s"] < 2


def test_verifying_needs_no_memory_for_the_number_of_rows(ledger_db, database_url_env, superuser_connection):
    audit_export.seed(superuser_connection, rows=20_000)
    seen = audit_export.measure("verify", env=database_url_env)
    assert (seen["rows"], seen["findings"]) == (20_000, 0)
    assert seen["grown_mb"] < 16
