"""When a step is sent again and when no more: the waits and caps of its policy, and what counts towards them."""

from collections import Counter
from dataclasses import replace

import pytest

from reconciliation import executor, reconciler, retrying, settling, spool, sweeping, transition
from reconciliation.executor import perform
from reconciliation.models import JournalEntry, Limit
from reconciliation.policy import ErrorClass, RetryPolicy
from reconciliation.providers.base import (
    KeyInUse,
    NotSent,
    OutcomeUnknown,
    RateLimited,
    Receipt,
    Rejected,
    Unavailable,
)  # fmt: skip
from reconciliation.states import Kind, Subject
from reconciliation.transition import Observed
from tests.scripted import AGENT, OLGA, absent, applied, cannot_tell, found, order, row
from tests.test_limits import put, release

LOST = OutcomeUnknown("no answer came")
ACCEPTED = Receipt(status="accepted", cost=50)


def step(action="keyed", **policy):
    """The refund of the fixed cast, tried as `policy` says."""
    return replace(order(action), retry=RetryPolicy(**{"jitter": 0.0, **policy}))


def tried(intent):
    return perform(intent, actor=AGENT).pk


def pass_time(clock, *, rounds, seconds=45):
    for _ in range(rounds):
        clock.advance(seconds)
        sweeping.sweep()


def report(pk, attempt, **data):
    """What a worker that had lost its claim tells."""
    entry = Observed(kind="late_report", attempt=attempt, data=data)
    transition.note(Subject(Kind.OPERATION, pk), [entry], look_soon=True)


# What counts as its cost


@pytest.mark.parametrize(
    "answer",
    [
        replace(applied("r-1", order="1002", amount=4200), cost=50),
        ACCEPTED,
        replace(applied("r-1", order="1002", amount=42), cost=50),
        RateLimited("slow down", status=429, cost=50),
        Rejected("no", status=402, cost=50),
        OutcomeUnknown("half an answer", cost=50),
    ],
    ids=["applied", "accepted", "mismatch", "rate_limited", "rejected", "unknown"],
)
def test_what_an_attempt_cost_counts_whatever_its_answer_was(clerk, answer):
    clerk.answers(answer)
    assert row(tried(order())).cost_minor == 50


def test_the_cost_of_each_attempt_is_added_up(clerk, clock):
    down = Unavailable("later", status=503, cost=20)
    clerk.answers(down, down, replace(applied("r-1", order="1002", amount=4200), cost=50))
    pk = tried(order())
    pass_time(clock, rounds=3)
    assert (row(pk).state, row(pk).cost_minor) == ("succeeded", 90)


@pytest.mark.parametrize("cost", [True, "50", 4.5, 2**70, None])
def test_a_cost_that_is_no_whole_number_costs_nothing_and_harms_nothing(clerk, cost):
    clerk.answers(replace(applied("r-1", order="1002", amount=4200), cost=cost))
    assert (row(tried(order())).state, row(tried(order())).cost_minor) == ("succeeded", 0)
    clerk.answers(Unavailable("later", status=503, cost=cost))
    assert row(tried(order(step="other"))).cost_minor == 0


def test_a_charge_whose_answer_was_lost_counts_when_a_look_up_finds_it(clerk):
    clerk.answers(LOST)
    pk = tried(order())
    clerk.sees(replace(found(), cost=50))
    reconciler.reconcile(pk)
    assert (row(pk).state, row(pk).cost_minor) == ("succeeded", 50)


@pytest.mark.parametrize("named", [None, "r-1"])
def test_what_was_accepted_and_then_found_counts_once(clerk, named):
    clerk.answers(replace(ACCEPTED, provider_operation_id=named))
    pk = tried(order())
    clerk.sees(replace(found("r-1"), cost=50))
    reconciler.reconcile(pk)
    assert (row(pk).state, row(pk).cost_minor) == ("succeeded", 50)


