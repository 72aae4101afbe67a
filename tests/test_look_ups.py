"""What the order desk's adapters conclude from what the outside world shows."""

import json
import time
import tracemalloc
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from examples.order_desk import providers
from reconciliation.providers import base
from reconciliation.providers.base import ActionSpec, Source, Verdict, differences
from reconciliation.providers.http import LONGEST_WAIT, retry_after
from tests.provider_contract import KEY, MESSAGE, REFUND, a_call, endless
from tests.world import TOKEN, World


@pytest.fixture
def pay(world: World) -> providers.Pay:
    return providers.Pay(base_url=world.pay.url, token=TOKEN)


@pytest.fixture
def mail(world: World) -> providers.Mail:
    return providers.Mail(base_url=world.mail.url, token=TOKEN)


@pytest.fixture
def tickets(world: World) -> providers.Tickets:
    return providers.Tickets(base_url=world.tickets.url, token=TOKEN)


def lost_refund(world: World, pay: providers.Pay, fault: str = "reset_after", **rule: Any) -> base.Call:
    """A refund whose answer was lost."""
    world.pay.fault(fault, **rule)
    call = a_call()
    with pytest.raises(base.OutcomeUnknown):
        pay.perform(call)
    return call


# --- an index that lags


@pytest.mark.case("C1")
def test_an_index_that_lags_cannot_tell_until_it_shows_the_object(world: World, tickets: providers.Tickets) -> None:
    world.tickets.set(lag=60)
    world.tickets.fault("reset_after")
    call = a_call("ticket.open", {"order": "1002", "title": "Broken cup"})
    with pytest.raises(base.OutcomeUnknown):
        tickets.perform(call)
    for seconds in (2, 8, 20, 29):  # t = 2, 10, 30, 59
        world.tickets.advance(seconds)
        finding = tickets.look_up(call)
        assert (finding.verdict, finding.authoritative) == (Verdict.CANNOT_TELL, False)
        assert "may lag" in finding.note
    world.tickets.advance(3)
    assert tickets.look_up(call).verdict is Verdict.FOUND
    assert world.tickets.count() == 1


@pytest.mark.case("C1")
def test_an_index_never_says_absent_however_long_one_waits(world: World, mail: providers.Mail) -> None:
    world.mail.advance(86_400)
    assert mail.look_up(a_call("message.send", MESSAGE)).verdict is Verdict.CANNOT_TELL


# --- what may not be seen, and what is gone


@pytest.mark.case("C4")
def test_404_by_id_and_on_the_control_read_is_unauthorized(world: World, pay: providers.Pay) -> None:
    stored = pay.perform(a_call()).provider_operation_id
    world.pay.set(scope_lost=True)
    for call in (a_call(), a_call(provider_operation_id=stored)):
        with pytest.raises(base.Unauthorized, match="known to exist"):
            pay.look_up(call)


@pytest.mark.case("C4")
def test_an_empty_list_without_scope_is_unauthorized(world: World, pay: providers.Pay) -> None:
    world.pay.fault("bad_gateway_before", action="probe", status=404)
    with pytest.raises(base.Unauthorized):
        pay.look_up(a_call())


@pytest.mark.case("C4")
@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_credential_is_never_absence(world: World, pay: providers.Pay, status: int) -> None:
    world.pay.fault("bad_gateway_before", action="look_up", status=status, times=5)
    with pytest.raises(base.Unauthorized):
        pay.look_up(a_call())


@pytest.mark.case("C4")
def test_an_empty_world_seen_with_a_good_credential_is_absence(world: World, pay: providers.Pay) -> None:
    finding = pay.look_up(a_call())
    assert (finding.verdict, finding.source) == (Verdict.ABSENT, Source.BY_REFERENCE)


@pytest.mark.case("C4")
def test_410_is_removed_and_not_absent(world: World, mail: providers.Mail) -> None:
    sent = mail.perform(a_call("message.send_listed", MESSAGE))
    world.mail.remove(str(sent.provider_operation_id))
    call = a_call("message.send_listed", MESSAGE, provider_operation_id=sent.provider_operation_id)
    assert mail.look_up(call).verdict is Verdict.REMOVED


