"""The case: its words, its evidence, and every action as a plain form that works without JavaScript."""

import html
import re
import uuid
from datetime import timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from audit.models import Entry
from reconciliation.models import Approval, Operation
from reconciliation.providers.base import Finding, Source, Verdict
from reconciliation.transition import database_now
from tests import cast


@pytest.fixture
def who(ledger_db, till):
    return cast.people()


@pytest.fixture
def ann(who):
    return cast.client(who["op_ann"])


def text(response):
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.content.decode())))


def form_of(response, action):
    """What a browser would send when the button of `action` is pressed."""
    found = re.search(
        rf'name="action" value="{action}"><input type="hidden" name="token" value="([^"]+)">'
        r'<input type="hidden" name="version" value="(\d+)"',
        response.content.decode(),
    )
    assert found, f"there is no form for {action}"
    return {"action": action, "token": found[1], "version": found[2]}


def press(browser, operation, action, **fields):
    page = browser.get(f"/operations/{operation.pk}")
    return browser.post(f"/operations/{operation.pk}/act", form_of(page, action) | fields)


# Closing


@pytest.mark.parametrize(
    ("state", "why"), [("succeeded", "applied_after_all"), ("failed_terminal", "unknown_after_all")]
)
def test_a_settled_case_to_which_somebody_was_called_is_closed_with_a_reason(ann, who, state, why):
    case = cast.operation(state=state, escalated_at=timezone.now(), escalation_reason=why)
    assert f"/operations/{case.pk}" in ann.get("/").content.decode()
    assert "A reason is needed" in text(press(ann, case, "close", reason=""))
    press(ann, case, "close", reason="Credited by hand, ticket T-9.")
    case.refresh_from_db()
    assert (case.state, case.escalated_at, case.escalation_reason) == (state, None, "")
    assert f"/operations/{case.pk}" not in ann.get("/").content.decode()
    assert "Credited by hand, ticket T-9." in text(cast.client(who["au_dan"]).get(f"/operations/{case.pk}"))


def test_nothing_is_closed_that_is_not_settled_or_that_calls_nobody(ann):
    for case in (cast.escalated(), cast.operation(state="succeeded")):
        assert "Close the case" not in text(ann.get(f"/operations/{case.pk}"))
        form = {"action": "close", "token": str(uuid.uuid4()), "version": case.version, "reason": "x" * 12}
        ann.post(f"/operations/{case.pk}/act", form)
        before = case.version
        case.refresh_from_db()
        assert case.version == before


# What the page says


def test_the_page_tells_the_case_in_words(ann):
    case = cast.escalated(
        age=600, sent=1800, look_ups=3, entries=(cast.finding("cannot_tell", note="The list broke off."),)
    )
    page = text(ann.get(f"/operations/{case.pk}"))
    assert "Refund 42.00 USD for order 1002" in page
    assert "Looked up 3 times, the last time: cannot tell." in page
    assert "no look-up gave a conclusive answer in time" in page
    assert "Sent, no answer. The money may have moved." in page
    assert "The list broke off." in page


def test_asked_and_found_stand_side_by_side_and_what_differs_is_marked(ann):
    seen = {"id": "re_5", "order": "1002", "amount": 420, "currency": "USD"}
    compared = {"order": "equal", "amount": "differs", "currency": "equal"}
    case = cast.escalated(
        because="mismatch",
        entries=(cast.finding("mismatch", provider_operation_id="re_5", observed=seen, compared=compared),),
    )
    page = text(ann.get(f"/operations/{case.pk}"))
    assert "amount 42.00 USD 4.20 USD ≠ differs" in page
    assert "order 1002 1002 ✓ the same" in page
    assert "Contradictory." in page


def test_every_candidate_is_shown(ann):
    two = [{"id": "re_1", "amount": 4200}, {"id": "re_2", "amount": 4200}]
    case = cast.escalated(because="several_candidates", entries=(cast.finding("several", candidates=two),))
    page = text(ann.get(f"/operations/{case.pk}"))
    assert "re_1" in page
    assert "re_2" in page


def test_what_an_action_does_not_show_is_named_and_not_shown(ann):
    case = cast.escalated(hidden={"card": "4242 4242 4242 4242"})
    page = text(ann.get(f"/operations/{case.pk}"))
    assert "card •••• hidden" in page
    assert "4242 4242" not in page


