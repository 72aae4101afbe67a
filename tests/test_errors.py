"""What people and the log are told when a request cannot be served."""

import logging
from unittest import mock

import psycopg
import pytest
from django.core.exceptions import BadRequest, DisallowedHost
from django.db import InterfaceError, OperationalError

from console import logs
from tests import cast


def caused(error, cause):
    error.__cause__ = cause
    return error


AWAY = [
    OperationalError("connection refused"),
    InterfaceError("the connection is closed"),
    caused(OperationalError("terminating connection"), psycopg.errors.AdminShutdown()),
    caused(OperationalError("too many clients"), psycopg.errors.TooManyConnections()),
]
THERE = [
    caused(OperationalError("deadlock"), psycopg.errors.DeadlockDetected()),
    caused(OperationalError("time-out"), psycopg.errors.QueryCanceled()),
    ValueError("a fault of ours"),
]


@pytest.fixture
def ann(ledger_db):
    browser = cast.client(cast.people()["op_ann"])
    browser.raise_request_exception = False
    return browser


def broken_by(error, *, at="require"):
    return mock.patch(f"console.access.{at}", side_effect=error)


@pytest.mark.parametrize("error", AWAY, ids=repr)
def test_a_page_says_that_the_database_cannot_be_reached_and_that_nothing_was_changed(ann, error):
    with broken_by(error):
        answer = ann.get("/")
    assert (answer.status_code, answer["Retry-After"]) == (503, "5")
    page = answer.content.decode()
    assert "The database cannot be reached" in page
    assert "Nothing was changed; try again in a moment." in page


def test_after_a_press_the_page_does_not_promise_that_nothing_was_changed(ann):
    with broken_by(AWAY[0], at="roles_of"):
        answer = ann.post("/operations/1/act", {})
    assert answer.status_code == 503
    assert b"may have been recorded" in answer.content
    assert b"Nothing was changed;" not in answer.content


@pytest.mark.parametrize("error", THERE, ids=repr)
def test_what_a_reachable_database_refuses_is_a_fault_of_ours(ann, error):
    with broken_by(error):
        answer = ann.get("/")
    assert answer.status_code == 500
    assert b"Something broke on our side" in answer.content


def test_the_bare_pages_name_their_icon_so_that_no_browser_asks_for_another(ann):
    for error in (AWAY[0], THERE[-1]):
        with broken_by(error):
            assert b'rel="icon"' in ann.get("/").content


@pytest.fixture
def lines():
    """What the handler of the log writes, while the test runs."""
    handler = next(one for one in logging.getLogger().handlers if one.get_name() == "lines")
    kept = []
    with mock.patch.object(handler, "emit", side_effect=lambda record: kept.append(handler.format(record))):
        yield kept


@pytest.mark.parametrize(
    ("error", "status"), [(BadRequest("no\nsuch\rform"), 400), (DisallowedHost("who?"), 400), (AWAY[0], 503)], ids=repr
)
def test_a_refused_request_is_one_line_of_the_log(ann, lines, error, status):
    with broken_by(error):
        assert ann.get("/").status_code == status
    said = [line for line in lines if type(error).__name__ in line]
    assert len(said) == 1
    assert "\n" not in said[0]
    assert f"{status} / " in said[0]


def test_a_fault_of_ours_keeps_its_traceback(ann, lines):
    with broken_by(THERE[-1]):
        ann.get("/")
    assert any("Traceback" in line for line in lines)


def test_lines_of_ours_keep_their_traceback(lines):
    record = logging.LogRecord("reconciliation", logging.ERROR, "", 1, "x", (), (ValueError, ValueError("y"), None))
    logs.OneLine().filter(record)
    assert record.exc_info


def test_who_signs_in_after_a_press_is_told_that_it_was_not_done(ledger_db, client):
    who = cast.people()
    led = client.post("/operations/1/act", {"action": "terminate"})
    client.force_login(who["op_ann"])
    answer = client.get(led.headers["Location"], follow=True)
    assert (answer.status_code, answer["Allow"]) == (405, "POST")
    assert b"what was pressed before signing in was not done" in answer.content


@pytest.mark.parametrize(
    "path", ["/operations/1/act", "/runs/1/act", "/limits/set", "/schedules/1/act", "/restore/act"]
)
def test_the_address_of_a_button_opened_like_a_page_says_so(ann, path):
    answer = ann.get(path)
    assert answer.status_code == 405
    assert b"This is the address of a button." in answer.content
