"""A press on what this deployment cannot build is refused in words and on record: a key or a handler is not there."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography.fernet import Fernet

from audit.models import Entry
from reconciliation import executor, registry, sweeping
from reconciliation.models import ActionToken, Operation
from reconciliation.providers.base import OutcomeUnknown, Rejected
from reconciliation.states import ApprovalState, State
from tests.scripted import AGENT, Clerk, found, order, row
from tests.test_approvals import ALL, ANN, do, the
from tests.test_approvals import press as decide
from tests.test_sagas import press, sagas, settle, start  # noqa: F401 - sagas is a fixture

WITH_CARD = {"order": "1002", "amount": 4200, "currency": "USD", "card": "4242-CANARY"}


def lose(settings: Any, what: str) -> None:
    if what == "key":
        settings.AFTERCALL_SEAL_KEYS = [Fernet.generate_key().decode()]
    else:
        settings.AFTERCALL_PROVIDERS = []
        registry.forget()


def refused_on_record(subject: Operation, message: str, what: str) -> bool:
    said = "AFTERCALL_SEAL_KEYS" if what == "key" else "AFTERCALL_PROVIDERS"
    entries = Entry.objects.filter(subject=str(subject.subject), event="refused")
    return said in message and entries.exists() and not ActionToken.objects.filter(verdict="").exists()


@pytest.mark.parametrize("what", ["key", "provider"])
def test_a_new_intent_that_cannot_be_built_here_is_refused_and_made_once_it_can(
    clerk: Clerk, settings: Any, what: str
) -> None:
    keys, providers = settings.AFTERCALL_SEAL_KEYS, settings.AFTERCALL_PROVIDERS
    clerk.answers(Rejected("no", status=422))
    failed = row(executor.perform(order(request=WITH_CARD), actor=AGENT).pk)
    lose(settings, what)
    answer = press(failed, "new_intent")
    assert answer.verdict == "refused"
    assert refused_on_record(failed, answer.message, what)
    assert (Operation.objects.count(), "CANARY" in answer.message) == (1, False)
    settings.AFTERCALL_SEAL_KEYS, settings.AFTERCALL_PROVIDERS = keys, providers
    registry.forget()
    assert press(failed, "new_intent").verdict == "done"


def test_an_undo_whose_facts_cannot_be_read_is_refused(
    sagas: Any,  # noqa: F811
    clock: Any,
    settings: Any,
) -> None:
    start("saga")
    settle(clock)
    charge = Operation.objects.get(step="charge")
    sagas.sees(found(charge.provider_operation_id, order="1002", amount=4200))
    lose(settings, "key")
    answer = press(charge, "compensate")
    assert answer.verdict == "refused"
    assert refused_on_record(charge, answer.message, "key")
    assert not Operation.objects.filter(undo_of=charge).exists()


@pytest.mark.parametrize("action", ["new_intent", "send_again"])
def test_what_two_people_agreed_to_waits_for_the_key_and_is_done_when_it_is_back(
    clerk: Clerk, clock: Any, settings: Any, action: str
) -> None:
    clerk.answers(OutcomeUnknown("no answer"))
    case = row(executor.perform(order("none", request=WITH_CARD), actor=AGENT).pk)
    if action == "new_intent":
        do(case, "resolve_not_applied", ANN)
    do(case, action, ANN)
    keys = settings.AFTERCALL_SEAL_KEYS
    lose(settings, "key")
    answer = decide("approve", the(case.pk, action), ALL)
    assert "could not be done yet" in answer.message
    assert "AFTERCALL_SEAL_KEYS" in answer.message
    clock.advance(minutes=2)
    sweeping.sweep()
    assert (the(case.pk, action).state, len(clerk.calls)) == (ApprovalState.APPROVED, 1)
    settings.AFTERCALL_SEAL_KEYS = keys
    for _ in range(2):
        clock.advance(minutes=2)
        sweeping.sweep()
    assert (the(case.pk, action).state, len(clerk.calls)) == (ApprovalState.CONSUMED, 2)
    assert Operation.objects.latest("id").state == State.SUCCEEDED
