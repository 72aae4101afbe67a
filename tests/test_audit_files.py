"""Exported files on somebody else's machine: what audit_verify says of a whole one, a cut one and a changed one."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from audit import log
from audit.export import Export
from audit.files import FileTally, NoManifest, verify_file
from audit.log import Fact
from audit.selection import Selection

WORKER = Fact(actor="worker:4f2a", actor_kind="worker", reason_code="claimed", details={"attempt": 1})
OLGA = Fact(
    actor="person:7", actor_kind="person", actor_name="Olga", reason_code="asserted", reason="Seen, with \u2028"
)
AUDITOR = Fact(actor="person:9", actor_kind="person", reason_code="audit_export")


@pytest.fixture
def lines(ledger_db):
    """The lines of an export of two subjects, three moves each, with all entries of the subjects in it."""
    for version, fact in enumerate((WORKER, OLGA, WORKER), start=1):
        for subject in ("operation:2", "operation:10"):
            log.append(subject=subject, tenant="acme", event="transition", fact=fact, version=version)
    with Export(Selection(tenant="acme"), format="jsonl", by=AUDITOR) as out:
        return b"".join(out).split(b"\n")[:-1]


@pytest.fixture
def found(tmp_path):
    """Writes lines into a file and returns what is found in it."""

    def check(lines, *, name="log.jsonl"):
        path = tmp_path / name
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return [str(finding) for finding in verify_file(path, tally=FileTally())]

    return check


def sealed_again(lines):
    """The lines with a trailer that fits them: what somebody does who knows the format."""
    body = b"".join(line + b"\n" for line in lines[:-1])
    sums = {"rows": len(lines) - 2, "sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)}
    last_hash = json.loads(lines[-2])["hash"]
    return [*lines[:-1], json.dumps(json.loads(lines[-1]) | sums | {"last_hash": last_hash}).encode()]


def edited(line, old, new):
    entry = json.loads(line)
    return json.dumps(entry | {"canonical": entry["canonical"].replace(old, new)}).encode()


def rehashed(line):
    entry = json.loads(line)
    return json.dumps(entry | {"hash": hashlib.sha256(entry["canonical"].encode()).hexdigest()}).encode()


def test_a_whole_file_has_no_findings(lines, found):
    assert len(lines) == 9
    assert found(lines) == []


@pytest.mark.parametrize("kept", [1, 2, 5, 8])
def test_a_cut_off_file_is_recognised(lines, found, kept):
    assert "file: the trailer is missing: the file was cut off." in found(lines[:kept])


def test_a_file_that_was_cut_inside_a_line_is_recognised(lines, found):
    assert "file: the trailer is missing: the file was cut off." in found([*lines[:4], lines[4][:40]])


def test_an_empty_file_is_no_export(found):
    assert "file: the first line is not the manifest of an export." in found([])


def test_a_line_that_was_taken_out_is_found_twice(lines, found):
    said = found(lines[:3] + lines[4:])
    assert any("rows should be 7, but is 6" in finding for finding in said)
    assert "operation:2 seq 3: records before this one are missing: seq 2." in said


def test_a_line_that_was_taken_out_is_found_though_the_trailer_fits(lines, found):
    expected = "operation:2 seq 3: records before this one are missing: seq 2."
    assert found(sealed_again(lines[:3] + lines[4:])) == [expected]


def test_a_line_that_comes_twice_is_found(lines, found):
    assert "operation:2 seq 1: this number comes twice." in found(sealed_again([*lines[:2], lines[1], *lines[2:]]))


def test_an_edited_entry_is_found_by_its_hash(lines, found):
    changed = [*lines[:1], edited(lines[1], '"attempt":1', '"attempt":9'), *lines[2:]]
    assert found(sealed_again(changed)) == ["operation:2 seq 1: the hash is not that of the stored bytes."]


def test_an_edited_and_rehashed_entry_is_found_by_the_next_one(lines, found):
    changed = [*lines[:1], rehashed(edited(lines[1], '"attempt":1', '"attempt":9')), *lines[2:]]
    (said,) = found(sealed_again(changed))
    assert said.startswith("operation:2 seq 2: it does not follow the record before it")


def test_an_edited_opening_is_found(lines, found):
    place = next(place for place, line in enumerate(lines) if b"Olga" in line)
    changed = [*lines[:place], lines[place].replace(b"Olga", b"Oleg"), *lines[place + 1 :]]
    assert found(sealed_again(changed)) == ["operation:2 seq 2: actor_name is not the text that was committed to."]


def test_an_entry_of_another_tenant_is_found(lines, found):
    changed = [*lines[:1], rehashed(edited(lines[1], '"tenant":"acme"', '"tenant":"evil"')), *lines[2:]]
    assert "operation:2 seq 1: it belongs to another tenant than the file." in found(sealed_again(changed))


@pytest.mark.parametrize("line", [b"", b"[]", b'{"kind":"entry"}', b"\xff", b'{"kind":"entry","hash":7}', b"[" * 5000])
def test_a_line_that_is_no_entry_is_found(lines, found, line):
    assert "file: line 4 is not an entry." in found([*lines[:3], line, *lines[3:]])


def test_something_after_the_trailer_is_found(lines, found):
    assert found([*lines, b"more"]) == ["file: something follows the trailer."]


@pytest.mark.parametrize("filters", [{"actor": "worker:4f2a"}, {"event": "transition"}])
def test_gaps_that_filters_leave_are_no_findings(lines, found, filters):
    with Export(Selection(tenant="acme", **filters), format="jsonl", by=AUDITOR) as out:
        assert found(b"".join(out).split(b"\n")[:-1]) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: data[:-200], "the file was changed or cut"),
        (lambda data: data.replace(b"worker", b"Worker", 1), "sha256 should be"),
        (lambda data: data + data[-200:], "the file was changed or cut"),
    ],
)
def test_a_csv_is_compared_with_its_manifest(lines, tmp_path, change, sentence):
    with Export(Selection(tenant="acme"), format="csv", by=AUDITOR) as out:
        data = b"".join(out)
    path = tmp_path / "log.csv"
    path.write_bytes(data)
    with pytest.raises(NoManifest, match="is not beside it"):
        list(verify_file(path, tally=FileTally()))
    (tmp_path / "log.csv.manifest.json").write_text(json.dumps(out.manifest))
    assert list(verify_file(path, tally=FileTally())) == []
    path.write_bytes(change(data))
    assert any(sentence in str(finding) for finding in verify_file(path, tally=FileTally()))


def test_a_file_is_checked_without_a_database(lines, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    nowhere = {**os.environ, "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none"}
    command = [sys.executable, "manage.py", "audit_verify", "--file", str(path)]
    child = subprocess.run(command, env=nowhere, capture_output=True, text=True, check=False)
    assert (child.returncode, child.stderr) == (0, "")
    path.write_bytes(path.read_bytes()[:-10])
    assert subprocess.run(command, env=nowhere, capture_output=True, check=False).returncode == 1
    path.rename(path.with_suffix(".csv"))
    alone = subprocess.run(
        [*command[:-1], str(path.with_suffix(".csv"))], env=nowhere, capture_output=True, text=True, check=False
    )
    assert (alone.returncode, alone.stdout) == (2, "")
    assert "Could not be checked: log.csv.manifest.json is not beside it" in alone.stderr
    assert subprocess.run([*command, "--what"], env=nowhere, capture_output=True, check=False).returncode == 2
