"""A process of a deployment of its own, for tests that restore its database by real means. Prints one JSON object.

python -m tests.one_refund refund 1002     performs the refund of an order, once
python -m tests.one_refund look_up 1002    looks it up
python -m tests.one_refund release         marks everything and releases the fence
"""

import json
import sys
import uuid
from typing import Any

import django

if __name__ == "__main__":
    django.setup()

from reconciliation import executor, fence, reconciler, restore
from reconciliation.actors import Actor
from reconciliation.executor import Intent
from reconciliation.keys import Identity
from reconciliation.models import Operation

ADMIN = Actor(id="system:tests", kind="system")


def refund(number: str) -> dict[str, Any]:
    """As a caller does who has not heard how it ended."""
    intent = Intent(
        identity=Identity(
            tenant="acme", workflow_type="claim", workflow_id=number, step="refund", business_object=f"order-{number}"
        ),
        provider="pay",
        action="refund.create",
        request={"order": number, "amount": 4200, "currency": "USD", "card": "card_1"},
    )
    outcome = executor.perform(intent, actor=ADMIN)
    return {"state": outcome.state, "reason": outcome.reason_code}


def look_up(number: str) -> dict[str, Any]:
    """As a person's press does."""
    looked = reconciler.reconcile(Operation.objects.get(workflow_id=number).pk, actor=ADMIN)
    return {"state": looked.operation.state}


def release() -> dict[str, Any]:
    """As beat and admin do."""
    while restore.mark():
        pass
    down = fence.current()
    assert down is not None
    answer = restore.release(actor=ADMIN, version=down.version, reason="compared", token=uuid.uuid4())
    return {"verdict": answer.verdict}


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    print(json.dumps({"refund": refund, "look_up": look_up, "release": release}[verb](*arguments)))  # noqa: T201
