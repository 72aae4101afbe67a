"""Write the audit log into a file."""

import getpass
import json
import os
from argparse import ArgumentParser
from datetime import date
from pathlib import Path
from typing import Any

import psycopg
from django.core.management.base import BaseCommand, CommandError
from django.db import Error

from audit.export import Export, Format
from audit.files import MANIFEST_SUFFIX
from audit.log import Fact
from audit.selection import FILTERS, InvalidSelection, Selection


class Command(BaseCommand):
    help = (
        "Writes the entries of one tenant into a file: CSV for people, JSONL with proofs for machines. Days are those "
        "of the given zone; --from is included, --to is not. The export is itself recorded in the log."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--tenant", required=True)
        parser.add_argument("--from", dest="first_day", type=date.fromisoformat, help="first day, included")
        parser.add_argument("--to", dest="end_day", type=date.fromisoformat, help="last day, not included")
        parser.add_argument("--zone", default="UTC", help="IANA name, such as Europe/Berlin")
        parser.add_argument("--format", choices=["csv", "jsonl"], required=True)
        parser.add_argument("--out", type=Path, required=True)
        for name in FILTERS:
            parser.add_argument(f"--{name.replace('_', '-')}")

    def handle(self, *, format: Any, out: Path, **options: Any) -> None:
        try:
            asked = {name: options[name] for name in ("tenant", "first_day", "end_day", "zone", *FILTERS)}
            export = _write(Selection(**asked), format=format, out=out)
        except FileExistsError:
            raise CommandError(f"{out} is there already; an export never replaces a file.", returncode=2) from None
        except InvalidSelection as problem:
            raise CommandError(str(problem), returncode=2) from None
        except (OSError, Error, psycopg.Error) as problem:
            raise CommandError(f"The export is not complete: {problem}") from None
        self.stdout.write(f"{export.written.rows:,} entries in {out}. Recorded as {export.name}.")


def _write(selection: Selection, *, format: Format, out: Path) -> Export:
    with out.open("xb") as file, Export(selection, format=format, by=_who()) as export:
        for chunk in export:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if format == "csv":
        out.with_name(out.name + MANIFEST_SUFFIX).write_text(json.dumps(export.manifest, indent=2) + "\n")
    return export


def _who() -> Fact:
    """Whoever sits at this machine's command line; there is no signed-in person here."""
    return Fact(
        actor="system:command_line", actor_kind="system", actor_name=getpass.getuser(), reason_code="command_line"
    )
