"""What one row must hold together: each rule of the two functions behind the CHECKs is broken by itself."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from reconciliation.states import Basis, State
from tests.test_states import operation_in, put

LEASED = {
    "lease_until": "2027-01-01Z", "claim_nonce": "00000000-0000-4000-8000-000000000000", "due_at": "2027-01-01Z",
}  # fmt: skip
MARKED = {"escalated_at": "2027-01-01Z", "escalation_reason": "no_handler"}
WHOLE = {
    "subject": "operation:1", "seq": 1, "tenant": "acme", "event": "transition", "actor": "person:1",
    "actor_kind": "person", "reason_code": "tried", "hash": b"0" * 32,
}  # fmt: skip


@pytest.mark.parametrize("state", sorted(State))
def test_a_row_in_each_state_holds(superuser_connection: Any, state: str) -> None:
    assert operation_in(superuser_connection, state)


@pytest.mark.parametrize("basis", sorted(Basis))
def test_a_success_on_each_basis_holds(superuser_connection: Any, basis: str) -> None:
    assert put(superuser_connection, "reconciliation_operation", state="succeeded", basis=basis)


@pytest.mark.parametrize(
    ("rule", "columns"),
    [
        ("state_known", {"state": "lost"}),
        ("basis_known", {"state": "succeeded", "basis": "hunch"}),
        ("pending_is_leased", {"state": "pending", **LEASED, "lease_until": None}),
        ("pending_is_leased", {"state": "pending", **LEASED, "claim_nonce": None}),
        ("pending_is_leased", {"state": "ready", "lease_until": "2027-01-01Z"}),
        ("pending_is_leased", {"state": "ready", "claim_nonce": LEASED["claim_nonce"]}),
        ("pending_is_due", {"state": "pending", **LEASED, "due_at": None}),
        ("ambiguous_is_watched", {"state": "ambiguous"}),
        ("retryable_knows_all_attempts", {"state": "ready", "unknown_attempts": [1]}),
        ("retryable_knows_all_attempts", {"state": "failed_retryable", "unknown_attempts": [1]}),
        ("awaiting_knows_all_attempts", {"state": "awaiting_approval", "unknown_attempts": [1]}),
        ("failed_knows_all_attempts", {"state": "failed_terminal", "unknown_attempts": [1], "basis": "look_up"}),
        ("succeeded_has_basis", {"state": "succeeded"}),
        ("escalation_has_reason", {"state": "ready", **MARKED, "escalation_reason": ""}),
        ("escalation_has_reason", {"state": "ready", **MARKED, "escalated_at": None}),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused_with_its_name(
    superuser_connection: Any, rule: str, columns: dict[str, Any]
) -> None:
    with pytest.raises(psycopg.errors.CheckViolation) as refused:
        put(superuser_connection, "reconciliation_operation", **columns)
    assert refused.value.diag.constraint_name == f"operation_{rule}"


def test_what_is_unknown_may_be_unwatched_once_a_person_was_called_and_failed_on_a_persons_word(
    superuser_connection: Any,
) -> None:
    assert put(superuser_connection, "reconciliation_operation", state="ambiguous", **MARKED)
    asserted = {"unknown_attempts": [1], "basis": "asserted", "lineage": b"1" * 32, "key": "other"}
    assert put(superuser_connection, "reconciliation_operation", state="failed_terminal", **asserted)


@pytest.mark.parametrize("name", ["subject", "tenant", "event", "from_state", "to_state"])
@pytest.mark.parametrize("text", ["", 'a"', "A", "a b", "a\n", "ü", "x" * 121])
def test_a_name_that_would_not_stand_unescaped_in_the_record_is_refused(
    superuser_connection: Any, name: str, text: str
) -> None:
    with pytest.raises(psycopg.errors.CheckViolation) as refused:
        put(superuser_connection, "audit_entry", **{**WHOLE, name: text})
    assert refused.value.diag.constraint_name == f"audit_entry_{name.removesuffix('_state')}_form"


@pytest.mark.parametrize(
    ("rule", "columns"),
    [
        ("seq_starts", {"seq": 0}),
        ("actor_form", {"actor": ""}),
        ("actor_form", {"actor": "x" * 201}),
        ("actor_kind_known", {"actor_kind": "robot"}),
        ("reason_code_form", {"reason_code": ""}),
        ("reason_code_form", {"reason_code": "x" * 121}),
        ("hash_length", {"hash": b"0" * 31}),
    ],
)
def test_an_entry_that_is_no_record_of_a_decision_is_refused(
    superuser_connection: Any, rule: str, columns: dict[str, Any]
) -> None:
    assert put(superuser_connection, "audit_entry", **{**WHOLE, "subject": "operation:2"})
    with pytest.raises(psycopg.errors.CheckViolation) as refused:
        put(superuser_connection, "audit_entry", **{**WHOLE, **columns})
    assert refused.value.diag.constraint_name == f"audit_entry_{rule}"
