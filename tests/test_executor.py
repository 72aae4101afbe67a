"""perform(): claim, call, settle; and what it says where the operation was submitted before."""

import threading

import psycopg
import pytest
from django.db import OperationalError, connection, transaction

from audit.models import Entry
from reconciliation import (
    claims,
    executor,
    policy,
    prepared,
    reconciler,
    registry,
    retrying,
    settling,
    spool,
    sweeping,
    transition,
)
from reconciliation.executor import Disposition, FingerprintMismatch, LedgerUnavailable, perform
from reconciliation.keys import InvalidField, operation_key
from reconciliation.models import JournalEntry, Operation
from reconciliation.providers.base import NotSent, OutcomeUnknown, Rejected, Unavailable, Verdict
from reconciliation.states import Kind, State, Subject
from tests.ledger import changes_without_audit
from tests.scripted import AGENT, OLGA, absent, applied, identity, kinds, order, row, saw

LOST = OutcomeUnknown("no answer came")
REFUSED = Rejected("card refused", status=402)
DOWN = Unavailable("try later", status=503)


def test_a_success_is_written_with_its_proof_and_its_result(clerk, superuser_connection):
    outcome = perform(order(), actor=AGENT)
    operation = row(outcome.pk)
    assert (outcome.state, outcome.disposition, outcome.replayed) == (State.SUCCEEDED, Disposition.EXECUTED, False)
    assert (operation.state, operation.basis, operation.effect_id) == ("succeeded", "receipt", "r-1")
    assert operation.result == outcome.result == {"id": "r-1", "order": "1002", "amount": 4200, "currency": "USD"}
    assert (operation.attempts, operation.lease_until, operation.claim_nonce) == (1, None, None)
    assert kinds(outcome.pk) == ["attempt_started", "receipt"]
    assert changes_without_audit(superuser_connection) == []


def test_the_adapter_gets_the_stored_key_the_request_in_order_and_a_deadline(clerk):
    perform(order(request={"order": "1002", "currency": "USD", "amount": 4200}), actor=AGENT)
    (call,) = clerk.calls
    assert call.key == operation_key(identity()) == Operation.objects.get().key
    assert list(call.request) == ["amount", "currency", "order"]
    assert call.send_by is not None


@pytest.mark.case("B12")
def test_a_second_submission_is_answered_from_the_ledger_and_says_so(clerk):
    first = perform(order(), actor=AGENT)
    again = perform(order(), actor=AGENT)
    assert (again.disposition, again.replayed, again.result) == (Disposition.REPLAY, True, first.result)
    assert again.at == row(first.pk).settled_at
    assert len(clerk.calls) == 1


@pytest.mark.case("B12")
def test_a_stored_failure_is_told_as_a_stored_one(clerk):
    clerk.answers(REFUSED)
    perform(order(), actor=AGENT)
    again = perform(order(), actor=AGENT)
    assert (again.disposition, again.replayed, again.outcome) == (Disposition.REPLAY, True, "failed")
    assert again.at is not None
    assert len(clerk.calls) == 1


def test_an_unknown_one_waits_and_is_not_sent_again_by_asking(clerk):
    clerk.answers(LOST)
    perform(order("none"), actor=AGENT)
    again = perform(order("none"), actor=AGENT)
    assert (again.state, again.disposition, again.outcome, again.replayed) == ("ambiguous", "wait", "unknown", False)
    assert len(clerk.calls) == 1


def test_a_terminated_one_stays_stopped(clerk):
    clerk.answers(DOWN)
    pk = perform(order(), actor=AGENT).pk
    stop(pk)
    assert perform(order(), actor=AGENT).disposition is Disposition.STOPPED
    assert len(clerk.calls) == 1


@pytest.mark.case("A7")
def test_while_one_is_in_flight_another_submission_is_told_so_and_its_delivery_is_on_record(clerk):
    told = []

    def while_in_flight(call):
        told.append(perform(order(), actor=AGENT))
        return applied("r-1", **call.request)

    clerk.answers(while_in_flight)
    outcome = perform(order(), actor=AGENT)
    assert [(one.state, one.disposition) for one in told] == [("pending", "in_progress")]
    assert outcome.state is State.SUCCEEDED
    assert len(clerk.calls) == 1
    assert kinds(outcome.pk) == ["attempt_started", "delivery_refused", "receipt"]


