"""The damaged-item claim: a return label, a pickup, the refund, a mail to the customer, the ticket closed.

Read this as the pattern for a workflow of your own. A step says which action of which provider it wants and how its
request follows from the run's input and the results of earlier steps; Aftercall does the rest. The refund is the
pivot: before it everything can be undone, after it the way is forward only.

    AFTERCALL_WORKFLOWS = examples.order_desk.workflow.DAMAGED_ITEM

    from reconciliation import runs
    runs.start("damaged_item", tenant="acme", workflow_id="T-77", input={...}, actor=...)
"""

from __future__ import annotations

from reconciliation.providers.base import Json
from reconciliation.workflows import Consent, Facts, Step, StepKind, Undo, Workflow


def _label(facts: Facts) -> Json:
    return {"order": facts.input["order"], "sender": facts.input["customer"], "service": facts.input["service"]}


def _pickup(facts: Facts) -> Json:
    return {"order": facts.input["order"], "address": facts.input["address"], "window": facts.input["window"]}


def _refund(facts: Facts) -> Json:
    return {name: facts.input[name] for name in ("order", "amount", "currency", "card")}


def _mail(facts: Facts) -> Json:
    label, pickup = facts.results["create_label"], facts.results["schedule_pickup"]
    return {
        "order": facts.input["order"],
        "to": facts.input["email"],
        "subject": f"Your claim about order {facts.input['order']}",
        "body": f"Label {label.get('id')} is attached; pickup {pickup.get('id')} comes {facts.input['window']}.",
    }


def _named(facts: Facts, result: Json) -> Json:
    """What an undo names: the object that the step made."""
    return {"id": result["id"], "order": facts.input["order"]}


def _read(facts: Facts) -> Json:
    return {"ticket": facts.input["ticket"]}


def _close(facts: Facts) -> Json:
    return {"ticket": facts.input["ticket"]}


# What a person must agree to first, and the sentence in which the approver reads why.
LARGE_REFUND = Consent(
    when=lambda request: request["amount"] > 50_000,
    policy="Refunds above 500.00 need one approver, who is neither who asks nor for whom it is asked.",
)

DAMAGED_ITEM = Workflow(
    name="damaged_item",
    business_object=lambda claim: str(claim["order"]),
    shown=("order", "ticket", "amount", "currency", "service", "window"),
    steps=(
        Step(
            name="create_label",
            provider="carrier",
            action="label.create",
            request=_label,
            undo=Undo(action="label.void", request=_named),
        ),
        Step(
            name="schedule_pickup",
            provider="carrier",
            action="pickup.schedule",
            request=_pickup,
            undo=Undo(action="pickup.cancel", request=_named),
        ),
        Step(
            name="issue_refund",
            provider="pay",
            action="refund.create",
            request=_refund,
            kind=StepKind.PIVOT,
            cannot_undo="money that was given back is not taken again",
            consent=LARGE_REFUND,
        ),
        Step(
            name="send_email",
            provider="mail",
            action="message.send",
            request=_mail,
            kind=StepKind.RETRYABLE,
            cannot_undo="a mail that went out cannot be called back",
        ),
        Step(
            name="close_ticket",
            provider="tickets",
            action="ticket.close",
            request=_close,
            kind=StepKind.RETRYABLE,
            cannot_undo="a ticket that was closed is opened again by hand",
        ),
    ),
)

# What a schedule runs: one step that only reads, so that however often it runs nothing happens twice. The input holds
# the time that each run stands for (scheduled_for, window_start, window_end), beside what the schedule itself gives.
TICKET_SWEEP = Workflow(
    name="ticket_sweep",
    business_object=lambda given: str(given["ticket"]),
    shown=("ticket", "scheduled_for", "window_start", "window_end"),
    steps=(Step(name="read_ticket", provider="tickets", action="ticket.read", request=_read),),
)
