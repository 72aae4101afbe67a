"""The pages of schedules, without JavaScript: what is expected and why, old and new times, presses and stale pages."""

import html
import re
from datetime import UTC, datetime
from uuid import uuid4

import pytest
from cryptography.fernet import Fernet
from django.test import Client

from reconciliation import registry, runs
from reconciliation.models import Job, Run
from tests import cast, timetable
from tests.timetable import slots, tick


def utc(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.fixture
def office(clerk, settings):
    settings.AFTERCALL_WORKFLOWS = ["tests.timetable.WORKFLOWS"]
    registry.forget()
    yield clerk
    registry.forget()


@pytest.fixture
def who(office):
    return cast.people()


TERMS = {"kind": "cron", "expression": "30 16 * * *", "zone": "UTC", "workflow": "mailing", "missed": "latest_only",
         "overlap": "skip"}  # fmt: skip


def job(clock, at="2026-06-10T18:00", **terms):
    return timetable.job(at=utc(at), clock=clock, tenant="t_acme", **{"expression": "30 16 * * *", **terms})


def text(answer):
    return " ".join(re.sub(r"<[^>]+>", " ", answer.content.decode()).split())


def form_of(job, **terms):
    return {**TERMS, "version": job.version, "token": str(uuid4()), **terms}


def save(browser, page, terms, **more):
    """Look at the times of `terms`, then press Save under them; `more` is what was typed in between."""
    shown = browser.post(page, terms).content.decode()
    seen = re.search(r'name="seen" value="([^"]+)"', shown)
    given = {**terms, "seen": seen[1] if seen else "", "confirm": "1", **more}
    return browser.post(page, given, follow=True)


def test_an_empty_list_says_what_a_schedule_is(who):
    said = text(cast.client(who["vi_eve"]).get("/schedules"))
    assert "No schedule yet" in said
    assert "New schedule" not in said


NEVER = "Cannot be undone once it is done: act (it is a test)"


def test_who_may_start_a_run_reads_first_what_nothing_takes_back(who, clock, settings):
    daily = job(clock)
    assert NEVER in text(cast.client(who["op_ann"]).get(f"/schedules/{daily.pk}"))
    assert NEVER not in text(cast.client(who["vi_eve"]).get(f"/schedules/{daily.pk}"))
    settings.AFTERCALL_WORKFLOWS = []
    registry.forget()
    assert "Run once more" in text(cast.client(who["op_ann"]).get(f"/schedules/{daily.pk}"))


def test_what_nothing_takes_back_is_told_before_a_schedule_is_saved(who, clock):
    browser = cast.client(who["op_ann"])
    daily = job(clock)
    assert NEVER not in text(browser.get(f"/schedules/{daily.pk}/edit"))
    shown = browser.post(f"/schedules/{daily.pk}/edit", form_of(daily, expression="45 16 * * *", reason="later"))
    assert NEVER in text(shown)


def test_the_list_shows_the_next_run_by_both_clocks_and_the_last_ones(who, clock):
    daily = job(clock, at="2026-06-09T18:00", zone="America/New_York")
    clock.set(utc("2026-06-10T20:30:01"))
    tick()
    browser = cast.client(who["op_ann"])
    browser.cookies["zone"] = "Asia/Tokyo"
    said = text(browser.get("/schedules"))
    assert daily.name in said
    assert "Thu 11 Jun 2026 16:30 EDT" in said
    assert "12 Jun 2026 05:30:00 for you" in said or "12 Jun 05:30:00 for you" in said
    assert "Started on time." in said


@pytest.mark.case("E1")
@pytest.mark.case("E5")
def test_the_page_tells_what_became_of_each_expected_run(who, clock):
    daily = job(clock, at="2026-03-07T12:00", expression="30 2 * * *", zone="America/New_York", missed="skip")
    page = f"/schedules/{daily.pk}"
    before = text(cast.client(who["op_ann"]).get(page))
    assert "Sun 8 Mar 2026 03:00 EDT" in before
    assert "02:30 does not exist that day" in before
    clock.set(utc("2026-03-08T07:00:01"))
    tick()
    clock.set(utc("2026-03-12T12:00"))
    tick()
    said = text(cast.client(who["op_ann"]).get(page))
    assert "02:30 did not exist that day, so it stands at the first moment after the gap" in said
    assert "4 starts. Nobody was there to start it, and the job skips missed runs." in said
    assert f"Run {Run.objects.get().pk}" in said


@pytest.mark.case("E10")
def test_old_and_new_times_are_shown_before_anything_is_saved(who, clock):
    daily = job(clock, at="2026-06-10T16:00")
    clock.set(utc("2026-06-10T16:30:01"))
    tick()
    clock.set(utc("2026-06-10T18:00"))
    browser = cast.client(who["op_ann"])
    page = f"/schedules/{daily.pk}/edit"
    terms = form_of(daily, zone="America/New_York", reason="the desk moved")
    shown = text(browser.post(page, terms))
    assert "Thu 11 Jun 2026 16:30 UTC Wed 10 Jun 2026 16:30 EDT" in shown
    assert "with the new times it runs on that date once more" in shown
    assert Job.objects.get().zone == "UTC"
    saved = save(browser, page, terms)
    assert "Done. Next run at 2026-06-10 20:30:00 UTC." in text(saved)
    assert "the desk moved" in text(saved)
    again = save(browser, page, terms)
    assert "Done. Next run at 2026-06-10 20:30:00 UTC." in text(again)
    assert Job.objects.get().version == 2


def test_terms_whose_times_were_not_shown_are_not_saved(who, clock):
    daily = job(clock)
    browser = cast.client(who["op_ann"])
    page = f"/schedules/{daily.pk}/edit"
    terms = form_of(daily, expression="0 3 * * *", reason="quieter at three")
    for told in (
        browser.post(page, {**terms, "confirm": "1"}),
        browser.post(page, {**terms, "confirm": "1", "seen": "made-up"}),
        save(browser, page, terms, expression="0 4 * * *"),
        save(browser, page, terms, zone="Asia/Tokyo"),
        save(browser, page, terms, input='{"order": "1003"}'),
    ):
        assert told.status_code == 422
        assert "nothing was saved: these are the times of the terms below" in text(told)
    assert "Thu 11 Jun 2026 04:00 UTC" in text(save(browser, page, terms, expression="0 4 * * *"))
    assert Job.objects.get().version == 1
    assert "Next run at 2026-06-11 03:00:00" in text(save(browser, page, terms, reason="another reason hides no time"))


def test_times_that_were_shown_of_one_schedule_save_no_other(who, clock):
    daily, weekly = job(clock), timetable.job("weekly", at=clock.now(), clock=clock, tenant="t_acme")
    browser = cast.client(who["op_ann"])
    terms = form_of(daily, expression="0 3 * * *")
    shown = browser.post(f"/schedules/{weekly.pk}/edit", terms).content.decode()
    seen = re.search(r'name="seen" value="([^"]+)"', shown)[1]
    assert browser.post(f"/schedules/{daily.pk}/edit", {**terms, "seen": seen, "confirm": "1"}).status_code == 422


def test_an_interval_is_saved_with_the_times_that_were_shown(who, clock):
    daily = job(clock)
    browser = cast.client(who["op_ann"])
    page = f"/schedules/{daily.pk}/edit"
    terms = form_of(daily, kind="interval", expression="2 h")
    shown = browser.post(page, terms).content.decode()
    seen = re.search(r'name="seen" value="([^"]+)"', shown)[1]
    assert "Wed 10 Jun 2026 20:00 UTC" in shown
    clock.set(utc("2026-06-10T18:07"))
    saved = browser.post(page, {**terms, "seen": seen, "confirm": "1"}, follow=True)
    assert "Next run at 2026-06-10 20:00:00 UTC." in text(saved)


def test_a_stale_form_keeps_the_words_and_says_who_was_first(who, clock):
    daily = job(clock)
    stale = form_of(daily, expression="0 3 * * *", reason="quieter at three")
    page = f"/schedules/{daily.pk}/edit"
    save(cast.client(who["op_bob"]), page, form_of(daily, expression="0 4 * * *"))
    told = save(cast.client(who["op_ann"]), page, stale)
    assert told.status_code == 409
    assert "by op_bob: a schedule was changed" in text(told)
    assert "quieter at three" in told.content.decode()
    assert 'name="version" value="2"' in told.content.decode()
    assert Job.objects.get().expression == "0 4 * * *"


def test_a_stale_form_still_says_that_a_date_would_have_its_run_once_more_and_can_be_saved(who, clock):
    daily = job(clock, at="2026-06-10T16:00")
    clock.set(utc("2026-06-10T16:30:01"))
    tick()
    clock.set(utc("2026-06-10T18:00"))
    page = f"/schedules/{daily.pk}/edit"
    stale = form_of(daily, zone="America/New_York")
    save(cast.client(who["op_bob"]), page, form_of(daily, overlap="allow"))
    browser = cast.client(who["op_ann"])
    told = save(browser, page, stale)
    assert told.status_code == 409
    assert "with the new times it runs on that date once more" in text(told)
    shown = dict(re.findall(r'name="(version|token|seen)" value="([^"]+)"', told.content.decode()))
    saved = browser.post(page, {**stale, **shown, "confirm": "1"}, follow=True)
    assert "Done. Next run at 2026-06-10 20:30:00 UTC." in text(saved)


@pytest.mark.parametrize(
    ("terms", "says"),
    [
        ({"expression": "often"}, "five fields"),
        ({"zone": "Mars/Olympus"}, "no time zone"),
        ({"workflow": "telegram", "missed": "run_all"}, "accept it explicitly"),
        ({"start_deadline": "soon"}, "A length looks like"),
        ({"max_run_time": "0 s"}, "between a second and ten years"),
        ({"input": "[1]"}, "one JSON object"),
        ({"input": '{"a":' + "[" * 9000 + "]" * 9000 + "}"}, "one JSON object"),
        ({"kind": "sometimes"}, "Select a valid choice"),
    ],
)
def test_terms_that_cannot_be_are_refused_beside_their_field(who, clock, terms, says):
    daily = job(clock)
    told = cast.client(who["op_ann"]).post(f"/schedules/{daily.pk}/edit", form_of(daily, confirm="1", **terms))
    assert told.status_code == 422
    assert says in text(told)
    assert Job.objects.get().version == 1


def test_a_new_schedule_is_made_once_and_its_name_is_taken_then(who, clock):
    clock.set(utc("2026-06-10T18:00"))
    browser = cast.client(who["op_ann"])
    empty = text(browser.get("/schedules/new"))
    assert 'One JSON object, such as {"order": "1002"}' in html.unescape(empty)
    assert empty.count("Such as 15 min, 2 h or 1 d; empty means no limit.") == 3
    terms = {**TERMS, "tenant": "t_acme", "name": "nightly", "version": 0, "token": str(uuid4()), "max_catch_up": "1 d"}
    assert "letters, digits, dot" in text(browser.post("/schedules/new", {**terms, "name": "x y"}))
    terms |= {"input": '{"order": "1002", "card": "4242"}'}
    assert "Its first runs" in text(browser.post("/schedules/new", terms))
    assert not Job.objects.exists()
    for _ in range(2):
        made = save(browser, "/schedules/new", terms)
        assert "nightly is on." in text(made)
    assert Job.objects.count() == 1
    assert "Acts for op_ann" in text(browser.get(f"/schedules/{Job.objects.get().pk}"))
    taken = save(browser, "/schedules/new", {**terms, "token": str(uuid4())})
    assert "There is a job of this name already" in text(taken)
    edited = browser.get(f"/schedules/{Job.objects.get().pk}/edit")
    assert "4242" not in edited.content.decode()
    assert "not to be seen, card" in text(edited)


def press(browser, job, action, **more):
    fresh = Job.objects.get(pk=job.pk)
    form = {"action": action, "token": str(uuid4()), "version": fresh.version, "reason": "asked for", **more}
    return browser.post(f"/schedules/{job.pk}/act", form, follow=True)


def test_running_by_hand_asks_whether_it_fills_a_time_or_is_a_new_intent(who, clock):
    daily = job(clock)
    browser = cast.client(who["op_ann"])
    page = text(browser.get(f"/schedules/{daily.pk}"))
    assert "Run for an expected time" in page
    assert "Run once more, as a new intent" in page
    assert "Run nightly@2026-06-11T16:30:00+00:00 is started" in text(press(browser, daily, "fill", slot="next"))
    assert "is started" in text(press(browser, daily, "new_intent"))
    assert Run.objects.count() == 2
    assert press(browser, daily, "fill", slot="999").status_code == 422
    assert press(browser, daily, "fill", slot="x").status_code == 400


def test_starts_that_wait_their_turn_are_counted_with_the_run_before_them(who, clock):
    hourly = job(clock, at="2026-06-10T11:30", expression="0 * * * *", missed="run_all")
    clock.set(utc("2026-06-10T12:00:01"))
    tick()
    first = timetable.hold(Run.objects.get())
    clock.set(utc("2026-06-10T15:20"))
    tick()
    browser = cast.client(who["op_ann"])
    said = text(browser.get(f"/schedules/{hourly.pk}"))
    assert f"3 starts since Wed 10 Jun 2026 13:00 UTC wait their turn, behind run {first.pk}" in said
    assert "Next run Wed 10 Jun 2026 13:00" not in said
    assert "waits since then" in text(browser.get("/schedules"))
    assert "Wed 10 Jun 2026 16:00 UTC" in said


def test_what_is_due_and_nobody_has_looked_at_is_told(who, clock):
    daily = job(clock)
    clock.set(utc("2026-06-13T16:00"))
    said = text(cast.client(who["op_ann"]).get(f"/schedules/{daily.pk}"))
    assert "2 starts since Thu 11 Jun 2026 16:30 UTC are due and not decided yet" in said


def test_a_time_that_was_run_by_hand_is_expected_no_more(who, clock):
    daily = job(clock)
    browser = cast.client(who["op_ann"])
    press(browser, daily, "fill", slot="next")
    coming = re.findall(r'<tr class="coming">.*?</tr>', browser.get(f"/schedules/{daily.pk}").content.decode(), re.S)
    assert len(coming) == 5
    assert "Fri 12 Jun 2026 16:30 UTC" in coming[-1]
    fresh = Job.objects.get()
    for terms in ({"overlap": "allow"}, {"expression": "30 16 * * 1-7"}):
        shown = text(browser.post(f"/schedules/{daily.pk}/edit", form_of(fresh, **terms)))
        assert "Fri 12 Jun 2026 16:30 UTC Fri 12 Jun 2026 16:30 UTC" in shown
        assert "Thu 11 Jun 2026 16:30" not in shown


def test_a_schedule_that_is_off_shows_the_times_that_it_would_have(who, clock):
    daily = job(clock)
    browser = cast.client(who["op_ann"])
    press(browser, daily, "disable")
    shown = text(browser.post(f"/schedules/{daily.pk}/edit", form_of(Job.objects.get(), expression="0 3 * * *")))
    assert "Once it is on" in shown
    assert "After saving" not in shown
    assert "It is off, and saving does not switch it on." in shown


def test_a_schedule_whose_zone_is_not_known_here_is_mended_on_its_page(who, clock):
    daily = job(clock)
    Job.objects.update(zone="Mars/Olympus", problem="zone_unknown")
    told = save(cast.client(who["op_ann"]), f"/schedules/{daily.pk}/edit", form_of(daily, expression="0 3 * * *"))
    assert "Next run at 2026-06-11 03:00:00" in text(told)


def test_missed_starts_that_are_asked_about_are_answered_on_the_page(who, clock):
    daily = job(clock, missed="ask")
    clock.set(utc("2026-06-14T18:00"))
    tick()
    browser = cast.client(who["op_ann"])
    assert "4 missed starts: run?" in text(browser.get(f"/schedules/{daily.pk}"))
    (asked,) = slots(daily)
    assert "Done." in text(press(browser, daily, "answer", slot=asked.pk, run="latest"))
    tick()
    assert [slot.state for slot in slots(daily)] == ["missed", "started"]


def test_one_of_several_missed_starts_is_run_by_its_time(who, clock):
    daily = job(clock, missed="skip", zone="America/New_York")
    browser = cast.client(who["op_ann"])
    assert 'name="at"' not in browser.get(f"/schedules/{daily.pk}").content.decode()
    clock.set(utc("2026-06-14T22:00"))
    tick()
    page = browser.get(f"/schedules/{daily.pk}").content.decode()
    assert 'name="at" type="datetime-local"' in page
    assert "Its time in America/New_York; empty takes the last." in text(browser.get(f"/schedules/{daily.pk}"))
    (row,) = slots(daily)
    told = text(press(browser, daily, "fill", slot=row.pk, at="2026-06-12T16:30"))
    assert "Run nightly@2026-06-12T20:30:00+00:00 is started" in told
    assert [(slot.state, slot.count) for slot in slots(daily)] == [("missed", 2), ("started", 1), ("missed", 2)]
    refused = press(browser, daily, "fill", slot=slots(daily)[0].pk, at="2026-06-12T16:31")
    assert (refused.status_code, "No start that was missed in this row has that time" in text(refused)) == (422, True)


def story(browser, job):
    """What the newest row of a schedule's page says became of it."""
    rows = re.findall(r'<tr id="slot-.*?</tr>', browser.get(f"/schedules/{job.pk}").content.decode(), re.S)
    return " ".join(re.sub(r"<[^>]+>", " ", rows[0]).split())


def test_a_start_that_waits_for_the_run_before_it_says_so_and_how_late_it_was(who, clock):
    hourly = job(clock, at="2026-06-10T11:30", expression="0 * * * *", overlap="queue_one")
    browser = cast.client(who["op_ann"])
    clock.set(utc("2026-06-10T12:00:01"))
    tick()
    first = timetable.hold(Run.objects.get())
    clock.set(utc("2026-06-10T13:00:01"))
    tick()
    assert "Waits for the run before it." in story(browser, hourly)
    clock.set(utc("2026-06-10T13:20:00"))
    runs.cancel(first.pk, actor=timetable.OLGA, version=first.version, reason="It is dealt with.")
    tick()
    assert "Waited for the run before it; started 20 min late." in story(browser, hourly)


def test_what_was_missed_says_how_late_it_was_run(who, clock):
    daily = job(clock, missed="ask")
    browser = cast.client(who["op_ann"])
    clock.set(utc("2026-06-11T18:30"))
    tick()
    (asked,) = slots(daily)
    press(browser, daily, "answer", slot=asked.pk, run="all")
    clock.set(utc("2026-06-11T19:30"))
    tick()
    assert "Missed, and run afterwards; started 3 h 00 m late." in story(browser, daily)
    clock.set(utc("2026-06-11T19:29:05"))  # less than the whole hours, whatever time the press takes
    press(browser, daily, "fill", slot="next")
    assert "Run by hand for this time; started 21 h 00 m early." in story(browser, daily)


def test_a_run_by_hand_is_said_to_start_beside_one_that_goes_on(who, clock):
    daily = job(clock, missed="skip")
    browser = cast.client(who["op_ann"])
    clock.set(utc("2026-06-14T18:00"))
    tick()
    said = text(browser.get(f"/schedules/{daily.pk}"))
    assert said.count("It starts at once, also beside a run that still goes on.") == 2
    assert "Sun 14 Jun 2026 16:30 UTC, missed (the last of 4, since Thu 11 Jun 2026 16:30 UTC)" in said
    press(browser, daily, "fill", slot=slots(daily)[0].pk)
    assert "Sat 13 Jun 2026 16:30 UTC, missed (the last of 3, since Thu 11 Jun 2026 16:30 UTC)" in text(
        browser.get(f"/schedules/{daily.pk}")
    )


def test_switching_off_and_on_and_a_stale_press(who, clock):
    daily = job(clock)
    browser = cast.client(who["op_ann"])
    assert "It is off" in text(press(browser, daily, "disable"))
    off = browser.get(f"/schedules/{daily.pk}")
    assert "No time is expected of it, and none was left out. Possible once it is on." in text(off)
    assert 'name="slot"' not in off.content.decode()
    assert press(browser, daily, "enable", version=1).status_code == 409
    assert "Next run at" in text(press(browser, daily, "enable"))


def test_who_may_not_sees_no_buttons_and_cannot_press(who, clock):
    daily = job(clock)
    viewer = cast.client(who["vi_eve"])
    assert "changing schedules needs operator or admin" in text(viewer.get(f"/schedules/{daily.pk}"))
    assert press(viewer, daily, "disable").status_code == 403
    assert viewer.get(f"/schedules/{daily.pk}/edit").status_code == 403
    assert viewer.get("/schedules/new").status_code == 403
    outsider = cast.client(who["out_zoe"])
    assert outsider.get(f"/schedules/{daily.pk}").status_code == 404
    assert press(outsider, daily, "disable").status_code == 404
    assert Job.objects.get().enabled


def test_an_outsider_cannot_make_a_schedule_in_a_tenant_of_others(who, clock):
    terms = {**TERMS, "tenant": "t_acme", "name": "theirs", "version": 0, "token": str(uuid4()), "confirm": "1"}
    assert cast.client(who["out_zoe"]).post("/schedules/new", terms).status_code == 422
    assert not Job.objects.exists()


def test_a_schedule_that_cannot_start_says_why(who, clock):
    daily = job(clock)
    Job.objects.update(problem="no_handler")
    for page in ("/schedules", f"/schedules/{daily.pk}"):
        assert "no handler for it" in text(cast.client(who["op_ann"]).get(page))


def test_the_list_is_read_with_few_queries(who, clock, django_assert_max_num_queries):
    for number in range(20):
        timetable.job(f"job-{number}", at=utc("2026-06-10T18:00"), clock=clock, tenant="t_acme")
    clock.advance(minutes=2)
    tick()
    browser = cast.client(who["op_ann"])
    with django_assert_max_num_queries(15):
        assert browser.get("/schedules").status_code == 200


def test_the_live_part_of_a_page_of_somebody_signed_out_is_told_so(who):
    answer = Client().get("/schedules", headers={"HX-Request": "true"})
    assert (answer.status_code, "signed out" in answer.content.decode()) == (401, True)


@pytest.mark.parametrize(
    "value", ['{"order": NaN}', '{"order": 1e400}', '{"order": 9007199254740993}', r'{"order": "\ud800"}']
)
def test_an_input_that_cannot_be_kept_exactly_is_said_on_the_form(who, clock, value):
    browser = cast.client(who["op_ann"])
    fresh = {**TERMS, "input": value, "tenant": "t_acme", "name": "odd", "version": 0, "token": str(uuid4())}
    daily = job(clock)
    for page, terms in (
        ("/schedules/new", fresh),
        (f"/schedules/{daily.pk}/edit", form_of(daily, input=value, reason="x")),
    ):
        answer = save(browser, page, terms)
        assert answer.status_code == 422
        assert re.search(r"It (holds|cannot be written)", text(answer))
    assert (Job.objects.count(), Job.objects.get().version) == (1, daily.version)


def test_an_input_whose_key_is_lost_starts_nothing_by_hand_and_can_be_written_anew(who, clock, settings):
    browser = cast.client(who["op_ann"])
    daily = job(clock, input={"card": "4242"})
    settings.AFTERCALL_SEAL_KEYS = [Fernet.generate_key().decode()]
    answer = press(browser, daily, "new_intent")
    assert (answer.status_code, "AFTERCALL_SEAL_KEYS" in text(answer)) == (422, True)
    assert not Run.objects.exists()
    assert "Or write it anew" in text(save(browser, f"/schedules/{daily.pk}/edit", form_of(daily, reason="x")))
    save(browser, f"/schedules/{daily.pk}/edit", form_of(daily, reason="x", input='{"card": "5353"}'))
    daily.refresh_from_db()
    assert (daily.version, daily.input) == (2, {"card": "5353"})