@pytest.mark.case("A7")
def test_slow_success_pressed_again_is_one_effect_and_a_new_version_is_another(clerk):
    """Submits at once, after the caller's time-out and after the answer; then another amount; then a new intent."""
    first = perform(order(), actor=AGENT)
    assert perform(order(), actor=AGENT).pk == first.pk
    with pytest.raises(FingerprintMismatch):
        perform(order(request={"order": "1002", "amount": 6000, "currency": "USD"}), actor=AGENT)
    assert len(clerk.effects) == 1
    perform(order(intent_version=2), actor=AGENT)
    assert len(set(clerk.effects)) == 2


@pytest.mark.case("B8")
def test_fields_declared_volatile_do_not_make_a_resubmission_another_request(clerk):
    request = {"order": "1002", "amount": 1, "client_attempt_id": "a", "sent_at": "1", "ciphertext": "x"}
    perform(order("noisy", request=request), actor=AGENT)
    again = perform(order("noisy", request={**request, "client_attempt_id": "b", "sent_at": "2"}), actor=AGENT)
    assert again.disposition is Disposition.REPLAY
    assert len(clerk.effects) == 1


@pytest.mark.case("B8")
def test_the_first_accepted_bytes_are_what_is_sent_again(clerk):
    request = {"order": "1002", "amount": 1, "client_attempt_id": "a", "sent_at": "1"}
    clerk.answers(DOWN)
    pk = perform(order("noisy", request=request), actor=AGENT).pk
    due_now(pk)
    perform(order("noisy", request={**request, "client_attempt_id": "b"}), actor=AGENT)
    assert [call.request for call in clerk.calls] == [request, request]


@pytest.mark.case("B6")
def test_two_tenants_with_the_same_names_have_two_operations_and_two_effects(clerk):
    clerk.answers(applied("r-1", order="1002", amount=4200), applied("r-2", order="1002", amount=4200))
    acme = perform(order(tenant="acme"), actor=AGENT)
    beta = perform(order(tenant="beta"), actor=AGENT)
    assert (acme.disposition, beta.disposition) == ("executed", "executed")
    assert len(set(clerk.effects)) == 2


# Another request under a known identity


def stop(pk):
    operation = row(pk)
    fact = OLGA.fact("terminated", reason="enough")
    patch = {"escalated_at": None, "escalation_reason": ""}
    transition.transition(operation.subject, to=State.TERMINATED, version=operation.version, patch=patch, fact=fact)


def due_now(pk):
    operation = row(pk)
    fact = OLGA.fact("retried_early")
    transition.transition(
        operation.subject,
        to=None,
        version=operation.version,
        patch={"not_before": None},
        after={"due_at": 0},
        fact=fact,
    )


def in_state(state, clerk):
    scripts = {
        State.SUCCEEDED: [],
        State.FAILED_RETRYABLE: [DOWN],
        State.FAILED_TERMINAL: [REFUSED],
        State.AMBIGUOUS: [LOST],
        State.TERMINATED: [DOWN],
    }
    clerk.answers(*scripts[state])
    outcome = perform(order(), actor=AGENT)
    if state is State.TERMINATED:
        stop(outcome.pk)
    assert row(outcome.pk).state == state
    return outcome.pk


OTHERS = [
    {"request": {"order": "1002", "amount": 4201, "currency": "USD"}},
    {"action": "lookup"},
    {"provider": "blind", "action": "keyed"},
]


@pytest.mark.case("A7")
@pytest.mark.parametrize("other", OTHERS, ids=["request", "action", "provider"])
@pytest.mark.parametrize("state", ["succeeded", "failed_retryable", "failed_terminal", "ambiguous", "terminated"])
def test_another_request_under_a_known_identity_is_refused_in_every_state(clerk, state, other):
    pk = in_state(State(state), clerk)
    before = (row(pk).version, kinds(pk), len(clerk.calls))
    with pytest.raises(FingerprintMismatch) as refused:
        perform(order(**other), actor=AGENT)
    assert refused.value.stored in str(refused.value)
    assert refused.value.offered in str(refused.value)
    assert (row(pk).version, kinds(pk), len(clerk.calls)) == before
    (entry,) = Entry.objects.filter(event="refused")
    assert (entry.subject, entry.reason_code, entry.actor) == (f"operation:{pk}", "fingerprint_mismatch", AGENT.id)


