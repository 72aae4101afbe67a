"""Prints a one-time sign-in link for a person."""

from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError, CommandParser

from console import address, sign_in


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="the person's user name")

    def handle(self, *args: Any, **options: Any) -> None:
        user = User.objects.filter(username=options["name"], is_active=True).first()
        if user is None:
            raise CommandError(f"There is no active person called {options['name']!r}.")
        self.stdout.write(address.of_console() + sign_in.make_link(user))
