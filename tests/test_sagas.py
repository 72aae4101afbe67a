"""A claim that fails half-way is walked back: what was applied is reversed, once, in order, or a person is told."""

from __future__ import annotations

from typing import Any

import pytest

from examples.order_desk.workflow import DAMAGED_ITEM
from reconciliation import registry, runs, sweeping
from reconciliation.actors import Actor
from reconciliation.models import Operation, Run
from reconciliation.states import RunState, State

AGENT = Actor(id="agent:desk-2", kind="agent")
INPUT = {
    "order": "1002", "ticket": "T-77", "amount": 4200, "currency": "USD", "card": "card_4242", "customer": "Ada Fenn",
    "email": "ada@example.com", "address": "1 Mill Lane", "window": "tomorrow 9-12", "service": "return",
}  # fmt: skip


@pytest.fixture
def desk(ledger_db: Any, world: Any, settings: Any) -> Any:
    settings.AFTERCALL_PROVIDERS = [f"examples.order_desk.providers.{n}" for n in ("pay", "carrier", "mail", "tickets")]
    settings.AFTERCALL_WORKFLOWS = ["examples.order_desk.workflow.DAMAGED_ITEM"]
    registry.forget()
    yield world
    registry.forget()


def start(**changed: Any) -> Run:
    return runs.start("damaged_item", tenant="acme", workflow_id="T-77", input={**INPUT, **changed}, actor=AGENT)


def settle(clock: Any, *, rounds: int = 40, seconds: float = 20) -> None:
    """Sweep and let time pass until nothing is due any more."""
    for _ in range(rounds):
        if not sweeping.sweep():
            if not (Operation.objects.exclude(due_at=None).exists() or Run.objects.exclude(due_at=None).exists()):
                return
            clock.advance(seconds)


def steps() -> dict[str, str]:
    return dict(Operation.objects.order_by("id").values_list("step", "state"))


def test_a_run_without_trouble_makes_each_effect_once(desk: Any, clock: Any) -> None:
    run = start()
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.SUCCEEDED
    assert set(steps().values()) == {State.SUCCEEDED}
    assert desk.count(order="1002") == 4


def test_a_refused_refund_walks_back_pickup_then_label(desk: Any, clock: Any) -> None:
    desk.pay.fault("reject", order="1002", status=422)
    run = start()
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    assert list(steps()) == [
        "create_label", "schedule_pickup", "issue_refund", "undo:schedule_pickup", "undo:create_label",
    ]  # fmt: skip
    assert desk.pay.count(order="1002") == 0
    assert DAMAGED_ITEM.pivot is not None
