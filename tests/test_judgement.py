"""What a finding means: each verdict in each situation, and the world's cases end to end."""

import json
from datetime import timedelta

import pytest

from reconciliation import executor, reconciler, retrying, sweeping, workers
from reconciliation.executor import perform
from reconciliation.models import JournalEntry
from reconciliation.providers.base import OutcomeUnknown, Source, Verdict
from tests.scripted import AGENT, OLGA, absent, cannot_tell, found, kinds, order, row, saw

LOST = OutcomeUnknown("no answer came")


@pytest.fixture
def unknown(clerk):
    """An operation whose first attempt got no answer."""

    def make(action="keyed", **parts):
        clerk.answers(LOST)
        pk = perform(order(action, **parts), actor=AGENT).pk
        assert row(pk).state == "ambiguous"
        return pk

    return make


def looked_up(pk):
    reconciler.reconcile(pk)
    return row(pk)


# Found


def test_found_and_equal_succeeds_with_the_providers_id_and_what_it_shows(clerk, unknown):
    pk = unknown()
    clerk.sees(found("r-7"))
    operation = looked_up(pk)
    assert (operation.state, operation.basis, operation.effect_id) == ("succeeded", "look_up", "r-7")
    assert operation.result == {"id": "r-7", "order": "1002", "amount": 4200}


@pytest.mark.parametrize("field", [{"amount": 42}, {"order": "1003"}, {"amount": "4200"}, {"order": "1002 "}])
@pytest.mark.case("C6")
def test_found_but_another_is_a_mismatch_for_a_person(clerk, unknown, field):
    pk = unknown()
    clerk.sees(found(**field))
    operation = looked_up(pk)
    assert (operation.state, operation.escalation_reason, operation.due_at) == ("ambiguous", "mismatch", None)
    with pytest.raises(retrying.NotRetryable, match="could do it twice"):
        retrying.retry(pk, actor=OLGA, reason="again")


def test_found_without_the_compared_fields_is_not_taken_for_ours(clerk, unknown):
    pk = unknown()
    clerk.sees(saw(Verdict.FOUND, provider_operation_id="r-1", observed={"id": "r-1", "order": "1002"}))
    operation = looked_up(pk)
    assert (operation.state, operation.sighted) == ("ambiguous", True)


def test_found_as_the_proof_of_another_operation_goes_to_a_person(clerk, unknown):
    perform(order(step="other"), actor=AGENT)
    pk = unknown()
    clerk.sees(found("r-1"))
    operation = looked_up(pk)
    assert (operation.state, operation.escalation_reason) == ("ambiguous", "effect_claimed_elsewhere")


def test_an_id_that_names_the_target_may_prove_several_operations(clerk, unknown):
    for step in ("one", "two"):
        pk = unknown("natural", step=step)
        clerk.sees(found("ticket-7"))
        assert looked_up(pk).state == "succeeded"


# Seen, and not to be decided by software


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [(Verdict.REMOVED, "removed_since"), (Verdict.SEVERAL, "several_candidates"), (Verdict.MISMATCH, "mismatch")],
)
@pytest.mark.parametrize("action", ["keyed", "lookup", "natural", "none"])
def test_what_was_seen_but_proves_nothing_goes_to_a_person_and_is_never_repeated(
    clerk, clock, unknown, action, verdict, reason
):
    pk = unknown(action)
    clerk.sees(saw(verdict, candidates=tuple({"id": f"r-{n}", "order": "1002"} for n in range(5))))
    operation = looked_up(pk)
    assert (operation.state, operation.escalation_reason, operation.sighted) == ("ambiguous", reason, True)
    data = json.loads(JournalEntry.objects.filter(operation=operation, kind="finding").latest("id").data)
    assert [one["id"] for one in data["candidates"]] == ["r-0", "r-1", "r-2", "r-3", "r-4"]
    clerk.sees(absent())
    for _ in range(4):
        clock.advance(minutes=10)
        sweeping.sweep()
        reconciler.reconcile(pk)
    assert row(pk).state == "ambiguous"
    assert len(clerk.calls) == 1


@pytest.mark.parametrize("sight", [saw(Verdict.IN_PROGRESS), found(order=None)])
def test_a_sighting_is_never_unseen(clerk, clock, unknown, sight):
    pk = unknown("lookup")
    clerk.sees(sight)
    looked_up(pk)
    clerk.sees(absent())
    for _ in range(3):
        clock.advance(minutes=3)
        looked_up(pk)
    assert (row(pk).state, row(pk).sighted) == ("ambiguous", True)
    assert row(pk).escalation_reason in ("seen_before_and_gone", "mismatch")


# Absent


