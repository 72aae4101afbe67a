"""reconcile(): look-ups that fail, reports that come late, and look-ups of what is settled."""

import json
from dataclasses import replace

import pytest

from audit.models import Entry
from reconciliation import actions, executor, reconciler, registry, retrying, sweeping, transition
from reconciliation.executor import perform
from reconciliation.models import JournalEntry
from reconciliation.policy import ErrorClass, RetryPolicy
from reconciliation.providers.base import (
    NotSent,
    OutcomeUnknown,
    RateLimited,
    Rejected,
    Unauthorized,
    Unavailable,
    Verdict,
)  # fmt: skip
from reconciliation.reconciler import CannotLookUp
from reconciliation.states import Kind, State, Subject
from reconciliation.transition import LeaseLive, Observed, StaleVersion
from tests.scripted import AGENT, OLGA, absent, applied, cannot_tell, found, kinds, order, row, saw
from tests.test_executor import DOWN, stop

LOST = OutcomeUnknown("no answer came")
REFUSED = Rejected("no", status=402)


def made(clerk, *script, action="keyed"):
    clerk.answers(*script)
    return perform(order(action), actor=AGENT).pk


def report(pk, attempt, **data):
    """What a worker that had lost its claim tells."""
    transition.note(
        Subject(Kind.OPERATION, pk), [Observed(kind="late_report", attempt=attempt, data=data)], look_soon=True
    )


APPLIED = {
    "status": "applied", "provider_operation_id": "r-1", "observed": {"id": "r-1"},
    "compared": {"order": "equal", "amount": "equal"},
}  # fmt: skip


# Late reports


def test_a_late_success_counts_as_found_without_asking_the_provider(clerk):
    pk = made(clerk, LOST)
    report(pk, 1, **APPLIED)
    sweeping.sweep()
    operation = row(pk)
    assert (operation.state, operation.basis, operation.reason_code) == ("succeeded", "receipt", "late_report")
    assert clerk.look_ups == []


def test_a_late_success_by_itself_changes_nothing(clerk):
    pk = made(clerk, LOST)
    before = row(pk).version
    report(pk, 1, **APPLIED)
    assert (row(pk).state, row(pk).version) == ("ambiguous", before)


def test_a_late_failure_speaks_for_its_own_attempt_only(clerk):
    pk = made(clerk, LOST, LOST, action="unlisted")
    reconciler_retry(pk)
    report(pk, 2, error_class="rejected")
    clerk.sees(saw(Verdict.CANNOT_TELL))
    reconciler.reconcile(pk)
    assert (row(pk).state, row(pk).unknown_attempts) == ("ambiguous", [1, 2])


def reconciler_retry(pk):
    executor.attempt_again(row(pk), actor=OLGA, reason="again")


def test_when_every_attempt_is_reported_as_not_applied_that_is_proven(clerk):
    pk = made(clerk, LOST, LOST, action="unlisted")
    reconciler_retry(pk)
    report(pk, 2, error_class="rejected")
    report(pk, 1, error_class="not_sent")
    reconciler.reconcile(pk)
    assert (row(pk).state, row(pk).unknown_attempts) == ("failed_retryable", [])


@pytest.mark.parametrize("error_class", ["rejected", "invalid", "unauthorized"])
def test_a_refusal_for_good_ends_it_although_it_came_late(clerk, error_class):
    pk = made(clerk, LOST)
    report(pk, 1, error_class=error_class)
    sweeping.sweep()
    operation = row(pk)
    assert (operation.state, operation.error_class, operation.reason_code) == (
        "failed_terminal", error_class, error_class,
    )  # fmt: skip
    assert (operation.unknown_attempts, operation.basis, len(clerk.calls), clerk.look_ups) == ([], "", 1, [])


