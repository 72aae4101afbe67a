"""What an answer to an attempt means for the operation: pure judgement, no database, no clock.

The operation is judged, not its last attempt (rule 6): while any attempt is unknown, a refusal of this one says
nothing about the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol

from . import policy, sealing, storable
from .policy import ErrorClass, Next, RetryPolicy
from .providers.base import ActionSpec, Json, OutcomeUnknown, ProviderError, Receipt, compare
from .scrub import excerpt
from .states import Basis, State
from .transition import Observed, TransactionLeft


class Attempt(Protocol):
    """What the judgement needs to know of the attempt (executor.Claim)."""

    @property
    def spec(self) -> ActionSpec: ...
    @property
    def provider(self) -> Any: ...
    @property
    def request(self) -> Json: ...
    @property
    def attempt(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def unknown(self) -> tuple[int, ...]: ...
    @property
    def identical_replays(self) -> int: ...
    @property
    def last_error(self) -> str: ...
    @property
    def first_sent_at(self) -> datetime | None: ...
    @property
    def retry(self) -> RetryPolicy: ...
    @property
    def spent_is_final(self) -> bool: ...
    @property
    def elapsed(self) -> float: ...
    @property
    def cost(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The move that an answer leads to."""

    to: State
    reason_code: str
    observed: Observed
    patch: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    result: Json = field(default_factory=dict)


def judge(attempt: Attempt, answer: Receipt | BaseException) -> Judged:
    """What the answer means. A BaseException is an answer too: what no rule names is unknown.

    What it cost is in the patch whatever it means, as what is to be added to the cost of the other attempts.
    """
    judged = _judge_receipt(attempt, answer) if isinstance(answer, Receipt) else _judge_error(attempt, answer)
    return _costing(judged, _cost(answer))


def _cost(answer: Receipt | BaseException) -> int:
    return storable.cost(getattr(answer, "cost", 0))


def _costing(judged: Judged, cost: int) -> Judged:
    return replace(judged, patch={**judged.patch, "cost": cost}) if cost else judged


def unreadable(attempt: Attempt) -> Judged:
    """An answer came that cannot be read or kept: the attempt is unknown."""
    return _judge_error(attempt, OutcomeUnknown("The answer holds something that the ledger cannot read or keep."))


def left_transaction(attempt: Attempt) -> Judged:
    """A local effect ended the transaction that it was given: what it did may stand without a result.

    It counts as seen, so that no look into the ledger takes it for rolled back: a person must look at the rows.
    """
    observed = _error_observed(attempt, OutcomeUnknown(TransactionLeft.sentence), ErrorClass.UNKNOWN)
    return _escalated(attempt, observed, reason="transaction_left", extra={"sighted": True})


def evidence_of(spec: ActionSpec, observed: Json) -> tuple[Json, str]:
    """(what of it may be seen, a sealed token of the rest)."""
    names = frozenset(spec.shown)
    shown = {name: value for name, value in observed.items() if name in names}
    hidden = {name: value for name, value in observed.items() if name not in names}
    return shown, sealing.seal(hidden) if hidden else ""


def hidden_values(spec: ActionSpec, request: Json) -> list[str]:
    """What of the request must not come back in an answer that is kept; short values are too common to look for."""
    hidden = [value for name, value in request.items() if name not in spec.shown]
    return [str(value) for value in _leaves(hidden) if len(str(value)) >= 4]


def _leaves(value: Any) -> Iterator[str | int | float]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield value


# Receipts


def _judge_receipt(attempt: Attempt, receipt: Receipt) -> Judged:
    compared = compare(attempt.spec, attempt.request, receipt.observed)
    observed = _receipt_observed(attempt, receipt, compared)
    if receipt.status != "applied":
        return _unknown(attempt, observed, reason_code="accepted", extra={"provider_operation_id": _id(receipt)})
    if "differs" in compared.values():
        return _escalated(attempt, observed, reason="mismatch", extra={"sighted": True})
    shown, sealed = sealing.split(receipt.result, attempt.spec.shown) if receipt.result else ("{}", "")
    return Judged(
        to=State.SUCCEEDED,
        reason_code="receipt",
        observed=observed,
        result=receipt.result,
        patch={
            "basis": Basis.RECEIPT,
            "provider_operation_id": _id(receipt),
            "effect_id": _id(receipt) if attempt.spec.id_names_effect else "",
            "result_shown": shown,
            "result_sealed": sealed,
            "reason_code": "receipt",
            "error_class": "",
        },
    )


