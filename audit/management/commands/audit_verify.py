"""Check the audit log, or an exported file."""

from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError

from audit.files import FileTally, verify_file
from audit.proof import Finding
from audit.selection import instant
from audit.verify import Tally, registered_heads, verify

FOUND = 1
NOT_CHECKED = 2


class Command(BaseCommand):
    help = (
        "Checks every entry of the audit log, every subject's chain and its end, or an exported file. "
        "Exits with 0 when all is as it was written, 1 when something is not, 2 when it could not be checked."
    )
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--file", type=Path, help="an exported .jsonl or .csv file; needs no database")

    def handle(self, *, file: Path | None, **options: Any) -> None:
        try:
            found = self._check_file(file) if file else self._check_database()
        except (OSError, DatabaseError) as problem:
            raise CommandError(f"Could not be checked: {problem}", returncode=NOT_CHECKED) from None
        if found:
            raise CommandError(f"{_count(found, 'finding')}: the log is not as it was written.", returncode=FOUND)
        self.stdout.write("No findings.")

    def _check_database(self) -> int:
        tally = Tally()
        found = self._report(verify(registered_heads(), tally=tally))
        self.stdout.write(
            f"Checked {_count(tally.entries, 'entry', 'entries')} about {_count(tally.subjects, 'subject')}, and "
            f"{_count(tally.heads, 'subject')} against where the owner stands. {_erased(tally.erased)}"
        )
        since = f"since {instant(tally.oldest)} " if tally.oldest else ""
        self.stdout.write(
            f"Not covered: the tail {since}is not sealed: sealing is not set up. Whoever can rewrite the log and the "
            "ledger at once, up to the end, leaves no trace here."
        )
        return found

    def _check_file(self, path: Path) -> int:
        tally = FileTally()
        found = self._report(verify_file(path, tally=tally))
        self.stdout.write(f"Checked {_count(tally.rows, 'row')} in {path.name}. {_erased(tally.erased)}")
        self.stdout.write(f"Not covered: {_not_covered(path, tally)}")
        return found

    def _report(self, findings: Iterator[Finding]) -> int:
        found = 0
        for found, finding in enumerate(findings, start=1):  # noqa: B007 - the count is wanted
            self.stdout.write(str(finding))
        return found


def _not_covered(path: Path, tally: FileTally) -> str:
    if path.suffix == ".csv":
        return "a CSV carries no proofs: only its bytes were compared with its manifest. Export JSONL for proofs."
    filters = tally.manifest.get("filters")
    left_out = " Filters leave out entries, so gaps in the numbers were not judged." if filters else ""
    return f"the file is not signed: sealing is not set up.{left_out}"


def _erased(count: int) -> str:
    return f"{_count(count, 'committed text')} erased." if count else ""


def _count(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"
