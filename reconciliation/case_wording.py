"""A case in words: pure functions from an operation and its journal to what people read. No query, no own clock."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from .judgement import absence_provable_at
from .models import JournalEntry, Operation
from .providers.base import ActionSpec, Json, Repeat, Verdict
from .states import TERMINAL, Basis, State
from .wording import BASES, FINDINGS, SOURCES, duration, error, held_back, money, reason

Clock = Callable[[datetime], str]  # how the reader writes a time


def facts(entry: JournalEntry) -> Json:
    """The shown fields of a journal entry; empty where they are no JSON object."""
    return _object(entry.data)


def _object(text: str) -> Json:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class _Gaps(dict[str, str]):
    """A headline whose field is hidden still reads: the name of the field stands in its place."""

    def __missing__(self, name: str) -> str:
        return f"({name.replace('_', ' ')} hidden)"


def shown_request(operation: Operation) -> Json:
    """The fields of the request that may be seen."""
    return _object(operation.request_shown)


def headline(operation: Operation, spec: ActionSpec | None) -> str:
    """One phrase from the data: "Refund 42.00 USD for order 1002". Works without a spec, plainly."""
    undo = operation.step.removeprefix("undo:") if operation.step.startswith("undo:") else ""
    tail = f" (undo of {undo})" if undo else ""
    if spec is None or not spec.headline:
        amount = "" if operation.amount_minor is None else f" {money(operation.amount_minor, operation.currency)}"
        return f"{operation.provider} {operation.action}{amount} for {operation.business_object}{tail}"
    values = _Gaps({name: _plain(value) for name, value in shown_request(operation).items()})
    if spec.money and operation.amount_minor is not None:
        values[spec.money[0]] = values["amount"] = money(operation.amount_minor, operation.currency)
    try:
        return string.Formatter().vformat(spec.headline, (), values) + tail
    except (ValueError, IndexError, KeyError, AttributeError):
        return f"{operation.action} for {operation.business_object}{tail}"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Dispatch:
    """The dispatch verdict: a code for tests and colours, and the sentence."""

    code: str  # never_sent | under_way | no_answer | answered_not_recorded | contradictory | answered | found | ...
    title: str
    sentence: str


_PROOF = {Verdict.FOUND, Verdict.REMOVED, Verdict.MISMATCH, Verdict.SEVERAL}


def dispatch(operation: Operation, entries: Iterable[JournalEntry] = (), spec: ActionSpec | None = None) -> Dispatch:
    """What is known about whether the request left and whether it was answered; or whether it was done here."""
    if is_local(spec):
        return _done_here(operation)
    if operation.attempts == 0:
        return Dispatch("never_sent", "Never sent", "No request has left; nothing can have been applied.")
    if operation.state == State.PENDING:
        return Dispatch("under_way", "Being sent", "An attempt may be in flight under a live lease.")
    if operation.state in TERMINAL or not operation.unknown_attempts:
        return _settled(operation)
    told = list(entries)
    forgotten = set(operation.unknown_attempts) <= _lost_time(told)
    return _unknown(told, money_moves=operation.amount_minor is not None, forgotten=forgotten)


def is_local(spec: ActionSpec | None) -> bool:
    """Whether it is done in this database, in one transaction with its result."""
    return spec is not None and spec.repeat is Repeat.LOCAL


TOGETHER = "It commits together with its result; it cannot be half done."


def _done_here(operation: Operation) -> Dispatch:
    if operation.attempts == 0:
        return Dispatch("never_sent", "Not begun", f"Nothing was done. {TOGETHER}")
    if operation.state == State.PENDING:
        return Dispatch("under_way", "Being done", TOGETHER)
    if operation.state == State.SUCCEEDED:
        by_itself = operation.basis == Basis.RECEIPT
        return Dispatch("answered", "Done", TOGETHER if by_itself else f"That rests on {BASES[operation.basis]}.")
    if operation.state == State.FAILED_TERMINAL and operation.basis == Basis.ASSERTED:
        return Dispatch("asserted", "Said not to be done", "A person's word, not proof.")
    if not operation.unknown_attempts:
        return Dispatch("answered", "Not done", f"Every attempt was rolled back as a whole. {TOGETHER}")
    if operation.sighted:
        told = "What it did may have been committed without a result. Look at the rows that it writes."
        return Dispatch("no_answer", "Left its transaction", told)
    return Dispatch("no_answer", "To be looked up", f"{TOGETHER} The next look says whether it was done.")


def _settled(operation: Operation) -> Dispatch:
    if operation.state == State.SUCCEEDED:
        how = BASES.get(operation.basis, "what is on record")
        return Dispatch("answered", "Applied", f"The effect rests on {how}.")
    if operation.state == State.FAILED_TERMINAL and operation.basis == Basis.ASSERTED:
        return Dispatch("asserted", "Said not to be applied", "A person's word, not proof.")
    if operation.unknown_attempts:
        return Dispatch("no_answer", "Sent, no answer", "Stopped by a person; the outcome stays unknown on record.")
    return Dispatch("answered", "Not applied", "Every attempt is proven not to have been applied.")


def _unknown(entries: list[JournalEntry], *, money_moves: bool, forgotten: bool) -> Dispatch:
    what = "The money" if money_moves else "The effect"
    verdicts = {str(facts(entry).get("verdict", "")) for entry in entries if entry.kind == "finding"}
    kinds = {entry.kind for entry in entries}
    if verdicts & {Verdict.MISMATCH, Verdict.SEVERAL, Verdict.REMOVED} or (
        verdicts & _PROOF and Verdict.ABSENT in verdicts
    ):
        return Dispatch("contradictory", "Contradictory", "What was found does not fit what was asked, or itself.")
    if kinds & {"receipt", "late_report"}:
        return Dispatch(
            "answered_not_recorded", "Answered, not recorded", "An answer came and is kept; it settled nothing yet."
        )
    title = "May have been sent" if forgotten else "Sent, no answer"
    return Dispatch("no_answer", title, f"{what} may have {'moved' if money_moves else 'happened'}.")


def lede(operation: Operation, entries: Iterable[JournalEntry], *, clock: Clock, spec: ActionSpec | None = None) -> str:
    """What happened, in at most four short sentences. `entries` in any order."""
    known, here = list(entries), is_local(spec)
    parts = (
        [_doing(operation, known, clock)] if here else [_sending(operation, known, clock), _looking(operation, known)]
    )
    if operation.escalated_at:
        told = operation.escalation_reason in ("mismatch", "several_candidates", "removed_since")
        why = "" if told else f": {reason(operation.escalation_reason)}"
        parts.append(f"Automation stopped at {clock(operation.escalated_at)}{why}.")
    if operation.state == State.SUCCEEDED and operation.settled_at:
        on = "" if here and operation.basis == Basis.RECEIPT else f", on {BASES.get(operation.basis, 'record')}"
        parts.append(f"Settled at {clock(operation.settled_at)}{on}.")
    return " ".join(part for part in parts if part)


def _doing(operation: Operation, entries: list[JournalEntry], clock: Clock) -> str:
    """The attempts of what is done in this database."""
    if operation.last_sent_at is None or operation.attempts == 0:
        return "Recorded; nothing was done."
    times = "Begun" if operation.attempts == 1 else f"Begun {operation.attempts} times, last"
    text = f"{times} at {clock(operation.last_sent_at)}, in this database"
    lost = next((entry for entry in entries if entry.kind == "lease_expired"), None)
    if lost and lost.attempt == operation.attempts:
        text += _lost_worker(operation, lost, clock)
    return text + "."


def _lost_worker(operation: Operation, lost: JournalEntry, clock: Clock) -> str:
    owner = str(facts(lost).get("owner") or operation.lease_owner or "unknown")
    return f"; worker {owner.removeprefix('worker:')} lost by {clock(lost.at)}"


def _lost_time(entries: Iterable[JournalEntry]) -> set[int]:
    """The attempts that stand for what a restored ledger has forgotten: nobody knows of one that it was made."""
    return {entry.attempt for entry in entries if entry.kind == "restored" and entry.attempt is not None}


def _sending(operation: Operation, entries: list[JournalEntry], clock: Clock) -> str:
    if operation.first_sent_at is None:
        return "Recorded; nothing was ever sent." if operation.attempts == 0 else "Claimed; no send is on record."
    if forgotten := _lost_time(entries):
        return _sent_before_restore(operation.attempts - len(forgotten), clock(operation.first_sent_at))
    again = "" if operation.attempts < 2 or not operation.last_sent_at else f", last at {clock(operation.last_sent_at)}"
    times = "Sent" if operation.attempts == 1 else f"Sent {operation.attempts} times"
    first = "first " if operation.attempts > 1 else ""
    text = f"{times}{', ' if first else ' '}{first}at {clock(operation.first_sent_at)}{again}"
    lost = next((entry for entry in entries if entry.kind == "lease_expired"), None)
    if operation.unknown_attempts:
        text += f", no answer{_to_which(operation)}"
    if lost and operation.unknown_attempts:
        text += _lost_worker(operation, lost, clock)
    return text + "."


def _sent_before_restore(known: int, first: str) -> str:
    if known < 1:
        return "No send is on record; it may have been sent in the time that this ledger has lost."
    often = f"Sent {known} times, first" if known > 1 else "Sent"
    return f"{often} at {first}, and perhaps again in the time that this ledger has lost."


def _to_which(operation: Operation) -> str:
    """Nothing where no attempt was answered, else which ones were not."""
    numbers = [str(number) for number in sorted(operation.unknown_attempts)]
    if len(numbers) >= operation.attempts:
        return ""
    return f" to attempt{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _looking(operation: Operation, entries: list[JournalEntry]) -> str:
    findings = [entry for entry in entries if entry.kind == "finding"]
    if not findings and operation.look_ups:
        return "It cannot be looked up: its provider offers no look-up."
    if not findings:
        return "It was not looked up yet." if operation.state == State.AMBIGUOUS else ""
    newest = max(findings, key=lambda entry: entry.pk)
    verdict = FINDINGS.get(str(facts(newest).get("verdict")), "no verdict")
    last = ", the last time" if operation.look_ups > 1 else ""
    return f"Looked up {_times(operation)}{last}: {verdict}."


def _times(operation: Operation) -> str:
    """How often since the newest attempt without an answer: the ledger counts anew with each of those."""
    if operation.look_ups == 0:
        return "earlier"
    often = "once" if operation.look_ups == 1 else f"{operation.look_ups} times"
    several = operation.attempts > 1 and operation.unknown_attempts
    return f"{often} since attempt {max(operation.unknown_attempts)}" if several else often


_WHY_REFUSED = {
    "in_progress": "in progress; nothing was sent again",
    "wait": "it waits, and may not be sent yet",
}


def observed(entry: JournalEntry) -> tuple[str, str]:
    """A journal entry as (glyph, sentence)."""
    data = facts(entry)
    number = f" {entry.attempt}" if entry.attempt is not None else ""
    tail = _told(str(data.get("sentence") or data.get("note") or ""))
    match entry.kind:
        case "attempt_started":
            here = " in this database" if data.get("local") else ""
            return "→", f"Attempt{number} starts{here}{_by(entry)}.{tail}"
        case "receipt":
            effect = data.get("provider_operation_id")
            return "←", f"Attempt{number} answered{f': {effect}' if effect else ''}.{tail}"
        case "no_answer":
            return (
                "◆",
                f"Attempt{number}: no answer that proves anything ({error(str(data.get('error_class', '')))}).{tail}",
            )
        case "not_applied":
            return "✕", f"Attempt{number} was not applied: {reason(str(data.get('error_class', '')))}.{tail}"
        case "lease_expired":
            if data.get("local"):
                return "✕", f"The lease ran out under attempt{number}; nothing of it was committed.{tail}"
            return "◆", f"The lease ran out under attempt{number}; it may have been sent.{tail}"
        case "finding":
            source = SOURCES.get(str(data.get("source", "")), "")
            verdict = FINDINGS.get(str(data.get("verdict", "")), str(data.get("verdict", "")))
            effect = data.get("provider_operation_id")
            return "○", f"Look-up{f' {source}' if source else ''}: {verdict}{f' ({effect})' if effect else ''}.{tail}"
        case "delivery_refused":
            return (
                "✕",
                f"A delivery was refused{_by(entry)}: {_WHY_REFUSED.get(str(data.get('disposition')), 'not now')}.",
            )
        case "restored":
            return (
                "◆",
                f"Attempt{number} may have been sent in the time that this ledger has lost.{tail}",
            )
        case "held_back":
            return "■", f"A claim was held back. {held_back(str(data.get('code', '')))}{tail}"
        case "late_report":
            return "⧗", f"A late report came for attempt{number} and is kept.{tail}"
        case "heartbeat_refused":
            return "·", f"A heartbeat came after the lease was over and was refused{_by(entry)}.{tail}"
        case "proposal_asked":
            return "→", f"Proposal{number} of {data.get('step')} was asked for, for version {data.get('version')}."
        case "decision_given_up":
            return "↻", f"Version {data.get('version')} of {data.get('step')} was given up for a fresh decision."
        case "evidence":
            return "○", f"Evidence was handed in{_by(entry)}.{tail}"
    return "·", f"{entry.kind.replace('_', ' ').capitalize()}{_by(entry)}.{tail}"


def _told(text: str) -> str:
    """Somebody else's words as a sentence behind ours."""
    text = text.strip()
    return f" {text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}" if text else ""


