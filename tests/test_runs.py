"""Runs, the forward path: start, advance, stop where a step is not known, wake, go on."""

from dataclasses import replace

import pytest

from audit.models import Entry
from reconciliation import (
    actions,
    executor,
    leases,
    reconciler,
    registry,
    retrying,
    run_deeds,
    runs,
    sweeping,
    transition,
)
from reconciliation.executor import Held, perform
from reconciliation.keys import InvalidField
from reconciliation.models import Operation, Run
from reconciliation.policy import RetryPolicy
from reconciliation.providers.base import OutcomeUnknown, OwnFault, Rejected, Unavailable
from reconciliation.states import RunState, State
from reconciliation.workflows import StepKind, Undo
from tests import scripted_workflows
from tests.ledger import changes_without_audit
from tests.scripted import AGENT, OLGA, applied, cannot_tell, found, order
from tests.test_executor import stop

LOST = OutcomeUnknown("no answer came")
REFUSED = Rejected("no", status=402)
DOWN = Unavailable("later", status=503)
INPUT = {"order": "1002", "amount": 4200, "card": "4242424242424242"}


@pytest.fixture
def versions(clerk, settings):
    """Sets which versions of the workflow this deployment has."""

    def have(*names):
        settings.AFTERCALL_WORKFLOWS = [f"tests.scripted_workflows.{name}" for name in names]
        registry.forget()

    have("first", "reading", "broken")
    return have


def started(workflow="damaged_item", **parts):
    whole = {"tenant": "acme", "workflow_id": "1002", "input": INPUT, "actor": AGENT, **parts}
    return runs.start(workflow, **whole)


def label(call):
    return applied("l-1", **call.request)


def refund(call):
    return applied("r-1", **call.request)


def run_now(run):
    return Run.objects.get(pk=run.pk)


def step(name):
    return Operation.objects.get(step=name)


def hand_over(operation):
    executor.call_a_person(operation, "no_conclusive_answer")


def hold(run):
    return leases.take(run, to=RunState.RUNNING, actor=AGENT, seconds=60)


# Starting


def test_a_started_run_is_due_at_once_and_its_input_is_sealed(versions):
    run = started()
    assert (run.state, run.workflow_version, run.business_object) == ("pending", 1, "1002")
    assert run.due_at is not None
    assert run.input == INPUT
    assert "4242424242424242" not in run.input_shown + run.input_sealed


def test_the_same_start_again_is_the_same_run(versions):
    assert started().pk == started().pk
    assert Run.objects.count() == 1


def test_the_same_id_with_another_input_is_refused_on_record(versions):
    run = started()
    with pytest.raises(runs.RunMismatch):
        started(input={**INPUT, "amount": 1})
    assert Entry.objects.get(event="refused").subject == f"run:{run.pk}"
    assert Run.objects.count() == 1


def test_the_same_id_of_another_tenant_is_another_run(versions):
    assert started().pk != started(tenant="beta", input={**INPUT, "amount": 1}).pk


@pytest.mark.parametrize("given", [{"amount": 1}, [], {"order": ""}, {"order": None}])
def test_an_input_that_names_no_object_starts_nothing(versions, given):
    with pytest.raises(InvalidField):
        started(input=given)
    assert Run.objects.count() == 0


def test_an_unknown_workflow_starts_nothing(versions):
    with pytest.raises(registry.Unregistered):
        started("nothing")


# The way forward


def test_a_run_walks_its_steps_and_each_gets_the_results_before_it(versions, clerk, superuser_connection):
    clerk.answers(label, refund)
    run = started()
    assert sweeping.sweep() == 1
    assert (run_now(run).state, run_now(run).due_at) == ("succeeded", None)
    assert [call.request.get("label") for call in clerk.calls] == [None, "l-1"]
    assert {o.run_id for o in Operation.objects.all()} == {run.pk}
    assert changes_without_audit(superuser_connection) == []


def test_a_run_stops_at_an_unknown_step_and_is_woken_by_its_resolution(versions, clerk, clock):
    clerk.answers(LOST, refund)
    clerk.sees(cannot_tell())
    run = runs.advance(started().pk)
    assert (run.state, run.waiting_for, run.due_at) == ("uncertain", "label", None)
    clerk.sees(found("l-1", amount=0))
    reconciler.reconcile(step("label").pk, actor=OLGA)
    assert run_now(run).due_at <= clock.now()
    sweeping.sweep()
    assert run_now(run).state == "succeeded"
    assert clerk.calls[-1].request["label"] == "l-1"
    assert [call.request.get("label") for call in clerk.calls] == [None, "l-1"]