@pytest.mark.case("C4")
@pytest.mark.parametrize("fault", ["html_login", "empty_answer"])
def test_a_page_that_is_no_object_cannot_tell(world: World, pay: providers.Pay, fault: str) -> None:
    stored = pay.perform(a_call()).provider_operation_id
    world.pay.fault(fault, action="look_up", times=9)
    finding = pay.look_up(a_call(provider_operation_id=stored))
    assert finding.verdict is Verdict.CANNOT_TELL


def test_an_id_that_was_told_once_is_never_absent(pay: providers.Pay) -> None:
    assert pay.look_up(a_call(provider_operation_id="re_gone")).verdict is Verdict.CANNOT_TELL


# --- whose is it


@pytest.mark.case("C6")
def test_the_same_amount_under_another_reference_is_a_candidate_and_not_ours(world: World, pay: providers.Pay) -> None:
    other = world.pay.plant("refund", **REFUND, reference="900619")
    finding = pay.look_up(a_call(key="712219"))
    assert finding.verdict is Verdict.ABSENT
    assert [one["id"] for one in finding.candidates] == [other["id"]]
    assert finding.note == "1 with another reference"


@pytest.mark.case("C6")
@pytest.mark.parametrize("reference", ["AC1-7F3E9B0C5D", f"{KEY} ", f" {KEY}", KEY[:-1], KEY + "0"])
def test_a_reference_matches_exactly_or_not_at_all(world: World, pay: providers.Pay, reference: str) -> None:
    world.pay.plant("refund", **REFUND, reference=reference)
    assert pay.look_up(a_call()).verdict is Verdict.ABSENT


@pytest.mark.case("C6")
@pytest.mark.parametrize(
    "wrong", [{"currency": "EUR"}, {"amount": 4199}, {"amount": "4200"}, {"card": "card_of_bob"}, {"amount": True}]
)
def test_our_reference_on_something_else_is_a_mismatch(world: World, pay: providers.Pay, wrong: dict[str, Any]) -> None:
    planted = world.pay.plant("refund", **{**REFUND, **wrong}, reference=KEY)
    finding = pay.look_up(a_call())
    assert (finding.verdict, finding.provider_operation_id) == (Verdict.MISMATCH, planted["id"])
    assert finding.note == f"differs in {next(iter(wrong))}"


@pytest.mark.case("C6")
def test_five_that_fit_are_all_listed_and_none_is_chosen(world: World, pay: providers.Pay) -> None:
    world.pay.set(page_size=2)
    planted = {world.pay.plant("refund", **REFUND, reference=KEY)["id"] for _ in range(5)}
    finding = pay.look_up(a_call())
    assert (finding.verdict, finding.provider_operation_id) == (Verdict.SEVERAL, None)
    assert {one["id"] for one in finding.candidates} == planted


def test_a_list_that_breaks_off_cannot_tell_and_keeps_what_it_showed(world: World, mail: providers.Mail) -> None:
    world.mail.set(page_size=1)
    for _ in range(2):
        world.mail.plant("message", **MESSAGE, reference=KEY)
    world.mail.fault("slow", action="look_up", seconds=0)  # the first page
    world.mail.fault("unavailable", action="look_up")
    finding = mail.look_up(a_call("message.send_listed", MESSAGE))
    assert (finding.verdict, finding.complete, len(finding.candidates)) == (Verdict.CANNOT_TELL, False, 1)


def test_a_list_without_an_end_is_not_read_to_its_end(world: World, mail: providers.Mail) -> None:
    world.mail.set(page_size=1)
    for _ in range(25):
        world.mail.plant("message", **MESSAGE, reference="x")
    world.mail.control("POST", "settings", {"page_size": 1})
    finding = mail.read_all(a_call("message.send_listed", MESSAGE), "/messages", {}, authoritative=True)
    assert (finding.complete, len(finding.objects)) == (False, 20)


# --- which answer counts


