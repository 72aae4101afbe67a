"""`manage.py drill` runs over a deployment's own workflow and cannot reach its ledger."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from console.management.commands import drill
from drill.crashes import ORDER
from reconciliation import registry
from tests.nursery import PROVIDERS


@pytest.fixture
def deployment(settings: Any) -> Any:
    settings.AFTERCALL_PROVIDERS = PROVIDERS
    settings.AFTERCALL_WORKFLOWS = ["examples.order_desk.workflow.DAMAGED_ITEM", "tests.test_eight_failures.CHOOSING"]
    registry.forget()
    yield
    registry.forget()


@pytest.fixture
def started(monkeypatch: Any) -> list[Any]:
    calls: list[Any] = []

    def run(command: list[str], *, env: dict[str, str], check: bool) -> Any:
        calls.append((command, env))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(drill.subprocess, "run", run)
    return calls


def test_the_deployments_providers_and_workflows_are_handed_over(deployment: Any, started: list[Any]) -> None:
    call_command("drill", "damaged_item", input=json.dumps(ORDER), seed=7)
    command, env = started[0]
    assert command[command.index("--workflow") + 1] == "damaged_item"
    assert "--quick" in command
    assert env["DRILL_PROVIDERS"].split(",") == PROVIDERS


@pytest.mark.parametrize(
    ("name", "input", "told"),
    [("nonsense", "{}", "no workflow"), ("damaged_item", "{", "Expecting"), ("choosing", "{}", "--ask-choices")],
)
def test_what_cannot_be_drilled_is_refused_in_one_sentence(
    deployment: Any, started: list[Any], name: str, input: str, told: str
) -> None:
    with pytest.raises(CommandError, match=told):
        call_command("drill", name, input=input)
    assert started == []
