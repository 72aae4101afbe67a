"""`manage.py drill WORKFLOW --input JSON`: the crash sweep over a workflow of this deployment. Nothing leaves."""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from reconciliation import registry
from reconciliation.workflows import Choice


class Command(BaseCommand):
    help = (
        "Kill, freeze and cancel runs of a workflow of this deployment at every boundary. It uses a database of its "
        "own in a temporary folder and doubles of the configured providers: no ledger is touched, no provider called."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("workflow", help="the name of one of AFTERCALL_WORKFLOWS")
        parser.add_argument("--input", required=True, help="an input of that workflow, as JSON")
        parser.add_argument("--full", action="store_true", help="every boundary and 6,000 pairs, instead of a sample")
        parser.add_argument("--seed", type=int, help="repeat an earlier drill")
        parser.add_argument("--into", default=str(settings.AFTERCALL_VAR / "drill"), help="folder of the report")
        parser.add_argument(
            "--ask-choices", action="store_true", help="call the workflow's choice steps, which may ask a real model"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            json.loads(options["input"])
            workflow = registry.workflow(options["workflow"])
        except (ValueError, registry.Unregistered) as problem:
            raise CommandError(str(problem)) from problem
        if any(isinstance(step, Choice) for step in workflow.steps) and not options["ask_choices"]:
            raise CommandError(
                "This workflow has choice steps, which may ask a real model: allow that with --ask-choices."
            )
        status = subprocess.run(_command(options), env=_environment(), check=False).returncode
        if status:
            raise CommandError("The drill failed; the report says where.", returncode=status)


def _command(options: dict[str, Any]) -> list[str]:
    words = [sys.executable, "-m", "drill", "--only", "crashes", "--workflow", options["workflow"]]
    words += ["--input", options["input"], "--into", options["into"]]
    words += [] if options["full"] else ["--quick"]
    return words + (["--seed", str(options["seed"])] if options["seed"] is not None else [])


def _environment() -> dict[str, str]:
    """The drill drops every setting of the deployment but these: it must not be able to reach the real ledger."""
    kept = {"DRILL_PROVIDERS": settings.AFTERCALL_PROVIDERS, "DRILL_WORKFLOWS": settings.AFTERCALL_WORKFLOWS}
    return {**os.environ, **{name: ",".join(paths) for name, paths in kept.items()}}