@pytest.mark.case("C8")
def test_a_read_by_id_overrides_the_index_and_both_answers_are_kept(world: World, mail: providers.Mail) -> None:
    sent = mail.perform(a_call("message.send", MESSAGE))
    world.mail.set(lag=60)
    world.mail.advance(61)
    world.mail.remove(str(sent.provider_operation_id))
    finding = mail.look_up(a_call("message.send", MESSAGE))
    assert (finding.verdict, finding.source) == (Verdict.REMOVED, Source.BY_ID)
    assert [one["id"] for one in finding.candidates] == [sent.provider_operation_id]
    assert "shown by reference" in finding.note


@pytest.mark.case("C8")
def test_what_was_undone_since_is_removed_and_not_found(world: World) -> None:
    carrier = providers.Carrier(base_url=world.carrier.url, token=TOKEN)
    request = {"order": "1002", "sender": "Jane", "service": "ground"}
    made = carrier.perform(a_call("label.create", request))
    carrier.perform(a_call("label.void", {"order": "1002", "id": made.provider_operation_id}, key="undo"))
    finding = carrier.look_up(a_call("label.create", request))
    assert (finding.verdict, finding.note) == (Verdict.REMOVED, "its status is voided")


def test_a_sighting_whose_id_cannot_be_read_is_kept_as_a_candidate(world: World, pay: providers.Pay) -> None:
    made = pay.perform(a_call()).provider_operation_id
    world.pay.fault("unavailable", action="look_up", id=made, times=2)
    finding = pay.look_up(a_call())
    assert finding.verdict is Verdict.CANNOT_TELL
    assert finding.candidates[0]["id"] == made


def test_a_sighting_that_is_not_there_when_read_by_id_is_not_absence(world: World, pay: providers.Pay) -> None:
    made = pay.perform(a_call()).provider_operation_id
    world.pay.fault("bad_gateway_before", action="look_up", id=made, status=404, times=2)
    finding = pay.look_up(a_call())
    assert finding.verdict is Verdict.CANNOT_TELL
    assert finding.candidates[0]["id"] == made


def test_a_call_that_the_provider_is_still_at_is_in_progress(world: World, pay: providers.Pay) -> None:
    world.pay.fault("hang_before_effect")
    slow = providers.Pay(base_url=world.pay.url, token=TOKEN)
    slow.actions = {
        "refund.create": base.ActionSpec(**{**vars(pay.actions["refund.create"]), "timeout": timedelta(seconds=0.3)})
    }
    with pytest.raises(base.OutcomeUnknown):
        slow.perform(a_call())
    assert pay.look_up(a_call()).verdict is Verdict.IN_PROGRESS
    with pytest.raises(base.KeyInUse):
        pay.perform(a_call())
    world.pay.release()


def test_after_the_key_is_forgotten_the_list_still_finds_it(world: World, pay: providers.Pay) -> None:
    world.pay.set(key_retention=10)
    pay.perform(a_call())
    world.pay.advance(11)
    finding = pay.look_up(a_call())
    assert (finding.verdict, finding.note) == (Verdict.FOUND, "by reference, then read by id")


def test_a_source_that_is_down_is_made_up_for_by_one_that_finds_it(world: World, pay: providers.Pay) -> None:
    pay.perform(a_call())
    world.pay.fault("unavailable", action="look_up", times=1)  # by key
    assert pay.look_up(a_call()).verdict is Verdict.FOUND


def test_a_source_that_is_down_is_not_made_up_for_by_one_that_is_empty(world: World, pay: providers.Pay) -> None:
    world.pay.fault("unavailable", action="look_up", times=1)
    with pytest.raises(base.Unavailable):
        pay.look_up(a_call())


def test_a_wrong_amount_is_found_as_a_mismatch(world: World, pay: providers.Pay) -> None:
    call = lost_refund(world, pay, "wrong_amount", change={"amount": 4100})
    finding = pay.look_up(call)
    assert (finding.verdict, finding.observed["amount"]) == (Verdict.MISMATCH, 4100)


def test_numbers_compare_by_value_and_kinds_do_not_mix() -> None:
    spec = ActionSpec(compare={"amount": "sum"})
    assert not differences(spec, {"amount": 12345}, {"sum": 12345.0})
    for shown in ("12345", True, None, 12346):
        assert differences(spec, {"amount": 12345}, {"sum": shown})
    assert differences(spec, {"amount": 1}, {"sum": True})
    assert differences(spec, {"amount": 1}, {}) == {"amount": (1, None)}


