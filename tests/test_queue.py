"""The queue: most urgent first, filters, search, pages, and a live part that costs nothing while nothing changes."""

import base64
import html
import json
import re
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from reconciliation.transition import database_now
from tests import cast


@pytest.fixture
def ann(ledger_db, till):
    return cast.client(cast.people()["op_ann"])


def heads(response):
    """The operations listed, by order number, from top to bottom."""
    return re.findall(r'class="what" href="[^"]*">[^<]*order (\w+)', response.content.decode())


def text(response):
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.content.decode())))


def link(response, rel):
    found = re.search(rf'rel="{rel}" href="([^"]+)"', response.content.decode())
    return found[1].replace("&amp;", "&") if found else None


def test_an_empty_queue_says_what_that_means(ann):
    assert "Nothing needs a decision Nothing is unknown either." in text(ann.get("/"))
    cast.operation(state="ambiguous", sent=5)
    assert "Nothing needs a decision 1 being looked up" in text(ann.get("/"))


def test_the_nearest_deadline_of_the_key_comes_first_then_age(ann):
    now = database_now()
    cast.escalated(order="old", sent=9000, same_key_until=None)
    cast.escalated(order="soon", sent=800, same_key_until=now + timedelta(hours=1))
    cast.escalated(order="later", sent=800, same_key_until=now + timedelta(hours=9))
    cast.escalated(order="over", sent=99000, same_key_until=now - timedelta(hours=1))
    assert heads(ann.get("/?sort=urgent")) == ["soon", "later", "over", "old"]
    assert heads(ann.get("/?sort=age")) == ["over", "old", "soon", "later"]


def test_money_at_risk_can_come_first(ann):
    for order, amount in (("small", 100), ("none", None), ("big", 900000)):
        cast.escalated(order=order, amount=amount, request={"order": order})
    assert heads(ann.get("/?sort=money")) == ["big", "small", "none"]


def test_tabs_hold_what_their_names_say_and_count_it(ann):
    cast.escalated(order="decide")
    cast.operation(state="ambiguous", order="looking", sent=5)
    cast.operation(state="awaiting_approval", order="approval")
    cast.operation(state="pending", order="sending", sent=1)
    cast.operation(state="ready", order="ready")
    cast.operation(state="succeeded", order="closed", sent=5)
    expected = {"decide": {"decide"}, "looking": {"looking"}, "approval": {"approval"}, "flight": {"sending", "ready"}}
    for tab, orders in expected.items():
        assert set(heads(ann.get(f"/?tab={tab}"))) == orders
    assert heads(ann.get("/?tab=closed")) == ["closed"]
    assert len(heads(ann.get("/?tab=all"))) == 6
    assert "Needs a decision 1 Being looked up 1 Awaiting approval 1 In flight 2 Closed today 1" in text(ann.get("/"))


def test_counts_stop_at_a_thousand(ann, monkeypatch):
    monkeypatch.setattr("console.views.queue.MOST", 3)
    for _ in range(5):
        cast.operation()
    assert "In flight 3+" in text(ann.get("/"))


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("provider=pay", {"1", "2"}),
        ("provider=mail", {"3"}),
        ("action=message.send", {"3"}),
        ("state=ambiguous&mark=escalated", {"1", "3"}),
        ("mark=none", {"2"}),
        ("error=unknown", {"1", "3"}),
        ("age=1h", set()),
        ("tenant=t_beta", set()),
        ("workflow=damaged_item", {"1", "2", "3"}),
        ("workflow=other", set()),
    ],
)
def test_filters_narrow_the_list_and_are_links(ann, query, found):
    cast.escalated(order="1")
    cast.operation(order="2")
    cast.escalated(order="3", provider="mail", action="message.send")
    page = ann.get(f"/?tab=all&{query}")
    assert set(re.findall(r"(?:order|for) (\d)<", page.content.decode())) == found
    assert "×" in text(page)
    if not found:
        assert "Nothing here passes these filters" in text(page)


def test_a_filter_that_holds_is_named_as_it_was_offered(ann):
    assert "state: unknown ×" in text(ann.get("/?tab=all&state=ambiguous"))
    assert "age: older than 1 h ×" in text(ann.get("/?tab=all&age=1h"))


