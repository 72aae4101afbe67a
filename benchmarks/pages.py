"""What the console's pages cost beside a million operations: `python -m benchmarks.pages`.

Fills the ledger behind its guards, asks for the pages as a browser would, and lets PostgreSQL explain every query
that they made on the large tables: how long it took, and whether it read an index or the whole table.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

from benchmarks import place, report

LARGE = ("reconciliation_operation", "reconciliation_journalentry")
TENANTS = ("acme", "beta", "other")  # 70, 20 and 10 of a hundred; the reader belongs to the first two
NEVER = "NULL::timestamptz"
# Of a thousand operations two wait for a person, seven for automation or an approval, and the rest are closed.
STATE = """CASE WHEN n < 5 THEN 'ambiguous' WHEN n < 7 THEN 'pending' WHEN n = 7 THEN 'awaiting_approval'
    WHEN n = 8 THEN 'failed_retryable' WHEN n < 30 THEN 'failed_terminal' ELSE 'succeeded' END"""
COLUMNS = {
    "tenant": "CASE WHEN g / 1000 % 10 < 7 THEN 'acme' WHEN g / 1000 % 10 < 9 THEN 'beta' ELSE 'other' END",
    "workflow_type": "'damaged_item'",
    "workflow_id": "'claim-' || g / 5",
    "step": "'refund'",
    "business_object": "'order-' || g",
    "intent_version": "1",
    "lineage": "sha256(g::text::bytea)",
    "key": "'ac1-' || encode(sha256(('key' || g)::bytea), 'hex')",
    "execution": "'aftercall'",
    "provider": "'shelf'",
    "account": "'main'",
    "action": "'tag'",
    "fingerprint": "'f1-' || encode(sha256(('f' || g)::bytea), 'hex')",
    "request_shown": """'{"amount":4200,"currency":"USD","order":"order-' || g || '"}'""",
    "request_sealed": "''",
    "amount_minor": "100 + g % 90000",
    "currency": "'USD'",
    "state": STATE,
    "version": "2",
    "generation": "1",
    "claim_nonce": "CASE WHEN n BETWEEN 5 AND 6 THEN gen_random_uuid() END",
    "lease_owner": "'worker:benchmark'",
    "lease_until": f"CASE WHEN n BETWEEN 5 AND 6 THEN now() + interval '1 hour' ELSE {NEVER} END",
    "due_at": f"CASE WHEN n BETWEEN 2 AND 8 THEN now() + interval '1 hour' ELSE {NEVER} END",
    "attempts": "1",
    "unknown_attempts": "CASE WHEN n < 5 THEN '{1}'::int[] ELSE '{}'::int[] END",
    "absent_reads": "0",
    "absences": "0",
    "sighted": "false",
    "look_ups": "CASE WHEN n < 5 THEN 3 ELSE 0 END",
    "identical_replays": "0",
    "first_sent_at": "born",
    "last_sent_at": "born",
    "same_key_until": f"CASE WHEN n < 5 THEN now() + (g % 1440) * interval '1 minute' ELSE {NEVER} END",
    "escalate_at": f"CASE WHEN n < 5 THEN born + interval '15 minutes' ELSE {NEVER} END",
    "error_class": "CASE WHEN n < 5 THEN 'unknown' WHEN n BETWEEN 8 AND 29 THEN 'rejected' ELSE '' END",
    "reason_code": "CASE WHEN n < 5 THEN 'no_answer' WHEN n BETWEEN 8 AND 29 THEN 'rejected' ELSE 'receipt' END",
    "escalated_at": f"CASE WHEN n < 2 THEN born + interval '15 minutes' ELSE {NEVER} END",
    "escalation_reason": "CASE WHEN n < 2 THEN 'cannot_tell' ELSE '' END",
    "basis": "CASE WHEN n >= 30 THEN 'receipt' ELSE '' END",
    "provider_operation_id": "CASE WHEN n >= 30 THEN 'pi_' || md5(g::text) ELSE '' END",
    "effect_id": "CASE WHEN n >= 30 THEN 'pi_' || md5(g::text) ELSE '' END",
    "result_shown": "CASE WHEN n >= 30 THEN '{\"tag\":\"damaged\"}' ELSE '' END",
    "result_sealed": "''",
    "cost_minor": "0",
    "requested_by": "'agent:benchmark'",
    "on_behalf_of": "''",
    "owners": "'{}'::text[]",
    "created_at": "born",
    "updated_at": "born",
    "settled_at": f"CASE WHEN n >= 9 THEN born + interval '2 seconds' ELSE {NEVER} END",
}
# Ids rise with time, as in life; the newest operation is seconds old, the oldest ninety days.
NUMBERS = """(SELECT g, g % 1000 AS n,
        now() - interval '5 seconds' - ({rows} - g) * (interval '90 days' / {rows}) AS born
    FROM generate_series(1, {rows}) AS g) AS numbered"""
JOURNAL = """INSERT INTO reconciliation_journalentry
    (operation_id, at, kind, attempt, generation, observer, data, sealed)
    SELECT id, created_at, kind, 1, 1, 'worker:benchmark', '{{}}', ''
    FROM reconciliation_operation, LATERAL (VALUES ('attempt_started'),
        (CASE WHEN state = 'succeeded' THEN 'receipt' ELSE 'no_answer' END)) AS entry (kind)"""


@dataclass
class Page:
    """One address: how long the whole answer took, and what its slowest query on a large table did."""

    address: str
    milliseconds: float
    queries: int
    slowest_query_ms: float = 0.0
    scans: list[str] = field(default_factory=list)

    @property
    def whole_tables(self) -> list[str]:
        return [scan for scan in self.scans if scan.startswith("Seq Scan")]


def fill(connection: psycopg.Connection[Any], *, rows: int) -> None:
    """Put `rows` operations with two journal entries each into the ledger, and let PostgreSQL know their shape."""
    connection.execute("SET session_replication_role = replica")
    connection.execute(
        f"INSERT INTO reconciliation_operation ({', '.join(COLUMNS)})"
        f" SELECT {', '.join(COLUMNS.values())} FROM {NUMBERS.format(rows=rows)}"
    )
    connection.execute(JOURNAL.format())
    connection.execute("VACUUM ANALYZE reconciliation_operation, reconciliation_journalentry")


def addresses(connection: psycopg.Connection[Any], *, rows: int) -> list[str]:
    """What a person on call opens."""
    middle = "SELECT key, effect_id FROM reconciliation_operation WHERE id = %s"
    row = connection.execute(middle, [rows // 2 + 500]).fetchone()
    assert row is not None
    key, effect = row
    tabs = ("decide", "looking", "approval", "flight", "closed", "all")
    found = (f"order-{rows // 2}", f"claim-{rows // 10}", key[:14], effect[:12], "nothing-of-that-name")
    return [
        *(f"/?tab={tab}" for tab in tabs),
        *("/?sort=age", "/?sort=money"),
        *(f"/?tab=all&{chosen}" for chosen in ("state=failed_terminal", "age=1d", "error=unknown", "mark=escalated")),
        *("/?tab=closed&state=failed_terminal", "/?tab=flight&provider=shelf"),
        *(f"/?q={text}" for text in found),
        *(f"/operations/{rows // 1000 * 1000}", "/health"),
    ]


def reader() -> Any:
    """A browser in which somebody is signed in who may see two of the three tenants."""
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.test import Client

    from benchmarks.workload import ACTOR
    from console import access
    from console.models import Tenant

    call_command("collectstatic", interactive=False, verbosity=0)
    user = User.objects.create_user("reader")
    for slug in TENANTS[:2]:
        access.set_role(user=user, tenant=Tenant.objects.get_or_create(slug=slug)[0], role="operator", by=ACTOR)
    browser = Client(HTTP_HOST="localhost")
    browser.force_login(user)
    return browser


def visit(browser: Any, superuser: psycopg.Connection[Any], address: str) -> Page:
    """Open the page five times, then once more to see its queries."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    taken = [_timed(browser, address) for _ in range(5)]
    with CaptureQueriesContext(connection) as seen:
        browser.get(address)
    page = Page(address, round(median(taken) * 1000, 1), len(seen))
    for query in seen.captured_queries:
        if any(table in query["sql"] for table in LARGE) and query["sql"].startswith("SELECT"):
            _explain(superuser, query["sql"], page)
    return page


