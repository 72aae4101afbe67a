"""Print the transition table in Markdown, for docs/states.md."""

from typing import Any

from django.core.management.base import BaseCommand

from reconciliation import states


class Command(BaseCommand):
    help = "Print the transition table in Markdown."
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write(states.drawn(), ending="")
