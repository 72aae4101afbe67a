"""What a finding means for the operation: pure judgement over a row, a finding and the database's time.

The source of the rules is design.md, section 2, rules 6 to 8 and "Judging a finding".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings

from . import policy, sealing
from .models import Operation
from .providers.base import ActionSpec, Finding, Repeat, Source, Verdict
from .states import Basis, State
from .transition import unmarked

# These stand where a finding would, of what was not asked, so that nothing of it is evidence.
NOBODY_TO_ASK = Finding(verdict=Verdict.CANNOT_TELL, source=Source.BY_KEY, note="this provider has no look-up")
ASKED_FOR_TIME = Finding(verdict=Verdict.CANNOT_TELL, source=Source.BY_KEY, note="the provider asked for time")
NOT_ASKED = ((NOBODY_TO_ASK, "nobody_to_ask"), (ASKED_FOR_TIME, "asked_for_time"))
SIGHTINGS = frozenset({Verdict.FOUND, Verdict.REMOVED, Verdict.SEVERAL, Verdict.MISMATCH, Verdict.IN_PROGRESS})
TO_A_PERSON = {
    Verdict.REMOVED: "removed_since",
    Verdict.SEVERAL: "several_candidates",
    Verdict.MISMATCH: "mismatch",
}


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a finding leads to. `to` None keeps the state."""

    to: State | None
    reason_code: str
    escalate: str = ""  # the reason of the mark, where a person must act
    patch: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    repeat: bool = False  # sending again with the same key (or at all) is safe, and is the next thing to do


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that a judgement rests on: the row, the action, the finding, and the database's time before the look-up."""

    operation: Operation
    spec: ActionSpec
    finding: Finding
    compared: Mapping[str, str]
    started: datetime
    worker_silent: bool  # the last attempt's worker is neither known dead nor heard from
    report: int | None = None  # the journal entry of the late report that this comes from, instead of a look-up
    reported: str = ""  # the error class of the newest late report, where it is one of a refusal
    rolled_back: bool = False  # every unknown attempt was a local effect without a result: it did not commit
    answered_at: datetime | None = None  # when the last attempt ended without an answer, where its worker said so
    forward_at: datetime | None = None  # when the database's clock was last set forward
    elapsed: float = 0.0  # seconds since its first claim, where its policy asks for that
    retry_after: float | None = None  # seconds that the provider asked for, as the late report tells
    look_up_after: float = 0.0  # seconds that the provider asked for when it was looked up

    @property
    def retry(self) -> policy.RetryPolicy:
        """How its step is tried."""
        return policy.RetryPolicy.read(self.operation.retry_policy, self.spec)

    @property
    def asked(self) -> bool:
        """Whether somebody was asked, or told by himself."""
        return not self.why_not_asked

    @property
    def why_not_asked(self) -> str:
        """The code of why nobody was asked, or nothing."""
        return next((code for stand_in, code in NOT_ASKED if self.finding is stand_in), "")

    @property
    def cap(self) -> str:
        """The cap of its step's policy that is reached, or nothing."""
        operation = self.operation
        return self.retry.spent(attempt=operation.attempts, elapsed=self.elapsed, spend=operation.cost_minor)

    @property
    def never_repeated(self) -> bool:
        """Whether its step's policy has nothing sent again after what the last attempt came to."""
        return self.operation.error_class in self.retry.never

    @property
    def waits(self) -> float:
        """Seconds until automation may send it again; 0 where it may now."""
        after = self.operation.not_before
        return max((after - self.started).total_seconds(), 0.0) if after else 0.0


def absence_provable_at(
    operation: Operation, spec: ActionSpec, answered_at: datetime | None = None, forward_at: datetime | None = None
) -> datetime | None:
    """From when an empty answer can prove absence (rule 7); None while nothing was sent.

    A claim is written before its request leaves: until its worker gave up (`answered_at`), it may have been sending.
    A clock that was set forward since (`forward_at`) tells of time that has not passed: from there on it settles anew.
    """
    if operation.last_sent_at is None:
        return None
    last = max(operation.last_sent_at, answered_at or operation.last_sent_at)
    if operation.lease_ended_at is not None:
        last = max(last, operation.lease_ended_at + spec.timeout)
    return max(last, forward_at or last) + spec.settles_after


