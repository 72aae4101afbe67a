"""What a step may cost and how long it may be tried: the caps of its policy, and what counts towards them."""

from dataclasses import replace

import pytest

from reconciliation import executor, reconciler, settling, spool, sweeping, transition
from reconciliation.executor import perform
from reconciliation.models import JournalEntry
from reconciliation.policy import RetryPolicy
from reconciliation.providers.base import (
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


# Caps: how long it was tried


def test_clean_refusals_for_as_long_as_the_step_may_fail_it(clerk, clock):
    clerk.answers(*[Unavailable("later", status=503)] * 30)
    pk = tried(step(attempts=30, intervals=(60,) * 30, max_elapsed=170))
    pass_time(clock, rounds=10, seconds=61)
    assert (row(pk).state, row(pk).reason_code, len(clerk.calls)) == ("failed_terminal", "time_spent", 4)


def test_a_connection_that_is_refused_from_the_start_reaches_the_cap_too(clerk, clock):
    clerk.answers(*[NotSent("refused")] * 30)
    pk = tried(step(attempts=30, intervals=(60,) * 30, max_elapsed=170))
    pass_time(clock, rounds=10, seconds=61)
    operation = row(pk)
    assert (operation.state, operation.escalation_reason, len(clerk.calls)) == ("failed_retryable", "time_spent", 4)
    assert operation.first_sent_at is None


def test_the_time_before_its_first_claim_is_not_the_steps(clerk, clock):
    clerk.answers(Unavailable("later", status=503))
    pk = executor.submit(step(max_elapsed=170), actor=AGENT).pk
    clock.advance(600)
    sweeping.sweep()
    assert row(pk).state == "failed_retryable"
    pass_time(clock, rounds=1)
    assert row(pk).state == "succeeded"
