"""A decision is asked for once: beside other steps, by a slow model, by a worker that dies while it asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from threading import Event
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel

from audit.models import Entry
from audit.verify import registered_heads, verify
from console import checks, sagas
from reconciliation import choosing, keys, registry, retention, run_deeds, runs, sweeping, tasks, transition, workers
from reconciliation.models import Chosen, JournalEntry, Run
from reconciliation.providers.base import Json, OutcomeUnknown, Rejected
from reconciliation.soundness import problems
from reconciliation.states import RunState
from reconciliation.workflows import Choice, Facts, Step, StepKind
from tests.saga_workflows import PATIENT, Plan, flow, order, reversible
from tests.scripted import KEYED, OLGA, applied, spec
from tests.test_sagas import press, settle, start

ASKED: list[int] = []
BEGUN, SENT = Event(), Event()
WAIT = 30.0  # seconds, for the other thread
MODEL: list[Callable[[], Any]] = []  # what the model does, each time that it is asked


def ask(facts: Facts) -> Any:
    ASKED.append(len(ASKED) + 1)
    return MODEL.pop(0)()


def _once_the_model_is_asked(facts: Facts) -> Json:
    assert BEGUN.wait(WAIT)
    return order(facts)


PLAN = Choice(name="plan", choose=ask, schema=Plan, shown=("amount",), proposals=3, after=())
PAY = Step(name="pay", provider="clerk", action="keyed", kind=StepKind.PIVOT, request=order, retry=PATIENT)
SLOW = flow("slow", PLAN, PAY)
BESIDES = flow("besides", PLAN, reversible("reserve", after=()), replace(PAY, after=("plan",)))
TWO_PLANS = flow("two_plans", replace(PLAN, name="first"), replace(PLAN, after=("first",)), PAY)
TWICE = flow("twice", PLAN, PAY, max_replans=2)
APART_FROM_IT = flow("apart_from_it", reversible("reserve"), replace(PAY, name="ship"), PLAN)
BESIDE = flow(
    "beside", PLAN, replace(reversible("reserve", after=()), request=_once_the_model_is_asked),
    replace(PAY, after=("plan", "reserve")),
)  # fmt: skip


WORKFLOWS = ("SLOW", "TWO_PLANS", "BESIDES", "TWICE", "APART_FROM_IT", "BESIDE", "NOTED", "FREE")


@pytest.fixture
def model(clerk: Any, settings: Any) -> Any:
    settings.AFTERCALL_WORKFLOWS = [f"tests.test_decisions.{name}" for name in WORKFLOWS]
    registry.forget()
    for kept in (ASKED, MODEL):
        kept.clear()
    for event in (BEGUN, SENT):
        event.clear()
    return clerk


def test_a_short_step_beside_a_slow_model_leaves_the_lease_to_the_model(
    model: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(model.actions, "keyed", replace(model.actions["keyed"], timeout=timedelta(seconds=5)))

    def thinks() -> Json:
        BEGUN.set()
        assert SENT.wait(WAIT)
        clock.advance(40)
        sweeping.sweep()  # another worker, that looks for what is due
        return {"amount": 7}

    def answers(call: Any) -> Any:
        SENT.set()
        return applied("r-1")

    MODEL[:] = [thinks, lambda: {"amount": 8}]
    model.answers(answers)
    start("beside")
    settle(clock)
    assert ASKED == [1]
    assert Chosen.objects.get().value == {"amount": 7, "secret": "none"}
    assert Run.objects.get().state == RunState.SUCCEEDED


# What is asked for is on record first


def sweep_past_deaths(clock: Any, *, rounds: int = 12) -> None:
    """Workers come and go: each sweeps, may die at it, and the next comes when the lease is over."""
    for _ in range(rounds):
        try:
            sweeping.sweep()
        except SystemExit:
            workers._known.clear()
        clock.advance(minutes=4)


def dies() -> Any:
    """The queue ends the task, or the model takes its worker down."""
    raise SystemExit


def test_a_model_that_takes_its_workers_down_is_asked_as_often_as_it_may_propose_and_a_person_is_told(
    model: Any, clock: Any
) -> None:
    MODEL[:] = [dies] * 9
    run = start("slow")
    sweep_past_deaths(clock)
    run.refresh_from_db()
    assert ASKED == [1, 2, 3]
    assert (run.escalation_reason, run.waiting_for) == ("no_valid_proposal", "plan")
    asked = JournalEntry.objects.filter(run=run, kind="proposal_asked").order_by("id")
    assert [entry.attempt for entry in asked] == [1, 2, 3]
    MODEL[:] = [lambda: {"amount": 9}]
    assert press(run, "choose_again").verdict == "done"
    settle(clock)
    assert Run.objects.get().state == RunState.SUCCEEDED
    assert Chosen.objects.get().version == 2


def test_a_proposal_is_on_record_before_the_model_is_asked(model: Any, clock: Any) -> None:
    seen: list[int] = []

    def looks() -> Json:
        seen.append(JournalEntry.objects.filter(kind="proposal_asked").count())
        return {"amount": 7}

    MODEL[:] = [looks]
    start("slow")
    settle(clock)
    assert seen == [1]


def test_each_proposal_has_a_lease_of_its_own(model: Any, clock: Any) -> None:
    def slowly(amount: int) -> Callable[[], Json]:
        def thinks() -> Json:
            clock.advance(100)
            sweeping.sweep()  # another worker, that looks for what is due
            return {"amount": amount}

        return thinks

    MODEL[:] = [slowly(0), slowly(-1), slowly(7)]
    start("slow")
    settle(clock)
    assert ASKED == [1, 2, 3]
    assert Chosen.objects.get(valid=True).value["amount"] == 7
    assert [each.problem for each in Chosen.objects.filter(valid=False)] == ["amount: greater_than"] * 2


@pytest.mark.parametrize("taken", [False, True])
def test_an_answer_that_comes_when_the_run_is_held_no_more_is_kept_and_counts_as_refused(
    model: Any, clock: Any, taken: bool
) -> None:
    def too_late() -> Json:
        clock.advance(minutes=5)
        if taken:
            sweeping.sweep()  # another worker takes the run and asks
        return {"amount": 7, "secret": "CANARY"}

    MODEL[:] = [too_late, lambda: {"amount": 8}]
    start("slow")
    settle(clock)
    late = Chosen.objects.get(valid=False)
    assert (late.problem, late.value) == ("came when the run was held no more", {"amount": 7, "secret": "CANARY"})
    assert "CANARY" not in f"{late.value_shown}{late.value_sealed}"
    assert Chosen.objects.get(valid=True).value["amount"] == 8
    assert {call.request["amount"] for call in model.calls} == {4200}
    assert ASKED == [1, 2]


def test_refusals_from_before_proposals_were_on_record_count_all_the_same(
    model: Any, clock: Any, superuser_connection: Any
) -> None:
    run = start("slow")
    superuser_connection.execute(
        "INSERT INTO reconciliation_chosen (run_id, step, version, valid, problem, reason, value_shown, value_sealed,"
        " at) SELECT %s, 'plan', 1, false, 'amount: missing', '', '{}', '', now() FROM generate_series(1, 2)",
        [run.pk],
    )
    MODEL[:] = [lambda: {"amount": 0}] * 3
    settle(clock)
    assert ASKED == [1]
    assert Run.objects.get().escalation_reason == "no_valid_proposal"


def test_a_choice_that_may_take_longer_than_the_queue_lets_a_task_is_refused_at_start(
    model: Any, settings: Any
) -> None:
    assert checks.time_to_propose() == []
    settings.Q_CLUSTER = {**settings.Q_CLUSTER, "timeout": 130}
    first = checks.time_to_propose()[0]
    assert first.id == "aftercall.E023"
    assert "choice 'plan' may take 130 s with its lease's margin, but the queue ends a task after 130 s" in first.msg
    settings.Q_CLUSTER = {**settings.Q_CLUSTER, "timeout": 133}
    assert checks.time_to_propose() == []


def test_a_time_to_propose_that_is_no_timedelta_leaves_the_checks_at_start_to_the_one_that_says_so(
    monkeypatch: Any,
) -> None:
    hurried = flow("hurried", replace(PLAN, timeout=120), PAY)
    monkeypatch.setattr(registry, "workflows", lambda: {("hurried", 1): hurried})
    assert checks.time_to_propose() == []


def test_a_choice_without_time_to_propose_is_refused() -> None:
    told = list(problems(flow("hurried", replace(PLAN, timeout=timedelta(0)), PAY), lambda *_: None))
    assert "choice 'plan' has no time to propose; timeout must be a timedelta above 0" in told


# What is refused is kept, and told without the model's own words


class Itinerary(BaseModel):
    tier: str
    notes: dict[str, int] = {}


CANARY = "Ada Fenn 4242424242424242"
NOTED = flow("noted", replace(PLAN, schema=Itinerary, shown=("tier",)), PAY)
FREE = flow("free", replace(PLAN, schema=None, shown=("tier",)), PAY)


def refuse(workflow: str, proposal: Any) -> Chosen:
    """Have one proposal refused and the next one taken, and return the refused one."""
    MODEL[:] = [proposal if callable(proposal) else lambda: proposal, lambda: {"tier": "gold"}]
    runs.advance(start(workflow).pk)
    assert Chosen.objects.get(valid=True).value_shown == '{"tier":"gold"}'
    return Chosen.objects.get(valid=False)


def told(run: Run) -> sagas.Refused:
    """What the run's page tells of the proposal that was refused."""
    decision = next(step.decision for step in sagas.saga(run).steps if step.name == "plan")
    assert decision is not None
    (only,) = decision.refused
    return only