def _by(entry: JournalEntry) -> str:
    return f" by {entry.observer}" if entry.observer else ""


_SEEN = ("mismatch", "several_candidates", "removed_since", "seen_before_and_gone")


def same_key(operation: Operation, spec: ActionSpec | None, *, now: datetime) -> str:
    """The deadline of a retry with the same key, as one phrase."""
    if operation.state in TERMINAL:
        return "settled"
    if is_local(spec):
        return "not offered: see the rows" if operation.sighted else "safe: done whole or not"
    if operation.same_key_until is None:
        if spec is not None and spec.repeat in (Repeat.NATURAL, Repeat.READ):
            return "safe: twice is once"
        return "not sent yet" if operation.attempts == 0 else "none: would send again"
    if operation.sighted or operation.escalation_reason in _SEEN:
        return "not offered: seen there"
    if operation.same_key_until <= now:
        return f"over since {duration(now - operation.same_key_until)}"
    return f"safe for {duration(operation.same_key_until - now)}"


def share_left(operation: Operation, *, now: datetime) -> int | None:
    """Per cent of the same-key time that is left; None where there is no such time."""
    if operation.same_key_until is None or operation.first_sent_at is None or operation.state in TERMINAL:
        return None
    if operation.sighted or operation.escalation_reason in _SEEN:
        return None
    whole = (operation.same_key_until - operation.first_sent_at).total_seconds()
    left = (operation.same_key_until - now).total_seconds()
    return max(0, min(100, round(100 * left / whole))) if whole > 0 else 0


