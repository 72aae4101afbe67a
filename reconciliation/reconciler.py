"""reconcile(): look up -> finding -> judge -> transition.

The button "Look up" and the sweep call the same reconcile(); only the actor differs. A look-up is made outside any
transaction; the time that decides about absence is the database's, read before the look-up starts.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from datetime import datetime

import structlog
from django.db import IntegrityError

from audit.log import Fact

from . import local, registry, sealing, settlement, storable, timekeeping, transition, workers
from .actors import SYSTEM, Actor
from .claims import tried_since
from .judgement import ASKED_FOR_TIME, NOBODY_TO_ASK, SIGHTINGS, Evidence, Judgement, judge, judge_report, to_a_person
from .models import JournalEntry, Operation
from .policy import NOT_APPLIED, ErrorClass, RetryPolicy, covers_earlier, nothing_can_find_out
from .providers.base import ActionSpec, Call, Finding, Json, ProviderError, Source, Verdict, compare
from .scrub import excerpt, fault
from .states import Kind, State
from .transition import Observed, StaleVersion, TransitionRefused

log = structlog.get_logger(__name__)

CALLED_ABSENT = (State.FAILED_RETRYABLE, State.FAILED_TERMINAL, State.TERMINATED)


@dataclass(frozen=True, kw_only=True)
class LookedUp:
    """The result of one reconcile(). `moved` says whether the state changed, `finding` is None for an expiry alone."""

    operation: Operation
    finding: Finding | None
    judgement: Judgement | None
    moved: bool


class CannotLookUp(Exception):
    """There is nothing to look up, or nowhere to look. The text says which."""


COMMITS_TOGETHER = (
    "Its effect commits together with its result, so there is nothing to look up: what stands here is all."
)


def reconcile(pk: int, *, actor: Actor = SYSTEM, version: int | None = None, on_schedule: bool = False) -> LookedUp:
    """Find out what became of an operation and move it by what was found.

    `on_schedule` says that nobody asked for it: an unknown one is not looked up before the time that its provider asked
    for when it was last looked up is over.

    Ends an expired lease first. Raises LeaseLive while a live lease holds it, StaleVersion where `version` is not the
    current one, CannotLookUp where nothing was ever sent or nothing can look.
    """
    operation = current(pk, version)
    ended = operation.state == State.PENDING
    if ended:
        operation = expire(operation)
    if operation.attempts == 0:
        raise CannotLookUp("Nothing was ever sent, so there is nothing to look up.")
    if operation.state != State.AMBIGUOUS and is_local(operation):
        if not ended:
            raise CannotLookUp(COMMITS_TOGETHER)
        return LookedUp(operation=operation, finding=None, judgement=None, moved=True)
    started = transition.database_now()
    kept = _kept_report(operation, started)
    if kept is not None:
        return _apply(kept, actor)
    return _apply(_evidence(operation, started, on_schedule=on_schedule), actor)


def current(pk: int, version: int | None) -> Operation:
    """The row, if it is still at `version`. Raises StaleVersion."""
    operation = Operation.objects.get(pk=pk)
    if version is not None and operation.version != version:
        raise StaleVersion(kind=Kind.OPERATION, pk=pk, source=operation.state, target=None)
    return operation


def expire(operation: Operation) -> Operation:
    """End a lease that ran out: unknown, never a second dispatch. Raises LeaseLive while it lives."""
    spec = spec_or_none(operation)
    if spec is not None and local.is_local(operation, spec, [operation.attempts]):
        local.expire(operation, spec)
        return Operation.objects.get(pk=operation.pk)
    patch, after = settlement.lease_expired(
        operation.attempts, tuple(operation.unknown_attempts), spec, operation.retry_policy
    )
    patch["generation"] = operation.generation + 1  # fences whatever the lost worker still writes
    needed = needs_a_person(operation, spec)
    if needed:
        patch |= {"escalation_reason": needed}
        after |= {"escalated_at": 0, "escalate_at": 0}
    transition.transition(
        operation.subject,
        to=State.AMBIGUOUS,
        version=operation.version,
        patch=patch,
        after=after,
        guard=("lease_over",),
        observed=[
            Observed(
                kind="lease_expired",
                attempt=operation.attempts,
                generation=operation.generation,
                data={"owner": operation.lease_owner},
            )
        ],
        fact=SYSTEM.fact("lease_expired", owner=operation.lease_owner, generation=operation.generation),
    )
    return Operation.objects.get(pk=operation.pk)


def needs_a_person(operation: Operation, spec: ActionSpec | None) -> str:
    """Why no look-up will ever tell what became of a lost worker's attempt; empty where one may."""
    if spec is None:
        return ""  # another worker may have the handler: it is looked up until its time is over
    provider = registry.provider(operation.provider)
    return "nothing_can_find_out" if nothing_can_find_out(ErrorClass.UNKNOWN, spec, provider) else ""


