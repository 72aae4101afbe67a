"""Local effects: the row and its settlement are committed together, or neither is."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction

from audit.models import Entry
from reconciliation import approvals, claims, executor, local, reconciler, registry, runs, sweeping, transition
from reconciliation.actors import Actor, Permission
from reconciliation.checks import action_problems
from reconciliation.executor import Disposition, perform
from reconciliation.models import Approval, JournalEntry, LocalEffect, Operation
from reconciliation.providers.base import (
    ActionSpec,
    OutcomeUnknown,
    OwnFault,
    Receipt,
    Rejected,
    Repeat,
    RolledBack,
    Unavailable,
)
from reconciliation.providers.sql import SqlProvider
from reconciliation.states import RunState, State
from reconciliation.workflows import Consent
from tests import book as books
from tests.book import BOOK, ENTRY, Shelf, entry, spec
from tests.database import Clock
from tests.ledger import changes_without_audit
from tests.scripted import AGENT, OLGA, Clerk, identity, kinds, order, row

CLEO = Actor(id="person:3", kind="person", name="ap_cleo", permissions=frozenset(Permission))


def elsewhere(work: Callable[[], Any]) -> Any:
    """Do it in another session, while this one is in the middle of its transaction."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert found, "it waits for a lock that this test holds"
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def told(pk: int) -> str:
    """The sentence of the newest journal entry."""
    newest = JournalEntry.objects.filter(operation_id=pk).latest("id")
    return str(json.loads(newest.data).get("sentence", ""))


def never_unknown() -> bool:
    return not Entry.objects.filter(to_state="ambiguous").exists()


def swept(clock: Clock, pk: int) -> Operation:
    """What becomes of it when its time comes."""
    due = row(pk).due_at
    assert due is not None
    clock.set(due)
    sweeping.sweep()
    return row(pk)


# Together


def test_an_effect_and_its_settlement_are_committed_together(book: Shelf, superuser_connection: Any) -> None:
    outcome = perform(entry(), actor=AGENT)
    operation = row(outcome.pk)
    assert (outcome.state, outcome.disposition, outcome.result) == ("succeeded", "executed", operation.result)
    assert (operation.state, operation.basis, operation.attempts) == ("succeeded", "receipt", 1)
    assert book.rows(reference=operation.key) == 1
    assert kinds(outcome.pk) == ["attempt_started", "receipt"]
    assert changes_without_audit(superuser_connection) == []
    written = "SELECT xmin FROM test_book", "SELECT xmin FROM reconciliation_operation"
    effect, settlement = (superuser_connection.execute(statement).fetchone() for statement in written)
    assert effect == settlement, "one transaction wrote both"


def test_asking_again_does_not_do_it_again(book: Shelf) -> None:
    perform(entry(), actor=AGENT)
    assert perform(entry(), actor=AGENT).disposition is Disposition.REPLAY
    assert book.rows() == 1


@pytest.mark.parametrize("error", [ValueError("bug"), OutcomeUnknown("?"), Unavailable("later"), KeyError("x")])
def test_an_effect_that_raises_leaves_nothing_and_is_tried_again(book: Shelf, clock: Clock, error: Exception) -> None:
    book.does(error)
    outcome = perform(entry(), actor=AGENT)
    assert (outcome.state, book.rows()) == ("failed_retryable", 0)
    assert swept(clock, outcome.pk).state == "succeeded"
    assert book.rows() == 1
    assert never_unknown()


def test_what_it_raised_is_named_without_its_text(book: Shelf) -> None:
    book.does(ValueError("card 4242"))
    pk = perform(entry(), actor=AGENT).pk
    assert (row(pk).error_class, told(pk)) == ("rolled_back", "The effect raised ValueError.")


def test_an_effect_that_says_no_is_over_and_has_left_nothing(book: Shelf) -> None:
    book.does(Rejected("The order is closed."))
    outcome = perform(entry(), actor=AGENT)
    assert (outcome.state, row(outcome.pk).error_class, book.rows()) == ("failed_terminal", "rejected", 0)