@dataclass(frozen=True)
class Deadline:
    """A moment that matters, and what it means when it has passed."""

    name: str
    at: datetime
    meaning: str


def deadlines(operation: Operation, spec: ActionSpec | None) -> list[Deadline]:
    """The moments that still matter for an open operation, the soonest first."""
    if operation.state in TERMINAL:
        return []
    found = []
    if operation.same_key_until:
        found.append(Deadline("Key forgotten", operation.same_key_until, "after that the same key may act twice"))
    provable = absence_provable_at(operation, spec) if spec and spec.absence_is_proof else None
    if provable and operation.state == State.AMBIGUOUS:
        found.append(Deadline("Absence provable", provable, "from then on an empty answer counts"))
    if operation.escalate_at and not operation.escalated_at:
        found.append(Deadline("A person is called", operation.escalate_at, "if nothing is proven by then"))
    if operation.not_before and not operation.escalated_at:
        # An unknown one may never be sent again: it is not before then that automation would.
        unknown = operation.state == State.AMBIGUOUS
        meaning = "not sent again by automation earlier" if unknown else "not claimed earlier"
        found.append(Deadline("Repeat" if unknown else "Next attempt", operation.not_before, meaning))
    if operation.lease_until:
        then = (
            "its end proves that nothing was applied" if is_local(spec) else "after that the outcome counts as unknown"
        )
        found.append(Deadline("Lease ends", operation.lease_until, then))
    if operation.due_at and operation.state == State.AMBIGUOUS:
        found.append(Deadline("Next look-up", operation.due_at, "by automation"))
    return sorted(found, key=lambda each: each.at)


