"""Whether the parts that find the truth are at work."""

from typing import Any

from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from console import access, live, vitals
from console.live import signed_in
from reconciliation.actions import Permission


@signed_in
@require_safe
def health(request: HttpRequest) -> HttpResponse:
    """Each part with its number, and what it means when it is not as it should be."""
    tenants = access.require(request, Permission.VIEW_HEALTH)
    return live.answer(request, page="health.html", part="_health.html", facts=_facts(tenants))


@require_safe
def healthz(request: HttpRequest) -> HttpResponse:
    """For machines: 200 while this process can reach its database, 503 otherwise. Says nothing else."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError:
        return HttpResponse("database unreachable\n", status=503, content_type="text/plain")
    return HttpResponse("ok\n", content_type="text/plain")


def _facts(tenants: list[str]) -> dict[str, Any]:
    checks = vitals.checks()
    facts = {"checks": checks, "worst": [check for check in checks if check.bad], "section": "health"}
    return facts | {"signals": vitals.signals(tenants)}