def judge(evidence: Evidence) -> Judgement:
    """design.md, "Judging a finding"."""
    finding = evidence.finding
    if finding.verdict is Verdict.FOUND:
        return _judge_found(evidence)
    if finding.verdict in TO_A_PERSON:
        return to_a_person(evidence, TO_A_PERSON[finding.verdict])
    if finding.verdict is Verdict.ABSENT:
        return _judge_absent(evidence)
    return _look_again(evidence, evidence.why_not_asked or f"look_up_{finding.verdict}")


def _judge_found(evidence: Evidence) -> Judgement:
    finding = evidence.finding
    if "differs" in evidence.compared.values():
        return to_a_person(evidence, "mismatch")
    if "not_shown" in evidence.compared.values():
        return _look_again(evidence, "found_but_not_comparable")
    found_id = (finding.provider_operation_id or "")[:200]
    shown, sealed = sealing.split(finding.observed, evidence.spec.shown)
    return Judgement(
        to=State.SUCCEEDED,
        reason_code="found",
        patch={
            "basis": Basis.LOOK_UP,
            "provider_operation_id": found_id,
            "effect_id": found_id if evidence.spec.id_names_effect else "",
            "result_shown": shown,  # what is there now stands in for the answer that was lost
            "result_sealed": sealed,
            "sighted": True,
            "error_class": "",
            "reason_code": "found",
            "not_before": None,
            **unmarked(evidence.operation),
        },
    )


def to_a_person(evidence: Evidence, reason: str) -> Judgement:
    """Something was seen that software must not decide about."""
    patch = {"sighted": True, "escalation_reason": reason, "due_at": None}
    if evidence.operation.escalated_at is not None:
        return Judgement(to=None, reason_code=reason, escalate=reason, patch=patch)
    return Judgement(to=None, reason_code=reason, escalate=reason, patch=patch, after={"escalated_at": 0})


def _judge_absent(evidence: Evidence) -> Judgement:
    operation, spec, finding = evidence.operation, evidence.spec, evidence.finding
    if evidence.rolled_back:
        return _judge_proven_absence(evidence, {})
    if not (spec.absence_is_proof and finding.authoritative and finding.complete):
        return _look_again(evidence, "absence_proves_nothing")
    if operation.sighted:
        return to_a_person(evidence, "seen_before_and_gone")
    provable = absence_provable_at(operation, spec, evidence.answered_at, evidence.forward_at)
    if provable is None or evidence.started < provable:
        return _look_again(evidence, "too_early_for_absence")
    if not _counts(evidence):
        return _look_again(evidence, "reads_too_close")
    reads = operation.absent_reads + 1
    counted = {"absent_reads": reads, "absent_read_at": evidence.started.isoformat()}
    if reads < spec.absence_reads:
        return _look_again(evidence, "absent_once", counted=counted)
    return _judge_proven_absence(evidence, counted)


def _counts(evidence: Evidence) -> bool:
    """A second empty read counts only some time after the first: two reads of one moment are one read."""
    last = evidence.operation.absent_read_at
    return last is None or evidence.started >= last + timedelta(seconds=settings.AFTERCALL_ABSENCE_SPACING)


