"""Stop switches and limits in a real browser: a typo is caught before anybody relies on it, on every screen."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from reconciliation.models import Limit
from tests import cast

pytestmark = pytest.mark.browser


@pytest.fixture
def people(ledger_db: Any, till: Any) -> dict[str, Any]:
    return cast.people()


def stop(page: Any, provider: str, action: str = "refund.create") -> None:
    form = page.locator("#stop")
    form.get_by_label("Provider").fill(provider)
    form.get_by_label("Action").fill(action)
    form.get_by_label("Reason, for everybody and the audit log").fill("double payouts")
    form.get_by_role("button", name="Stop").click()


def mended(page: Any) -> None:
    """The form came back with what was typed: one word is corrected, and it is set."""
    page.get_by_text("Nearest: pay.").wait_for()
    assert page.get_by_text("Stopped:").count() == 0
    form = page.locator("#stop")
    assert form.get_by_label("Action").input_value() == "refund.create"
    assert form.get_by_label("Reason, for everybody and the audit log").input_value() == "double payouts"
    form.get_by_label("Provider").fill("pay")
    form.get_by_role("button", name="Stop").click()
    page.locator("#stops").get_by_text("pay/refund.create in t_acme").wait_for()
    limit = Limit.objects.get()
    assert (limit.provider, limit.action, limit.reason) == ("pay", "refund.create", "double payouts")


def test_a_typo_stops_nothing_and_is_mended_in_the_form_that_came_back(
    people: Any, signed_in: Any, live_server: Any
) -> None:
    page = signed_in(people["op_ann"])
    page.goto(live_server.url + "/limits")
    stop(page, "Pay")
    mended(page)


def test_it_is_mended_without_javascript(people: Any, signed_in: Any, live_server: Any, browser: Any) -> None:
    page = signed_in(people["op_ann"])
    context = browser.new_context(java_script_enabled=False, storage_state=page.context.storage_state())
    plain = context.new_page()
    plain.goto(live_server.url + "/limits")
    stop(plain, "Pay")
    mended(plain)
    context.close()


def test_the_names_that_there_are_are_offered(people: Any, signed_in: Any, live_server: Any) -> None:
    cast.operation(provider="purse", action="pay.out")  # configured no more
    page = signed_in(people["op_ann"])
    page.goto(live_server.url + "/limits")
    offered = {
        label: page.locator("#stop").get_by_label(label).evaluate("field => [...field.list.options].map(o => o.value)")
        for label in ("Provider", "Action", "Workflow")
    }
    assert offered == {
        "Provider": ["pay", "purse"],
        "Action": ["pay.out", "refund.create"],
        "Workflow": ["damaged_item"],
    }


def test_the_form_that_came_back_keeps_what_is_typed_while_the_page_keeps_itself_up_to_date(
    people: Any, signed_in: Any, live_server: Any
) -> None:
    page = signed_in(people["op_ann"])
    page.goto(live_server.url + "/limits")
    stop(page, "Pay")
    page.get_by_text("Nearest: pay.").wait_for()
    page.locator("#stop").get_by_label("Provider").fill("pa")
    with page.expect_response(lambda answer: answer.url.endswith("/limits"), timeout=12_000) as polled:
        pass
    assert polled.value.ok
    assert page.locator("#stop").get_by_label("Provider").input_value() == "pa"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_no_state_of_the_page_has_a_barrier_that_axe_can_find(
    people: Any, signed_in: Any, live_server: Any, scheme: str, width: int
) -> None:
    page = signed_in(people["op_ann"])
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    found = {}

    def look(state: str) -> None:
        page.evaluate("document.querySelectorAll('#live details').forEach(each => { each.open = true; })")
        found[state] = [f"{v['id']}: {v['nodes'][0]['html'][:160]}" for v in Axe().run(page).response["violations"]]
        assert page.evaluate("document.documentElement.scrollWidth") <= width, state

    page.goto(live_server.url + "/limits")
    look("nothing in force")
    stop(page, "Pay")
    page.get_by_text("Nearest: pay.").wait_for()
    look("refused")
    page.locator("#stop").get_by_label("Provider").fill("pay")
    page.locator("#stop").get_by_role("button", name="Stop").click()
    page.locator("#stops").get_by_text("pay/refund.create in t_acme").wait_for()
    form = page.locator("#limit")
    form.get_by_label("Limits").select_option("rate")
    form.get_by_label("At most").fill("1000")
    form.get_by_label("Window").fill("86400")
    form.get_by_label("Reason, for everybody and the audit log").fill("no more in a day")
    form.get_by_role("button", name="Set limit").click()
    page.get_by_text("at most 1,000 attempts in 1 d 0 h").wait_for()
    look("in force")
    form.get_by_label("Limits").select_option("rate")
    form.get_by_label("At most").fill("2000")
    form.get_by_label("Window").fill("86400")
    form.get_by_label("Reason, for everybody and the audit log").fill("the sale begins")
    form.get_by_role("button", name="Set limit").click()
    page.get_by_text("is in force already").wait_for()
    assert form.get_by_label("At most").input_value() == "2000"
    look("refused to loosen")
    assert {state: problems for state, problems in found.items() if problems} == {}
