"""Which steps of a workflow may act twice when they are run twice: what has no key that the provider remembers."""

from __future__ import annotations

from . import registry
from .providers.base import Repeat


def steps(workflow_name: str) -> list[str]:
    """Names of the steps whose provider would not tell a second call from a new order. Raises Unregistered."""
    workflow = registry.workflow(workflow_name)
    return [step.name for step in workflow.effects if _is_keyless(step.provider, step.action)]


def _is_keyless(provider: str, action: str) -> bool:
    try:
        return registry.spec(provider, action).repeat in (Repeat.NONE, Repeat.LOOKUP)
    except registry.Unregistered:
        return True  # what is not known here is not taken for harmless