def test_what_a_look_up_found_is_the_result_that_later_steps_build_on(versions, clerk):
    clerk.answers(LOST, refund)
    run = runs.advance(started().pk)
    clerk.sees(found("l-9", amount=0))
    reconciler.reconcile(step("label").pk)
    runs.advance(run.pk)
    assert step("refund").request["label"] == "l-9"


def test_an_advanced_run_reuses_what_is_settled(versions, clerk):
    clerk.answers(label, LOST)
    run = runs.advance(started().pk)
    before = len(clerk.calls)
    runs.resume(run.pk, actor=OLGA, version=run.version, reason="look again")
    runs.advance(run.pk)
    assert len(clerk.calls) == before == 2
    assert run_now(run).state == "uncertain"


def test_an_escalated_step_holds_its_run_until_a_person_decides(versions, clerk, clock):
    clerk.answers(OwnFault("the credential is malformed"))
    run = runs.advance(started().pk)
    assert (run.state, run.due_at, run.escalation_reason) == ("pending", None, "step_needs_person")
    clock.advance(days=1)
    sweeping.sweep()
    assert len(clerk.calls) == 1
    clerk.answers(label, refund)
    retrying.retry(step("label").pk, actor=OLGA, reason="repaired")
    sweeping.sweep()
    assert (run_now(run).state, run_now(run).escalated_at) == ("succeeded", None)


def test_a_run_is_handed_to_a_person_with_its_unknown_step_and_goes_on_by_itself_when_that_is_found(
    versions, clerk, clock, superuser_connection
):
    clerk.answers(LOST, refund)
    clerk.sees(cannot_tell())
    run = runs.advance(started().pk)
    hand_over(step("label"))
    sweeping.sweep()
    assert (run_now(run).state, run_now(run).waiting_for, run_now(run).due_at) == ("uncertain", "label", None)
    assert run_now(run).escalation_reason == "step_needs_person"
    clerk.sees(found("l-1", amount=0))
    reconciler.reconcile(step("label").pk, actor=OLGA)
    sweeping.sweep()
    assert (run_now(run).state, run_now(run).escalated_at) == ("succeeded", None)
    assert changes_without_audit(superuser_connection) == []


def test_a_run_whose_step_was_found_is_not_put_to_sleep_by_a_worker_that_does_not_know_its_workflow(
    versions, clerk, clock
):
    clerk.answers(LOST, refund)
    clerk.sees(cannot_tell())
    run = runs.advance(started().pk)
    hand_over(step("label"))
    sweeping.sweep()
    assert run_now(run).escalation_reason == "step_needs_person"
    clerk.sees(found("l-1", amount=0))
    reconciler.reconcile(step("label").pk, actor=OLGA)
    versions()
    sweeping.sweep()
    versions("first")
    clock.advance(minutes=5)
    sweeping.sweep()
    assert (run_now(run).state, run_now(run).escalated_at) == ("succeeded", None)


def test_a_step_that_is_found_while_its_run_is_being_handed_to_a_person_is_not_overlooked(versions, clerk, monkeypatch):
    clerk.answers(LOST, refund)
    run = runs.advance(started().pk)
    hand_over(step("label"))
    clerk.sees(found("l-1", amount=0))
    plain = runs.needs_a_person

    def decided_too_late(progress):
        needed = plain(progress)
        reconciler.reconcile(step("label").pk, actor=OLGA)
        return needed

    monkeypatch.setattr(runs, "needs_a_person", decided_too_late)
    sweeping.sweep()
    monkeypatch.undo()
    assert (run_now(run).escalation_reason, run_now(run).due_at is None) == ("step_needs_person", False)
    sweeping.sweep()
    assert run_now(run).state == "succeeded"


def test_resuming_a_run_that_waits_for_a_decision_about_a_step_is_told_to_change_nothing(versions, clerk):
    clerk.answers(OwnFault("the credential is malformed"))
    run = runs.advance(started().pk)
    allowed, why = run_deeds.say_resume(run)
    assert not allowed
    assert "label waits for a person's decision" in why


def test_a_step_that_may_be_tried_again_is_claimed_under_its_run(versions, clerk, clock):
    clerk.answers(DOWN, label, refund)
    run = runs.advance(started().pk)
    assert (run.state, run.waiting_for) == ("pending", "label")
    assert run.due_at == step("label").due_at
    clock.advance(minutes=5)
    sweeping.sweep()
    assert run_now(run).state == "succeeded"
    assert step("label").attempts == 2


