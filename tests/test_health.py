"""Health: each part with its number, and what it means when it is not as it should be."""

import html
import re
import socket
import time
from datetime import UTC, datetime, timedelta
from unittest import mock

import psycopg
import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from django_q.models import OrmQ

from console import vitals
from reconciliation import workers
from reconciliation.models import Worker
from reconciliation.tasks import tick
from reconciliation.transition import database_now
from tests import cast


@pytest.fixture
def eve(ledger_db, till):
    return cast.client(cast.people()["vi_eve"])


def text(response):
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.content.decode())))


def worker(name, *, ago, role="worker", **columns):
    at = database_now() - timedelta(seconds=ago)
    place = {"host": "box", "boot_id": "b", "pid_namespace": "n", "pid": 1, "pid_started": 1}
    return Worker.objects.create(name=name, role=role, started_at=at, seen_at=at, **place, **columns)


def test_without_workers_and_beat_the_page_says_what_that_means_and_what_to_do(eve):
    page = text(eve.get("/health"))
    assert "No worker is alive: nothing is sent and nothing is looked up. Start one." in page
    assert "Start the beat." in page


def test_a_system_at_work_has_nothing_to_complain_of_but_the_tests_own_fsync(eve):
    worker("w-1", ago=1)
    tick("beat", by="beat:1", handled=0)
    tick("sweep", by="worker:1", handled=7)
    page = text(eve.get("/health"))
    assert "7 handled" in page
    assert "No worker" not in page
    assert page.count("look here") == 1
    assert "Set fsync and synchronous_commit to on." in page  # the tests' server runs with fsync off


def test_workers_are_alive_silent_or_dead_and_only_the_proven_are_dead(eve):
    worker("w-alive", ago=2)
    worker("w-silent", ago=200)
    worker("w-dead", ago=90, dead_at=database_now())
    page = text(eve.get("/health"))
    for name, life in (("w-alive", "alive"), ("w-silent", "silent"), ("w-dead", "dead")):
        assert re.search(rf"{name} worker box 1 \S+ \S+ ago {life}", page)


def test_a_console_process_that_sent_once_is_idle_later_and_counts_as_no_worker(eve):
    worker("w-web", ago=200, role="web")
    page = text(eve.get("/health"))
    assert re.search(r"w-web web box 1 \S+ \S+ ago idle", page)
    assert "No worker is alive" in page


def test_a_process_registers_as_what_it_serves_as(ledger_db, monkeypatch):
    monkeypatch.setattr(workers, "_known", {})
    monkeypatch.setattr(workers, "_role", "worker")
    workers.serve_as("web")
    assert Worker.objects.get(name=workers.me()).role == "web"


def test_overdue_work_is_counted_with_the_age_of_the_oldest(eve, clock):
    cast.operation(state="ambiguous", sent=1)
    assert "Overdue operations 0" in text(eve.get("/health"))
    clock.advance(minutes=11)
    page = text(eve.get("/health"))
    assert "Overdue operations 1, oldest by 10 min" in page
    assert "nothing is lost, it waits in the ledger" in page


def test_the_queue_is_counted_without_unpickling_a_task(eve):
    with mock.patch("pickle.loads", side_effect=AssertionError("a task was unpickled")):
        OrmQ.objects.create(key="aftercall", payload="not a pickle", lock=timezone.now() - timedelta(minutes=3))
        OrmQ.objects.create(key="aftercall", payload="not a pickle", lock=timezone.now() + timedelta(minutes=3))
        page = text(eve.get("/health"))
    assert "Waiting 1 Taken by a worker 1 Oldest waiting for 3 min" in page


@pytest.mark.parametrize(
    ("version", "is_old"), [("2026f", False), ("2026a", False), ("2025c", True), ("2019a", True), ("?", True)]
)
def test_zone_data_a_year_behind_is_old(version, is_old):
    assert vitals.old(version, datetime(2026, 11, 29, tzinfo=UTC)) is is_old


def test_last_years_last_zone_data_is_not_old_in_january():
    assert not vitals.old("2026f", datetime(2027, 1, 10, tzinfo=UTC))


@pytest.mark.parametrize(
    ("replica", "fsync", "commit", "says"),
    [
        (True, "on", "on", "replica"),
        (False, "off", "on", "fsync"),
        (False, "on", "off", "synchronous_commit"),
        (False, "on", "on", ""),
    ],
)
def test_a_database_that_may_lose_commits_is_named(replica, fsync, commit, says):
    assert says in vitals._unsafe(replica, fsync, commit)
    assert bool(vitals._unsafe(replica, fsync, commit)) is bool(says)


def test_the_page_costs_the_same_queries_for_one_worker_and_for_twenty(eve):
    costs = []
    for start, number in ((0, 1), (1, 20)):
        for n in range(start, start + number):
            worker(f"w-{n}", ago=1)
        with CaptureQueriesContext(connection) as asked:
            eve.get("/health")
        costs.append(len(asked))
    assert costs[0] == costs[1] <= 16  # each part has one of its own


def test_somebody_without_a_role_does_not_see_it(ledger_db):
    from django.contrib.auth.models import User

    assert cast.client(User.objects.create_user("nobody")).get("/health").status_code == 403


def test_machines_get_ok_without_signing_in(ledger_db):
    answer = Client().get("/healthz")
    assert (answer.status_code, answer.content) == (200, b"ok\n")


def test_machines_are_told_when_the_database_is_away(ledger_db):
    with mock.patch("console.views.health.psycopg.connect", side_effect=psycopg.OperationalError("password=s3cret")):
        answer = Client().get("/healthz")
    assert answer.status_code == 503
    assert b"s3cret" not in answer.content


def test_machines_are_told_within_three_seconds_when_the_database_is_frozen(ledger_db):
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # takes connections and never says a word
        params = {**connection.get_connection_params(), "host": "127.0.0.1", "port": str(frozen.getsockname()[1])}
        began = time.monotonic()
        with mock.patch("console.views.health.connection.get_connection_params", return_value=params):
            answer = Client().get("/healthz")
    assert answer.status_code == 503
    assert time.monotonic() - began < 3