def test_another_request_is_refused_while_one_is_in_flight(clerk):
    refused = []

    def while_in_flight(call):
        with pytest.raises(FingerprintMismatch):
            perform(order("lookup"), actor=AGENT)
        refused.append(True)
        return applied("r-1", **call.request)

    clerk.answers(while_in_flight)
    assert perform(order(), actor=AGENT).state is State.SUCCEEDED
    assert refused == [True]
    assert len(clerk.calls) == 1


# Rule 9


@pytest.mark.parametrize("script", [[LOST], [LOST, "terminated"]], ids=["ambiguous", "terminated_unknown"])
def test_a_newer_version_is_no_way_round_an_unknown_older_one(clerk, script):
    clerk.answers(LOST)
    pk = perform(order("none"), actor=AGENT).pk
    if "terminated" in script:
        stop(pk)
    with pytest.raises(transition.OlderVersionOpen):
        perform(order("none", intent_version=2), actor=AGENT)
    assert len(clerk.calls) == 1


def test_a_newer_version_is_refused_while_the_older_one_is_in_flight(clerk):
    def while_in_flight(call):
        with pytest.raises(transition.OlderVersionOpen):
            perform(order(intent_version=2), actor=AGENT)
        return applied("r-1", **call.request)

    clerk.answers(while_in_flight)
    assert perform(order(), actor=AGENT).state is State.SUCCEEDED
    assert Operation.objects.count() == 1


def test_a_newer_version_is_refused_while_the_older_one_waits(clerk):
    clerk.answers(DOWN)
    perform(order(), actor=AGENT)
    with pytest.raises(transition.OlderVersionWaiting):
        perform(order(intent_version=2), actor=AGENT)


def test_an_older_version_is_void_once_a_newer_one_exists(clerk):
    perform(order(intent_version=2), actor=AGENT)
    with pytest.raises(transition.NewerVersionExists):
        perform(order(), actor=AGENT)
    assert len(clerk.calls) == 1


@pytest.mark.parametrize("script", [[], [REFUSED]], ids=["succeeded", "failed"])
def test_a_newer_version_of_a_settled_one_is_a_new_operation(clerk, script):
    clerk.answers(*script, applied("r-9", order="1002", amount=4200), applied("r-9", order="1002", amount=4200))
    perform(order(), actor=AGENT)
    assert perform(order(intent_version=2), actor=AGENT).disposition is Disposition.EXECUTED


# What is never sent


def test_nothing_is_performed_inside_a_transaction(clerk):
    with transaction.atomic(), pytest.raises(RuntimeError, match="inside a transaction"):
        perform(order(), actor=AGENT)
    assert clerk.calls == []
    assert Operation.objects.count() == 0


def test_nothing_is_performed_where_a_statement_would_open_a_transaction(clerk):
    transaction.set_autocommit(False)
    try:
        with pytest.raises(RuntimeError, match="inside a transaction"):
            perform(order(), actor=AGENT)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert clerk.calls == []
    assert Operation.objects.count() == 0


def test_no_transaction_is_open_while_the_provider_is_called(clerk):
    seen = []

    def look(call):
        seen.append((connection.in_atomic_block, Operation.objects.get().state))
        return applied("r-1", **call.request)

    clerk.answers(look)
    perform(order(), actor=AGENT)
    assert seen == [(False, "pending")]


@pytest.mark.case("B5")
@pytest.mark.parametrize(
    "request_",
    [[], "text", {"amount": float("nan")}, {"amount": 42.5, "currency": "USD"}, {"amount": 42, "currency": ""}],
)
def test_an_invalid_request_leaves_nothing_behind(clerk, request_):
    with pytest.raises(InvalidField, match=r"^request"):
        perform(order(request=request_), actor=AGENT)
    assert Operation.objects.count() == Entry.objects.count() == JournalEntry.objects.count() == 0
    assert clerk.calls == []


@pytest.mark.parametrize("other", [{"provider": "nobody"}, {"action": "nothing"}])
def test_what_no_provider_offers_is_refused_before_anything_is_written(clerk, other):
    with pytest.raises(registry.Unregistered):
        perform(order(**other), actor=AGENT)
    assert Operation.objects.count() == 0


