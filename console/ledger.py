"""What pages ask about a row of the ledger and its configuration, which may have gone since."""

from reconciliation import registry
from reconciliation.models import Operation
from reconciliation.providers.base import ActionSpec


def spec_of(operation: Operation) -> ActionSpec | None:
    """What the action promises; None when its provider or action is not configured any more."""
    try:
        return registry.spec(operation.provider, operation.action)
    except registry.Unregistered:
        return None
