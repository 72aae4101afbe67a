"""A run from before anything that is still known is refused at its door, as a single operation is."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from audit.models import Entry
from reconciliation import registry, retention, runs, transition
from reconciliation.keys import InvalidField
from reconciliation.models import Run
from reconciliation.states import RunState
from tests.database import Clock
from tests.scripted import AGENT, KEYED, Clerk, spec
from tests.test_sagas import settle

DAY = timedelta(days=1)


@pytest.fixture
def refunds(clerk: Clerk, settings: Any) -> Clerk:
    settings.AFTERCALL_WORKFLOWS = ["tests.saga_workflows.SAGA"]
    registry.forget()
    return clerk


def start(clock: Clock, *, asked_before: timedelta, workflow_id: str = "w1") -> Run:
    return runs.start(
        "saga",
        tenant="acme",
        workflow_id=workflow_id,
        input={"order": "1002"},
        actor=AGENT,
        intended_at=clock.now() - asked_before,
    )


def test_a_run_that_an_old_queue_delivers_to_a_new_ledger_is_refused(refunds: Clerk, clock: Clock) -> None:
    with pytest.raises(InvalidField, match=r"intended_at.* more than 180 days ago"):
        start(clock, asked_before=200 * DAY)
    settle(clock)
    assert (Run.objects.exists(), refunds.calls) == (False, [])
    refused = Entry.objects.get(subject="run:new", event="refused")
    assert (refused.tenant, refused.actor, refused.reason_code) == ("acme", AGENT.id, "too_old")
    assert start(clock, asked_before=179 * DAY).state == RunState.PENDING


def test_a_run_that_is_known_is_answered_however_old_it_is(refunds: Clerk, clock: Clock) -> None:
    made = start(clock, asked_before=timedelta(0))
    settle(clock)
    sent = len(refunds.calls)
    clock.advance(days=179)
    assert start(clock, asked_before=300 * DAY) == made
    clock.advance(days=30)
    retention.tend()
    assert not Run.objects.exists()
    with pytest.raises(transition.Pruned):
        start(clock, asked_before=300 * DAY)
    assert len(refunds.calls) == sent


def test_a_run_is_known_for_as_long_as_its_longest_kept_step(
    refunds: Clerk, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refunds, "actions", {"keyed": spec(**KEYED, dispute_window=365 * DAY)})
    with pytest.raises(InvalidField, match="more than 365 days ago"):
        start(clock, asked_before=400 * DAY)
    assert start(clock, asked_before=200 * DAY).state == RunState.PENDING
