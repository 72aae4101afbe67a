"""The restore fence: a ledger that has forgotten something is noticed before anything is sent."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.db import connections, transaction

from audit import log, verify
from audit.models import Entry
from reconciliation import anchor, claims, executor, fence, registry, restore, runs, tasks, transition, watch
from reconciliation.actors import Permission
from reconciliation.models import Limit, Operation, RestoreFence, Signal, Tick
from reconciliation.states import State
from tests import database, timetable
from tests.backups import Backup
from tests.cast import operation
from tests.ledger import changes_without_audit
from tests.processes import wait_until
from tests.scripted import AGENT, OLGA, Clerk, order, row


@pytest.fixture
def backup(superuser_connection: Any) -> Iterator[Callable[[], Backup]]:
    """Takes a backup of the database as it is when it is called."""
    taken: list[Backup] = []

    def take() -> Backup:
        taken.append(Backup(superuser_connection))
        return taken[-1]

    yield take
    for each in taken:
        each.drop()


def perform(number: int = 1, **parts: Any) -> executor.Outcome:
    return executor.perform(order(workflow_id=f"w{number}", **parts), actor=AGENT)


def known() -> anchor.Known:
    found = anchor.current().read()
    assert found is not None
    return found


def down() -> str:
    """Why the fence is down; empty where it is not."""
    now = fence.current()
    return now.reason if now is not None and now.is_down else ""


# The first start


def test_a_fresh_ledger_is_anchored_and_nothing_is_held_back(clerk: Clerk) -> None:
    assert perform().state == State.SUCCEEDED
    assert (known().database, known().pending, down()) == (str(RestoreFence.objects.get().database), "", "")


@pytest.mark.parametrize("died", ["before the database", "after the database"])
def test_a_first_start_that_was_killed_in_between_is_completed(
    clerk: Clerk, superuser_connection: Any, died: str
) -> None:
    name = str(RestoreFence.objects.get().database)
    anchor.current().write(anchor.Known(database="", pending=name))
    if died == "before the database":
        superuser_connection.execute("DELETE FROM reconciliation_restorefence")
    fence.forget()
    assert perform().state == State.SUCCEEDED
    assert (known().database, down()) == (name, "")


def test_many_that_make_their_first_claim_at_the_same_moment_do_not_bring_the_fence_down(
    clerk: Clerk, superuser_connection: Any
) -> None:
    """One read "no anchor" while another was writing it and had claimed already: decided under one lock."""
    for turn in range(12):
        superuser_connection.execute("DELETE FROM reconciliation_restorefence")
        superuser_connection.execute("SET session_replication_role = replica")
        superuser_connection.execute("DELETE FROM reconciliation_operation; DELETE FROM reconciliation_journalentry")
        superuser_connection.execute("RESET session_replication_role")
        database.weigh_anchor()
        crowd, barrier = 8, threading.Barrier(8)
        faults: list[BaseException] = []

        def first_claim(number: int, turn: int = turn, barrier: Any = barrier, faults: Any = faults) -> None:
            try:
                connections["default"].ensure_connection()
                barrier.wait()
                perform(1000 * turn + number, business_object=f"order-{turn}-{number}")
            except BaseException as error:
                faults.append(error)
            finally:
                connections.close_all()

        threads = [threading.Thread(target=first_claim, args=(number,)) for number in range(crowd)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults
        assert down() == ""
        assert set(Operation.objects.values_list("state", flat=True)) == {"succeeded"}


def test_a_schedule_as_the_first_thing_of_a_ledger_anchors_it(
    clerk: Clerk, clock: Any, settings: Any, superuser_connection: Any
) -> None:
    settings.AFTERCALL_WORKFLOWS = ["tests.timetable.WORKFLOWS"]
    registry.forget()
    superuser_connection.execute("DELETE FROM reconciliation_restorefence")
    database.weigh_anchor()
    fence.forget()
    timetable.job(at=datetime(2026, 6, 10, 11, tzinfo=UTC), clock=clock)
    fence.forget()
    assert perform().state == State.SUCCEEDED
    assert down() == ""


# What is noticed


def test_a_database_from_before_a_send_sends_nothing(clerk: Clerk, backup: Any) -> None:
    perform(1)
    fence.forward()
    earlier = backup()
    perform(2)
    fence.forward()
    earlier.bring_back()
    perform(3, business_object="order-3")
    assert (down(), len(clerk.calls)) == ("behind", 2)


def test_what_was_sent_after_the_last_writing_of_the_anchor_is_noticed_all_the_same(clerk: Clerk, backup: Any) -> None:
    fence.forward()
    perform(1)
    earlier = backup()  # the anchor knows less than this backup, and is not written any more
    perform(2)
    earlier.bring_back()
    perform(3)
    assert (down(), len(clerk.calls)) == ("behind", 2)
    assert restore.found(RestoreFence.objects.get())["here"]["lost"] == 1


def test_a_retry_that_was_forgotten_is_noticed_too(clerk: Clerk, backup: Any, clock: Any) -> None:
    """The operation itself is in the backup; its second attempt is not."""
    clerk.answers(executor.NotSent("refused"))
    pk = perform(1).pk
    fence.forward()
    earlier = backup()
    clock.advance(minutes=10)
    perform(1)
    assert (row(pk).state, len(clerk.calls)) == (State.SUCCEEDED, 2)
    earlier.bring_back()
    perform(1)
    assert (down(), len(clerk.calls)) == ("behind", 2)


def test_the_trail_outlives_the_process_that_left_it_until_the_anchor_covers_it(clerk: Clerk) -> None:
    fence.forward()
    place = anchor.current()
    child = os.fork()
    if child == 0:
        place.note(known().database, 4711, 3)
        os._exit(0)
    os.waitpid(child, 0)
    assert (4711, 3) in place.noted(known().database).claims
    place.tidy(place.noted(known().database))
    assert (4711, 3) not in place.noted(known().database).claims


def test_the_trail_of_a_live_process_is_not_tidied_away(clerk: Clerk) -> None:
    pk = perform().pk
    fence.forward()
    assert (pk, 1) in anchor.current().noted(known().database).claims


def test_a_trail_that_changed_since_it_was_read_is_not_tidied_away(clerk: Clerk) -> None:
    place = anchor.current()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        place.note(known().database, 1, 1)
        os.read(read, 1)
        place.note(known().database, 2, 1)
        os._exit(0)
    while (1, 1) not in place.noted(known().database).claims:
        pass
    covered = place.noted(known().database)
    os.write(write, b".")
    os.waitpid(child, 0)
    place.tidy(covered)
    assert (2, 1) in place.noted(known().database).claims


def test_threads_of_one_process_leave_every_claim_on_its_trail(clerk: Clerk) -> None:
    name, place = known().database, anchor.current()

    def leave(first: int) -> None:
        for number in range(first, first + 8):
            place.note(name, number, 1)

    threads = [threading.Thread(target=leave, args=(1 + 8 * turn,)) for turn in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number for number, _ in place.noted(name).claims} == set(range(1, 65))


def test_half_a_record_is_no_claim(clerk: Clerk) -> None:
    """Its request has not left: the note is written whole before."""
    perform()
    (trail,) = Path(f"{anchor.current().path}.trail").glob("*.claims")  # type: ignore[attr-defined]
    with trail.open("r+b") as file:
        file.seek(anchor.HEADER + 3)
        file.write(b"\x07")
    assert anchor.current().noted(known().database).claims == frozenset()


def test_a_restore_after_which_nothing_had_been_decided_is_the_same_ledger(clerk: Clerk, backup: Any) -> None:
    perform(1)
    fence.forward()
    earlier = backup()
    fence.forward()
    earlier.bring_back()
    assert perform(2).state == State.SUCCEEDED
    assert down() == ""


def test_another_database_is_noticed(clerk: Clerk, superuser_connection: Any) -> None:
    perform(1)
    superuser_connection.execute("UPDATE reconciliation_restorefence SET database = gen_random_uuid()")
    fence.forget()
    perform(2)
    assert (down(), len(clerk.calls)) == ("another", 1)


def test_an_anchor_beside_an_empty_ledger_is_noticed(clerk: Clerk, superuser_connection: Any) -> None:
    superuser_connection.execute("DELETE FROM reconciliation_restorefence")
    fence.forget()
    perform(1)
    assert (down(), clerk.calls) == ("another", [])


def test_a_missing_anchor_is_noticed(clerk: Clerk) -> None:
    perform(1)
    database.weigh_anchor()
    fence.forget()
    perform(2)
    assert (down(), len(clerk.calls)) == ("no_anchor", 1)


def test_the_same_content_in_another_place_is_noticed(clerk: Clerk) -> None:
    """A copy that was loaded elsewhere is complete, and the one that it was made of may still be sending."""
    perform(1)
    anchor.current().write(anchor.Known(**{**vars(known()), "oid": 1}))
    fence.forget()
    perform(2)
    assert (down(), len(clerk.calls)) == ("moved", 1)


def test_another_history_behind_the_same_numbers_is_noticed(clerk: Clerk) -> None:
    perform(1)
    fence.forward()
    anchor.current().write(anchor.Known(**{**vars(known()), "digest": "00" * 32}))
    fence.forget()
    perform(2)
    assert (down(), len(clerk.calls)) == ("forked", 1)


def test_a_mark_that_is_missing_is_noticed_although_the_newest_entry_is_there(clerk: Clerk) -> None:
    """Numbers are given out before the commit: an entry with a lower one may be missing."""
    perform(1)
    fence.forward()
    anchor.current().write(anchor.Known(**{**vars(known()), "mark": known().mark + 1}))
    fence.forget()
    perform(2)
    assert (down(), len(clerk.calls)) == ("behind", 1)


def test_one_process_at_a_time_decides_on_whatever_machine(clerk: Clerk) -> None:
    place, entered = anchor.current(), threading.Event()

    def enter() -> None:
        with place.lock():
            entered.set()

    other = threading.Thread(target=enter)
    with place.lock():
        other.start()
        assert not entered.wait(0.2)
    other.join()
    assert entered.is_set()


def test_another_timeline_alone_is_taken_note_of(clerk: Clerk) -> None:
    """A standby took over and nothing is missing."""
    perform(1)
    anchor.current().write(anchor.Known(**{**vars(known()), "timeline": 77}))
    fence.forget()
    assert perform(2).state == State.SUCCEEDED
    fence.forward()
    assert (down(), known().timeline) == ("", 1)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": 9}', '{"format": 1}', '{"format": 1, "database": "x", "y": 1}']
)
def test_an_anchor_that_cannot_be_read_stops_claims_and_marks_nothing(clerk: Clerk, content: str) -> None:
    pk = perform(1).pk
    Path(anchor.current().path).write_text(content)  # type: ignore[attr-defined]
    fence.forget()
    with pytest.raises(claims.LedgerUnavailable, match=r"The anchor .* cannot be read"):
        perform(2)
    assert (down(), len(clerk.calls), row(pk).state) == ("", 1, State.SUCCEEDED)


def test_a_trail_that_cannot_be_read_is_not_taken_for_an_empty_one(clerk: Clerk) -> None:
    perform(1)
    trail = Path(f"{anchor.current().path}.trail")  # type: ignore[attr-defined]
    aside = trail.rename(trail.with_suffix(".aside"))
    trail.touch()
    fence.forget()
    try:
        with pytest.raises(claims.LedgerUnavailable, match=r"The trail in .* cannot be read"):
            perform(2)
        with pytest.raises(anchor.AnchorUnreadable, match="cannot be synced"):
            anchor.current().sync()
    finally:
        trail.unlink()
        aside.rename(trail)
    assert (down(), len(clerk.calls)) == ("", 1)


@pytest.mark.parametrize("broken", ["taking", "opening"])
def test_an_anchor_that_cannot_be_locked_is_told_as_one_that_cannot_be_read(
    clerk: Clerk, monkeypatch: Any, broken: str
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(*((anchor.fcntl, "flock") if broken == "taking" else (Path, "mkdir")), refused)
    with pytest.raises(anchor.AnchorUnreadable, match="cannot be locked"), fence.deciding():
        pass


def test_a_claim_that_cannot_be_noted_outside_is_not_sent(clerk: Clerk, monkeypatch: Any) -> None:
    perform(1)

    def full(*_: Any) -> None:
        raise anchor.AnchorUnreadable("no space left")

    monkeypatch.setattr(anchor.current(), "note", full)
    pk = perform(2).pk
    assert (row(pk).state, row(pk).reason_code, len(clerk.calls)) == (State.FAILED_RETRYABLE, "not_sent", 1)


def claimed() -> executor.Claim:
    intent, provider = order(), registry.provider("clerk")
    spec = provider.actions["keyed"]
    claims.on_record()
    claim = executor.claim_new(executor.row_of(intent, provider, spec), intent, provider, spec, AGENT)
    assert claim is not None
    return claim


def test_a_claim_that_the_server_lost_before_its_request_left_is_not_sent(clerk: Clerk, backup: Any) -> None:
    """The connection broke behind the claim, and the database came back without it."""
    earlier = backup()
    claim = claimed()
    earlier.bring_back()
    executor.dispatch(claim)
    assert clerk.calls == []


def test_a_claim_that_is_still_there_behind_a_new_connection_is_sent(clerk: Clerk) -> None:
    claim = claimed()
    connections.close_all()
    assert executor.dispatch(claim).state == State.SUCCEEDED


def test_a_new_connection_is_looked_at_and_a_known_one_is_not(clerk: Clerk, monkeypatch: Any) -> None:
    looks: list[int] = []
    plain = fence.compare
    monkeypatch.setattr(fence, "compare", lambda: looks.append(1) or plain())
    perform(1)
    seen = len(looks)
    for number in range(2, 8):
        perform(number)
    assert len(looks) == seen
    connections.close_all()
    perform(8)
    assert len(looks) == seen + 1
    fence._looked.until = 0.0  # seconds later
    perform(9)
    assert len(looks) == seen + 2


def test_inside_a_transaction_nothing_is_found_that_could_be_rolled_back(clerk: Clerk) -> None:
    perform(1)
    database.weigh_anchor()
    fence.forget()
    with transaction.atomic():
        fence.look()
    assert down() == ""
    fence.look()
    assert down() == "no_anchor"


# Somebody holds it and does not come to an end

REFUND: dict[str, Any] = {
    "identity": {
        "tenant": "acme", "workflow_type": "damaged_item", "workflow_id": "1002", "step": "refund",
        "business_object": "1002",
    },
    "provider": "pay", "action": "refund.create", "request": {"order": "1002", "amount": 100, "currency": "USD"},
}  # fmt: skip


def in_time(do: Callable[[], Any], seconds: float = 15) -> Any:
    """What it answers, in a thread that is waited for so long and no longer."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(do())
        finally:
            connections.close_all()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"it has not come back within {seconds} s"
    return answers[0]


