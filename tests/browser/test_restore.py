"""The restore fence in a real browser: said on every page, readable by everybody, released by an admin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from reconciliation import fence, restore
from reconciliation.models import RestoreFence
from tests import cast, database
from tests.backups import Backup
from tests.test_restore_page import people  # noqa: F401 - fixture

pytestmark = pytest.mark.browser


@pytest.fixture
def behind(people: Any, superuser_connection: Any) -> Iterator[Any]:  # noqa: F811
    """A backup was brought back: two cases are open in it."""
    cast.operation(order="1002", state="ambiguous", sent=600)
    cast.operation(order="1003", amount=9900)
    fence.forward()
    backup = Backup(superuser_connection)
    for number in range(4, 9):
        cast.operation(order=f"100{number}")
    fence.forward()
    backup.bring_back()
    fence.look()
    yield people
    backup.drop()


def mark_all() -> None:
    while restore.mark():
        pass


def test_an_operator_sees_why_nothing_is_sent_and_an_admin_releases_it(
    behind: Any, signed_in: Any, live_server: Any
) -> None:
    page = signed_in(behind["op_ann"])
    page.goto(live_server.url + "/")
    page.get_by_text("Nothing is sent:").wait_for()
    page.get_by_role("link", name="What was found, and the release").click()
    page.get_by_text("Operations that may have gone on are being marked").wait_for()
    mark_all()
    page.get_by_text("Releasing needs the role admin in every tenant").wait_for(timeout=12_000)  # by itself
    page.get_by_role("link", name="2 in your tenants still are").click()
    page.get_by_role("heading", name="Queue").wait_for()
    assert page.get_by_text("1003").count()

    page = signed_in(behind["ad_fay"])
    page.goto(live_server.url + "/restore")
    page.get_by_label("Reason: what was compared, with what result").fill("Compared with the bank: 1003 was refunded.")
    page.get_by_role("button", name="Release: let everything be sent again").click()
    page.get_by_text("Released. What is still unknown goes on being looked up").wait_for()
    assert page.get_by_text("Nothing is sent:").count() == 0
    assert not RestoreFence.objects.get().is_down


def test_what_is_being_typed_survives_the_page_keeping_itself_up_to_date(
    behind: Any, signed_in: Any, live_server: Any
) -> None:
    mark_all()
    page = signed_in(behind["ad_fay"])
    page.goto(live_server.url + "/restore")
    field = page.get_by_label("Reason: what was compared, with what result")
    field.fill("Compared with")
    cast.operation(order="1010")
    with page.expect_response(lambda answer: answer.url.endswith("/restore") and answer.request.method == "GET",
                              timeout=12_000):  # fmt: skip
        pass
    assert field.input_value() == "Compared with"


def test_it_is_released_without_javascript(behind: Any, signed_in: Any, live_server: Any, browser: Any) -> None:
    mark_all()
    page = signed_in(behind["ad_fay"])
    context = browser.new_context(java_script_enabled=False, storage_state=page.context.storage_state())
    plain = context.new_page()
    plain.goto(live_server.url + "/restore")
    plain.get_by_label("Reason: what was compared, with what result").fill("Compared with the bank.")
    plain.get_by_role("button", name="Release: let everything be sent again").click()
    plain.get_by_text("Released.").wait_for()
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_no_state_of_the_page_has_a_barrier_that_axe_can_find(
    behind: Any, signed_in: Any, live_server: Any, superuser_connection: Any, scheme: str, width: int
) -> None:
    page = signed_in(behind["ad_fay"])
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    found = {}

    def look(state: str) -> None:
        page.goto(live_server.url + "/restore")
        found[state] = [f"{v['id']}: {v['nodes'][0]['html'][:160]}" for v in Axe().run(page).response["violations"]]
        assert page.evaluate("document.documentElement.scrollWidth") <= width, state

    look("being marked")
    mark_all()
    look("to be released")
    page.get_by_label("Reason: what was compared, with what result").fill("Compared.")
    page.get_by_role("button", name="Release: let everything be sent again").click()
    look("released")
    superuser_connection.execute("DELETE FROM reconciliation_restorefence")
    database.weigh_anchor()
    fence.forget()
    look("unanchored")
    assert {state: problems for state, problems in found.items() if problems} == {}
