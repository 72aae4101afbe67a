"""The list of runs: what has stopped, what goes on, what was undone; found by any of their names."""

import html
import re

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from console import sagas, search
from reconciliation import registry
from reconciliation.models import Run
from reconciliation.transition import database_now
from tests import cast


@pytest.fixture
def ann(ledger_db, till, settings):
    settings.AFTERCALL_WORKFLOWS = ["examples.order_desk.workflow.DAMAGED_ITEM"]
    registry.forget()
    yield cast.client(cast.people()["op_ann"])
    settings.AFTERCALL_WORKFLOWS = []
    registry.forget()


def text(response):
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.content.decode())))


def ids(response):
    return re.findall(r'run \d+ · <span class="mono">([\w-]+)<', response.content.decode())


def stopped(workflow_id, *, because="undo_incomplete", state="compensating", at="", **facts):
    made = cast.run(workflow_id=workflow_id, **facts)
    mark = {"escalated_at": database_now(), "escalation_reason": because, "waiting_for": at}
    return cast.run_stands(made, state, lease_until=None, **mark)


def four():
    stopped("S-1", at="stuck: schedule_pickup; waiting: create_label")
    cast.run_stands(cast.run(workflow_id="U-1"), "uncertain", lease_until=None, reason_code="step_unknown")
    cast.run_stands(cast.run(workflow_id="C-1"), "cancelled", lease_until=None, reason_code="cancelled")
    cast.run_stands(cast.run(workflow_id="G-1"), "succeeded", lease_until=None, reason_code="all_steps_verified")


def test_tabs_hold_what_their_names_say(ann):
    four()
    assert ids(ann.get("/runs")) == ["G-1", "C-1", "U-1", "S-1"]
    assert ids(ann.get("/runs?tab=stopped")) == ["S-1"]
    assert ids(ann.get("/runs?tab=going")) == ["U-1"]
    assert ids(ann.get("/runs?tab=back")) == ["C-1", "S-1"]
    assert "Stopped for a person 1" in text(ann.get("/runs"))


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("state=uncertain", ["U-1"]),
        ("mark=escalated", ["S-1"]),
        ("mark=none&state=compensating", []),
        ("workflow=damaged_item", ["G-1", "C-1", "U-1", "S-1"]),
        ("workflow=other", []),
        ("tenant=t_beta", []),
    ],
)
def test_filters_narrow_the_list_and_are_links(ann, query, found):
    four()
    page = ann.get(f"/runs?{query}")
    assert ids(page) == found
    assert "×" in text(page)


def test_each_row_says_where_its_run_stands(ann):
    four()
    page = text(ann.get("/runs"))
    assert "an undo is stuck; a person must finish it (stuck: schedule_pickup; waiting: create_label)" in page
    assert "compensating, stopped 0 s ago" in page
    assert "the outcome of a step is unknown" in page
    assert "cancelled before its end" in page


def test_a_run_is_found_by_its_id_its_object_and_its_number(ann):
    four()
    made = cast.run(workflow_id="T-9", order="9009")
    for sought in ("T-9", "9009", str(made.pk), f"run {made.pk}"):
        assert ids(ann.get("/runs", {"q": sought})) == ["T-9"], sought
    assert "No run is called exactly that" in text(ann.get("/runs?q=nowhere"))
    assert ann.get(f"/?q=run {made.pk}").headers["Location"] == f"/runs/{made.pk}"


def test_a_run_of_a_workflow_that_is_gone_is_found_through_its_operations(ann, settings):
    made = cast.run(workflow_id="T-9")
    cast.operation(run=made, workflow_id="T-9")
    settings.AFTERCALL_WORKFLOWS = []
    registry.forget()
    assert ids(ann.get("/runs?q=T-9")) == ["T-9"]


def test_runs_of_others_are_nowhere(ann):
    cast.run(workflow_id="theirs", tenant="t_beta")
    assert ids(ann.get("/runs")) == ids(ann.get("/runs?q=theirs")) == []


def test_pages_by_key_skip_and_repeat_nothing(ann, monkeypatch):
    monkeypatch.setattr("console.views.runs.SIZE", 2)
    for number in range(5):
        cast.run(workflow_id=f"T-{number}")
    first = ann.get("/runs?workflow=damaged_item")
    cast.run(workflow_id="T-99")
    link = re.search(r'rel="next" href="([^"]+)"', first.content.decode())[1].replace("&amp;", "&")
    assert "workflow=damaged_item" in link
    assert ids(first) + ids(ann.get(f"/runs{link}")) == ["T-4", "T-3", "T-2", "T-1"]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("", "No run yet"),
        ("tab=stopped", "No run has stopped"),
        ("tab=going", "No run is going on"),
        ("tab=back", "Every run went through"),
        ("state=failed", "No run is in this state"),
    ],
)
def test_an_empty_list_says_what_that_means(ann, query, words):
    assert words in text(ann.get(f"/runs?{query}"))


