"""The work that every contender does: one operation, claimed and settled."""

from __future__ import annotations

from reconciliation.actors import Actor
from reconciliation.executor import Intent
from reconciliation.keys import Identity
from reconciliation.providers.base import ActionSpec, Call, Json, Receipt, Repeat

ACTOR = Actor(id="system:benchmark", kind="system")
STEP = "tag order"


class Shelf:
    """A provider in this process that answers at once, so that only the ledger costs."""

    name = "shelf"
    account = "main"
    actions = {
        "tag": ActionSpec(
            repeat=Repeat.NATURAL,
            shown=("order", "amount", "currency", "tag"),
            compare={"amount": "amount", "currency": "currency"},
            money=("amount", "currency"),
            headline="Tag order {order}",
        )
    }

    def perform(self, call: Call) -> Receipt:
        return answer(call.request, effect=call.key[4:28])


SHELF = Shelf()


def answer(request: Json, *, effect: str) -> Receipt:
    """What the outside world says: two fields that are compared, one id, one field of its own."""
    return Receipt(
        provider_operation_id=effect,
        result={"tag": "damaged", "order": request["order"]},
        observed={"amount": request["amount"], "currency": request["currency"]},
    )


def request(number: int) -> Json:
    """A request of which two fields may not be seen, so that encryption is part of the work."""
    return {
        "order": f"order-{number}",
        "amount": 4200,
        "currency": "USD",
        "customer": f"customer-{number}@example.test",
        "note": "The box was wet and the lamp inside was broken.",
    }


def intent(number: int, *, batch: str) -> Intent:
    """Operation `number` of a batch that no other run uses."""
    identity = Identity(
        tenant="acme",
        workflow_type="damaged_item",
        workflow_id=f"{batch}-{number}",
        step=STEP,
        business_object=f"order-{number}",
    )
    return Intent(
        identity=identity, provider=Shelf.name, action="tag", request=request(number), requested_by="agent:benchmark"
    )
