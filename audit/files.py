"""Checking an exported file, without a database: is it whole, and does everything in it prove itself?"""

import csv
import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from audit.proof import Chain, Finding, Stored, check_record, erased, read

# No line of ours comes near; a longer one is not read into memory.
LONGEST_LINE = 16 * 1024 * 1024
MANIFEST_SUFFIX = ".manifest.json"


@dataclass(slots=True)
class FileTally:
    """What was looked at; filled while the findings are read."""

    rows: int = 0
    subjects: int = 0
    erased: int = 0
    last_hash: str = ""
    size: int = 0
    sha256: Any = field(default_factory=hashlib.sha256)
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def take(self, line: bytes) -> None:
        self.size += len(line)
        self.sha256.update(line)


class NoManifest(FileNotFoundError):
    """A CSV stands alone: it is neither as it was handed out nor otherwise, it cannot be checked."""


def verify_file(path: Path, *, tally: FileTally) -> Iterator[Finding]:
    """Yield everything in an exported file that is not as it was handed out. Raises OSError when it cannot be read,
    and NoManifest, which is one, for a CSV without the manifest that it must add up to.

    A JSONL file proves its entries and the links between neighbours. A CSV is for people: with the manifest beside it,
    only its bytes are compared with what was handed out.
    """
    yield from (_verify_csv(path, tally) if path.suffix == ".csv" else _verify_jsonl(path, tally))


def _verify_jsonl(path: Path, tally: FileTally) -> Iterator[Finding]:
    with path.open("rb") as file, _Links() as links:
        yield from _first_line(file, tally)
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), start=2):
            told = _told(line)
            if told.get("kind") == "trailer":
                yield from _check_sums(told, tally)
                yield from _nothing_after(file)
                break
            tally.take(line)
            yield from _check_entry(told, number, links, tally)
        else:
            yield _of_file("the trailer is missing: the file was cut off.")
        yield from _check_links(links, tally)


def _first_line(file: BinaryIO, tally: FileTally) -> Iterator[Finding]:
    line = file.readline(LONGEST_LINE)
    tally.take(line)
    tally.manifest = _told(line)
    if tally.manifest.get("kind") != "manifest" or tally.manifest.get("aftercall_audit_export") != 1:
        yield _of_file("the first line is not the manifest of an export.")


def _check_entry(told: Mapping[str, Any], number: int, links: "_Links", tally: FileTally) -> Iterator[Finding]:
    try:
        stored = _stored(told)
    except (KeyError, TypeError, ValueError, AttributeError):
        yield _of_file(f"line {number} is not an entry.")
        return
    tally.rows += 1
    tally.last_hash = stored.hash.hex()
    try:
        record = read(stored.canonical)
    except ValueError as problem:
        yield _of_file(f"line {number}: {problem}")
        return
    stored = Stored(
        subject=record["subject"],
        seq=record["seq"],
        canonical=stored.canonical,
        hash=stored.hash,
        openings=stored.openings,
    )
    tally.erased += erased(stored, record)
    yield from check_record(stored, record)
    yield from _check_asked(stored, record, tally.manifest)
    links.keep(stored, record)


def _stored(told: Mapping[str, Any]) -> Stored:
    if told["kind"] != "entry":
        raise ValueError("no entry")
    opened = {name: (bytes.fromhex(each["salt"]), str(each["value"])) for name, each in told["openings"].items()}
    digest = bytes.fromhex(told["hash"])
    return Stored(subject="", seq=0, canonical=told["canonical"].encode(), hash=digest, openings=opened)


def _check_asked(stored: Stored, record: Mapping[str, Any], manifest: Mapping[str, Any]) -> Iterator[Finding]:
    """An entry that the manifest's question does not cover was put in later."""
    if record["tenant"] != manifest.get("tenant"):
        yield stored.finding("it belongs to another tenant than the file.")
    since, until = manifest.get("since"), manifest.get("until")
    if (since and record["at"] < since) or (until and record["at"] >= until):
        yield stored.finding("its time is outside the bounds of the file.")


def _check_sums(trailer: Mapping[str, Any], tally: FileTally) -> Iterator[Finding]:
    for name, is_so in (
        ("rows", tally.rows),
        ("last_hash", tally.last_hash),
        ("sha256", tally.sha256.hexdigest()),
        ("bytes", tally.size),
    ):
        if trailer.get(name) != is_so:
            yield _of_file(f"{name} should be {trailer.get(name)}, but is {is_so}: the file was changed or cut.")


def _nothing_after(file: BinaryIO) -> Iterator[Finding]:
    if file.read(1):
        yield _of_file("something follows the trailer.")


def _check_links(links: "_Links", tally: FileTally) -> Iterator[Finding]:
    """Walk the chains. With filters on anything but the subject, a file leaves out numbers for a good reason."""
    contiguous = _is_contiguous(tally.manifest)
    chain = Chain(from_one=contiguous and not tally.manifest.get("since"), contiguous=contiguous)
    for stored, record in links:
        yield from chain.step(stored, record)
    tally.subjects = chain.subjects


def _is_contiguous(manifest: Mapping[str, Any]) -> bool:
    filters = manifest.get("filters")
    return isinstance(filters, dict) and filters.keys() <= {"subject"}


class _Links:
    """What is needed of every entry to walk the chains, sorted on disk: a file comes in the order of time."""

    def __enter__(self) -> "_Links":
        # An empty name is a private database that SQLite keeps in a temporary file once it outgrows its cache.
        self._table = sqlite3.connect("")
        self._table.execute("CREATE TABLE link (subject, seq, hash, prev, version, origin, target)")
        return self

    def __exit__(self, *_: object) -> None:
        self._table.close()

    def keep(self, stored: Stored, record: Mapping[str, Any]) -> None:
        values = (record["prev"], record["version"], record["from"], record["to"])
        self._table.execute(
            "INSERT INTO link VALUES (?,?,?,?,?,?,?)", (stored.subject, stored.seq, stored.hash, *values)
        )

    def __iter__(self) -> Iterator[tuple[Stored, Mapping[str, Any]]]:
        for row in self._table.execute("SELECT * FROM link ORDER BY subject, seq"):
            subject, seq, digest, prev, version, origin, target = row
            stored = Stored(subject=subject, seq=seq, canonical=b"", hash=digest)
            yield stored, {"prev": prev, "version": version, "from": origin, "to": target}


def _verify_csv(path: Path, tally: FileTally) -> Iterator[Finding]:
    beside = path.with_name(path.name + MANIFEST_SUFFIX)
    if not beside.exists():
        raise NoManifest(f"{beside.name} is not beside it: without it nobody can say whether the file is whole.")
    tally.manifest = _told(beside.read_bytes())
    with path.open("rb") as file:
        while piece := file.read(1024 * 1024):
            tally.take(piece)
    with path.open(encoding="utf-8", errors="replace", newline="") as text:
        rows = csv.DictReader(text)
        for row in rows:
            tally.rows += 1
            tally.last_hash = row.get("hash") or ""
    yield from _check_sums(tally.manifest, tally)


def _told(line: bytes) -> Mapping[str, Any]:
    """The object in a line; empty where there is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _of_file(sentence: str) -> Finding:
    return Finding(subject="file", seq=None, sentence=sentence)
