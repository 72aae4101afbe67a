"""The whole loop with real processes and a real browser: an answer is lost, a person finds out, the run goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.urls import reverse
from django.utils.html import strip_tags

from audit.models import Entry
from reconciliation import reconciler, runs
from reconciliation.actors import Actor
from reconciliation.models import JournalEntry, Operation, Run
from tests import cast
from tests.nursery import WITH_CLAIMS, Desk
from tests.processes import wait_until

pytestmark = [pytest.mark.browser, pytest.mark.processes]

ROOT = Path(__file__).resolve().parent.parent.parent
AGENT = Actor(id="agent:desk-2", kind="agent", name="order desk agent")
CLAIM = {
    "order": "1002",
    "ticket": "T-77",
    "amount": 4200,
    "currency": "USD",
    "card": "card_4002",
    "customer": "Ada Fenn",
    "email": "ada@example.com",
    "address": "2 Mill Lane",
    "window": "tomorrow 9-12",
    "service": "return",
}
TO_THE_END = ["create_label", "schedule_pickup", "issue_refund", "send_email", "close_ticket"]


def start_claim() -> Run:
    return runs.start("damaged_item", tenant="t_acme", workflow_id="T-77", input=CLAIM, actor=AGENT)


def pay_says_nothing(desk: Desk) -> None:
    """Pay answers neither look-ups nor same-key retries, so automation cannot close the case."""
    desk.world.pay.fault("unavailable", action="look_up", times=1000)
    desk.world.pay.fault("bad_gateway_before", times=10)


def lose_the_refund(desk: Desk) -> Operation:
    """A worker is killed while pay has made the refund and not answered; automation tries, and stops."""
    run = start_claim()
    desk.world.pay.fault("hang_after_effect", order="1002")
    pay_says_nothing(desk)
    worker = desk.worker(do="advance", pk=run.pk, settings=WITH_CLAIMS)
    desk.world.pay.await_waiting(seconds=30)
    worker.kill()
    desk.world.pay.release(drop=True)
    desk.come_to_rest()
    desk.world.pay.clear_faults()
    return desk.operation(action="refund.create")


def sweep_in_a_worker(desk: Desk) -> None:
    worker = desk.worker(do="sweep", settings=WITH_CLAIMS)
    assert worker.ended()["event"] == "ended"


def button(page: Any, action: str, text: str) -> Any:
    return page.locator(f"#act-{action}").get_by_role("button", name=text)


def write_reason(page: Any, action: str, reason: str) -> None:
    """Open the form of an action and give the reason."""
    page.locator(f"#act-{action} > summary").click()
    page.locator(f"#act-{action} [name=reason]").fill(reason)


def address(operation: Operation) -> str:
    return reverse("case", args=[operation.pk])


def moves(operation: Operation, event: str = "transition") -> list[str]:
    entries = Entry.objects.filter(subject=str(operation.subject), event=event).order_by("seq")
    return list(entries.values_list("reason_code", flat=True))


def refusals(operation: Operation) -> list[str]:
    """What people were refused."""
    entries = Entry.objects.filter(subject=str(operation.subject), event="refused", actor_kind="person")
    return list(entries.order_by("seq").values_list("reason_code", flat=True))


def test_a_lost_answer_is_found_by_a_person_and_the_run_goes_on_to_its_end(
    claims: Desk, visit: Any, tmp_path: Path, database_url_env: dict[str, str]
) -> None:
    people, refund = cast.people(), lose_the_refund(claims)
    run = Run.objects.get()
    assert (refund.state, run.state) == ("ambiguous", "uncertain")
    assert refund.escalated_at is not None, "automation has stopped"

    page = visit(people["op_ann"])
    page.goto("/")
    page.get_by_role("link", name="Refund 42.00 USD for order 1002").click()
    page.get_by_role("heading", name="Refund 42.00 USD for order 1002").wait_for()
    told = page.locator("main").inner_text()
    assert "Sent, no answer" in told
    assert "Automation stopped" in told
    assert "lease ran out" in told
    assert "card_4002" not in page.content(), "what the action does not show stays hidden"
    button(page, "look_up", "Look up").click()
    page.locator("#answer .done").wait_for()
    assert "succeeded" in page.locator("#answer").inner_text()
    refund.refresh_from_db()
    assert (refund.state, refund.basis, refund.escalated_at) == ("succeeded", "look_up", None)

    sweep_in_a_worker(claims)
    run.refresh_from_db()
    assert run.state == "succeeded"
    assert [o.step for o in Operation.objects.order_by("id") if o.state == "succeeded"] == TO_THE_END
    page.goto(reverse("run", args=[run.pk]))
    assert "succeeded" in page.locator("main").inner_text()
    assert claims.world.pay.count(order="1002") == 1
    page.goto(f"{claims.world.pay.url}/?order=1002")
    assert "1 effect" in page.locator("section h2").inner_text()
    assert refund.provider_operation_id in page.locator("section").inner_text()
    claims.check()

    export = download(visit(people["au_dan"]), to=tmp_path / "audit.jsonl")
    assert verified(database_url_env, "--file", str(export))
    assert verified(database_url_env)
    story = [(line["body"]["reason_code"], line["body"]["actor"]) for line in lines_about(export, refund)]
    assert [code for code, _ in story[:2]] == ["claimed", "lease_expired"]
    assert story[0][1].startswith("worker:")
    assert story[-1] == ("found", f"person:{people['op_ann'].pk}")


def download(page: Any, *, to: Path) -> Path:
    """Fetch the audit log as a machine's file, by the page's own link."""
    page.goto("/audit")
    with page.expect_download() as waiting:
        page.get_by_role("link", name="Download JSONL").click()
    waiting.value.save_as(to)
    return to


def lines_about(export: Path, operation: Operation) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in export.read_text().splitlines()]
    entries = [json.loads(line["canonical"]) for line in lines if line["kind"] == "entry"]
    return [entry for entry in entries if entry["subject"] == str(operation.subject)]


def verified(env: dict[str, str], *arguments: str) -> bool:
    """Whether `manage.py audit_verify` finds nothing."""
    command = [sys.executable, "manage.py", "audit_verify", *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return "No findings." in ended.stdout


@pytest.mark.case("I3")
@pytest.mark.parametrize("javascript", [True, False])
def test_of_two_operators_one_acts_and_the_other_is_told(claims: Desk, visit: Any, javascript: bool) -> None:
    people, refund = cast.people(), lose_the_refund(claims)
    ann, bob = (visit(people[name], javascript=javascript) for name in ("op_ann", "op_bob"))
    ann.goto(address(refund))
    bob.goto(address(refund))
    drawn = ann.locator("#act-retry [name=version]").get_attribute("value")
    write_reason(ann, "retry", "The customer waits since Monday")
    button(bob, "look_up", "Look up").click()
    bob.locator("#answer .done").wait_for()
    if javascript:  # polling draws the page around her open form anew; the form and its version stay
        ann.locator(f"[data-version]:not([data-version='{drawn}'])").wait_for()
        assert ann.locator("#act-retry [name=reason]").input_value() == "The customer waits since Monday"
        assert ann.locator("#act-retry .stale").is_visible()
    known = moves(refund)
    with ann.expect_response(lambda answer: answer.request.method == "POST") as waiting:
        button(ann, "retry", "Retry").click()
    assert waiting.value.status == 409
    told = ann.locator("main").inner_text()
    assert "It changed since you looked" in told
    assert "op_bob" in told
    assert "found at the provider" in told
    assert ann.locator("main time").count() >= 1
    assert "The customer waits since Monday" in ann.content(), "what she typed is kept"
    assert moves(refund) == known
    assert refusals(refund) == ["stale_version"]
    assert claims.world.pay.count(order="1002") == 1
    refund.refresh_from_db()
    assert refund.state == "succeeded"


@pytest.mark.case("I3")
def test_the_way_back_shows_the_case_as_it_is_and_an_old_form_gets_the_first_answer(claims: Desk, visit: Any) -> None:
    people, refund = cast.people(), lose_the_refund(claims)
    page = visit(people["op_ann"], javascript=False)
    page.goto(address(refund))
    old = form_of(page, "terminate")
    write_reason(page, "terminate", old["reason"])
    button(page, "terminate", "Terminate").click()
    page.locator("#answer .done").wait_for()
    first, where, known = page.locator("#answer").inner_text(), page.url, moves(refund)
    page.go_back()
    page.locator(".title").get_by_text("terminated").wait_for()
    assert page.locator("#act-terminate").count() == 0
    again = post(page, refund, old)
    assert again.url == where
    assert first.split(".")[1].strip() in again.text()
    assert moves(refund) == known
    assert refusals(refund) == []


def post(page: Any, operation: Operation, form: dict[str, str]) -> Any:
    """Send a form that this browser was shown earlier."""
    origin = {"Referer": page.url}
    return page.request.post(reverse("case_act", args=[operation.pk]), form=form, headers=origin)


@pytest.mark.case("I3")
def test_a_post_without_a_version_is_refused(claims: Desk, visit: Any) -> None:
    people, refund = cast.people(), lose_the_refund(claims)
    page = visit(people["op_ann"], javascript=False)
    page.goto(address(refund))
    form, known = form_of(page, "retry"), moves(refund)
    form.pop("version")
    answer = post(page, refund, form)
    assert answer.status == 400
    assert "without a usable version, so nothing was done" in answer.text()
    assert moves(refund) == known
    assert claims.world.pay.count() == 1


@pytest.mark.case("I5")
def test_a_double_click_on_retry_is_one_attempt_and_one_page(claims: Desk, visit: Any) -> None:
    people, refund = cast.people(), lose_the_refund(claims)
    claims.world.pay.fault("unavailable", action="look_up", times=1000)
    claims.world.pay.fault("slow", seconds=1)
    page = visit(people["op_ann"], javascript=False)  # nothing in the browser holds the second click back
    posts = []
    page.on("request", lambda request: posts.append(request.post_data) if request.method == "POST" else None)
    page.goto(address(refund))
    write_reason(page, "retry", "Once more")
    place = button(page, "retry", "Retry").bounding_box()
    for _ in range(2):
        page.mouse.click(place["x"] + 5, place["y"] + 5)
        page.wait_for_timeout(150)
    page.wait_for_url("**?done=*")
    wait_until(lambda: Operation.objects.get(pk=refund.pk).state == "succeeded")
    page.reload()
    assert len(posts) == 2
    assert posts[0] == posts[1]
    assert "Attempt 4 was made. It is succeeded now." in page.locator("#answer").inner_text()
    assert moves(refund).count("retry_requested") == 1
    refund.refresh_from_db()
    assert refund.attempts == 4
    assert claims.world.pay.count(order="1002") == 1


def proven_absent(desk: Desk) -> Operation:
    """A refund that never arrived: looked up twice, its one retry is due now."""
    run = start_claim()
    desk.world.pay.fault("lost", order="1002")
    runs.advance(run.pk)
    refund = desk.operation(action="refund.create")
    while refund.state != "failed_retryable":
        desk.clock.set(max(refund.due_at, desk.clock.now()))
        reconciler.reconcile(refund.pk)
        refund.refresh_from_db()
    assert refund.attempts == 1
    return refund


def press(user: User, operation: Operation, form: dict[str, str]) -> str:
    """What a person without JavaScript reads after one press."""
    try:
        return cast.client(user).post(reverse("case_act", args=[operation.pk]), form, follow=True).content.decode()
    finally:
        connections.close_all()


def form_of(page: Any, action: str) -> dict[str, str]:
    fields = page.locator(f"#act-{action} input[type=hidden]").all()
    return {field.get_attribute("name"): field.get_attribute("value") for field in fields} | {"reason": "Waiting"}


@pytest.mark.case("I5")
@pytest.mark.parametrize("first", ["people", "automation"])
def test_two_people_and_automation_retry_at_once_and_share_one_attempt(claims: Desk, visit: Any, first: str) -> None:
    people, refund = cast.people(), proven_absent(claims)
    claims.world.pay.fault("slow", seconds=2)
    forms = {}
    for name in ("op_ann", "op_bob"):
        page = visit(people[name], javascript=False)
        page.goto(address(refund))
        forms[name] = form_of(page, "retry")
    old = list(JournalEntry.objects.filter(operation=refund).order_by("id").values())
    automation = None
    if first == "automation":
        automation = claims.worker(do="sweep", settings=WITH_CLAIMS)
        wait_until(lambda: Operation.objects.get(pk=refund.pk).attempts == 2)
    with ThreadPoolExecutor(2) as both:
        pressed = [both.submit(press, people[name], refund, forms[name]) for name in forms]
        automation = automation or claims.worker(do="sweep", settings=WITH_CLAIMS)
        told = [answer.result() for answer in pressed]
    automation.ended()
    refund.refresh_from_db()
    assert (refund.state, refund.attempts) == ("succeeded", 2)
    assert claims.world.pay.count(order="1002") == 1
    assert len(claims.world.pay.requests(reference=refund.key, action="refund.create")) == 2, "one was lost, one came"
    started = [code for code in moves(refund) if code in ("retried", "retry_requested")]
    assert len(started) == 1
    joined = [text for text in told if "Already being done: attempt 2" in text]
    assert len(joined) == (2 if started == ["retried"] else 1), [main_of(text) for text in told]
    assert len(moves(refund, "joined")) == len(joined)
    kept = JournalEntry.objects.filter(operation=refund, id__lte=old[-1]["id"]).order_by("id").values()
    assert list(kept) == old, "the first attempt's record is as it was"


def main_of(text: str) -> str:
    return strip_tags(text.split("<main", 1)[-1])[:400]


@pytest.mark.case("I5")
def test_retry_of_what_is_settled_is_refused_with_the_reason(claims: Desk, visit: Any) -> None:
    people, refund = cast.people(), lose_the_refund(claims)
    page = visit(people["op_ann"], javascript=False)
    page.goto(address(refund))
    form = form_of(page, "retry")
    button(page, "look_up", "Look up").click()
    page.locator("#answer .done").wait_for()
    form["version"] = page.locator("[data-version]").get_attribute("data-version")
    assert "It has succeeded; there is nothing to retry." in press(people["op_ann"], refund, form)
    assert refusals(refund) == ["not_allowed"]


@pytest.mark.parametrize(
    ("action", "text", "state", "basis"),
    [
        ("look_up", "Look up", "succeeded", "look_up"),
        ("resolve_applied", "It was applied", "succeeded", "asserted"),
        ("resolve_not_applied", "It was not applied", "failed_terminal", "asserted"),
        ("retry", "Retry", "succeeded", "look_up"),
        ("terminate", "Terminate", "terminated", ""),
    ],
)
def test_every_action_works_without_javascript(
    claims: Desk, visit: Any, action: str, text: str, state: str, basis: str
) -> None:
    people, refund = cast.people(), lose_the_refund(claims)
    page = visit(people["op_ann"], javascript=False)
    page.goto("/")
    page.get_by_role("link", name="Refund 42.00 USD for order 1002").click()
    if action != "look_up":
        write_reason(page, action, "I called pay")
    button(page, action, text).click()
    page.locator("#answer .done").wait_for()
    refund.refresh_from_db()
    assert (refund.state, refund.basis) == (state, basis)
    assert claims.world.pay.count(order="1002") == 1
    claims.check_audit()


def test_a_run_that_would_stop_again_is_not_resumed_but_can_be_cancelled_without_javascript(
    claims: Desk, visit: Any
) -> None:
    people, refund = cast.people(), lose_the_refund(claims)
    page = visit(people["op_ann"], javascript=False)
    page.goto(address(refund))
    write_reason(page, "terminate", "Done by hand at the bank")
    button(page, "terminate", "Terminate").click()
    claims.come_to_rest()
    run = Run.objects.get()
    assert run.escalation_reason == "step_terminated"
    page.goto(reverse("run", args=[run.pk]))
    assert page.locator("#act-resume > summary").count() == 0
    write_reason(page, "cancel", "Nothing more to do")
    button(page, "cancel", "Cancel the run").click()
    page.locator("#answer .done").wait_for()
    run.refresh_from_db()
    assert (run.state, run.escalated_at) == ("cancelled", None)
    claims.come_to_rest()
    assert claims.world.mail.count() == 0
