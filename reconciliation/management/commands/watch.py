"""Look once at every condition that a person should see: for a monitor outside, which also notices a silent beat."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from reconciliation import watch
from reconciliation.models import Signal


class Command(BaseCommand):
    help = "Look at every watched condition once, print the open signals, and exit with 1 if there are any."

    def handle(self, *args: Any, **options: Any) -> None:
        watch.look()
        watch.tell()
        signals = list(Signal.objects.filter(cleared_at__isnull=True).order_by("since"))
        for signal in signals:
            self.stdout.write(
                f"{signal.since:%Y-%m-%d %H:%M} {signal.subject}: {watch.title(signal.kind)}. {signal.detail}"
            )
        if signals:
            raise CommandError(f"{len(signals)} open.", returncode=1)
        self.stdout.write("Nothing to see.")