def test_a_refused_proposal_is_kept_whole_and_sealed_and_its_shown_fields_can_be_seen(model: Any) -> None:
    proposal = {"tier": "gold", "notes": {CANARY: "x"}}
    refused = refuse("noted", proposal)
    assert refused.value == proposal
    assert (refused.value_shown, CANARY in refused.value_sealed) == ('{"tier":"gold"}', False)
    page = told(Run.objects.get())
    assert (page.shown, page.hidden) == ([("tier", "gold")], ("notes",))


@pytest.mark.parametrize(
    ("proposal", "problem", "hidden"),
    [
        ({"tier": "gold", "notes": {CANARY: "x"}}, "notes.•: int_parsing", ("notes",)),
        ({"tier": {CANARY: 1}}, "tier: string_type", ("tier",)),
        ({CANARY: 1, "Sam 4000": 2}, "tier: missing", ("• (2)",)),
        ({"tier": 7, CANARY: 1}, "tier: string_type", ("•",)),
        ([CANARY], "proposal: model_type", ("•",)),
        (CANARY, "proposal: model_type", ("•",)),
        ({"tier": 7, "notes": {4242424242424242: "x"}}, "tier: string_type; notes.•.•: string_type; ", ()),
        ({"tier": 7, "notes": object()}, "not kept, since it is no JSON: dict", ()),
    ],
)  # fmt: skip
def test_no_name_that_the_model_made_up_is_told(model: Any, proposal: Any, problem: str, hidden: Any) -> None:
    refused = refuse("noted", proposal)
    page = told(Run.objects.get())
    assert problem in refused.problem
    assert page.hidden == hidden
    said = f"{refused.problem} {refused.value_shown} {refused.value_sealed} {page}"
    assert not [word for word in ("Ada", "4242", "Sam") if word in said.replace(refused.value_sealed, "")]