def test_the_timeline_merges_what_was_observed_and_what_was_decided(ann, who):
    case = cast.escalated(entries=(cast.finding("absent", source="by_reference"),))
    press(ann, case, "resolve_not_applied", reason="The bank says so.")
    page = text(ann.get(f"/operations/{case.pk}"))
    story = page[page.index("What was observed, what was decided") :]
    assert story.index("unknown → failed") < story.index("Look-up by reference: nothing there")
    assert "by op_ann: resolved as not applied, on a person's word" in story
    assert "The bank says so." in story


def test_a_look_up_and_what_was_made_of_it_are_one_line_and_the_mark_is_another(ann, till):
    from reconciliation.reconciler import reconcile

    case = cast.escalated(age=5)
    till.shows = Finding(verdict=Verdict.ABSENT, source=Source.BY_REFERENCE, note="no such refund")
    reconcile(case.pk)
    story = text(ann.get(f"/operations/{case.pk}")).split("newest first")[1]
    line = "Look-up by reference: nothing there. No such refund. Nothing there, which proves nothing at this provider."
    assert story.count(line) == 1
    assert story.count("which proves nothing") == 1
    assert "Automation stopped: no look-up gave a conclusive answer in time." in story


def test_somebody_who_may_not_read_the_audit_log_sees_the_journal_alone(who):
    case = cast.escalated(entries=(cast.finding("absent"),))
    page = text(cast.client(who["vi_eve"]).get(f"/operations/{case.pk}"))
    assert "your role does not read the audit log" in page
    assert "Look-up by key: nothing there" in page
    assert "by the system" not in page


def test_deadlines_are_there_soonest_first(ann):
    soon = database_now() + timedelta(hours=2, minutes=5, seconds=30)
    case = cast.escalated(same_key_until=soon)
    page = text(ann.get(f"/operations/{case.pk}"))
    assert "Key forgotten in 2 h 05 m" in page
    assert page.index("Absence provable") < page.index("Key forgotten")


def test_the_fingerprint_stands_beside_what_is_left_out_of_it(ann):
    case = cast.escalated()
    assert f"Fingerprint {case.fingerprint} Left out of it sent_from" in text(ann.get(f"/operations/{case.pk}"))


def test_a_case_whose_provider_is_gone_still_opens(ann):
    case = cast.escalated(provider="closed_shop", action="thing.do")
    page = ann.get(f"/operations/{case.pk}")
    assert page.status_code == 200
    assert "not configured here any more" in text(page)


def test_a_step_shows_its_run_with_every_step(ann):
    run = cast.run(workflow_id="T-77")
    cast.operation(state="succeeded", run=run, step="create_label", provider_operation_id="lbl_31", sent=5)
    case = cast.escalated(run=run)
    cast.run_stands(run, "uncertain", waiting_for="issue_refund")
    page = text(ann.get(f"/operations/{case.pk}"))
    assert "Run T-77" in page
    assert "create_label lbl_31" in page
    assert "issue_refund" in page


def test_a_long_timeline_is_paged_and_tells_every_moment_once(ann, monkeypatch):
    monkeypatch.setattr("console.stories.SIZE", 5)
    notes = tuple(cast.finding("cannot_tell", note=f"number {n:02}") for n in range(3))
    case = cast.escalated(entries=notes)
    told, address = "", f"/operations/{case.pk}"
    for _ in range(9):
        page = ann.get(address)
        told += text(page).split("What was observed, what was decided")[1].split("What you can do")[0]
        older = re.search(r'href="(\?before=[^"]+)">Older', page.content.decode())
        if not older:
            break
        address = f"/operations/{case.pk}{older[1]}"
    for n in range(3):
        assert told.count(f"Number {n:02}.") == 1
    assert told.count("none → ready") == 1


def test_the_page_costs_the_same_queries_however_long_the_story_is(ann):
    short, long = cast.escalated(), cast.escalated(entries=tuple(cast.finding("absent") for _ in range(30)))
    costs = []
    for case in (short, long):
        with CaptureQueriesContext(connection) as asked:
            ann.get(f"/operations/{case.pk}")
        costs.append(len(asked))
    assert costs[0] == costs[1] <= 20


def test_the_live_part_answers_304_though_tokens_differ(ann):
    case = cast.escalated(sent=9000, age=8000)
    asked = {"HX-Request": "true"}
    part = ann.get(f"/operations/{case.pk}", headers=asked)
    assert b"<html" not in part.content
    tag = {"HX-PTag": part.headers["HX-PTag"]}
    assert ann.get(f"/operations/{case.pk}", headers=asked | tag).status_code == 304
    press(ann, case, "terminate", reason="stop")
    assert ann.get(f"/operations/{case.pk}", headers=asked | tag).status_code == 200


# What can be done


