"""A workflow of two steps at the scripted provider, in two versions."""

from dataclasses import replace

from reconciliation.workflows import Consent, Step, StepKind, Undo, Workflow


def label_of(facts):
    return {"order": facts.input["order"], "amount": 0, "currency": "USD"}


def refund_of(facts):
    return {
        "order": facts.input["order"],
        "amount": facts.input["amount"],
        "currency": "USD",
        "label": facts.results["label"]["id"],
    }


LABEL = Step(name="label", provider="clerk", action="keyed", request=label_of, cannot_undo="a label stays printed")
REFUND = Step(name="refund", provider="clerk", action="keyed", request=refund_of, kind=StepKind.PIVOT)
MAIL = Step(name="mail", provider="clerk", action="keyed", request=label_of, kind=StepKind.RETRYABLE)


def claim(version, *steps):
    return Workflow(
        name="damaged_item",
        version=version,
        steps=steps,
        business_object=lambda given: given["order"],
        shown=("order",),
    )


first = claim(1, LABEL, REFUND)
second = claim(2, LABEL, REFUND, MAIL)
READ = Step(name="read", provider="clerk", action="read", request=label_of)
reading = Workflow(name="reading", steps=(READ, REFUND), business_object=lambda given: given["order"])
STUCK = Step(
    name="x",
    provider="clerk",
    action="keyed",
    request=lambda facts: {"a": facts.input["missing"]},
    cannot_undo="why not",
)
broken = Workflow(name="broken", steps=(STUCK,), business_object=lambda given: given["order"])
AGREED = Consent(policy="Refunds above 500.00 need one approver.", when=lambda request: request["amount"] > 50_000)


def void_of(facts, result):
    return {"order": facts.input["order"], "amount": 0, "currency": "USD"}


agreed = Workflow(
    name="agreed",
    business_object=lambda given: given["order"],
    shown=("order",),
    steps=(replace(LABEL, cannot_undo="", undo=Undo(action="keyed", request=void_of)), replace(REFUND, consent=AGREED)),
)