def _judge_proven_absence(evidence: Evidence, counted: Mapping[str, Any]) -> Judgement:
    operation, spec = evidence.operation, evidence.spec
    if evidence.worker_silent and spec.repeat is not Repeat.KEYED:
        return _look_again(evidence, "old_worker_may_still_send", counted=counted)
    absences = operation.absences + 1
    patch = {**counted, "absences": absences, "unknown_attempts": [], "error_class": "", "reason_code": "absent"}
    if evidence.never_repeated:
        return _ended_by_absence(evidence, patch)
    stop = "absent_again" if absences > 1 else evidence.cap or _forgotten_first(evidence)
    if stop:
        mark = {"escalation_reason": stop, "due_at": None, "not_before": None}
        return Judgement(
            to=State.FAILED_RETRYABLE, reason_code="absent", escalate=stop, patch={**patch, **mark},
            after={"escalated_at": 0},
        )  # fmt: skip
    return Judgement(
        to=State.FAILED_RETRYABLE, reason_code="absent", patch={**patch, **unmarked(operation)},
        after={"due_at": evidence.waits, "not_before": evidence.waits},
    )  # fmt: skip


def _ended_by_absence(evidence: Evidence, patch: Mapping[str, Any]) -> Judgement:
    """It was not applied and is not sent again: it fails. Where a person was called, ending it is left to them."""
    if not _in_a_persons_hands(evidence.operation):
        ended = {**patch, **unmarked(evidence.operation), "not_before": None}
        return Judgement(to=State.FAILED_TERMINAL, reason_code="absent", patch=ended)
    return Judgement(
        to=State.FAILED_RETRYABLE, reason_code="absent", escalate=evidence.operation.escalation_reason,
        patch={**patch, "due_at": None, "not_before": None},
    )  # fmt: skip


def _forgotten_first(evidence: Evidence) -> str:
    """A person is called before the provider forgets the key, not when the repeat is due and refused (rule 8)."""
    until = evidence.operation.same_key_until
    if evidence.spec.repeat is not Repeat.KEYED or until is None:
        return ""
    return "key_forgotten" if evidence.started + timedelta(seconds=evidence.waits) >= until else ""


def _look_again(evidence: Evidence, reason: str, *, counted: Mapping[str, Any] | None = None) -> Judgement:
    """Not conclusive: repeat where that is safe, look again on schedule, call a person when the time is up."""
    operation, patch = evidence.operation, dict(counted or {})
    if operation.escalated_at is not None:
        return Judgement(to=None, reason_code=reason, patch=patch)
    # A provider that asks for time gets it, and is asked once more before it is sent anything again.
    repeat = not evidence.look_up_after and _safe_to_repeat(evidence) and not evidence.never_repeated
    cap = evidence.cap if repeat else ""
    if _time_is_up(evidence) or cap:
        why = _why_it_stops(evidence, reason, cap)
        mark = {"escalation_reason": why, "due_at": None}
        return Judgement(to=None, reason_code=reason, escalate=why, patch={**patch, **mark}, after={"escalated_at": 0})
    due = _next_look_up(evidence, repeat=repeat)
    return Judgement(
        to=None, reason_code=reason, patch=patch, after={"due_at": due}, repeat=repeat and not evidence.waits
    )


def _why_it_stops(evidence: Evidence, reason: str, cap: str) -> str:
    if _only_its_worker_blocks(evidence, reason):
        return "old_worker_may_still_send"
    if evidence.finding is NOBODY_TO_ASK and cap in ("", "budget_spent"):
        return "nothing_can_find_out"
    return "no_conclusive_answer" if _time_is_up(evidence) or cap == "budget_spent" else cap


def _only_its_worker_blocks(evidence: Evidence, reason: str) -> bool:
    """Whether absence would be proven but for a worker that may still send, also where this read came too soon."""
    enough = evidence.operation.absent_reads >= evidence.spec.absence_reads
    return reason == "old_worker_may_still_send" or (reason == "reads_too_close" and enough)


def _time_is_up(evidence: Evidence) -> bool:
    return evidence.operation.escalate_at is not None and evidence.started >= evidence.operation.escalate_at


