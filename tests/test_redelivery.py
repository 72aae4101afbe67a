"""A queue that hands a task out again while it is still being done makes no second effect, and it is seen."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connections

from console import checks
from reconciliation import case_wording, executor
from reconciliation.models import JournalEntry, Operation
from tests.processes import wait_until
from tests.scripted import AGENT, applied, order


@pytest.mark.case("A3")
def test_a_queue_that_redelivers_before_a_task_may_end_is_refused_at_start_with_both_numbers(settings: Any) -> None:
    settings.Q_CLUSTER = {**settings.Q_CLUSTER, "timeout": 600, "retry": 120}
    (error,) = checks.redelivery()
    assert error.id == "aftercall.E020"
    assert "120" in error.msg
    assert str(checks.longest_delivery(settings.Q_CLUSTER)) in f"{error.msg} {error.hint}"


@pytest.mark.case("A3")
def test_a_second_delivery_of_a_running_operation_is_refused_and_seen(clerk: Any) -> None:
    release = threading.Event()

    def slowly(call: Any) -> Any:
        release.wait(20)
        return applied("r-1", **call.request)

    def first() -> None:
        try:
            executor.perform(order(), actor=AGENT)
        finally:
            connections.close_all()

    clerk.answers(slowly)
    worker = threading.Thread(target=first)
    worker.start()
    try:
        wait_until(lambda: len(clerk.calls) == 1)
        again = executor.perform(order(), actor=AGENT)
    finally:
        release.set()
        worker.join()
    assert again.disposition == "in_progress"
    refused = JournalEntry.objects.get(kind="delivery_refused")
    assert "in progress" in case_wording.observed(refused)[1]
    operation = Operation.objects.get()
    assert (operation.state, operation.attempts) == ("succeeded", 1)
    assert clerk.effects == [operation.key]
