"""What people read: pure functions from rows to words. No query, no clock of its own, no markup."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from .fence_wording import SHORT
from .judgement import absence_provable_at
from .leases import HANDLER, LOCK
from .models import Job, JournalEntry, Limit, Operation, Run, Slot
from .occurrences import Missed, Overlap, SlotState
from .providers.base import ActionSpec, Json, Repeat, Verdict
from .sealing import CannotOpen, hidden_names
from .states import RUN_TERMINAL, TERMINAL, ApprovalState, Basis, RunState, State
from .transition import HELD_BACK

Clock = Callable[[datetime], str]  # how the reader writes a time

# ISO 4217: currencies whose minor unit is not a hundredth.
EXPONENTS: dict[str, int] = {
    **dict.fromkeys(
        ("BIF", "CLP", "DJF", "GNF", "ISK", "JPY", "KMF", "KRW", "PYG", "RWF", "UGX", "UYI", "VND", "VUV", "XAF"), 0
    ),
    **dict.fromkeys(("XOF", "XPF"), 0),
    **dict.fromkeys(("BHD", "IQD", "JOD", "KWD", "LYD", "OMR", "TND"), 3),
    **dict.fromkeys(("CLF", "UYW"), 4),
}


@dataclass(frozen=True)
class Label:
    """A state as people see it: a glyph and a word, so that colour never stands alone, and a tone for the colour."""

    glyph: str
    word: str
    tone: str  # person | unknown | wait | good | calm


LABELS: dict[str, Label] = {
    State.READY: Label("○", "ready", "calm"),
    State.AWAITING_APPROVAL: Label("◇", "awaiting approval", "wait"),
    State.PENDING: Label("▸", "in flight", "wait"),
    State.FAILED_RETRYABLE: Label("↻", "to be retried", "wait"),
    State.AMBIGUOUS: Label("◆", "unknown", "unknown"),
    State.SUCCEEDED: Label("✓", "succeeded", "good"),
    State.FAILED_TERMINAL: Label("✕", "failed", "calm"),
    State.TERMINATED: Label("■", "terminated", "calm"),
}
RUN_LABELS: dict[str, Label] = {
    RunState.PENDING: Label("○", "waiting", "calm"),
    RunState.RUNNING: Label("▸", "running", "wait"),
    RunState.AWAITING_APPROVAL: Label("◇", "awaiting approval", "wait"),
    RunState.UNCERTAIN: Label("◆", "uncertain", "unknown"),
    RunState.COMPENSATING: Label("↶", "compensating", "wait"),
    RunState.SUCCEEDED: Label("✓", "succeeded", "good"),
    RunState.FAILED: Label("✕", "failed", "calm"),
    RunState.COMPENSATED: Label("↶", "compensated", "calm"),
    RunState.CANCELLED: Label("■", "cancelled", "calm"),
}
APPROVAL_LABELS: dict[str, Label] = {
    ApprovalState.WAITING: Label("◇", "waiting", "wait"),
    ApprovalState.APPROVED: Label("◈", "approved", "good"),
    ApprovalState.CONSUMED: Label("✓", "used", "good"),
    ApprovalState.DENIED: Label("✕", "denied", "calm"),
    ApprovalState.EXPIRED: Label("⧗", "expired", "calm"),
    ApprovalState.WITHDRAWN: Label("■", "withdrawn", "calm"),
    ApprovalState.SUPERSEDED: Label("↷", "superseded", "calm"),
}
SLOT_LABELS: dict[str, Label] = {
    SlotState.DUE: Label("▸", "due", "wait"),
    SlotState.QUEUED: Label("○", "waits", "wait"),
    SlotState.STARTED: Label("✓", "ran", "good"),
    SlotState.MISSED: Label("·", "missed", "calm"),
    SlotState.TOO_OLD: Label("·", "too old", "calm"),
    SlotState.TOO_LATE: Label("·", "too late", "calm"),
    SlotState.SKIPPED_OVERLAP: Label("≡", "skipped, overlap", "calm"),
    SlotState.SKIPPED_GAP: Label("⇥", "no such time", "calm"),
    SlotState.SKIPPED_REPEAT: Label("≡", "ran already", "calm"),
    SlotState.ASKED: Label("▲", "asks", "person"),
    SlotState.CATCHING_UP: Label("▸", "catching up", "wait"),
    SlotState.NOT_STARTED: Label("✕", "refused", "person"),
}
EXPECTED = Label("○", "expected", "calm")
ESCALATED = Label("▲", "escalated", "person")

# Sentences for codes that the ledger writes. A code without one is shown as it is, with its underscores as spaces.
REASONS: dict[str, str] = {
    # how an attempt ended
    "receipt": "the provider's answer proves it",
    "accepted": "the provider took the order and has not said that it is done",
    "no_answer": "no answer that proves anything",
    "unknown": "no answer that proves anything",
    "worker_lost": "its worker was lost while it may have been under way",
    "lease_expired": "the lease ran out without an answer",
    "settlement_failed": "the answer could not be recorded when it came",
    "not_sent": "no byte of the request left",
    "own_fault": "a fault of our own, found before a byte left",
    "unavailable": "the provider declared that it did not apply it, and may do so later",
    "rate_limited": "too many calls, says the provider; this one was not applied",
    "rejected": "refused for good by the provider",
    "invalid": "the provider found the request malformed",
    "unauthorized": "the provider refused our credential",
    "key_in_use": "the provider is still at work on an earlier call with this key",
    "rolled_back": "rolled back as a whole; nothing of it was applied",
    "transaction_left": "its effect left the transaction of its result, so what it did may stand without one",
    "earlier_attempt_unknown": "this attempt was not applied, an earlier one may have been",
    "budget_spent": "the budget of attempts is spent",
    # what a look-up led to
    "found": "found at the provider",
    "late_report": "a late report settled it",
    "absent": "absence is proven",
    "absent_once": "nothing there; one more such answer proves it",
    "absent_again": "absent once more after a retry",
    "absence_proves_nothing": "nothing there, which proves nothing at this provider",
    "too_early_for_absence": "nothing there yet; too early for that to prove anything",
    "reads_too_close": "nothing there, too soon after the read before it to count",
    "old_worker_may_still_send": "nothing there, but the silent worker may still send",
    "found_but_not_comparable": "found, but what was asked cannot be compared with it",
    "look_up_in_progress": "the provider is still at it",
    "look_up_cannot_tell": "the look-up could not tell",
    "mismatch": "what was found is not what was asked",
    "several_candidates": "more than one candidate fits",
    "removed_since": "it was found, and was taken away since",
    "seen_before_and_gone": "seen before, and not there any more",
    "effect_claimed_elsewhere": "that effect is already the proof of another operation",
    "no_conclusive_answer": "no look-up gave a conclusive answer in time",
    "nothing_can_find_out": "this provider offers no way to find out",
    "applied_after_all": "proof came that it was applied after all",
    "undone_twice": "it was applied, and two people vouch that the undo was done by hand as well",
    "waived": "refused: two people vouch that it was undone by hand",
    "unknown_after_all": "its worker came back after absence was proven, and does not know whether it was applied",
    "no_handler": "this deployment has no handler for it",
    "seen_after_all": "seen at the provider although it was called not applied",
    "reported_applied": "a late report says that it was applied",
    "workflow_changed": "its workflow is not declared any more as it was when the run began, under the same version",
    "request_unreadable": "its request cannot be opened with the keys configured here",
    "newer_sent": "a newer operation on the same object was sent",
    "older_version_open": "an older version of this intent is in flight or unknown",
    "older_version_waiting": "an older version of this intent still waits",
    "newer_version_exists": "a newer version of this intent exists",
    "not_repeated": "not sent again",
    "stopped": "held back by a stop switch; it goes on when that is released",
    "limit_concurrency": "held back: as many are in flight as its limit allows",
    "limit_rate": "held back: as many were sent in this window as its limit allows",
    "limit_amount": "held back: as much was sent in this window as its limit allows",
    "ceiling_passed": "it would take its object above what all of this action may come to",
    "limited": "held back by a stop switch or a limit",
    "limit_set": "a stop switch or a limit was set",
    "clock_set_back": "the database's clock was set back; what is open ends as long from then as it was meant to",
    "clock_set_forward": "the database's clock was set forward; what was sent before has to settle anew",
    "limit_lifted": "a stop switch or a limit was released",
    "mass_trigger": "stopped by the guard: too many new operations of one kind in a minute",
    "shredded": "what was sealed of it was shredded",
    "pruned": "settled long ago; its row was pruned and how it ended is on record",
    "too_old": "refused: too long ago to tell whether it was done already",
    "run_ended": "its run has ended, so it is not tried any more",
    "queued": "recorded, and due at once",
    # messages of the outbox
    "invalid_request": "what it asks for cannot be taken",
    "cannot_be_published": "publishing it fails again and again",
    "message_released": "a message is tried again",
    "message_discarded": "a message is not published",
    # consent
    "approval_requested": "a person's consent is needed before anything is sent",
    "approved": "a person agreed to exactly this",
    "denied": "a person said no; nothing was sent",
    "denied_after_expiry": "a person said no after the time for it was over",
    "approval_expired": "nobody decided in time; nothing was sent",
    "approval_past_use_by": "the consent was not used in time; it is asked for again",
    "precondition_failed": "what was agreed to had changed just before sending; nothing was sent, and it is asked anew",
    "superseded": "a newer intent took its place; nothing was sent",
    "look_up_told_more": "looked up before it was done, and that told more; nothing was sent",
    "limit_changed": "a limit was changed",
    "lift_limit": "taking this limit away",
    "waive_undo": "waiving an undo",
    "raise_limit": "letting more through this limit",
    "accept_repeats": "running every missed start although an action has no key",
    "compensate_run": "undoing by hand what was applied",
    "second_person_asked": "a second person was asked to agree",
    "sent_again": "sent again after a second person accepted a duplicate",
    "undo_waived": "two people vouch that the undo was done by hand",
    "effect_accepted": "two people accept that what cannot be undone stands",
    "changed_since_asked": "what it was about had changed since it was asked; nothing was done",
    "already_decided": "refused: somebody had decided already",
    "not_approved": "refused: nobody has agreed to it",
    "approval_used": "refused: the consent was used up",
    "approval_of_another": "refused: the consent was given to something else",
    "own_request": "refused: nobody approves what was asked by or for them",
    # what people and automation did
    "claimed": "claimed under a lease",
    "started": "started",
    "taken": "taken under a lease",
    "retried": "sent again with the same key",
    "retry_requested": "a person asked for another attempt with the same key",
    "held": "held until it is repaired",
    "held_for_retry": "held until a person presses retry",
    "resolved_applied": "resolved as applied",
    "resolved_absent": "resolved as not applied, on proof",
    "asserted_not_applied": "resolved as not applied, on a person's word",
    "terminated": "stopped by a person",
    "closed": "dealt with by a person",
    "withdrawn": "withdrawn before anything was sent",
    "resumed": "resumed by a person",
    "joined": "somebody else's press was at work already",
    # refusals
    "not_allowed": "refused: not allowed in this state or for this role",
    "stale_version": "refused: the page was out of date",
    "stale_worker_refused": "refused: the lease of this worker was over",
    "fingerprint_mismatch": "refused: another request under a known identity",
    "input_mismatch": "refused: another input under a known run",
    "key_forgotten": "refused: the provider may have forgotten the key",
    # runs
    "step_attempted": "a step was attempted",
    "step_waits": "a step waits for its due time",
    "step_unknown": "the outcome of a step is unknown",
    "left_to_others": "left to a worker that has a handler for it",
    "step_needs_person": "a step waits for a person's decision",
    "step_failed": "a step failed, and nothing was applied before it",
    "step_failed_after_pivot": "a step after the pivot failed for good; the way is forward only",
    "step_awaits_approval": "a step waits for a person's consent",
    "run_walks_back": "its run walks back, so it is not tried any more",
    "run_cancelled": "its run was cancelled, so it is not tried any more",
    "cancelled": "cancelled before its end",
    "compensation_asked": "a person has what was applied undone",
    "chosen_again": "a fresh decision was asked for",
    "new_intent": "recorded as a new intent",
    "walks_back": "a step failed for good; what was applied before it is undone",
    "undo_waits": "an undo waits for its due time or for an answer",
    "pivot_applied": "the pivot was applied after all, and the way is forward only; nothing more is undone",
    "undo_awaits_approval": "an undo waits for a person's consent",
    "undo_incomplete": "an undo is stuck; a person must finish it",
    "all_undone": "each applied step is undone or vouched for",
    "lock_held": "another run works on the same thing",
    "no_valid_proposal": "no proposal of a decision was valid",
    "run_time_spent": "the run has taken as long as it may",
    "run_spend_cap": "the run has spent what it may",
    "time_spent": "it has been tried for as long as it may",
    "spend_cap": "its attempts have cost what they may",
    "step_terminated": "a step was stopped by a person",
    "step_cannot_be_built": "the request of a step cannot be built",
    "request_changed": "a step's request is not what was accepted first",
    "all_steps_verified": "every step is verified",
    # schedules
    "on_time": "started on time",
    "late": "started late",
    "caught_up": "missed, and run afterwards",
    "filled_by_hand": "run by hand for this time",
    "started_by_hand": "run by hand, beside the schedule",
    "missed_skipped": "nobody was there to start it, and the job skips missed runs",
    "missed_superseded": "nobody was there to start it; only the latest missed run is made",
    "missed_asked": "nobody was there to start it; the job asks a person",
    "answered_skip": "missed; a person said that it is not run",
    "answered_run_all": "missed; a person said that all are run",
    "terms_changed": "missed, and not run yet when the job got other times",
    "too_old_to_catch_up": "missed, and older than the job catches up on",
    "start_deadline_passed": "its start deadline passed before it could be started",
    "previous_still_runs": "the run before it still went on",
    "one_waits_already": "the run before it still went on, and another one waited already",
    "waits_for_previous": "waited for the run before it",
    "previous_needs_person": "the run before it walks back or waits for a person; the schedule does not cancel that",
    "previous_not_cancelled": "waits: the run before it could not be cancelled yet",
    "gap_of_clock_change": "that local time did not exist: the clock was put forward",
    "local_time_ran_already": "that local time has had its run; the zone data moved it",
    "run_refused": "the workflow refused the job's input",
    "zone_unknown": "the job's zone is not in the zone data here",
    "max_run_time": "the run takes longer than its job allows",
    "job_created": "a schedule was made",
    "job_edited": "a schedule was changed",
    "job_enabled": "a schedule was switched on",
    "job_disabled": "a schedule was switched off",
    "zone_data_changed": "new zone data; the next run was worked out anew",
    # a restored ledger
    "restored": "the ledger was restored from a backup",
    "maybe_replayed": "not shown to be newer than the release of a restored ledger; looked up before it is sent",
    "ledger_unavailable": "refused: the ledger or its anchor could not be reached, so nothing was sent",
    "anchor_unreadable": "the anchor could not be read, so nothing was changed",
    "fence_came_down": "this is not the ledger that the anchor knows; nothing is sent",
    "restore_begun": "a person said that this ledger was restored",
    "restore_released": "a person released the restored ledger",
    "ledger_adopted": "a person adopted the ledger: nothing of it was lost",
    "replay_window_over": "the replay window after a restore is over",
    # access and audit
    "access_changed": "a role was given, changed or taken away",
    "export_requested": "the audit log was asked for as a file",
    "export_finished": "the file was read to its end",
    "export_cut_off": "the file was not read to its end",
}
ERRORS: dict[str, str] = {
    "unknown": "no answer",
    "": "no error on record",
    "not_sent": "not sent",
    "own_fault": "fault of our own",
    "rate_limited": "rate limited",
    "key_in_use": "key in use",
    "rolled_back": "rolled back",
}
FINDINGS: dict[str, str] = {
    Verdict.FOUND: "found",
    Verdict.REMOVED: "found, and removed since",
    Verdict.ABSENT: "nothing there",
    Verdict.IN_PROGRESS: "the provider is still at it",
    Verdict.SEVERAL: "several candidates",
    Verdict.MISMATCH: "found something that is not what was asked",
    Verdict.CANNOT_TELL: "cannot tell",
}
SOURCES: dict[str, str] = {
    "by_key": "by key",
    "by_id": "by its id",
    "by_reference": "by reference",
    "by_window": "by reference and time window",
}
BASES: dict[str, str] = {
    Basis.RECEIPT: "the provider's own answer",
    Basis.LOOK_UP: "a look-up at the provider",
    Basis.CLAIM: "the caller's bare word",
    Basis.ASSERTED: "a person's word, not proof",
}


def money(minor: int, currency: str) -> str:
    """`4200, "USD"` -> `42.00 USD`; minor units after ISO 4217."""
    digits = EXPONENTS.get(currency.upper(), 2)
    sign, whole = "-" if minor < 0 else "", abs(minor)
    if not digits:
        return f"{sign}{whole:,} {currency}".rstrip()
    units, rest = divmod(whole, 10**digits)
    return f"{sign}{units:,}.{rest:0{digits}} {currency}".rstrip()


def duration(length: timedelta) -> str:
    """`2 h 05 m`, `41 min`, `40 s`, `3 d 4 h`: two units at most, rounded down. The sign is left to the sentence."""
    seconds = int(abs(length).total_seconds())
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min"
    if seconds < 86_400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02} m"
    return f"{seconds // 86_400} d {seconds % 86_400 // 3600} h"


def state_label(state: str, *, escalated: bool = False) -> Label:
    """The pill of an operation. The escalation mark comes first: a person must act."""
    return ESCALATED if escalated else LABELS.get(state, Label("·", state.replace("_", " "), "calm"))


def run_label(state: str, *, escalated: bool = False) -> Label:
    """The pill of a run."""
    return ESCALATED if escalated else RUN_LABELS.get(state, Label("·", state.replace("_", " "), "calm"))


def approval_label(state: str) -> Label:
    """The pill of a request for consent."""
    return APPROVAL_LABELS.get(state, Label("·", state, "calm"))


@dataclass(frozen=True)
class LimitTold:
    """A limit in words: what it does, and where."""

    what: str  # stopped | at most 3 in flight | at most 100 attempts in 60 s | at most 10.00 USD in 1 d 0 h
    place: str  # pay/refund.create in acme
    why: str  # the reason that a person gave, or what the restore fence found


def limit(row: Limit) -> LimitTold:
    """A stop switch or limit for people."""
    what = "/".join(filter(None, (row.provider, row.action))) or "everything"
    of = f" of workflow {row.workflow_type}" if row.workflow_type else ""
    where = f" in {row.tenant}" if row.tenant else " in every tenant"
    why = SHORT.get(row.reason, row.reason) if row.kind == "restored" else row.reason
    return LimitTold(_limited(row), what + of + where, why)


def _limited(row: Limit) -> str:
    if row.kind == "replay":
        return "looked up before it is sent, unless shown to be new"
    if row.kind in ("stop", "restored") or row.most is None:
        return "stopped"
    if row.kind == "concurrency":
        return f"at most {row.most:,} in flight"
    window = _window(row.window_seconds or 0)
    attempts = "1 attempt" if row.most == 1 else f"{row.most:,} attempts"
    how_much = money(row.most, row.currency) if row.kind == "amount" else attempts
    return f"at most {how_much} in {window}"


def _window(seconds: int) -> str:
    """A length that is not rounded: 90 s and 60 s are two windows."""
    unit = 1 if seconds < 60 else 60 if seconds < 86_400 else 3600
    return f"{seconds:,} s" if seconds % unit else duration(timedelta(seconds=seconds))


def held_back(code: str) -> str:
    """Why a claim was refused, and what lets it go on."""
    return HELD_BACK.get(code) or sentence(code)


def slot_label(state: str) -> Label:
    """The pill of an expected run."""
    return SLOT_LABELS.get(state, Label("·", state.replace("_", " "), "calm"))


def slot_story(slot: Slot) -> str:
    """What became of an expected run, or of a range of them, in one sentence."""
    told = _became(slot)
    if slot.count > 1:
        told = f"{slot.count:,} starts. {told}"
    if slot.shifted:
        told += f" {slot.local[11:16]} did not exist that day, so it stands at the first moment after the gap."
    return told


_NOT_YET = {  # what is said of a slot whose run is to come; its reason code is that of the run
    "": "Recorded; its run is about to be started.",
    "waits_for_previous": "Waits for the run before it.",
    "caught_up": "Missed; its run is about to be started.",
    "filled_by_hand": "A person wants it run; its run is about to be started.",
}


def _became(slot: Slot) -> str:
    if slot.state in (SlotState.DUE, SlotState.QUEUED):
        return _NOT_YET.get(slot.reason_code) or sentence(slot.reason_code)
    if slot.state != SlotState.STARTED or slot.started_at is None or slot.manual or slot.reason_code == "on_time":
        return sentence(slot.reason_code)
    late = slot.started_at - slot.scheduled_for
    started = f"started {duration(late)} {'late' if late >= timedelta() else 'early'}."
    if slot.reason_code == "late":
        return started.capitalize()
    return f"{sentence(slot.reason_code).removesuffix('.')}; {started}"


MISSED_POLICIES: dict[str, str] = {
    Missed.LATEST_ONLY: "run only the latest one",
    Missed.SKIP: "run none of them",
    Missed.ASK: "ask a person",
    Missed.RUN_ALL: "run all of them, in order",
}
OVERLAP_POLICIES: dict[str, str] = {
    Overlap.SKIP: "skip the new one",
    Overlap.QUEUE_ONE: "let one wait, skip the others",
    Overlap.CANCEL_PREVIOUS: "cancel the one before",
    Overlap.ALLOW: "start it beside the other",
}


def hidden_input(job: Job) -> tuple[str, ...]:
    """Names of the input's members that are not to be seen."""
    try:
        return hidden_names(job.input_sealed)
    except CannotOpen:
        return ("?",)


