"""The console in a real browser: reachable by keyboard and by assistive technology, and steady under the hands."""

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from audit.models import Entry
from reconciliation import transition
from reconciliation.models import Operation
from tests import cast

pytestmark = pytest.mark.browser
SOON = 12_000  # milliseconds: polling is every 3 s, and the machine may be busy


def filled():
    """A ledger with something of everything; the case and the run to look at."""
    run = cast.run(workflow_id="T-77")
    cast.operation(state="succeeded", run=run, step="create_label", provider_operation_id="lbl_31", sent=60)
    seen = {"id": "re_5", "order": "1002", "amount": 420, "currency": "USD"}
    compared = {"order": "equal", "amount": "differs", "currency": "equal"}
    entries = (cast.finding("mismatch", observed=seen, compared=compared, note="4.20 is not 42.00"),)
    case = cast.escalated(run=run, entries=entries, hidden={"card": "4242"})
    run = cast.run_stands(run, "uncertain", waiting_for="issue_refund")
    cast.operation(state="ambiguous", order="1003", sent=9000, due_at=transition.database_now())
    return case, run


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_barrier_that_axe_can_find(ledger_db, till, signed_in, live_server, settings, scheme):
    settings.AFTERCALL_EXAMPLE = True
    who = cast.people()
    case, run = filled()
    page = signed_in(who["op_ann"])
    page.emulate_media(color_scheme=scheme)
    found = {}
    for path in ("/", "/?tab=closed", "/?q=nowhere", f"/operations/{case.pk}", "/runs", f"/runs/{run.pk}", "/audit",
                 f"/audit/{Entry.objects.latest('id').pk}", "/health", "/outbox", "/operations/0", "/accounts/2fa/",
                 "/accounts/logout/"):  # fmt: skip
        page.goto(live_server.url + path)
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        result = Axe().run(page).response
        found[path] = [f"{v['id']}: {v['nodes'][0]['html'][:160]}" for v in result["violations"]]
    assert {path: problems for path, problems in found.items() if problems} == {}


def test_the_sign_in_pages_have_no_barrier_and_let_in(ledger_db, live_server, page):
    who = cast.people()
    from console import sign_in

    page.goto(live_server.url + "/")
    assert Axe().run(page).response["violations"] == []
    page.goto(live_server.url + sign_in.make_link(who["op_ann"]))
    assert Axe().run(page).response["violations"] == []
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("Nothing needs a decision").wait_for()


def test_narrow_screens_scroll_down_and_never_sideways(ledger_db, till, signed_in, live_server):
    who = cast.people()
    case, run = filled()
    cast.escalated(order="x" * 120, request={"order": "x" * 120})
    page = signed_in(who["op_ann"])
    page.set_viewport_size({"width": 360, "height": 700})
    for path in ("/", f"/operations/{case.pk}", "/runs", f"/runs/{run.pk}", "/audit", "/health", "/outbox"):
        page.goto(live_server.url + path)
        assert widths(page) <= {360}, path
        bar = page.get_by_role("navigation", name="Console")
        for name in ("Queue", "Health"):
            expect(bar.get_by_role("link", name=name)).to_be_in_viewport(ratio=1)


def widths(page):
    """How wide the page is, as it is and with each menu open by itself."""
    script = """() => [null, ...document.querySelectorAll("main details")].map(one => {
        document.querySelectorAll("main details").forEach(each => { each.open = each === one; });
        return document.documentElement.scrollWidth; })"""
    return set(page.evaluate(script))


@pytest.mark.parametrize("width", [730, 800, 901, 1000, 1100])
def test_half_a_screen_leaves_every_column_its_words_and_the_menu_on_the_page(
    ledger_db, till, signed_in, live_server, width
):
    who = cast.people()
    filled()
    page = signed_in(who["op_ann"])
    page.set_viewport_size({"width": width, "height": 700})
    for path in ("/", "/runs", "/audit"):
        page.goto(live_server.url + path)
        cells = page.locator(".rows tbody td.wide-cell:not(:empty)")
        assert min(cell.bounding_box()["width"] for cell in cells.all()) >= 120, path
        page.locator(".me summary").click()
        assert page.locator(".me .menu").bounding_box()["x"] >= 0, path


