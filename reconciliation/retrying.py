"""retry(): one more attempt with the same key, where that is proven safe. The button and the sweep both come here."""

from __future__ import annotations

from . import executor, reconciler, runs, transition
from .actors import SYSTEM, Actor
from .claims import Held
from .models import Operation
from .outcomes import Outcome, stored_outcome
from .providers.base import Repeat
from .states import State


class NotRetryable(Exception):
    """A retry that is not allowed by what is known. The text says why and what would allow it."""


def retry(
    pk: int, *, actor: Actor = SYSTEM, version: int | None = None, reason: str = "", held: Held | None = None
) -> Outcome:
    """Send once more with the same key, where that is proven safe: the button and the sweep both come here.

    An unknown operation is looked up first where a look-up exists (rule 7). Raises NotRetryable with why not
    and what would allow it, or the TransitionRefused that stood in the way.
    """
    operation = reconciler.current(pk, version)
    _check_retryable(operation)
    if operation.state == State.AMBIGUOUS and actor.kind == "person":
        looked = reconciler.reconcile(pk, actor=actor, version=version)
        operation = looked.operation
        if operation.state not in (State.AMBIGUOUS, State.FAILED_RETRYABLE):
            return stored_outcome(operation)
        _check_retryable(operation)
    with runs.holding(operation, held=held, actor=actor) as lease:
        return executor.attempt_again(operation, actor=actor, reason=reason, held=lease)


def _check_retryable(operation: Operation) -> None:
    why = why_not_retryable(operation)
    if why:
        raise NotRetryable(why)


def why_not_retryable(operation: Operation) -> str:
    """Empty where a retry with the same key is allowed by what is known; else why not, and what would allow it."""
    if operation.shredded_at is not None:
        return transition.Shredded.sentence
    if operation.waived and operation.state not in (State.PENDING, State.SUCCEEDED):
        return transition.Waived.sentence
    if operation.state in (State.READY, State.FAILED_RETRYABLE):
        return _SEEN if operation.sighted else ""
    if operation.state != State.AMBIGUOUS:
        return _NOT_FROM.get(State(operation.state), "The transition table has no such move.")
    spec = reconciler.spec_or_none(operation)
    if spec is None:
        return "This deployment has no handler for the action; configure its provider first."
    if operation.sighted:
        return _SEEN
    if spec.repeat is Repeat.KEYED:
        return ""
    if spec.repeat in (Repeat.NATURAL, Repeat.READ):
        return ""
    if spec.repeat is Repeat.LOCAL:
        return "Look it up first: what did not commit together with its result was rolled back, and is then retried."
    if spec.repeat is Repeat.LOOKUP:
        return "The provider has no key for this, so a retry could do it twice. Possible once a look-up proves absence."
    return "The provider has no key for this and nothing proves absence: a retry could do it twice."


_SEEN = "Something of it was seen at the provider; a retry could do it twice. Look up and resolve it."
_NOT_FROM = {
    State.PENDING: "An attempt is in flight under a live lease; wait for its answer.",
    State.SUCCEEDED: "It has succeeded; there is nothing to retry.",
    State.FAILED_TERMINAL: "It failed for good; a new intent would be needed.",
    State.TERMINATED: "A person stopped it.",
    State.AWAITING_APPROVAL: "It waits for an approval; nothing was sent.",
}