def job_terms(job: Job) -> list[tuple[str, str]]:
    """The terms of a schedule as (what, how) for people."""
    limits = [
        ("Catches up", f"on starts of the last {duration(job.max_catch_up)}" if job.max_catch_up else "without limit"),
        ("Start deadline", f"{duration(job.start_deadline)} late at most" if job.start_deadline else "none"),
        ("Longest run", f"{duration(job.max_run_time)}, then a person" if job.max_run_time else "no limit"),
    ]
    accepted = " (accepted for actions without a key)" if job.repeats_accepted else ""
    return [
        ("Missed starts", MISSED_POLICIES.get(job.missed, job.missed) + accepted),
        ("Still running", OVERLAP_POLICIES.get(job.overlap, job.overlap)),
        *limits,
    ]


ERROR = "error:"  # before the class of an exception that nobody foresaw


def reason(code: str) -> str:
    """A reason code as words."""
    if code.startswith(ERROR):
        return f"a fault of our own, {code.removeprefix(ERROR)}; where it is stands in the log"
    return REASONS.get(code, code.replace("_", " "))


def sentence(code: str) -> str:
    """A reason code as a sentence of its own."""
    text = reason(code)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def error(error_class: str) -> str:
    """An error class as the name of a group of cases."""
    return ERRORS.get(error_class, error_class.replace("_", " "))