@pytest.mark.parametrize("error_class", ["not_sent", "unavailable", "rate_limited"])
def test_a_refusal_for_now_that_came_late_is_retried_after_a_back_off(clerk, clock, error_class):
    pk = made(clerk, LOST)
    report(pk, 1, error_class=error_class)
    reconciler.reconcile(pk)
    assert row(pk).state == "failed_retryable"
    sweeping.sweep()
    assert len(clerk.calls) == 1
    clock.advance(3)
    sweeping.sweep()
    assert (row(pk).state, len(clerk.calls)) == ("succeeded", 2)


def test_a_late_refusal_of_a_class_that_the_step_never_retries_ends_it(clerk):
    clerk.answers(LOST)
    once = RetryPolicy(never=frozenset({ErrorClass.UNAVAILABLE}))
    pk = perform(replace(order(), retry=once), actor=AGENT).pk
    report(pk, 1, error_class="unavailable")
    sweeping.sweep()
    assert (row(pk).state, row(pk).reason_code) == ("failed_terminal", "unavailable")


@pytest.mark.parametrize(("action", "state"), [("unlisted", "ambiguous"), ("covering", "failed_terminal")])
def test_a_late_refusal_of_attempt_2_ends_it_only_where_the_action_declares_that_it_covers_attempt_1(
    clerk, action, state
):
    pk = made(clerk, LOST, LOST, action=action)
    reconciler_retry(pk)
    report(pk, 2, error_class="rejected")
    clerk.sees(cannot_tell())
    reconciler.reconcile(pk)
    assert (row(pk).state, row(pk).unknown_attempts) == (state, [1, 2] if state == "ambiguous" else [])


def test_a_late_refusal_of_attempt_1_says_nothing_about_attempt_2(clerk):
    pk = made(clerk, LOST, LOST, action="covering")
    reconciler_retry(pk)
    report(pk, 1, error_class="rejected")
    clerk.sees(cannot_tell())
    reconciler.reconcile(pk)
    assert (row(pk).state, row(pk).unknown_attempts) == ("ambiguous", [1, 2])


def test_a_refused_credential_covers_no_earlier_attempt_late_either(clerk):
    pk = made(clerk, LOST, LOST, action="covering")
    reconciler_retry(pk)
    report(pk, 2, error_class="unauthorized")
    clerk.sees(cannot_tell())
    reconciler.reconcile(pk)
    assert (row(pk).state, row(pk).unknown_attempts) == ("ambiguous", [1, 2])


def test_where_a_person_was_called_a_late_refusal_leaves_the_ending_to_that_person(clerk):
    pk = made(clerk, LOST, action="unlisted")
    executor.call_a_person(row(pk), "no_conclusive_answer")
    report(pk, 1, error_class="rejected")
    reconciler.reconcile(pk, actor=OLGA)
    operation = row(pk)
    assert (operation.state, operation.escalation_reason) == ("failed_retryable", "no_conclusive_answer")


def test_what_was_seen_is_not_ended_by_a_late_refusal(clerk, clock):
    pk = made(clerk, LOST)
    clerk.sees(saw(Verdict.IN_PROGRESS))
    reconciler.reconcile(pk)
    report(pk, 1, error_class="rejected")
    reconciler.reconcile(pk)
    assert (row(pk).state, row(pk).sighted) == ("failed_retryable", True)
    clock.advance(3)
    sweeping.sweep()
    assert (row(pk).escalation_reason, len(clerk.calls)) == ("seen_after_all", 1)


def test_a_late_success_that_comes_while_a_late_refusal_is_judged_is_not_called_failed(clerk, monkeypatch):
    pk = made(clerk, LOST)
    report(pk, 1, error_class="rejected")
    judge = reconciler.judge_report

    def reported_meanwhile(evidence):
        report(pk, 1, **APPLIED)
        return judge(evidence)

    monkeypatch.setattr(reconciler, "judge_report", reported_meanwhile)
    with pytest.raises(transition.ReportedApplied):
        reconciler.reconcile(pk)
    monkeypatch.undo()
    assert row(pk).state == "ambiguous"
    sweeping.sweep()
    assert (row(pk).state, row(pk).escalated_at) == ("succeeded", None)


