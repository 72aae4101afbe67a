# ruff: noqa: F811 - a fixture of another file
"""After a restore: a message may have been published and is looked up first; a local effect was lost with its row.

The backup brings back the business's own table too, as it is one database with the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from reconciliation import executor, outbox, publishing, registry, restore, runs, sweeping
from reconciliation.models import JournalEntry, Message, Operation
from tests.book import DESK, Shelf, entry
from tests.database import Clock
from tests.scripted import AGENT, OLGA, Clerk, absent, found, order, row
from tests.test_outbox import put
from tests.test_restore import backup, lose, mark_all, release, restored  # noqa: F401 - a fixture

Take = Callable[[], Any]


def swept(clock: Clock, rounds: int = 6) -> None:
    for _ in range(rounds):
        sweeping.sweep()
        clock.advance(minutes=2)


def wish() -> Any:
    return order(workflow_id="told")


def test_a_message_that_was_published_in_the_lost_time_is_looked_up_and_not_done_again(
    clerk: Clerk, clock: Clock, backup: Take
) -> None:
    put(wish())
    earlier = backup()
    sweeping.sweep()
    assert Operation.objects.get().state == "succeeded"
    restored(earlier)
    sent = len(clerk.calls)
    assert Message.objects.get().state == "waiting", "the backup knows nothing of its operation"
    clerk.sees(found("r-1"))
    swept(clock)
    operation = Operation.objects.get(workflow_id="told")
    assert (Message.objects.get().state, operation.state, operation.basis) == ("published", "succeeded", "look_up")
    assert len(clerk.calls) == sent, "nothing was sent a second time"


def test_one_that_was_not_published_then_is_done_once_when_that_is_proven(
    clerk: Clerk, clock: Clock, backup: Take
) -> None:
    put(wish())
    restored(backup())
    sent = len(clerk.calls)
    clerk.sees(absent())
    swept(clock)
    assert (Operation.objects.get(workflow_id="told").state, len(clerk.calls)) == ("succeeded", sent + 1)


def test_while_the_fence_is_down_messages_become_operations_and_nothing_is_sent(clerk: Clerk, backup: Take) -> None:
    put(wish())
    lose(backup())
    sent = len(clerk.calls)
    for _ in range(3):
        sweeping.sweep()
    assert (Message.objects.get().state, len(clerk.calls)) == ("published", sent)


def test_a_message_that_is_put_anew_after_the_release_is_looked_up_since_the_lost_time_may_have_done_it(
    clerk: Clerk, clock: Clock, backup: Take
) -> None:
    earlier = backup()
    put(wish())
    sweeping.sweep()
    assert Operation.objects.get().state == "succeeded"
    restored(earlier)
    sent = len(clerk.calls)
    clock.advance(5)
    put(wish())  # an upstream delivers its order once more, and business code does what it always does
    clerk.sees(found("r-1"))
    swept(clock)
    operation = Operation.objects.get(workflow_id="told")
    assert (operation.state, operation.basis, len(clerk.calls)) == ("succeeded", "look_up", sent)


def test_the_mail_of_a_local_effect_that_is_done_again_is_looked_up_before_it_goes_out_again(
    book: Shelf, clerk: Clerk, clock: Clock, backup: Take, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tests.book.letter_of", lambda call: order(workflow_id=call.key[:40]))
    pk = executor.submit(entry("tell"), actor=AGENT).pk
    earlier = backup()
    swept(clock, rounds=2)
    assert (row(pk).state, len(clerk.calls)) == ("succeeded", 1)
    restored(earlier)
    sent = len(clerk.calls)
    clerk.sees(found("r-1"))
    swept(clock)
    assert (row(pk).state, book.rows()) == ("succeeded", 1)
    told = Operation.objects.get(provider="clerk", workflow_id=row(pk).key[:40])
    assert (told.state, told.basis, len(clerk.calls)) == ("succeeded", "look_up", sent), "the customer got one mail"


def test_a_message_whose_caller_says_that_it_is_new_is_done_at_once(clerk: Clerk, clock: Clock, backup: Take) -> None:
    restored(backup())
    sent = len(clerk.calls)
    clock.advance(5)
    put(replace(wish(), intended_at=clock.now()))
    clock.advance(1)
    sweeping.sweep()
    assert (Operation.objects.get(workflow_id="told").state, len(clerk.calls)) == ("succeeded", sent + 1)


def test_a_message_is_new_by_itself_when_the_replay_window_is_over(clerk: Clerk, clock: Clock, backup: Take) -> None:
    restored(backup())
    sent = len(clerk.calls)
    clock.advance(days=31)
    restore.tend()
    put(wish())
    sweeping.sweep()
    assert (Operation.objects.get(workflow_id="told").state, len(clerk.calls)) == ("succeeded", sent + 1)


def test_a_message_that_waited_too_long_is_refused_all_the_same_after_a_restore(
    clerk: Clerk, clock: Clock, backup: Take
) -> None:
    pk = put(wish())
    clock.advance(days=400)
    restored(backup())
    sweeping.sweep()
    message = Message.objects.get(pk=pk)
    assert (message.state, message.problem) == ("stuck", "too_old")


def test_a_local_effect_of_the_lost_time_is_lost_with_its_row_and_is_done_again(
    book: Shelf, clerk: Clerk, clock: Clock, backup: Take
) -> None:
    pk = executor.submit(entry(), actor=AGENT).pk
    earlier = backup()
    sweeping.sweep()
    assert (row(pk).state, book.rows()) == ("succeeded", 1)
    lose(earlier)
    assert book.rows() == 0
    mark_all()
    assert row(pk).state == "ambiguous"
    assert release().verdict == "done"
    swept(clock, rounds=3)
    assert (row(pk).state, book.rows()) == ("succeeded", 1)
    assert JournalEntry.objects.filter(operation_id=pk, kind="receipt").count() == 1


def test_one_that_was_done_before_the_backup_stays_done(book: Shelf, clock: Clock, backup: Take) -> None:
    pk = executor.perform(entry(), actor=AGENT).pk
    restored(backup())
    swept(clock, rounds=2)
    assert (row(pk).state, book.rows()) == ("succeeded", 1)


def test_a_new_local_effect_after_the_release_is_done_once(book: Shelf, clock: Clock, backup: Take) -> None:
    """It cannot have been sent before; all the same it is looked up first, which costs one look into the ledger."""
    restored(backup())
    pk = executor.perform(entry(), actor=DESK).pk
    assert (row(pk).state, book.rows()) == ("ambiguous", 0)
    swept(clock, rounds=3)
    assert (row(pk).state, book.rows()) == ("succeeded", 1)
    assert publishing.anything_due() is False


def test_a_step_of_a_run_that_the_backup_held_open_never_becomes_new_by_waiting(
    clerk: Clerk, clock: Clock, backup: Take, settings: Any
) -> None:
    settings.AFTERCALL_WORKFLOWS = ["tests.scripted_workflows.first"]
    registry.forget()
    run = runs.start("damaged_item", tenant="acme", workflow_id="r1", input={"order": "1", "amount": 5}, actor=AGENT)
    earlier = backup()
    assert runs.advance(run.pk).state == "succeeded"
    restored(earlier)
    sent = len(clerk.calls)
    clock.advance(days=31)  # it waits for whatever it waits for
    restore.tend()
    assert restore.keeps_it_open() == "run: 1"
    new = executor.perform(order(workflow_id="new"), actor=AGENT)
    assert new.state == "succeeded", "what the backup does not know is new by then"
    clerk.sees(found("r-1", order="1", amount=0))
    swept(clock)
    label = Operation.objects.get(step="label")
    assert (label.state, label.basis, len(clerk.calls)) == ("succeeded", "look_up", sent + 1)


def test_a_message_that_was_stuck_in_the_backup_never_becomes_new_by_waiting(
    clerk: Clerk, clock: Clock, backup: Take
) -> None:
    pk = put(wish())
    outbox.stick(Message.objects.get(pk=pk), problem="no_handler", detail="", fact=OLGA.fact("no_handler"))
    earlier = backup()
    outbox.release(Message.objects.get(pk=pk), fact=OLGA.fact("message_released"))
    sweeping.sweep()
    assert Operation.objects.get().state == "succeeded"
    restored(earlier)
    sent = len(clerk.calls)
    clock.advance(days=31)
    restore.tend()
    assert restore.keeps_it_open() == "message of the outbox: 1"
    outbox.release(Message.objects.get(pk=pk), fact=OLGA.fact("message_released"))
    clerk.sees(found("r-1"))
    swept(clock)
    told = Operation.objects.get(workflow_id="told")
    assert (told.state, told.basis, len(clerk.calls)) == ("succeeded", "look_up", sent)
    restore.tend()
    assert (restore.keeps_it_open(), restore.replays_until()) == ("", None), "over is what was open, and the window"