def test_after_the_send_by_deadline_nothing_is_sent(clerk, monkeypatch):
    clock = iter([100.0, 100.0 + 10.0])
    monkeypatch.setattr(policy, "boot_seconds", lambda: next(clock))
    outcome = perform(order(), actor=AGENT)
    assert clerk.calls == []
    assert (outcome.state, outcome.reason_code) == (State.FAILED_RETRYABLE, "not_sent")


def test_just_before_the_deadline_it_is_sent(clerk, monkeypatch):
    clock = iter([100.0, 100.0 + 9.9])
    monkeypatch.setattr(policy, "boot_seconds", lambda: next(clock))
    assert perform(order(), actor=AGENT).state is State.SUCCEEDED


@pytest.mark.case("D5")
@pytest.mark.parametrize("left", [0, -0.68])
def test_no_time_left_means_no_time_and_not_no_limit(clerk, monkeypatch, left):
    monkeypatch.setattr(claims, "_send_window", lambda spec: left)
    assert perform(order(), actor=AGENT).reason_code == "not_sent"
    assert clerk.calls == []


def test_what_cannot_be_claimed_is_not_sent(clerk, monkeypatch):
    def down(**_):
        raise OperationalError("gone")

    monkeypatch.setattr(transition, "open_operation", down)
    with pytest.raises(LedgerUnavailable, match="nothing was sent"):
        perform(order(), actor=AGENT)
    assert clerk.calls == []


def test_a_claim_whose_commit_errored_is_read_back_by_its_nonce_and_sent_once(clerk, monkeypatch):
    really = transition.open_operation

    def written_but_unheard(**arguments):
        really(**arguments)
        raise OperationalError("the connection is lost")

    monkeypatch.setattr(transition, "open_operation", written_but_unheard)
    assert perform(order(), actor=AGENT).state is State.SUCCEEDED
    assert len(clerk.calls) == 1


# Rule 4: a receipt is evidence first


def failing_settlements(monkeypatch, *errors):
    """The next settlements raise these; None lets one through."""
    really, script = settling._write_settlement, list(errors)

    def write(claim, judged):
        error = script.pop(0) if script else None
        if error is not None:
            raise error
        return really(claim, judged)

    monkeypatch.setattr(settling, "_write_settlement", write)


def test_a_settlement_that_failed_once_is_written_the_second_time(clerk, monkeypatch):
    failing_settlements(monkeypatch, OperationalError("lost"))
    assert perform(order(), actor=AGENT).state is State.SUCCEEDED
    assert len(clerk.calls) == 1


def test_a_settlement_that_was_written_though_its_commit_errored_is_not_written_twice(clerk, monkeypatch):
    really, first = settling._write_settlement, [True]

    def written_but_unheard(claim, judged):
        moved = really(claim, judged)
        if first:
            first.clear()
            raise OperationalError("the connection is lost")
        return moved

    monkeypatch.setattr(settling, "_write_settlement", written_but_unheard)
    outcome = perform(order(), actor=AGENT)
    assert outcome.state is State.SUCCEEDED
    assert kinds(outcome.pk) == ["attempt_started", "receipt"]
    assert not Entry.objects.filter(event="refused").exists()


def test_a_receipt_that_cannot_be_settled_is_journaled_alone_and_later_believed(clerk, monkeypatch, clock):
    failing_settlements(monkeypatch, OperationalError("a"), OperationalError("b"))
    pk = perform(order("none"), actor=AGENT).pk
    assert (row(pk).state, kinds(pk)) == ("pending", ["attempt_started", "late_report"])
    clock.advance(minutes=2)
    sweeping.sweep()
    assert (row(pk).state, row(pk).basis, row(pk).effect_id) == ("succeeded", "receipt", "r-1")
    assert row(pk).result == {"id": "r-1", "order": "1002", "amount": 4200, "currency": "USD"}
    assert len(clerk.calls) == 1


def test_a_receipt_that_cannot_even_be_journaled_is_spooled_sealed_and_comes_in_later(clerk, monkeypatch, clock):
    failing_settlements(monkeypatch, OperationalError("a"), OperationalError("b"))
    really = transition.note
    monkeypatch.setattr(transition, "note", lambda *a, **k: (_ for _ in ()).throw(OperationalError("c")))
    pk = perform(order("none"), actor=AGENT).pk
    (path,) = spool.folder().glob("*.report")
    assert b"r-1" not in path.read_bytes()
    monkeypatch.setattr(transition, "note", really)
    clock.advance(minutes=2)
    assert spool.bring_in() == 1
    sweeping.sweep()
    assert row(pk).state == "succeeded"
    assert not list(spool.folder().glob("*"))