def spec_or_none(operation: Operation) -> ActionSpec | None:
    """What the action promises, where this deployment still knows it."""
    try:
        return registry.spec(operation.provider, operation.action)
    except registry.Unregistered:
        return None


def is_local(operation: Operation) -> bool:
    """Whether its last attempt was an effect in this database."""
    return local.is_local(operation, spec_or_none(operation), [operation.attempts])


def _evidence(operation: Operation, started: datetime, *, on_schedule: bool) -> Evidence:
    spec = spec_or_none(operation) or ActionSpec()
    if local.is_local(operation, spec, operation.unknown_attempts):
        return Evidence(
            operation=operation, spec=spec, finding=_ROLLED_BACK, compared={}, started=started, worker_silent=False,
            rolled_back=True, elapsed=_elapsed(operation, spec, started),
        )  # fmt: skip
    finding, wait = ASKED_FOR_TIME, _asked_to_wait(operation, started) if on_schedule else 0.0
    if not wait:
        finding, wait = _look(operation, spec)
    return Evidence(
        operation=operation,
        spec=spec,
        finding=finding,
        compared=compare(spec, operation.request, finding.observed)
        if finding.verdict in (Verdict.FOUND, Verdict.MISMATCH)
        else {},
        started=started,
        worker_silent=_worker_silent(operation),
        answered_at=_answered_at(operation),
        forward_at=timekeeping.put_forward_at(),
        elapsed=_elapsed(operation, spec, started),
        look_up_after=wait,
    )


def _asked_to_wait(operation: Operation, started: datetime) -> float:
    """Seconds for which the provider still wants not to be asked about an unknown one, as it said the last time."""
    if operation.state != State.AMBIGUOUS:
        return 0.0
    newest = JournalEntry.objects.filter(operation=operation, kind="finding").order_by("-id").first()
    asked = json.loads(newest.data).get("retry_after") if newest else None
    return max(asked - (started - newest.at).total_seconds(), 0.0) if newest and asked else 0.0


def _elapsed(operation: Operation, spec: ActionSpec, started: datetime) -> float:
    since = tried_since(operation, RetryPolicy.read(operation.retry_policy, spec))
    return (started - since).total_seconds() if since else 0.0


def _look(operation: Operation, spec: ActionSpec) -> tuple[Finding, float]:
    """Ask the provider. What it does not answer, or answers with an error, is cannot_tell; and for how many seconds it
    wants not to be asked again.
    """
    try:
        look_up = registry.look_up_of(operation.provider)
        if look_up is None:
            return NOBODY_TO_ASK, 0.0
        finding = look_up(_call(operation))
    except ProviderError as error:
        told = f"{type(error).__name__}: {excerpt(error.sentence, known=_hidden(operation, spec))}"
        wait = settlement.asked_wait(error) or 0.0
        return _cannot_tell(f"{told} It asks to wait {wait:.0f} s." if wait else told), wait
    except Exception as error:
        return _cannot_tell(_why_not_asked(operation, error)), 0.0
    whole = storable.finding(finding) if isinstance(finding, Finding) else _cannot_tell("the adapter gave no finding")
    return whole, 0.0


def _why_not_asked(operation: Operation, error: Exception) -> str:
    if isinstance(error, registry.Unregistered):
        return str(error)
    if isinstance(error, sealing.CannotOpen):
        return "the request cannot be opened: its key is not among AFTERCALL_SEAL_KEYS"
    log.error("look_up_failed", operation=operation.pk, **fault(error))  # a bug must not end the look-up schedule
    return f"the adapter raised {type(error).__name__}"


_ROLLED_BACK = Finding(
    verdict=Verdict.ABSENT, source=Source.BY_KEY, authoritative=True, complete=True,
    note="an effect in this database commits with its result, and no result of it is on record",
)  # fmt: skip


def _hidden(operation: Operation, spec: ActionSpec) -> list[str]:
    """What must not come back in a note; nothing where the request cannot be opened."""
    try:
        return settlement.hidden_values(spec, operation.request)
    except sealing.CannotOpen:
        return []


def _cannot_tell(note: str) -> Finding:
    return Finding(verdict=Verdict.CANNOT_TELL, source=Source.BY_KEY, note=note)


