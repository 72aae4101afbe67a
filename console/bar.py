"""What every page's bar shows."""

import os
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.utils import timezone

from console import access, example, processes
from console.views.approvals import waiting_for
from console.views.restore import banner
from reconciliation import fence_wording, limits, wording
from reconciliation.actions import Permission

_ENTRIES = (
    ("queue", "Queue", Permission.VIEW),
    ("runs", "Runs", Permission.VIEW),
    ("approvals", "Approvals", Permission.VIEW),
    ("schedules", "Schedules", Permission.VIEW),
    ("audit", "Audit", Permission.VIEW_AUDIT),
    ("health", "Health", Permission.VIEW_HEALTH),
)


def bar(request: HttpRequest) -> dict[str, Any]:
    """Context processor: only entries that lead somewhere for this person."""
    facts: dict[str, Any] = {"example": settings.AFTERCALL_EXAMPLE, "zone": timezone.get_current_timezone_name()}
    if not getattr(request, "user", None) or not request.user.is_authenticated:
        return facts
    entries = [(name, label) for name, label, needed in _ENTRIES if access.tenants_of(request, needed)]
    fence, anchor_problem = banner()
    return facts | {
        "restored": {"fence": fence, "told": fence_wording.SHORT.get(fence.reason, "")} if fence else None,
        "anchor_problem": anchor_problem,
        "entries": entries,
        "counts": _counts(request),
        "stops": [(limit, wording.limit(limit)) for limit in limits.stops(access.tenants_of(request))],
        "here": request.resolver_match.url_name if request.resolver_match else "",
        "roles": ", ".join(sorted(set(access.roles_of(request).values()))) or "no role",
        "people": example.PEOPLE if settings.AFTERCALL_EXAMPLE else {},
        "outside": processes.sandbox_pages(os.environ) if settings.AFTERCALL_EXAMPLE else {},
    }


def _counts(request: HttpRequest) -> dict[str, int]:
    """What waits for this person, beside the name of its page."""
    return {"approvals": waiting_for(request).count()} if access.tenants_of(request, Permission.APPROVE) else {}