@pytest.mark.processes
def test_a_beat_that_was_stopped_in_the_middle_of_the_anchor_keeps_no_other_from_its_duties(
    desk: Any, settings: Any
) -> None:
    settings.AFTERCALL_ANCHOR_EVERY = 0
    desk.worker(do="perform", intent=REFUND).ended()
    frozen = desk.worker(do="beat", stop_at=["anchoring"])
    frozen.reached("anchoring")
    frozen.freeze()
    held = known()
    assert not Tick.objects.filter(name="beat").exists()
    in_time(tasks.beat_once)
    assert Tick.objects.filter(name="beat").exists()
    mail = {"order": "1002", "to": "jo@example.com", "subject": "Refunded", "body": "It is under way."}
    more = order("message.send_listed", provider="mail", workflow_id="w2", request=mail)
    sent = in_time(lambda: executor.perform(more, actor=AGENT))
    assert desk.effects(desk.operation(pk=sent.pk)) == 1
    assert (known(), down()) == (held, "")
    with pytest.raises(anchor.AnchorHeld, match="held by another process"), fence.deciding(wait=0.2):
        pass
    (desk.folder / "worker-2" / "go-anchoring").touch()
    frozen.thaw()
    wait_until(lambda: known().mark == held.mark + 1)
    frozen.stop()
    frozen.ended()
    assert fence.forward()