def _call(operation: Operation) -> Call:
    return Call(
        action=operation.action,
        key=operation.key,
        request=operation.request,
        tenant=operation.tenant,
        attempt=operation.attempts,
        provider_operation_id=operation.provider_operation_id or None,
        first_sent_at=operation.first_sent_at,
        last_sent_at=operation.last_sent_at,
    )


def _worker_silent(operation: Operation) -> bool:
    """Whether the last attempt's worker may still be about to send: its lease ran out and nothing proves it gone."""
    if operation.lease_ended_at is None:
        return False
    heard = JournalEntry.objects.filter(operation=operation, kind="late_report", attempt=operation.attempts).exists()
    return not heard and not workers.known_dead(operation.lease_owner)


def _answered_at(operation: Operation) -> datetime | None:
    """When the worker of the last attempt last said what it knew: until then it may have been sending."""
    said = JournalEntry.objects.filter(
        operation=operation, attempt=operation.attempts, kind__in=("no_answer", "not_applied", "receipt", "late_report")
    )
    return said.order_by("-id").values_list("at", flat=True).first()


# Late reports


def _kept_report(operation: Operation, started: datetime) -> Evidence | None:
    """A late success counts as found; late failures speak for their own attempts only, and decide when all are in.

    Each report is judged once: after that a look-up asks the provider again.
    """
    spec = spec_or_none(operation)
    if spec is None or operation.state not in (State.AMBIGUOUS, *CALLED_ABSENT):
        return None
    read = _reports(operation)
    for entry, data in read:
        if data.get("status") == "applied":
            return _reported(operation, spec, started, entry, Verdict.FOUND)
    unknown = set(operation.unknown_attempts)
    if operation.state == State.AMBIGUOUS and unknown and unknown <= _refused(spec, read):
        return _reported(operation, spec, started, read[-1][0], Verdict.ABSENT)
    return None


def _refused(spec: ActionSpec, read: list[tuple[JournalEntry, Json]]) -> set[int]:
    """The attempts that the reports prove not applied: each its own, and those before it only where that is declared.

    A refused attempt 2 otherwise says nothing about an unknown attempt 1 (rule 6).
    """
    proven: set[int] = set()
    for entry, data in read:
        if entry.attempt is None or data.get("error_class") not in NOT_APPLIED:
            continue
        proven.add(entry.attempt)
        if covers_earlier(ErrorClass(data["error_class"]), spec):
            proven.update(range(1, entry.attempt))
    return proven


def contradicted(operation: Operation) -> bool:
    """Whether a late report that nobody has judged yet says that what we called not applied was, or may be, applied."""
    if operation.state not in CALLED_ABSENT or spec_or_none(operation) is None or is_local(operation):
        return False
    return any(data.get("status") == "applied" for _entry, data in _reports(operation)) or _doubted(operation)


def _doubted(operation: Operation) -> bool:
    """Whether nothing is sent any more, and the newest report, not looked into yet, does not say "not applied"."""
    if operation.state not in (State.FAILED_TERMINAL, State.TERMINATED):
        return False
    last = JournalEntry.objects.filter(operation=operation, kind__in=("late_report", "finding")).order_by("-id").first()
    return (
        last is not None and last.kind == "late_report" and json.loads(last.data).get("error_class") not in NOT_APPLIED
    )


def _reports(operation: Operation) -> list[tuple[JournalEntry, Json]]:
    """The late reports since the last one that was judged, oldest first."""
    entries = JournalEntry.objects.filter(operation=operation, kind__in=("late_report", "finding")).order_by("id")
    read: list[tuple[JournalEntry, Json]] = []
    for entry in entries:
        data = json.loads(entry.data)
        if entry.kind == "late_report":
            read.append((entry, data))
        elif data.get("from_report"):
            read.clear()
    return read


def _reported(
    operation: Operation, spec: ActionSpec, started: datetime, report: JournalEntry, verdict: Verdict
) -> Evidence:
    data = json.loads(report.data)
    observed: Json = dict(data.get("observed") or {})
    if report.sealed:
        observed |= json.loads(sealing.open_bytes(report.sealed))
    finding = Finding(
        verdict=verdict,
        source=Source.BY_KEY,
        provider_operation_id=data.get("provider_operation_id"),
        observed=observed,
        authoritative=True,
        complete=True,
        note="from a late report of the worker that sent it",
    )
    return Evidence(
        operation=operation, spec=spec, finding=finding, compared=data.get("compared") or {}, started=started,
        worker_silent=False, report=report.pk, elapsed=_elapsed(operation, spec, started),
        retry_after=data.get("retry_after"),
        reported=str(data.get("error_class") or "") if verdict is Verdict.ABSENT else "",
    )  # fmt: skip


