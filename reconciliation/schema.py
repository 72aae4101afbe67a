"""What the ledger needs in the database beside its tables: functions, triggers, rights and the transition table.

Functions are code, not data: they are put in place anew after every migration, in one transaction, so that code and
database cannot drift apart and an old one with another signature does not stay behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction

from .states import MOVES

SQL = Path(__file__).resolve().parent / "sql"
# Steps of the other functions: nobody calls them from outside.
INTERNAL = (
    "ledger_patch",
    "ledger_journal",
    "ledger_earlier",
    "ledger_risk_accepted",
    "ledger_waived",
    "ledger_folded",
    "ledger_newer_sent",
    "ledger_applied_reported",
    "ledger_doubted",
    "ledger_may_be_applied",
    "ledger_run_unknown",
    "ledger_run_lets",
    "ledger_ask",
    "ledger_end_approvals",
    "ledger_unusable",
    "ledger_unconsented",
    "ledger_approvals_of",
    "ledger_covers",
    "ledger_limited",
    "ledger_over_ceiling",
    "ledger_note_held",
    "ledger_held_back",
    "ledger_longer",
    "ledger_mass_guard",
    "ledger_bury",
    "ledger_restored",
    "ledger_kept_because",
    "ledger_lock_free",
    "ledger_moved_since_read",
    "ledger_step_moved",
    "ledger_lock_lineage",
    "ledger_run_lineage",
    "ledger_end_limit",
    "ledger_wake_held",
    "ledger_latest",
    "ledger_passed",
    "ledger_walks",
    "ledger_follow_back",
    "fence_jump",
    "fence_watch_for_replays",
    "fence_refuses",
)
# State and journal are read by the application role and written through the functions alone.
READ_ONLY = (
    "reconciliation_operation",
    "reconciliation_run",
    "reconciliation_journalentry",
    "reconciliation_chosen",
    "reconciliation_approval",
    "reconciliation_move",
    "reconciliation_limit",
    "reconciliation_limituse",
    "reconciliation_heldback",
    "reconciliation_tombstone",
    "reconciliation_localeffect",
    "reconciliation_restorefence",
    "reconciliation_clock",
)
# Bookkeeping that decides nothing.
WRITABLE = ("reconciliation_worker", "reconciliation_tick", "reconciliation_actiontoken", "reconciliation_signal")
# Schedules have one audited writer of their own (schedules.py, backlog.py, slots.py); nothing of them is ever deleted.
SCHEDULES = ("reconciliation_job", "reconciliation_slot")
# So has the outbox (outbox.py); what is over goes through ledger_forget_messages() alone, so that none can be lost.
MESSAGES = ("reconciliation_message",)


def install(connection: Any) -> None:
    """Put functions, triggers, rights and the pairs of states.py in place, as the owner. Safe to repeat."""
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        _functions(cursor)
        _rights(cursor, connection.ops.quote_name(settings.AFTERCALL_APP_ROLE))
        _moves(cursor)


def _functions(cursor: Any) -> None:
    for signature in _installed(cursor):
        cursor.execute(f"DROP FUNCTION {signature}")
    for name in (
        "clock.sql",
        "ledger.sql",
        "limits.sql",
        "restore.sql",
        "retention.sql",
        "local.sql",
        "append_only.sql",
    ):
        cursor.execute((SQL / name).read_text())


def _installed(cursor: Any) -> list[str]:
    cursor.execute(
        "SELECT p.oid::regprocedure::text FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace"
        " WHERE n.nspname = 'public' AND (p.proname LIKE 'ledger\\_%%' OR p.proname LIKE 'fence\\_%%') ORDER BY 1",
        [],
    )
    return [row[0] for row in cursor.fetchall()]


def _rights(cursor: Any, role: str) -> None:
    for signature in _installed(cursor):
        cursor.execute(f"REVOKE ALL ON FUNCTION {signature} FROM PUBLIC")
        if signature.partition("(")[0] not in INTERNAL:
            cursor.execute(f"GRANT EXECUTE ON FUNCTION {signature} TO {role}")
    for table in READ_ONLY:
        cursor.execute(f"REVOKE ALL ON {table} FROM {role}")
        cursor.execute(f"GRANT SELECT ON {table} TO {role}")
    for table in WRITABLE:
        cursor.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {role}")
    for table in SCHEDULES + MESSAGES:
        cursor.execute(f"GRANT SELECT, INSERT, UPDATE ON {table} TO {role}")


def _moves(cursor: Any) -> None:
    cursor.execute("DELETE FROM reconciliation_move")
    cursor.executemany(
        "INSERT INTO reconciliation_move (kind, source, target) VALUES (%s, %s, %s)",
        [(move.kind, move.source or "", move.target) for move in MOVES],
    )
