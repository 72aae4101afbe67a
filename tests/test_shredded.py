"""Of what was shredded nothing is made again: no half request, and no undo from half a result."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from audit.models import Entry
from reconciliation import executor, intents, retention, retrying, sweeping
from reconciliation.models import Operation
from reconciliation.providers.base import ActionSpec, Rejected, Unavailable
from reconciliation.states import RunState, State
from tests.database import Clock
from tests.saga_workflows import NOT_BUILT
from tests.scripted import AGENT, KEYED, OLGA, Clerk, applied, found, order, row, spec
from tests.test_approvals import CLEO, asked, the, till  # noqa: F401 - till is a fixture
from tests.test_approvals import press as decide
from tests.test_sagas import DOWN, press, sagas, settle, start  # noqa: F401 - sagas is a fixture
from tests.test_waivers import offered

SHORT: dict[str, Any] = {**KEYED, "shred_after": timedelta(days=2)}
WITH_CARD = {"order": "1002", "amount": 4200, "currency": "USD", "card": "4242-CANARY"}


def shredding(clerk: Clerk, monkeypatch: pytest.MonkeyPatch, **promises: Any) -> ActionSpec:
    """The clerk shreds after two days."""
    made = spec(**SHORT, **promises)
    monkeypatch.setattr(clerk, "actions", dict.fromkeys(clerk.actions, made))
    return made


def shredded(clerk: Clerk, clock: Clock, *answers: Any) -> Operation:
    """A refund that was settled with this answer three days ago."""
    clerk.answers(*answers)
    pk = executor.perform(order(request=WITH_CARD), actor=AGENT).pk
    clock.advance(days=3)
    assert retention.tend().shredded == 1
    return row(pk)


@pytest.mark.parametrize("hides", ["a card", "the amount"])
def test_half_of_a_shredded_request_is_not_sent_as_a_new_intent(
    clerk: Clerk, clock: Clock, monkeypatch: pytest.MonkeyPatch, hides: str
) -> None:
    shown = ("order", "amount", "currency") if hides == "a card" else ("order",)
    shredding(clerk, monkeypatch, shown=shown, money=("amount", "currency"), compare={"order": "order"})
    refused = shredded(clerk, clock, Rejected("no", status=422))
    allowed, why = offered(refused, "new_intent")
    assert not allowed
    assert "submit it anew with a higher intent_version" in why
    assert press(refused, "new_intent").verdict == "refused"
    sweeping.sweep()
    assert (Operation.objects.count(), len(clerk.calls)) == (1, 1)
    assert Entry.objects.filter(subject=str(refused.subject), event="refused").exists()
    with pytest.raises(intents.NoIntent, match="shredded"):
        intents.next_version(refused, actor=OLGA, reason="as agreed")


def test_a_shredded_result_builds_no_undo(
    sagas: Any,  # noqa: F811
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shredding(sagas, monkeypatch)
    start("saga")
    settle(clock)
    clock.advance(days=3)
    retention.tend()
    charge = Operation.objects.get(step="charge")
    assert (charge.state, charge.shredded_at is not None) == (State.SUCCEEDED, True)
    allowed, why = offered(charge, "compensate")
    assert (allowed, "shredded" in why) == (False, True)
    assert press(charge, "compensate").verdict == "refused"
    assert not Operation.objects.filter(undo_of=charge).exists()


def test_a_run_that_is_undone_late_stops_at_a_shredded_result_and_says_so(
    sagas: Any,  # noqa: F811
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shredding(sagas, monkeypatch)
    sagas.answers(applied("r-1"), DOWN)
    run = start("saga")
    sweeping.sweep()
    assert press(run, "cancel").verdict == "done"
    clock.advance(days=3)
    retention.tend()
    assert row(Operation.objects.get(step="reserve").pk).shredded_at is not None
    sagas.sees(found("r-1"))
    assert press(run, "compensate_run").verdict == "done"
    sent = len(sagas.calls)
    settle(clock)
    run.refresh_from_db()
    assert (run.state, run.escalation_reason) == (RunState.COMPENSATING, "shredded")
    assert len(sagas.calls) == sent


def test_an_undo_that_cannot_be_built_from_what_is_left_is_refused_in_words(
    sagas: Any,  # noqa: F811
    clock: Clock,
) -> None:
    start("fragile")
    settle(clock)
    charge = Operation.objects.get(step="charge")
    sagas.sees(found(charge.provider_operation_id, order="1002", amount=4200))
    NOT_BUILT.add("charge")
    try:
        answer = press(charge, "compensate")
    finally:
        NOT_BUILT.clear()
    assert (answer.verdict, "cannot be built" in answer.message) == ("refused", True)


def test_what_was_shown_to_whoever_agreed_is_shredded_with_the_request(
    till: Any,  # noqa: F811
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shredding(till, monkeypatch)
    till.shows = [{"amount": 64_000, "holder": "Ada CANARY"}]
    pk = asked().pk
    decide("approve", the(pk), CLEO)
    assert asked().state is State.SUCCEEDED
    assert the(pk).seen["holder"] == "Ada CANARY"
    clock.advance(days=3)
    assert retention.tend().shredded == 1
    assert (the(pk).seen_sealed, the(pk).seen) == ("", {"amount": 64_000})


def test_a_due_retry_of_what_was_shredded_calls_a_person_and_says_why(clerk: Clerk, clock: Clock, cleaner: Any) -> None:
    clerk.answers(Unavailable("down", status=503))
    pk = executor.perform(order(), actor=AGENT).pk
    cleaner.execute("UPDATE reconciliation_operation SET shredded_at = now() WHERE id = %s", [pk])
    clock.advance(hours=1)
    sweeping.sweep()
    assert (row(pk).escalation_reason, len(clerk.calls)) == ("shredded", 1)
    assert "intent_version" in retrying.why_not_retryable(row(pk))
