"""Checking the audit log in the database: every record, every subject's chain, and the ends against their owners."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple

from django.conf import settings
from django.db import connections, transaction
from django.utils.module_loading import import_string

from audit.models import Entry
from audit.proof import Chain, Finding, Stored, check_record, erased, read
from audit.selection import instant, with_openings

COPIES = (
    "subject",
    "seq",
    "tenant",
    "at",
    "event",
    "from_state",
    "to_state",
    "version",
    "actor",
    "actor_kind",
    "on_behalf_of",
    "reason_code",
    "batch",
)
CHUNK = 500


class Head(NamedTuple):
    """Where a subject stands by its owner's word: an operation's row says what its last audited move must have been."""

    subject: str
    version: int
    state: str | None


@dataclass(slots=True)
class Tally:
    """What was looked at; filled while the findings are read."""

    entries: int = 0
    subjects: int = 0
    heads: int = 0
    erased: int = 0
    oldest: datetime | None = None


def verify(heads: Iterable[Head] = (), *, tally: Tally | None = None, using: str = "default") -> Iterator[Finding]:
    """Yield everything in the log that is not as it was written, in constant memory.

    Log and heads are read in one snapshot: `heads` must be lazy and read from the same connection. Without sealed
    checkpoints a chain that was rewritten up to its end, together with its owner's row, cannot be told from a true one.
    """
    tally = tally or Tally()
    with transaction.atomic(using=using, durable=True):
        with connections[using].cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield from _check_entries(tally, using)
        yield from _check_heads(heads, tally, using)


def registered_heads() -> Iterator[Head]:
    """The heads of every owner named in AFTERCALL_AUDIT_HEADS: dotted paths of functions that yield heads.

    A plain (subject, version, state) is a head too, so that an owner need not import this module.
    """
    for path in getattr(settings, "AFTERCALL_AUDIT_HEADS", ()):
        for head in import_string(path)():
            yield Head(*head)


def _check_entries(tally: Tally, using: str) -> Iterator[Finding]:
    chain = Chain(from_one=True, contiguous=True)
    entries = with_openings(Entry.objects.using(using)).order_by("subject", "seq")
    for row in entries.values("canonical", "hash", "openings_json", *COPIES).iterator(chunk_size=CHUNK):
        tally.entries += 1
        tally.oldest = row["at"] if tally.oldest is None else min(tally.oldest, row["at"])
        yield from _check_entry(stored_row(row), chain, tally)
    tally.subjects = chain.subjects


def _check_entry(stored: Stored, chain: Chain, tally: Tally) -> Iterator[Finding]:
    record = None
    try:
        record = read(stored.canonical)
    except ValueError as problem:
        yield stored.finding(str(problem))
    else:
        tally.erased += erased(stored, record)
        yield from check_record(stored, record)
    yield from chain.step(stored, record)


def stored_row(row: dict[str, Any]) -> Stored:
    """A row of the table in the form in which it is checked."""
    copies = {name: row[name] for name in COPIES} | {"at": instant(row["at"])}
    openings = {each["field"]: (bytes.fromhex(each["salt"]), each["value"]) for each in row["openings_json"]}
    return Stored(
        subject=row["subject"],
        seq=row["seq"],
        canonical=bytes(row["canonical"]),
        hash=bytes(row["hash"]),
        copies=copies,
        openings=openings,
    )


def _check_heads(heads: Iterable[Head], tally: Tally, using: str) -> Iterator[Finding]:
    iterator = iter(heads)
    while batch := list(islice(iterator, CHUNK)):
        tally.heads += len(batch)
        last = _last_moves([head.subject for head in batch], using)
        for head in batch:
            yield from _check_head(head, last.get(head.subject))


def _last_moves(subjects: list[str], using: str) -> dict[str, dict[str, Any]]:
    moves = Entry.objects.using(using).filter(subject__in=subjects, version__isnull=False)
    last = moves.order_by("subject", "-seq").distinct("subject")
    return {row["subject"]: dict(row) for row in last.values("subject", "seq", "version", "to_state")}


def _check_head(head: Head, last: dict[str, Any] | None) -> Iterator[Finding]:
    if last is None:
        sentence = f"its owner has it at version {head.version}, but the log has no move of it: the subject is missing."
        yield Finding(subject=head.subject, seq=None, sentence=sentence)
        return
    seq, version, state = last["seq"], last["version"], last["to_state"]
    if version < head.version:
        sentence = f"the log ends at version {version}, but its owner is at {head.version}: the tail is missing."
        yield Finding(subject=head.subject, seq=seq, sentence=sentence)
    elif version > head.version:
        sentence = f"the log goes on to version {version}, but its owner is at {head.version}."
        yield Finding(subject=head.subject, seq=seq, sentence=sentence)
    elif state is not None and head.state is not None and state != head.state:
        sentence = f"the log ends in {state}, but its owner says {head.state}."
        yield Finding(subject=head.subject, seq=seq, sentence=sentence)