def facts(entry: JournalEntry) -> Json:
    """The shown fields of a journal entry; empty where they are no JSON object."""
    try:
        value = json.loads(entry.data or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class _Gaps(dict[str, str]):
    """A headline whose field is hidden still reads: the name of the field stands in its place."""

    def __missing__(self, name: str) -> str:
        return f"({name.replace('_', ' ')} hidden)"


def shown_request(operation: Operation) -> Json:
    """The fields of the request that may be seen."""
    try:
        value = json.loads(operation.request_shown or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


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
        owner = str(facts(lost).get("owner") or operation.lease_owner or "unknown")
        text += f"; worker {owner} lost by {clock(lost.at)}"
    return text + "."


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
        owner = str(facts(lost).get("owner") or operation.lease_owner or "unknown")
        text += f"; worker {owner} lost by {clock(lost.at)}"
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
    if operation.look_ups or verdict:
        parts.append(f"looked up {_times(operation)}: {FINDINGS.get(verdict, 'no verdict')}")
    if operation.not_before and operation.not_before > now and operation.state != State.AMBIGUOUS:
        parts.append(f"next attempt in {duration(operation.not_before - now)}")
    elif operation.due_at and operation.due_at > now and operation.state == State.AMBIGUOUS:
        parts.append(f"next look-up in {duration(operation.due_at - now)}")
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


def run_lede(run: Run, operations: Iterable[Operation]) -> str:
    """Where a run stands and why, in one or two sentences."""
    every = list(operations)
    unknown = [each.step for each in every if each.state == State.AMBIGUOUS]
    called = [each.step for each in every if each.escalated_at]
    if run.state in RUN_TERMINAL:
        return _ended(run, unknown, called) + _on_a_word(every)
    if run.escalated_at:
        return f"It cannot go on by itself: {reason(run.escalation_reason)}."
    if called:
        return f"It waits for a person to decide about {', '.join(called)}."
    if unknown:
        return f"It waits until the outcome of {', '.join(unknown)} is known."
    if _for_others(run):
        return f"It {_for_others(run)}."
    return {
        RunState.PENDING: f"It goes on when {run.waiting_for or 'it'} is due.",
        RunState.RUNNING: f"A worker holds it{f', at {run.waiting_for}' if run.waiting_for else ''}.",
        RunState.AWAITING_APPROVAL: "It waits for a person's consent.",
        RunState.UNCERTAIN: "A step's outcome was unknown; it goes on as soon as that is settled.",
        RunState.COMPENSATING: "What was applied is being undone.",
    }.get(RunState(run.state), "")


def rests_on_a_word(operation: Operation) -> bool:
    """Whether how it ended is what a person said, and no proof."""
    return operation.basis == Basis.ASSERTED and operation.state in (State.SUCCEEDED, State.FAILED_TERMINAL)


def _on_a_word(operations: Iterable[Operation]) -> str:
    """What an ended run must not pass over: steps whose end is a person's word, and what was seen against it."""
    said = [each for each in operations if rests_on_a_word(each)]
    parts = []
    for each in said:
        seen = (
            ", although the provider showed something of it" if each.sighted and each.state != State.SUCCEEDED else ""
        )
        ended = "applied" if each.state == State.SUCCEEDED else "not applied"
        parts.append(f" {each.step} counts as {ended} on a person's word, not on proof{seen}.")
    return "".join(parts)


def _for_others(run: Run) -> str:
    """What a run waits for that is none of its steps; empty where it waits for none such."""
    if run.waiting_for.startswith(LOCK):
        return f"waits for {run.waiting_for.removeprefix(LOCK).replace('held by ', '')}, which works on the same thing"
    if run.waiting_for.startswith(HANDLER):
        return f"waits for a worker that can go on with it: {lacking(run)}"
    return ""


def lacking(run: Run) -> str:
    """What the worker lacked that left a run to others. It said "here" of its own configuration, not of a reader's."""
    return run.waiting_for.removeprefix(HANDLER).replace(" is configured here", " is configured there")


def _ended(run: Run, unknown: list[str], called: list[str]) -> str:
    told = {
        RunState.SUCCEEDED: "Every step is verified.",
        RunState.FAILED: "A step failed and nothing is left to undo.",
        RunState.COMPENSATED: "Each applied step is undone, or a person waived its undo.",
        RunState.CANCELLED: "A person stopped it; nothing more of it is sent.",
    }[RunState(run.state)]
    if not unknown:
        return told
    by_whom = "waits for a person" if all(each in called for each in unknown) else "is being looked up"
    return f"{told} The outcome of {', '.join(unknown)} is unknown still, and {by_whom}."


def run_stands(run: Run, *, now: datetime) -> str:
    """The same as one phrase for a list, from the run's own row."""
    at = f" at {run.waiting_for}" if run.waiting_for else ""
    if run.escalated_at:
        return f"{reason(run.escalation_reason)}{f' ({run.waiting_for})' if run.waiting_for else ''}"
    if run.state in RUN_TERMINAL or run.state == RunState.COMPENSATING:
        named = f": {run.waiting_for}" if run.waiting_for and run.state != RunState.CANCELLED else ""
        return f"{reason(run.reason_code)}{named}" if run.reason_code else run_label(run.state).word
    if _for_others(run):
        return _for_others(run)
    if run.state == RunState.RUNNING:
        return f"a worker holds it{at}"
    if run.state in (RunState.UNCERTAIN, RunState.AWAITING_APPROVAL):
        return f"{reason(run.reason_code)}{f': {run.waiting_for}' if run.waiting_for else ''}"
    due = f", due in {duration(run.due_at - now)}" if run.due_at and run.due_at > now else ""
    return f"waits{at}{due}"