def test_a_report_that_comes_too_late_is_spooled_where_it_cannot_be_journaled(clerk, monkeypatch, clock):
    def slow(call):
        clock.advance(minutes=2)
        reconciler.reconcile(Operation.objects.get().pk)
        monkeypatch.setattr(transition, "note", lambda *a, **k: (_ for _ in ()).throw(OperationalError("c")))
        return applied("r-1", **call.request)

    clerk.answers(slow)
    pk = perform(order("none"), actor=AGENT).pk
    (path,) = spool.folder().glob("*.report")
    monkeypatch.undo()
    assert spool.bring_in() == 1
    assert not path.exists()
    assert kinds(pk)[-1] == "late_report"


def test_a_settlement_whose_audit_row_is_refused_keeps_the_receipt_and_sends_nothing_again(
    clerk, clock, superuser_connection
):
    superuser_connection.execute(
        "CREATE FUNCTION pg_temp.no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.to_state = 'succeeded' THEN"
        " RAISE EXCEPTION 'disk full'; END IF; RETURN NEW; END $$;"
        " CREATE TRIGGER refusing BEFORE INSERT ON audit_entry FOR EACH ROW EXECUTE FUNCTION pg_temp.no()"
    )
    try:
        pk = perform(order("none"), actor=AGENT).pk
        assert (row(pk).state, kinds(pk)) == ("pending", ["attempt_started", "late_report"])
    finally:
        superuser_connection.execute("DROP TRIGGER refusing ON audit_entry")
    clock.advance(minutes=2)
    sweeping.sweep()
    assert row(pk).state == "succeeded"
    assert len(clerk.calls) == 1


@pytest.mark.parametrize("odd", [2**60, float("nan"), "a\x00b", "\ud800", {"deep": {"er": {1, 2}}}, b"x"])
def test_a_receipt_with_values_that_json_cannot_hold_is_kept_all_the_same(clerk, odd):
    clerk.answers(lambda call: applied("r-1", order="1002", amount=4200, odd=odd))
    outcome = perform(order(), actor=AGENT)
    assert (outcome.state, row(outcome.pk).state) == ("succeeded", "succeeded")
    assert "odd" in row(outcome.pk).result


def test_a_number_as_the_providers_id_is_an_id(clerk):
    clerk.answers(applied(2**60, order="1002", amount=4200))
    assert row(perform(order(), actor=AGENT).pk).effect_id == str(2**60)


def test_an_answer_that_is_no_receipt_proves_nothing(clerk):
    clerk.answers({"id": "r-1"})
    assert perform(order(), actor=AGENT).state is State.AMBIGUOUS


def test_what_was_only_read_may_be_read_by_another_operation(clerk):
    seen = applied("T-1", order="1002", amount=4200)
    clerk.answers(seen, seen)
    outcomes = [perform(order("read", workflow_id=name), actor=AGENT) for name in ("monday", "tuesday")]
    assert [outcome.state for outcome in outcomes] == ["succeeded", "succeeded"]


def test_one_effect_at_the_provider_proves_one_operation(clerk):
    perform(order(), actor=AGENT)
    clerk.answers(applied("r-1", order="1002", amount=4200))
    other = row(perform(order(step="refund_again"), actor=AGENT).pk)
    assert (other.state, other.escalation_reason, other.sighted) == ("ambiguous", "effect_claimed_elsewhere", True)


def test_a_settlement_that_the_database_refuses_for_another_reason_ends_in_evidence_not_in_a_loop(clerk, monkeypatch):
    really = settling._write_settlement

    def broken(claim, judged):
        from dataclasses import replace

        return really(claim, replace(judged, patch={**judged.patch, "basis": "no basis"}))

    clerk.answers(LOST)
    monkeypatch.setattr(settling, "_write_settlement", broken)
    pk = perform(order(), actor=AGENT).pk
    assert kinds(pk) == ["attempt_started", "late_report"]


# Due times and budgets


