"""Exports and checks a large audit log; prints time and memory: `python -m benchmarks.audit_export --rows 300000`."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

SEED = """
DO $$
DECLARE body text := '{"actor":"worker:1","actor_kind":"worker","batch":null,"commitments":{},"details":{"note":"'
    || repeat('x', 1600) || '"},"evidence":null,"on_behalf_of":null,"reason_code":"claimed"}';
BEGIN
    FOR number IN 1..%d LOOP
        PERFORM audit_append('operation:' || number %% 1000, 'acme', 'transition', NULL, 'ready', NULL, body);
        IF number %% 5000 = 0 THEN COMMIT; END IF;  -- each subject holds a lock until the commit
    END LOOP;
END $$
"""


def seed(connection, *, rows):
    """Fill the log with entries of 2 KB."""
    connection.execute(SEED % rows)


def measure(what, *, env):
    """Run one export (csv, jsonl) or check (verify) in a process of its own and return what it saw."""
    command = [sys.executable, "-m", "benchmarks.audit_export", "--child", what]
    child = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if child.returncode:
        raise RuntimeError(child.stderr)
    return json.loads(child.stdout)


def run_child(what):
    """Measure in this process: memory is what the second, large run adds to a first, empty one."""
    import django

    django.setup()
    run = check if what == "verify" else export
    run(what, tenant="nobody")
    before = peak()
    began = time.monotonic()
    seen = run(what, tenant="acme")
    seconds = time.monotonic() - began
    return seen | {"seconds": round(seconds, 2), "grown_mb": round((peak() - before) / 1024, 1)}


def peak():
    """The most memory that this process has used, in KB. Not ru_maxrss, which starts with what the parent had used."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[1])


def export(format, *, tenant):
    from audit.export import Export
    from audit.log import Fact
    from audit.selection import Selection

    by = Fact(actor="person:9", actor_kind="person", reason_code="audit_export")
    began = time.monotonic()
    with Export(Selection(tenant=tenant), format=format, by=by) as out:
        size = len(next(out))
        first = time.monotonic() - began
        size += sum(map(len, out))
    return {"first_byte_s": round(first, 3), "bytes": size, "rows": out.written.rows}


def check(_what, *, tenant):
    from audit.verify import Tally, verify

    if tenant == "nobody":
        return {}
    tally = Tally()
    return {"findings": sum(1 for _ in verify(tally=tally)), "rows": tally.entries}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--child", choices=["csv", "jsonl", "verify"])
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(run_child(asked.child)))
        return
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    import django

    django.setup()
    from console import embedded
    from tests import database

    server = embedded.start(database.VAR / "postgres", options=database.FAST)
    try:
        with database.worker_database("bench") as made, made.superuser() as superuser:
            seed(superuser, rows=asked.rows)
            for what in ("csv", "jsonl", "verify"):
                print(what, measure(what, env=made.environment()))
    finally:
        embedded.stop(server)


if __name__ == "__main__":
    main()
