"""What an answer means for the operation, of which the attempt is only a part."""

import json

import pytest

from reconciliation import reconciler, retrying, settlement, sweeping
from reconciliation.executor import perform
from reconciliation.models import JournalEntry
from reconciliation.providers.base import (
    Invalid,
    KeyInUse,
    NotSent,
    OutcomeUnknown,
    OwnFault,
    RateLimited,
    Receipt,
    Rejected,
    Unauthorized,
    Unavailable,
)  # fmt: skip
from reconciliation.states import State
from tests.scripted import AGENT, OLGA, absent, applied, cannot_tell, found, kinds, order, row, spec

LOST = OutcomeUnknown("no answer came")


def again(pk):
    """One more attempt under the same key, as a person asks for it."""
    return retrying.retry(pk, actor=OLGA, reason="once more")


# Rule 6: the operation is judged, not its last attempt


@pytest.mark.parametrize(
    "refusal",
    [Unauthorized("no", status=401), Rejected("no", status=422), Rejected("no", status=402), Invalid("no"),
     Unavailable("later", status=503), RateLimited("slow down", status=429), NotSent("refused"), OwnFault("bad token")],
    ids=lambda error: type(error).__name__ + str(error.status or ""),
)  # fmt: skip
@pytest.mark.parametrize("action", ["keyed", "unlisted", "natural"])
def test_a_refusal_of_attempt_two_says_nothing_about_attempt_one(clerk, clock, refusal, action):
    clerk.answers(LOST, refusal)
    clerk.sees(cannot_tell())
    pk = perform(order(action), actor=AGENT).pk
    again(pk)
    operation = row(pk)
    assert (operation.state, operation.unknown_attempts, operation.attempts) == ("ambiguous", [1], 2)
    clerk.sees(found(order="1002", amount=4200))
    reconciler.reconcile(pk)
    assert row(pk).state == "succeeded"


def test_an_unknown_attempt_after_an_unknown_one_leaves_both_unknown(clerk, clock):
    clerk.answers(LOST, LOST)
    pk = perform(order("unlisted"), actor=AGENT).pk
    again(pk)
    assert row(pk).unknown_attempts == [1, 2]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (Rejected("no", status=402), "failed_terminal"),
        (Invalid("no", status=422), "failed_terminal"),
        (Unauthorized("no", status=401), "ambiguous"),
        (Unavailable("no", status=503), "ambiguous"),
        (NotSent("no"), "ambiguous"),
    ],
)
def test_only_an_answer_declared_to_cover_earlier_attempts_settles_them(clerk, clock, error, state):
    clerk.answers(LOST, error)
    pk = perform(order("covering"), actor=AGENT).pk
    again(pk)
    assert row(pk).state == state


def test_a_success_of_attempt_two_under_the_same_key_settles_the_operation(clerk, clock):
    clerk.answers(LOST, applied("r-1", order="1002", amount=4200))
    pk = perform(order("unlisted"), actor=AGENT).pk
    again(pk)
    assert (row(pk).state, row(pk).effect_id) == ("succeeded", "r-1")


# Classes


@pytest.mark.parametrize(
    ("error", "state", "mark"),
    [
        (Rejected("no", status=402), "failed_terminal", ""),
        (Unauthorized("no", status=401), "failed_terminal", ""),
        (Invalid("no"), "failed_terminal", ""),
        (Unavailable("later", status=503), "failed_retryable", ""),
        (RateLimited("later", status=429), "failed_retryable", ""),
        (NotSent("refused"), "failed_retryable", ""),
        (OwnFault("the credential is malformed"), "failed_retryable", "held"),
        (KeyInUse("still at it", status=409), "ambiguous", ""),
        (Rejected("no", status=500), "ambiguous", ""),
        (Unavailable("later", status=502), "ambiguous", ""),
        (LOST, "ambiguous", ""),
        (ValueError("an adapter's bug"), "ambiguous", ""),
    ],
)
def test_the_first_answer_leads_where_its_class_says(clerk, error, state, mark):
    clerk.answers(error)
    operation = row(perform(order(), actor=AGENT).pk)
    assert (operation.state, operation.escalation_reason) == (state, mark)
    assert (operation.due_at is None) == (state == "failed_terminal" or mark == "held")