def _id(receipt: Receipt) -> str:
    return (receipt.provider_operation_id or "")[:200]


def _receipt_observed(attempt: Attempt, receipt: Receipt, compared: Mapping[str, str]) -> Observed:
    shown, sealed = evidence_of(attempt.spec, receipt.observed)
    return Observed(
        kind="receipt",
        attempt=attempt.attempt,
        generation=attempt.generation,
        data={
            "status": receipt.status,
            "provider_operation_id": _id(receipt),
            "observed": shown,
            "compared": dict(compared),
            "replayed": receipt.replayed,
            "cost": receipt.cost,
        },
        sealed=sealed,
    )


def belongs_to_another(attempt: Attempt, judged: Judged) -> Judged:
    """The provider's id is already the proof of another operation: it proves nothing here."""
    marked = _escalated(attempt, judged.observed, reason="effect_claimed_elsewhere", extra={"sighted": True})
    return _costing(marked, judged.patch.get("cost", 0))


def contradicted(attempt: Attempt, judged: Judged) -> Judged:
    """This attempt was not applied, but an earlier one was reported as applied: looked at again, at once."""
    plain = _unknown(attempt, judged.observed, reason_code="reported_applied", mine=False)
    return _costing(replace(plain, after={**plain.after, "due_at": 0}), judged.patch.get("cost", 0))


# Errors


def _judge_error(attempt: Attempt, error: BaseException) -> Judged:
    error_class = policy.classify(error, attempt.spec)
    observed = _error_observed(attempt, error, error_class)
    if error_class not in policy.NOT_APPLIED:
        return _judge_unknown(attempt, observed, error, error_class)
    if attempt.unknown and not policy.covers_earlier(error_class, attempt.spec):
        return _unknown(
            attempt, observed, reason_code="earlier_attempt_unknown", mine=False, error_class=error_class, error=error
        )
    return _judge_clean(attempt, observed, error, error_class)


def _error_observed(attempt: Attempt, error: BaseException, error_class: ErrorClass) -> Observed:
    named = error if isinstance(error, ProviderError) else None
    hidden = hidden_values(attempt.spec, attempt.request)
    return Observed(
        kind="not_applied" if error_class in policy.NOT_APPLIED else "no_answer",
        attempt=attempt.attempt,
        generation=attempt.generation,
        data={
            "error_class": error_class,
            "error": type(error).__name__,
            "sentence": excerpt(named.sentence, known=hidden)
            if named
            else "The adapter raised an error that no rule names.",
            "status": named.status if named else None,
            "excerpt": excerpt(named.excerpt, known=hidden) if named else "",
            "request_id": excerpt(named.request_id, known=hidden) if named else "",
            "replayed": bool(named and named.replayed),
            "cost": _cost(error),
            "retry_after": asked_wait(error),
        },
    )


def asked_wait(error: BaseException | None) -> float | None:
    """Seconds after which the provider wants to hear from us again, where it said so in a way that can be read."""
    said: Any = getattr(error, "retry_after", None)
    if type(said) not in (int, float) or not math.isfinite(said) or said <= 0:
        return None
    return min(float(said), policy.RETRY_AFTER_CAP)


def _judge_clean(attempt: Attempt, observed: Observed, error: BaseException, error_class: ErrorClass) -> Judged:
    facts: dict[str, Any] = {"error_class": error_class, "reason_code": str(error_class), "unknown_attempts": []}
    if attempt.first_sent_at is None and error_class in (ErrorClass.NOT_SENT, ErrorClass.OWN_FAULT):
        facts |= {"first_sent_at": None, "same_key_until": None}  # nothing has left yet: no retention has begun
    decision = policy.decide(error_class, attempt.spec)
    if decision is Next.HOLD:
        held = {**facts, "due_at": None, "escalation_reason": "held"}
        return Judged(
            to=State.FAILED_RETRYABLE, reason_code=str(error_class), observed=observed, patch=held,
            after={"escalated_at": 0},
        )  # fmt: skip
    if decision is Next.FAIL or error_class in attempt.retry.never:
        return Judged(to=State.FAILED_TERMINAL, reason_code=str(error_class), observed=observed, patch=facts)
    spent = attempt.retry.spent(attempt=attempt.attempt, elapsed=attempt.elapsed, spend=attempt.cost + _cost(error))
    if spent:
        return _judge_spent(attempt, observed, {**facts, "reason_code": spent}, error_class)
    wait = attempt.retry.wait(attempt.attempt, retry_after=asked_wait(error))
    return Judged(
        to=State.FAILED_RETRYABLE, reason_code=str(error_class), observed=observed, patch=facts,
        after={"due_at": wait, "not_before": wait},
    )  # fmt: skip