def test_a_late_success_that_is_judged_while_a_person_stops_it_still_counts(clerk, monkeypatch):
    pk = made(clerk, LOST)
    report(pk, 1, **APPLIED)
    judge = reconciler.judge_report

    def stopped_meanwhile(evidence):
        stop(pk)
        return judge(evidence)

    monkeypatch.setattr(reconciler, "judge_report", stopped_meanwhile)
    with pytest.raises(StaleVersion):
        reconciler.reconcile(pk)
    monkeypatch.undo()
    assert row(pk).state == "terminated"
    sweeping.sweep()
    assert (row(pk).state, row(pk).escalation_reason) == ("succeeded", "applied_after_all")


def test_a_late_report_where_no_attempt_is_known_to_be_unknown_proves_nothing(clerk, superuser_connection):
    pk = made(clerk, LOST)
    superuser_connection.execute("UPDATE reconciliation_operation SET unknown_attempts = '{}'")
    report(pk, 1, error_class="rejected")
    clerk.sees(cannot_tell())
    reconciler.reconcile(pk)
    assert row(pk).state == "ambiguous"


def test_a_late_report_of_no_answer_proves_nothing(clerk):
    pk = made(clerk, LOST)
    report(pk, 1, error_class="unknown")
    clerk.sees(cannot_tell())
    reconciler.reconcile(pk)
    assert row(pk).state == "ambiguous"


def stopped_after_proven_absence(clerk, clock):
    """Looked for in vain twice, and then stopped: nothing will be sent any more."""
    pk = made(clerk, LOST, action="lookup")
    clerk.sees(absent())
    for seconds in (90, 40):
        clock.advance(seconds)
        reconciler.reconcile(pk)
    stop(pk)
    return pk


def test_a_worker_that_wakes_up_not_knowing_after_absence_was_proven_is_looked_into(clerk, clock):
    pk = stopped_after_proven_absence(clerk, clock)
    report(pk, 1, error_class="unknown")
    clerk.sees(found("r-1", order="1002", amount=4200))
    sweeping.sweep()
    operation = row(pk)
    assert (operation.state, operation.escalation_reason) == ("succeeded", "applied_after_all")


def test_where_the_look_up_still_sees_nothing_a_person_is_called_once(clerk, clock):
    pk = stopped_after_proven_absence(clerk, clock)
    report(pk, 1, error_class="unknown")
    sweeping.sweep()
    operation = row(pk)
    assert (operation.state, operation.escalation_reason) == ("terminated", "unknown_after_all")
    assert operation.due_at is None, "it is a person's now, and would be handed to workers for ever"
    looked = len(clerk.look_ups)
    clock.advance(600)
    sweeping.sweep()
    assert (len(clerk.look_ups), row(pk).version) == (looked, operation.version)


def test_a_worker_that_wakes_up_knowing_that_it_was_refused_disturbs_nobody(clerk, clock):
    pk = stopped_after_proven_absence(clerk, clock)
    report(pk, 1, error_class="rejected")
    sweeping.sweep()
    assert (row(pk).state, row(pk).escalated_at) == ("terminated", None)


def test_a_late_success_for_something_else_is_shown_to_a_person_and_the_next_look_up_asks_the_provider(clerk):
    pk = made(clerk, LOST)
    report(pk, 1, **{**APPLIED, "compared": {"amount": "differs"}})
    reconciler.reconcile(pk)
    assert (row(pk).state, row(pk).escalation_reason) == ("ambiguous", "mismatch")
    assert clerk.look_ups == []
    clerk.sees(found())
    reconciler.reconcile(pk, actor=OLGA)
    assert len(clerk.look_ups) == 1
    assert row(pk).state == "succeeded"