def test_what_a_workflow_cannot_take_back_is_told_before_any_run_of_it(ann):
    page = text(ann.get("/runs"))
    assert "damaged_item v1 create_label · schedule_pickup · issue_refund pivot" in page
    assert "send_email cannot be undone: a mail that went out cannot be called back" in page


# On the queue


def test_a_run_that_stopped_without_a_marked_operation_stands_on_the_queue(ann):
    made = stopped("S-1", at="stuck: schedule_pickup; waiting: create_label")
    page = ann.get("/")
    assert "Runs that stopped" in text(page)
    assert f'href="/runs/{made.pk}">damaged_item for 1002</a>' in page.content.decode()
    assert "stuck: schedule_pickup; waiting: create_label" in text(page)
    assert "Needs a decision 1" in text(page)
    assert "Nothing needs a decision" not in text(page)


@pytest.mark.parametrize(
    "because",
    ["step_failed_after_pivot", "undo_incomplete", "no_valid_proposal", "step_terminated", "request_changed",
     "run_time_spent", "run_spend_cap"],
)  # fmt: skip
def test_whatever_stopped_a_run_it_is_seen(ann, because):
    stopped("S-1", because=because, state="pending")
    assert "Runs that stopped" in text(ann.get("/"))


def test_a_run_whose_operation_is_on_the_list_is_not_listed_twice(ann):
    made = cast.run(workflow_id="S-1")
    cast.escalated(run=made)
    mark = {"escalated_at": database_now(), "escalation_reason": "step_terminated"}
    cast.run_stands(made, "pending", lease_until=None, **mark)
    page = text(ann.get("/"))
    assert "Runs that stopped" not in page
    assert "Needs a decision 1" in page


def test_filters_of_operations_and_later_pages_leave_the_runs_out_and_the_count_in(ann, monkeypatch):
    monkeypatch.setattr("console.views.queue.SIZE", 1)
    stopped("S-1")
    for order in ("1", "2"):
        cast.escalated(order=order)
    first = ann.get("/")
    link = re.search(r'rel="next" href="([^"]+)"', first.content.decode())[1].replace("&amp;", "&")
    shown = ("/", "/?workflow=damaged_item", "/?mark=escalated")
    hidden = ("/" + link, "/?provider=pay", "/?workflow=other", "/?mark=none", "/?tab=looking")
    for address, there in [(each, True) for each in shown] + [(each, False) for each in hidden]:
        page = text(ann.get(address))
        assert ("Runs that stopped" in page) is there, address
        assert "Needs a decision 3" in page


def test_many_runs_that_stopped_lead_to_their_list(ann):
    for number in range(7):
        stopped(f"S-{number}")
    page = ann.get("/").content.decode()
    assert page.count('<span class="state person"><span aria-hidden="true">▲</span>stopped') == 5
    assert 'href="/runs?tab=stopped">All runs that stopped</a>' in page


def test_runs_of_others_do_not_count(ann):
    stopped("S-1", tenant="t_beta")
    assert "Needs a decision 0" in text(ann.get("/"))


def test_the_queue_costs_the_same_queries_for_one_stopped_run_and_for_many(ann):
    costs = []
    for rows in (1, 4):
        for number in range(rows):
            stopped(f"S-{rows}-{number}")
        with CaptureQueriesContext(connection) as asked:
            ann.get("/")
        costs.append(len(asked))
    assert costs[0] == costs[1]


def test_what_stopped_and_what_is_sought_is_read_from_an_index(ann):
    stopped("S-1")
    marked = sagas.stopped(["t_acme"]).rows.order_by("id")[:6]
    sought = Run.objects.filter(search.run_called("T-9", tenants=["t_acme"]), tenant__in=["t_acme"])
    with connection.cursor() as cursor:
        cursor.execute("SET enable_seqscan = off")
        plans = marked.explain(), sought.explain()
        cursor.execute("RESET enable_seqscan")
    assert "run_escalated" in plans[0]
    assert not any("Seq Scan" in plan for plan in plans)