def known(
    operation: Operation, entries: Iterable[JournalEntry], spec: ActionSpec | None, *, now: datetime
) -> tuple[str, str, bool]:
    """What a list says of an operation: (what is known, a detail, whether it contradicts what was asked).

    `entries` holds the newest entry of each kind, or more.
    """
    newest: dict[str, JournalEntry] = {}
    for entry in entries:
        if entry.kind not in newest or newest[entry.kind].pk < entry.pk:
            newest[entry.kind] = entry
    finding = newest.get("finding")
    verdict = str(facts(finding).get("verdict", "")) if finding else ""
    if verdict in (Verdict.MISMATCH, Verdict.SEVERAL, Verdict.REMOVED) and operation.state not in TERMINAL:
        data = facts(finding) if finding else {}
        told = (str(data.get("provider_operation_id") or ""), str(data.get("note") or ""))
        title = _other_amount(operation, spec, data) or FINDINGS[verdict].capitalize()
        return title, " · ".join(part for part in told if part), True
    title = dispatch(operation, newest.values(), spec).title
    return title, _detail(operation, verdict, now), False


def shown_amount(operation: Operation, spec: ActionSpec | None, data: Json) -> str:
    """The money that a finding shows, written; empty where it shows none."""
    if spec is None or spec.money is None:
        return ""
    seen = (data.get("observed") or {}).get(spec.compare.get(spec.money[0], spec.money[0]))
    return money(seen, operation.currency) if type(seen) is int else ""


