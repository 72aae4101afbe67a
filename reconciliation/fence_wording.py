"""The restore fence in words for people."""

from __future__ import annotations

from datetime import datetime
from typing import Any

# Why the restore fence came down: a line for every page, and the paragraph of its own page.
SHORT: dict[str, str] = {
    "behind": "this ledger was restored and has forgotten what was done after its backup.",
    "no_anchor": "the anchor of this ledger is missing, so it may be a restored copy.",
    "another": "the anchor beside this ledger knows another one.",
    "moved": "this ledger was brought to another place, and the one it was made from may still be sending.",
    "forked": "this ledger's history is not the one that its anchor knows.",
    "unanchored": "nobody has said yet that this ledger is complete.",
}
LONG: dict[str, str] = {
    "behind": "The anchor outside the database knows decisions that this ledger does not have: it was restored from a "
    "backup. What was sent after that backup is not on record here.",
    "no_anchor": "This ledger has been anchored before, and its anchor is not there. It may be a copy of a backup that "
    "was loaded here, or the anchor's file was lost; a further machine must share the anchor of the first one.",
    "another": "The anchor beside this database knows a ledger of another identity: the database is empty or new, a "
    "copy of another one, or the one from before an earlier release.",
    "moved": "Everything that the anchor knows is here, but in another PostgreSQL or another database than before. A "
    "copy that was loaded elsewhere looks like this, and the original may still be sending.",
    "forked": "The newest entry that the anchor knows is not what stands here under its number: this ledger went on "
    "differently from a point in the past.",
    "unanchored": "There are operations, runs or jobs here, and no anchor has ever known them: this is the first start "
    "with a version that keeps one, or a backup from before that. Which of them it is, only a person can say.",
}


def told(found: dict[str, Any]) -> list[tuple[str, Any]]:
    """What was compared when the fence came down: (what, text or moment)."""
    known, here = found.get("anchor") or {}, found["here"]
    lost = found.get("entries_lost", 0)
    rows: list[tuple[str, Any]] = [("Newest decision in this ledger", _moment(here["at"]) or "none")]
    if known.get("database"):
        rows.append(("Newest decision that the anchor knows", _moment(known["at"]) or "none"))
    if lost:
        rows.append(("Decisions that are missing here", f"{lost} or more"))
    if here["lost"]:
        rows.append(("Claims on the trail that are missing here", f"{here['lost']} or more"))
    place = "the same as before"
    if known.get("system") and known["system"] != here["system"]:
        place = "another PostgreSQL than before"
    elif known.get("oid") and known["oid"] != here["oid"]:
        place = "another database of the same PostgreSQL"
    if known.get("system"):
        rows.append(("Place", place))
    if known.get("timeline") and known["timeline"] != here["timeline"]:
        rows.append(("Timeline of PostgreSQL", f"{here['timeline']}, was {known['timeline']}"))
    return rows


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