def test_two_complete_spaced_reads_after_the_settling_time_prove_absence_and_one_retry_follows(clerk, clock, unknown):
    pk = unknown("lookup")
    clerk.sees(absent())
    clock.advance(61)
    assert (looked_up(pk).state, row(pk).absent_reads) == ("ambiguous", 1)
    clock.advance(31)
    operation = looked_up(pk)
    assert (operation.state, operation.unknown_attempts, operation.absences) == ("failed_retryable", [], 1)
    sweeping.sweep()
    assert row(pk).state == "succeeded"
    assert [call.attempt for call in clerk.calls] == [1, 2]
    assert len({call.key for call in clerk.calls}) == 1


@pytest.mark.parametrize(
    "sight", [absent(authoritative=False), absent(complete=False), cannot_tell()], ids=["index", "cut", "cannot_tell"]
)
def test_what_is_not_read_to_the_end_of_an_authoritative_source_never_proves_absence(clerk, clock, unknown, sight):
    pk = unknown("lookup")
    clerk.sees(sight)
    for _ in range(20):
        clock.advance(minutes=5)
        sweeping.sweep()
    assert (row(pk).state, row(pk).absent_reads, row(pk).escalation_reason) == ("ambiguous", 0, "no_conclusive_answer")
    assert len(clerk.calls) == 1


@pytest.mark.parametrize("action", ["unlisted", "natural", "none", "read"])
def test_absence_proves_nothing_where_the_action_does_not_say_so(clerk, clock, unknown, action):
    pk = unknown(action)
    clerk.sees(absent())
    clock.advance(minutes=2)
    assert (looked_up(pk).state, row(pk).absent_reads) == ("ambiguous", 0)


@pytest.mark.case("C1")
def test_an_empty_answer_before_the_settling_time_counts_for_nothing(clerk, clock, unknown):
    pk = unknown("lookup")
    clerk.sees(absent())
    for seconds in (2, 8, 20, 29):  # 2, 10, 30 and 59 seconds after the send
        clock.advance(seconds)
        assert (looked_up(pk).state, row(pk).absent_reads) == ("ambiguous", 0)
    clerk.sees(found())
    clock.advance(2)
    assert looked_up(pk).state == "succeeded"


def test_the_settling_time_counts_from_when_the_worker_gave_up_not_from_its_claim(clerk, clock, monkeypatch):
    def slow(call):
        clock.advance(50)  # it may have been sending until now
        return LOST

    clerk.answers(slow)
    pk = perform(order("lookup"), actor=AGENT).pk
    clerk.sees(absent())
    clock.advance(30)
    assert looked_up(pk).absent_reads == 0
    clock.advance(31)
    assert looked_up(pk).absent_reads == 1


def test_two_reads_of_one_moment_are_one_read(clerk, clock, unknown):
    pk = unknown("lookup")
    clerk.sees(absent())
    clock.advance(61)
    looked_up(pk)
    clock.advance(20)
    assert (looked_up(pk).state, row(pk).absent_reads) == ("ambiguous", 1)


def test_the_time_before_the_look_up_counts_not_the_time_after_it(clerk, clock, unknown):
    pk = unknown("lookup")

    def slow(call):
        clock.advance(120)
        return absent()

    clerk.sees(absent())
    clerk.look_up, really = slow, clerk.look_up
    try:
        assert looked_up(pk).absent_reads == 0
    finally:
        clerk.look_up = really


def test_a_second_proven_absence_goes_to_a_person(clerk, clock, unknown):
    pk = unknown("lookup")
    clerk.sees(absent())
    clerk.answers(LOST)
    for _ in range(12):
        clock.advance(45)
        sweeping.sweep()
    assert (row(pk).state, row(pk).escalation_reason, row(pk).absences) == ("failed_retryable", "absent_again", 2)
    assert len(clerk.calls) == 2


# The lost worker


@pytest.fixture
def lost_worker(clerk, clock, monkeypatch):
    """An operation whose worker has fallen silent in the middle of its call; `dead` says what is known of it."""

    def make(action, *, dead):
        workers._known.clear()  # the test before this one emptied the table
        me = workers.me()
        clerk.sees(absent())
        monkeypatch.setattr(executor, "settle", lambda claim, judged: None)
        clerk.answers(LOST)
        perform(order(action), actor=AGENT)
        monkeypatch.undo()
        if dead:
            with reconciler.transition.connections["default"].cursor() as cursor:
                cursor.execute("UPDATE reconciliation_worker SET dead_at = now() WHERE name = %s", [me])
        clock.advance(60)
        sweeping.sweep()
        pk = executor.Operation.objects.get().pk
        assert (row(pk).state, row(pk).reason_code) == ("ambiguous", "worker_lost")
        return pk

    yield make
    workers._known.clear()  # this process goes on living