def test_a_press_says_that_somebody_holds_the_anchor_and_does_not_wait_for_ever(clerk: Clerk, monkeypatch: Any) -> None:
    monkeypatch.setattr(fence, "deciding", partial(fence.deciding, wait=0.2))
    actor = replace(OLGA, permissions=frozenset(Permission))
    with anchor.current().lock():
        answer = in_time(lambda: restore.adopt(actor=actor, version=0, reason="complete", token=uuid4()))
    assert answer.verdict == "refused"
    assert "held by another process" in answer.message
    assert "ended" in answer.message


def test_an_anchor_that_can_be_read_and_not_written_is_a_signal(
    clerk: Clerk, clock: Any, monkeypatch: Any, settings: Any
) -> None:
    tasks.beat_once()
    perform(1)

    def full(*_: Any) -> None:
        raise anchor.AnchorUnreadable("no space left")

    monkeypatch.setattr(anchor.current(), "write", full)
    for _ in range(2):
        clock.advance(seconds=90)
        tasks.beat_once()
    watch.look()
    assert Signal.objects.get(kind="anchor_silent").cleared_at is None
    monkeypatch.undo()
    tasks.beat_once()
    watch.look()
    assert Signal.objects.get(kind="anchor_silent").cleared_at is not None


# What being down means