def test_its_budget_is_its_own_and_ends(book: Shelf, clock: Clock) -> None:
    book.does(*[ValueError()] * 2)
    pk = perform(entry(attempts=2), actor=AGENT).pk
    assert (swept(clock, pk).state, row(pk).reason_code, book.rows()) == ("failed_terminal", "budget_spent", 0)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (None, "The effect gave no receipt."),
        (Receipt(status="accepted"), "What the effect says it did is not what was asked."),
        (Receipt(observed={"amount": 1}), "What the effect says it did is not what was asked."),
    ],
)
def test_an_answer_that_proves_nothing_is_rolled_back(
    book: Shelf, monkeypatch: Any, answer: Any, sentence: str
) -> None:
    apply = BOOK.apply
    monkeypatch.setattr(BOOK, "apply", lambda call, cursor: (apply(call, cursor), answer)[1])
    outcome = perform(entry("compared"), actor=AGENT)
    assert (outcome.state, book.rows(), told(outcome.pk)) == ("failed_retryable", 0, sentence)


def test_the_database_s_refusals_are_named_by_class_and_code(book: Shelf) -> None:
    book.does(lambda call, cursor: cursor.execute("INSERT INTO test_book (reference) VALUES ('x')"))
    outcome = perform(entry(), actor=AGENT)
    assert told(outcome.pk) == "The database refused it (IntegrityError, 23502)."
    assert book.rows() == 0


def test_what_only_a_person_can_repair_is_held_for_one(book: Shelf) -> None:
    book.does(lambda call, cursor: cursor.execute("SELECT * FROM no_such_table"))
    operation = row(perform(entry(), actor=AGENT).pk)
    assert (operation.state, operation.escalation_reason) == ("failed_retryable", "held")
    assert told(operation.pk) == "The database cannot do what book/enter asks of it, 42P01."


def test_a_constraint_that_the_commit_refuses_rolls_both_back(book: Shelf, clock: Clock) -> None:
    book.does(lambda call, cursor: cursor.execute(
        "INSERT INTO test_book (reference, order_id, amount, slip) VALUES ('x', '1', 1, 'same'), ('x', '1', 1, 'same')"
    ))  # fmt: skip
    outcome = perform(entry(), actor=AGENT)
    assert (outcome.state, book.rows(), kinds(outcome.pk)) == (
        "failed_retryable", 0, ["attempt_started", "not_applied"],
    )  # fmt: skip
    assert swept(clock, outcome.pk).state == "succeeded"
    assert book.rows() == 1


def test_an_id_that_proves_another_operation_already_is_shown_to_a_person(book: Shelf) -> None:
    book.does(lambda call, cursor: books.receipt(call, 7), lambda call, cursor: books.receipt(call, 7))
    perform(entry(), actor=AGENT)
    operation = row(perform(entry(step="again"), actor=AGENT).pk)
    assert (operation.state, operation.escalation_reason, book.rows()) == ("failed_retryable", "held", 1)
    assert told(operation.pk) == "The id that book/enter gave is the proof of another operation already."


# Whose transaction it is


@pytest.mark.parametrize(
    "statement",
    [
        "COMMIT",
        "  -- done\n commit",
        "/* done */ ROLLBACK",
        "ABORT",
        "BEGIN",
        "START TRANSACTION",
        "END",
        "PREPARE TRANSACTION 'x'",
        "SELECT 1; COMMIT",
        "ROLLBACK; INSERT INTO test_book (reference, order_id, amount) VALUES ('x', '1', 1); COMMIT",
    ],
)
def test_business_code_cannot_end_the_transaction_by_a_statement(book: Shelf, statement: str) -> None:
    book.does(lambda call, cursor: cursor.execute(statement))
    operation = row(perform(entry(), actor=AGENT).pk)
    assert (operation.state, operation.escalation_reason, book.rows()) == ("failed_retryable", "held", 0)
    assert told(operation.pk).startswith("book/enter tried to ")
    assert told(operation.pk).endswith("its transaction is ended by its settlement alone.")


def test_a_refusal_that_the_effect_takes_no_notice_of_is_still_one(book: Shelf) -> None:
    def stubborn(call: Any, cursor: Any) -> None:
        with contextlib.suppress(OwnFault):
            cursor.execute("COMMIT")

    book.does(stubborn)
    operation = row(perform(entry(), actor=AGENT).pk)
    assert (operation.state, operation.escalation_reason, book.rows()) == ("failed_retryable", "held", 0)


