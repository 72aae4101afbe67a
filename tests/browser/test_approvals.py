"""Consent in a real browser: approve, deny, expire, another person's and one's own request."""

from __future__ import annotations

from datetime import timedelta

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from audit.models import Entry
from reconciliation import sweeping
from reconciliation.models import Approval, Operation, Run
from reconciliation.workflows import Consent
from tests import cast
from tests.test_approvals_page import large
from tests.test_two_people import guarded  # noqa: F401 - a fixture
from tests.test_two_people_page import press, stopped  # noqa: F401 - a fixture

pytestmark = pytest.mark.browser
SOON = 12_000


@pytest.fixture
def who(ledger_db, till):
    return cast.people()


def opens(signed_in, live_server, person, path="/approvals"):
    page = signed_in(person)
    page.goto(live_server.url + path)
    return page


def says(page, key, because):
    page.keyboard.press(key)
    page.keyboard.type(because)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")


@pytest.mark.case("F1")
def test_what_is_approved_is_what_is_sent_and_once(who, till, signed_in, live_server):
    large()
    page = opens(signed_in, live_server, who["ap_cleo"])
    expect(page.get_by_role("heading", name="Refund 640.00 USD for order 1014")).to_be_visible()
    expect(page.get_by_role("cell", name="640.00 USD")).to_be_visible()
    expect(page.get_by_text("4242424242424242")).to_have_count(0)
    says(page, "a", "The order is right.")
    page.get_by_text("Approved. It is sent, once").wait_for()
    sweeping.sweep()
    page.locator("aside").get_by_text("✓used").first.wait_for(timeout=SOON)
    sweeping.sweep()
    assert [call.request["amount"] for call in till.sent] == [64_000]
    assert Operation.objects.get().state == "succeeded"


@pytest.mark.case("F1")
def test_a_changed_request_is_another_one_on_the_page_and_the_old_one_cannot_be_approved(
    who, till, signed_in, live_server
):
    first = large()
    page = opens(signed_in, live_server, who["ap_cleo"])
    large(version=2)
    page.keyboard.press("a")
    page.keyboard.type("The order is right.")
    page.locator("#act-approve").get_by_role("button", name="Approve").click()
    page.get_by_text("nothing was done").first.wait_for()
    page.goto(f"{live_server.url}/approvals/{first.pk}")
    expect(page.locator("aside").get_by_text("superseded").first).to_be_visible()
    expect(page.locator("#act-approve")).to_have_count(0)
    assert (till.sent, Approval.objects.filter(state="waiting").count()) == ([], 1)


@pytest.mark.case("F3")
def test_the_countdown_runs_and_nobody_approves_when_it_is_over(who, till, signed_in, live_server, clock):
    large(consent=Consent(policy="One approver.", expires_after=timedelta(minutes=20)))
    page = opens(signed_in, live_server, who["ap_cleo"])
    expect(page.locator("aside").get_by_text("expires in 19:5")).to_be_visible()
    page.keyboard.press("a")
    page.keyboard.type("Just in")
    clock.advance(minutes=18)
    expect(page.locator("aside").get_by_text("expires in 1:")).to_be_visible(timeout=SOON)
    assert page.locator("#approve-reason").input_value() == "Just in"
    clock.advance(minutes=3)
    expect(page.locator("aside h2").get_by_text("expired", exact=True)).to_be_visible(timeout=SOON)
    page.locator("#act-approve").get_by_role("button", name="Approve").click()
    page.get_by_text("Its time is over").wait_for()
    assert (Operation.objects.get().state, till.sent) == ("awaiting_approval", [])


@pytest.mark.case("F6")
def test_a_double_click_is_one_decision_and_one_friendly_page(who, till, signed_in, live_server):
    approval = large()
    page = opens(signed_in, live_server, who["ap_cleo"])
    page.keyboard.press("d")
    page.keyboard.type("The order was cancelled.")
    page.locator("#act-deny").get_by_role("button", name="Deny").dblclick()
    page.get_by_text("Denied. Nothing was sent").wait_for()
    assert Entry.objects.filter(subject=str(approval.subject), reason_code="denied").count() == 1
    assert Operation.objects.get().reason_code == "denied"


@pytest.mark.case("F6")
def test_an_approver_whose_page_is_old_is_told_who_decided(who, till, signed_in, live_server):
    from console import access
    from console.models import Role, Tenant

    access.set_role(user=who["op_bob"], tenant=Tenant.objects.get(slug="t_acme"), role=Role.APPROVER, by=cast.SETTER)
    approval = large()
    page = opens(signed_in, live_server, who["ap_cleo"])
    page.keyboard.press("a")
    page.keyboard.type("It is right.")
    from tests.test_approvals_page import decide

    decide(cast.client(who["op_bob"]), approval, "deny")
    page.locator("#act-approve").get_by_role("button", name="Approve").click()
    page.get_by_text("Already denied by op_bob at").wait_for()
    assert (Operation.objects.get().state, till.sent) == ("failed_terminal", [])


def test_ones_own_request_says_that_another_person_decides(who, till, signed_in, live_server):
    large(on_behalf_of="ap_cleo")
    page = opens(signed_in, live_server, who["ap_cleo"], "/approvals?tab=yours")
    expect(page.get_by_text("You asked for this, or it was asked for you")).to_be_visible()
    expect(page.locator("#act-approve")).to_have_count(0)
    says(page, "d", "I was wrong.")
    page.get_by_text("Denied. Nothing was sent").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_has_no_barrier_and_never_scrolls_sideways(who, till, signed_in, live_server, scheme):
    cast.operation(state="succeeded", order="1014", sent=60)
    large()
    page = opens(signed_in, live_server, who["ap_cleo"])
    page.emulate_media(color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert [f"{v['id']}: {v['nodes'][0]['html'][:160]}" for v in Axe().run(page).response["violations"]] == []
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_request_about_a_run_shows_what_would_be_undone_on_every_screen(
    stopped, signed_in, live_server, scheme,  # noqa: F811
):  # fmt: skip
    who, run = stopped
    press(cast.client(who["op_ann"]), "/runs", run, "compensate_run")
    page = signed_in(who["ap_cleo"])
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 1360, "height": 900})
    page.goto(f"{live_server.url}/approvals")
    expect(page.get_by_role("columnheader", name="What would be undone")).to_be_visible()
    expect(page.get_by_role("cell", name="42.00 USD r-1")).to_be_visible()
    assert [v["id"] for v in Axe().run(page).response["violations"]] == []
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    expect(page.get_by_role("cell", name="42.00 USD r-1")).to_be_visible()
    says(page, "a", "Nothing of it is needed.")
    page.get_by_text("What was applied is being undone").wait_for()
    assert Run.objects.get().state == "compensating"
