"""Whether the parts that find the truth are at work."""

from typing import Any

import psycopg
from django.db import connection
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
        _ask_database()
    except psycopg.Error:
        return HttpResponse("database unreachable\n", status=503, content_type="text/plain")
    return HttpResponse("ok\n", content_type="text/plain")


def _ask_database() -> None:
    """On a connection of its own: a kept one would wait without end for a server that is frozen."""
    given = connection.get_connection_params()
    options = f"{given.pop('options', '')} -c statement_timeout=1000".strip()
    with psycopg.connect(**given | {"connect_timeout": 2, "options": options, "autocommit": True}) as own:
        own.execute("SELECT 1")


def _facts(tenants: list[str]) -> dict[str, Any]:
    checks = vitals.checks()
    facts = {"checks": checks, "worst": [check for check in checks if check.bad], "section": "health"}
    return facts | {"signals": vitals.signals(tenants)}
