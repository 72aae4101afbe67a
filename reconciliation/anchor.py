"""The anchor: what is known outside the database of the ledger's identity and of how far it had come.

A restored database has forgotten what was sent after its backup, and cannot know that by itself. The anchor is a small
file that is replaced whole, and beside it the trail: each process that sends writes there, after a claim is committed
and before the request leaves, which claim that was. Writing the trail is one write to the page cache, so that it
survives the death of every process; the beat syncs it to disk. What that notices and what not: docs/decisions/.

Several machines share one anchor, on a file system that they share, or through a backend of the deployment's own
(AFTERCALL_ANCHOR_BACKEND) with the methods of FileAnchor.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, Protocol
from uuid import UUID, uuid4

from django.conf import settings
from django.utils.module_loading import import_string

FORMAT = 1
RECORD = struct.Struct("<qiI")  # operation, generation, checksum
HEADER = 16  # bytes of the ledger's identity, before the records
PATIENCE = 10.0  # seconds; what is decided about the anchor takes milliseconds, so who holds it longer hangs
KEEP = 64  # claims that a trail holds: more than one process has under way at once


class AnchorUnreadable(Exception):
    """Whether this is the right database cannot be told, so nothing may be sent. The text says why."""


class AnchorHeld(AnchorUnreadable):
    """Another process decides about the anchor, and has not come to an end for as long as was waited."""

    def __init__(self, what: str, wait: float) -> None:
        super().__init__(
            f"{what} is held by another process, which did not let go within {wait:g} s. One that was stopped or hangs "
            "has to go on or be ended."
        )


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the anchor knows. `pending` is the identity that the ledger gets in the change that is under way."""

    database: str  # the ledger's own random identity; "" before its first start is complete
    pending: str = ""
    mark: int = 0  # rises in the database before each writing of the anchor
    system: str = ""  # PostgreSQL's system identifier
    oid: int = 0  # of the database in that system
    timeline: int = 0
    position: int = 0  # id of the newest audit entry
    digest: str = ""  # its hash
    at: str = ""  # its time, ISO 8601


@dataclass(frozen=True)
class Trails:
    """The newest claims (operation, generation) of every process that sent, and what they were read from."""

    claims: frozenset[tuple[int, int]]
    source: Any = None


class Anchor(Protocol):
    """What a backend does. Everything raises AnchorUnreadable where the anchor cannot be reached.

    lock() gives a context manager, and raises AnchorHeld where it is not free within `wait` seconds.
    """

    def read(self) -> Known | None: ...
    def write(self, known: Known) -> None: ...
    def lock(self, wait: float = PATIENCE) -> Any: ...
    def note(self, database: str, operation: int, generation: int) -> None: ...
    def noted(self, database: str) -> Trails: ...
    def sync(self) -> None: ...
    def tidy(self, covered: Trails) -> None: ...


def current() -> Anchor:
    """The anchor that the settings name."""
    return _made(settings.AFTERCALL_ANCHOR_BACKEND, str(settings.AFTERCALL_ANCHOR))


@cache
def _made(backend: str, place: str) -> Anchor:
    made: Anchor = import_string(backend)(place)
    return made