def test_the_database_itself_refuses_every_claim_and_says_why(clerk: Clerk) -> None:
    waiting = operation(provider="clerk", action="keyed")
    database.weigh_anchor()
    fence.forget()
    fence.look()
    with pytest.raises(transition.Limited) as refused:
        transition.transition(
            waiting.subject,
            to="pending",
            version=waiting.version,
            patch={"attempts": 1},
            after={"lease_until": 60, "due_at": 60},
            fact=AGENT.fact("claimed"),
        )
    assert refused.value.code == "restored"


def test_coming_down_is_on_record_once_and_every_row_has_its_audit_entry(
    clerk: Clerk, superuser_connection: Any
) -> None:
    perform(1)
    database.weigh_anchor()
    for _ in range(3):
        fence.forget()
        fence.look()
    assert Limit.objects.get(kind="restored").lifted_at is None
    (entry,) = Entry.objects.filter(subject="fence:1")
    assert json.loads(bytes(entry.canonical))["body"]["details"] == {
        "claims_lost": 0, "code": "no_anchor", "entries_lost": 0,
    }  # fmt: skip
    assert changes_without_audit(superuser_connection) == []
    assert list(verify.verify(verify.registered_heads())) == []


def test_a_backup_from_while_it_was_down_brings_it_down_anew(clerk: Clerk, backup: Any) -> None:
    from tests.test_restore import mark_all, release

    perform(1)
    fence.forward()
    before = backup()
    perform(2)
    before.bring_back()
    fence.look()
    mark_all()
    while_down = backup()
    assert release().verdict == "done"
    pk = perform(1).pk
    while_down.bring_back()
    fence.look()
    now = RestoreFence.objects.get()
    assert (now.is_down, now.reason, now.is_marked) == (True, "another", False)
    assert pk == row(pk).pk