def _judge_spent(attempt: Attempt, observed: Observed, facts: Mapping[str, Any], error_class: ErrorClass) -> Judged:
    """Nothing was applied and no more is tried by itself: it fails or, where it must be done, a person is called.

    Where nothing ever left this machine that is no final answer about the operation either.
    """
    spent = str(facts["reason_code"])
    if spent_fails(final=attempt.spent_is_final, error_class=error_class):
        return Judged(to=State.FAILED_TERMINAL, reason_code=spent, observed=observed, patch=facts)
    waits = {**facts, "escalation_reason": spent, "due_at": None}
    return Judged(
        to=State.FAILED_RETRYABLE, reason_code=spent, observed=observed, patch=waits, after={"escalated_at": 0}
    )


def spent_fails(*, final: bool, error_class: str) -> bool:
    """Whether a spent budget fails it: not where it must be done, nor where nothing left, or was only found absent."""
    return final and error_class in policy.NOT_APPLIED and error_class != ErrorClass.NOT_SENT


def _judge_unknown(attempt: Attempt, observed: Observed, error: BaseException, error_class: ErrorClass) -> Judged:
    replays = _replays(attempt, error, error_class)
    extra = {"identical_replays": replays}
    reason = "no_answer" if error_class is ErrorClass.UNKNOWN else str(error_class)
    if policy.nothing_can_find_out(error_class, attempt.spec, attempt.provider):
        return _escalated(attempt, observed, reason="nothing_can_find_out", extra=extra)
    return _unknown(attempt, observed, reason_code=reason, error_class=error_class, extra=extra, error=error)


def _replays(attempt: Attempt, error: BaseException, error_class: ErrorClass) -> int:
    """How often the provider has replayed the same stored error in a row."""
    if isinstance(error, ProviderError) and error.replayed and attempt.last_error in ("", error_class):
        return attempt.identical_replays + 1
    return 0


def _unknown(
    attempt: Attempt,
    observed: Observed,
    *,
    reason_code: str,
    mine: bool = True,
    error_class: ErrorClass = ErrorClass.UNKNOWN,
    extra: Mapping[str, Any] | None = None,
    error: BaseException | None = None,
) -> Judged:
    """Look-ups begin at once, on their own schedule; automation repeats it no earlier than the step's policy says."""
    unknown = sorted({*attempt.unknown, *([attempt.attempt] if mine else [])})
    return Judged(
        to=State.AMBIGUOUS,
        reason_code=reason_code,
        observed=observed,
        patch={
            "unknown_attempts": unknown,
            "error_class": error_class,
            "reason_code": reason_code,
            "look_ups": 0,
            **(extra or {}),
        },
        after={
            "due_at": policy.look_up_delay(0),
            "not_before": attempt.retry.wait(attempt.attempt, retry_after=asked_wait(error)),
            "escalate_at": attempt.spec.escalate_after.total_seconds(),
        },
    )


def _escalated(attempt: Attempt, observed: Observed, *, reason: str, extra: Mapping[str, Any]) -> Judged:
    plain = _unknown(attempt, observed, reason_code=reason, extra=extra)
    return Judged(
        to=State.AMBIGUOUS,
        reason_code=reason,
        observed=observed,
        patch={**plain.patch, "escalation_reason": reason, "due_at": None},
        after={"escalated_at": 0, "escalate_at": 0},
    )


def lease_expired(
    attempt: int, unknown: tuple[int, ...], spec: ActionSpec | None, retry_policy: str
) -> tuple[dict[str, Any], dict[str, float]]:
    """(patch, after) of a lease that ran out: the attempt joins the unknown ones (rule 5).

    `retry_policy` is the step's as it was stored: what may be repeated waits as after any other attempt.
    """
    patch = {
        "unknown_attempts": sorted({*unknown, attempt}),
        "error_class": ErrorClass.UNKNOWN,
        "reason_code": "worker_lost",
        "look_ups": 0,
    }
    declared = spec or ActionSpec()  # unknown here: a worker that knows it may look up
    escalate, wait = declared.escalate_after.total_seconds(), RetryPolicy.read(retry_policy, declared).wait(attempt)
    return patch, {"due_at": 0, "lease_ended_at": 0, "not_before": wait, "escalate_at": escalate}