def test_an_early_submission_spends_nothing_and_is_on_record(clerk):
    clerk.answers(DOWN)
    pk = perform(order(), actor=AGENT).pk
    early = perform(order(), actor=AGENT)
    assert (early.disposition, early.outcome, row(pk).attempts) == (Disposition.WAIT, "failed", 1)
    assert kinds(pk)[-1] == "delivery_refused"
    assert len(clerk.calls) == 1


def test_a_due_one_is_sent_by_whoever_submits_it_again(clerk, clock):
    clerk.answers(DOWN)
    perform(order(), actor=AGENT)
    clock.advance(minutes=5)
    assert perform(order(), actor=AGENT).state is State.SUCCEEDED
    assert [call.attempt for call in clerk.calls] == [1, 2]
    assert len({call.key for call in clerk.calls}) == 1


@pytest.mark.case("B12")
@pytest.mark.case("A5")
def test_not_sent_is_never_a_final_result(clerk, clock):
    clerk.answers(*[NotSent("refused connection")] * 3)
    pk = perform(order(), actor=AGENT).pk
    for _ in range(3):
        clock.advance(minutes=30)
        sweeping.sweep()
    operation = row(pk)
    assert (operation.state, operation.escalation_reason, operation.attempts) == ("failed_retryable", "budget_spent", 3)
    assert clerk.effects == []
    retrying.retry(pk, actor=OLGA, reason="the network is back")
    assert row(pk).state == "succeeded"


@pytest.mark.case("A5")
def test_a_reset_after_the_request_left_is_unknown_and_a_keyless_one_is_never_repeated(clerk, clock):
    clerk.answers(LOST)
    pk = perform(order("none"), actor=AGENT).pk
    for _ in range(20):
        clock.advance(minutes=10)
        sweeping.sweep()
    operation = row(pk)
    assert (operation.state, operation.escalation_reason) == ("ambiguous", "no_conclusive_answer")
    assert len(clerk.calls) == 1


@pytest.mark.case("A1")
def test_one_steps_retries_leave_the_budget_of_another_alone(clerk, clock):
    clerk.answers(DOWN, DOWN)
    first = perform(order(), actor=AGENT).pk
    clock.advance(minutes=5)
    perform(order(), actor=AGENT)
    clerk.answers(applied("r-7", order="1002", amount=4200))
    second = perform(order(step="mail"), actor=AGENT).pk
    assert (row(first).attempts, row(second).attempts) == (2, 1)


@pytest.mark.case("A1")
def test_a_pending_row_of_any_age_never_becomes_failed_by_age(clerk, clock, monkeypatch):
    monkeypatch.setattr(executor, "settle", lambda claim, judged: None)  # the worker dies with the answer in hand
    perform(order("none"), actor=AGENT)
    monkeypatch.undo()
    for _ in range(5):
        clock.advance(days=30)
        sweeping.sweep()
    operation = Operation.objects.get()
    assert (operation.state, operation.unknown_attempts) == ("ambiguous", [1])
    assert perform(order("none"), actor=AGENT).disposition is Disposition.WAIT
    assert len(clerk.effects) == 1


def test_a_retry_that_reaches_past_the_keys_retention_is_refused_and_shown(clerk, clock):
    clerk.answers(DOWN)
    pk = perform(order(), actor=AGENT).pk
    clock.advance(hours=23, minutes=55)  # retention is a day, the margin ten minutes
    with pytest.raises(transition.KeyForgotten):
        retrying.retry(pk, actor=OLGA, reason="again")
    sweeping.sweep()
    assert (row(pk).escalation_reason, row(pk).due_at) == ("key_forgotten", None)
    assert len(clerk.calls) == 1


def test_a_natural_action_is_not_repeated_once_a_newer_one_was_sent(clerk, clock):
    clerk.answers(DOWN)
    pk = perform(order("natural"), actor=AGENT).pk
    perform(order("natural", step="newer"), actor=AGENT)
    clock.advance(minutes=30)
    sweeping.sweep()
    assert row(pk).escalation_reason == "newer_sent"
    assert len(clerk.calls) == 2


def test_a_request_that_cannot_be_opened_costs_no_attempt_and_is_shown(clerk, clock, settings):
    from cryptography.fernet import Fernet

    clerk.answers(DOWN)
    pk = perform(
        order(request={"order": "1002", "amount": 4200, "currency": "USD", "card": "4242424242424242"}), actor=AGENT
    ).pk
    settings.AFTERCALL_SEAL_KEYS = [Fernet.generate_key().decode()]
    clock.advance(minutes=5)
    sweeping.sweep()
    assert (row(pk).attempts, row(pk).escalation_reason) == (1, "request_unreadable")


