"""What one sandbox provider remembers: one SQLite file, written before the answer, alive after a kill."""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .faults import matches

SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    n INTEGER PRIMARY KEY, id TEXT UNIQUE, collection TEXT, "order" TEXT, reference TEXT,
    fields TEXT, status TEXT, at REAL, changed REAL, removed INTEGER DEFAULT 0
);
-- One row is one effect in the world. This is the table that tests count.
CREATE TABLE IF NOT EXISTS effects (
    n INTEGER PRIMARY KEY, kind TEXT, id TEXT, "order" TEXT, reference TEXT, key TEXT, fields TEXT, at REAL
);
CREATE TABLE IF NOT EXISTS keys (
    key TEXT PRIMARY KEY, digest TEXT, status INTEGER, answer TEXT, object TEXT, at REAL
);
-- Every request that has an effect and arrived with its body, whatever became of it.
CREATE TABLE IF NOT EXISTS requests (
    n INTEGER PRIMARY KEY, at REAL, method TEXT, path TEXT, action TEXT, key TEXT, "order" TEXT, reference TEXT,
    body TEXT, fault TEXT
);
CREATE TABLE IF NOT EXISTS faults (n INTEGER PRIMARY KEY, rule TEXT, times INTEGER);
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT);
"""
TABLES = ("objects", "effects", "keys", "requests", "faults", "settings")
SETTINGS: dict[str, Any] = {
    "lag": 0.0,  # seconds until the search index knows of a change
    "key_retention": 86400.0,  # seconds for which a key is remembered
    "page_size": 20,
    "lookup_down": False,  # every read answers 503
    "scope_lost": False,  # every read answers 404, as for a token that may no longer see
    "clock_shift": 0.0,
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """An answer as it is kept under a key."""

    status: int
    body: Row
    replayed: bool = False


class Gone(Exception):
    """The world was reset while this request was under way: it must leave no trace in the new one."""


class Store:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.executescript(SCHEMA)
        # A key in progress belonged to a process that died: its effect and its end commit together, so neither came.
        self._db.execute("DELETE FROM keys WHERE status IS NULL")
        self.epoch = 0

    @contextmanager
    def _change(self, epoch: int | None = None) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if epoch is not None and epoch != self.epoch:
                raise Gone
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _rows(self, sql: str, *values: Any) -> list[Row]:
        with self._lock:
            return [dict(row) for row in self._db.execute(sql, values)]

    # --- settings and clock

    def settings(self) -> Row:
        return SETTINGS | {row["name"]: json.loads(row["value"]) for row in self._rows("SELECT * FROM settings")}

    def set(self, **values: Any) -> None:
        with self._change() as db:
            rows = [(name, json.dumps(value)) for name, value in values.items()]
            db.executemany("INSERT OR REPLACE INTO settings VALUES (?, ?)", rows)

    def now(self) -> float:
        return time.time() + float(self.settings()["clock_shift"])

    def reset(self) -> None:
        """A new, empty world. Requests of the old one leave nothing in it."""
        with self._change() as db:
            self.epoch += 1
            for table in TABLES:
                db.execute(f"DELETE FROM {table}")  # noqa: S608 - our own names

    # --- faults

    def add_fault(self, rule: Row) -> None:
        with self._change() as db:
            db.execute("INSERT INTO faults (rule, times) VALUES (?, ?)", (json.dumps(rule), int(rule.get("times", 1))))

    def faults(self) -> list[Row]:
        return [json.loads(row["rule"]) | {"times": row["times"]} for row in self._rows("SELECT * FROM faults")]

    def clear_faults(self, **those: str) -> None:
        """Forget every rule, or those that name exactly these values."""
        with self._change() as db:
            for row in db.execute("SELECT n, rule FROM faults").fetchall():
                if those.items() <= json.loads(row["rule"]).items():
                    db.execute("DELETE FROM faults WHERE n = ?", (row["n"],))

    def take_fault(self, facts: Row, *, only: tuple[str, ...] = (), never: tuple[str, ...] = ()) -> Row:
        """The oldest rule that means this call, used up by one; an empty dict where there is none."""
        with self._change() as db:
            for row in db.execute("SELECT * FROM faults WHERE times > 0 ORDER BY n").fetchall():
                rule: Row = json.loads(row["rule"])
                if (not only or rule["fault"] in only) and rule["fault"] not in never and matches(rule, facts):
                    db.execute("UPDATE faults SET times = times - 1 WHERE n = ?", (row["n"],))
                    return rule
        return {}

    # --- keys

    def begin(self, key: str, digest: str, *, epoch: int) -> Stored | None:
        """Take the key, or say what must be answered instead: the stored answer, 409 in progress, 422 other body."""
        now, retention = self.now(), float(self.settings()["key_retention"])
        with self._change(epoch) as db:
            db.execute("DELETE FROM keys WHERE status IS NOT NULL AND at + ? <= ?", (retention, now))
            row = db.execute("SELECT * FROM keys WHERE key = ?", (key,)).fetchone()
            if row is None:
                db.execute("INSERT INTO keys (key, digest, at) VALUES (?, ?, ?)", (key, digest, now))
                return None
        if row["digest"] != digest:
            return Stored(422, {"error": "this Idempotency-Key was used with another request"})
        if row["status"] is None:
            return Stored(409, {"error": "a request with this Idempotency-Key is in progress"})
        return Stored(row["status"], json.loads(row["answer"]), replayed=True)

    def forget(self, key: str) -> None:
        with self._change() as db:
            db.execute("DELETE FROM keys WHERE key = ? AND status IS NULL", (key,))

    def _finish(self, db: sqlite3.Connection, key: str, answer: Stored, object_id: str | None) -> None:
        db.execute(
            "UPDATE keys SET status = ?, answer = ?, object = ? WHERE key = ?",
            (answer.status, json.dumps(answer.body), object_id, key),
        )

    # --- effects

    def store_error(self, key: str, answer: Stored, *, epoch: int) -> None:
        with self._change(epoch) as db:
            self._finish(db, key, answer, None)

    def create(
        self,
        *,
        collection: str,
        kind: str,
        prefix: str,
        status: str,
        fields: Row,
        key: str | None,
        epoch: int,
        error: Stored | None = None,
        plant: bool = False,
    ) -> Stored:
        """Make one object: its row, its effect and the answer under its key commit together.

        `error` is remembered under the key in place of the true answer. `plant` makes an object that no call made.
        """
        now, made = self.now(), f"{prefix}_{secrets.token_hex(6)}"
        order, reference = fields.get("order"), fields.get("reference")
        stored_fields = json.dumps(fields)
        with self._change(epoch) as db:
            db.execute(
                'INSERT INTO objects (id, collection, "order", reference, fields, status, at, changed)'
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (made, collection, order, reference, stored_fields, status, now, now),
            )
            if not plant:
                self._count(db, kind, made, order, reference, key, stored_fields, now)
            answer = Stored(201, self.get(collection, made) or {})
            if key:
                self._finish(db, key, error or answer, made)
        return answer

    def change(
        self,
        *,
        collection: str,
        kind: str,
        object_id: str,
        status: str,
        key: str | None,
        epoch: int,
        error: Stored | None = None,
    ) -> Stored:
        """Set a status. The second time nothing happens, so no second effect is counted."""
        now = self.now()
        with self._change(epoch) as db:
            row = db.execute("SELECT * FROM objects WHERE id = ? AND NOT removed", (object_id,)).fetchone()
            if row is None:
                answer = Stored(404, {"error": "not found"})
            else:
                if row["status"] != status:
                    db.execute("UPDATE objects SET status = ?, changed = ? WHERE id = ?", (status, now, object_id))
                    self._count(db, kind, object_id, row["order"], row["reference"], key, row["fields"], now)
                answer = Stored(200, self.get(collection, object_id) or {})
            if key:
                self._finish(db, key, error or answer, object_id)
        return answer

    def imply(self, collection: str, object_id: str) -> None:
        """Let an object exist that was there before our story began."""
        now = self.now()
        with self._change() as db:
            db.execute(
                "INSERT OR IGNORE INTO objects (id, collection, fields, status, at, changed)"
                " VALUES (?, ?, '{}', 'open', ?, ?)",
                (object_id, collection, now, now),
            )

    def _count(self, db: sqlite3.Connection, *values: Any) -> None:
        db.execute(
            'INSERT INTO effects (kind, id, "order", reference, key, fields, at) VALUES (?, ?, ?, ?, ?, ?, ?)', values
        )

    def remove(self, object_id: str) -> None:
        """Take an object away, as a person at the provider might: from now on it answers 410."""
        now = self.now()
        with self._change() as db:
            db.execute("UPDATE objects SET removed = 1, changed = ? WHERE id = ?", (now, object_id))

    # --- reads

    def get(self, collection: str, object_id: str) -> Row | None:
        """One object as it is now; `{"removed": True}` where it was taken away."""
        rows = self._rows("SELECT * FROM objects WHERE collection = ? AND id = ?", collection, object_id)
        if not rows:
            return None
        return {"removed": True} if rows[0]["removed"] else _shown(rows[0])

    def page(self, collection: str, *, filters: Row, after: int) -> Row:
        """One page of the strongly consistent list, oldest first."""
        where = "".join(f' AND "{name}" = ?' for name in filters)
        rows = self._rows(
            f"SELECT * FROM objects WHERE collection = ? AND NOT removed AND n > ?{where} ORDER BY n",  # noqa: S608
            collection,
            after,
            *filters.values(),
        )
        return self._cut(rows)

    def search(self, collection: str, text: str, *, after: int) -> Row:
        """One page of the index, which knows the world as it was `lag` seconds ago and shows what is gone since."""
        seen = self.now() - float(self.settings()["lag"])
        rows = self._rows(
            "SELECT * FROM objects WHERE collection = ? AND n > ? AND at <= ? AND NOT (removed AND changed <= ?)"
            " ORDER BY n",
            collection,
            after,
            seen,
            seen,
        )
        return self._cut([row for row in rows if text in f"{row['reference']} {row['order']} {row['fields']}"])

    def _cut(self, rows: list[Row]) -> Row:
        size = int(self.settings()["page_size"])
        more = len(rows) > size
        return {"data": [_shown(row) for row in rows[:size]], "next": str(rows[size - 1]["n"]) if more else None}

    def by_key(self, collection: str, key: str) -> Row:
        """What is remembered under a key: the object, that it is being made, or nothing."""
        floor = self.now() - float(self.settings()["key_retention"])
        rows = self._rows("SELECT * FROM keys WHERE key = ? AND (status IS NULL OR at > ?)", key, floor)
        if not rows:
            return {"data": [], "next": None}
        if rows[0]["status"] is None:
            return {"data": [], "next": None, "in_progress": True}
        made = self.get(collection, rows[0]["object"] or "")
        return {"data": [made] if made and "removed" not in made else [], "next": None}

    # --- what tests and people count

    def note_request(self, **facts: Any) -> None:
        with self._change() as db:
            db.execute(
                'INSERT INTO requests (at, method, path, action, key, "order", reference, body, fault)'
                " VALUES (:at, :method, :path, :action, :key, :order, :reference, :body, :fault)",
                {"at": self.now(), **facts},
            )

    def effects(self, **filters: str) -> list[Row]:
        rows = self._rows("SELECT * FROM effects ORDER BY n")
        for row in rows:
            row["fields"] = json.loads(row["fields"])
        return [row for row in rows if all(row.get(name) == value for name, value in filters.items())]

    def requests(self, **filters: str) -> list[Row]:
        rows = self._rows("SELECT * FROM requests ORDER BY n")
        return [row for row in rows if all(row.get(name) == value for name, value in filters.items())]

    def tally(self, **filters: str) -> Row:
        effects, requests = self.effects(**filters), self.requests(**filters)
        return {
            "count": len(effects),
            "effects": effects,
            "by_order": _counted(effects, "order"),
            "by_reference": _counted(effects, "reference"),
            "by_key": _counted(effects, "key"),
            "requests": len(requests),
            "requests_by_key": _counted(requests, "key"),
        }


def digest(path: str, body: bytes) -> str:
    return hashlib.sha256(path.encode() + b"\0" + body).hexdigest()


def _counted(rows: list[Row], name: str) -> dict[str, int]:
    return dict(Counter(row[name] for row in rows if row[name] is not None))


def _shown(row: Row) -> Row:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(row["at"]))
    return {"id": row["id"], **json.loads(row["fields"]), "status": row["status"], "created_at": stamp}