def test_what_is_looked_up_again_counts_once(clerk):
    clerk.answers(LOST)
    pk = tried(order())
    clerk.sees(replace(found("r-1", amount=42), cost=50))
    for _ in range(3):
        reconciler.reconcile(pk, actor=OLGA)
    assert (row(pk).escalation_reason, row(pk).cost_minor) == ("mismatch", 50)


def test_another_effect_than_the_one_that_was_paid_for_counts_too(clerk):
    clerk.answers(LOST)
    pk = tried(order())
    clerk.sees(replace(found("r-1", amount=42), cost=50), replace(found("r-2"), cost=60))
    for _ in range(3):
        reconciler.reconcile(pk, actor=OLGA)
    assert (row(pk).state, row(pk).cost_minor) == ("succeeded", 110)


def test_the_cost_of_an_attempt_that_is_proven_absent_does_not_hide_that_of_the_one_that_is_found(clerk, clock):
    clerk.answers(ACCEPTED, LOST)
    clerk.sees(absent(), absent(), replace(found("r-2"), cost=60))
    pk = tried(order("lookup"))
    for seconds in (61, 31):
        clock.advance(seconds)
        reconciler.reconcile(pk)
    pass_time(clock, rounds=3)
    assert (row(pk).state, row(pk).cost_minor, len(clerk.calls)) == ("succeeded", 110, 2)


def test_a_late_report_counts_once_even_if_it_comes_twice(clerk):
    clerk.answers(LOST)
    pk = tried(order())
    for _ in range(2):
        report(pk, 1, status="accepted", cost=50)
    assert row(pk).cost_minor == 50


def test_an_answer_that_was_settled_and_then_kept_once_more_counts_once(clerk, monkeypatch):
    clerk.answers(ACCEPTED)
    settled = []
    monkeypatch.setattr(executor, "settle", lambda claim, judged: settled.append((claim, judged)))
    perform(order(), actor=AGENT)
    monkeypatch.undo()
    pk = settling.settle(*settled[0]).pk
    settling._keep_receipt(*settled[0])  # its COMMIT had errored
    assert (row(pk).cost_minor, JournalEntry.objects.filter(operation=pk, kind="late_report").count()) == (50, 1)


def test_a_report_that_waited_on_disk_counts_when_it_comes_in(clerk, clock):
    clerk.answers(LOST)
    pk = tried(order())
    spool.keep(
        Subject(Kind.OPERATION, pk), Observed(kind="receipt", attempt=1, data={"status": "accepted", "cost": 50})
    )
    assert (spool.bring_in(), row(pk).cost_minor) == (1, 50)


def test_a_late_report_that_comes_during_the_next_attempt_is_added_to_what_that_one_costs(clerk, clock):
    def reported_meanwhile(call):
        report(row(pk).pk, 1, status="", error_class="unavailable", cost=20)
        return replace(applied("r-2", order="1002", amount=4200), cost=50)

    clerk.answers(LOST, reported_meanwhile)
    clerk.sees(cannot_tell())
    pk = tried(order("unlisted"))
    pass_time(clock, rounds=1)
    assert (row(pk).state, row(pk).cost_minor) == ("succeeded", 70)


# Caps: what was spent


def test_clean_refusals_that_cost_what_the_step_may_fail_it(clerk, clock):
    clerk.answers(*[Unavailable("later", status=503, cost=20)] * 9)
    pk = tried(step(attempts=9, max_spend=40))
    pass_time(clock, rounds=9)
    assert (row(pk).state, row(pk).reason_code, len(clerk.calls)) == ("failed_terminal", "spend_cap", 2)


def test_a_step_that_must_be_done_waits_for_a_person_where_its_spend_is_capped(clerk, clock):
    clerk.answers(*[Unavailable("later", status=503, cost=20)] * 9)
    pk = tried(replace(step(attempts=9, max_spend=40), spent_is_final=False))
    pass_time(clock, rounds=9)
    assert (row(pk).state, row(pk).escalation_reason, len(clerk.calls)) == ("failed_retryable", "spend_cap", 2)


