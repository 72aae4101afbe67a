"""What the tests ask of the ledger as a whole."""

from typing import Any

import psycopg

from audit.verify import registered_heads


def changes_without_audit(connection: "psycopg.Connection[Any]") -> list[str]:
    """Subjects whose version (one for each change) is not the number of their audited transitions (case H4)."""
    rows = connection.execute(
        "SELECT subject, count(*) FROM audit_entry WHERE event IN ('transition', 'limit', 'shredded') GROUP BY subject"
    )
    audited = dict(rows.fetchall())
    versions = {head.subject: head.version for head in registered_heads()}
    return sorted(name for name in versions.keys() | audited.keys() if versions.get(name, 0) != audited.get(name, 0))
