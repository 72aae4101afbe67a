"""Undoing in a real browser, with real workers and the sandbox carrier: what is stuck, what waits, who ends it."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from django.urls import reverse
from playwright.sync_api import expect

from reconciliation.models import Approval, Operation, Run
from tests import cast
from tests.browser.test_approvals import says
from tests.browser.test_loop import start_claim
from tests.nursery import WITH_CLAIMS, Desk

pytestmark = [pytest.mark.browser, pytest.mark.processes]

SOON = 12_000
ALL_OF_IT = ["label", "pickup", "pickup.cancel", "label.void"]


def sweep(desk: Desk) -> None:
    """One sweep of a worker process of its own, at the time when the next thing is due."""
    due = desk.next_due()
    if due is not None and due > desk.clock.now():
        desk.clock.set(due)
    assert desk.worker(do="sweep", settings=WITH_CLAIMS).ended()["event"] == "ended"


def workers_go_on(desk: Desk) -> None:
    """Until nothing is due any more."""
    for _ in range(30):
        sweep(desk)
        if desk.next_due() is None:
            return
    raise AssertionError("it does not come to rest")


def refused(desk: Desk) -> Run:
    """A claim whose refund is going to be refused, so that its label and its pickup are to be taken back."""
    desk.world.pay.fault("reject", order="1002", status=402, says="the card was closed")
    return start_claim()


def carrier_did(desk: Desk) -> list[str]:
    return [effect["kind"] for effect in desk.world.carrier.effects(order="1002")]


def sent(desk: Desk, step: str) -> int:
    """How many calls of this step reached the carrier."""
    return desk.sent(desk.operation(step=step))


def opens(page: Any, run: Run) -> Any:
    page.goto(reverse("run", args=[run.pk]))
    return page


def stands(page: Any, word: str) -> None:
    """The page says so by itself: it is not loaded anew."""
    expect(page.locator(".title .state", has_text=word)).to_be_visible(timeout=SOON)


def in_the_way(page: Any) -> Any:
    return page.locator("section", has=page.get_by_role("heading", name="What is in the way"))


def taken_back(page: Any, step: str) -> Any:
    """How the page says that a step is taken back."""
    return page.locator(".saga li", has=page.locator(".forth b", has_text=step)).locator(".back")


def tab_to(page: Any, wanted: Any) -> None:
    """Reach it as a person without a mouse does."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if wanted.evaluate("each => each === document.activeElement"):
            return
    raise AssertionError("Tab does not lead there")


def barriers(page: Any) -> dict[str, list[str]]:
    """What axe finds on this page, and where it scrolls sideways, on a phone and a screen, light and dark."""
    found = {}
    for scheme in ("light", "dark"):
        for width in (360, 1280):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 800})
            page.reload()
            page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
            problems = [f"{v['id']}: {v['nodes'][0]['html'][:160]}" for v in Axe().run(page).response["violations"]]
            wide = page.evaluate("document.documentElement.scrollWidth")
            found[f"{scheme} {width}"] = problems + ([f"{wide} wide"] if wide > width else [])
    page.reload()
    return {state: problems for state, problems in found.items() if problems}


@pytest.mark.case("G1")
def test_an_undo_whose_budget_is_spent_is_retried_from_the_keyboard_and_the_run_ends_undone(
    claims: Desk, visit: Any
) -> None:
    page, run = visit(cast.people()["op_ann"]), refused(claims)
    claims.world.carrier.fault("unavailable", action="pickup.cancel", times=3)
    opens(page, run).get_by_text("Cannot be undone once it is done:").wait_for()
    workers_go_on(claims)
    stands(page, "escalated")
    stands(page, "compensating")
    claims.clock.advance(hours=2)
    workers_go_on(claims)
    assert (carrier_did(claims), sent(claims, "undo:schedule_pickup")) == (["label", "pickup"], 3)

    way = in_the_way(page)
    expect(way).to_contain_text("The undo of schedule_pickup is stuck: the budget of attempts is spent.")
    expect(way).to_contain_text("create_label waits for it.")
    expect(taken_back(page, "create_label")).to_contain_text("waits for the undo of schedule_pickup")
    expect(page.locator("#act-resume")).to_have_count(0)
    assert barriers(page) == {}
    page.goto("/")
    page.get_by_role("link", name="Cancel pickup").wait_for()

    opens(page, run)
    tab_to(page, way.get_by_role("link"))
    page.keyboard.press("Enter")
    page.locator("#act-retry").wait_for()
    assert barriers(page) == {}
    says(page, "r", "The carrier answers again.")
    page.locator("#answer .done").wait_for()
    expect(page.locator("#answer")).to_contain_text("It is succeeded now")
    tab_to(page, page.locator("main").get_by_role("link", name="T-77").first)
    page.keyboard.press("Enter")
    workers_go_on(claims)
    stands(page, "compensated")
    expect(in_the_way(page)).to_have_count(0)
    assert barriers(page) == {}
    assert carrier_did(claims) == ALL_OF_IT
    assert (sent(claims, "undo:schedule_pickup"), sent(claims, "undo:create_label")) == (4, 1)
    assert claims.world.pay.count() == 0
    claims.check()