def test_a_late_success_while_a_newer_attempt_is_in_flight_is_judged_with_its_refusal(clerk, clock):
    """Attempt 1 was called absent; attempt 2 is refused, since attempt 1 was applied after all."""
    pk = made(clerk, LOST, action="lookup")
    clerk.sees(absent())
    for seconds in (90, 40):
        clock.advance(seconds)
        reconciler.reconcile(pk)
    assert row(pk).state == "failed_retryable"

    def reported_meanwhile(call):
        report(pk, 1, **APPLIED)
        return REFUSED

    clerk.answers(reported_meanwhile)
    sweeping.sweep()
    assert row(pk).state == "ambiguous"
    sweeping.sweep()
    assert (row(pk).state, row(pk).effect_id) == ("succeeded", "r-1")


@pytest.mark.case("D1")
def test_a_worker_that_wakes_after_its_lease_writes_nothing_but_a_report(clerk, clock):
    def frozen(call):
        clock.advance(90)
        reconciler.reconcile(executor.Operation.objects.get().pk)
        return applied("r-1", **call.request)

    clerk.answers(frozen)
    clerk.sees(cannot_tell())
    outcome = perform(order("none"), actor=AGENT)
    operation = row(outcome.pk)
    assert (outcome.state, operation.state, operation.basis) == ("ambiguous", "ambiguous", "")
    assert kinds(outcome.pk) == ["attempt_started", "lease_expired", "finding", "late_report"]
    refused = Entry.objects.get(event="refused")
    assert refused.reason_code == "stale_worker_refused"
    sweeping.sweep()
    assert (row(outcome.pk).state, row(outcome.pk).basis) == ("succeeded", "receipt")
    assert len(clerk.calls) == 1


@pytest.mark.case("D1")
def test_a_worker_that_wakes_while_another_is_at_it_settles_nothing_for_the_other(clerk, clock):
    taken = []

    def frozen(call):
        clock.advance(90)
        pk = executor.Operation.objects.get().pk
        reconciler.reconcile(pk)
        taken.append(executor.claim_again(row(pk), actor=OLGA))
        return REFUSED

    clerk.answers(frozen)
    clerk.sees(cannot_tell())
    outcome = perform(order("unlisted"), actor=AGENT)
    operation = row(outcome.pk)
    assert (outcome.state, operation.state, operation.generation) == ("pending", "pending", 3)
    assert kinds(outcome.pk)[-2:] == ["attempt_started", "late_report"]
    assert executor.dispatch(taken[0]).state is State.SUCCEEDED


@pytest.mark.case("D1")
@pytest.mark.parametrize("seconds", [0, 30])
def test_a_heartbeat_after_the_lease_or_of_another_generation_is_refused(clerk, clock, seconds):
    told = {}

    def beating(call):
        operation = executor.Operation.objects.get()
        beat = {"seconds": 40, "longest": 900}
        told["live"] = transition.heartbeat(operation.subject, generation=1, **beat)
        told["stale"] = transition.heartbeat(operation.subject, generation=0, **beat)
        clock.advance(seconds + 41)
        told["late"] = transition.heartbeat(operation.subject, generation=1, **beat)
        return applied("r-1", **call.request)

    clerk.answers(beating)
    perform(order(), actor=AGENT)
    assert told["live"] is not None
    assert told["stale"] is told["late"] is None


@pytest.mark.case("D1")
def test_no_heartbeat_carries_a_lease_beyond_the_actions_longest_duration(clerk, clock):
    def beating(call):
        operation = executor.Operation.objects.get()
        until = transition.heartbeat(operation.subject, generation=1, seconds=10_000, longest=900)
        assert (until - operation.last_sent_at).total_seconds() == 900
        return applied("r-1", **call.request)

    clerk.answers(beating)
    assert perform(order(), actor=AGENT).state is State.SUCCEEDED