def test_a_step_below_its_cap_is_tried_on(clerk, clock):
    clerk.answers(Unavailable("later", status=503, cost=20))
    pk = tried(step(max_spend=40))
    pass_time(clock, rounds=1)
    assert row(pk).state == "succeeded"


def test_what_a_late_report_tells_of_its_cost_keeps_a_waiting_step_from_being_sent_again(clerk, clock):
    clerk.answers(LOST, Unavailable("later", status=503))
    clerk.sees(absent())
    pk = tried(step("lookup", intervals=(1, 300), attempts=9, max_spend=50))
    pass_time(clock, rounds=4)
    assert (row(pk).state, len(clerk.calls)) == ("failed_retryable", 2)
    report(pk, 1, status="", error_class="rejected", cost=50)
    clock.advance(300)
    sweeping.sweep()
    operation = row(pk)
    assert (operation.state, operation.reason_code, len(clerk.calls)) == ("failed_terminal", "spend_cap", 2)


# Caps: how long it was tried


def test_clean_refusals_for_as_long_as_the_step_may_fail_it(clerk, clock):
    clerk.answers(*[Unavailable("later", status=503)] * 30)
    pk = tried(step(attempts=30, intervals=(60,) * 30, max_elapsed=170))
    pass_time(clock, rounds=10, seconds=61)
    assert (row(pk).state, row(pk).reason_code, len(clerk.calls)) == ("failed_terminal", "time_spent", 3)


def test_a_connection_that_is_refused_from_the_start_reaches_the_cap_too(clerk, clock):
    clerk.answers(*[NotSent("refused")] * 30)
    pk = tried(step(attempts=30, intervals=(60,) * 30, max_elapsed=170))
    pass_time(clock, rounds=10, seconds=61)
    operation = row(pk)
    assert (operation.state, operation.escalation_reason, len(clerk.calls)) == ("failed_retryable", "time_spent", 3)
    assert operation.first_sent_at is None


def test_what_waits_beyond_the_end_of_its_time_is_not_sent_after_it(clerk, clock):
    clerk.answers(Unavailable("later", status=503))
    pk = tried(step(intervals=(300,), max_elapsed=170))
    pass_time(clock, rounds=1, seconds=301)
    assert (row(pk).state, row(pk).reason_code, len(clerk.calls)) == ("failed_terminal", "time_spent", 1)
    assert row(pk).due_at is None


def test_what_was_held_back_until_its_time_was_over_is_not_sent_any_more(clerk, clock):
    clerk.answers(Unavailable("later", status=503))
    pk = tried(step(intervals=(60,), max_elapsed=170))
    put("stop", tenant="acme")
    pass_time(clock, rounds=2, seconds=61)
    assert (row(pk).state, len(clerk.calls)) == ("failed_retryable", 1)
    release(Limit.objects.get())
    pass_time(clock, rounds=2, seconds=61)
    assert (row(pk).state, row(pk).reason_code, len(clerk.calls)) == ("failed_terminal", "time_spent", 1)


def test_a_step_that_must_be_done_goes_to_a_person_when_its_time_ends_while_it_waits(clerk, clock):
    clerk.answers(Unavailable("later", status=503))
    pk = tried(replace(step(intervals=(300,), max_elapsed=170), spent_is_final=False))
    pass_time(clock, rounds=3, seconds=301)
    operation = row(pk)
    assert (operation.state, operation.escalation_reason, len(clerk.calls)) == ("failed_retryable", "time_spent", 1)
    retrying.retry(pk, actor=OLGA, reason="the provider is well again")
    assert row(pk).state == "succeeded"