def _apply(evidence: Evidence, actor: Actor) -> LookedUp:
    operation, finding = evidence.operation, evidence.finding
    observed = _observed(evidence, actor)
    if operation.state != State.AMBIGUOUS:
        return _apply_to_known(evidence, actor, observed)
    judgement = judge_report(evidence) if evidence.report is not None else judge(evidence)
    if judgement.escalate == "no_conclusive_answer" and spec_or_none(operation) is None:
        judgement = replace(
            judgement, escalate="no_handler", patch={**judgement.patch, "escalation_reason": "no_handler"}
        )
    if judgement.to is State.SUCCEEDED and _was_called_failed(operation):
        judgement = _loud(judgement)
    if operation.waived:
        judgement = _after_its_waiver(operation, judgement)
    try:
        moved = _move(evidence, judgement, actor, observed)
    except IntegrityError:
        judgement = to_a_person(evidence, "effect_claimed_elsewhere")
        moved = _move(evidence, judgement, actor, observed)
    except TransitionRefused:
        _keep(evidence, observed)
        raise
    log.info("looked_up", operation=operation.pk, verdict=finding.verdict, reason=judgement.reason_code)
    current = Operation.objects.get(pk=operation.pk)
    return LookedUp(operation=current, finding=finding, judgement=judgement, moved=moved)


def _keep(evidence: Evidence, observed: Observed) -> None:
    """It moved on, or was pruned, meanwhile: what a look-up saw is kept. A report is in the journal, not yet judged."""
    if evidence.report is None and _on_record(evidence):
        transition.note(evidence.operation.subject, [observed])


def _on_record(evidence: Evidence) -> bool:
    """Where nobody was asked about an unknown one there is no finding; of one that has ended it tells that a report was
    read.
    """
    return evidence.asked or evidence.operation.state != State.AMBIGUOUS


def _move(evidence: Evidence, judgement: Judgement, actor: Actor, observed: Observed) -> bool:
    operation, finding = evidence.operation, evidence.finding
    sighted = operation.sighted or finding.verdict in SIGHTINGS
    # What is another operation's effect was paid for there.
    cost = 0 if judgement.reason_code == "effect_claimed_elsewhere" else _not_counted_yet(operation, finding)
    transition.transition(
        operation.subject,
        to=judgement.to,
        version=operation.version,
        # A report that it was applied may have come in since the reports were read; it must not be called failed then.
        guard=("unreported",) if judgement.to is State.FAILED_TERMINAL else (),
        patch={"look_ups": operation.look_ups + 1, "sighted": sighted, **judgement.patch, "cost": cost},
        after=judgement.after,
        observed=[observed] if _on_record(evidence) else [],
        fact=_fact(evidence, judgement, actor, observed),
    )
    return judgement.to is not None


def _not_counted_yet(operation: Operation, finding: Finding) -> int:
    """What the seen effect cost, where neither the answer to the attempt that made it nor a look-up before told that.

    An answer without an id may be about this effect, unless its attempt is known not to have been applied.
    """
    if not finding.cost or finding.verdict not in SIGHTINGS:
        return 0
    unknown = set(operation.unknown_attempts or range(1, operation.attempts + 1))
    for entry in JournalEntry.objects.filter(
        operation=operation, kind__in=("receipt", "no_answer", "late_report", "finding")
    ):
        data = json.loads(entry.data)
        told = data.get("provider_operation_id") or ""
        same = told == (finding.provider_operation_id or "") or (not told and entry.attempt in unknown)
        if data.get("cost") and same and data.get("error_class") not in NOT_APPLIED:
            return 0
    return finding.cost


def _fact(evidence: Evidence, judgement: Judgement, actor: Actor, observed: Observed) -> Fact:
    if not _on_record(evidence):
        return actor.fact(judgement.reason_code)
    fact = actor.fact(
        judgement.reason_code, verdict=str(evidence.finding.verdict), look_up=evidence.operation.look_ups + 1
    )
    seen = json.dumps(observed.row(), sort_keys=True).encode()
    return replace(fact, evidence=hashlib.sha256(seen).hexdigest())