@pytest.mark.case("D3")
@pytest.mark.parametrize("skew", [25, -25, -3600])
def test_only_the_databases_clock_ends_a_lease(clerk, clock, monkeypatch, skew):
    import time

    really = time.time

    def during(call):
        monkeypatch.setattr(time, "time", lambda: really() + skew)
        with pytest.raises(LeaseLive):
            reconciler.reconcile(executor.Operation.objects.get().pk)
        return applied("r-1", **call.request)

    clerk.answers(during)
    outcome = perform(order(), actor=AGENT)
    assert outcome.state is State.SUCCEEDED
    assert abs((row(outcome.pk).settled_at - clock.now()).total_seconds()) < 5


@pytest.mark.case("D5")
def test_an_expired_claim_becomes_unknown_and_is_found_never_sent_again(clerk, clock, monkeypatch):
    monkeypatch.setattr(executor, "settle", lambda claim, judged: None)
    perform(order("none"), actor=AGENT)
    monkeypatch.undo()
    pk = executor.Operation.objects.get().pk
    with pytest.raises(LeaseLive):
        reconciler.reconcile(pk)
    clock.advance(60)
    clerk.sees(found())
    sweeping.sweep()
    assert row(pk).state == "succeeded"
    assert len(clerk.effects) == 1


def lost(clock, monkeypatch, action, provider):
    """The operation of a worker that was killed after its claim, when its lease is over and the sweep has come."""
    monkeypatch.setattr(executor, "settle", lambda claim, judged: None)
    perform(order(action, provider=provider), actor=AGENT)
    monkeypatch.undo()
    clock.advance(60)
    sweeping.sweep()
    return executor.Operation.objects.get()


@pytest.mark.case("D5")
def test_a_lost_worker_that_nobody_can_ask_about_goes_to_a_person_at_once(clerk, clock, monkeypatch):
    operation = lost(clock, monkeypatch, "none", "blind")
    assert (operation.state, operation.reason_code) == ("ambiguous", "worker_lost")
    assert (operation.escalation_reason, operation.due_at) == ("nothing_can_find_out", None)
    assert operation.escalated_at is not None
    assert len(clerk.calls) == 1


@pytest.mark.parametrize(("action", "provider"), [("none", "clerk"), ("keyed", "blind"), ("lookup", "clerk")])
def test_a_lost_worker_of_what_can_be_asked_about_or_repeated_waits_for_that(
    clerk, clock, monkeypatch, action, provider
):
    operation = lost(clock, monkeypatch, action, provider)
    assert (operation.escalated_at, operation.escalation_reason) == (None, "")


@pytest.mark.parametrize("action", ["keyed", "natural", "read"])
def test_where_nobody_can_be_asked_it_is_repeated_and_nothing_is_called_a_finding(clerk, clock, action):
    policy = RetryPolicy(intervals=(120,), jitter=0.0)
    clerk.answers(OutcomeUnknown("no answer came"))
    pk = perform(replace(order(action, provider="blind"), retry=policy), actor=AGENT).pk
    for _ in range(11):
        clock.advance(10)
        sweeping.sweep()
    told = Entry.objects.filter(subject=f"operation:{pk}").order_by("id").values_list("reason_code", flat=True)
    assert (len(clerk.calls), list(told)) == (1, ["claimed", "no_answer", "nobody_to_ask"])
    clock.advance(15)
    sweeping.sweep()
    assert (row(pk).state, len(clerk.calls), "finding" in kinds(pk)) == ("succeeded", 2, False)