def test_what_is_allowed_and_what_not_both_say_why(ann):
    page = text(ann.get(f"/operations/{cast.escalated().pk}"))
    assert "Look up again" in page
    assert "Asks pay what it knows of this call. Sends nothing." in page
    assert "Withdraw Only what was never sent can be withdrawn." in page


def test_a_viewer_finds_no_button_and_the_role_that_would_be_needed(who):
    page = cast.client(who["vi_eve"]).get(f"/operations/{cast.escalated().pk}")
    assert 'name="token"' not in page.content.decode()
    assert text(page).count("Your role does not allow these; the roles operator and admin do: Look up again, ") == 1
    assert "Your role does not allow this" not in text(page)


def test_look_up_finds_it_and_the_case_says_so(ann, till):
    case = cast.escalated()
    till.shows_found(case)
    answer = press(ann, case, "look_up")
    assert answer.status_code == 302
    page = text(ann.get(answer.headers["Location"]))
    assert "Done. Found at the provider. It is succeeded now." in page
    assert "amount 42.00 USD 42.00 USD ✓ the same" in page
    assert "re_77" in page
    case.refresh_from_db()
    assert (case.state, case.basis) == ("succeeded", "look_up")
    assert till.sent == []


def test_resolving_on_a_persons_word_needs_a_reason_and_stays_marked(ann):
    case = cast.escalated()
    refused = press(ann, case, "resolve_applied")
    assert refused.status_code == 422
    assert "A reason is needed" in text(refused)
    typed = press(ann, case, "resolve_applied", input_provider_operation_id="re_8")
    assert 'name="input_provider_operation_id" value="re_8"' in typed.content.decode()
    again = form_of(typed, "resolve_applied")
    assert (int(again["version"]), again["token"] != form_of(refused, "resolve_applied")["token"]) == (
        case.version,
        True,
    )
    answer = press(ann, case, "resolve_applied", reason="Seen on the statement.", input_provider_operation_id="re_9")
    page = text(ann.get(answer.headers["Location"]))
    assert "a person's word, not proof" in page
    case.refresh_from_db()
    assert (case.state, case.basis, case.provider_operation_id) == ("succeeded", "asserted", "re_9")
    kept = Entry.objects.filter(subject=str(case.subject)).latest("seq")
    assert kept.openings.get(field="reason").value == "Seen on the statement."


def test_the_same_form_sent_twice_makes_one_transition_and_gets_the_same_answer(ann):
    case = cast.escalated()
    form = form_of(ann.get(f"/operations/{case.pk}"), "terminate") | {"reason": "enough"}
    first = ann.post(f"/operations/{case.pk}/act", form)
    second = ann.post(f"/operations/{case.pk}/act", form)
    assert first.headers["Location"] == second.headers["Location"]
    assert Operation.objects.get(pk=case.pk).version == case.version + 1


@pytest.mark.case("I3")
def test_of_two_people_with_the_same_page_the_second_is_told_what_the_first_did_and_keeps_the_words(ann, who):
    case = cast.escalated()
    bob = cast.client(who["op_bob"])
    form = form_of(bob.get(f"/operations/{case.pk}"), "resolve_applied") | {"reason": "I saw the money <there>"}
    press(ann, case, "terminate", reason="Customer gave up.")
    late = bob.post(f"/operations/{case.pk}/act", form)
    assert late.status_code == 409
    said = text(late)
    assert "It changed since you looked, so nothing was done" in said
    assert "unknown → terminated by op_ann: stopped by a person. No longer escalated." in said
    assert "Customer gave up." in said
    assert "I saw the money &lt;there&gt;" in late.content.decode()
    assert Operation.objects.get(pk=case.pk).state == "terminated"


@pytest.mark.case("I3")
def test_a_retry_from_a_page_drawn_before_somebody_resolved_it_sends_nothing(ann, who, till):
    case = cast.escalated()
    form = form_of(ann.get(f"/operations/{case.pk}"), "retry") | {"reason": "absent, I think"}
    till.shows_found(case)
    press(cast.client(who["op_bob"]), case, "look_up")
    late = ann.post(f"/operations/{case.pk}/act", form)
    assert late.status_code == 409
    assert "unknown → succeeded by op_bob: found at the provider" in text(late)
    assert "absent, I think" in text(late)
    assert till.sent == []
    back_button = ann.post(f"/operations/{case.pk}/act", form)
    assert back_button.status_code == 409
    assert till.sent == []


