"""What people read of a local effect: it commits together with its result, and there is nothing to look up."""

import html
import re
from uuid import uuid4

import pytest

from reconciliation import actions, sweeping
from reconciliation.executor import perform
from reconciliation.models import Operation
from reconciliation.providers.base import Rejected
from tests import cast
from tests.book import entry
from tests.scripted import AGENT, OLGA, row
from tests.test_local import claimed

TOGETHER = "It commits together with its result; it cannot be half done."


@pytest.fixture
def ann(book):
    return cast.client(cast.people()["op_ann"])


def text(response):
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.content.decode())))


def case(browser, pk):
    return text(browser.get(f"/operations/{pk}"))


def mine(**parts):
    return entry(tenant="t_acme", **parts)


def said(pk, action):
    return next(p for p in actions.previews(row(pk), actor=OLGA) if p.action == action)


def test_what_is_done_says_that_it_cannot_be_half_done(ann, book):
    page = case(ann, perform(mine(), actor=AGENT).pk)
    assert "Enter 42.00 USD for order 1002" in page
    assert f"Done. {TOGETHER}" in page
    assert "in this database" in page
    assert "Sent" not in page
    assert "Asked, and what was done" in page


def test_what_is_under_way_says_so_too(ann, book):
    page = case(ann, claimed(mine()).subject.pk)
    assert f"Being done. {TOGETHER}" in page
    assert "proves that nothing was applied" in page


def test_what_was_rolled_back_says_that_nothing_is_left_of_it(ann, book):
    book.does(ValueError())
    page = case(ann, perform(mine(), actor=AGENT).pk)
    assert f"Not done. Every attempt was rolled back as a whole. {TOGETHER}" in page
    assert "Attempt 1 was not applied: rolled back as a whole; nothing of it was applied. The effect raised" in page
    assert "no result on record" in page


def test_a_lost_worker_left_nothing(ann, book, clock):
    pk = claimed(mine()).subject.pk
    clock.advance(60)
    sweeping.sweep()
    page = case(ann, pk)
    assert "The lease ran out under attempt 1; nothing of it was committed." in page
    assert "may have been sent" not in page


def test_what_left_its_transaction_says_where_to_look(ann, book):
    book.does(lambda call, cursor: cursor.connection.rollback())
    page = case(ann, perform(mine(), actor=AGENT).pk)
    assert "Left its transaction. What it did may have been committed without a result." in page
    assert "its effect left the transaction of its result" in page
    told = said(Operation.objects.get().pk, "look_up")
    assert (told.allowed, told.why[:27]) == (False, "There is nobody to ask: loo")
    for word in ("resolve_applied", "resolve_not_applied"):
        assert said(Operation.objects.get().pk, word).why.startswith(
            "Look at the rows that it writes first. On your word"
        )


def test_the_list_says_what_is_known_of_it(ann, book):
    book.does(ValueError())
    perform(mine(), actor=AGENT)
    listed = text(ann.get("/?tab=all"))
    assert "Not done" in listed
    assert "safe: done whole or not" in listed


@pytest.mark.parametrize("refused", [False, True])
def test_nothing_is_looked_up_that_is_settled_and_the_button_says_why(book, refused):
    book.does(*([Rejected("no")] if refused else []))
    pk = perform(mine(), actor=AGENT).pk
    told = said(pk, "look_up")
    assert not told.allowed
    assert told.why.startswith("Its effect commits together with its result")
    press = actions.Press(action="look_up", token=uuid4(), version=row(pk).version)
    assert actions.act(row(pk), press, actor=OLGA).verdict == "refused"


def test_a_person_ends_a_lost_worker_s_lease_by_looking(book, clock):
    pk = claimed(mine()).subject.pk
    assert not said(pk, "look_up").allowed, "the lease lives"
    clock.advance(60)
    assert said(pk, "look_up").why == "The worker's lease is over, which proves that nothing was applied: ends it."
    press = actions.Press(action="look_up", token=uuid4(), version=row(pk).version)
    answer = actions.act(row(pk), press, actor=OLGA)
    assert answer.message == "Rolled back as a whole; nothing of it was applied. It is to be retried now."
    assert said(pk, "retry").why == "Every attempt was rolled back as a whole; does it again."
    press = actions.Press(action="retry", token=uuid4(), version=row(pk).version, reason="the machine is back")
    actions.act(row(pk), press, actor=OLGA)
    assert (row(pk).state, book.rows()) == ("succeeded", 1)
