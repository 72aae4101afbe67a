"""Prune what has been settled for long enough, as the beat does every hour."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from reconciliation import retention


class Command(BaseCommand):
    help = "Prune settled operations and runs whose time is over, shred what may be shredded, and say what was done."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="count what would go, and touch nothing")
        parser.add_argument("--limit", type=int, default=100_000, help="of each kind, at most")

    def handle(self, *, dry_run: bool, limit: int, **options: Any) -> None:
        tally = retention.tend(limit=limit, dry_run=dry_run)
        self.stdout.write(("Would do: " if dry_run else "") + tally.told())