@pytest.mark.case("I5")
def test_a_retry_pressed_twice_and_by_two_people_is_one_attempt_and_all_are_told_of_it(ann, who, till):
    case = cast.escalated()
    bob = cast.client(who["op_bob"])
    mine = form_of(ann.get(f"/operations/{case.pk}"), "retry") | {"reason": "again"}
    his = form_of(bob.get(f"/operations/{case.pk}"), "retry") | {"reason": "again too"}
    first, double = (ann.post(f"/operations/{case.pk}/act", mine) for _ in range(2))
    assert first.headers["Location"] == double.headers["Location"]
    assert "Attempt 2 was made." in text(ann.get(first.headers["Location"]))
    joined = bob.post(f"/operations/{case.pk}/act", his)
    assert "Already being done: attempt 2, started by op_ann" in text(bob.get(joined.headers["Location"]))
    assert len(till.sent) == 1
    assert Entry.objects.filter(subject=str(case.subject), event="joined").count() == 1


def test_after_a_harmless_change_the_conflict_page_offers_the_press_again_with_the_words_in_it(ann, who, till):
    case = cast.escalated()
    bob = cast.client(who["op_bob"])
    form = form_of(bob.get(f"/operations/{case.pk}"), "terminate") | {"reason": "No more of this."}
    press(ann, case, "look_up")  # cannot tell: the version moves on, the state does not
    late = bob.post(f"/operations/{case.pk}/act", form)
    assert late.status_code == 409
    assert "No more of this.</textarea>" in late.content.decode()
    again = bob.post(f"/operations/{case.pk}/act", form_of(late, "terminate") | {"reason": "No more of this."})
    assert again.status_code == 302
    assert Operation.objects.get(pk=case.pk).state == "terminated"


@pytest.mark.parametrize("missing", ["token", "version", "action"])
def test_a_press_without_its_token_or_version_is_a_clear_400(ann, missing):
    case = cast.escalated()
    form = {"action": "terminate", "token": str(uuid.uuid4()), "version": case.version, "reason": "x"}
    del form[missing]
    answer = ann.post(f"/operations/{case.pk}/act", form)
    assert answer.status_code == 400
    assert f"without a usable {missing}, so nothing was done" in text(answer)
    assert Operation.objects.get(pk=case.pk).version == case.version


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ({"reason": "a\0b"}, "a character that cannot be kept (NUL). Nothing was done."),
        ({"reason": "x", "input_provider_operation_id": "re_\0"}, "a character that cannot be kept (NUL)."),
        ({"reason": "x" * 2001}, "The reason is longer than 2000 characters. Nothing was done."),
        ({"reason": "x" * 3_000_000}, "That is more than one form can carry. Nothing was done."),
    ],
)
def test_what_cannot_be_kept_is_a_clear_400(ann, typed, why):
    case = cast.escalated()
    form = {"action": "resolve_applied", "token": str(uuid.uuid4()), "version": case.version}
    answer = ann.post(f"/operations/{case.pk}/act", form | typed)
    assert answer.status_code == 400
    assert why in text(answer)
    assert "settings" not in text(answer)
    assert Operation.objects.get(pk=case.pk).version == case.version


@pytest.mark.parametrize("reason", ["\x01\x02", "\u200b\u200b", "\u202e", " \n "])
def test_a_reason_that_nobody_can_see_is_none(ann, reason):
    case = cast.escalated()
    form = {"action": "terminate", "token": str(uuid.uuid4()), "version": case.version, "reason": reason}
    answer = ann.post(f"/operations/{case.pk}/act", form)
    assert answer.status_code == 422
    assert "A reason is needed" in text(answer)
    assert Operation.objects.get(pk=case.pk).state == "ambiguous"


@pytest.mark.parametrize(
    "before", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+14:00", "2026-11-29T23:00:00", "nonsense", "1"]
)
def test_a_moment_that_is_none_is_a_clear_400(ann, before):
    answer = ann.get(f"/operations/{cast.escalated().pk}", {"before": before})
    assert answer.status_code == 400
    assert "names no part of this timeline" in text(answer)


def test_a_moment_far_from_utc_is_a_moment(ann):
    assert ann.get(f"/operations/{cast.escalated().pk}", {"before": "2026-11-29T23:00:00+23:59"}).status_code == 200


def test_an_action_that_does_not_exist_is_a_clear_400(ann):
    case = cast.escalated()
    form = {"action": "rollback", "token": str(uuid.uuid4()), "version": case.version}
    assert "no action called" in text(ann.post(f"/operations/{case.pk}/act", form))