@pytest.mark.parametrize(("action", "dead", "sent"), [("lookup", False, 1), ("lookup", True, 2), ("keyed", False, 2)])
def test_a_keyless_retry_needs_the_old_worker_known_dead(clerk, clock, lost_worker, action, dead, sent):
    pk = lost_worker(action, dead=dead)
    for _ in range(45):
        clock.advance(45)
        sweeping.sweep()
    assert len(clerk.calls) == sent
    if sent == 1:
        assert (row(pk).state, row(pk).escalation_reason) == ("ambiguous", "old_worker_may_still_send")
    else:
        assert row(pk).state == "succeeded"


def test_after_a_lost_lease_absence_waits_for_the_leases_end_and_the_time_out_too(clerk, clock, lost_worker):
    pk = lost_worker("lookup", dead=True)
    clock.advance(85)  # settles_after 60 s, time-out 30 s
    assert looked_up(pk).absent_reads == 0
    clock.advance(10)
    assert looked_up(pk).absent_reads == 1


# Cannot tell


def test_within_the_retention_the_same_key_is_sent_again(clerk, clock, unknown):
    pk = unknown("unlisted")
    clerk.sees(cannot_tell())
    clock.advance(10)
    sweeping.sweep()
    assert row(pk).state == "succeeded"
    assert len(clerk.calls) == 2
    assert len({call.key for call in clerk.calls}) == 1


def test_after_the_retention_it_is_not(clerk, clock, unknown):
    pk = unknown("unlisted")
    clerk.sees(cannot_tell())
    clock.advance(hours=23, minutes=51)
    sweeping.sweep()
    assert len(clerk.calls) == 1
    with pytest.raises(reconciler.TransitionRefused, match="forgotten"):
        retrying.retry(pk, actor=OLGA, reason="again")
    assert len(clerk.calls) == 1


def test_the_retention_counts_from_the_first_send(clerk, clock, unknown):
    pk = unknown("unlisted")
    first = row(pk).same_key_until
    clerk.answers(LOST)
    clerk.sees(cannot_tell())
    clock.advance(hours=1)
    retrying.retry(pk, actor=OLGA, reason="again")
    assert row(pk).attempts == 2
    assert row(pk).same_key_until == first


def test_a_key_that_was_never_remembered_is_not_sent_again_and_sets_no_deadline(clerk, clock, unknown):
    pk = unknown("forgetful")
    clerk.sees(cannot_tell())
    assert row(pk).escalate_at - row(pk).updated_at >= timedelta(minutes=29)
    for _ in range(10):
        clock.advance(minutes=5)
        sweeping.sweep()
    assert (len(clerk.calls), row(pk).escalation_reason) == (1, "no_conclusive_answer")


def test_a_person_is_called_before_the_provider_forgets_the_key(clerk, clock, unknown):
    clerk.actions["unlisted"] = type(clerk.actions["unlisted"])(
        **{**vars(clerk.actions["unlisted"]), "escalate_after": timedelta(days=7)}
    )
    try:
        pk = unknown("unlisted")
    finally:
        clerk.__init__()
    operation = row(pk)
    assert timedelta(minutes=25) < operation.same_key_until - operation.escalate_at < timedelta(minutes=31)


def test_another_silence_buys_no_more_time(clerk, clock, unknown):
    pk = unknown("unlisted")
    due = row(pk).escalate_at
    clerk.answers(LOST)
    clock.advance(minutes=10)
    clerk.sees(cannot_tell())
    sweeping.sweep()
    assert row(pk).attempts == 2
    assert row(pk).escalate_at == due


@pytest.mark.parametrize("action", ["lookup", "none"])
def test_without_a_key_cannot_tell_never_sends(clerk, clock, unknown, action):
    pk = unknown(action)
    clerk.sees(cannot_tell())
    for _ in range(10):
        clock.advance(minutes=5)
        sweeping.sweep()
    assert (len(clerk.calls), row(pk).escalation_reason) == (1, "no_conclusive_answer")


@pytest.mark.case("D5")
def test_setting_a_value_is_repeated_until_a_newer_one_was_sent(clerk, clock, unknown):
    pk = unknown("natural")
    clerk.sees(cannot_tell())
    clock.advance(10)
    sweeping.sweep()
    assert (row(pk).state, len(clerk.calls)) == ("succeeded", 2)
    old = unknown("natural", step="older")
    perform(order("natural", step="newer"), actor=AGENT)
    sent = len(clerk.calls)
    for _ in range(10):
        clock.advance(minutes=5)
        sweeping.sweep()
    assert (row(old).state, len(clerk.calls)) == ("ambiguous", sent)


