"""What may become of a run, brought about by scripted refusals and by what a person does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

from examples.order_desk.workflow import DAMAGED_ITEM
from reconciliation import actions, approvals, runs
from reconciliation.actors import Actor, Permission
from reconciliation.models import Approval, Run
from reconciliation.states import ApprovalState, RunState
from reconciliation.workflows import Consent, Facts, Step, StepKind, Undo, Workflow

PERSON = Actor(id="person:1", kind="person", name="Dana Drill", permissions=frozenset(Permission))
FORWARD, BACK, STUCK, CANCELLED = "forward", "walks back", "refused after the pivot", "cancelled, then undone"
AGREED, DENIED, UNANSWERED = "approved", "denied", "approval unanswered"
SCHEDULED = "scheduled"
RECORDED, RECORDED_BACK = "recorded here and told", "recorded here, then refused"

# The order desk with a person's consent before the refund.
CONSENTED = replace(
    DAMAGED_ITEM,
    name="damaged_item_with_consent",
    steps=tuple(
        replace(step, consent=Consent(policy="every refund", expires_after=timedelta(hours=1)))
        if step.kind is StepKind.PIVOT else step
        for step in DAMAGED_ITEM.effects
    ),
)  # fmt: skip

# The order desk that first records the claim in a table beside the ledger, and in that transaction has a mail sent.
WITH_RECORD = replace(
    DAMAGED_ITEM,
    name="damaged_item_recorded",
    steps=(
        Step(
            name="record_claim",
            provider="desk",
            action="outcome.record",
            request=lambda facts: {"order": facts.input["order"], "tell": _mail(facts)},
            undo=Undo(action="outcome.strike", request=lambda facts, result: {"order": facts.input["order"]}),
        ),
        *DAMAGED_ITEM.steps,
    ),
)


def _mail(facts: Facts) -> dict[str, Any]:
    """The message of the outbox: a mail server that knows no keys is the harder one to do once."""
    letter = {"order": facts.input["order"], "to": facts.input["email"], "subject": "We have it", "body": "Noted."}
    return {"provider": "mail", "action": "message.send_listed", "request": letter}


OWN = {workflow.name: workflow for workflow in (CONSENTED, WITH_RECORD)}


@dataclass(frozen=True)
class Flow:
    """What is to happen without any disturbance: the faults that bring it about, and what a person does."""

    name: str
    workflow: str
    script: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    decide: str = ""  # approve | deny: what a person does with a request for consent; nothing: nobody answers
    scheduled: bool = False  # a job's time has come, and the beat starts the run
    then: Callable[[Run], Any] | None = None  # when the run is at rest


def flows(workflow: Workflow) -> dict[str, Flow]:
    """The flows of a workflow; those with consent are the order desk's."""
    effects = workflow.effects
    pivot = workflow.pivot or effects[-1]
    after = [step for step in effects if workflow.after_pivot(step)]
    answer = "approve" if any(step.consent for step in effects) else ""
    made = [
        Flow(FORWARD, workflow.name, decide=answer),
        Flow(BACK, workflow.name, {pivot.action: ("rejected",)}, decide=answer),
    ]
    if after:
        made.append(Flow(STUCK, workflow.name, {after[0].action: ("rejected",)}, decide=answer))
    made.append(Flow(SCHEDULED, workflow.name, scheduled=True, decide=answer))
    made.append(Flow(CANCELLED, workflow.name, decide=answer, then=have_undone))
    if workflow is DAMAGED_ITEM:
        made += [
            Flow(AGREED, CONSENTED.name, decide="approve"),
            Flow(DENIED, CONSENTED.name, decide="deny"),
            Flow(UNANSWERED, CONSENTED.name),
            Flow(RECORDED, WITH_RECORD.name),
            Flow(RECORDED_BACK, WITH_RECORD.name, {pivot.action: ("rejected",)}),
        ]
    return {flow.name: flow for flow in made}


def actions_of(workflow: Workflow, flow: Flow) -> list[str]:
    """The actions that a flow calls."""
    workflow = OWN.get(flow.workflow, workflow)
    forward = [step.action for step in workflow.effects]
    undos = [step.undo.action for step in workflow.effects if step.undo is not None]
    return list(dict.fromkeys(forward + (undos if flow.name in (BACK, CANCELLED, DENIED, RECORDED_BACK) else [])))


def have_undone(run: Run) -> None:
    """A person has what a cancelled run applied undone."""
    if run.state == RunState.CANCELLED:
        runs.compensate(run.pk, actor=PERSON, version=run.version, reason="drill")


def decide(run: Run, what: str) -> bool:
    """A person answers a request for consent of this run, if there is one. Returns whether there was."""
    waiting = Approval.objects.filter(operation__run=run, state=ApprovalState.WAITING).first()
    if waiting is None or not what:
        return False
    press = actions.Press(action=what, token=uuid4(), version=waiting.version, reason="drill")
    (approvals.approve if what == "approve" else approvals.deny)(waiting, press, PERSON)
    return True