def test_where_nobody_can_be_asked_a_person_is_called_when_its_attempts_are_used_up(clerk, clock):
    clerk.answers(*[OutcomeUnknown("no answer came")] * 9)
    pk = perform(order("read", provider="blind"), actor=AGENT).pk
    for _ in range(30):
        clock.advance(10)
        sweeping.sweep()
    assert (row(pk).state, row(pk).escalation_reason, len(clerk.calls)) == ("ambiguous", "nothing_can_find_out", 3)
    assert "finding" not in kinds(pk)
    preview = next(one for one in actions.previews(row(pk), actor=OLGA) if one.action == "look_up")
    assert (preview.allowed, preview.why) == (False, "blind offers no look-up, so nobody can be asked from here.")
    assert retrying.retry(pk, actor=OLGA, reason="it is well again").state == "ambiguous"
    assert len(clerk.calls) == 4


def test_a_doubtful_report_about_a_stopped_one_is_looked_into_once_where_nobody_can_be_asked(clerk, clock, monkeypatch):
    operation = lost(clock, monkeypatch, "none", "blind")
    transition.transition(
        operation.subject, to="terminated", version=operation.version, fact=OLGA.fact("stopped", reason="no use")
    )
    report(operation.pk, 1, error_class="unknown")
    sweeping.sweep()
    assert row(operation.pk).escalation_reason == "unknown_after_all"
    assert not reconciler.contradicted(row(operation.pk))


def test_the_late_report_of_a_worker_that_nobody_could_ask_about_clears_the_mark(clerk, clock, monkeypatch):
    operation = lost(clock, monkeypatch, "none", "blind")
    report(operation.pk, 1, **APPLIED)
    sweeping.sweep()
    operation = row(operation.pk)
    assert (operation.state, operation.reason_code, operation.escalated_at) == ("succeeded", "late_report", None)


def test_the_late_refusal_of_a_worker_that_nobody_could_ask_about_ends_it_and_clears_the_mark(
    clerk, clock, monkeypatch
):
    operation = lost(clock, monkeypatch, "none", "blind")
    report(operation.pk, 1, error_class="rejected")
    sweeping.sweep()
    operation = row(operation.pk)
    assert (operation.state, operation.reason_code, operation.escalated_at) == ("failed_terminal", "rejected", None)


# Look-ups that the provider puts off


SLOW_DOWN = RateLimited("slow down", status=429, retry_after=120)


def test_a_provider_that_asks_for_time_is_not_looked_up_before(clerk, clock):
    pk = made(clerk, LOST)
    clerk.sees(SLOW_DOWN, found())
    for _ in range(12):
        clock.advance(10)
        sweeping.sweep()
    assert (len(clerk.look_ups), row(pk).state) == (1, "ambiguous")
    assert "It asks to wait 120 s." in JournalEntry.objects.get(operation=pk, kind="finding").data
    clock.advance(15)
    sweeping.sweep()
    assert (len(clerk.look_ups), row(pk).state) == (2, "succeeded")


def test_a_person_is_not_kept_from_looking_by_the_time_that_a_provider_asked_for(clerk, clock):
    pk = made(clerk, LOST)
    clerk.sees(SLOW_DOWN, found())
    clock.advance(10)
    sweeping.sweep()
    assert reconciler.reconcile(pk, actor=OLGA).operation.state == "succeeded"


def test_news_of_it_does_not_cut_short_the_time_that_its_provider_asked_for(clerk, clock):
    pk = made(clerk, LOST)
    clerk.sees(SLOW_DOWN, found())
    clock.advance(10)
    sweeping.sweep()
    report(pk, 1, error_class="unknown")
    sweeping.sweep()
    assert (len(clerk.look_ups), row(pk).state) == (1, "ambiguous")
    clock.advance(121)
    sweeping.sweep()
    assert (len(clerk.look_ups), row(pk).state) == (2, "succeeded")


def test_what_may_be_repeated_is_looked_up_first_after_the_time_that_its_provider_asked_for(clerk, clock):
    clerk.answers(LOST)
    clerk.sees(SLOW_DOWN, cannot_tell())
    pk = perform(replace(order("unlisted"), retry=RetryPolicy(intervals=(30,), jitter=0.0)), actor=AGENT).pk
    for _ in range(12):
        clock.advance(10)
        sweeping.sweep()
    assert (len(clerk.look_ups), len(clerk.calls)) == (1, 1)
    clock.advance(15)
    sweeping.sweep()
    assert (len(clerk.look_ups), len(clerk.calls), row(pk).state) == (2, 2, "succeeded")


