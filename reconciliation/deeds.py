"""What stands behind each button on an operation: reads for its preview, and the one domain call that it makes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from . import holds, intents, reconciler, registry, retrying, runs, sealing, transition
from .actors import Actor
from .case_wording import is_local
from .keys import InvalidField
from .models import JournalEntry, Operation, Run
from .providers.base import ActionSpec, Verdict
from .states import RUN_TERMINAL, Basis, Kind, RunState, State
from .wording import FINDINGS, duration, sentence, state_label


class NotAllowed(Exception):
    """An action that may not be done now, or not by this person. The text says why and what would allow it."""


# What this deployment lacks, or a row that was changed by hand: the deed can be done once that is put right.
NOT_HERE = (registry.Unregistered, sealing.CannotOpen, InvalidField)


def not_here(error: Exception) -> str:
    """What is lacking, as a person is told it."""
    text = str(error)
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


LONGEST_REASON = 2000


def check_reason(reason: str, *, missing: str) -> None:
    """Raises NotAllowed without one, with the sentence `missing` ("": none is needed), and for one that is too long."""
    if missing and not reason.strip():
        raise NotAllowed(missing)
    if len(reason) > LONGEST_REASON:
        raise NotAllowed(f"The reason is longer than {LONGEST_REASON} characters; shorten it.")


class Pressed(Protocol):
    """What the deeds read of a press (actions.Press)."""

    @property
    def version(self) -> int: ...
    @property
    def reason(self) -> str: ...
    @property
    def inputs(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class View:
    """An operation and what its previews depend on, read at one moment of the database's clock."""

    operation: Operation
    spec: ActionSpec | None
    now: datetime
    finding: dict[str, Any]
    run: Run | None
    held: str  # why a claim of it would be held back now, or nothing

    @property
    def leased(self) -> bool:
        """Whether a live lease holds it."""
        return self.operation.lease_until is not None and self.operation.lease_until > self.now

    @property
    def local(self) -> bool:
        """Whether it is done in this database, in one transaction with its result."""
        return is_local(self.spec)

    @property
    def nobody_to_ask(self) -> bool:
        """Whether its provider is known here and has no look-up."""
        return self.spec is not None and registry.look_up_of(self.operation.provider) is None

    @property
    def found(self) -> bool:
        """Whether the newest look-up found it and nothing that was asked differs from it."""
        return self.finding.get("verdict") == "found" and "differs" not in self.finding.get("compared", {}).values()

    @property
    def absence_proven(self) -> bool:
        """Whether enough complete empty reads came in (rule 7) and nothing of it was ever seen."""
        counted = self.spec is not None and self.operation.absent_reads >= self.spec.absence_reads
        return bool(counted and self.spec and self.spec.absence_is_proof and not self.operation.sighted)

    @property
    def run_waits(self) -> bool:
        """Whether its run goes by what becomes of it."""
        return self.run is not None and self.run.state not in RUN_TERMINAL

    @property
    def run_in_the_way(self) -> str:
        """Why its run lets nothing be sent now, or nothing."""
        if self.run is None or self.operation.stands_alone:
            return ""
        forward = (RunState.PENDING, RunState.UNCERTAIN, RunState.RUNNING)
        if self.run.state in ((RunState.COMPENSATING,) if self._undoes else forward) and not self._run_leased:
            return ""
        return f"Its run is {self.run.state.replace('_', ' ')}; a step is sent only while its run is held for it."

    @property
    def _undoes(self) -> bool:
        return self.operation.undo_of_id is not None

    @property
    def _run_leased(self) -> bool:
        return self.run is not None and self.run.lease_until is not None and self.run.lease_until > self.now

    def until(self, moment: datetime | None) -> str:
        """How long it is until `moment`, in words."""
        return duration(moment - self.now) if moment else "no time"


def read(subject: Operation | Run) -> View | Run:
    """What the previews of `subject` depend on."""
    if isinstance(subject, Run):
        return subject
    newest = JournalEntry.objects.filter(operation=subject, kind="finding").order_by("-id").first()
    return View(
        operation=subject,
        spec=reconciler.spec_or_none(subject),
        now=transition.database_now(),
        finding=json.loads(newest.data) if newest else {},
        run=subject.run,
        held=holds.in_the_way(subject),
    )


def look_up(operation: Operation, press: Pressed, actor: Actor) -> str:
    """Ask the provider, and move by what it says: the same as the sweep does."""
    try:
        looked = reconciler.reconcile(operation.pk, actor=actor)
    except reconciler.CannotLookUp as refusal:
        raise NotAllowed(str(refusal)) from refusal
    after = looked.operation
    if looked.moved:
        told = sentence(looked.judgement.reason_code if looked.judgement else after.reason_code)
        return f"{told} It is {_state(after)} now."
    verdict = FINDINGS[looked.finding.verdict if looked.finding else Verdict.CANNOT_TELL]
    why = f" {sentence(looked.judgement.reason_code)}" if looked.judgement else ""
    return f"Looked up: {verdict}.{why} It stays {_state(after)}."


def retry(operation: Operation, press: Pressed, actor: Actor) -> str:
    """Send once more with the same key: the same as the sweep does."""
    try:
        outcome = retrying.retry(operation.pk, actor=actor, version=press.version, reason=press.reason)
    except (retrying.NotRetryable, reconciler.CannotLookUp) as refusal:
        raise NotAllowed(str(refusal)) from refusal
    after = Operation.objects.get(pk=operation.pk)
    if outcome.disposition != "executed":
        return f"Looked up first, and that settled it: it is {_state(after)} now; nothing was sent again."
    return f"Attempt {after.attempts} was made. It is {_state(after)} now."