def test_what_nothing_can_find_out_goes_to_a_person_at_once(clerk):
    clerk.answers(LOST)
    operation = row(perform(order("none", provider="blind"), actor=AGENT).pk)
    assert (operation.state, operation.escalation_reason) == ("ambiguous", "nothing_can_find_out")


def test_a_held_one_is_tried_again_by_nobody_but_a_person(clerk, clock):
    clerk.answers(OwnFault("the credential is malformed"))
    pk = perform(order(), actor=AGENT).pk
    clock.advance(hours=2)
    sweeping.sweep()
    perform(order(), actor=AGENT)
    assert len(clerk.calls) == 1
    retrying.retry(pk, actor=OLGA, reason="repaired")
    assert (row(pk).state, row(pk).escalated_at) == ("succeeded", None)


def test_a_budget_spent_on_clean_refusals_fails(clerk, clock):
    clerk.answers(*[Unavailable("later", status=503)] * 3)
    pk = perform(order(), actor=AGENT).pk
    for _ in range(3):
        clock.advance(minutes=10)
        sweeping.sweep()
    assert (row(pk).state, row(pk).reason_code, row(pk).attempts) == ("failed_terminal", "budget_spent", 3)
    assert len(clerk.calls) == 3


def test_a_provider_that_asks_for_time_gets_it(clerk, clock):
    clerk.answers(RateLimited("slow down", status=429, retry_after=600))
    pk = perform(order(), actor=AGENT).pk
    assert 590 <= (row(pk).not_before - clock.now()).total_seconds() <= 601
    clock.advance(minutes=9)
    sweeping.sweep()
    assert len(clerk.calls) == 1
    clock.advance(minutes=2)
    sweeping.sweep()
    assert row(pk).state == "succeeded"


# Receipts


def test_what_was_accepted_is_looked_up_and_not_taken_for_done(clerk, clock):
    clerk.answers(Receipt(status="accepted", provider_operation_id="r-1"))
    pk = perform(order(), actor=AGENT).pk
    assert (row(pk).state, row(pk).provider_operation_id) == ("ambiguous", "r-1")
    clerk.sees(found())
    clock.advance(minutes=1)
    sweeping.sweep()
    assert (row(pk).state, row(pk).basis) == ("succeeded", "look_up")
    assert clerk.look_ups[0].provider_operation_id == "r-1"


def test_a_receipt_for_something_else_is_shown_to_a_person_field_by_field(clerk):
    clerk.answers(applied("r-1", order="1002", amount=42))
    operation = row(perform(order(), actor=AGENT).pk)
    assert (operation.state, operation.escalation_reason, operation.sighted) == ("ambiguous", "mismatch", True)
    entry = JournalEntry.objects.get(operation=operation, kind="receipt")
    assert json.loads(entry.data)["compared"] == {"order": "equal", "amount": "differs"}


@pytest.mark.case("B1")
def test_a_whole_number_with_a_point_is_the_same_amount(clerk):
    clerk.answers(applied("r-1", order="1002", amount=4200.0))
    assert perform(order(), actor=AGENT).state is State.SUCCEEDED


@pytest.mark.parametrize("shown", ["4200", True, None, 4201])
def test_another_kind_of_value_is_not_similar_enough(clerk, shown):
    clerk.answers(applied("r-1", order="1002", amount=shown))
    assert perform(order(), actor=AGENT).state is State.AMBIGUOUS


# Identical replays


