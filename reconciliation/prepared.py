"""One row of a prepared statement, without a cursor: the way of the two statements that every operation pays for.

A cursor adapts any value to any type; what it does for that took a fifth of the time of an operation. Here the values
are text, whole numbers, lists of names and null, and the columns have four types, all read in their binary form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import errors, pq
from psycopg.generators import execute

_names: WeakKeyDictionary[psycopg.Connection[Any], dict[str, bytes]] = WeakKeyDictionary()
_number = count(1)
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)  # of PostgreSQL's binary timestamps, which count microseconds
_READ: dict[int, Callable[[bytes], Any]] = {
    20: lambda value: int.from_bytes(value, signed=True),  # bigint
    23: lambda value: int.from_bytes(value, signed=True),  # integer
    25: bytes.decode,  # text
    1184: lambda value: _EPOCH + timedelta(microseconds=int.from_bytes(value, signed=True)),  # timestamptz
}


def row(connection: psycopg.Connection[Any], statement: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """The one row that `statement` (with %s for each of `values`) gives, in a transaction of its own.

    The connection must be in autocommit and outside of any transaction: a statement sent here begins none. Raises the
    driver's errors. Where the server says that what was prepared does not fit any more (a migration changed what the
    function gives) or is not there, it is prepared anew for the next one.
    """
    with connection.lock:
        try:
            name = _names.setdefault(connection, {}).get(statement) or _prepare(connection, statement)
            connection.pgconn.send_query_prepared(name, [_sent(value) for value in values], result_format=1)
            return _read(_result(connection))
        except (errors.FeatureNotSupported, errors.InvalidSqlStatementName):
            _names.pop(connection, None)  # after any other error it is kept: the server would keep each one, too
            raise


def _prepare(connection: psycopg.Connection[Any], statement: str) -> bytes:
    name = f"aftercall_{next(_number)}".encode()
    connection.pgconn.send_prepare(name, _numbered(statement))
    _result(connection)
    _names[connection][statement] = name
    return name


@cache
def _numbered(statement: str) -> bytes:
    numbers = count(1)
    return re.sub("%s", lambda _: f"${next(numbers)}", statement).encode()


def _result(connection: psycopg.Connection[Any]) -> pq.abc.PGresult:
    result: pq.abc.PGresult = connection.wait(execute(connection.pgconn))[-1]
    if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
        raise errors.error_from_result(result, encoding="utf-8")
    return result


def _sent(value: Any) -> bytes | None:
    """Text form; the statement's casts and the function's parameters say the type."""
    if value is None:
        return None
    if type(value) is int:
        return b"%d" % value
    if isinstance(value, list):
        value = "{" + ",".join(f'"{name}"' for name in value) + "}"
    text = value if isinstance(value, str) else str(value)
    if "\0" in text:  # the wire's text ends at the first one
        raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
    return text.encode()


def _read(result: pq.abc.PGresult) -> tuple[Any, ...]:
    found = []
    for column in range(result.nfields):
        value = result.get_value(0, column)
        found.append(None if value is None else _READ[result.ftype(column)](value))
    return tuple(found)