def test_a_person_is_called_in_time_whatever_time_a_provider_asks_for(clerk, clock):
    pk = made(clerk, LOST)
    clerk.sees(RateLimited("slow down", status=429, retry_after=86400))
    clock.advance(10)
    sweeping.sweep()
    clock.advance(minutes=30)
    sweeping.sweep()
    assert (row(pk).escalation_reason, len(clerk.look_ups)) == ("no_conclusive_answer", 1)


@pytest.mark.parametrize("wait", ["120", float("nan"), float("inf"), True, -5, None])
def test_a_time_that_cannot_be_read_puts_no_look_up_off(clerk, clock, wait):
    pk = made(clerk, LOST)
    clerk.sees(RateLimited("slow down", status=429, retry_after=wait), found())
    for _ in range(3):
        clock.advance(10)
        sweeping.sweep()
    assert row(pk).state == "succeeded"


# Look-ups that fail


@pytest.mark.parametrize(
    "failure",
    [
        Unauthorized("no", status=401),
        Unavailable("later", status=503),
        NotSent("refused"),
        ValueError("password=hunter2"),
        {"verdict": "found"},
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_look_up_that_fails_is_cannot_tell_and_comes_again(clerk, failure):
    pk = made(clerk, LOST, action="none")
    clerk.sees(failure)
    looked = reconciler.reconcile(pk)
    assert looked.finding.verdict is Verdict.CANNOT_TELL
    assert (row(pk).state, row(pk).look_ups) == ("ambiguous", 1)
    assert row(pk).due_at is not None
    assert "hunter2" not in JournalEntry.objects.get(kind="finding").data


def test_a_look_up_with_values_that_json_cannot_hold_is_kept(clerk):
    pk = made(clerk, LOST)
    clerk.sees(found(size=2**60, odd="a\x00b", bad="\ud800", nan=float("nan")))
    reconciler.reconcile(pk)
    assert row(pk).state == "succeeded"


def test_without_its_provider_an_operation_is_still_watched_and_then_shown(clerk, clock, settings):
    pk = made(clerk, LOST)
    settings.AFTERCALL_PROVIDERS = []
    registry.forget()
    for _ in range(20):
        clock.advance(minutes=5)
        sweeping.sweep()
    assert (row(pk).state, row(pk).escalation_reason) == ("ambiguous", "no_handler")


@pytest.fixture
def expired_elsewhere(clerk, clock, monkeypatch, settings):
    """An operation whose worker was lost, found by a process that does not have its provider."""
    monkeypatch.setattr(executor, "settle", lambda claim, judged: None)
    perform(order(), actor=AGENT)
    pk = executor.Operation.objects.get().pk
    there, settings.AFTERCALL_PROVIDERS = settings.AFTERCALL_PROVIDERS, []
    registry.forget()
    clock.advance(60)
    sweeping.sweep()
    assert (row(pk).state, row(pk).escalated_at) == ("ambiguous", None)
    return pk, there


def test_an_expired_claim_is_left_to_a_worker_that_has_its_provider(expired_elsewhere, clerk, clock, settings):
    pk, settings.AFTERCALL_PROVIDERS = expired_elsewhere
    registry.forget()
    clerk.sees(found("r-1", amount=4200))
    clock.advance(minutes=5)
    sweeping.sweep()
    assert row(pk).state == "succeeded"


def test_an_expired_claim_whose_provider_nobody_has_goes_to_a_person_in_the_end(expired_elsewhere, clock):
    pk, _ = expired_elsewhere
    for _ in range(20):
        clock.advance(minutes=5)
        sweeping.sweep()
    assert (row(pk).state, row(pk).escalation_reason) == ("ambiguous", "no_handler")


def test_a_request_that_cannot_be_opened_does_not_end_the_look_ups(clerk, clock, settings):
    from cryptography.fernet import Fernet

    clerk.answers(LOST)
    pk = perform(order(request={"order": "1002", "amount": 4200, "currency": "USD", "card": "4242"}), actor=AGENT).pk
    settings.AFTERCALL_SEAL_KEYS = [Fernet.generate_key().decode()]
    for _ in range(20):
        clock.advance(minutes=5)
        sweeping.sweep()
    assert (row(pk).state, row(pk).escalation_reason) == ("ambiguous", "no_conclusive_answer")


def test_a_look_up_on_a_page_that_is_out_of_date_is_refused(clerk):
    pk = made(clerk, LOST)
    with pytest.raises(StaleVersion):
        reconciler.reconcile(pk, version=row(pk).version - 1)
    assert clerk.look_ups == []


def test_what_was_never_sent_cannot_be_looked_up(clerk, superuser_connection):
    pk = made(clerk, DOWN)
    superuser_connection.execute("UPDATE reconciliation_operation SET attempts = 0, state = 'ready'")
    with pytest.raises(CannotLookUp, match="Nothing was ever sent"):
        reconciler.reconcile(pk)


def test_a_move_meanwhile_keeps_what_the_look_up_saw(clerk):
    pk = made(clerk, LOST)

    def terminated_meanwhile(call):
        stop(pk)
        return found()

    clerk.look_up, really = terminated_meanwhile, clerk.look_up
    try:
        with pytest.raises(StaleVersion):
            reconciler.reconcile(pk)
    finally:
        clerk.look_up = really
    assert row(pk).state == "terminated"
    assert kinds(pk)[-1] == "finding"


# What is settled


def test_a_look_up_of_a_success_is_evidence_and_changes_nothing(clerk):
    pk = made(clerk)
    before = row(pk).version
    clerk.sees(absent())
    looked = reconciler.reconcile(pk, actor=OLGA)
    assert (looked.moved, row(pk).state, row(pk).version) == (False, "succeeded", before)
    assert kinds(pk)[-1] == "finding"


@pytest.mark.parametrize("ending", ["failed_terminal", "terminated", "failed_retryable"])
@pytest.mark.parametrize("how", ["look_up", "report"])
def test_a_proof_of_what_was_called_not_applied_is_believed_and_loud(clerk, ending, how):
    pk = made(clerk, {"failed_terminal": REFUSED, "terminated": LOST, "failed_retryable": DOWN}[ending])
    if ending == "terminated":
        stop(pk)
    if how == "report":
        report(pk, 1, **APPLIED)
        sweeping.sweep()
    else:
        clerk.sees(found())
        reconciler.reconcile(pk)
    operation = row(pk)
    assert (operation.state, operation.escalation_reason) == ("succeeded", "applied_after_all")
    assert operation.escalated_at is not None
    assert len(clerk.calls) == 1


@pytest.mark.parametrize("sight", [absent(), cannot_tell()])
def test_a_look_up_that_sees_nothing_leaves_what_is_settled_alone(clerk, sight):
    pk = made(clerk, REFUSED)
    before = row(pk).version
    clerk.sees(sight)
    reconciler.reconcile(pk)
    assert (row(pk).state, row(pk).version) == ("failed_terminal", before)


def test_the_audit_row_of_a_look_up_names_its_evidence(clerk):
    pk = made(clerk, LOST)
    clerk.sees(found())
    reconciler.reconcile(pk, actor=OLGA)
    body = Entry.objects.filter(subject=f"operation:{pk}").latest("id").body
    assert (body["actor"], body["details"]["verdict"], len(body["evidence"])) == ("person:1", "found", 64)
    assert json.dumps(body).count("Olga") == 0
