"""Search by any id, exact or by prefix, so that every look is an index look."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Q
from django.urls import reverse

from reconciliation import case_wording, registry
from reconciliation.models import JournalEntry, Operation, Run
from reconciliation.providers.base import Json

MOST = 50
KEY = "ac1-"


@dataclass(frozen=True)
class Found:
    """Hits of one search. `only` is the address of the single exact one."""

    operations: list[Operation]
    runs: list[Run]
    only: str = ""


def find(text: str, *, tenants: Sequence[str]) -> Found:
    """Look for an operation's id, key, business object, workflow id or provider's id, and for a run's workflow id."""
    own = Operation.objects.of_tenants(tenants)
    operations = list(own.filter(_exact(text)).order_by("-id")[: MOST + 1])
    runs = list(Run.objects.filter(run_called(text, tenants=tenants), tenant__in=tenants).order_by("-id")[:MOST])
    if len(operations) == 1 and not runs:
        return Found(operations, runs, only=reverse("case", args=[operations[0].pk]))
    if len(runs) == 1 and all(operation.run_id == runs[0].pk for operation in operations):
        return Found(operations, runs, only=reverse("run", args=[runs[0].pk]))
    if not operations and not runs:
        operations = _sighted(own, text)
        if len(operations) == 1:
            return Found(operations, runs, only=reverse("case", args=[operations[0].pk]))
    if not operations and not runs and len(text) >= 4:
        operations = list(own.filter(_prefix(text)).order_by("-id")[:MOST])
        if len(operations) == 1:
            return Found(operations, runs, only=reverse("case", args=[operations[0].pk]))
    return Found(operations[:MOST], runs)


SIGHTED = ("mismatch", "several_candidates", "removed_since", "seen_after_all", "effect_claimed_elsewhere")
LOOKED_THROUGH = 500  # open cases whose findings are searched: the newest ones


def _sighted(own: Any, text: str) -> list[Operation]:
    """Cases that wait for a person because of what a look-up saw under this id. It is not theirs until it is judged.

    Only marked cases are looked through, by the index of those, and of each only its own findings.
    """
    marked = own.filter(escalated_at__isnull=False, escalation_reason__in=SIGHTED).order_by("-id")
    known = {operation.pk: operation for operation in marked[:LOOKED_THROUGH]}
    findings = JournalEntry.objects.filter(operation__in=list(known), kind="finding", data__contains=json.dumps(text))
    seen = {entry.operation_id for entry in findings if _names(case_wording.facts(entry), text)}
    return [operation for pk, operation in known.items() if pk in seen][:MOST]


def _names(data: Json, text: str) -> bool:
    candidates = [each for each in data.get("candidates") or [] if isinstance(each, dict)]
    return data.get("provider_operation_id") == text or any(text in each.values() for each in candidates)


def run_called(text: str, *, tenants: Sequence[str]) -> Q:
    """A run by its workflow id or as "run 12". The unique index begins with the workflow's name; the run of one that is
    not configured here any more is found through its operations."""
    names = {name for name, _ in registry.workflows()}
    of_operations = Operation.objects.filter(tenant__in=tenants, workflow_id=text, run__isnull=False)
    wanted = Q(workflow_type__in=names, workflow_id=text) | Q(
        pk__in=list(of_operations.values_list("run", flat=True)[:MOST])
    )
    number = text.lower().removeprefix("run").strip(" #")
    if number != text and number.isdecimal() and number.isascii() and len(number) < 19:
        wanted |= Q(pk=int(number))
    return wanted


def _exact(text: str) -> Q:
    wanted = Q(key=text) | Q(business_object=text) | Q(workflow_id=text)
    wanted |= Q(provider_operation_id=text) & ~Q(provider_operation_id="")  # the index leaves empty ones out
    number = text.removeprefix("op").strip(" #")
    if number.isdecimal() and number.isascii() and len(number) < 19:
        wanted |= Q(pk=int(number))
    return wanted


def _prefix(text: str) -> Q:
    """Keys and provider ids sort by bytes ("C"), so a prefix is a range of their index."""
    stem = text.rstrip("…")
    return (
        Q(key__startswith=stem)
        | Q(key__startswith=KEY + stem)
        | (Q(provider_operation_id__startswith=stem) & ~Q(provider_operation_id=""))
    )