def test_what_is_proven_absent_goes_to_a_person_when_its_time_ends_while_it_waits(clerk, clock):
    clerk.answers(LOST)
    clerk.sees(absent())
    pk = tried(step("lookup", intervals=(200,), max_elapsed=170))
    pass_time(clock, rounds=6)
    operation = row(pk)
    assert (operation.state, operation.escalation_reason, len(clerk.calls)) == ("failed_retryable", "time_spent", 1)


def test_what_is_unknown_is_not_sent_again_when_its_time_ends_during_the_look_up(clerk, clock, monkeypatch):
    def slow(call):
        clock.advance(120)
        return cannot_tell()

    clerk.answers(LOST)
    monkeypatch.setattr(clerk, "look_up", slow)
    pk = tried(step("unlisted", intervals=(60,), max_elapsed=170))
    pass_time(clock, rounds=1, seconds=61)
    assert (row(pk).state, row(pk).escalated_at, len(clerk.calls)) == ("ambiguous", None, 1)
    pass_time(clock, rounds=1, seconds=61)
    assert (row(pk).state, row(pk).escalation_reason, len(clerk.calls)) == ("ambiguous", "time_spent", 1)


def test_a_late_report_of_success_comes_before_the_end_of_its_time(clerk, clock):
    clerk.answers(Unavailable("later", status=503))
    pk = tried(step(intervals=(300,), max_elapsed=170))
    clock.advance(301)
    report(pk, 1, status="applied", provider_operation_id="r-1")
    sweeping.sweep()
    assert (row(pk).state, len(clerk.calls)) == ("succeeded", 1)


def test_the_time_before_its_first_claim_is_not_the_steps(clerk, clock):
    clerk.answers(Unavailable("later", status=503))
    pk = executor.submit(step(max_elapsed=170), actor=AGENT).pk
    clock.advance(600)
    sweeping.sweep()
    assert row(pk).state == "failed_retryable"
    pass_time(clock, rounds=1)
    assert row(pk).state == "succeeded"


def test_a_lost_answer_that_cost_what_the_step_may_is_not_risked_again(clerk, clock):
    clerk.answers(ACCEPTED)
    clerk.sees(absent())
    pk = tried(step("lookup", max_spend=50))
    pass_time(clock, rounds=6)
    operation = row(pk)
    assert (operation.state, operation.escalation_reason, len(clerk.calls)) == ("failed_retryable", "spend_cap", 1)


@pytest.mark.parametrize("action", ["unlisted", "natural", "read"])
def test_an_unknown_one_whose_spend_is_capped_goes_to_a_person(clerk, clock, action):
    clerk.answers(*[OutcomeUnknown("no answer came", cost=20)] * 9)
    pk = tried(step(action, attempts=9, max_spend=40))
    pass_time(clock, rounds=9)
    assert (row(pk).state, row(pk).escalation_reason, len(clerk.calls)) == ("ambiguous", "spend_cap", 2)


@pytest.mark.parametrize("action", ["unlisted", "natural", "read"])
def test_an_unknown_one_that_was_tried_for_as_long_as_it_may_goes_to_a_person(clerk, clock, action):
    clerk.answers(*[LOST] * 9)
    pk = tried(step(action, attempts=9, intervals=(60, 300, 300), max_elapsed=600))
    pass_time(clock, rounds=70, seconds=10)
    assert (row(pk).state, row(pk).escalation_reason, len(clerk.calls)) == ("ambiguous", "time_spent", 3)


# When it is sent again after an answer that never came


@pytest.fixture
def sent_at(clerk, clock):
    """Seconds from the first call to each later one, as the provider saw them; every call is lost."""
    moments = []

    def lost(call):
        moments.append(clock.now())
        raise LOST

    clerk.answers(*[lost] * 20)
    return lambda: [round((moment - moments[0]).total_seconds()) for moment in moments[1:]]