def _safe_to_repeat(evidence: Evidence) -> bool:
    """The same key within its retention, or an action that may be repeated: and nothing of it was seen so far."""
    operation, spec, finding = evidence.operation, evidence.spec, evidence.finding
    if operation.sighted or finding.verdict in SIGHTINGS or evidence.spec.repeat not in (
        Repeat.KEYED, Repeat.NATURAL, Repeat.READ,
    ):  # fmt: skip
        return False
    if spec.repeat is not Repeat.KEYED:
        return True
    remembered = operation.same_key_until is not None and evidence.started < operation.same_key_until
    # An absence that will soon be proof is better than another send; so is what two identical replays told.
    waits_for_proof = finding.verdict is Verdict.ABSENT and spec.absence_is_proof and finding.authoritative
    return remembered and not waits_for_proof and operation.identical_replays < policy.IDENTICAL_REPLAYS


def _next_look_up(evidence: Evidence, *, repeat: bool) -> float:
    """Seconds until it is looked at again: on schedule, not before the provider wants to be asked, and once more before
    it is sent again; in any case when a person is to be called.
    """
    provable = absence_provable_at(evidence.operation, evidence.spec, evidence.answered_at, evidence.forward_at)
    until = (provable - evidence.started).total_seconds() if provable else None
    due = policy.look_up_delay(evidence.operation.look_ups + 1, provable_in=until)
    end = _left(evidence)
    if evidence.finding is NOBODY_TO_ASK and (evidence.waits or not repeat):
        due = end or due  # there is nothing to do before it may be sent again
    if repeat and evidence.waits:
        due = min(due, evidence.waits)
    due = max(due, evidence.look_up_after)
    return due if end is None else min(due, end)


def _left(evidence: Evidence) -> float | None:
    """Seconds until a person is called."""
    until = evidence.operation.escalate_at
    return max((until - evidence.started).total_seconds(), 0.0) + 0.05 if until else None


def judge_report(evidence: Evidence) -> Judgement:
    """A late success counts as found; a late failure has proven that no attempt was applied."""
    if evidence.finding.verdict is Verdict.FOUND:
        if "differs" in evidence.compared.values():
            return to_a_person(evidence, "mismatch")
        found = _judge_found(replace(evidence, compared={}))
        reported = {**found.patch, "basis": Basis.RECEIPT, "reason_code": "late_report"}
        return replace(found, patch=reported, reason_code="late_report")
    operation = evidence.operation
    patch: dict[str, Any] = {"unknown_attempts": [], "reason_code": "late_report", "not_before": None}
    if _final(evidence):
        refused = {"error_class": evidence.reported, "reason_code": evidence.reported}
        return Judgement(
            to=State.FAILED_TERMINAL, reason_code="late_report", patch={**patch, **refused, **unmarked(operation)}
        )
    if not _in_a_persons_hands(operation) and not evidence.cap:
        wait = evidence.retry.wait(operation.attempts, retry_after=evidence.retry_after)
        return Judgement(
            to=State.FAILED_RETRYABLE, reason_code="late_report", patch={**patch, **unmarked(operation)},
            after={"due_at": wait, "not_before": wait},
        )  # fmt: skip
    why = operation.escalation_reason if _in_a_persons_hands(operation) else evidence.cap
    mark = {"escalation_reason": why, "due_at": None}
    after = {} if operation.escalated_at else {"escalated_at": 0.0}
    return Judgement(
        to=State.FAILED_RETRYABLE,
        reason_code="late_report",
        escalate=why,
        patch={**patch, **mark},
        after=after,
    )


def _final(evidence: Evidence) -> bool:
    """Whether the refusal is one that the table, or the step's own policy, does not retry.

    Where a person was called, or something of it was seen, ending it is left to that person.
    """
    if not evidence.reported or evidence.operation.sighted or _in_a_persons_hands(evidence.operation):
        return False
    refusal = policy.ErrorClass(evidence.reported)
    return policy.decide(refusal, evidence.spec) is policy.Next.FAIL or refusal in evidence.retry.never


def _in_a_persons_hands(operation: Operation) -> bool:
    """A person was called, and not merely because nothing but the worker's own word could tell: that came now."""
    return operation.escalated_at is not None and operation.escalation_reason != "nothing_can_find_out"