# The ways out


def test_a_failure_with_nothing_applied_fails_the_run(versions, clerk):
    clerk.answers(REFUSED)
    run = runs.advance(started().pk)
    assert (run.state, run.escalated_at, run.waiting_for) == ("failed", None, "label")


def test_what_was_only_read_is_nothing_to_undo(versions, clerk):
    clerk.answers(label, REFUSED)
    assert runs.advance(started("broken", workflow_id="b").pk).escalation_reason == "step_cannot_be_built"
    registry.workflows()["reading", 1]
    run = started("reading", workflow_id="r")
    assert runs.advance(run.pk).state in ("failed", "pending")


def test_a_failure_after_effects_walks_back_and_never_counts_as_nothing_applied(versions, clerk, clock):
    clerk.answers(label, REFUSED)
    run = runs.advance(started().pk)
    assert run.state == "compensating"
    for _ in range(3):
        clock.advance(minutes=5)
        sweeping.sweep()
    assert (run_now(run).state, run_now(run).escalation_reason) == ("compensating", "undo_incomplete")


def test_a_terminated_step_stops_its_run_visibly(versions, clerk):
    clerk.answers(LOST)
    run = runs.advance(started().pk)
    stop(step("label").pk)
    sweeping.sweep()
    assert run_now(run).escalation_reason == "step_terminated"
    assert len(clerk.calls) == 1


def test_a_step_that_cannot_be_built_stops_its_run_visibly(versions, clerk):
    run = runs.advance(started("broken").pk)
    assert (run.state, run.escalation_reason) == ("pending", "step_cannot_be_built")
    assert clerk.calls == []


def test_a_step_whose_request_is_not_what_was_accepted_first_stops_its_run(versions, clerk):
    perform(order(step="label", business_object="1002"), actor=AGENT)
    run = runs.advance(started().pk)
    assert run.escalation_reason == "request_changed"
    assert len(clerk.calls) == 1


def test_a_step_that_a_newer_intent_has_replaced_stops_its_run_and_does_not_come_back_for_ever(versions, clerk):
    perform(order(step="label", business_object="1002", intent_version=2), actor=AGENT)
    run = runs.advance(started().pk)
    assert (run.state, run.escalation_reason, run.due_at) == ("pending", "newer_version_exists", None)


def test_a_marked_run_is_left_alone_until_it_is_resumed(versions, clerk):
    run = runs.advance(started("broken").pk)
    assert runs.advance(run.pk).version == run.version
    resumed = runs.resume(run.pk, actor=OLGA, version=run.version, reason="repaired")
    assert (resumed.escalated_at, resumed.due_at is not None) == (None, True)


@pytest.mark.parametrize("after_effects", [False, True])
def test_a_run_that_has_ended_is_neither_advanced_nor_resumed(versions, clerk, after_effects):
    clerk.answers(*([label, refund] if after_effects else [REFUSED]))
    run = runs.advance(started().pk)
    assert runs.advance(run.pk).version == run.version
    with pytest.raises(transition.NotInTable):
        runs.resume(run.pk, actor=OLGA, version=run.version, reason="again")


def test_resuming_on_an_old_version_is_refused(versions, clerk):
    clerk.answers(label, REFUSED)
    run = runs.advance(started().pk)
    with pytest.raises(transition.StaleVersion):
        runs.resume(run.pk, actor=OLGA, version=run.version - 1, reason="again")


# Versions


def test_a_run_keeps_the_version_with_which_it_began(versions, clerk):
    clerk.answers(label, LOST)
    run = runs.advance(started().pk)
    versions("first", "second")
    clerk.sees(found("r-1", amount=4200))
    reconciler.reconcile(step("refund").pk)
    assert runs.advance(run.pk).state == "succeeded"
    assert not Operation.objects.filter(step="mail").exists()
    assert started(workflow_id="1003").workflow_version == 2


def test_a_worker_without_the_handler_leaves_the_run_to_another(versions, clerk):
    run = started()
    versions("second")
    waits = "handler: no workflow damaged_item version 1 is configured here; add it to AFTERCALL_WORKFLOWS"
    assert runs.advance(run.pk).waiting_for == waits
    said = run_now(run).version
    runs.advance(run.pk)
    sweeping.sweep()
    assert (run_now(run).version, run_now(run).due_at is None) == (said, False)  # once, however often it is looked at
    assert clerk.calls == []
    versions("first")
    clerk.answers(label, refund)
    assert runs.advance(run.pk).state == "succeeded"


