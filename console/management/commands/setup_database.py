"""Creates roles where it can, migrates as the owner and grants the application its rights; safe to repeat."""

from typing import Any

from django.core.management.base import BaseCommand

from console import setup


class Command(BaseCommand):
    help = __doc__

    def handle(self, *args: Any, **options: Any) -> None:
        setup.set_up(verbosity=options["verbosity"])
