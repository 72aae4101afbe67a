"""What people read: words for what is recorded, and sentences for the codes of the ledger. No query, no markup."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from .fence_wording import SHORT
from .models import Limit
from .occurrences import SlotState
from .providers.base import Verdict
from .states import ApprovalState, Basis, RunState, State
from .transition import HELD_BACK

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
    "asked_for_time": "its provider asked for time; it is looked up after that",
    "nobody_to_ask": "its provider offers no look-up",
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
    "handed_back": "a worker had no time to begin anything more of it; the next one goes on at once",
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
    "run_too_old": "its time is longer ago than anything about its steps is kept, so nobody can tell whether it was "
    "done already; find out at the providers, and run it once more as a new intent if it was not",
    "run_pruned": "it has had its run, which was pruned since",
    "run_mismatch": "a run of this time is there already, with another input",
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
