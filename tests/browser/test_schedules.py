"""Schedules in a real browser: edited back and forth within a minute, readable on every screen, no barrier."""

from datetime import UTC, datetime

import pytest
from axe_playwright_python.sync_playwright import Axe

from audit.models import Entry
from reconciliation import registry
from reconciliation.models import Job, Run
from tests import cast, timetable
from tests.timetable import slots, tick

pytestmark = pytest.mark.browser


def utc(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.fixture
def office(clerk, settings):
    settings.AFTERCALL_WORKFLOWS = ["tests.timetable.WORKFLOWS"]
    registry.forget()
    yield clerk
    registry.forget()


def job(clock, name="nightly", at="2026-06-10T16:00", **terms):
    return timetable.job(name, at=utc(at), clock=clock, tenant="t_acme", **{"expression": "30 16 * * *", **terms})


@pytest.mark.case("E10")
def test_another_zone_and_back_and_again_within_a_minute_starts_nothing(office, clock, signed_in, live_server):
    who = cast.people()
    daily = job(clock)
    clock.set(utc("2026-06-10T16:30:01"))
    tick()
    timetable.work()
    clock.set(utc("2026-06-10T18:00"))
    page = signed_in(who["op_ann"])
    for zone, old, new in (
        ("America/New_York", "Thu 11 Jun 2026 16:30 UTC", "Wed 10 Jun 2026 16:30 EDT"),
        ("UTC", "Wed 10 Jun 2026 16:30 EDT", "Thu 11 Jun 2026 16:30 UTC"),
        ("America/New_York", "Thu 11 Jun 2026 16:30 UTC", "Wed 10 Jun 2026 16:30 EDT"),
    ):
        page.goto(f"{live_server.url}/schedules/{daily.pk}")
        page.get_by_role("link", name="Change…").click()
        page.get_by_label("Time zone").fill(zone)
        page.get_by_label("Reason, for the audit log").fill(f"the desk keeps {zone}")
        page.get_by_role("button", name="Show the times").click()
        change = page.locator("#change")
        first = change.locator("tbody tr").first.inner_text()
        assert first.index(old) < first.index(new)
        if new.startswith("Wed 10"):
            assert "once more" in change.inner_text()
        change.get_by_role("button", name="Save").click()
        page.get_by_text("Done.").wait_for()
        tick()
    assert Run.objects.count() == 1
    assert len(slots(daily)) == 1
    assert Job.objects.get().next_at == utc("2026-06-10T20:30")
    assert Entry.objects.filter(subject=daily.subject, reason_code="job_edited").count() == 3
    clock.set(utc("2026-06-10T20:30:01"))
    tick()
    timetable.work()
    assert len(office.effects) == 2


def test_enter_in_a_term_that_was_changed_after_its_times_were_shown_saves_nothing(
    office, clock, signed_in, live_server
):
    daily = job(clock)
    page = signed_in(cast.people()["op_ann"])
    page.goto(f"{live_server.url}/schedules/{daily.pk}/edit")
    page.get_by_label("Expression").fill("0 3 * * *")
    page.get_by_role("button", name="Show the times").click()
    page.locator("#change").get_by_text("Thu 11 Jun 2026 03:00 UTC").wait_for()
    page.get_by_label("Expression").fill("0 4 * * *")
    page.get_by_label("Expression").press("Enter")
    page.locator("#change").get_by_text("Thu 11 Jun 2026 04:00 UTC").wait_for()
    assert "nothing was saved" in page.get_by_role("alert").inner_text()
    assert Job.objects.get().expression == "30 16 * * *"
    page.locator("#change").get_by_role("button", name="Save").click()
    page.get_by_text("Done.").wait_for()
    assert Job.objects.get().expression == "0 4 * * *"


def test_one_of_several_missed_starts_is_picked_by_its_time(office, clock, signed_in, live_server):
    daily = job(clock, missed="skip", zone="Asia/Tokyo")
    clock.set(utc("2026-06-14T18:00"))
    tick()
    page = signed_in(cast.people()["op_ann"])
    page.set_viewport_size({"width": 360, "height": 700})
    page.goto(f"{live_server.url}/schedules/{daily.pk}")
    form = page.locator("#act-fill")
    form.locator("summary").click()
    form.get_by_label("Which one").select_option(str(slots(daily)[0].pk))
    form.get_by_label("Another of the same row").fill("2026-06-12T16:30")
    form.get_by_label("Reason, for the audit log").fill("the desk asks for Friday")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    form.get_by_role("button", name="Run for this time").click()
    page.get_by_text("Done.").wait_for()
    assert Run.objects.get().workflow_id == "nightly@2026-06-12T07:30:00+00:00"


@pytest.fixture
def lived_in(office, clock):
    """Schedules with something of everything."""
    asks = job(clock, "asks", at="2026-03-05T12:00", expression="0 * * * *", missed="ask")
    daily = job(clock, "nightly", at="2026-03-05T12:00", expression="30 2 * * *", zone="America/New_York")
    clock.set(utc("2026-03-08T07:00:01"))
    tick()
    timetable.hold(Run.objects.latest("id"))
    clock.set(utc("2026-03-09T06:30:01"))
    tick()
    Job.objects.filter(pk=asks.pk).update(problem="no_handler")
    return daily, asks


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pages_of_schedules_have_no_barrier(lived_in, signed_in, live_server, scheme):
    who = cast.people()
    page = signed_in(who["op_ann"])
    page.emulate_media(color_scheme=scheme)
    found = {}
    for path in ("/schedules", *(f"/schedules/{job.pk}" for job in lived_in), f"/schedules/{lived_in[0].pk}/edit",
                 "/schedules/new"):  # fmt: skip
        page.goto(live_server.url + path)
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        result = Axe().run(page).response
        found[path] = [f"{v['id']}: {v['nodes'][0]['html'][:160]}" for v in result["violations"]]
    assert {path: problems for path, problems in found.items() if problems} == {}


def test_narrow_screens_scroll_down_and_never_sideways(lived_in, signed_in, live_server):
    page = signed_in(cast.people()["op_ann"])
    page.set_viewport_size({"width": 360, "height": 700})
    for path in ("/schedules", f"/schedules/{lived_in[0].pk}", f"/schedules/{lived_in[0].pk}/edit"):
        page.goto(live_server.url + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
