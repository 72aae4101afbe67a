"""Feed the example with claims."""

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError


class Command(BaseCommand):
    help = "Brings damaged-item claims to the order desk of the example, some of which lose an answer on the way."

    def handle(self, *args: Any, **options: Any) -> None:
        if not settings.AFTERCALL_EXAMPLE:
            raise CommandError("This feeds the example only; start that with `manage.py start --example`.")
        from examples.order_desk.feed import Feed

        Feed().run()
