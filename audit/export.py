"""Handing the audit log out as a file: streamed, from one snapshot, and itself on record before the first byte."""

import hashlib
import json
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self
from zoneinfo import ZoneInfo

import psycopg
from django.db import connections

from audit import log
from audit.canonical import canonical
from audit.log import Fact
from audit.selection import Selection, instant, with_openings, zone_of

Format = Literal["csv", "jsonl"]
VERSION = 1
ROWS_A_FETCH = 200
# Large enough that the web server is not called for every row, small enough to hold many exports in memory.
CHUNK_BYTES = 64 * 1024
APPLICATION_NAME = "aftercall export"
ERASED = "(erased)"
# The first characters at which spreadsheets begin to compute (ASVS 1.2.10), and the ones that some of them skip before.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\0")
PREFIXED = "csv_prefixed_fields"
COLUMNS = (
    "id",
    "subject",
    "seq",
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
    "canonical",
    "hash",
)
CSV_COLUMNS = (
    "id",
    "subject",
    "seq",
    "at_utc",
    "at_local",
    "event",
    "from_state",
    "to_state",
    "version",
    "actor",
    "actor_kind",
    "actor_name",
    "on_behalf_of",
    "reason_code",
    "reason",
    "batch",
    "evidence",
    "details",
    "hash",
    PREFIXED,
)


@dataclass(slots=True)
class Written:
    """What has been handed out so far; at the end it is what the trailer and the closing entry say."""

    rows: int = 0
    size: int = 0
    last_hash: str = ""
    sha256: str = ""


