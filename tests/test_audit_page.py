"""The audit page: what was decided, found by its filters, and handed out as a file."""

import csv
import html
import io
import json
import re

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from audit.models import Entry
from console import access
from console.models import Tenant
from reconciliation import reconciler
from reconciliation.actors import SYSTEM
from tests import cast


@pytest.fixture
def who(ledger_db, till):
    return cast.people()


@pytest.fixture
def dan(who):
    return cast.client(who["au_dan"])


def text(response):
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.content.decode())))


def subjects(response):
    return re.findall(r'class="what" href="/audit/\d+">([\w:]+)', response.content.decode())


def whole(response):
    return b"".join(response.streaming_content)


def test_every_decision_is_listed_newest_first(dan, who):
    case = cast.operation()
    boss = cast.actor(who["op_ann"], "admin")
    access.set_role(user=who["vi_eve"], tenant=Tenant.objects.get(slug="t_acme"), role="operator", by=boss, reason="R1")
    page = dan.get("/audit")
    assert subjects(page)[:2] == [f"access:{who['vi_eve'].pk}", f"operation:{case.pk}"]
    assert "viewer → operator" in text(page)
    assert "op_ann" in text(page)
    assert "R1" in text(page)


def test_a_look_up_that_moved_nothing_says_what_it_told(dan):
    case = cast.operation(state="ambiguous", sent=900)
    reconciler.reconcile(case.pk, actor=SYSTEM)
    rows = re.findall(r'<td class="wide-cell">([^<]*)</td>', dan.get("/audit").content.decode())
    assert rows[0] == "look-up: cannot tell"
    assert "" not in rows


@pytest.mark.parametrize(
    ("query", "hits"),
    [
        ("event=access", 0),
        ("event=transition", 3),
        ("actor=system:tests", 3),
        ("actor=person:0", 0),
        ("reason_code=claimed", 1),
        ("subject=operation:{pk}", 3),
        ("batch=b1", 0),
        ("first=2020-01-01&last=2020-01-02", 0),
        ("first=2020-01-01", 3),
    ],
)
def test_filters_are_exact(dan, query, hits):
    case = cast.escalated()
    page = dan.get("/audit?" + query.format(pk=case.pk))
    assert subjects(page).count(f"operation:{case.pk}") == hits
    if not hits and "access" not in query:
        assert "No entry fits" in text(page)


def test_the_last_day_is_included_and_days_are_the_readers(dan, clock):
    from datetime import UTC, datetime

    clock.set(datetime(2031, 3, 1, 23, 30, tzinfo=UTC))  # 2 March, 00:30 in Berlin
    case = cast.operation()
    dan.cookies["zone"] = "Europe/Berlin"
    assert f"operation:{case.pk}" in subjects(dan.get("/audit?first=2031-03-02&last=2031-03-02"))
    assert f"operation:{case.pk}" not in subjects(dan.get("/audit?first=2031-03-01&last=2031-03-01"))
    assert "days are days in Europe/Berlin" in text(dan.get("/audit"))


def test_a_range_that_ends_before_it_begins_is_said_to_be_wrong(dan):
    answer = dan.get("/audit?first=2026-02-02&last=2026-02-01")
    assert answer.status_code == 422
    assert "The last day lies before the first." in text(answer)


@pytest.mark.parametrize("day", ["last=9999-12-31", "first=0001-01-01", "last=0001-01-01", "first=2026-13-45"])
@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/Los_Angeles"])
def test_a_day_that_no_zone_can_tell_is_refused_with_words(dan, zone, day):
    dan.cookies["zone"] = zone
    assert dan.get(f"/audit?{day}").status_code == 422
    assert dan.get(f"/audit/export?{day}").status_code == 400


def test_pages_hold_every_entry_once(dan, monkeypatch):
    monkeypatch.setattr("console.views.audit.SIZE", 4)
    for _ in range(5):
        cast.operation(state="pending", sent=1)
    seen, address = [], "/audit?event=transition"
    for _ in range(9):
        page = dan.get(address)
        seen += re.findall(r'id="entry-(\d+)"', page.content.decode())
        older = re.search(r'rel="next" href="([^"]+)"', page.content.decode())
        if not older:
            break
        address = "/audit" + html.unescape(older[1])
    assert sorted(map(int, seen)) == sorted(Entry.objects.filter(event="transition").values_list("pk", flat=True))
    assert len(seen) == len(set(seen))


