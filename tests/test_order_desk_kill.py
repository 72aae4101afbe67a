"""A worker is killed in the order desk's own claim: while it walks back, and with a refund that a person agreed to."""

from __future__ import annotations

from typing import Any

import pytest

from audit.models import Entry
from reconciliation import runs
from reconciliation.models import Approval, Operation, Run
from reconciliation.states import ApprovalState, RunState
from tests.nursery import WITH_CLAIMS, Desk
from tests.scripted import AGENT
from tests.test_approvals import CLEO, do
from tests.test_sagas import CLAIM

pytestmark = pytest.mark.processes

ALL_OF_IT = ["label", "pickup", "pickup.cancel", "label.void"]
UNDOS = ["undo:schedule_pickup", "undo:create_label"]


def start(**input: Any) -> Run:
    return runs.start("damaged_item", tenant="acme", workflow_id="T-77", input={**CLAIM, **input}, actor=AGENT)


def kill_at(desk: Desk, boundary: str, **job: Any) -> None:
    worker = desk.worker(**job, stop_at=[boundary], settings=WITH_CLAIMS)
    worker.reached(boundary)
    worker.kill()


def walks_back(desk: Desk) -> Run:
    """A claim whose refund was refused: its label and its pickup are to be taken back, and nothing of that is sent."""
    desk.world.pay.fault("reject", order="1002", status=422)
    run = runs.advance(start().pk)
    assert (run.state, desk.world.carrier.count()) == (RunState.COMPENSATING, 2)
    return run


def check_undone_once(desk: Desk) -> None:
    desk.come_to_rest()
    desk.check()
    assert Run.objects.get().state == RunState.COMPENSATED
    undos = list(Operation.objects.exclude(undo_of=None).order_by("id"))
    assert [(undo.step, undo.state) for undo in undos] == [(step, "succeeded") for step in UNDOS]
    assert [effect["kind"] for effect in desk.world.carrier.effects(order="1002")] == ALL_OF_IT
    assert [desk.sent(undo) for undo in undos] == [1, 1]
    assert desk.world.pay.count() == 0


@pytest.mark.case("G4")
@pytest.mark.parametrize(("boundary", "cancelled"), [("claimed", 0), ("answered", 1), ("settled", 1)])
def test_killed_in_an_undo_another_worker_takes_back_the_rest_and_each_once(
    claims: Desk, boundary: str, cancelled: int
) -> None:
    kill_at(claims, boundary, do="advance", pk=walks_back(claims).pk)
    undo = claims.operation(step="undo:schedule_pickup")
    assert undo.state == ("succeeded" if boundary == "settled" else "pending")
    assert claims.world.carrier.count(key=undo.key) == cancelled
    assert not Operation.objects.filter(step="undo:create_label").exists(), "it waits for the one before"
    check_undone_once(claims)


@pytest.mark.case("G4")
def test_killed_while_the_carrier_takes_a_pickup_back_it_is_taken_back_once(claims: Desk) -> None:
    run = walks_back(claims)
    claims.world.carrier.fault("hang_after_effect", action="pickup.cancel")
    worker = claims.worker(do="advance", pk=run.pk, settings=WITH_CLAIMS)
    claims.world.carrier.await_waiting()
    worker.kill()
    claims.world.carrier.release(drop=True)
    check_undone_once(claims)


def agreed_to(desk: Desk) -> Approval:
    """A refund of 640.00, which a person has agreed to and nobody has sent."""
    run = runs.advance(start(amount=64_000).pk)
    assert run.state == RunState.AWAITING_APPROVAL
    assert do(Approval.objects.get(), "approve", CLEO).verdict == "done"
    assert desk.world.pay.requests() == []
    return Approval.objects.get()


@pytest.mark.case("F1")
@pytest.mark.parametrize(("boundary", "refunds"), [("before_claim", 0), ("claimed", 0), ("answered", 1)])
def test_killed_with_a_refund_that_a_person_agreed_to_it_is_made_once_and_the_consent_used_once(
    claims: Desk, boundary: str, refunds: int
) -> None:
    approval = agreed_to(claims)
    kill_at(claims, boundary, do="sweep")
    refund = claims.operation(step="issue_refund")
    assert refund.state == ("ready" if boundary == "before_claim" else "pending")
    assert claims.world.pay.count(order="1002") == refunds
    claims.come_to_rest()
    claims.check()
    assert Run.objects.get().state == RunState.SUCCEEDED
    assert [effect["fields"]["amount"] for effect in claims.world.pay.effects(order="1002")] == [64_000]
    assert Approval.objects.get().state == ApprovalState.CONSUMED
    assert Entry.objects.filter(subject=str(approval.subject), to_state=ApprovalState.CONSUMED).count() == 1
