"""The part `mutations`: each guard is broken in turn, and the tests that should notice are asked whether they do.

A guard in SQL is broken in the test run's own throw-away database, one in Python in its own process (drill/broken.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from drill import suite
from drill.parts import Asked, Told


@dataclass(frozen=True)
class Mutation:
    """One broken guard: in `function` (SQL or dotted Python) `old` is replaced by `new`, and `tests` should notice."""

    name: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def in_sql(self) -> bool:
        return "." not in self.function


TEN = "tests/test_ten_assertions.py"
MUTATIONS = (
    Mutation(
        "compare-and-set", "ledger_move_operation",
        "WHEN p_version IS NOT NULL AND v_old.version <> p_version THEN 'stale_version'", "",
        ("tests/test_single_writer.py::test_of_two_moves_on_one_version_only_the_first_is_made",
         "tests/test_reconcile.py::test_a_move_meanwhile_keeps_what_the_look_up_saw"),
    ),
    Mutation(
        "compare-and-set of runs", "ledger_move_run",
        "WHEN p_version IS NOT NULL AND v_old.version <> p_version THEN 'stale_version'", "",
        ("tests/test_runs.py::test_resuming_on_an_old_version_is_refused",),
    ),
    Mutation(
        "compare-and-set of approvals", "ledger_move_approval",
        "WHEN v_old.version <> p_version THEN 'stale_version'", "",
        ("tests/test_approvals.py::test_a_decision_names_the_version_on_which_it_rests",),
    ),
    Mutation(
        "approval re-check of two people", "ledger_unusable",
        "WHEN a.id IS NULL OR a.state IN ('waiting', 'denied', 'withdrawn', 'superseded') THEN 'not_approved'",
        "WHEN true THEN NULL",
        ("tests/test_approvals.py::test_the_database_refuses_a_consent_that_was_given_to_something_else",
         "tests/test_approvals.py::test_the_database_refuses_other_inputs_a_consent_that_is_late_and_one_that_is_used",
         "tests/test_two_people.py::test_the_database_itself_refuses_a_consent_that_was_given_to_another_limit"),
    ),
    Mutation(
        "fence", "ledger_move_operation",
        "(v_old.state <> 'pending' OR v_old.generation <> p_generation)\n            THEN", "false\n            THEN",
        ("tests/test_freeze.py::test_every_write_of_an_old_generation_is_refused",),
    ),
    Mutation(
        "approval re-check", "ledger_unconsented", "WHEN p_state = 'ambiguous' AND a.state = 'consumed' THEN NULL",
        "WHEN true THEN NULL",
        ("tests/test_approvals.py::test_the_database_claims_nothing_without_a_consent_that_holds",
         "tests/test_approvals.py::test_a_consent_that_nobody_used_in_time_is_asked_for_again"),
    ),
    Mutation(
        "restore fence", "fence_refuses", "RETURN 'restored'", "RETURN NULL",
        ("tests/test_fence.py::test_the_database_itself_refuses_every_claim_and_says_why",
         "tests/test_restore.py::test_no_new_operation_is_sent_and_it_enters_as_unknown"),
    ),
    Mutation(
        "replay window", "fence_refuses", "RETURN 'maybe_replayed'", "RETURN NULL",
        ("tests/test_restore.py::test_a_new_identity_in_the_replay_window_is_looked_up_before_it_is_sent",),
    ),
    Mutation(
        "retention check", "ledger_move_operation",
        "(v_old.same_key_until IS NULL OR v_old.same_key_until <= ledger_latest(v_now))", "false",
        (f"{TEN}::test_9_the_boundary_of_retention_is_exact",),
    ),
    Mutation(
        "a clock set back", "ledger_latest", "greatest(p_now, (SELECT c.told FROM reconciliation_clock c))", "p_now",
        ("tests/test_clock.py::test_a_consent_that_was_over_is_not_given_because_the_clock_was_set_back",
         "tests/test_clock.py::test_a_key_is_not_remembered_longer_because_the_clock_was_set_back"),
    ),
    Mutation(
        "settle time", "reconciliation.judgement.absence_provable_at", "", "last_sent",
        ("tests/test_kill.py::test_one_empty_look_is_no_proof_and_nor_is_an_early_one",),
    ),
    Mutation(
        "four-eyes", "ledger_move_approval", "ledger_folded(v_old.forbidden) && ledger_folded(p_who)", "false",
        ("tests/test_approvals.py::test_nobody_approves_their_own_request_whatever_their_role",),
    ),
    Mutation(
        "run lock at claim", "ledger_run_lets", "SELECT coalesce(CASE", "SELECT true OR coalesce(CASE",
        ("tests/test_runs.py::test_a_step_is_claimed_only_under_the_generation_that_holds_its_run",
         "tests/test_runs.py::test_a_step_is_tried_again_only_under_the_lease_that_holds_its_run"),
    ),
    Mutation(
        "fence of a local effect", "ledger_fence_local", "OR v_operation.lease_until <= v_now", "",
        ("tests/test_local.py::test_a_worker_whose_lease_ran_out_commits_nothing_any_more",),
    ),
    Mutation(
        "commit with its settlement", "local_effect_is_settled", "e.id = NEW.id", "false",
        ("tests/test_local.py::test_the_database_itself_commits_no_effect_without_its_settlement",),
    ),
    Mutation(
        "one operation a message", "reconciliation.outbox._write", "", "always",
        ("tests/test_outbox.py::test_a_slow_publisher_marks_nothing_that_another_or_a_person_has_dealt_with",),
    ),
    Mutation(
        "send-by", "reconciliation.claims._send_window", "", "for_ever",
        ("tests/test_executor.py::test_after_the_send_by_deadline_nothing_is_sent",),
    ),
)  # fmt: skip


def part(asked: Asked) -> Told:
    """First all of these tests with nothing broken; then each guard broken, with its own."""
    chosen = MUTATIONS[::4] if asked.quick else MUTATIONS
    everything = sorted({test for mutation in chosen for test in mutation.tests})
    sound = suite.run(everything)
    failures = [] if sound.sound else [f"with nothing broken: {sound.last}"]
    rows = []
    for mutation in chosen:
        ran = suite.run(mutation.tests, broken=mutation.name)
        asked.say(f"mutations: {mutation.name}: {ran.failed} tests noticed")
        rows.append((mutation.name, mutation.function, ran.failed, ran.last))
        if ran.status != 1 or not ran.failed:
            failures.append(f"{mutation.name} broken, and no test failed: {ran.last}")
    return Told(
        name="broken guards are noticed",
        asks="Each guard is taken out in turn: does a test fail?",
        counts={"guards broken": len(rows), "noticed": sum(bool(row[2]) for row in rows)},
        tables={"guards": (("guard", "where", "tests that failed", "the run's last line"), rows)},
        failures=failures,
    )
