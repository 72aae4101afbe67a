"""Django's migrate, as the owner of the database.

With the application role it would record migrations as done without doing them (see console.database.OneDatabase).
"""

from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.core.management.commands import migrate


class Command(migrate.Command):
    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.set_defaults(database="owner")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["database"] != "owner":
            raise CommandError("Only the owner role migrates; leave --database out or say --database owner.")
        super().handle(*args, **options)
