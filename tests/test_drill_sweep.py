"""What the crash sweep consists of: which cases are dealt out, and what is counted as what."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from drill import sweep
from drill.crash import Case, Halt, Seen
from drill.flows import AGREED, BACK, CANCELLED, FORWARD, RECORDED, RECORDED_BACK, SCHEDULED, actions_of, flows
from drill.sweep import TROUBLE, Job, Tally
from drill.world import FAULTS
from examples.order_desk.workflow import DAMAGED_ITEM
from tests.test_drill import stage  # noqa: F401 - a fixture

NAMED = (FORWARD, BACK, AGREED, SCHEDULED)  # forward, compensating, approval and scheduled flows
FLOWS = flows(DAMAGED_ITEM)
ALL = sweep.jobs(DAMAGED_ITEM, every=1, doubles=6000, seed=1)
SINGLES = {(job.flow, job.action, job.fault, job.how): job for job in ALL if job.kind == "singles"}
KINDS = ("before", "after", "about to leave", "under way", "done there, not answered", "looked up")


@pytest.mark.parametrize("flow", NAMED)
def test_every_fault_of_every_call_meets_a_kill_at_every_boundary(flow: str) -> None:
    assert len(TROUBLE) == len(FAULTS) - 1
    for action in actions_of(DAMAGED_ITEM, FLOWS[flow]):
        for fault in TROUBLE:
            assert SINGLES[flow, action, fault, "kill"].every == 1


@pytest.mark.parametrize("flow", FLOWS)
def test_every_flow_meets_every_kind_of_crash_and_every_call_of_it_some_faults(flow: str) -> None:
    hows = {how for f, action, _, how in SINGLES if f == flow and not action}
    assert hows == ({"cancel", "kill"} if flow == CANCELLED else {"kill", "freeze", "kill_unseen"})
    called = {action for f, action, _, how in SINGLES if f == flow and action}
    assert called == set(actions_of(DAMAGED_ITEM, FLOWS[flow]))


@pytest.mark.parametrize("flow", [RECORDED, RECORDED_BACK])
def test_what_a_flow_alone_does_meets_every_fault_there(flow: str) -> None:
    for action in {"outcome.record", "message.send_listed", "outcome.strike"} & set(
        actions_of(DAMAGED_ITEM, FLOWS[flow])
    ):
        assert {fault for f, a, fault, _ in SINGLES if (f, a) == (flow, action)} == set(TROUBLE)


@pytest.mark.parametrize("flow", NAMED)
def test_a_job_crashes_at_every_boundary_from_the_faulted_call_to_the_end(stage: Any, flow: str) -> None:  # noqa: F811
    met = set()
    for fault in TROUBLE:
        job = SINGLES[flow, "pickup.schedule", fault, "kill"]
        cases = list(sweep._singles(stage, DAMAGED_ITEM, job, Tally()))
        passed = stage.tape.passed
        called = next(n for n, name in enumerate(passed) if name.startswith("pickup.schedule:"))
        assert [case.halts for case in cases] == [(Halt("kill", at),) for at in range(called - 3, len(passed))]
        here = {kind for kind in KINDS for name in passed[called - 3 :] if kind in name}
        assert here >= set(KINDS[:5]), fault
        met |= here
    assert met == set(KINDS)


def test_a_job_without_a_fault_crashes_at_every_boundary_of_the_run(stage: Any) -> None:  # noqa: F811
    for flow, how in itertools.product(NAMED, ("kill", "freeze", "kill_unseen")):
        cases = list(sweep._singles(stage, DAMAGED_ITEM, SINGLES[flow, "", "no fault", how], Tally()))
        assert [case.halts for case in cases] == [(Halt(how, at),) for at in range(len(stage.tape.passed))]


def test_a_cancelled_run_is_killed_at_every_boundary_of_being_undone(stage: Any) -> None:  # noqa: F811
    job = SINGLES[CANCELLED, "", "no fault", "kill"]
    cases = list(sweep._singles(stage, DAMAGED_ITEM, job, Tally()))
    cancel, killed = cases[0].halts[0], [case.halts[1].at for case in cases]
    passed = stage.tape.passed
    assert cancel.how == "cancel"
    assert passed[cancel.at] == "pickup.schedule: about to leave"
    assert killed == [at for at in range(len(passed)) if at != cancel.at]
    undone = {"pickup.cancel: done there, not answered", "label.void: done there, not answered"}
    assert undone <= set(passed[cancel.at :])


def seen(*halts: Halt, took: tuple[Halt, ...]) -> Seen:
    return Seen(Case("forward", "no fault", "", halts), ["a boundary"] * 9, "succeeded", 0, [], took)


KILL, FREEZE, CANCEL = Halt("kill", 1), Halt("freeze", 5), Halt("cancel", 3)


@pytest.mark.parametrize(
    ("halts", "took", "kind"),
    [
        ((KILL, FREEZE), (KILL, FREEZE), "double crash"),
        ((CANCEL, KILL, FREEZE), (CANCEL, KILL, FREEZE), "double crash"),
        ((KILL, FREEZE), (KILL,), "pair of crashes, one took effect"),
        ((KILL, FREEZE), (), "pair of crashes, none took effect"),
        ((KILL, CANCEL), (KILL, CANCEL), "crash and a person's cancel"),
        ((KILL, CANCEL), (KILL,), "crash and a person's cancel, one took effect"),
        ((KILL, CANCEL), (), "crash and a person's cancel, none took effect"),
    ],
)
def test_only_two_crashes_that_both_took_effect_are_a_double_crash(
    halts: tuple[Halt, ...], took: tuple[Halt, ...], kind: str
) -> None:
    assert sweep.kind_of_pair(seen(*halts, took=took)) == kind


def test_pairs_are_drawn_until_there_are_as_many_double_crashes_as_were_asked_for(stage: Any) -> None:  # noqa: F811
    tally = sweep.do(stage, DAMAGED_ITEM, Job("doubles", seed=20260, count=6))
    assert (tally.cases[sweep.DOUBLE], tally.failures) == (6, [])


def test_pairs_fall_within_the_run_that_they_disturb(stage: Any) -> None:  # noqa: F811
    plain: dict[Any, Any] = {}
    for number in range(8):
        case = sweep._drawn(stage, DAMAGED_ITEM, 7000 + number, Tally(), plain)
        assert max(halt.at for halt in case.halts) < len(plain[case.flow, case.fault, case.action].boundaries)


def test_the_same_seed_draws_the_same_pairs(stage: Any) -> None:  # noqa: F811
    drawn = [[sweep._drawn(stage, DAMAGED_ITEM, 7000 + number, Tally(), {}) for number in range(2)] for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_a_freeze_in_a_transaction_is_told_apart_from_one_that_took_effect(stage: Any) -> None:  # noqa: F811
    flow = FLOWS[RECORDED]
    passed = stage.play(Case(RECORDED, "no fault", ""), flow).boundaries
    inside = Halt("freeze", passed.index("outcome.record: in its transaction"))
    outside = Halt("freeze", passed.index("message.send_listed: about to leave"))
    played = stage.play(Case(RECORDED, "no fault", "", (inside, outside)), flow)
    assert (played.took, played.problems) == ((outside,), [])


def test_the_seeds_of_two_jobs_never_meet() -> None:
    doubles = [job for job in ALL if job.kind == "doubles"]
    assert sum(job.count for job in doubles) == 6000
    seeds = [range(job.seed, job.seed + job.count * sweep.DRAWS) for job in doubles]
    assert len({seed for one in seeds for seed in one}) == sum(len(one) for one in seeds)
