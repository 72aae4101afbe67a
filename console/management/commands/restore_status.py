"""Says whether this database is the ledger that the anchor knows, and may send. Exit status 0: yes, 1: the fence is
down, 2: it cannot be told. With --adopt it takes the ledger for complete, where nothing says otherwise."""

import getpass
import json
import uuid
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import DatabaseError

from reconciliation import fence, fence_wording, restore
from reconciliation.actors import Actor
from reconciliation.anchor import AnchorUnreadable
from reconciliation.models import Operation
from reconciliation.pressing import Verdict


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="for machines: one JSON object")
        parser.add_argument("--adopt", action="store_true", help="nothing of this ledger was lost: anchor it as it is")
        parser.add_argument("--reason", default="", help="for the audit log; --adopt needs one")

    def handle(self, *args: Any, adopt: bool, reason: str, **options: Any) -> None:
        try:
            refused = self._adopt(reason) if adopt else ""
            if not refused:
                fence.look()
            told = status()
        except (AnchorUnreadable, DatabaseError) as problem:
            self.stderr.write(str(problem).strip().splitlines()[0])
            raise SystemExit(2) from None
        self.stdout.write(json.dumps(told) if options["json"] else "\n".join(sentences(told)))
        if refused:
            self.stderr.write(refused)
        raise SystemExit(1 if refused or told["state"] == "down" else 0)

    def _adopt(self, reason: str) -> str:
        """Why it was not adopted; empty where it was."""
        now = fence.current()
        answer = restore.adopt(
            actor=Actor(id=f"system:command:{getpass.getuser()}", kind="system"),
            version=now.version if now else 0,
            reason=reason,
            token=uuid.uuid4(),
        )
        return "" if answer.verdict is Verdict.DONE else answer.message


def status() -> dict[str, Any]:
    """Where the fence stands, in plain values."""
    now = fence.current()
    if now is None or not now.is_down:
        return {"state": "up", "reason": "", "unknown": _unknown(), "replays_kept_by": restore.keeps_it_open()}
    return {
        "state": "down",
        "reason": now.reason,
        "since": now.since.isoformat() if now.since else None,
        "known_until": now.known_until.isoformat() if now.known_until else None,
        "entries_lost": restore.found(now).get("entries_lost", 0),
        "marked": now.marked,
        "marking_is_complete": now.is_marked,
        "unknown": _unknown(),
    }


def _unknown() -> int:
    return Operation.objects.filter(state="ambiguous", reason_code="restored").count()


def sentences(told: dict[str, Any]) -> list[str]:
    """The same for people."""
    if told["state"] == "up":
        more = f" {told['unknown']} operations are still unknown by an earlier restore." if told["unknown"] else ""
        if told["replays_kept_by"]:
            kept = told["replays_kept_by"]
            more += f" What was open at the release is looked up before it is sent, until it is over: {kept}."
        return [f"The anchor knows this ledger; the fence is up.{more}"]
    return [
        f"Nothing is sent since {told['since']}. {fence_wording.LONG[told['reason']]}",
        f"The newest decision here is of {told['known_until']}; {told['entries_lost']} or more are missing."
        if told["entries_lost"] else f"The newest decision here is of {told['known_until']}.",
        f"{told['marked']} operations became unknown by it, {told['unknown']} are so still."
        if told["marking_is_complete"] else "Operations are still being marked as unknown."
        if told["reason"] != "unanchored" else "Nothing was marked. Adopt it (--adopt --reason …), or say on the page"
        " /restore that it was restored.",
        "An admin releases it on the page /restore.",
    ]  # fmt: skip
