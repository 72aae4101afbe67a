"""The fixed cast of the console's tests: five people, two tenants, and rows of the ledger as the tests need them."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from audit.log import Fact
from console import access
from console.models import Tenant
from reconciliation import registry, sealing, transition
from reconciliation.actors import Actor
from reconciliation.models import Operation, Run
from reconciliation.providers.base import ActionSpec, Call, Finding, Receipt, Repeat, Source, Verdict
from reconciliation.transition import Observed

ROLES = {"op_ann": "operator", "op_bob": "operator", "ap_cleo": "approver", "au_dan": "auditor", "vi_eve": "viewer"}
PASSWORD = "correct horse battery staple"
SETTER = Actor(id="system:tests", kind="system")
_numbers = itertools.count(1)


def people(*, tenants: tuple[str, ...] = ("t_acme",)) -> dict[str, User]:
    """The cast, each in their role in these tenants; t_beta exists too, and out_zoe belongs there alone."""
    made = {slug: Tenant.objects.get_or_create(slug=slug)[0] for slug in ("t_acme", "t_beta")}
    users = {}
    for name, role in ROLES.items():
        users[name] = User.objects.create_user(name, password=PASSWORD)
        for slug in tenants:
            access.set_role(user=users[name], tenant=made[slug], role=role, by=SETTER)
    users["out_zoe"] = User.objects.create_user("out_zoe", password=PASSWORD)
    access.set_role(user=users["out_zoe"], tenant=made["t_beta"], role="operator", by=SETTER)
    return users


def client(user: User) -> Client:
    """A browser without JavaScript in which `user` is signed in."""
    browser = Client()
    browser.force_login(user)
    return browser


def actor(user: User, role: str) -> Actor:
    return access.actor_of(user, role=role)


def operation(
    *,
    state: str = "ready",
    tenant: str = "t_acme",
    order: str = "1002",
    amount: int | None = 4200,
    currency: str = "USD",
    provider: str = "pay",
    action: str = "refund.create",
    step: str = "issue_refund",
    workflow_id: str | None = None,
    run: Run | None = None,
    request: dict[str, Any] | None = None,
    hidden: dict[str, Any] | None = None,
    sent: float | None = None,
    entries: tuple[Observed, ...] = (),
    reason: str = "",
    **columns: Any,
) -> Operation:
    """One row in `state`, by the ledger's own functions. `sent`: seconds since the first send."""
    number = next(_numbers)
    shown = request if request is not None else {"order": order, "amount": amount, "currency": currency}
    row = {
        "tenant": tenant,
        "workflow_type": "damaged_item",
        "workflow_id": workflow_id or f"T-{number}",
        "step": step,
        "business_object": order,
        "intent_version": 1,
        "lineage": "\\x" + uuid.uuid4().hex * 2,
        "key": "ac1-" + uuid.uuid4().hex * 2,
        "run_id": run.pk if run else None,
        "provider": provider,
        "account": "main",
        "action": action,
        "fingerprint": "fp1-" + uuid.uuid4().hex,
        "request_shown": json.dumps(shown),
        "request_sealed": sealing.seal(hidden) if hidden else "",
        "amount_minor": amount,
        "currency": currency if amount is not None else "",
        "state": "ready",
    }
    moved = transition.open_operation(
        row=row, after={}, observed=[], fact=_fact("recorded"), run_generation=run.generation if run else None
    )
    assert moved is not None
    made = Operation.objects.get(pk=moved.pk)
    if state == "ready" and not columns and sent is None:
        return made
    return _onward(made, state, sent=sent, entries=entries, reason=reason, columns=columns)


def _onward(
    made: Operation, state: str, *, sent: float | None, entries: Any, reason: str, columns: dict[str, Any]
) -> Operation:
    now = transition.database_now()
    first = now - timedelta(seconds=sent if sent is not None else 0)
    claim: dict[str, Any] = {"claim_nonce": str(uuid.uuid4()), "attempts": 1, "generation": 1, "lease_owner": "w-3"}
    claim |= {"first_sent_at": first.isoformat(), "last_sent_at": first.isoformat()}
    soon = {"lease_until": 60, "due_at": 60}
    held = {"run_generation": made.run.generation} if made.run else {}
    starts = Observed(kind="attempt_started", attempt=1, generation=1, observer="w-3")
    if state in ("ready", "awaiting_approval", "terminated") and sent is None:
        if state == "awaiting_approval":
            transition.transition(
                made.subject, to="pending", version=1, patch=claim, after=soon, fact=_fact("claimed"), **held
            )
            made.refresh_from_db()
            patch = {"attempts": 0, "first_sent_at": None, "last_sent_at": None}
            return _move(made, state, patch | columns, reason)
        return _move(made, None if state == "ready" else state, columns, reason)
    transition.transition(
        made.subject, to="pending", version=1, patch=claim, after=soon, fact=_fact("claimed"), observed=[starts], **held
    )
    made.refresh_from_db()
    if state == "pending":
        return _move(made, None, columns, reason) if columns else made
    patch: dict[str, Any] = {"reason_code": reason, "due_at": None}
    if state == "ambiguous":
        patch |= {"unknown_attempts": [1], "error_class": "unknown", "reason_code": reason or "no_answer"}
        if "escalated_at" not in columns:
            patch["due_at"] = (now + timedelta(seconds=40)).isoformat()
        patch["same_key_until"] = (first + timedelta(hours=24)).isoformat()
        entries = entries or (Observed(kind="no_answer", attempt=1, generation=1, data={"error_class": "unknown"}),)
    if state == "succeeded":
        patch |= {"basis": "receipt", "reason_code": "receipt"}
    return _move(made, state, patch | columns, reason, entries)