@pytest.mark.parametrize("ending", [transaction.commit, transaction.rollback])
def test_business_code_cannot_end_it_through_django(book: Shelf, ending: Callable[[], None]) -> None:
    book.does(lambda call, cursor: ending())
    operation = row(perform(entry(), actor=AGENT).pk)
    assert (operation.state, operation.escalation_reason, book.rows()) == ("failed_retryable", "held", 0)
    assert told(operation.pk).startswith("book/enter tried to end its transaction")


def test_the_database_itself_commits_no_effect_without_its_settlement(book: Shelf, clock: Clock) -> None:
    book.does(lambda call, cursor: cursor.connection.commit())  # past Django and past the leash
    outcome = perform(entry(), actor=AGENT)
    assert (outcome.state, book.rows()) == ("failed_retryable", 0)
    assert swept(clock, outcome.pk).state == "succeeded"
    assert book.rows() == 1


def test_an_effect_that_got_out_of_its_transaction_is_a_person_s_and_is_never_repeated(
    book: Shelf, clock: Clock
) -> None:
    def out(call: Any, cursor: Any) -> None:
        cursor.connection.rollback()
        books.write(call, cursor)
        cursor.connection.commit()
        books.write(call, cursor)

    book.does(out)
    operation = row(perform(entry(), actor=AGENT).pk)
    assert (operation.state, operation.escalation_reason) == ("ambiguous", "transaction_left")
    assert book.rows() == 1, "what it committed by itself stands, and nothing proves it"
    clock.advance(days=2)
    sweeping.sweep()
    reconciler.reconcile(operation.pk, actor=OLGA)
    assert (row(operation.pk).state, book.rows(), len(book.calls)) == ("ambiguous", 1, 1)


def test_a_transaction_that_the_effect_marks_for_rollback_is_no_success(book: Shelf) -> None:
    book.does(lambda call, cursor: transaction.set_rollback(True))
    outcome = perform(entry(), actor=AGENT)
    assert (outcome.state, book.rows()) == ("failed_retryable", 0)
    assert told(outcome.pk) == "The effect marked its transaction to be rolled back."


def test_nested_blocks_and_savepoints_are_the_effect_s_own(book: Shelf) -> None:
    def careful(call: Any, cursor: Any) -> None:
        try:
            with transaction.atomic():
                books.write(call, cursor)
                raise LookupError
        except LookupError:
            pass
        cursor.execute("SAVEPOINT mine")
        books.write(call, cursor)
        cursor.execute("ROLLBACK TO SAVEPOINT mine")

    book.does(careful)
    assert perform(entry(), actor=AGENT).state == "succeeded"
    assert book.rows() == 1


def test_a_local_effect_is_applied_by_the_ledger_alone(book: Shelf) -> None:
    call = claims.Call(action="enter", key="k", request=ENTRY, tenant="acme", attempt=1)
    with pytest.raises(OwnFault, match="book/enter is a local effect"), transaction.atomic():
        BOOK.perform(call)
    assert book.rows() == 0


def test_nothing_is_done_inside_a_transaction_of_somebody_else(book: Shelf) -> None:
    with transaction.atomic(), pytest.raises(RuntimeError, match="inside a transaction"):
        perform(entry(), actor=AGENT)
    assert Operation.objects.count() == 0


def test_the_mark_of_the_transaction_never_outlives_it(book: Shelf) -> None:
    book.does(None, ValueError())
    perform(entry(), actor=AGENT), perform(entry(step="again"), actor=AGENT)
    assert LocalEffect.objects.count() == 0


def test_the_fence_does_not_read_the_marks_that_no_vacuum_has_taken_away_yet(
    book: Shelf, superuser_connection: Any
) -> None:
    table = "reconciliation_localeffect"
    superuser_connection.execute(f"ALTER TABLE {table} DISABLE TRIGGER ALL")
    superuser_connection.execute(
        f"INSERT INTO {table} (operation_id, generation) SELECT i, 1 FROM generate_series(1, 20000) i"
    )
    superuser_connection.execute(f"ALTER TABLE {table} ENABLE TRIGGER ALL")
    superuser_connection.execute("DELETE FROM reconciliation_localeffect")
    perform(entry(), actor=AGENT)
    plan = superuser_connection.execute(
        "EXPLAIN DELETE FROM reconciliation_localeffect WHERE operation_id = 7 AND generation = 3"
    ).fetchall()
    assert "local_effect_operation" in str(plan)


