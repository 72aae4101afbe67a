"""The eight failures that a durable workflow must survive. Each counts effects at the outside systems themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from audit.models import Entry
from drill import boundaries
from drill.boundaries import Killed, Tape
from reconciliation import registry, runs, sweeping, workers
from reconciliation.models import JournalEntry, Operation, Run
from reconciliation.workflows import Choice, Step, StepKind, Workflow
from tests.nursery import PROVIDERS, Desk
from tests.test_kill import intent
from tests.test_run_kill import check_ended, walking
from tests.test_run_kill import start as start_three
from tests.test_sagas import AGENT, CLAIM, settle, states
from tests.test_sagas import desk as claims  # noqa: F401 - a fixture
from tests.test_same_identity import perform
from tests.three_steps import INPUT as THREE_INPUT
from tests.world import World

asked: list[int] = []


def start() -> Run:
    return runs.start("damaged_item", tenant="acme", workflow_id="T-77", input=CLAIM, actor=AGENT)


def _choose(facts: Any) -> dict[str, Any]:
    """A model that answers something else each time that it is asked."""
    asked.append(len(asked) + 1)
    return {"amount": 1000 * asked[-1]}


CHOOSING = Workflow(
    name="choosing",
    business_object=lambda given: str(given["order"]),
    steps=(
        Choice(name="decide", choose=_choose, shown=("amount",)),
        Step(
            name="refund", provider="pay", action="refund.create", kind=StepKind.PIVOT,
            request=lambda facts: {
                "order": facts.input["order"], "amount": facts.results["decide"]["amount"], "currency": "USD",
                "card": "card_1",
            },
        ),
    ),
)  # fmt: skip


@pytest.fixture
def choosing(ledger_db: Any, world: World, settings: Any) -> Iterator[World]:
    settings.AFTERCALL_PROVIDERS = PROVIDERS
    settings.AFTERCALL_WORKFLOWS = ["tests.test_eight_failures.CHOOSING"]
    registry.forget()
    workers._known.clear()
    asked.clear()
    yield world
    registry.forget()


@pytest.mark.processes
def test_1_a_crash_before_the_request(desk: Desk) -> None:
    walking(desk, start_three(), "sending", passing=1).kill()
    assert desk.world.count() == 1, "the first step; the second had not left"
    check_ended(desk)


@pytest.mark.processes
def test_2_a_crash_after_the_effect_before_its_answer_is_saved(desk: Desk) -> None:
    walking(desk, start_three(), "answered", passing=1).kill()
    assert desk.world.count() == 2, "both are done, and the ledger knows of one"
    check_ended(desk)
    assert all(desk.sent(operation) == 1 for operation in Operation.objects.all())


def test_3_rate_limited_twice_then_done(claims: World, clock: Any) -> None:  # noqa: F811
    claims.pay.fault("rate_limited", times=2, retry_after=7)
    run = start()
    settle(clock)
    run.refresh_from_db()
    refund = Operation.objects.get(step="issue_refund")
    assert (run.state, refund.attempts) == ("succeeded", 3)
    assert claims.pay.count(order="1002") == 1
    assert len(claims.pay.requests(key=refund.key)) == 3
    assert "no_answer" not in JournalEntry.objects.filter(operation=refund).values_list("kind", flat=True)


def test_4_a_refused_credential_fails_at_once_and_leaves_the_budget_of_retries_alone(
    claims: World, clock: Any  # noqa: F811
) -> None:  # fmt: skip
    claims.carrier.fault("unavailable", action="pickup.schedule")
    claims.pay.fault("error_echo")
    run = start()
    settle(clock)
    run.refresh_from_db()
    refund, pickup = (Operation.objects.get(step=name) for name in ("issue_refund", "schedule_pickup"))
    assert (refund.state, refund.error_class, refund.attempts) == ("failed_terminal", "unauthorized", 1)
    assert (pickup.state, pickup.attempts) == ("succeeded", 2)
    assert claims.pay.count() == 0
    assert run.state == "compensated"


def test_5_a_decision_is_made_once_and_reused_after_a_crash(choosing: World, clock: Any) -> None:
    run = runs.start("choosing", tenant="acme", workflow_id="w5", input={"order": "1002"}, actor=AGENT)
    tape = Tape()
    tape.on["after ledger_choose"] = tape.kill
    with boundaries.installed(), boundaries.recording(tape), pytest.raises(Killed):
        runs.advance(run.pk)
    assert (asked, choosing.pay.count()) == ([1], 0)
    workers._known.clear()
    settle(clock, seconds=60)
    run.refresh_from_db()
    assert (run.state, asked) == ("succeeded", [1])
    assert [effect["fields"]["amount"] for effect in choosing.pay.effects()] == [1000]


def test_6_a_late_failure_after_two_effects_undoes_them_in_reverse_and_on_record(
    claims: World, clock: Any  # noqa: F811
) -> None:  # fmt: skip
    claims.pay.fault("reject", status=422)
    run = start()
    settle(clock)
    run.refresh_from_db()
    assert run.state == "compensated"
    done = [effect["kind"] for effect in claims.carrier.effects(order="1002")]
    assert len(done) == 4
    assert [claims.pay.count(), claims.mail.count(), claims.tickets.count()] == [0, 0, 0]
    assert list(states()) == [
        "create_label", "schedule_pickup", "issue_refund", "undo:schedule_pickup", "undo:create_label",
    ]  # fmt: skip
    undone = Operation.objects.filter(step__startswith="undo:").order_by("settled_at").values_list("step", flat=True)
    assert list(undone) == ["undo:schedule_pickup", "undo:create_label"]
    codes = Entry.objects.filter(subject=str(run.subject)).order_by("version").values_list("reason_code", flat=True)
    assert [c for c in codes if c in ("started", "walks_back", "all_undone")] == ["started", "walks_back", "all_undone"]
    for operation in Operation.objects.all():
        assert Entry.objects.filter(subject=str(operation.subject), event="transition").count() == operation.version


def test_7_a_compensation_that_fails_stays_visible_and_is_not_called_done(
    claims: World, clock: Any  # noqa: F811
) -> None:  # fmt: skip
    claims.pay.fault("reject", status=422)
    claims.carrier.fault("reject", action="label.void", status=422)
    run = start()
    settle(clock)
    run.refresh_from_db()
    assert (run.state, bool(run.escalated_at), run.escalation_reason) == ("compensating", True, "undo_incomplete")
    assert "stuck: create_label" in run.waiting_for
    void = Operation.objects.get(step="undo:create_label")
    assert void.state == "failed_terminal"
    assert claims.carrier.count(order="1002") == 3, "label, pickup, pickup cancelled: the label stands"
    for _ in range(3):
        clock.advance(days=1)
        sweeping.sweep()
    run.refresh_from_db()
    assert (run.state, bool(run.escalated_at)) == ("compensating", True)
    assert claims.carrier.count(order="1002") == 3


@pytest.mark.processes
def test_8_one_event_delivered_to_many_workers_at_once_is_one_run(desk: Desk) -> None:
    event = {"workflow": "three_steps", "workflow_id": "w1", "input": THREE_INPUT}
    crowd = [desk.worker(do="start_and_advance", **event, stop_at=["starting"]) for _ in range(6)]
    for worker in crowd:
        worker.reached("starting")
    for worker in crowd:
        worker.go_on("starting")
    for worker in crowd:
        assert worker.ended(seconds=60)["event"] == "ended"
    assert Run.objects.count() == 1
    check_ended(desk)
    assert desk.world.count() == 3


@pytest.mark.processes
def test_8_one_intent_delivered_while_it_is_under_way_is_journaled_and_not_sent(desk: Desk) -> None:
    desk.world.pay.fault("hang_after_effect")
    first = desk.worker(do="perform", intent=intent("keyed"))
    desk.world.pay.await_waiting()
    assert perform(intent("keyed")).disposition == "in_progress"
    desk.world.pay.release()
    first.ended()
    refused = JournalEntry.objects.get(kind="delivery_refused")
    assert json.loads(refused.data)["disposition"] == "in_progress"
    assert (desk.world.pay.count(), len(desk.world.pay.requests())) == (1, 1)