def test_the_page_costs_the_same_queries_for_few_entries_and_for_many(dan):
    costs = []
    for rows in (1, 12):
        for _ in range(rows):
            cast.escalated()
        with CaptureQueriesContext(connection) as asked:
            dan.get("/audit")
        costs.append(len(asked))
    assert costs[0] == costs[1] <= 8


def test_an_entry_shows_the_bytes_that_were_hashed_and_what_the_commitments_stand_for(dan, who):
    boss = cast.actor(who["op_ann"], "admin")
    access.set_role(user=who["vi_eve"], tenant=Tenant.objects.get(slug="t_acme"), role=None, by=boss, reason="Left.")
    entry = Entry.objects.latest("id")
    page = text(dan.get(f"/audit/{entry.pk}"))
    assert bytes(entry.hash).hex() in page
    assert json.loads(page[page.index('{"at"') : page.index("} SHA-256") + 1])["subject"] == entry.subject
    assert "reason Left." in page


def test_an_erased_commitment_says_that_the_proof_stands(dan, who, superuser_connection):
    boss = cast.actor(who["op_ann"], "admin")
    access.set_role(user=who["vi_eve"], tenant=Tenant.objects.get(slug="t_acme"), role=None, by=boss, reason="Left.")
    entry = Entry.objects.latest("id")
    superuser_connection.execute("SET session_replication_role = replica")
    superuser_connection.execute("DELETE FROM audit_opening WHERE entry_id = %s AND field = 'reason'", [entry.pk])
    page = text(dan.get(f"/audit/{entry.pk}"))
    assert "reason erased; the proof stands" in page
    assert "Left." not in page


def test_entries_of_another_tenant_are_nowhere(dan):
    theirs = cast.operation(tenant="t_beta")
    entry = Entry.objects.get(subject=str(theirs.subject))
    assert dan.get(f"/audit/{entry.pk}").status_code == 404
    assert dan.get("/audit?tenant=t_beta").status_code == 404
    assert dan.get("/audit/export?tenant=t_beta").status_code == 404
    assert str(theirs.subject) not in subjects(dan.get("/audit"))


def test_a_viewer_may_not_read_it_and_an_operator_may_not_export_it(who):
    assert cast.client(who["vi_eve"]).get("/audit").status_code == 403
    ann = cast.client(who["op_ann"])
    assert "exporting needs the role auditor or admin" in text(ann.get("/audit"))
    refused = ann.get("/audit/export?format=csv")
    assert refused.status_code == 403
    assert not Entry.objects.filter(event="export").exists()


def test_the_csv_holds_what_the_page_shows_and_the_export_is_on_record(dan, who):
    case = cast.escalated()
    answer = dan.get(f"/audit/export?format=csv&subject=operation:{case.pk}")
    assert answer.headers["Content-Disposition"] == 'attachment; filename="aftercall-audit-t_acme.csv"'
    rows = list(csv.DictReader(io.StringIO(whole(answer).decode(), newline="")))
    answer.close()
    assert {row["subject"] for row in rows} == {f"operation:{case.pk}"}
    assert len(rows) == 3
    asked = Entry.objects.get(event="export")
    assert asked.actor == f"person:{who['au_dan'].pk}"
    assert Entry.objects.filter(subject=asked.subject, event="export_finished").exists()


def test_the_jsonl_carries_the_hashed_bytes(dan):
    case = cast.operation()
    lines = [json.loads(line) for line in whole(dan.get("/audit/export?format=jsonl")).splitlines()]
    entry = Entry.objects.get(subject=str(case.subject))
    kept = next(line for line in lines if line["kind"] == "entry" and line["id"] == entry.pk)
    assert kept["canonical"].encode() == bytes(entry.canonical)


def test_a_reader_who_leaves_early_is_recorded_as_cut_off(dan):
    for _ in range(3):
        cast.operation()
    answer = dan.get("/audit/export?format=jsonl")
    next(iter(answer.streaming_content))
    answer.close()
    assert Entry.objects.filter(event="export_cut_off").exists()