def test_workers_that_lack_different_handlers_say_so_once_and_not_by_turns(versions, clerk, clock, monkeypatch):
    run = started()
    lacked = iter(["no provider 'a'", "no provider 'b'"] * 20)

    def lacks(workflow):
        raise registry.Unregistered(next(lacked))

    monkeypatch.setattr(leases, "longest", lacks)
    assert runs.advance(run.pk).waiting_for == "handler: no provider 'a'"
    said = run_now(run).version
    for _ in range(5):
        clock.advance(61)
        sweeping.sweep()
    assert run_now(run).version == said
    assert run_now(run).due_at is not None
    clock.advance(hours=1)
    while run_now(run).waiting_for == "handler: no provider 'a'":  # what is lacked now is not hidden for good
        runs.advance(run.pk)
    assert run_now(run).version == said + 1


# The lease


def test_a_held_run_is_taken_by_nobody_else(versions, clerk):
    run = started()
    others = []

    def meanwhile(call):
        others.append(runs.advance(run.pk).generation)
        with pytest.raises(transition.RunNotHeld):
            hold(run_now(run))
        return label(call)

    clerk.answers(meanwhile, refund)
    assert runs.advance(run.pk).state == "succeeded"
    assert others == [1]
    assert len(clerk.calls) == 2


@pytest.mark.case("D1")
def test_a_worker_that_lost_its_run_claims_nothing_more(versions, clerk, clock):
    run = started()

    def frozen(call):
        clock.advance(minutes=10)
        clerk.answers(refund)
        reconciler.reconcile(step("label").pk)
        runs.advance(run.pk)  # another worker takes over, and stops at the unknown step
        return label(call)

    clerk.answers(frozen)
    runs.advance(run.pk)
    assert len(clerk.calls) == 1
    assert not Operation.objects.filter(step="refund").exists()
    sweeping.sweep()
    sweeping.sweep()
    assert run_now(run).state == "succeeded"
    assert len(clerk.calls) == 2


@pytest.mark.parametrize("state", [RunState.CANCELLED, RunState.UNCERTAIN])
def test_a_run_that_was_stopped_sends_nothing_more(versions, clerk, state):
    run = started()
    lease = hold(run)
    taken = run_now(run)
    transition.transition(run.subject, to=state, version=taken.version, fact=OLGA.fact("stopped"))
    with pytest.raises(transition.RunNotHeld):
        perform(order(held=lease), actor=AGENT)
    assert clerk.calls == []


def test_a_due_retry_of_a_cancelled_run_is_not_sent(versions, clerk, clock):
    clerk.answers(DOWN)
    run = runs.advance(started().pk)
    transition.transition(run.subject, to=RunState.CANCELLED, version=run.version, fact=OLGA.fact("cancelled"))
    clock.advance(minutes=10)
    sweeping.sweep()
    with pytest.raises((transition.RunNotHeld, retrying.NotRetryable)):
        retrying.retry(step("label").pk, actor=OLGA, reason="again")
    assert len(clerk.calls) == 1


def test_a_step_is_claimed_only_under_the_generation_that_holds_its_run(versions, clerk):
    run = started()
    lease = hold(run)
    for generation in (lease.generation - 1, lease.generation + 1):
        with pytest.raises(transition.RunNotHeld):
            perform(order(held=Held(run_id=run.pk, generation=generation)), actor=AGENT)
    assert perform(order(held=lease), actor=AGENT).state is State.SUCCEEDED


def test_a_step_is_tried_again_only_under_the_lease_that_holds_its_run(versions, clerk, clock):
    clerk.answers(DOWN)
    run = runs.advance(started().pk)
    clock.advance(minutes=5)
    for held in (None, Held(run_id=run.pk, generation=run.generation)):
        with pytest.raises(transition.RunNotHeld):
            executor.attempt_again(step("label"), actor=OLGA, held=held)
    lease = hold(run)
    with pytest.raises(transition.RunNotHeld):
        executor.attempt_again(step("label"), actor=OLGA, held=Held(run_id=run.pk, generation=lease.generation - 1))
    assert len(clerk.calls) == 1
    assert executor.attempt_again(step("label"), actor=OLGA, held=lease).state is State.SUCCEEDED


