"""What would hold a claim back, told before anybody presses: the restore fence and the stop switches.

By the claim's own rule (sql/restore.sql), so that a page offers nothing that is refused on pressing. How much is in
flight, and what was sent in a window, may change until the press and stays a matter of the claim.
"""

from __future__ import annotations

from . import fence
from .anchor import AnchorUnreadable
from .models import Operation
from .transition import HELD_BACK


def in_the_way(operation: Operation, *, provider: str | None = None, action: str | None = None) -> str:
    """Why nothing of this operation, or of a new one in its place, is sent now; empty where nothing stands in the way.

    `provider` and `action` name another call than its own: that of its undo. Looks at the anchor first.
    """
    try:
        fence.look()
    except AnchorUnreadable as error:
        return f"{error} Nothing is sent before it can be."
    code = fence.call("SELECT fence_in_the_way(%s, %s, %s)", [operation.pk, provider, action])
    return HELD_BACK[code] if code else ""


def waits(held: str) -> str:
    """What is added to a move that may be made while its call is held back."""
    return f" It waits: {held[:1].lower()}{held[1:]}" if held else ""
