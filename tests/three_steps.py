"""A workflow of three steps, each of which automation can bring to its end: one with a key, one that is looked up, one
that may be repeated."""

from reconciliation.workflows import Step, StepKind, Workflow

THREE = Workflow(
    name="three_steps",
    business_object=lambda claim: str(claim["order"]),
    shown=("order", "amount", "currency", "ticket"),
    steps=(
        Step(
            name="refund",
            provider="pay",
            action="refund.create",
            request=lambda facts: {name: facts.input[name] for name in ("order", "amount", "currency", "card")},
            kind=StepKind.PIVOT,
        ),
        Step(
            name="mail",
            provider="mail",
            action="message.send_listed",
            request=lambda facts: {
                "order": facts.input["order"],
                "to": facts.input["email"],
                "subject": "Your refund",
                "body": f"It is {facts.results['refund']['id']}.",
            },
            kind=StepKind.RETRYABLE,
        ),
        Step(
            name="close",
            provider="tickets",
            action="ticket.close",
            request=lambda facts: {"ticket": facts.input["ticket"]},
            kind=StepKind.RETRYABLE,
        ),
    ),
)
INPUT = {
    "order": "1002",
    "amount": 4200,
    "currency": "USD",
    "card": "card_1",
    "email": "jo@example.com",
    "ticket": "T-77",
}
