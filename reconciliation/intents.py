"""New intents that follow from a recorded operation: its next version, and its reversal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import structlog

from . import claims, consent, executor, fence, keys, reconciler, registry, runs, stepping, transition
from .actors import Actor
from .claims import Intent
from .compensation import rise, undo_intent
from .keys import Identity, InvalidField
from .models import Operation, Run
from .outcomes import Outcome
from .policy import RetryPolicy
from .progress import Progress
from .providers.base import Verdict
from .scrub import fault
from .states import RUN_TERMINAL, State
from .wording import sentence
from .workflows import Consent, Step

log = structlog.get_logger(__name__)

UNDO_CONSENT = Consent(policy="What this action did is reversed by hand only if two people agree.")


class NoIntent(Exception):
    """An intent that may not follow. The text says why and what would allow it."""


def identity_of(operation: Operation) -> Identity:
    """The identity as it was submitted: a number or boolean as business object is told from its text by the hash."""
    for business_object in _readings(operation.business_object):
        identity = Identity(
            tenant=operation.tenant,
            workflow_type=operation.workflow_type,
            workflow_id=operation.workflow_id,
            step=operation.step,
            business_object=business_object,
            intent_version=operation.intent_version,
        )
        if keys.lineage_hash(identity) == bytes(operation.lineage):
            return identity
    raise InvalidField("business_object", "does not give the stored identity; the row was changed by hand")


def _readings(text: str) -> Iterator[str | int | bool]:
    yield text
    if text.lstrip("-").isdigit():
        yield int(text)
    if text in ("True", "False"):
        yield text == "True"


def next_version(
    operation: Operation, *, actor: Actor, reason: str, use: Mapping[str, Any] | None = None, never: Sequence[str] = ()
) -> Operation:
    """Record the same request as a new intent, due now.

    `use` names the approval by which a second person accepts that what only a person's word calls not applied may be
    done twice; the birth uses it up. Who asked for that is who asked for the new intent; with `never`, every name of
    theirs, they may not agree to it where it needs a consent of its own. Raises NoIntent where that is not all there
    any more, and OlderVersionOpen where the old one is unknown.
    """
    if operation.shredded_at is not None:
        raise NoIntent(transition.Shredded.sentence)
    spec = registry.spec(operation.provider, operation.action)
    identity = identity_of(operation)
    intent = Intent(
        identity=replace(identity, intent_version=identity.intent_version + rise(operation)),
        provider=operation.provider,
        action=operation.action,
        request=operation.request,
        requested_by=use["asked_by"] if use else actor.id,
        on_behalf_of=operation.on_behalf_of,
        retry=RetryPolicy.read(operation.retry_policy, spec) if operation.retry_policy else None,
        owners=tuple(operation.owners),
        undo_of=operation.undo_of_id,
        spent_is_final=operation.spent_is_final,
        intended_at=_wanted_at(operation),
    )
    row = claims.row_of(intent, registry.provider(operation.provider), spec)
    # What a person had to agree to, a person has to agree to again: a new intent is not a way round (rule 9).
    asks = bool(operation.consent)
    moved = transition.open_operation(
        row={
            **row, "state": State.AWAITING_APPROVAL if asks else State.READY, "run_id": operation.run_id,
            "consent": operation.consent, **({"use": {**use, "operation": operation.pk}} if use else {}),
        },
        after={} if asks else {"due_at": 0},
        observed=[],
        ask=consent.anew(
            operation, requester=intent.requested_by, never=never or consent.names(actor), reason=reason
        )
        if asks
        else None,
        fact=actor.fact("new_intent", reason=reason, after=operation.pk, **consent.both(use)),
    )  # fmt: skip
    if moved is None:
        raise NoIntent("A newer version of this intent is on record already.")
    return Operation.objects.get(pk=moved.pk)


def _wanted_at(operation: Operation) -> datetime | None:
    """Now, for a person wants it now; None where the lost time of a restored ledger may have made this very version.

    That is so for what did not become unknown by the restore (denied, expired, failed long ago), for its versions go on
    without a gap. The new one has the key of the lost one then, and is looked up under it before it is sent.
    """
    since = fence.replays_since()
    gap = rise(operation) > 1
    known_new = since is None or (operation.intended_at is not None and operation.intended_at > since)
    return transition.database_now() if gap or known_new else None


def after_a_restore(operation: Operation) -> str:
    """What a person has to know of a new intent after a restore; empty where there is nothing."""
    if fence.replays_since() is None:
        return ""
    if rise(operation) > 1:
        return (
            " This ledger was restored: a newer intent may have been made and sent in the time that it lost."
            " Look for one at the provider first."
        )
    return "" if _wanted_at(operation) else " This ledger was restored, so the new one is looked up before it is sent."


def why_not_undoable(operation: Operation) -> str:
    """Empty where a person may have this one reversed by itself; else why not, and what would allow it."""
    if operation.state != State.SUCCEEDED:
        return "Nothing is known to reverse. Possible once it is proven to have been applied."
    if operation.undo_of_id is not None:
        return "This one reverses another already; it is not reversed itself."
    if operation.shredded_at is not None:
        return "What was sealed of it was shredded, so no undo can be built from it; reverse it at the provider."
    run = operation.run
    if run is not None and runs.edited(run):
        return f"{sentence('workflow_changed')} Put that declaration back first; its undo is not known otherwise."
    if undo_step(operation) is None:
        return "Its workflow declares no undo for this step."
    if run is not None and run.state not in RUN_TERMINAL:
        return "Its run is still going; cancel the run, or have the whole run compensated."
    if run is not None and operation.step in run.waived:
        return "Two people vouched that it was undone by hand; reversing it would undo it twice."
    if not all(undo.is_over for undo in Operation.objects.filter(undo_of=operation)):
        return "An undo of it is on record already."
    return ""


def undo_step(operation: Operation) -> Step | None:
    """The step that it was, where its workflow declares an undo for that."""
    if operation.run is None:
        return None
    try:
        step = registry.workflow(operation.run.workflow_type, operation.run.workflow_version).step(operation.step)
    except (registry.Unregistered, KeyError):
        return None
    return step if isinstance(step, Step) and step.undo is not None else None


def compensate(operation: Operation, *, actor: Actor, reason: str) -> Outcome:
    """Reverse one applied operation by a new one, after a look that it still stands (rule 7). The reason stands in the
    audit log with its birth, and on the request where somebody must agree to it.

    Raises NoIntent with why not, and what perform() raises.
    """
    why = why_not_undoable(operation)
    step, run = undo_step(operation), operation.run
    if why or step is None or run is None:
        raise NoIntent(why)
    _check_it_stands(operation, actor)
    progress = Progress.of(Run.objects.get(pk=run.pk), registry.workflow(run.workflow_type, run.workflow_version))
    intent = _after_a_failed_one(_built(progress, step), operation)
    return executor.perform(replace(_asked_by(intent, operation, actor), reason=reason), actor=actor)


def _built(progress: Progress, step: Step) -> Intent:
    """Its undo, as the declaration builds it: from results of other steps too, which may be shredded."""
    try:
        return stepping.built(lambda: undo_intent(progress, step, held=None))
    except stepping.CannotBeBuilt as error:
        log.error("undo_cannot_be_built", run=progress.run.pk, step=step.name, **fault(error.__cause__ or error))
        raise NoIntent("Its undo cannot be built from what is on record; reverse it at the provider.") from error


def _after_a_failed_one(intent: Intent, operation: Operation) -> Intent:
    """An undo that failed, was denied or was taken back is over: asked for again it is a new intent."""
    last = Operation.objects.filter(undo_of=operation).order_by("-intent_version").first()
    if last is None or not last.is_over:
        return intent
    return replace(intent, identity=replace(intent.identity, intent_version=last.intent_version + rise(last)))


def _asked_by(intent: Intent, operation: Operation, actor: Actor) -> Intent:
    """Where the undo needs consent, it waits for that of another person than the one who asks for it, and than those
    who asked for its run; so does whatever another person asks about it later. An action may say that two must agree
    even where the undo itself needs no consent.
    """
    by_two = registry.spec(operation.provider, operation.action).undo_second_person
    needed = _of_two_people(intent.consent) if by_two else intent.consent
    people = (*intent.owners, intent.requested_by, *consent.names(actor), *consent.people(operation))
    return replace(intent, consent=needed, requested_by=actor.id, owners=people)


def _of_two_people(declared: Consent | None) -> Consent:
    """Both rules hold: always asked for, whatever the declared one depends on, and within the shorter times."""
    if declared is None:
        return UNDO_CONSENT
    return Consent(
        policy=f"{UNDO_CONSENT.policy} {declared.policy}".strip(),
        expires_after=min(UNDO_CONSENT.expires_after, declared.expires_after),
        use_within=min(UNDO_CONSENT.use_within, declared.use_within),
    )


def _check_it_stands(operation: Operation, actor: Actor) -> None:
    if registry.look_up_of(operation.provider) is None:
        return
    finding = reconciler.reconcile(operation.pk, actor=actor).finding
    if finding is not None and finding.verdict is Verdict.REMOVED:
        raise NoIntent("The provider shows that it was taken away already; there is nothing to reverse.")
    if finding is None or finding.verdict is not Verdict.FOUND:
        told = finding.verdict.replace("_", " ") if finding else "nothing"
        raise NoIntent(f"Looked up first: {told}. It is reversed only while the provider shows that it stands.")