@pytest.mark.parametrize("action", ["unlisted", "natural", "read"])
def test_what_may_be_repeated_is_repeated_at_the_steps_intervals_and_looked_up_meanwhile(clerk, clock, sent_at, action):
    tried(step(action, attempts=4, intervals=(60, 300, 30)))
    pass_time(clock, rounds=450, seconds=1)
    first, second, third = sent_at()
    assert (60 <= first <= 64, 300 <= second - first <= 304, 30 <= third - second <= 34) == (True, True, True)
    looked = Counter(call.attempt for call in clerk.look_ups)
    assert looked[1] >= 4, "look-ups keep their own schedule: the effect may be there long before a repeat is due"


def test_the_waits_of_repeats_grow_as_those_of_clean_failures_do(clerk, clock, sent_at):
    tried(step("natural", attempts=5, intervals=(10,), factor=2.0, longest=100))
    pass_time(clock, rounds=60, seconds=1)
    first, second, third, fourth = sent_at()
    assert [first, second - first, third - second, fourth - third] == pytest.approx([10, 2, 4, 8], abs=2)


def test_a_person_does_not_wait_for_the_steps_interval(clerk, clock):
    clerk.answers(LOST)
    pk = tried(step("unlisted", intervals=(300,)))
    retrying.retry(pk, actor=OLGA, reason="the provider is well again")
    assert row(pk).state == "succeeded"


def test_automation_cannot_claim_an_unknown_one_before_its_time(clerk, clock):
    clerk.answers(LOST)
    pk = tried(step("unlisted", intervals=(300,)))
    with pytest.raises(transition.NotDue):
        retrying.retry(pk)
    assert len(clerk.calls) == 1


def test_what_is_proven_absent_is_sent_again_at_the_steps_interval(clerk, clock, sent_at):
    clerk.sees(absent())
    pk = tried(step("lookup", intervals=(300,)))
    pass_time(clock, rounds=28, seconds=10)
    assert (row(pk).state, sent_at()) == ("failed_retryable", [])
    pass_time(clock, rounds=5, seconds=10)
    (again,) = sent_at()
    assert 300 <= again <= 320


def test_what_is_proven_absent_when_the_key_will_be_forgotten_before_it_is_due_goes_to_a_person(clerk, clock):
    clerk.answers(LOST)
    clerk.sees(absent())
    pk = tried(step(intervals=(24 * 3600,)))
    pass_time(clock, rounds=6)
    operation = row(pk)
    assert (operation.state, operation.escalation_reason) == ("failed_retryable", "key_forgotten")
    assert operation.same_key_until > clock.now()


def test_what_a_lost_worker_leaves_is_sent_again_at_the_steps_interval(clerk, clock, monkeypatch):
    monkeypatch.setattr(executor, "settle", lambda claim, judged: None)
    clerk.answers(LOST)
    perform(step("unlisted", intervals=(60,)), actor=AGENT)
    monkeypatch.undo()
    pk = executor.Operation.objects.get().pk
    clock.advance(45)
    sweeping.sweep()
    assert (row(pk).state, row(pk).reason_code) == ("ambiguous", "worker_lost")
    pass_time(clock, rounds=1)
    assert len(clerk.calls) == 1
    pass_time(clock, rounds=1)
    assert (row(pk).state, len(clerk.calls)) == ("succeeded", 2)


# Classes that the step never repeats


@pytest.mark.parametrize("error", [LOST, KeyInUse("still at it", status=409)])
@pytest.mark.parametrize("action", ["unlisted", "natural", "read"])
def test_what_a_step_never_repeats_is_looked_up_and_not_sent_again(clerk, clock, error, action):
    clerk.answers(error)
    never = frozenset({ErrorClass.UNKNOWN, ErrorClass.KEY_IN_USE})
    pk = tried(step(action, never=never))
    pass_time(clock, rounds=10)
    assert (row(pk).state, row(pk).escalated_at, len(clerk.calls)) == ("ambiguous", None, 1)
    clerk.sees(found())
    pass_time(clock, rounds=10)
    assert row(pk).state == "succeeded"