@pytest.mark.parametrize(
    ("name", "action", "status"),
    [
        ("vi_eve", "look_up", 403),
        ("au_dan", "terminate", 403),
        ("ap_cleo", "retry", 403),
        ("op_ann", "withdraw", 422),
        ("out_zoe", "look_up", 404),
    ],
)
def test_a_press_that_is_not_allowed_changes_nothing_and_says_why(who, name, action, status):
    case = cast.escalated()
    form = {"action": action, "token": str(uuid.uuid4()), "version": case.version, "reason": "let me"}
    answer = cast.client(who[name]).post(f"/operations/{case.pk}/act", form)
    assert answer.status_code == status
    assert Operation.objects.get(pk=case.pk).version == case.version
    refusals = Entry.objects.filter(subject=str(case.subject), event="refused")
    assert refusals.count() == (0 if status == 404 else 1)


def test_a_form_from_another_site_is_refused_in_words(who):
    case = cast.escalated()
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(who["op_ann"])
    form = {"action": "terminate", "token": str(uuid.uuid4()), "version": case.version, "reason": "x"}
    answer = strict.post(f"/operations/{case.pk}/act", form)
    assert answer.status_code == 403
    assert "This form is no longer valid" in text(answer)


def test_nobody_reads_the_answer_to_somebody_elses_press(ann, who):
    case = cast.escalated()
    answer = press(ann, case, "terminate", reason="enough")
    page = cast.client(who["op_bob"]).get(answer.headers["Location"])
    assert "Done." not in text(page)


def test_words_that_the_product_never_uses_are_nowhere_on_the_page(ann, till):
    case = cast.escalated()
    till.shows_found(case)
    page = text(ann.get(press(ann, case, "look_up").headers["Location"])).lower()
    assert "successfully" not in page
    assert "rollback" not in page


# Runs


def test_a_run_shows_its_steps_and_why_it_stands(ann):
    run = cast.run(workflow_id="T-77")
    cast.operation(state="succeeded", run=run, step="create_label", provider_operation_id="lbl_31", sent=5)
    cast.escalated(run=run)
    cast.run_stands(run, "uncertain", waiting_for="issue_refund")
    page = text(ann.get(f"/runs/{run.pk}"))
    assert "It waits for a person to decide about issue_refund." in page
    assert "lbl_31" in page
    assert "running → uncertain" in page
    assert "T-77" in text(ann.get("/runs"))
    assert "T-77" in text(ann.get("/runs?state=uncertain"))
    assert "No run is in this state" in text(ann.get("/runs?state=failed"))


def test_a_marked_run_is_resumed_by_a_person_with_a_reason(ann):
    at = database_now()
    run = cast.run_stands(
        cast.run(), "pending", escalated_at=at, escalation_reason="step_terminated", waiting_for="issue_refund"
    )
    form = form_of(ann.get(f"/runs/{run.pk}"), "resume") | {"reason": "Repaired."}
    answer = ann.post(f"/runs/{run.pk}/act", form)
    assert "Done. The run is due again" in text(ann.get(answer.headers["Location"]))
    run.refresh_from_db()
    assert run.escalated_at is None


def test_a_run_of_others_looks_like_a_missing_one(who):
    run = cast.run()
    assert cast.client(who["out_zoe"]).get(f"/runs/{run.pk}").status_code == 404


def test_what_was_seen_there_once_is_said_beside_every_word_of_a_person(ann):
    case = cast.escalated(sighted=True, because="mismatch")
    page = text(ann.get(f"/operations/{case.pk}"))
    assert "an empty answer no longer proves anything" in page
    assert "prove that nothing was applied" not in page
    assert page.count("The provider showed something of it, not as asked") == 2


# A second person


def test_a_request_for_a_second_person_stands_on_the_case_after_a_reload(ann):
    case = cast.escalated(same_key_until=database_now() - timedelta(hours=1))
    form = form_of(ann.get(f"/operations/{case.pk}"), "send_again") | {"reason": "The customer waits."}
    assert ann.post(f"/operations/{case.pk}/act", form).status_code == 302
    approval = Approval.objects.get(operation=case)
    page = ann.get(f"/operations/{case.pk}")
    assert "Send again is asked for by op_ann: another person decides, until " in text(page)
    assert f'href="/approvals/{approval.pk}"' in page.content.decode()
    assert f"Approval {approval.pk}: " in text(page)
    assert "The customer waits." in text(page)


def test_no_cache_keeps_a_page_that_was_signed_in_to(ann):
    assert ann.get(f"/operations/{cast.escalated().pk}").headers["Cache-Control"] == "no-store"
    assert ann.get("/").headers["Cache-Control"] == "no-store"