def test_the_server_ends_an_effect_that_takes_longer_than_its_lease(book: Shelf, clock: Clock, settings: Any) -> None:
    settings.AFTERCALL_LEASE_MARGIN = 0.3
    book.does(lambda call, cursor: cursor.execute("SELECT pg_sleep(20)"))
    began = time.monotonic()
    outcome = perform(entry("brief"), actor=AGENT)
    assert time.monotonic() - began < 10
    assert (outcome.state, book.rows()) == ("failed_retryable", 0)


def test_the_server_ends_an_effect_that_sleeps_in_its_transaction(book: Shelf, settings: Any) -> None:
    settings.AFTERCALL_LEASE_MARGIN = 0.3
    book.does(lambda call, cursor: threading.Event().wait(1.5))
    outcome = perform(entry("brief"), actor=AGENT)
    assert (outcome.state, book.rows()) == ("failed_retryable", 0)
    assert ", 25P0" in told(outcome.pk), "the server's own time-out of a transaction"


def test_no_effect_begins_when_its_time_is_over(book: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = claimed(entry())
    late = SimpleNamespace(**{**vars(local.policy), "boot_seconds": lambda: claim.send_by})
    monkeypatch.setattr(local, "policy", late)
    outcome = executor.dispatch(claim)
    assert (outcome.state, row(outcome.pk).error_class, book.calls) == ("failed_retryable", "not_sent", [])


# A worker that is lost


def claimed(intent: claims.Intent) -> claims.Claim:
    """A worker that got no further than its claim."""
    provider, promised = registry.provider(intent.provider), registry.spec(intent.provider, intent.action)
    claim = claims.claim_new(claims.row_of(intent, provider, promised), intent, provider, promised, AGENT)
    assert claim is not None
    return claim


def test_a_lease_that_ran_out_proves_that_nothing_was_applied(book: Shelf, clock: Clock) -> None:
    pk = claimed(entry()).subject.pk
    operation = swept(clock, pk)
    assert (operation.state, operation.error_class, operation.generation) == ("failed_retryable", "rolled_back", 2)
    assert (kinds(pk), operation.unknown_attempts, operation.look_ups) == (["attempt_started", "lease_expired"], [], 0)
    assert (swept(clock, pk).state, book.rows()) == ("succeeded", 1)
    assert never_unknown()


def test_lost_workers_spend_the_budget_too(book: Shelf, clock: Clock) -> None:
    pk = claimed(entry(attempts=2)).subject.pk
    swept(clock, pk)
    clock.set(row(pk).due_at)
    claims.claim_again(row(pk), actor=AGENT)
    operation = swept(clock, pk)
    assert (operation.state, operation.reason_code, book.rows()) == ("failed_terminal", "budget_spent", 0)


def test_a_worker_whose_lease_ran_out_commits_nothing_any_more(book: Shelf, clock: Clock) -> None:
    book.does(lambda call, cursor: clock.advance(41))
    outcome = perform(entry(), actor=AGENT)
    assert (outcome.state, book.rows()) == ("failed_retryable", 0)
    assert told(outcome.pk) == transition.StaleGeneration.sentence
    assert (swept(clock, outcome.pk).state, book.rows()) == ("succeeded", 1)


def test_a_worker_that_was_overtaken_in_its_effect_commits_nothing(book: Shelf, clock: Clock) -> None:
    def overtaken(call: Any, cursor: Any) -> None:
        pk = Operation.objects.get().pk
        for _ in range(2):
            elsewhere(lambda: swept(clock, pk))

    book.does(overtaken)
    outcome = perform(entry(), actor=AGENT)
    operation = row(outcome.pk)
    assert (operation.state, operation.attempts, book.rows()) == ("succeeded", 2, 1)
    assert outcome.disposition is Disposition.REPLAY, "it was another's, and its answer is told"
    refused = Entry.objects.get(event="refused")
    assert refused.reason_code == "stale_worker_refused"
    assert "late_report" not in kinds(outcome.pk), "what was rolled back is no evidence of an effect"


def test_what_was_recorded_at_the_claim_counts_and_not_what_is_declared_now(book: Shelf, clock: Clock) -> None:
    pk = claimed(order("none")).subject.pk
    registry.provider("clerk").actions = {"none": spec()}
    try:
        operation = swept(clock, pk)
        assert (operation.state, operation.unknown_attempts) == ("ambiguous", [1]), "that call may have left"
    finally:
        registry.provider("clerk").__init__()


def test_one_that_was_called_unknown_is_known_again_at_the_first_look(book: Shelf, clock: Clock) -> None:
    claim = claimed(entry())
    patch = {"unknown_attempts": [1], "reason_code": "restored"}
    transition.transition(
        claim.subject, to=State.AMBIGUOUS, generation=1, guard=("held",), patch=patch, after={"due_at": 0},
        fact=OLGA.fact("restored"),
    )  # fmt: skip
    operation = swept(clock, claim.subject.pk)
    assert (operation.state, operation.reason_code) == ("failed_retryable", "absent")
    assert (swept(clock, operation.pk).state, book.rows()) == ("succeeded", 1)


@pytest.mark.parametrize("state", ["succeeded", "failed_terminal"])
def test_there_is_nothing_to_look_up(book: Shelf, state: str) -> None:
    book.does(*([Rejected("no")] if state == "failed_terminal" else []))
    pk = perform(entry(), actor=AGENT).pk
    assert row(pk).state == state
    with pytest.raises(reconciler.CannotLookUp, match="commits together with its result"):
        reconciler.reconcile(pk)


# A COMMIT that errors


def errors_at_commit(monkeypatch: pytest.MonkeyPatch, *, landed: bool) -> None:
    plain = type(connection._connections["default"])._commit  # type: ignore[attr-defined]
    failing = iter([True])

    def commit(self: Any) -> Any:
        if self.savepoint_ids or not next(failing, False):
            return plain(self)
        if landed:
            plain(self)
        self.connection.close()
        raise OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(type(connection._connections["default"]), "_commit", commit)  # type: ignore[attr-defined]


def test_a_commit_that_errors_and_landed_is_the_success_that_it_was(book: Shelf, monkeypatch: Any) -> None:
    errors_at_commit(monkeypatch, landed=True)
    outcome = perform(entry(), actor=AGENT)
    assert (outcome.state, outcome.disposition, outcome.replayed) == ("succeeded", "executed", False)
    assert (book.rows(), row(outcome.pk).attempts) == (1, 1)
    assert not Entry.objects.filter(event="refused").exists()


def test_a_commit_that_errors_and_did_not_land_is_tried_again(book: Shelf, clock: Clock, monkeypatch: Any) -> None:
    errors_at_commit(monkeypatch, landed=False)
    outcome = perform(entry(), actor=AGENT)
    assert (outcome.state, book.rows()) == ("failed_retryable", 0)
    assert (swept(clock, outcome.pk).state, book.rows()) == ("succeeded", 1)


def test_a_ledger_that_cannot_be_written_says_nothing_and_the_lease_says_it_later(
    book: Shelf, clock: Clock, monkeypatch: Any, settings: Any, tmp_path: Any
) -> None:
    settings.AFTERCALL_SPOOL = tmp_path

    def away(*_: Any) -> Any:
        raise OperationalError("away")

    with monkeypatch.context() as patched:
        patched.setattr(local, "_write", away)
        outcome = perform(entry(), actor=AGENT)
    assert (outcome.state, outcome.reason_code, book.rows()) == ("pending", "settlement_failed", 0)
    assert list(tmp_path.iterdir()) == [], "a rollback needs no witness"
    assert swept(clock, outcome.pk).state == "failed_retryable"
    assert (swept(clock, outcome.pk).state, book.rows()) == ("succeeded", 1)


# Runs, consent, and what may not be


def start(**input: Any) -> runs.Run:
    return runs.start("posted", tenant="acme", workflow_id="w1", input={**ENTRY, **input}, actor=AGENT)


def test_a_run_that_walks_back_reverses_it_by_another_local_effect(book: Shelf, clerk: Clerk) -> None:
    clerk.answers(Rejected("card refused", status=402))
    run = runs.advance(start().pk)
    while run.state not in (RunState.COMPENSATED, RunState.SUCCEEDED):
        run = runs.advance(run.pk)
    assert (run.state, book.rows(), book.balance()) == ("compensated", 2, 0)


def test_a_run_that_was_cancelled_in_the_middle_of_the_effect_commits_nothing(book: Shelf, clock: Clock) -> None:
    run = start()

    def cancelled(call: Any, cursor: Any) -> None:
        elsewhere(lambda: runs.cancel(run.pk, actor=OLGA, version=runs.Run.objects.get().version, reason="stop"))

    book.does(cancelled)
    runs.advance(run.pk)
    assert (runs.Run.objects.get().state, book.rows()) == ("cancelled", 0)
    operation = swept(clock, Operation.objects.get().pk)
    assert (operation.state, operation.reason_code, book.rows()) == ("failed_terminal", "run_ended", 0)


def test_consent_is_asked_first_and_checked_once_more_in_the_effect_s_transaction(
    book: Shelf, clock: Clock, superuser_connection: Any
) -> None:
    outcome = perform(entry(consent=Consent(policy="every entry")), actor=AGENT)
    assert (outcome.state, book.rows()) == ("awaiting_approval", 0)
    approve(Approval.objects.get())
    book.does(lambda call, cursor: superuser_connection.execute(
        "UPDATE reconciliation_approval SET state = 'denied', use_by = NULL"
    ))  # fmt: skip
    sweeping.sweep()
    assert (row(outcome.pk).state, book.rows()) == ("failed_retryable", 0)
    assert told(outcome.pk) == transition.NotApproved.sentence


def test_what_a_person_agreed_to_is_done_once(book: Shelf) -> None:
    outcome = perform(entry(consent=Consent(policy="every entry")), actor=AGENT)
    approve(Approval.objects.get())
    sweeping.sweep()
    assert (row(outcome.pk).state, book.rows()) == ("succeeded", 1)


def approve(approval: Approval) -> None:
    approvals.approve(approval, SimpleNamespace(version=approval.version, reason="fine", inputs={}), CLEO)


def test_an_adapter_cannot_say_that_it_was_rolled_back(clerk: Clerk) -> None:
    clerk.answers(RolledBack("believe me"))
    assert perform(order("none"), actor=AGENT).state == "ambiguous"


# What is declared


class Elsewhere:
    name, account = "elsewhere", "main"

    def __init__(self, **actions: ActionSpec) -> None:
        self.actions = actions


class LooksUp(SqlProvider):
    name = "looks_up"
    actions = {"act": spec()}

    def look_up(self, call: Any) -> Any: ...


def problems(provider: Any, **promises: Any) -> str:
    return " ".join(action_problems(provider, ActionSpec(**{"repeat": Repeat.LOCAL, **promises})))


def test_a_local_action_needs_a_provider_whose_effects_are_rows_of_this_database() -> None:
    assert "repeat is local, which only a SqlProvider can keep" in problems(Elsewhere())
    assert problems(BOOK) == ""


def test_a_provider_of_this_database_has_local_actions_only() -> None:
    assert "is a SqlProvider, whose effects are local; its repeat must be local" in problems(BOOK, repeat=Repeat.NONE)


@pytest.mark.parametrize(
    "promise",
    [
        {"key_retention": timedelta(days=1)},
        {"same_key_covers_earlier": True},
        {"settles_after": timedelta(seconds=1)},
        {"absence_is_proof": True},
        {"absence_reads": 3},
        {"not_applied": frozenset({409})},
    ],
    ids=lambda promise: next(iter(promise)),
)
def test_what_is_said_of_keys_and_look_ups_makes_no_sense_for_a_local_effect(promise: dict[str, Any]) -> None:
    assert f"{next(iter(promise))} says nothing of a local effect" in problems(BOOK, **promise)


def test_a_local_effect_has_no_look_up_and_an_apply() -> None:
    assert "has a look_up, but there is nothing to look up" in problems(LooksUp())
    assert "defines no apply()" in problems(LooksUp())


def test_the_identity_of_the_cast_is_the_same_for_both(book: Shelf) -> None:
    assert entry().identity == identity(step="enter")
