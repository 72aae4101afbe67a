"""A ledger that may have been restored keeps everything: what it would prune may be what the lost time is told from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reconciliation import executor, fence, retention, transition
from reconciliation.models import Operation, RestoreFence, Run
from reconciliation.providers.base import Rejected
from reconciliation.states import State
from tests import cast
from tests.database import Clock
from tests.scripted import AGENT, OLGA, Clerk, order, row
from tests.test_restore import backup, lose  # noqa: F401 - backup is a fixture
from tests.test_shredded import WITH_CARD, shredding

KEPT = OLGA.fact("kept")


@pytest.fixture
def old_failure(clerk: Clerk, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Operation:
    """A refund that failed for good two hundred days ago, in a ledger where that is pruned, and shredded sooner."""
    shredding(clerk, monkeypatch)
    clerk.answers(Rejected("no", status=422))
    pk = executor.perform(order(request=WITH_CARD), actor=AGENT).pk
    clock.advance(days=200)
    return row(pk)


def test_the_first_process_of_a_restored_archive_prunes_and_shreds_nothing(
    old_failure: Operation,
    backup: Any,  # noqa: F811
) -> None:
    """Nobody has looked yet: retention looks itself."""
    archive = backup()
    executor.perform(order(workflow_id="lost"), actor=AGENT)
    fence.forward()
    archive.bring_back()
    fence.forget()
    told = retention.tend().told()
    assert "the ledger was restored" in told
    assert RestoreFence.objects.get().is_down
    assert (row(old_failure.pk).state, row(old_failure.pk).shredded_at) == (State.FAILED_TERMINAL, None)


def test_nothing_goes_while_the_anchor_cannot_be_read(old_failure: Operation) -> None:
    Path(fence.anchor.current().path).write_text("{")  # type: ignore[attr-defined]
    fence.forget()
    assert "the anchor cannot be read" in retention.tend().told()
    assert row(old_failure.pk).shredded_at is None


def test_a_fence_that_comes_down_in_the_middle_of_a_round_stops_it(
    old_failure: Operation,
    clock: Clock,
    backup: Any,  # noqa: F811
) -> None:
    run = cast.run()
    cast.run_stands(run, "succeeded")
    clock.advance(days=200)
    lose(backup())
    kept = [
        transition.shred(old_failure.subject, after=0, fact=KEPT),
        transition.prune(old_failure.subject, keep=0, fact=KEPT),
        transition.prune(run.subject, keep=0, fact=KEPT),
    ]
    assert kept == ["restored"] * 3
    assert (Operation.objects.filter(pk=old_failure.pk).exists(), Run.objects.exists()) == (True, True)