def test_where_a_person_was_called_automation_stays_out(clerk, clock, unknown):
    pk = unknown("unlisted")
    clerk.sees(saw(Verdict.SEVERAL))
    looked_up(pk)
    seen = len(clerk.look_ups)
    clock.advance(days=1)
    sweeping.sweep()
    assert len(clerk.look_ups) == seen
    assert row(pk).due_at is None


# The cases, against the sandbox


@pytest.mark.case("C1")
def test_an_index_that_lags_is_not_an_absence(shop, clock):
    shop.mail.set(lag=600)
    shop.mail.fault("reset_after", order="1002")
    request = {"order": "1002", "to": "jane@example.com", "subject": "Sorry", "body": "..."}
    pk = perform(order("message.send", provider="mail", request=request), actor=AGENT).pk
    for seconds in (20, 80, 200, 290):
        clock.advance(seconds)
        shop.mail.advance(seconds)
        operation = looked_up(pk)
        finding = json.loads(JournalEntry.objects.filter(operation=operation, kind="finding").latest("id").data)
        assert (operation.state, finding["verdict"]) == ("ambiguous", "cannot_tell")
    shop.mail.advance(30)
    clock.advance(30)
    assert looked_up(pk).state == "succeeded"
    assert shop.mail.count(order="1002") == len(shop.mail.requests(order="1002")) == 1


REFUND = {"order": "1002", "amount": 4200, "currency": "USD", "card": "4242424242424242"}


@pytest.mark.case("C4")
def test_a_404_to_a_token_that_lost_its_scope_is_no_absence(shop, clock):
    shop.pay.fault("reset_after", order="1002")
    pk = perform(order("refund.create", provider="pay", request=REFUND), actor=AGENT).pk
    shop.pay.set(scope_lost=True)
    for _ in range(3):
        clock.advance(120)
        operation = looked_up(pk)
    assert (operation.absent_reads, operation.state) == (0, "ambiguous")
    shop.pay.set(scope_lost=False)
    assert looked_up(pk).state == "succeeded"
    assert shop.pay.count(order="1002") == 1


@pytest.mark.case("C6")
def test_another_reference_is_a_candidate_and_not_ours(shop, clock):
    shop.pay.plant("refund", order="1002", amount=4200, currency="USD", card="4242424242424242", reference="900619")
    shop.pay.fault("lost", order="1002")
    pk = perform(order("refund.create", provider="pay", request=REFUND), actor=AGENT).pk
    looked = reconciler.reconcile(pk)
    assert looked.finding.verdict is Verdict.ABSENT
    assert [one["reference"] for one in looked.finding.candidates] == ["900619"]
    assert "1 with another reference" in looked.finding.note
    assert row(pk).state == "ambiguous"


@pytest.mark.case("C8")
def test_found_in_the_list_and_removed_since_is_not_found(shop, clock):
    shop.pay.fault("reset_after", order="1002")
    pk = perform(order("refund.create", provider="pay", request=REFUND), actor=AGENT).pk
    (effect,) = shop.pay.effects(order="1002")
    shop.pay.remove(effect["id"])
    clock.advance(120)
    operation = looked_up(pk)
    assert operation.state == "ambiguous"
    assert operation.basis == ""
    for _ in range(5):
        clock.advance(300)
        sweeping.sweep()
    assert shop.pay.count(order="1002") == 1


@pytest.mark.case("A1")
@pytest.mark.parametrize("fault", ["reset_after", "bad_gateway_after", "half_answer", "close_after", "empty_answer"])
def test_an_applied_refund_whose_answer_was_lost_is_found_and_made_once(shop, clock, fault):
    shop.pay.fault(fault, order="1002")
    pk = perform(order("refund.create", provider="pay", request=REFUND), actor=AGENT).pk
    assert row(pk).state == "ambiguous"
    clock.advance(30)
    sweeping.sweep()
    assert (row(pk).state, row(pk).basis) == ("succeeded", "look_up")
    assert shop.pay.count(order="1002") == 1


def test_a_refund_that_never_arrived_is_proven_absent_and_sent_once_more(shop, clock):
    shop.pay.fault("lost", order="1002")
    pk = perform(order("refund.create", provider="pay", request=REFUND), actor=AGENT).pk
    for _ in range(4):
        clock.advance(40)
        sweeping.sweep()
    assert (row(pk).state, row(pk).attempts) == ("succeeded", 2)
    assert shop.pay.count(order="1002") == 1


def test_what_a_look_up_saw_is_in_the_journal_with_its_source(clerk, unknown):
    pk = unknown()
    clerk.sees(found("r-7"))
    looked_up(pk)
    data = json.loads(JournalEntry.objects.get(operation_id=pk, kind="finding").data)
    assert (data["source"], data["compared"]) == (Source.BY_KEY, {"order": "equal", "amount": "equal"})
    assert kinds(pk) == ["attempt_started", "no_answer", "finding"]
