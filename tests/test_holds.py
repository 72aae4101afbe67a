"""What holds a claim back is told before anybody presses, and a press that meets it gets an answer."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from audit.models import Entry
from reconciliation import actions, executor, fence, holds, registry, sweeping
from reconciliation.actions import Press
from reconciliation.models import Limit, Operation
from reconciliation.pressing import Verdict
from reconciliation.providers.base import Rejected, Unavailable
from reconciliation.states import State
from reconciliation.transition import HELD_BACK
from tests import cast
from tests.database import Clock
from tests.scripted import AGENT, Clerk, cannot_tell, order, row
from tests.test_approvals import ANN, BECAUSE, ROOT, asked, do, the, unknown
from tests.test_limits import desk, put, release  # noqa: F401 - desk is a fixture
from tests.test_restore import backup, lose, restored  # noqa: F401 - backup is a fixture
from tests.test_sagas import settle, start
from tests.test_waivers import offered, reversed_by

BY_ANOTHER_ACTION = reversed_by("natural")
STOPPED, RESTORED = HELD_BACK["stopped"], HELD_BACK["restored"]


def failed(clerk: Clerk, **parts: Any) -> Operation:
    """A refund that was refused for now."""
    clerk.answers(Unavailable("down", status=503))
    return row(executor.perform(order(**parts), actor=AGENT).pk)


@pytest.fixture
def no_anchor(clerk: Clerk) -> Any:
    """Makes the anchor unreadable."""
    anchor = Path(fence.anchor.current().path)  # type: ignore[attr-defined]

    def spoil() -> None:
        anchor.write_text("{")
        fence.forget()

    return spoil


@pytest.mark.parametrize(
    ("covered", "stopped"),
    [
        ({}, True),
        ({"tenant": "acme"}, True),
        ({"provider": "clerk", "action": "keyed", "workflow_type": "damaged_item", "currency": "USD"}, True),
        ({"tenant": "beta"}, False),
        ({"provider": "blind"}, False),
        ({"action": "lookup"}, False),
        ({"currency": "EUR"}, False),
    ],
)
def test_a_retry_is_offered_unless_a_stop_switch_covers_it(
    desk: Clerk,  # noqa: F811
    covered: dict[str, str],
    stopped: bool,
) -> None:
    case = failed(desk)
    assert offered(case, "retry")[0]
    put(**covered)
    assert offered(case, "retry")[0] is not stopped
    assert (do(case, "retry", ANN).verdict is Verdict.REFUSED) is stopped
    assert len(desk.calls) == (1 if stopped else 2)
    if stopped:
        assert offered(case, "retry")[1] == STOPPED
        release(Limit.objects.get())
        assert offered(case, "retry")[0]


def test_no_retry_is_offered_while_the_restore_fence_is_down(clerk: Clerk, backup: Any) -> None:  # noqa: F811
    case = failed(clerk)
    lose(backup())
    assert offered(case, "retry") == (False, RESTORED)
    assert offered(case, "look_up")[0]


def test_what_was_restored_and_may_have_been_sent_says_so_and_a_new_intent_is_new(
    clerk: Clerk,
    backup: Any,  # noqa: F811
) -> None:
    restored(backup())
    waiting = cast.operation(state="ready", provider="clerk", action="keyed")
    assert holds.in_the_way(waiting) == HELD_BACK["maybe_replayed"]
    do(waiting, "withdraw", ANN)
    assert holds.in_the_way(waiting) == ""


def test_sending_again_may_be_asked_for_under_a_stop_switch_and_is_not_offered_before_its_release(
    desk: Clerk,  # noqa: F811
) -> None:
    case = unknown(desk)
    put(provider="clerk")
    assert offered(case, "send_again")[0]
    assert do(case, "send_again", ANN).verdict is Verdict.DONE
    waits = offered(the(case.pk, "send_again"), "approve")
    assert (waits[0], "It waits: a stop switch" in waits[1]) == (True, True)
    assert "could not be done yet" in do(the(case.pk, "send_again"), "approve", ROOT).message
    assert offered(case, "send_again") == (False, STOPPED)
    assert len(desk.calls) == 1


def test_what_may_be_made_all_the_same_says_that_it_waits(desk: Clerk) -> None:  # noqa: F811
    desk.answers(Rejected("no", status=422))
    refused = row(executor.perform(order(), actor=AGENT).pk)
    put(provider="clerk")
    allowed, why = offered(refused, "new_intent")
    assert allowed
    assert why.endswith("It waits: a stop switch holds it back; it goes on when a person releases the switch.")
    assert do(refused, "new_intent", ANN).verdict is Verdict.DONE
    big = asked(workflow_id="big")
    assert "It waits: a stop switch" in offered(the(big.pk), "approve")[1]
    assert do(the(big.pk), "approve", ROOT).verdict is Verdict.DONE
    sweeping.sweep()
    assert len(desk.calls) == 1


def test_an_undo_waits_for_what_stops_its_own_action(clerk: Clerk, clock: Clock, settings: Any) -> None:
    settings.AFTERCALL_WORKFLOWS = ["tests.test_holds.BY_ANOTHER_ACTION"]
    registry.forget()
    start(BY_ANOTHER_ACTION.name)
    settle(clock)
    reserved = Operation.objects.get(step="reserve")
    put(provider="clerk", action="natural")
    allowed, why = offered(reserved, "compensate")
    assert (allowed, "It waits: a stop switch" in why) == (True, True)
    release(Limit.objects.get())
    assert "It waits" not in offered(reserved, "compensate")[1]


# The anchor cannot be read


def test_a_retry_is_not_offered_while_the_anchor_cannot_be_read(clerk: Clerk, no_anchor: Any) -> None:
    case = failed(clerk)
    no_anchor()
    allowed, why = offered(case, "retry")
    assert (allowed, "cannot be read" in why) == (False, True)
    assert do(case, "retry", ANN).verdict is Verdict.REFUSED


def test_a_press_that_meets_an_unreadable_anchor_is_answered_for_good_and_on_record(
    clerk: Clerk, no_anchor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read when the buttons were drawn, and cannot be when the claim looks."""
    case = failed(clerk)
    monkeypatch.setattr(holds, "in_the_way", lambda *_, **__: "")
    no_anchor()
    press = Press(action="retry", token=uuid.uuid4(), version=case.version, reason=BECAUSE)
    first, second = (actions.act(row(case.pk), press, actor=ANN) for _ in range(2))
    assert (first.verdict, second) == (Verdict.REFUSED, first)
    assert first.message.startswith("Nothing was changed. The anchor ")
    assert first.message.endswith("cannot be read (JSONDecodeError). Nothing was sent.")
    refused = Entry.objects.get(subject=str(case.subject), event="refused")
    assert (refused.actor, refused.reason_code) == (ANN.id, "ledger_unavailable")
    assert (row(case.pk).state, len(clerk.calls)) == (State.FAILED_RETRYABLE, 1)


def test_a_consent_that_meets_an_unreadable_anchor_stands_and_is_carried_out_later(
    clerk: Clerk, clock: Clock, no_anchor: Any
) -> None:
    case = unknown(clerk)
    do(case, "send_again", ANN)
    request = the(case.pk, "send_again")
    clerk.sees(cannot_tell())
    good = Path(fence.anchor.current().path).read_text()  # type: ignore[attr-defined]
    no_anchor()
    answer = do(request, "approve", ROOT)
    assert (answer.verdict, "Approved, but it could not be done yet: The anchor" in answer.message) == (
        Verdict.DONE, True,
    )  # fmt: skip
    assert (the(case.pk, "send_again").state, len(clerk.calls)) == ("approved", 1)
    assert Entry.objects.get(subject=str(request.subject), event="refused").reason_code == "ledger_unavailable"
    Path(fence.anchor.current().path).write_text(good)  # type: ignore[attr-defined]
    fence.forget()
    clock.advance(120)
    sweeping.sweep()
    assert (the(case.pk, "send_again").state, len(clerk.calls)) == ("consumed", 2)