class Export:
    """The bytes of one export, chunk by chunk, for a file or a streaming response.

    Making it records who asked for what, committed on its own, and opens the snapshot; both raise what the database
    raises, before a byte was handed out. It works on a connection of its own. `close` gives that back and records
    whether the reader got everything: call it in any case (a StreamingHttpResponse does, also when the reader leaves).
    """

    def __init__(self, selection: Selection, *, format: Format, by: Fact, using: str = "default") -> None:
        self.name = f"export:{secrets.token_hex(16)}"
        self.format = format
        self.written = Written()
        self._selection = selection
        self._by = by
        self._complete = False
        self._connection = _connect(using)
        try:
            self._record("export", _asked(selection, format))
            self._manifest, self._cursor = self._open_snapshot()
        except BaseException:
            self._connection.close()
            raise
        self._chunks = self._stream()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        return next(self._chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def manifest(self) -> dict[str, Any]:
        """What was asked for and when the snapshot was taken; once complete, also what the file must add up to."""
        return self._manifest | (_sums(self.written) if self._complete else {})

    def close(self) -> None:
        """Give the connection back. An export that was not read to its end is recorded as cut off."""
        if self._connection.closed:
            return
        self._chunks.close()
        try:
            self._end_snapshot()
            event = "export_finished" if self._complete else "export_cut_off"
            self._record(event, _sums(self.written), reason_code=event)
        finally:
            self._connection.close()

    def _record(self, event: str, details: Mapping[str, Any], **changes: Any) -> None:
        fact = replace(self._by, details={**self._by.details, **details}, **changes)
        text, openings = log.body(fact)
        values = (self.name, self._selection.tenant, event, None, None, None, text, log.openings_json(openings))
        self._connection.execute(log.APPEND, values)

    def _open_snapshot(self) -> tuple[dict[str, Any], psycopg.ServerCursor[Any]]:
        connection = self._connection
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        connection.autocommit = False
        at = connection.execute("SELECT aftercall_now()").fetchone()
        cursor = connection.cursor(name="audit_export")
        cursor.itersize = ROWS_A_FETCH
        # Merged here, for a cursor cannot be declared with parameters whose types the server has to guess.
        cursor.execute(psycopg.ClientCursor(connection).mogrify(*_query(self._selection)))
        manifest = {"aftercall_audit_export": VERSION, "export": self.name, "snapshot_at": instant(at[0])}  # type: ignore[index]
        return manifest | _asked(self._selection, self.format), cursor

    def _end_snapshot(self) -> None:
        self._connection.rollback()
        self._connection.read_only = False
        self._connection.autocommit = True

    def _stream(self) -> Generator[bytes, None, None]:
        digest = hashlib.sha256()
        for chunk in _chunks(self._lines()):
            digest.update(chunk)
            self.written.size += len(chunk)
            yield chunk
        self.written.sha256 = digest.hexdigest()
        if self.format == "jsonl":
            yield _json_line({"kind": "trailer", **_sums(self.written)})
        self._complete = True

    def _lines(self) -> Iterator[bytes]:
        line = line_maker(self.format, zone=zone_of(self._selection.zone))
        yield _json_line({"kind": "manifest", **self._manifest}) if self.format == "jsonl" else csv_line(CSV_COLUMNS)
        for values in self._cursor:
            row = dict(zip((*COLUMNS, "openings"), values, strict=True))
            yield line(row)
            self.written.rows += 1
            self.written.last_hash = bytes(row["hash"]).hex()


def line_maker(format: Format, *, zone: ZoneInfo) -> Callable[[dict[str, Any]], bytes]:
    """The function that makes a line of that format from a row."""
    return jsonl_entry if format == "jsonl" else lambda row: csv_entry(row, zone=zone)


def jsonl_entry(row: Mapping[str, Any]) -> bytes:
    """One entry as a line for machines: the hashed bytes as they are, their hash, and the openings."""
    opened = {name: {"salt": each["salt"], "value": each["value"]} for name, each in _openings(row).items()}
    entry = {"canonical": bytes(row["canonical"]).decode(), "hash": bytes(row["hash"]).hex(), "id": row["id"]}
    return _json_line({"kind": "entry", **entry, "openings": opened})


def csv_entry(row: Mapping[str, Any], *, zone: ZoneInfo) -> bytes:
    """One entry as a line for people. Text that a spreadsheet would compute is prefixed; the last column says where."""
    body = json.loads(bytes(row["canonical"]))["body"]
    shown = {name: row[name] for name in COLUMNS if name in CSV_COLUMNS}
    shown |= {"at_utc": instant(row["at"]), "at_local": row["at"].astimezone(zone).isoformat(timespec="microseconds")}
    shown |= {name: _opened(name, row, body) for name in ("actor_name", "reason")}
    details = canonical(body["details"]) if body["details"] else ""
    shown |= {"evidence": body["evidence"], "details": details, "hash": bytes(row["hash"]).hex()}
    shown[PREFIXED] = " ".join(name for name in CSV_COLUMNS[:-1] if is_prefixed(shown[name]))
    return csv_line([shown[name] for name in CSV_COLUMNS])


def csv_line(fields: list[Any] | tuple[Any, ...]) -> bytes:
    """A record after RFC 4180: text is neutralised and quoted where needed, numbers are written as they are."""
    return (",".join(_csv_field(value) for value in fields) + "\r\n").encode()


def is_prefixed(value: Any) -> bool:
    """Whether the value gets an apostrophe before it in a CSV: text that begins like a formula."""
    return isinstance(value, str) and value.startswith(FORMULA)


def _csv_field(value: Any) -> str:
    if value is None:
        return ""
    text = f"'{value}" if is_prefixed(value) else str(value)
    if any(special in text for special in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text


def _opened(name: str, row: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    if name not in body["commitments"]:
        return ""
    opening = _openings(row).get(name)
    return ERASED if opening is None else str(opening["value"])


def _openings(row: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    opened = [json.loads(each) if isinstance(each, str) else each for each in row["openings"]]
    return {each["field"]: each for each in opened}


def _asked(selection: Selection, format: Format) -> dict[str, Any]:
    since, until = selection.since, selection.until
    return {
        "format": format,
        "tenant": selection.tenant,
        "zone": selection.zone,
        "first_day": selection.first_day.isoformat() if selection.first_day else None,
        "end_day": selection.end_day.isoformat() if selection.end_day else None,
        "since": instant(since) if since else None,
        "until": instant(until) if until else None,
        "filters": selection.filters,
    }


def _sums(written: Written) -> dict[str, Any]:
    return {"rows": written.rows, "last_hash": written.last_hash, "sha256": written.sha256, "bytes": written.size}


def _query(selection: Selection) -> tuple[str, tuple[Any, ...]]:
    entries = with_openings(selection.entries()).order_by("at", "id").values_list(*COLUMNS, "openings_json")
    sql, parameters = entries.query.sql_with_params()
    return sql, tuple(parameters)


def _connect(using: str) -> psycopg.Connection[Any]:
    wrapper = connections[using]
    parameters = {**wrapper.get_connection_params(), "application_name": APPLICATION_NAME}
    connection: psycopg.Connection[Any] = wrapper.get_new_connection(parameters)
    connection.autocommit = True
    return connection


def _json_line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _chunks(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Join lines; the first goes out at once, so that the reader sees that it works."""
    yield next(lines)
    held: list[bytes] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size >= CHUNK_BYTES:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)