def test_what_a_step_never_repeats_fails_once_absence_is_proven(clerk, clock):
    clerk.answers(LOST)
    clerk.sees(absent())
    pk = tried(step("lookup", never=frozenset({ErrorClass.UNKNOWN})))
    pass_time(clock, rounds=6)
    operation = row(pk)
    assert (operation.state, operation.reason_code, len(clerk.calls)) == ("failed_terminal", "absent", 1)


def test_where_a_person_was_called_what_a_step_never_repeats_is_left_to_that_person(clerk, clock):
    clerk.answers(LOST)
    pk = tried(step("lookup", never=frozenset({ErrorClass.UNKNOWN})))
    executor.call_a_person(row(pk), "no_conclusive_answer")
    clerk.sees(absent())
    for _ in range(3):
        clock.advance(61)
        reconciler.reconcile(pk, actor=OLGA)
    sweeping.sweep()
    operation = row(pk)
    assert (operation.state, operation.escalation_reason) == ("failed_retryable", "no_conclusive_answer")
    assert len(clerk.calls) == 1


# Retry-After


@pytest.mark.parametrize(
    "error",
    [OutcomeUnknown("no", status=502, retry_after=120), KeyInUse("still at it", status=409, retry_after=120)],
    ids=["unknown", "key_in_use"],
)
@pytest.mark.parametrize("action", ["unlisted", "natural"])
def test_a_provider_that_asks_for_time_gets_it_although_the_outcome_is_unknown(clerk, clock, error, action):
    clerk.answers(error)
    pk = tried(order(action))
    pass_time(clock, rounds=11, seconds=10)
    assert len(clerk.calls) == 1
    assert len(clerk.look_ups) >= 4, "it is looked up meanwhile"
    pass_time(clock, rounds=2, seconds=10)
    assert (row(pk).state, len(clerk.calls)) == ("succeeded", 2)


def test_a_wait_that_a_refusal_asks_for_holds_while_an_earlier_attempt_is_unknown(clerk, clock):
    clerk.answers(LOST, RateLimited("slow down", status=429, retry_after=120))
    pk = tried(order("unlisted"))
    pass_time(clock, rounds=1, seconds=10)
    assert (row(pk).state, row(pk).reason_code, len(clerk.calls)) == ("ambiguous", "earlier_attempt_unknown", 2)
    pass_time(clock, rounds=11, seconds=10)
    assert len(clerk.calls) == 2
    pass_time(clock, rounds=2, seconds=10)
    assert (row(pk).state, len(clerk.calls)) == ("succeeded", 3)


def test_a_worker_that_tells_late_that_the_provider_asked_for_time(clerk, clock):
    def frozen(call):
        clock.advance(90)
        reconciler.reconcile(executor.Operation.objects.get().pk)
        raise RateLimited("slow down", status=429, retry_after=120)

    clerk.answers(frozen)
    clerk.sees(cannot_tell())
    pk = tried(order())
    sweeping.sweep()
    assert (row(pk).state, row(pk).reason_code) == ("failed_retryable", "late_report")
    pass_time(clock, rounds=11, seconds=10)
    assert len(clerk.calls) == 1
    pass_time(clock, rounds=2, seconds=10)
    assert (row(pk).state, len(clerk.calls)) == ("succeeded", 2)


@pytest.mark.parametrize("wait", ["120", float("nan"), float("inf"), True, -5])
def test_a_wait_that_cannot_be_read_is_none(clerk, clock, wait):
    clerk.answers(OutcomeUnknown("no", status=502, retry_after=wait, cost=5))
    pk = tried(order("unlisted"))
    assert (row(pk).state, row(pk).reason_code, row(pk).cost_minor) == ("ambiguous", "no_answer", 5)
    pass_time(clock, rounds=1, seconds=10)
    assert row(pk).state == "succeeded"