def test_a_due_retry_is_left_to_a_worker_that_has_its_provider(clerk, clock, settings):
    clerk.answers(DOWN, applied("r-1"))
    pk = perform(order(), actor=AGENT).pk
    there, settings.AFTERCALL_PROVIDERS = settings.AFTERCALL_PROVIDERS, []
    registry.forget()
    clock.advance(minutes=5)
    sweeping.sweep()
    assert (row(pk).attempts, row(pk).escalated_at) == (1, None)
    settings.AFTERCALL_PROVIDERS = there
    registry.forget()
    clock.advance(minutes=5)
    sweeping.sweep()
    assert row(pk).state == "succeeded"


def test_a_provider_that_is_no_longer_configured_is_shown(clerk, clock, settings):
    clerk.answers(DOWN)
    pk = perform(order(), actor=AGENT).pk
    settings.AFTERCALL_PROVIDERS = []
    registry.forget()
    clock.advance(hours=2)
    sweeping.sweep()
    assert (row(pk).attempts, row(pk).escalation_reason) == (1, "no_handler")


# Speed


def counted(monkeypatch):
    """What goes to the database from now on, with a cursor (Django's is one of the driver's) or without one."""
    sent = []
    for owner in (psycopg.Cursor, prepared):

        def counting(*args, execute=owner.execute, **options):
            sent.append(args)
            return execute(*args, **options)

        monkeypatch.setattr(owner, "execute", counting)
    return sent


def test_a_first_time_success_is_two_statements_and_two_commits(clerk, superuser_connection, monkeypatch):
    perform(order(step="warm_up"), actor=AGENT)
    clerk.answers(applied("r-2", order="1002", amount=4200))
    versions = (
        "SELECT count(DISTINCT xmin::text) FROM (SELECT xmin FROM audit_entry UNION ALL SELECT xmin FROM "
        "reconciliation_journalentry) AS written"
    )
    before = superuser_connection.execute(versions).fetchone()[0]
    with monkeypatch.context() as patches:
        statements = counted(patches)
        perform(order(), actor=AGENT)
    assert len(statements) == 2, statements
    assert superuser_connection.execute(versions).fetchone()[0] - before == 2


# Many at once


def test_many_callers_of_one_identity_make_one_effect(clerk):
    from django.db import connections

    start, outcomes = threading.Barrier(12), []

    def call():
        start.wait()
        try:
            outcomes.append(perform(order(), actor=AGENT))
        finally:
            connections.close_all()

    threads = [threading.Thread(target=call) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 12
    assert len(clerk.calls) == Operation.objects.count() == 1
    assert sum(one.disposition is Disposition.EXECUTED for one in outcomes) == 1


def test_a_late_success_is_heard_before_anything_is_sent_again(clerk, clock):
    """The operation was called absent; before its retry the lost worker reports that it was applied."""
    clerk.answers(LOST)
    pk = perform(order("lookup"), actor=AGENT).pk
    clerk.sees(absent())
    for seconds in (90, 40):
        clock.advance(seconds)
        reconciler.reconcile(pk)
    assert row(pk).state == "failed_retryable"
    report = transition.Observed(
        kind="late_report", attempt=1, data={"status": "applied", "provider_operation_id": "r-1"}
    )
    transition.note(Subject(Kind.OPERATION, pk), [report], look_soon=True)
    sweeping.sweep()
    assert (row(pk).state, row(pk).basis, row(pk).escalation_reason) == ("succeeded", "receipt", "applied_after_all")
    assert len(clerk.calls) == 1


def test_a_sighting_of_what_was_called_absent_stops_its_retry(clerk, clock):
    clerk.answers(DOWN)
    pk = perform(order("lookup"), actor=AGENT).pk
    clerk.sees(saw(Verdict.REMOVED))
    reconciler.reconcile(pk)
    clock.advance(minutes=30)
    sweeping.sweep()
    assert (row(pk).escalation_reason, row(pk).sighted) == ("removed_since", True)
    with pytest.raises(retrying.NotRetryable):
        retrying.retry(pk, actor=OLGA, reason="again")
    assert len(clerk.calls) == 1