def _observed(evidence: Evidence, actor: Actor) -> Observed:
    finding, spec = evidence.finding, evidence.spec
    shown, sealed = settlement.evidence_of(spec, finding.observed)
    candidates = [settlement.evidence_of(spec, dict(candidate))[0] for candidate in finding.candidates[:20]]
    return Observed(
        kind="finding",
        attempt=evidence.operation.attempts,
        generation=evidence.operation.generation,
        observer=actor.id,
        data={
            "verdict": finding.verdict,
            "source": finding.source,
            "provider_operation_id": finding.provider_operation_id or "",
            "observed": shown,
            "compared": dict(evidence.compared),
            "authoritative": finding.authoritative,
            "complete": finding.complete,
            "candidates": candidates,
            "note": excerpt(finding.note, known=_hidden(evidence.operation, spec)),
            "cost": finding.cost,
            "from_report": evidence.report is not None,
            **({"retry_after": evidence.look_up_after} if evidence.look_up_after else {}),
        },
        sealed=sealed,
    )


def _apply_to_known(evidence: Evidence, actor: Actor, observed: Observed) -> LookedUp:
    """A look-up of a settled operation is evidence; only a sighting of what we called absent moves it, loudly."""
    operation, finding = evidence.operation, evidence.finding
    contradicts = operation.state in CALLED_ABSENT and (finding.verdict in SIGHTINGS or _doubted(operation))
    judgement = _contradiction(evidence) if contradicts else _given_up_and_absent(evidence)
    if judgement is None:
        transition.note(operation.subject, [observed])
        return LookedUp(operation=operation, finding=finding, judgement=None, moved=False)
    try:
        moved = _move(evidence, judgement, actor, observed)
    except IntegrityError:
        judgement = to_a_person(evidence, "effect_claimed_elsewhere")
        moved = _move(evidence, judgement, actor, observed)
    except TransitionRefused:
        _keep(evidence, observed)
        raise
    if contradicts:
        log.error("applied_after_all", operation=operation.pk, reason=judgement.reason_code)
    current = Operation.objects.get(pk=operation.pk)
    return LookedUp(operation=current, finding=finding, judgement=judgement, moved=moved)


def _contradiction(evidence: Evidence) -> Judgement:
    """Proven applied after all, or something was seen, or its worker woke up and does not know, and a person must look;
    either way nothing is sent any more.
    """
    if evidence.finding.verdict not in SIGHTINGS:
        return to_a_person(evidence, "unknown_after_all")
    judgement = judge_report(evidence) if evidence.report is not None else judge(evidence)
    if judgement.to is not State.SUCCEEDED:
        return to_a_person(evidence, judgement.escalate or "seen_after_all")
    return _loud(judgement, "undone_twice" if evidence.operation.waived else "applied_after_all")


def _given_up_and_absent(evidence: Evidence) -> Judgement | None:
    """What was stopped while it was unknown stays stopped; proof that it was not applied, by the rules for all others,
    ends its being unknown, and with that what its run still keeps for itself.
    """
    operation = evidence.operation
    if not operation.given_up:
        return None
    judgement = judge(evidence)
    if judgement.to is State.FAILED_RETRYABLE:
        return Judgement(to=None, reason_code="absent", patch={**_counted(judgement), "unknown_attempts": []})
    counted = _counted(judgement)
    return Judgement(to=None, reason_code=judgement.reason_code, patch=counted) if counted else None


def _counted(judgement: Judgement) -> Json:
    return {name: value for name, value in judgement.patch.items() if name in ("absent_reads", "absent_read_at")}


def _loud(judgement: Judgement, why: str = "applied_after_all") -> Judgement:
    """It succeeds, and a person is called: others went by its failure, its run among them."""
    patch = {k: v for k, v in judgement.patch.items() if k != "escalated_at"} | {"escalation_reason": why}
    return replace(judgement, reason_code=why, patch=patch, after={"escalated_at": 0})


def _after_its_waiver(operation: Operation, judgement: Judgement) -> Judgement:
    """Two people vouched that this undo was done by hand: where it was applied it was done twice, and where it was not
    it is over. Nothing of it is sent any more.
    """
    if judgement.to is State.SUCCEEDED:
        return _loud(judgement, "undone_twice")
    if judgement.to is not State.FAILED_RETRYABLE:
        return replace(judgement, repeat=False)
    kept = {name: value for name, value in judgement.patch.items() if name not in ("escalated_at", "escalation_reason")}
    patch = {**kept, **transition.unmarked(operation), "reason_code": "undo_waived", "due_at": None}
    return replace(judgement, to=State.FAILED_TERMINAL, reason_code="undo_waived", escalate="", patch=patch, after={})


def _was_called_failed(operation: Operation) -> bool:
    """Whether it had failed for good and is unknown only since the ledger was restored."""
    if operation.state != State.AMBIGUOUS:
        return False
    entries = JournalEntry.objects.filter(operation=operation, kind="restored").values_list("data", flat=True)
    return any(json.loads(data)["was"] == State.FAILED_TERMINAL for data in entries)
