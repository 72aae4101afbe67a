"""The functions of the single writer, the pairs of the transition table, and who may do what."""

from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import migrations

from reconciliation.states import MOVES

SQL = Path(__file__).resolve().parent.parent / "sql"
FUNCTIONS = (
    "ledger_note(bigint, bigint, jsonb, boolean)",
    "ledger_open(jsonb, jsonb, jsonb, text, jsonb, int)",
    "ledger_move_operation(bigint, int, int, text, jsonb, jsonb, jsonb, text[], jsonb, text, jsonb, int)",
    "ledger_open_run(jsonb, jsonb, text, jsonb)",
    "ledger_move_run(bigint, int, int, text, jsonb, jsonb, text[], jsonb, text, jsonb)",
    "ledger_heartbeat(bigint, int, numeric, numeric)",
    "ledger_heartbeat_run(bigint, int, numeric)",
    "ledger_take_due(text, int, numeric)",
)
INTERNAL = (
    "ledger_patch(jsonb, jsonb, jsonb, jsonb, timestamptz)",
    "ledger_journal(bigint, bigint, timestamptz, jsonb)",
)
# State and journal are read by the application role and written through the functions alone.
READ_ONLY = ("reconciliation_operation", "reconciliation_run", "reconciliation_journalentry", "reconciliation_move")
# Bookkeeping that decides nothing.
WRITABLE = ("reconciliation_worker", "reconciliation_tick", "reconciliation_actiontoken")


def install(apps: Any, schema_editor: Any) -> None:
    execute = schema_editor.execute
    role = schema_editor.connection.ops.quote_name(settings.AFTERCALL_APP_ROLE)
    execute((SQL / "ledger.sql").read_text(), params=None)
    execute((SQL / "append_only.sql").read_text(), params=None)
    for function in (*FUNCTIONS, *INTERNAL):
        execute(f"REVOKE ALL ON FUNCTION {function} FROM PUBLIC")
    for function in FUNCTIONS:
        execute(f"GRANT EXECUTE ON FUNCTION {function} TO {role}")
    for table in READ_ONLY:
        execute(f"GRANT SELECT ON {table} TO {role}")
    for table in WRITABLE:
        execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {role}")
    allowed = apps.get_model("reconciliation", "AllowedMove")
    allowed.objects.using(schema_editor.connection.alias).bulk_create(
        allowed(kind=move.kind, source=move.source or "", target=move.target) for move in MOVES
    )


class Migration(migrations.Migration):
    dependencies = [("reconciliation", "0001_initial"), ("audit", "0001_initial")]
    operations = [migrations.RunPython(install, migrations.RunPython.noop)]