def _timed(browser: Any, address: str) -> float:
    began = time.perf_counter()
    answer = browser.get(address)
    taken = time.perf_counter() - began
    assert answer.status_code in (200, 302), (address, answer.status_code)
    return taken


def _explain(superuser: psycopg.Connection[Any], query: str, page: Page) -> None:
    row = superuser.execute("EXPLAIN (ANALYZE, FORMAT JSON) " + query.replace("%", "%%")).fetchone()
    assert row is not None
    (plan,) = row[0]
    page.slowest_query_ms = max(page.slowest_query_ms, round(plan["Execution Time"], 2))
    page.scans += [scan for scan in _scans(plan["Plan"]) if scan not in page.scans]


def _scans(node: dict[str, Any]) -> Iterator[str]:
    """`Seq Scan on table` or `Index Scan using index`, for every node that reads a large table."""
    kind, where = node["Node Type"], node.get("Index Name") or node.get("Relation Name", "")
    if kind.endswith("Scan") and (node.get("Relation Name") in LARGE or node.get("Index Name")) and "Heap" not in kind:
        yield f"{kind} {where}"
    for inner in node.get("Plans", []):
        yield from _scans(inner)


def following(browser: Any, address: str, *, steps: int) -> str:
    """The address of the page that lies `steps` further on."""
    for _ in range(steps):
        found = re.search(r'rel="next" href="([^"]+)"', browser.get(address).content.decode())
        if found is None:
            break
        address = "/" + found[1].replace("&amp;", "&").lstrip("/")
    return address


def main() -> None:
    """Fill, visit, print, and keep what was seen."""
    asked = _arguments()
    with place.database(parent=asked.data) as superuser:
        began = time.monotonic()
        fill(superuser, rows=asked.rows)
        print(f"{asked.rows} operations in {time.monotonic() - began:.0f} s", flush=True)
        browser = reader()
        visited = addresses(superuser, rows=asked.rows)
        visited += [following(browser, address, steps=3) for address in ("/?tab=decide", "/?tab=closed", "/?tab=all")]
        pages = [visit(browser, superuser, address) for address in visited]
        print(_text(pages))
        whole = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": place.machine(superuser, data=asked.data),
            "operations": asked.rows,
            "pages": [asdict(page) for page in pages],
        }
    asked.results.mkdir(parents=True, exist_ok=True)
    (asked.results / "pages.json").write_text(json.dumps(whole, indent=2) + "\n")


def _text(pages: list[Page]) -> str:
    lines = [f"{'page':<46}{'whole ms':>9}{'queries':>9}{'slowest query ms':>18}  whole tables read"]
    for page in pages:
        short = page.address if len(page.address) < 45 else page.address[:42] + "..."
        lines.append(
            f"{short:<46}{page.milliseconds:>9.1f}{page.queries:>9}{page.slowest_query_ms:>18.2f}"
            f"  {', '.join(page.whole_tables) or '-'}"
        )
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--data", type=Path, help="where the server keeps its data (default: a temporary folder)")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="where the figures are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
