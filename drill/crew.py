"""Shares of a part in processes of their own. One that is lost (killed by the system, out of memory) is told as lost.

Each has a pipe to itself, which ends when the process ends, however it ends: nobody waits for a word that cannot come.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any


@dataclass(frozen=True)
class Lost:
    """A process that ended in the middle of its share."""

    reason: str


def gather(work: Callable[..., None], shares: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
    """Start `work(tell, *share)` for each share in a process; gives what they tell as it comes, and a Lost for each
    that ends by a signal or with another exit status than 0.
    """
    crew = dict(_started(work, share) for share in shares)
    while crew:
        for reader in connection.wait(list(crew)):
            try:
                yield reader.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                one = crew.pop(reader)
                one.join()
                if one.exitcode:
                    yield Lost(f"a process of the drill ended with status {one.exitcode} in the middle of its share")


def _started(work: Callable[..., None], share: tuple[Any, ...]) -> tuple[Any, Any]:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    one = context.Process(target=_do, args=(work, writer, share), daemon=True)
    one.start()
    writer.close()  # or the pipe would not end with the process, and the next one would inherit it
    return reader, one


def _do(work: Callable[..., None], writer: Any, share: tuple[Any, ...]) -> None:
    work(writer.send, *share)
    writer.close()