@pytest.mark.case("G4")
def test_the_newest_effect_is_undone_first_and_the_page_says_which_one_waits_for_it(claims: Desk, visit: Any) -> None:
    page, run = opens(visit(cast.people()["op_ann"]), refused(claims)), Run.objects.get()
    claims.world.carrier.fault("unavailable", action="pickup.cancel", times=2)
    for attempts in (1, 2):
        while not Operation.objects.filter(step="undo:schedule_pickup", attempts=attempts).exists():
            sweep(claims)
        stands(page, "compensating")
        expect(taken_back(page, "schedule_pickup")).to_contain_text("to be retried", timeout=SOON)
        expect(taken_back(page, "create_label")).to_contain_text("waits for the undo of schedule_pickup")
        assert carrier_did(claims) == ["label", "pickup"]
    assert barriers(page) == {}

    claims.clock.set(claims.next_due())
    worker = claims.worker(do="sweep", stop_at=["settled"], settings=WITH_CLAIMS)
    worker.reached("settled")
    worker.kill()
    expect(taken_back(page, "schedule_pickup")).to_contain_text("succeeded", timeout=SOON)
    expect(taken_back(page, "create_label")).to_contain_text("label.void, not begun")
    expect(page.locator(".title .state", has_text="compensated")).to_have_count(0)
    assert carrier_did(claims) == ALL_OF_IT[:3]

    workers_go_on(claims)
    stands(page, "compensated")
    expect(taken_back(page, "create_label")).to_contain_text("succeeded")
    assert carrier_did(claims) == ALL_OF_IT
    assert (sent(claims, "undo:schedule_pickup"), sent(claims, "undo:create_label")) == (3, 1)
    assert Run.objects.get(pk=run.pk).state == "compensated"
    claims.check()


@pytest.mark.case("G4")
def test_two_people_in_two_browsers_vouch_for_an_undo_done_by_hand_and_the_rest_is_undone(
    claims: Desk, visit: Any
) -> None:
    who, run = cast.people(), refused(claims)
    claims.world.carrier.fault("reject", action="pickup.cancel", status=422, says="already on the van", times=9)
    workers_go_on(claims)
    ann, cleo = opens(visit(who["op_ann"]), run), visit(who["ap_cleo"])
    expect(in_the_way(ann)).to_contain_text("already on the van")
    tab_to(ann, ann.locator("#act-waive_undo > summary"))
    ann.keyboard.press("Enter")
    ann.locator("#act-waive_undo").get_by_label("Undone by hand").select_option("schedule_pickup")
    ann.locator("#act-waive_undo [name=reason]").fill("The driver gave the parcel back at the door.")
    ann.keyboard.press("Tab")
    ann.keyboard.press("Enter")
    ann.get_by_text("Waiving an undo is asked for by op_ann").wait_for()
    assert barriers(ann) == {}
    workers_go_on(claims)
    stands(ann, "compensating")
    assert carrier_did(claims) == ["label", "pickup"], "one person's word is not enough"
    ann.goto(reverse("approval", args=[Approval.objects.get().pk]))
    expect(ann.locator("#act-approve")).to_have_count(0)

    cleo.goto("/approvals")
    expect(cleo.get_by_role("heading", name="Accept that the undo of schedule_pickup was done by hand")).to_be_visible()
    assert barriers(cleo) == {}
    opens(ann, run)
    says(cleo, "a", "I called the driver.")
    cleo.get_by_text("Approved.").first.wait_for()
    workers_go_on(claims)
    stands(ann, "compensated")
    expect(taken_back(ann, "schedule_pickup")).to_contain_text("done by hand")
    assert barriers(ann) == {}
    assert carrier_did(claims) == ["label", "pickup", "label.void"]
    assert sent(claims, "undo:create_label") == 1
    assert Approval.objects.get().state == "consumed"