# --- errors


@pytest.mark.case("B12")
def test_a_replayed_error_is_marked_and_stays_unknown(world: World, pay: providers.Pay) -> None:
    lost_refund(world, pay, "server_error")
    for _ in range(3):
        with pytest.raises(base.OutcomeUnknown) as raised:
            pay.perform(a_call())
        assert (raised.value.status, raised.value.replayed) == (500, True)
    assert world.pay.count() == 0


@pytest.mark.case("B12")
def test_a_replayed_success_is_marked(pay: providers.Pay) -> None:
    assert [pay.perform(a_call()).replayed for _ in range(2)] == [False, True]


@pytest.mark.case("K3")
def test_an_error_that_repeats_our_headers_leaves_a_clean_excerpt(world: World, pay: providers.Pay) -> None:
    world.pay.fault("error_echo")
    with pytest.raises(base.Unauthorized) as raised:
        pay.perform(a_call())
    error = raised.value
    assert TOKEN not in f"{error}{error.excerpt}{error.__cause__}"
    assert "jane.roe" not in error.excerpt
    assert "j***@example.com" in error.excerpt
    assert len(error.excerpt) <= 300
    assert error.request_id.startswith("req_")


def test_an_error_that_repeats_a_hidden_field_does_not_show_it(world: World, pay: providers.Pay) -> None:
    world.pay.fault("reject")
    call = a_call(request=REFUND | {"card": "reject"})  # what the sandbox repeats in its error
    with pytest.raises(base.Rejected) as raised:
        pay.perform(call)
    assert "reject" not in raised.value.excerpt


@pytest.mark.case("K3")
def test_an_error_of_five_megabytes_is_cut_without_being_held(world: World, pay: providers.Pay) -> None:
    pay.perform(a_call(key="warm"))
    world.pay.fault("huge_error", status=503)
    tracemalloc.start()
    with pytest.raises(base.Unavailable) as raised:
        pay.perform(a_call())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_500_000
    assert len(raised.value.excerpt) <= 300


@pytest.mark.case("K3")
def test_an_error_without_an_end_is_not_read_to_its_end() -> None:
    with endless(b"HTTP/1.1 503 No\r\nContent-Type: text/plain\r\n\r\n") as address:
        started = time.monotonic()
        with pytest.raises(base.Unavailable):
            providers.Pay(base_url=address, token=TOKEN).perform(a_call())
        assert time.monotonic() - started < 10  # the action's timeout is 30 seconds


@pytest.mark.case("B4")
def test_free_text_arrives_as_it_was_submitted(world: World, mail: providers.Mail) -> None:
    body = "A\u030a is not \u00c5 \u212b; 12345.0; \u202etxt \U0001f600 \r\n\t "
    mail.perform(a_call("message.send", MESSAGE | {"body": body}))
    assert world.mail.effects()[0]["fields"]["body"] == body
    assert json.loads(world.mail.requests()[0]["body"])["body"] == body


# --- Retry-After

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        (" 120 ", 120.0),
        ("9" * 5000, LONGEST_WAIT),
        ("0", None),
        ("-5", None),
        ("1.5", None),
        ("²", None),
        ("soon", None),
        ("", None),
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90.0),
        (format_datetime(NOW - timedelta(seconds=90), usegmt=True), None),
        (format_datetime(NOW + timedelta(days=90), usegmt=True), LONGEST_WAIT),
        ("Sun, 99 Nov 2026 99:00:00 GMT", None),
    ],
)
def test_retry_after_in_both_forms(value: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": value, "date": format_datetime(NOW, usegmt=True)}) == seconds


@pytest.mark.parametrize(("fault", "error"), [("rate_limited", base.RateLimited), ("unavailable", base.Unavailable)])
def test_retry_after_reaches_the_ledger(
    world: World, pay: providers.Pay, fault: str, error: type[base.ProviderError]
) -> None:
    world.pay.fault(fault, retry_after=7)
    with pytest.raises(error) as raised:
        pay.perform(a_call())
    assert raised.value.retry_after == 7.0