def test_what_is_too_large_is_kept_in_part_and_says_so(model: Any) -> None:
    refused = refuse("noted", {"tier": 7, "essay": "x" * 50_000})
    assert "tier: string_type; the first 16384 of its 50021 bytes are kept" in refused.problem
    assert len(str(refused.value)) < 17_000
    assert told(Run.objects.get()).hidden == ("•",)


@pytest.mark.parametrize(
    ("proposal", "problem"),
    [
        (lambda: keys.parse(f'{{"{CANARY}": 1, "{CANARY}": 2}}'), "the chooser raised InvalidField"),
        (lambda: [CANARY], "plan: must propose a JSON object"),
        (lambda: {CANARY: float("nan")}, "plan: holds NaN or Infinity, which JSON has no form for; not kept"),
    ],
)  # fmt: skip
def test_a_choice_without_a_schema_tells_no_name_either(model: Any, proposal: Any, problem: str) -> None:
    refused = refuse("free", proposal)
    assert refused.problem.startswith(problem)
    assert CANARY not in f"{refused.problem}{told(Run.objects.get())}"


def shredding(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = spec(**KEYED, shred_after=timedelta(days=2))
    monkeypatch.setattr(model, "actions", dict.fromkeys(model.actions, made))


def test_what_was_refused_is_shredded_when_the_runs_requests_are_and_what_counts_stays(
    model: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shredding(model, monkeypatch)
    refuse("noted", {"tier": "gold", "notes": {CANARY: "x"}})
    run = Run.objects.get()
    clock.advance(days=1)
    assert retention.tend().proposals == 0
    clock.advance(days=2)
    assert retention.tend(dry_run=True).proposals == 1
    tally = retention.tend()
    assert (tally.proposals, "and what 1 runs refused" in tally.told()) == (1, True)
    refused, counted = Chosen.objects.order_by("id")
    assert (refused.value_sealed, refused.value_shown, refused.problem) == (
        "", '{"tier":"gold"}', "notes.•: int_parsing",
    )  # fmt: skip
    assert (counted.value_sealed != "", told(run).hidden) == (True, ())
    assert Entry.objects.get(subject=str(run.subject), event="shredded").actor == "system:retention"
    assert retention.tend().proposals == 0
    assert list(verify(registered_heads())) == []


def test_what_was_refused_stays_while_a_person_must_look_at_the_run(
    model: Any, clock: Any, monkeypatch: pytest.MonkeyPatch, cleaner: Any
) -> None:
    shredding(model, monkeypatch)
    refuse("noted", {"tier": "gold", "notes": {CANARY: "x"}})
    settle(clock)
    clock.advance(days=9)
    cleaner.execute("UPDATE reconciliation_run SET escalated_at = now()")
    assert retention.tend().proposals == 0
    run = Run.objects.get()
    fact = OLGA.fact("shredded")
    assert transition.shred(run.subject, after=0, fact=fact) == "escalated"
    cleaner.execute("UPDATE reconciliation_run SET escalated_at = NULL")
    assert transition.shred(run.subject, after=10 * 86_400, fact=fact) == "young"
    assert transition.shred(run.subject, after=0, fact=fact) == "shredded"
    MODEL[:] = [lambda: {"amount": 0}] * 3
    open_one = start("slow", workflow_id="c-2")
    settle(clock)
    assert transition.shred(open_one.subject, after=0, fact=fact) == "open"


def test_a_proposal_is_emptied_by_retention_alone_and_never_one_that_counts(
    model: Any, superuser_connection: Any
) -> None:
    refuse("noted", {"tier": "gold", "notes": {CANARY: "x"}})
    run, change = Run.objects.get(), "UPDATE reconciliation_chosen SET value_sealed = ''"
    for where, subject in (("valid", f"run:{run.pk}"), ("NOT valid", "run:0"), ("NOT valid", "")):
        superuser_connection.execute("SELECT set_config('aftercall.pruning', %s, false)", [subject])
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="append-only"):
            superuser_connection.execute(f"{change} WHERE {where}")


# Deciding anew


def test_why_a_version_was_given_up_is_kept_with_what_follows_it_and_told(model: Any, clock: Any) -> None:
    MODEL[:] = [lambda: {"amount": 0}] * 3
    run = start("slow")
    settle(clock)
    assert press(run, "choose_again").verdict == "done"
    given_up = next(step.decision for step in sagas.saga(Run.objects.get()).steps if step.name == "plan")
    assert given_up is not None
    assert given_up.given_up == [(1, "as agreed")]
    MODEL[:] = [lambda: {"amount": 0}, lambda: {"amount": 9}]
    settle(clock)
    rows = Chosen.objects.order_by("id").values_list("version", "valid", "reason")
    assert list(rows) == [(1, False, "")] * 3 + [(2, False, "as agreed"), (2, True, "as agreed")]
    assert Run.objects.get().state == RunState.SUCCEEDED


def test_a_run_is_decided_anew_as_often_as_its_workflow_lets_it_be(model: Any, clock: Any) -> None:
    MODEL[:] = [lambda: {"amount": 0}] * 9
    run = start("twice")
    settle(clock)
    for _ in range(2):
        assert press(run, "choose_again").verdict == "done"
        settle(clock)
    answer = press(run, "choose_again")
    assert answer.verdict == "refused"
    assert "This run was decided anew 2 times already, which is as often as it may be." in answer.message
    assert (Run.objects.get().replans, len(ASKED)) == (2, 9)


def test_a_run_is_not_resumed_to_stop_at_once_where_its_proposals_are_spent(model: Any, clock: Any) -> None:
    MODEL[:] = [lambda: {"amount": 0}] * 3
    run = start("slow")
    settle(clock)
    answer = press(run, "resume")
    assert answer.verdict == "refused"
    assert "plan was asked for as often as it may be. Ask for a fresh decision, or cancel the run." in answer.message


def test_a_decision_that_was_not_asked_for_yet_is_not_made_anew(model: Any, clock: Any) -> None:
    run = start("slow")
    answer = press(run, "choose_again")
    assert (answer.verdict, Run.objects.get().replans) == ("refused", 0)
    assert "plan was not asked for yet: it is decided when the run gets there." in answer.message
    MODEL[:] = [lambda: {"amount": 0}] * 3
    settle(clock)
    assert press(run, "choose_again").verdict == "done"
    assert press(run, "choose_again").verdict == "refused", "the fresh one was not asked for yet"
    assert Run.objects.get().replans == 1


def test_a_run_that_walks_back_decides_nothing_anew(model: Any, clock: Any) -> None:
    MODEL[:] = [lambda: {"amount": 7}]
    model.answers(applied("r-1"), Rejected("no", status=402), OutcomeUnknown("lost"))
    run = start("apart_from_it")
    runs.advance(run.pk)
    runs.advance(run.pk)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATING
    with pytest.raises(choosing.NotChosenAgain, match="being undone"):
        runs.choose_again(run.pk, step="plan", actor=OLGA, version=run.version, reason="as agreed")
    allowed, why = run_deeds.say_choose_again(run)
    assert (allowed, why) == (False, "The run is being undone; nothing of it is decided anew.")


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that have passed for the worker."""
    seconds = [0.0]
    for module in (tasks, sweeping, runs, choosing):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def slowly(passed: list[float], proposal: Json) -> Callable[[], Json]:
    def thinks() -> Json:
        passed[0] += 100.0
        return proposal

    return thinks


def test_a_task_asks_for_one_slow_decision_of_a_run_and_hands_it_back_before_the_next(
    model: Any, clock: Any, passed: list[float]
) -> None:
    MODEL[:] = [slowly(passed, {"amount": 7})] * 2
    run = start("two_plans")
    tasks.drain()
    run.refresh_from_db()
    assert (ASKED, run.state, run.reason_code, run.escalated_at) == ([1], "pending", "handed_back", None)
    tasks.drain()
    assert (ASKED, Run.objects.get().state, len(model.calls)) == ([1, 2], "pending", 0)
    tasks.drain()
    assert (Run.objects.get().state, len(model.calls)) == ("succeeded", 1)
    assert JournalEntry.objects.filter(kind="proposal_asked").count() == 2


def test_a_task_asks_no_slow_model_again_that_proposed_nothing_valid(
    model: Any, clock: Any, passed: list[float]
) -> None:
    MODEL[:] = [slowly(passed, {"amount": "none"})] * 3
    run = start("slow")
    for number in (1, 2, 3):
        tasks.drain()
        assert len(ASKED) == number
    run.refresh_from_db()
    assert (run.escalation_reason, run.waiting_for) == ("no_valid_proposal", "plan")


def test_a_run_with_an_unknown_step_is_handed_back_as_uncertain_and_goes_on(
    model: Any, clock: Any, passed: list[float]
) -> None:
    MODEL[:] = [slowly(passed, {"amount": 7})]
    model.answers(OutcomeUnknown("no answer came"))
    run = start("besides")
    tasks.drain()
    run.refresh_from_db()
    assert (run.state, run.reason_code, len(model.calls)) == ("uncertain", "handed_back", 1)
    tasks.drain()
    assert len(model.calls) == 2
    settle(clock)
    assert Run.objects.get().state == "succeeded"


def test_a_quick_decision_after_a_quick_one_is_made_in_one_go(model: Any, clock: Any, passed: list[float]) -> None:
    MODEL[:] = [lambda: {"amount": 7}] * 2
    assert runs.advance(start("two_plans").pk).state == "succeeded"


def test_a_task_begins_no_decision_that_the_queue_would_end_in_the_middle(
    model: Any, clock: Any, passed: list[float]
) -> None:
    MODEL[:] = [slowly(passed, {"amount": 7})] * 3
    for name in ("w1", "w2", "w3"):
        start("slow", workflow_id=name)
    tasks.drain()
    assert (passed, ASKED) == ([100.0], [1]), "a second one would have been ended after 80 s"
    for _ in range(2):
        clock.advance(minutes=2)
        tasks.drain()
    assert ASKED == [1, 2, 3]
    settle(clock)
    assert set(Run.objects.values_list("state", flat=True)) == {"succeeded"}