def resolve_applied(operation: Operation, press: Pressed, actor: Actor) -> str:
    """Succeeded: on the newest look-up where that found it, else on the person's word."""
    view = _viewed(operation)
    named = str(press.inputs.get("provider_operation_id", "")).strip()[:200]
    found_id = str(view.finding.get("provider_operation_id", "")) if view.found else ""
    effect = named or found_id
    basis = Basis.LOOK_UP if view.found and named in ("", found_id) else Basis.ASSERTED
    names_effect = view.spec is not None and view.spec.id_names_effect
    _move(
        operation, press, actor, to=State.SUCCEEDED, code="resolved_applied",
        patch={"basis": basis, "provider_operation_id": effect, "effect_id": effect if names_effect else ""},
        details={"basis": str(basis)},
    )  # fmt: skip
    then = " Its run goes on." if view.run_waits else ""
    return f"Recorded as applied, on {'the look-up' if basis is Basis.LOOK_UP else 'your word'}.{then}"


def resolve_not_applied(operation: Operation, press: Pressed, actor: Actor) -> str:
    """Retryable where absence is proven; on a person's word failed for good, and never sent again."""
    view = _viewed(operation)
    if view.absence_proven and operation.waived:
        _move(operation, press, actor, to=State.FAILED_TERMINAL, code="resolved_absent", patch={"unknown_attempts": []})
        return "Recorded as not applied, on proof. It was undone by hand, so it is not sent."
    if view.absence_proven and operation.run_is_over:
        over: dict[str, Any] = {"unknown_attempts": [], "reason_code": "run_ended"}
        _move(operation, press, actor, to=State.FAILED_TERMINAL, code="resolved_absent", patch=over)
        return "Recorded as not applied, on proof. Its run has ended, so it is not sent."
    if view.absence_proven:
        held: dict[str, Any] = {"unknown_attempts": [], "due_at": None, "escalation_reason": "held_for_retry"}
        _move(
            operation, press, actor, to=State.FAILED_RETRYABLE, code="resolved_absent", patch=held,
            after={"escalated_at": 0}, clear_mark=False,
        )  # fmt: skip
        return "Recorded as not applied, on proof. It waits for somebody to press retry."
    asserted = {"basis": Basis.ASSERTED}
    _move(operation, press, actor, to=State.FAILED_TERMINAL, code="asserted_not_applied", patch=asserted)
    return "Recorded as not applied, on your word. It is not sent again."


def stop(operation: Operation, press: Pressed, actor: Actor, *, code: str) -> str:
    """Terminate or withdraw: nothing more is sent; what is unknown stays unknown on record."""
    unknown = bool(operation.unknown_attempts)
    _move(operation, press, actor, to=State.TERMINATED, code=code)
    return f"{code.capitalize()}. " + ("Its outcome stays unknown on record." if unknown else "No attempt was applied.")


def close(operation: Operation, press: Pressed, actor: Actor) -> str:
    """A person has dealt with what a settled case called them for: the mark goes, and nothing else changes."""
    transition.transition(
        operation.subject,
        to=None,
        version=press.version,
        patch=transition.unmarked(operation),
        fact=actor.fact("closed", reason=press.reason, was=operation.escalation_reason),
    )
    return "Closed. What is known of it stays as it is."


def new_intent(operation: Operation, press: Pressed, actor: Actor) -> str:
    """The same request once more, as a new intent; its run goes on with it."""
    if operation.version != press.version:
        raise transition.StaleVersion(kind=Kind.OPERATION, pk=operation.pk, source=operation.state, target=None)
    try:
        made = intents.next_version(operation, actor=actor, reason=press.reason)
    except intents.NoIntent as refusal:
        raise NotAllowed(str(refusal)) from refusal
    let_run_go_on(operation, actor, press.reason)
    then = "It waits for a person's consent" if made.state == State.AWAITING_APPROVAL else "It is due now"
    return f"Recorded as operation {made.pk}, version {made.intent_version} of this intent. {then}."


def compensate(operation: Operation, press: Pressed, actor: Actor) -> str:
    """Reverse it by a new operation."""
    try:
        outcome = intents.compensate(operation, actor=actor, reason=press.reason)
    except (intents.NoIntent, reconciler.CannotLookUp) as refusal:
        raise NotAllowed(str(refusal)) from refusal
    after = Operation.objects.get(pk=outcome.pk)
    return f"Operation {after.pk} reverses it. That one is {_state(after)} now."


def let_run_go_on(operation: Operation, actor: Actor, reason: str) -> None:
    """A run that stopped for this step goes on when a person has dealt with the step: one decision, not two."""
    run = operation.run
    if run is not None and run.escalated_at is not None and run.state not in RUN_TERMINAL:
        runs.resume(run.pk, actor=actor, version=run.version, reason=reason)


def _viewed(operation: Operation) -> View:
    view = read(operation)
    assert isinstance(view, View)
    return view


def _move(
    operation: Operation,
    press: Pressed,
    actor: Actor,
    *,
    to: State,
    code: str,
    patch: dict[str, Any] | None = None,
    after: dict[str, float] | None = None,
    details: dict[str, Any] | None = None,
    clear_mark: bool = True,
) -> None:
    cleared = transition.unmarked(operation) if clear_mark else {}
    transition.transition(
        operation.subject,
        to=to,
        version=press.version,
        patch={"reason_code": code, **cleared, **(patch or {})},
        after=after,
        fact=actor.fact(code, reason=press.reason, **(details or {})),
    )
    if to is not State.TERMINATED:
        let_run_go_on(operation, actor, press.reason)


def _state(operation: Operation) -> str:
    mark = ", and a person must act" if operation.escalated_at else ""
    return state_label(operation.state).word + mark
