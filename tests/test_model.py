"""The model-based test, small: the drill has 2,000 examples of 50 steps, the suite a few of 20."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from drill import model
from drill.broken import FUNCTION
from drill.crashes import ORDER
from drill.flows import CONSENTED, PERSON
from drill.model import OTHER
from drill.world import World
from examples.order_desk.workflow import DAMAGED_ITEM
from reconciliation import actions, approvals, consent, runs
from reconciliation.actors import SYSTEM
from reconciliation.models import Approval, Operation, Run
from reconciliation.progress import Progress
from tests.test_drill import stage  # noqa: F401 - a fixture


def test_random_steps_never_disagree_with_the_model(stage: Any) -> None:  # noqa: F811
    model.play(stage, ORDER, examples=30, steps=20, seed=0)


def test_a_world_that_does_everything_twice_is_told_apart(stage: Any, monkeypatch: Any) -> None:  # noqa: F811
    plain = World.land

    def twice(world: World, provider: str, spec: Any, call: Any) -> Any:
        plain(world, provider, spec, call)
        world.keys.clear()
        return plain(world, provider, spec, call)

    monkeypatch.setattr(World, "land", twice)
    with pytest.raises(AssertionError, match="2 effects"):
        model.play(stage, ORDER, examples=3, steps=4, seed=1, shrink=False)


@pytest.mark.parametrize("idle", ["refund.create", "ticket.close"])
def test_a_world_that_says_yes_and_does_nothing_is_told_apart(stage: Any, monkeypatch: Any, idle: str) -> None:  # noqa: F811
    plain = World.land

    def nothing(world: World, provider: str, spec: Any, call: Any) -> Any:
        done = plain(world, provider, spec, call)
        world.effects = [effect for effect in world.effects if effect.action != idle]
        return done

    monkeypatch.setattr(World, "land", nothing)
    with pytest.raises(AssertionError, match="basis receipt: and it did not happen"), steps(stage) as ledger:
        run_to_its_end(ledger, 0)


def test_two_runs_that_close_one_ticket_agree_with_the_model(stage: Any) -> None:  # noqa: F811
    with steps(stage) as ledger:
        run_to_its_end(ledger, 0)
        run_to_its_end(ledger, 1)
    closed = Operation.objects.filter(action="ticket.close", state="succeeded")
    assert sorted(stage.world.count(operation.key) for operation in closed) == [0, 1]


# Each guard is broken in turn, and the reference notices


def agreed_run(ledger: Any, *, for_whom: str = "") -> Any:
    """A run that waits for the consent to its refund."""
    ledger.start(workflow=CONSENTED, number=0, fault="no fault", for_whom=for_whom)
    look(ledger)
    ledger.workers_sweep(kill=-1)
    look(ledger)
    return Approval.objects.get(state="waiting")


def test_a_request_that_is_approved_by_whom_it_is_for_is_told_apart(stage: Any, monkeypatch: Any) -> None:  # noqa: F811
    monkeypatch.setattr(approvals, "not_permitted", lambda *_: "")
    with (
        steps(stage) as ledger,
        broken(stage, "ledger_move_approval", "ledger_folded(v_old.forbidden) && ledger_folded(p_who)", "false"),
    ):
        agreed_run(ledger, for_whom=PERSON.id)
        with pytest.raises(AssertionError, match="approved by who asked for it"):
            ledger.answer(which=0, name="approve", old=False, who="Dana")


def test_a_request_that_is_approved_after_its_time_is_told_apart(stage: Any, monkeypatch: Any) -> None:  # noqa: F811
    monkeypatch.setattr(approvals.ApprovalView, "over", False)
    late = "p_to = 'approved' AND v_old.expires_at <= ledger_latest(v_now)"
    with steps(stage) as ledger, broken(stage, "ledger_move_approval", late, "false"):
        agreed_run(ledger)
        stage.advance(timedelta(hours=2))
        with pytest.raises(AssertionError, match="approved after its time"):
            ledger.answer(which=0, name="approve", old=False, who="Otto")


def test_a_consent_that_nobody_gave_is_told_apart(stage: Any) -> None:  # noqa: F811
    with steps(stage) as ledger:
        waiting = agreed_run(ledger)
        press = actions.Press(action="approve", token=uuid4(), version=waiting.version, reason="behind its back")
        actions.act(waiting, press, actor=OTHER)
        with pytest.raises(AssertionError, match="nobody agreed"):
            look(ledger)


def test_what_is_sent_after_its_consent_is_over_is_told_apart(stage: Any) -> None:  # noqa: F811
    over = "a.state IN ('expired', 'superseded') OR a.use_by <= ledger_latest(p_now)"
    with steps(stage) as ledger, broken(stage, "ledger_unconsented", over, "false"):
        agreed_run(ledger)
        ledger.answer(which=0, name="approve", old=False, who="Otto")
        look(ledger)
        ledger.time_passes_and_workers_sweep(seconds=4000, kill=-1)
        with pytest.raises(AssertionError, match="sent after the consent was over"):
            look(ledger)


def test_what_is_sent_without_consent_is_told_apart(stage: Any, monkeypatch: Any) -> None:  # noqa: F811
    monkeypatch.setattr(consent, "needed", lambda *_: False)
    with steps(stage) as ledger:
        ledger.start(workflow=CONSENTED, number=0, fault="no fault")
        ledger.workers_sweep(kill=-1)
        with pytest.raises(AssertionError, match="nobody had agreed"):
            look(ledger)


def test_a_consent_that_is_used_twice_is_told_apart(stage: Any) -> None:  # noqa: F811
    with steps(stage) as ledger:
        kind = next(k for k, (_, action, _) in model.ACTIONS.items() if action == "message.send")
        ledger.submit(number=0, kind=kind, version=1, amount=4200, fault="reset before the effect", kill=-1)
        stage.world.at("message.send", *["reset before the effect"] * 3)
        look(ledger)
        ledger.press(which=0, name="send_again", old=False, who="Dana")
        look(ledger)
        ledger.answer(which=0, name="approve", old=False, who="Otto")
        look(ledger)
        used = Approval.objects.get()
        assert (used.state, stage.world.calls.total()) == ("consumed", 2)
        stage.place.superuser.execute(
            "UPDATE reconciliation_approval SET state = 'approved', settled_at = NULL, due_at = aftercall_now()"
        )
        ledger.workers_sweep(kill=-1)
        assert stage.world.calls.total() == 3
        with pytest.raises(AssertionError, match="sent again 1 times, agreed to 0 times"):
            look(ledger)


def test_a_press_on_an_old_page_that_is_done_is_told_apart(stage: Any, monkeypatch: Any) -> None:  # noqa: F811
    plain = actions.act
    monkeypatch.setattr(
        actions,
        "act",
        lambda subject, press, actor: plain(subject, replace(press, version=subject.version), actor=actor),
    )
    with steps(stage) as ledger:
        agreed_run(ledger)
        with pytest.raises(AssertionError, match="a page that was out of date"):
            ledger.press_on_a_run(which=0, name="cancel", old=True, who="Dana")


def test_an_ended_run_that_goes_on_by_itself_is_told_apart(stage: Any) -> None:  # noqa: F811
    with steps(stage) as ledger:
        cancelled(ledger)
        run = Run.objects.get()
        ledger.reference.begin(stage.now())
        runs.compensate(run.pk, actor=SYSTEM, version=run.version, reason="nobody asked")
        with pytest.raises(AssertionError, match="left cancelled, and no person asked"):
            look(ledger)


def test_a_person_may_have_what_a_cancelled_run_did_undone(stage: Any) -> None:  # noqa: F811
    with steps(stage) as ledger:
        cancelled(ledger)
        ledger.press_on_a_run(which=0, name="compensate_run", old=False, who="Dana")
        look(ledger)
        ledger.workers_sweep(kill=-1)
        look(ledger)
    assert Run.objects.get().state == "compensated"


def test_a_call_of_a_cancelled_run_is_told_apart(stage: Any) -> None:  # noqa: F811
    with steps(stage) as ledger:
        cancelled(ledger)
        done = Operation.objects.get(step="create_label")
        stage.world.calls[done.key] += 1
        superuser = stage.place.superuser
        superuser.execute("UPDATE reconciliation_operation SET attempts = 2 WHERE id = %s", [done.pk])
        with pytest.raises(AssertionError, match="a step was sent after its end"):
            look(ledger)


def test_a_run_that_is_called_succeeded_before_its_time_is_told_apart(stage: Any, monkeypatch: Any) -> None:  # noqa: F811
    monkeypatch.setattr(Progress, "finished", True)
    with steps(stage) as ledger:
        ledger.start(workflow=DAMAGED_ITEM, number=0, fault="reset after the effect")
        ledger.workers_sweep(kill=-1)
        with pytest.raises(AssertionError, match="run succeeded: without"):
            look(ledger)


def test_a_run_that_nobody_comes_back_to_is_told_apart(stage: Any) -> None:  # noqa: F811
    with steps(stage) as ledger:
        ledger.start(workflow=DAMAGED_ITEM, number=0, fault="no fault")
        stage.place.superuser.execute("UPDATE reconciliation_run SET due_at = NULL")
        with pytest.raises(AssertionError, match="nobody comes back to it"):
            look(ledger)


def cancelled(ledger: Any) -> None:
    """A run that a person cancels while its refund waits for a consent."""
    agreed_run(ledger)
    ledger.press_on_a_run(which=0, name="cancel", old=False, who="Dana")
    look(ledger)


def look(ledger: Any) -> None:
    """What is asked after every step."""
    ledger.the_ledger_agrees_with_the_paper()
    ledger.every_change_is_a_move_of_the_table_with_one_entry()


@contextmanager
def broken(on: Any, function: str, old: str, new: str) -> Iterator[None]:
    """A guard of the test's own database is taken out, and put back."""
    superuser = on.place.superuser
    (text,) = superuser.execute(FUNCTION, [function]).fetchone()
    assert text.count(old) == 1
    superuser.execute(text.replace(old, new))
    try:
        yield
    finally:
        superuser.execute(text)


@contextmanager
def steps(on: Any) -> Iterator[Any]:
    """The state machine, to be taken through steps by hand."""
    ledger: Any = model.machine(on, ORDER)()
    try:
        yield ledger
    finally:
        ledger.teardown()


def run_to_its_end(ledger: Any, number: int) -> None:
    ledger.start(workflow=DAMAGED_ITEM, number=number, fault="no fault")
    ledger.workers_sweep(kill=-1)
    ledger.the_ledger_agrees_with_the_paper()
