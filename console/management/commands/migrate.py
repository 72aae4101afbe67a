"""Django's migrate, as the owner of the database.

After it the ledger's functions, rights and transition table are put in place as this version has them.

With the application role it would record migrations as done without doing them (see console.database.OneDatabase).
"""

from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.core.management.commands import migrate
from django.db import connections

from reconciliation import schema


class Command(migrate.Command):
    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.set_defaults(database="owner")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["database"] != "owner":
            raise CommandError("Only the owner role migrates; leave --database out or say --database owner.")
        super().handle(*args, **options)
        owner = connections["owner"]
        if "reconciliation_move" in owner.introspection.table_names():
            schema.install(owner)