def test_numbers_that_the_lost_time_gave_out_are_not_given_out_again(clerk: Clerk, backup: Any) -> None:
    """A report that comes in late must not meet another operation under the old number."""
    fence.forward()
    earlier = backup()
    lost = perform(1).pk
    earlier.bring_back()
    assert perform(2).pk > lost + fence.JUMP


def test_a_run_is_recorded_although_the_anchor_cannot_be_read(clerk: Clerk, settings: Any) -> None:
    """A start sends nothing; its steps are not claimed."""
    settings.AFTERCALL_WORKFLOWS = ["tests.scripted_workflows.first"]
    registry.forget()
    Path(anchor.current().path).write_text("{")  # type: ignore[attr-defined]
    fence.forget()
    run = runs.start("damaged_item", tenant="acme", workflow_id="r1", input={"order": "1", "amount": 5}, actor=AGENT)
    with pytest.raises(claims.LedgerUnavailable):
        runs.advance(run.pk)
    assert clerk.calls == []


def test_the_database_raises_no_fence_whose_marking_is_not_complete(clerk: Clerk, backup: Any) -> None:
    operation(provider="clerk", action="keyed")
    earlier = backup()
    perform(1)
    fence.forward()
    earlier.bring_back()
    fence.look()
    now = fence.current()
    assert now is not None
    assert not now.is_marked
    body, _none = log.body(fence.SYSTEM.fact("tried"))
    for adopt in (False, True):
        verdict = fence.call(
            "SELECT fence_up(%s, gen_random_uuid(), %s, 60, 'person:1', '', 'tried', %s, NULL)",
            [now.version, adopt, body],
        )
        assert (verdict, down()) == ("unmarked", "behind")