class FileAnchor:
    """The anchor as a file, its lock file, and a folder with the trails."""

    def __init__(self, place: str) -> None:
        self.path = Path(place)
        self.folder = self.path.with_name(f"{self.path.name}.trail")
        self._mine: _Trail | None = None
        self._opening = threading.Lock()
        os.register_at_fork(after_in_child=self._forked)

    def read(self) -> Known | None:
        """What is known; None where there is no anchor."""
        try:
            facts = json.loads(self.path.read_bytes())
            if facts.pop("format") != FORMAT:
                raise ValueError("it is of another version")
            return Known(**facts)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise AnchorUnreadable(f"The anchor {self.path} cannot be read ({type(error).__name__}).") from error

    def write(self, known: Known) -> None:
        """Replace the anchor whole, synced. The caller holds the lock."""
        draft = self.path.with_name(f".{self.path.name}.{uuid4().hex}")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump({"format": FORMAT, **asdict(known)}, file)
                file.flush()
                os.fsync(descriptor)
            draft.replace(self.path)
            _sync(self.path.parent)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise AnchorUnreadable(f"The anchor {self.path} cannot be written ({error.strerror}).") from error

    @contextmanager
    def lock(self, wait: float = PATIENCE) -> Iterator[None]:
        """One process at a time reads and writes, on every machine that shares the file; freed by the holder's end.

        A holder that does not end (stopped, or its disk hangs) must not keep everybody else, so nobody waits for ever.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self.path.with_name(f"{self.path.name}.lock"), "a")  # noqa: SIM115 - closed below
        except OSError as error:
            raise AnchorUnreadable(f"The anchor {self.path} cannot be locked ({error.strerror}).") from error
        with file:
            try:
                taken = within(wait, partial(_flock, file))
            except OSError as error:  # a file system without working locks
                raise AnchorUnreadable(f"The anchor {self.path} cannot be locked ({error.strerror}).") from error
            if not taken:
                raise AnchorHeld(f"The anchor {self.path}", wait)
            yield

    # The trail

    def note(self, database: str, operation: int, generation: int) -> None:
        """Put a committed claim on the trail of this process, before its request leaves."""
        mine = self._mine
        if mine is None or mine.database != database:
            mine = self._open(database)
        try:
            mine.write(operation, generation)
        except OSError as error:
            raise AnchorUnreadable(f"The trail in {self.folder} cannot be written ({error.strerror}).") from error

    def noted(self, database: str) -> Trails:
        """What every process that sent for this identity of the ledger has put on its trail."""
        seen: dict[Path, bytes] = {}
        try:
            for path in self._trails():
                with suppress(FileNotFoundError):  # tidied away by another beat
                    seen[path] = path.read_bytes()
        except OSError as error:
            raise AnchorUnreadable(f"The trail in {self.folder} cannot be read ({error.strerror}).") from error
        header = UUID(database).bytes if database else b""
        claims = {claim for data in seen.values() if data[:HEADER] == header for claim in _claims(data)}
        return Trails(frozenset(claims), seen)

    def sync(self) -> None:
        """Bring every trail to the disk, so that a power failure does not take it."""
        try:
            for path in self._trails():
                with suppress(FileNotFoundError):
                    _sync(path)
        except OSError as error:
            raise AnchorUnreadable(f"The trail in {self.folder} cannot be synced ({error.strerror}).") from error

    def tidy(self, covered: Trails) -> None:
        """Remove the trails of processes that have ended, as far as they are what `covered` was read from."""
        for path, data in covered.source.items():
            with suppress(OSError), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its process holds it while it lives
                if file.read() == data:
                    path.unlink()

    def _trails(self) -> list[Path]:
        """Not by a glob, which takes a folder that it may not read for an empty one."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:  # nobody has sent yet
            return []
        return [self.folder / name for name in names if name.endswith(".claims")]

    def _open(self, database: str) -> _Trail:
        with self._opening:
            if self._mine is None or self._mine.database != database:
                try:
                    self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._mine = _Trail(self.folder / f"{os.getpid()}-{uuid4().hex}.claims", database)
                except OSError as error:
                    raise AnchorUnreadable(
                        f"The trail in {self.folder} cannot be opened ({error.strerror})."
                    ) from error
            return self._mine

    def _forked(self) -> None:
        """A child leaves a trail of its own."""
        self._mine, self._opening = None, threading.Lock()


class _Trail:
    """The newest claims of this process, in a file of fixed size. Its lock says that the process lives."""

    def __init__(self, path: Path, database: str) -> None:
        self.database = database
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_SH)
        os.pwrite(self._file, UUID(database).bytes + bytes(KEEP * RECORD.size), 0)
        self._turn = itertools.count()  # taking a turn is one step for the interpreter: threads do not meet in a place

    def write(self, operation: int, generation: int) -> None:
        place = HEADER + next(self._turn) % KEEP * RECORD.size
        os.pwrite(self._file, RECORD.pack(operation, generation, _checksum(operation, generation)), place)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            os.close(self._file)


def within(seconds: float, take: Callable[[], bool]) -> bool:
    """Whether `take` succeeded, which is tried at once and then until the time is over."""
    deadline = time.monotonic() + seconds
    while not take():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def _flock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _claims(data: bytes) -> Iterator[tuple[int, int]]:
    """A record that is being written is not whole, and its request has not left."""
    whole = len(data) - (len(data) - HEADER) % RECORD.size
    for operation, generation, checksum in RECORD.iter_unpack(data[HEADER:whole]):
        if operation and checksum == _checksum(operation, generation):
            yield operation, generation


def _checksum(operation: int, generation: int) -> int:
    return zlib.crc32(struct.pack("<qi", operation, generation))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