def test_a_heartbeat_of_a_lost_run_is_refused(versions, clock):
    run = started()
    lease = hold(run)
    assert transition.heartbeat_run(run.subject, generation=lease.generation, seconds=60) is not None
    assert transition.heartbeat_run(run.subject, generation=lease.generation - 1, seconds=60) is None
    clock.advance(61)
    assert transition.heartbeat_run(run.subject, generation=lease.generation, seconds=60) is None


def test_a_run_whose_worker_was_lost_is_due_again_and_goes_on(versions, clerk, clock, monkeypatch):
    clerk.answers(label, refund)
    really = executor.settle

    def killed_after_it(claim, judged):
        really(claim, judged)
        raise SystemExit

    monkeypatch.setattr(executor, "settle", killed_after_it)
    run = started()
    with pytest.raises(SystemExit):
        runs.advance(run.pk)
    monkeypatch.undo()
    assert run_now(run).state == "running"
    clock.advance(minutes=2)
    sweeping.sweep()
    assert run_now(run).state == "succeeded"
    assert len(clerk.calls) == 2


def test_a_lost_wake_up_loses_nothing(versions, clerk, clock):
    """Whoever took the due work and was lost: it comes back."""
    clerk.answers(label, refund)
    run = started()
    assert transition.take_due(transition.Kind.RUN, limit=10, again=60) == [run.pk]
    assert sweeping.sweep() == 0
    clock.advance(61)
    sweeping.sweep()
    assert run_now(run).state == "succeeded"


def test_due_work_is_handed_to_one_caller(versions):
    run = started()
    assert transition.take_due(transition.Kind.RUN, limit=10, again=60) == [run.pk]
    assert transition.take_due(transition.Kind.RUN, limit=10, again=60) == []


def test_a_database_that_is_away_stops_a_run_without_a_verdict(versions, clerk, monkeypatch):
    monkeypatch.setattr(executor, "perform", lambda *a, **k: (_ for _ in ()).throw(executor.LedgerUnavailable("away")))
    run = started()
    with pytest.raises(executor.LedgerUnavailable):
        runs.advance(run.pk)
    assert run_now(run).state == "running"
    assert run_now(run).due_at is not None


# A declaration that was edited under its version


def edited(monkeypatch):
    monkeypatch.setattr(
        scripted_workflows, "first", replace(scripted_workflows.first, steps=(scripted_workflows.LABEL,))
    )
    registry.forget()


def test_a_run_whose_declaration_lost_a_step_stops_instead_of_ending_as_verified(versions, clerk, monkeypatch):
    clerk.answers(label, DOWN)
    run = runs.advance(started().pk)
    edited(monkeypatch)
    run = runs.advance(run.pk)
    assert (run.state, run.escalation_reason, len(clerk.calls)) == (RunState.PENDING, "workflow_changed", 2)
    (resume,) = [each for each in actions.previews(run, actor=OLGA) if each.action == "resume"]
    assert not resume.allowed
    assert "under the same version. Put that declaration back first." in resume.why


def test_a_run_goes_on_once_its_declaration_is_put_back(versions, clerk, monkeypatch):
    with monkeypatch.context() as patch:
        run = started()
        edited(patch)
        run = runs.advance(run.pk)
        assert run.escalation_reason == "workflow_changed"
    registry.forget()
    runs.resume(run.pk, actor=OLGA, version=run.version, reason="put back")
    assert runs.advance(run.pk).state == RunState.SUCCEEDED
    assert len(clerk.calls) == 2


def test_a_run_from_before_declarations_had_a_digest_is_not_checked(versions, clerk, superuser_connection):
    run = started()
    superuser_connection.execute("UPDATE reconciliation_run SET workflow_digest = '' WHERE id = %s", [run.pk])
    assert runs.advance(run.pk).state == RunState.SUCCEEDED


def test_the_digest_follows_what_decides_the_way_of_a_run_and_nothing_else():
    whole = scripted_workflows.second
    label, *others = whole.steps
    for changed in (
        replace(label, action="natural"), replace(label, name="tag"), replace(label, kind=StepKind.RETRYABLE),
        replace(label, undo=Undo(action="keyed", request=scripted_workflows.void_of)),
    ):  # fmt: skip
        assert replace(whole, steps=(changed, *others)).digest != whole.digest
    assert replace(whole, steps=(label, replace(others[0], after=()), *others[1:])).digest != whole.digest
    plain = replace(label, after=(), cannot_undo="said otherwise", request=lambda facts: {}, retry=RetryPolicy())
    assert replace(whole, steps=(plain, *others)).digest == whole.digest