def test_pages_by_key_skip_and_repeat_nothing_while_rows_come_and_go(ann, monkeypatch):
    monkeypatch.setattr("console.views.queue.SIZE", 4)
    now = database_now()
    for number in range(10):
        deadline = now + timedelta(hours=number // 3 + 1)  # several share one deadline
        cast.escalated(order=str(number), sent=1000 + number, same_key_until=deadline)
    first = ann.get("/")
    cast.escalated(order="99", sent=10, same_key_until=now + timedelta(minutes=1))  # comes in before page one
    second = ann.get("/" + link(first, "next"))
    third = ann.get("/" + link(second, "next"))
    seen = heads(first) + heads(second) + heads(third)
    assert sorted(seen, key=int) == [str(number) for number in range(10)]
    assert link(third, "next") is None
    back = ann.get("/" + link(third, "prev"))
    assert heads(back) == heads(second)


def sealed(*values):
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode()


LAST_DAY = {"t": "9999-12-31T23:59:59-23:59"}


@pytest.mark.parametrize(
    ("page", "cursor"),
    [
        ("/?tab=decide", "nonsense"),
        ("/?tab=decide", "W251bGwsIDFd"),
        ("/?tab=decide", "bnVsbA"),
        ("/?tab=decide", sealed(None, "2026-01-01", "2026", 3)),
        ("/?tab=decide", sealed(None, {"t": "2026-01-01T00:00:00"}, {"t": "2026-01-01T00:00:00"}, 3)),
        ("/?tab=decide", sealed(LAST_DAY, LAST_DAY, LAST_DAY, 3)),
        ("/?tab=decide", sealed(None, {}, {}, 3)),
        ("/?sort=money", sealed(None, True, {"t": "2026-01-01T00:00:00Z"}, 3)),
        ("/?tab=all", sealed(None, "x")),
        ("/?tab=all", sealed(None, None)),
        ("/?tab=all", sealed(None, [1])),
        ("/?tab=all", sealed(None, float("nan"))),
        ("/?tab=closed", sealed(None, 1, 1)),
        ("/runs?open=1", sealed(None, "a\0b")),
        ("/schedules?x=1", sealed(None, "a\0b", 1)),
        ("/schedules?x=1", sealed(None, 1, 1)),
        ("/schedules?x=1", sealed(None, "\ud800", 1)),
        ("/?tab=all", base64.urlsafe_b64encode(b"[" * 3000).decode()),
    ],
)
def test_a_cursor_that_is_not_ours_is_a_clear_400(ann, page, cursor):
    for side in ("after", "before"):
        answer = ann.get(f"{page}&{side}={cursor}")
        assert answer.status_code == 400
        assert "start again" in text(answer)


@pytest.mark.parametrize(
    "page",
    [
        "/?q=a%00b",
        "/?state=%00",
        "/?provider=%00",
        "/?tenant=%00",
        "/?error=%00",
        "/runs?state=%00",
        "/audit?actor=%00",
    ],
)
def test_an_address_with_a_nul_is_a_clear_400(ann, page):
    answer = ann.get(page)
    assert answer.status_code == 400
    assert "holds a character that no name, number or day has" in text(answer)


def test_rows_of_another_tenant_are_nowhere(ann):
    cast.escalated(order="theirs", tenant="t_beta")
    assert heads(ann.get("/?tab=all")) == []
    assert heads(ann.get("/?q=theirs")) == []


def test_a_member_of_two_tenants_sees_both_and_which_is_which(ledger_db, till):
    both = cast.client(cast.people(tenants=("t_acme", "t_beta"))["op_ann"])
    cast.escalated(order="a")
    cast.escalated(order="b", tenant="t_beta")
    page = both.get("/")
    assert sorted(heads(page)) == ["a", "b"]
    assert list(re.findall(r'<td class="soft">(t_\w+)', page.content.decode())) == ["t_acme", "t_beta"]
    assert heads(both.get("/?tenant=t_beta")) == ["b"]


def test_somebody_without_a_role_is_told_so(ledger_db):
    from django.contrib.auth.models import User

    cast.people()
    answer = cast.client(User.objects.create_user("nobody")).get("/")
    assert answer.status_code == 403
    assert "ask an administrator" in text(answer)


# Search


def test_one_exact_hit_leads_to_its_case_by_any_of_its_ids(ann):
    found = cast.operation(
        state="succeeded", order="4711", workflow_id="T-1", provider_operation_id="re_unique_9", sent=5
    )
    cast.operation(order="other")
    for sought in (str(found.pk), found.key, "4711", "T-1", "re_unique_9", found.key[:20], found.key[4:20], "re_uniq"):
        answer = ann.get("/", {"q": sought})
        assert (answer.status_code, answer.headers.get("Location")) == (302, f"/operations/{found.pk}"), sought


def test_a_workflow_id_leads_to_its_run(ann):
    run = cast.run(workflow_id="T-77")
    cast.operation(run=run, workflow_id="T-77", step="one")
    cast.operation(run=run, workflow_id="T-77", step="two")
    assert ann.get("/?q=T-77").headers["Location"] == f"/runs/{run.pk}"


def test_several_hits_are_listed_and_none_is_said(ann):
    cast.operation(order="5000")
    cast.operation(order="5000")
    assert heads(ann.get("/?q=5000")) == ["5000", "5000"]
    assert "Nothing is called exactly that" in text(ann.get("/?q=nowhere"))


def test_search_never_scans(ann):
    from django.db.models import Q

    from console import search
    from reconciliation.models import Operation

    cast.operation()
    with connection.cursor() as cursor:
        cursor.execute("SET enable_seqscan = off")
        for wanted in (search._exact("abcd"), search._exact("17"), search._prefix("abcd")):
            assert isinstance(wanted, Q)
            plan = Operation.objects.filter(wanted, tenant__in=["t_acme"]).explain()
            assert "Seq Scan" not in plan
        cursor.execute("RESET enable_seqscan")


# Live


def test_the_live_part_answers_304_until_something_changes(ann):
    cast.escalated(order="1", sent=9000, age=8000)
    part = ann.get("/", headers={"HX-Request": "true"})
    assert part.status_code == 200
    assert b"<html" not in part.content
    tag = part.headers["HX-PTag"]
    assert ann.get("/", headers={"HX-Request": "true", "HX-PTag": tag}).status_code == 304
    cast.escalated(order="2")
    again = ann.get("/", headers={"HX-Request": "true", "HX-PTag": tag})
    assert again.status_code == 200
    assert "order 2" in again.content.decode()


def test_the_live_part_asks_for_permission_like_the_page(ledger_db, till):
    who = cast.people()
    cast.escalated(order="1")
    stranger = cast.client(who["out_zoe"])
    assert heads(stranger.get("/", headers={"HX-Request": "true"})) == []


def test_the_page_costs_the_same_queries_for_one_row_and_for_forty(ann):
    costs = []
    for rows in (1, 39):
        for number in range(rows):
            cast.escalated(order=str(number), entries=(cast.finding("cannot_tell"),))
        with CaptureQueriesContext(
            connection,
        ) as asked:
            ann.get("/")
        costs.append(len(asked))
    assert costs[0] == costs[1]
    assert costs[0] <= 17


# What a row says


def test_a_row_says_what_differs(ann):
    cast.escalated(
        because="mismatch",
        order="0994",
        amount=60000,
        entries=(cast.finding("mismatch", provider_operation_id="re_5", observed={"amount": 6000}),),
    )
    page = text(ann.get("/"))
    assert "Found 60.00 USD, asked 600.00 USD" in page
    assert "not offered: seen there" in page


def test_characters_that_hide_or_turn_text_are_shown_as_code_points(ann):
    cast.escalated(order="1014\u202egnp.exe", request={"order": "1014\u202egnp.exe"})
    page = ann.get("/").content.decode()
    assert "\u202e" not in page
    assert '1014<span class="cp">U+202E</span>gnp.exe' in page


def test_markup_in_data_is_text(ann):
    cast.escalated(order="<b>x</b>", request={"order": "<script>alert(1)</script>"})
    page = ann.get("/").content.decode()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_an_operation_whose_provider_is_gone_is_still_listed_and_opens(ann):
    gone = cast.escalated(order="77", provider="closed_shop", action="thing.do")
    assert "closed_shop thing.do 42.00 USD for 77" in text(ann.get("/"))
    assert ann.get(f"/operations/{gone.pk}").status_code == 200


def test_kinds_of_trouble_are_grouped_with_what_this_page_holds(ann):
    for order in ("1", "2"):
        cast.escalated(order=order, amount=1000)
    cast.escalated(order="3", provider="mail", action="message.send", amount=None)
    cast.escalated(order="4", because="mismatch", sighted=True)
    page = text(ann.get("/"))
    assert "pay · refund.create · no look-up gave a conclusive answer in time · 2 on this page since" in page
    assert "pay · refund.create · what was found is not what was asked · 1 on this page since" in page
    assert "20.00 USD" in text(ann.get("/"))


def test_the_live_part_of_a_page_whose_reader_is_signed_out_is_told_so_and_gets_no_sign_in_page(ledger_db):
    from django.test import Client

    answer = Client().get("/", headers={"HX-Request": "true"})
    assert answer.status_code == 401
    assert b"<form" not in answer.content


def test_an_id_that_only_a_finding_names_leads_to_its_case(ann):
    seen = cast.finding("mismatch", provider_operation_id="re_500", observed={"id": "re_500"})
    case = cast.escalated(because="mismatch", sighted=True, entries=(seen,))
    two = cast.finding("several", candidates=[{"id": "re_61"}, {"id": "re_62"}])
    other = cast.escalated(because="several_candidates", sighted=True, entries=(two,))
    cast.escalated(because="mismatch", sighted=True)
    assert ann.get("/", {"q": "re_500"}).headers["Location"] == f"/operations/{case.pk}"
    assert ann.get("/", {"q": "re_62"}).headers["Location"] == f"/operations/{other.pk}"
    assert ann.get("/", {"q": "re_50"}).status_code == 200
