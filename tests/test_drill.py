"""A sample of the crash sweep in the suite: that it sees what it should, and that it finds nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from drill import book, boundaries
from drill.crash import Case, Halt, Stage
from drill.crashes import ORDER
from drill.flows import CONSENTED, flows
from drill.world import FAULTS, World
from examples.order_desk.workflow import DAMAGED_ITEM
from reconciliation import registry, workers
from tests.world import PROVIDERS

FLOWS = flows(DAMAGED_ITEM)


@dataclass
class TestPlace:
    """The suite's own database as the drill sees a place."""

    __test__ = False
    superuser: Any
    name: str = "suite"
    shift: timedelta = field(default_factory=timedelta)

    def advance(self, by: timedelta) -> None:
        self.shift += by
        self.superuser.execute("UPDATE test_clock SET shift = %s", [self.shift])


@pytest.fixture
def stage(ledger_db: Any, superuser_connection: Any, settings: Any) -> Iterator[Stage]:
    settings.AFTERCALL_PROVIDERS = [f"examples.order_desk.providers.{name}" for name in PROVIDERS] + ["drill.book.DESK"]
    settings.AFTERCALL_WORKFLOWS = [
        "examples.order_desk.workflow.DAMAGED_ITEM", "drill.flows.CONSENTED", "drill.flows.WITH_RECORD",
    ]  # fmt: skip
    superuser_connection.execute(book.TABLE)
    registry.forget()
    workers._known.clear()
    with boundaries.installed():
        yield Stage(TestPlace(superuser_connection), input=ORDER)
    boundaries.Moved.seconds = 0.0
    workers._known.clear()
    registry.forget()


def play(stage: Stage, case: Case) -> Any:
    return stage.play(case, FLOWS[case.flow])


ENDS = {
    "forward": "succeeded",
    "walks back": "compensated",
    "refused after the pivot": "pending, escalated",
    "scheduled": "succeeded",
    "approved": "succeeded",
    "denied": "compensated",
    "approval unanswered": "compensated",
    "recorded here and told": "succeeded",
    "recorded here, then refused": "compensated",
}


@pytest.mark.parametrize("flow", ENDS)
def test_an_undisturbed_run_ends_as_its_flow_says(stage: Stage, flow: str) -> None:
    seen = play(stage, Case(flow, "no fault", ""))
    assert (seen.problems, seen.ended) == ([], ENDS[flow])


def test_every_write_and_every_call_is_a_boundary(stage: Stage) -> None:
    passed = play(stage, Case("forward", "no fault", "")).boundaries
    assert passed[:5] == [
        "due runs taken", "before ledger_move_run running", "after ledger_move_run running",
        "before ledger_heartbeat_run", "after ledger_heartbeat_run",
    ]  # fmt: skip
    for step in DAMAGED_ITEM.effects:
        for where in ("about to leave", "under way", "done there, not answered"):
            assert passed.count(f"{step.action}: {where}") == 1


@pytest.mark.parametrize("how", ["kill", "kill_unseen", "freeze"])
@pytest.mark.parametrize("flow", ["forward", "walks back"])
def test_a_worker_lost_anywhere_does_nothing_twice(stage: Stage, flow: str, how: str) -> None:
    length = len(play(stage, Case(flow, "no fault", "")).boundaries)
    for at in range(ord(how[-1]) % 11, length, 11):
        seen = play(stage, Case(flow, "no fault", "", (Halt(how, at),)))
        assert not seen.problems, (seen.boundaries[at], seen.ended)


def test_a_local_effect_and_its_message_have_boundaries_in_and_around_their_commits(stage: Stage) -> None:
    passed = play(stage, Case("recorded here and told", "no fault", "")).boundaries
    first = passed.index("before local effect")
    assert passed[first : first + 12] == [
        "before local effect", "before ledger_begin_local", "after ledger_begin_local",
        "outcome.record: in its transaction", "outcome.record: written, not committed",
        "before answer judged", "after answer judged", "before ledger_fence_local", "after ledger_fence_local",
        "before ledger_move_operation succeeded", "after ledger_move_operation succeeded",
        "after local effect",
    ]  # fmt: skip
    taken = passed.index("messages taken")
    assert passed[taken : taken + 5] == [
        "messages taken", "before ledger_open", "after ledger_open", "before message marked", "after message marked",
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["kill", "kill_unseen", "freeze", "cancel"])
@pytest.mark.parametrize("flow", ["recorded here and told", "recorded here, then refused"])
def test_a_worker_lost_anywhere_leaves_row_and_message_or_neither(stage: Stage, flow: str, how: str) -> None:
    length = len(play(stage, Case(flow, "no fault", "")).boundaries)
    for at in [*range(0, 34), *range(34, length, 13)]:
        seen = play(stage, Case(flow, "no fault", "", (Halt(how, at),)))
        assert not seen.problems, (seen.boundaries[at : at + 1], seen.ended, seen.problems)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_local_effect_ends_well(stage: Stage, fault: str) -> None:
    for halts in ((), (Halt("kill", 9),), (Halt("freeze", 3),)):
        seen = play(stage, Case("recorded here and told", fault, "outcome.record", halts))
        assert not seen.problems, (fault, halts, seen.ended, seen.problems)


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_beat_lost_anywhere_starts_a_scheduled_run_once(stage: Stage, how: str) -> None:
    passed = play(stage, Case("scheduled", "no fault", "")).boundaries
    first = next(n for n, name in enumerate(passed) if name == "after ledger_open_run")
    for at in range(0, first + 12):
        seen = play(stage, Case("scheduled", "no fault", "", (Halt(how, at),)))
        assert not seen.problems, (seen.boundaries[at], seen.ended)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_the_refund_ends_well(stage: Stage, fault: str) -> None:
    for at in (25, 29, 31):
        seen = play(stage, Case("forward", fault, "refund.create", (Halt("kill", at),)))
        assert not seen.problems, (seen.boundaries[at : at + 1], seen.ended)


def test_a_second_effect_is_seen(stage: Stage, monkeypatch: Any) -> None:
    """A world that forgets keys and hides what it did: the sweep must not be blind to what follows."""
    plain = World.land

    def twice(world: World, provider: str, spec: Any, call: Any) -> Any:
        plain(world, provider, spec, call)
        world.keys.clear()
        return plain(world, provider, spec, call)

    monkeypatch.setattr(World, "land", twice)
    assert "create_label (succeeded): 2 effects" in play(stage, Case("forward", "no fault", "")).problems


def test_the_consented_order_desk_differs_in_the_consent_alone() -> None:
    assert [s.name for s in CONSENTED.effects if s.consent] == ["issue_refund"]
    assert [s.name for s in CONSENTED.effects] == [s.name for s in DAMAGED_ITEM.effects]
