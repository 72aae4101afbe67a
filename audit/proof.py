"""What makes a record and a chain of records sound. Needs no database: exported files are checked with it too."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from audit.canonical import Unwritable, canonical

MEMBERS = frozenset({"at", "body", "event", "from", "prev", "seq", "subject", "tenant", "to", "v", "version"})
BODY_MEMBERS = frozenset(
    {"actor", "actor_kind", "batch", "commitments", "details", "evidence", "on_behalf_of", "reason_code"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that is not as it was written, in one sentence."""

    subject: str
    seq: int | None
    sentence: str

    def __str__(self) -> str:
        place = self.subject if self.seq is None else f"{self.subject} seq {self.seq}"
        return f"{place}: {self.sentence}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One record as it is stored: where it stands, the bytes, their hash, and what is kept beside them.

    `copies` are the columns to be compared with the bytes, named as `as_copies` names them. `openings` maps a field to
    its salt and value.
    """

    subject: str
    seq: int
    canonical: bytes
    hash: bytes
    copies: Mapping[str, Any] = field(default_factory=dict)
    openings: Mapping[str, tuple[bytes, str]] = field(default_factory=dict)

    def finding(self, sentence: str) -> Finding:
        return Finding(subject=self.subject, seq=self.seq, sentence=sentence)


def read(canonical_bytes: bytes) -> dict[str, Any]:
    """Read the bytes of a record. Raises ValueError with a sentence when they are not one in canonical form."""
    try:
        text = canonical_bytes.decode()
        record = json.loads(text, object_pairs_hook=_members, parse_float=_refuse, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise ValueError("the stored bytes are not the JSON of a record.") from None
    if not isinstance(record, dict) or record.keys() != MEMBERS or record["v"] != 1 or not _is_body(record["body"]):
        raise ValueError("the stored bytes do not have the members of a record.")
    try:
        exact = canonical(record) == text
    except Unwritable:
        exact = False
    if not exact:
        raise ValueError("the stored bytes are not in canonical form (RFC 8785).")
    return record


def as_copies(record: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the columns that stand beside the bytes."""
    body = record["body"]
    return {
        "subject": record["subject"],
        "seq": record["seq"],
        "tenant": record["tenant"],
        "at": record["at"],
        "event": record["event"],
        "from_state": record["from"],
        "to_state": record["to"],
        "version": record["version"],
        "actor": body["actor"],
        "actor_kind": body["actor_kind"],
        "on_behalf_of": body["on_behalf_of"],
        "reason_code": body["reason_code"],
        "batch": body["batch"],
    }


def check_record(stored: Stored, record: Mapping[str, Any]) -> Iterator[Finding]:
    """Check one record by itself: its hash, the copies beside it, and what its commitments stand for."""
    if hashlib.sha256(stored.canonical).digest() != stored.hash:
        yield stored.finding("the hash is not that of the stored bytes.")
    told = as_copies(record)
    for name, value in stored.copies.items():
        if told[name] != value:
            yield stored.finding(f"the column {name} differs from the hashed bytes.")
    yield from _check_openings(stored, record["body"]["commitments"])


def erased(stored: Stored, record: Mapping[str, Any]) -> int:
    """How many commitments of the record can no longer be opened. That is no fault: erasing is allowed."""
    return len(record["body"]["commitments"].keys() - stored.openings.keys())


def _check_openings(stored: Stored, commitments: Mapping[str, Any]) -> Iterator[Finding]:
    for name, (salt, value) in stored.openings.items():
        if name not in commitments:
            yield stored.finding(f"{name} is kept beside the record, which commits to no such field.")
        elif hashlib.sha256(salt + value.encode()).hexdigest() != commitments[name]:
            yield stored.finding(f"{name} is not the text that was committed to.")


class Chain:
    """Walks the records of one subject after another, each subject's in the order of their numbers.

    `from_one`: every subject begins with number 1 (a file that is bounded in time may begin later).
    `contiguous`: no number is left out (a filtered file leaves out some; then only neighbours are compared).
    """

    def __init__(self, *, from_one: bool, contiguous: bool) -> None:
        self._from_one = from_one
        self._contiguous = contiguous
        self.subjects = 0
        self._begin("")

    def _begin(self, subject: str) -> None:
        self.subject = subject
        self._seq = 0
        self._hash = b""
        self._version: int | None = 0 if self._from_one else None
        self._state: str | None = None

    def step(self, stored: Stored, record: Mapping[str, Any] | None) -> Iterator[Finding]:
        """Take the next record. `record` is None when its bytes could not be read; the link is judged all the same."""
        first = stored.subject != self.subject
        if first:
            self.subjects += 1
            self._begin(stored.subject)
        neighbour = stored.seq == self._seq + 1
        if not neighbour:
            yield from self._out_of_turn(stored, first=first)
        elif record is not None:
            yield from self._check_link(stored, record)
        self._keep(stored, record, neighbour=neighbour)

    def _out_of_turn(self, stored: Stored, *, first: bool) -> Iterator[Finding]:
        if stored.seq <= self._seq:
            yield stored.finding("this number comes twice.")
        elif first and self._from_one:
            yield stored.finding(f"the beginning is missing: {_range(1, stored.seq - 1)}.")
        elif not first and self._contiguous:
            yield stored.finding(f"records before this one are missing: {_range(self._seq + 1, stored.seq - 1)}.")

    def _check_link(self, stored: Stored, record: Mapping[str, Any]) -> Iterator[Finding]:
        if record["prev"] != self._hash.hex():
            yield stored.finding("it does not follow the record before it (the hash named as previous is another).")
        version, origin = record["version"], record["from"]
        if version is None:
            return
        if self._version is not None and version != self._version + 1 and self._contiguous:
            yield stored.finding(f"it made version {version}, but the last version before it was {self._version}.")
        if self._contiguous and origin is not None and self._state is not None and origin != self._state:
            yield stored.finding(f"it starts from {origin}, but the state before it was {self._state}.")

    def _keep(self, stored: Stored, record: Mapping[str, Any] | None, *, neighbour: bool) -> None:
        self._seq, self._hash = stored.seq, stored.hash
        if record is None or not neighbour:
            self._version = self._state = None
        if record is not None and record["version"] is not None:
            self._version, self._state = record["version"], record["to"]


def _range(first: int, last: int) -> str:
    return f"seq {first}" if first == last else f"seq {first} to {last}"


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(members := dict(pairs)) != len(pairs):
        raise ValueError("a member comes twice")
    return members


def _refuse(number: str) -> NoReturn:
    raise ValueError("a number that is no integer")


def _is_body(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == BODY_MEMBERS and isinstance(value["commitments"], dict)