@pytest.mark.case("B12")
def test_identical_replays_of_a_stored_error_stop_the_retries_and_call_a_person(clerk, clock):
    stored = OutcomeUnknown("server error", status=500)
    replay = OutcomeUnknown("server error", status=500, replayed=True)
    clerk.actions["unlisted"] = spec(**{**vars(clerk.actions["unlisted"]), "attempts": 9})
    try:
        clerk.answers(stored, *[replay] * 9)
        clerk.sees(cannot_tell())
        pk = perform(order("unlisted"), actor=AGENT).pk
        for _ in range(30):
            clock.advance(minutes=3)
            sweeping.sweep()
    finally:
        clerk.__init__()
    operation = row(pk)
    assert (operation.state, operation.identical_replays) == ("ambiguous", 2)
    assert operation.error_class == "unknown"
    assert operation.escalation_reason == "no_conclusive_answer"
    assert operation.attempts == 3


def test_a_fresh_error_between_two_replays_is_no_identical_replay(clerk, clock):
    replay = OutcomeUnknown("server error", status=500, replayed=True)
    clerk.answers(LOST, replay, LOST)
    pk = perform(order("unlisted"), actor=AGENT).pk
    again(pk)
    assert row(pk).identical_replays == 1
    again(pk)
    assert row(pk).identical_replays == 0


# What is kept


def test_hidden_values_are_sealed_and_never_in_what_may_be_shown(clerk):
    clerk.answers(lambda call: applied("r-1", order="1002", amount=4200, card="4242424242424242", note="for Jane"))
    request = {"order": "1002", "amount": 4200, "currency": "USD", "card": "4242424242424242"}
    operation = row(perform(order(request=request), actor=AGENT).pk)
    plain = (
        "".join(JournalEntry.objects.values_list("data", flat=True)) + operation.request_shown + operation.result_shown
    )
    assert "4242424242424242" not in plain
    assert "Jane" not in plain
    assert operation.request["card"] == operation.result["card"] == "4242424242424242"


@pytest.mark.parametrize("place", ["sentence", "excerpt", "request_id"])
def test_hidden_values_are_taken_out_of_what_an_error_repeats(clerk, place):
    hidden = {"card": "4242424242424242", "customer": {"email": "jane", "names": ["Jane Roe", 31415926]}}
    said = "card 4242424242424242 of Jane Roe, ref 31415926"
    error = Rejected(
        said if place == "sentence" else "no", status=402, **({place: said} if place != "sentence" else {})
    )
    clerk.answers(error)
    perform(order(request={"order": "1002", "amount": 4200, "currency": "USD", **hidden}), actor=AGENT)
    kept = JournalEntry.objects.get(kind="not_applied").data
    assert not [value for value in ("4242424242424242", "Jane Roe", "31415926") if value in kept]


def test_words_that_are_no_hidden_values_stay():
    assert settlement.hidden_values(spec(), {"flag": True, "n": 12, "ok": None, "id": "shown-1"}) == []


def test_a_library_text_is_never_kept(clerk):
    clerk.answers(ValueError("password=hunter2 at https://user:hunter2@pay.invalid"))
    pk = perform(order(), actor=AGENT).pk
    data = JournalEntry.objects.get(operation_id=pk, kind="no_answer").data
    assert "hunter2" not in data
    assert json.loads(data)["error"] == "ValueError"


def test_every_attempt_leaves_its_start_and_its_answer(clerk, clock):
    clerk.answers(LOST, Rejected("no", status=402))
    clerk.sees(absent(complete=False))
    pk = perform(order("unlisted"), actor=AGENT).pk
    again(pk)
    assert kinds(pk) == ["attempt_started", "no_answer", "finding", "attempt_started", "not_applied"]


def test_a_retention_begins_when_something_has_left_and_not_before(clerk, clock):
    clerk.answers(NotSent("refused"), LOST)
    clerk.sees(cannot_tell())
    pk = perform(order("unlisted"), actor=AGENT).pk
    assert (row(pk).first_sent_at, row(pk).same_key_until) == (None, None)
    clock.advance(days=2)
    again(pk)
    operation = row(pk)
    assert operation.attempts == 2
    assert (operation.same_key_until - operation.first_sent_at).total_seconds() == 86400 - 600
    clerk.answers(NotSent("refused"))
    again(pk)
    assert row(pk).first_sent_at == operation.first_sent_at