def _other_amount(operation: Operation, spec: ActionSpec | None, data: Json) -> str:
    """ "Found 60.00 USD, asked 600.00 USD", where money is what differs."""
    if spec is None or spec.money is None or operation.amount_minor is None:
        return ""
    seen = (data.get("observed") or {}).get(spec.compare.get(spec.money[0], spec.money[0]))
    if type(seen) is not int or seen == operation.amount_minor:
        return ""
    found, asked = (money(minor, operation.currency) for minor in (seen, operation.amount_minor))
    return f"Found {found}, asked {asked}"


def _detail(operation: Operation, verdict: str, now: datetime) -> str:
    if operation.state in TERMINAL:
        effect = operation.provider_operation_id
        return " · ".join(part for part in (effect, reason(operation.reason_code)) if part)
    parts = []
    if operation.escalated_at and not (operation.look_ups and operation.escalation_reason == "no_conclusive_answer"):
        parts.append(reason(operation.escalation_reason))
    if verdict:
        parts.append(f"looked up {_times(operation)}: {FINDINGS.get(verdict, 'no verdict')}")
    if operation.not_before and operation.not_before > now and operation.state != State.AMBIGUOUS:
        parts.append(f"next attempt in {duration(operation.not_before - now)}")
    elif operation.due_at and operation.due_at > now and operation.state == State.AMBIGUOUS:
        next_ = "looked at again" if operation.look_ups and not verdict else "next look-up"
        parts.append(f"{next_} in {duration(operation.due_at - now)}")
    elif not parts and operation.reason_code:
        parts.append(reason(operation.reason_code))
    return " · ".join(parts)


@dataclass(frozen=True)
class Compared:
    """One field of the comparison of asked and found. `same` is None where there is nothing to compare."""

    name: str
    asked: str
    found: str
    same: bool | None


def comparison(
    operation: Operation, spec: ActionSpec | None, *, hidden: Iterable[str], seen: Json | None, judged: Json
) -> list[Compared]:
    """Field by field: what was asked, and what the provider shows (`seen`; None: nothing was seen).

    `hidden` names the request's sealed fields: they are listed, their values are not. `judged` is the comparison that
    the ledger made, with the hidden values too: field -> equal | differs | not_shown.
    """
    request = shown_request(operation)
    pairs = dict(spec.compare) if spec else {}
    names = [*pairs, *(name for name in request if name not in pairs)]
    masked = set(hidden)
    names += sorted(masked - set(names))
    unit = _money_of(spec, request)
    rows = [
        Compared(
            name=name,
            asked="hidden" if name in masked else _written(name, request.get(name), unit) if name in request else "",
            found=_found(name, pairs.get(name, name), seen, unit, hidden=name in masked and judged.get(name) in _SAME),
            same=_SAME.get(str(judged.get(name))) if seen is not None else None,
        )
        for name in names
    ]
    extra = {} if seen is None else {k: v for k, v in seen.items() if k not in {*pairs.values(), *names}}
    return rows + [Compared(name, "", _plain(value), None) for name, value in sorted(extra.items())]


_SAME = {"equal": True, "differs": False}


def _found(name: str, counterpart: str, seen: Json | None, unit: tuple[str, str], *, hidden: bool) -> str:
    if seen is None or counterpart not in seen:
        return "hidden" if hidden else ""
    return _written(name, seen[counterpart], unit)


def _written(name: str, value: object, unit: tuple[str, str]) -> str:
    return money(value, unit[1]) if name == unit[0] and type(value) is int else _plain(value)


def field(name: str, value: object, spec: ActionSpec | None, request: Json) -> str:
    """One shown field of a request as people read it."""
    return _written(name, value, _money_of(spec, request))


def _money_of(spec: ActionSpec | None, request: Json) -> tuple[str, str]:
    if spec is None or spec.money is None:
        return "", ""
    return spec.money[0], str(request.get(spec.money[1], ""))
