"""The merged timeline of journal and audit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from audit.models import Entry
from reconciliation import case_wording, wording
from reconciliation.models import Approval, JournalEntry, Operation, Run
from reconciliation.states import RUN_TERMINAL, TERMINAL

SIZE = 40
SAME = timedelta(milliseconds=50)  # journal and audit rows of one transaction


@dataclass(frozen=True)
class Moment:
    """One line of a timeline. `decided` is from the audit log, everything else from the journal."""

    at: datetime
    glyph: str
    text: str
    decided: bool = False
    moved: str = ""
    who: str = ""
    reason: str = ""
    entry: int | None = None
    excerpt: str = ""


@dataclass(frozen=True)
class Story:
    """One page of moments, newest first; `before` leads on to older ones."""

    moments: list[Moment]
    before: str = ""


def story(
    before: datetime | None, *, operation: Operation | None = None, run: Run | None = None, with_audit: bool
) -> Story:
    """The newest moments before a time. Moments of one instant are never torn apart by a page's end."""
    subject = str((operation or run).subject)  # type: ignore[union-attr]
    limit: dict[str, Any] = {} if before is None else {"at__lt": before}
    observed = JournalEntry.objects.filter(**({"operation": operation} if operation else {"run": run}), **limit)
    moments = [_observed(entry) for entry in observed.order_by("-id")[: SIZE + 1]]
    if with_audit:
        decided = Entry.objects.filter(subject=subject, **limit).order_by("-seq").prefetch_related("openings")
        moments += [decided_moment(entry) for entry in decided[: SIZE + 1]]
        moments += _second_persons(operation, run, limit)
    else:
        moments += _marked(operation or run, before)
    moments.sort(key=lambda moment: moment.at, reverse=True)
    return _cut(_folded(moments))


REQUESTS = 10  # requests for a second person that a page tells of


def _second_persons(operation: Operation | None, run: Run | None, limit: Mapping[str, Any]) -> list[Moment]:
    """What was decided about requests for a second person: it is part of the case, and has records of its own."""
    asked = Approval.objects.filter(**({"operation": operation} if operation else {"run": run})).exclude(action="")
    subjects = [str(each.subject) for each in asked.order_by("-id")[:REQUESTS]]
    decided = Entry.objects.filter(subject__in=subjects, **limit).order_by("-at").prefetch_related("openings")
    return [replace(told, text=f"Approval {pk}: {told.text}") for pk, told in map(_of_approval, decided[: SIZE + 1])]


def _of_approval(entry: Entry) -> tuple[str, Moment]:
    return entry.subject.partition(":")[2], decided_moment(entry)


def _marked(row: Any, before: datetime | None) -> list[Moment]:
    """For a reader without the audit log, in whose entries the mark stands: when automation stopped."""
    if row.escalated_at is None or (before is not None and row.escalated_at >= before):
        return []
    return [
        Moment(at=row.escalated_at, glyph="▲", text=f"Automation stopped: {wording.reason(row.escalation_reason)}.")
    ]


def _folded(moments: list[Moment]) -> list[Moment]:
    """A decision of the system that moved nothing stands in the line of the observation that it was made on."""
    kept: list[Moment] = []
    for moment in moments:
        last = kept[-1] if kept else None
        if last and _belongs(last, moment):
            kept[-1] = replace(moment, entry=last.entry, text=f"{moment.text} {last.text[:1].upper()}{last.text[1:]}.")
        else:
            kept.append(moment)
    return kept


def _belongs(decision: Moment, observation: Moment) -> bool:
    quiet = decision.decided and not decision.moved and not decision.reason and decision.who == "the system"
    return quiet and not observation.decided and observation.entry is None and decision.at - observation.at < SAME


def _cut(moments: list[Moment]) -> Story:
    if len(moments) <= SIZE:
        return Story(moments)
    end = moments[SIZE - 1].at
    kept = [moment for moment in moments if moment.at >= end]
    return Story(kept, before=end.isoformat() if len(kept) < len(moments) else "")


def _observed(entry: JournalEntry) -> Moment:
    glyph, text = case_wording.observed(entry)
    return Moment(at=entry.at, glyph=glyph, text=text, excerpt=str(case_wording.facts(entry).get("excerpt") or ""))


def deed_of(entry: Entry, moment: Moment) -> str:
    """What a list says was done: what moved, or what a look-up told where nothing did."""
    if moment.moved:
        return moment.moved
    verdict = str(details_of(entry)["details"].get("verdict") or "")
    if verdict:
        return f"look-up: {wording.FINDINGS.get(verdict, verdict.replace('_', ' '))}"
    words = _LABELS.get(entry.subject.partition(":")[0], wording.LABELS)
    return f"stays {_state(entry.to_state, words)}" if entry.to_state else ""


def decided_moment(entry: Entry) -> Moment:
    """An audit entry as a line: what moved, by whom, why."""
    opened = {opening.field: opening.value for opening in entry.openings.all()}
    words = _LABELS.get(entry.subject.partition(":")[0], wording.LABELS)
    moved = f"{_state(entry.from_state, words)} → {_state(entry.to_state, words)}"
    moved = moved if entry.from_state != entry.to_state else ""
    event = "" if entry.event == "transition" else entry.event.replace("_", " ")
    mark = str(details_of(entry)["details"].get("mark") or "")
    why = wording.reason(entry.reason_code) if mark != entry.reason_code else ""  # the mark says it already
    return Moment(
        at=entry.at,
        glyph="▲" if mark not in ("", "cleared") else "●",
        text=". ".join(filter(None, [why, _mark(mark, entry)])),
        decided=True,
        moved=moved or event,
        who=actor_name(entry, opened),
        reason=opened.get("reason", ""),
        entry=entry.pk,
    )


_LABELS = {"run": wording.RUN_LABELS, "approval": wording.APPROVAL_LABELS}


_ENDED = {"operation": TERMINAL, "run": RUN_TERMINAL}


def _mark(mark: str, entry: Entry) -> str:
    if not mark:
        return ""
    if mark != "cleared":
        return f"Automation stopped: {wording.reason(mark)}"
    ended = entry.to_state in _ENDED.get(entry.subject.partition(":")[0], ())
    return "No longer escalated" if ended else "Automation goes on"


def actor_name(entry: Entry, opened: dict[str, str]) -> str:
    """The actor as people know it: the name as it was then, or what it was."""
    if entry.actor_kind == "system":
        return "the system"
    return opened.get("actor_name") or entry.actor


def details_of(entry: Entry) -> dict[str, Any]:
    """What the canonical record says beside its columns."""
    body: dict[str, Any] = json.loads(bytes(entry.canonical))["body"]
    return body


def _state(state: str | None, words: Mapping[str, wording.Label]) -> str:
    if state is None:
        return "none"
    return words[state].word if state in words else state.replace("_", " ")