def _move(made: Operation, to: str | None, patch: dict[str, Any], reason: str, entries: Any = ()) -> Operation:
    ready = {key: value.isoformat() if isinstance(value, datetime) else value for key, value in patch.items()}
    transition.transition(
        made.subject, to=to, version=made.version, patch=ready, observed=list(entries), fact=_fact(reason or "moved")
    )
    return Operation.objects.get(pk=made.pk)


def escalated(*, because: str = "no_conclusive_answer", age: float = 0, **facts: Any) -> Operation:
    """An unknown operation with which automation has stopped, `age` seconds ago."""
    at = transition.database_now() - timedelta(seconds=age)
    facts.setdefault("sent", age + 900)
    return operation(state="ambiguous", escalated_at=at, escalation_reason=because, **facts)


def finding(verdict: str, **data: Any) -> Observed:
    """What a look-up saw, as the reconciler journals it."""
    facts = {"verdict": verdict, "source": "by_key", "provider_operation_id": "", "observed": {}, "compared": {}}
    facts |= {"authoritative": True, "complete": True, "candidates": [], "note": ""}
    return Observed(kind="finding", attempt=1, generation=1, observer="system:sweep", data=facts | data)


def run(*, tenant: str = "t_acme", workflow_id: str | None = None, order: str = "1002", state: str = "running") -> Run:
    """A run, held by a worker unless another state is asked for."""
    row = {
        "tenant": tenant,
        "workflow_type": "damaged_item",
        "workflow_id": workflow_id or f"R-{next(_numbers)}",
        "workflow_version": 1,
        "business_object": order,
        "state": "pending",
        "input_fingerprint": "fp1-" + uuid.uuid4().hex,
    }
    moved = transition.open_run(row=row, after={"due_at": 0}, fact=_fact("started"))
    assert moved is not None
    made = Run.objects.get(pk=moved.pk)
    patch = {"generation": 1, "lease_owner": "w-3"}
    transition.transition(
        made.subject, to="running", version=1, patch=patch, after={"lease_until": 60, "due_at": 60}, fact=_fact("taken")
    )
    made.refresh_from_db()
    return made


def run_stands(made: Run, state: str, **patch: Any) -> Run:
    """Move a run on to `state`."""
    ready = {key: value.isoformat() if isinstance(value, datetime) else value for key, value in patch.items()}
    transition.transition(
        made.subject, to=state, version=made.version, patch={"due_at": None} | ready, fact=_fact("step_unknown")
    )
    return Run.objects.get(pk=made.pk)


def _fact(code: str) -> Fact:
    return Fact(actor="system:tests", actor_kind="system", reason_code=code)


class Till:
    """A provider inside the test's process: it answers what the test tells it to, and counts what reached it."""

    name, account = "pay", "main"
    actions = {
        "refund.create": ActionSpec(
            repeat=Repeat.KEYED,
            key_retention=timedelta(days=1),
            settles_after=timedelta(seconds=5),
            absence_is_proof=True,
            volatile=("sent_from",),
            shown=("id", "order", "amount", "currency", "status"),
            compare={"order": "order", "amount": "amount", "currency": "currency"},
            headline="Refund {amount} for order {order}",
            money=("amount", "currency"),
        )
    }

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sent: list[Call] = []
        self.asked: list[Call] = []
        self.shows: Finding = Finding(verdict=Verdict.CANNOT_TELL, source=Source.BY_KEY)

    def perform(self, call: Call) -> Receipt:
        self.sent.append(call)
        return Receipt(provider_operation_id=f"re_{len(self.sent)}", observed=dict(call.request))

    def look_up(self, call: Call) -> Finding:
        self.asked.append(call)
        return self.shows

    def shows_found(self, operation: Operation, **differs: Any) -> None:
        """From now on it shows the refund of `operation`."""
        seen = {"id": "re_77", "order": operation.business_object, "amount": operation.amount_minor}
        seen |= {"currency": operation.currency, "status": "settled"} | differs
        self.shows = Finding(
            verdict=Verdict.FOUND,
            source=Source.BY_KEY,
            provider_operation_id="re_77",
            observed=seen,
            authoritative=True,
            complete=True,
        )


TILL = Till()


@pytest.fixture
def till(settings: Any) -> Iterator[Till]:
    """The provider `pay`, and no other, as this process knows it."""
    settings.AFTERCALL_PROVIDERS = ["tests.cast.TILL"]
    registry.forget()
    TILL.reset()
    yield TILL
    registry.forget()