def test_the_first_stop_of_the_tab_key_leads_past_the_bar(ledger_db, till, signed_in, live_server):
    page = signed_in(cast.people()["op_ann"])
    page.goto(live_server.url + "/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_a_case_is_found_opened_and_decided_with_the_keyboard_alone(ledger_db, till, signed_in, live_server):
    who = cast.people()
    first, second = (cast.escalated(order=order, sent=1000 + n) for n, order in enumerate(("1002", "1001")))
    page = signed_in(who["op_ann"])
    page.goto(live_server.url + "/?sort=age")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/operations/{first.pk}")
    till.shows_found(first)
    page.keyboard.press("l")
    page.get_by_text("Found at the provider.").first.wait_for()
    till.reset()
    page.keyboard.press("/")
    page.keyboard.type("1001")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/operations/{second.pk}")
    page.keyboard.press("r")
    assert page.evaluate("document.activeElement.name") == "reason"
    page.keyboard.type("The customer waits.")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_text("Attempt 2 was made.").wait_for()
    assert len(till.sent) == 1


def test_letters_typed_into_a_field_are_letters(ledger_db, till, signed_in, live_server):
    case = cast.escalated()
    who = cast.people()
    page = signed_in(who["op_ann"])
    page.goto(f"{live_server.url}/operations/{case.pk}")
    page.keyboard.press("/")
    page.keyboard.type("lr/jk")
    assert page.locator("#q").input_value() == "lr/jk"
    assert till.asked == []


def test_the_queue_shows_what_comes_in_and_keeps_focus_and_typed_text(ledger_db, till, signed_in, live_server):
    who = cast.people()
    kept = cast.escalated(order="1002")
    page = signed_in(who["op_ann"])
    page.goto(live_server.url + "/")
    page.locator("#q").fill("half a wo")
    page.locator(f"#op-{kept.pk} a").focus()
    page.locator("#chip-provider summary").click()
    page.locator(f"#op-{kept.pk} a").evaluate("each => each.focus({preventScroll: true})")
    cast.escalated(order="1999", sent=99999, same_key_until=None)
    page.get_by_text("order 1999").wait_for(timeout=SOON)
    assert page.locator("#q").input_value() == "half a wo"
    assert page.evaluate("document.activeElement.getAttribute('href')") == f"/operations/{kept.pk}"
    assert page.locator("#chip-provider").evaluate("each => each.open")


def test_a_reason_being_typed_survives_a_change_and_keeps_the_version_it_was_drawn_with(
    ledger_db, till, signed_in, live_server
):
    who = cast.people()
    case = cast.escalated()
    page = signed_in(who["op_ann"])
    page.goto(f"{live_server.url}/operations/{case.pk}")
    page.locator("#act-terminate summary").click()
    reason = page.locator("#terminate-reason")
    reason.type("I have seen ")
    cast.client(who["op_bob"]).post(
        f"/operations/{case.pk}/act",
        {"action": "look_up", "token": "00000000-0000-4000-8000-000000000001", "version": case.version},
    )
    page.locator("#act-terminate .stale").wait_for(timeout=SOON)
    reason.type("the bank statement")
    assert reason.input_value() == "I have seen the bank statement"
    assert page.locator("#act-terminate [name=version]").input_value() == str(case.version)
    page.locator("#act-terminate button").click()
    page.get_by_text("It changed since you looked, so nothing was done").wait_for()
    assert page.locator("textarea").input_value() == "I have seen the bank statement"
    assert Operation.objects.get(pk=case.pk).state == "ambiguous"


def test_text_that_is_selected_stays_selected_while_nothing_changes(ledger_db, till, signed_in, live_server):
    who = cast.people()
    case = cast.escalated(sent=90000, age=80000)
    page = signed_in(who["op_ann"])
    page.goto(f"{live_server.url}/operations/{case.pk}")
    page.evaluate("getSelection().selectAllChildren(document.querySelector('h1'))")
    with page.expect_response(lambda answer: answer.status == 304, timeout=SOON):
        pass
    assert page.evaluate("getSelection().toString()") == "Refund 42.00 USD for order 1002"


@pytest.mark.case("I5")
def test_a_double_click_is_one_transition_and_leads_to_the_same_page(ledger_db, till, signed_in, live_server):
    who = cast.people()
    case = cast.escalated()
    page = signed_in(who["op_ann"])
    page.goto(f"{live_server.url}/operations/{case.pk}")
    page.locator("#act-terminate summary").click()
    page.locator("#terminate-reason").fill("enough")
    page.locator("#act-terminate button").dblclick()
    page.get_by_text("Done.").wait_for()
    assert Operation.objects.get(pk=case.pk).version == case.version + 1
    assert Entry.objects.filter(subject=str(case.subject), event="refused").count() == 0


def test_everything_works_without_javascript(ledger_db, till, live_server, browser):
    who = cast.people()
    case = cast.escalated()
    context = browser.new_context(java_script_enabled=False, base_url=live_server.url)
    page = context.new_page()
    page.goto("/")
    page.get_by_label("Name").fill("op_ann")
    page.get_by_label("Password").fill(cast.PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    page.locator("#chip-provider summary").click()
    page.locator("#chip-provider .menu a", has_text="pay").click()
    page.get_by_role("link", name=re.compile("Refund")).click()
    page.locator("#act-resolve_applied summary").click()
    page.locator("#resolve_applied-reason").fill("Seen on the statement.")
    page.get_by_role("button", name="It was applied", exact=True).click()
    page.get_by_text("Recorded as applied, on your word.").wait_for()
    page.locator(".me summary").click()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", name="Sign in").wait_for()
    context.close()
    assert Operation.objects.get(pk=case.pk).state == "succeeded"
    assert who


def test_times_are_the_readers(ledger_db, till, live_server, browser):
    who = cast.people()
    case = cast.escalated(sent=5)
    context = browser.new_context(timezone_id="Asia/Tokyo", base_url=live_server.url)
    from django.test import Client

    client = Client()
    client.force_login(who["op_ann"])
    context.add_cookies([{"name": "sessionid", "value": client.cookies["sessionid"].value, "url": live_server.url}])
    page = context.new_page()
    page.goto(f"/operations/{case.pk}")
    page.get_by_text("Times are in Asia/Tokyo.").wait_for()
    context.close()


def test_a_page_that_no_longer_follows_says_so_and_keeps_what_is_typed(ledger_db, till, signed_in, live_server):
    who = cast.people()
    case = cast.escalated()
    page = signed_in(who["op_ann"])
    page.goto(f"{live_server.url}/operations/{case.pk}")
    page.locator("#act-terminate summary").click()
    page.locator("#terminate-reason").fill("half a thought")
    page.context.clear_cookies()
    page.get_by_text("You are signed out; sign in again in another tab").wait_for(timeout=SOON)
    assert page.locator("#terminate-reason").input_value() == "half a thought"
    page.route("**/operations/*", lambda route: route.abort())
    page.get_by_text("The console cannot be reached.").wait_for(timeout=SOON)
    assert page.get_by_role("heading", name="Refund 42.00 USD").is_visible()
