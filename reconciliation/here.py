"""This thread's connection to the ledger, without the several microseconds that Django's look-up takes each time.

Django keeps one wrapper for each thread and alias while the thread lives; closing and opening happen inside it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from django.db import DEFAULT_DB_ALIAS, connections

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

ALIAS = DEFAULT_DB_ALIAS
_thread = threading.local()


def connection() -> BaseDatabaseWrapper:
    """The wrapper of this thread."""
    try:
        found: BaseDatabaseWrapper = _thread.connection
    except AttributeError:
        found = _thread.connection = connections[ALIAS]
    return found
