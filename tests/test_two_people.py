"""What loosens a guard for everybody, or reverses what must not be reversed by one, is decided by two people."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any

import pytest

from audit.models import Entry
from audit.verify import registered_heads, verify
from reconciliation import actions, approvals, consent, jobs, limits, registry, runs, sweeping, transition
from reconciliation.actions import Verdict
from reconciliation.actors import Actor, Permission
from reconciliation.models import Approval, Job, Limit, Operation, Run
from reconciliation.providers.base import Verdict as Finding
from reconciliation.states import ApprovalState, RunState, State
from tests import saga_workflows as flows
from tests import timetable
from tests.scripted import applied, clerk_, found, row, saw
from tests.test_approvals import ANN, BECAUSE, CLEO, ROOT, do, press
from tests.test_limits import perform, put
from tests.test_sagas import DOWN, REFUSED, settle, start
from tests.test_schedules import office, utc  # noqa: F401 - a fixture

LATER = timedelta(minutes=16)


@pytest.fixture
def standing(clerk: Any, clock: Any) -> Limit:
    """A limit that Ann set a while ago: two attempts an hour."""
    put("rate", most=2, window_seconds=3600, actor=ANN)
    clock.advance(LATER.total_seconds())
    return Limit.objects.get()


def take_away(limit: Limit, *, actor: Actor = ANN, **facts: Any) -> Any:
    given = {"version": limit.version, "reason": BECAUSE, "token": uuid.uuid4(), **facts}
    return limits.lift(limit, actor=actor, **given)


def change(limit: Limit, most: int | None, *, actor: Actor = ANN, **facts: Any) -> Any:
    given = {"version": limit.version, "reason": BECAUSE, "token": uuid.uuid4(), **facts}
    return limits.change(limit, most=most, actor=actor, **given)


def asked_about(subject: Any) -> Approval:
    return Approval.objects.filter(**{type(subject).__name__.lower(): subject}).latest("id")


def both_are_told(subject: str, code: str) -> bool:
    details = Entry.objects.get(subject=subject, reason_code=code, event__in=["limit", "transition"]).body["details"]
    return (details["asked_by"], details["approved_by"]) == (ANN.id, CLEO.id)


# Limits


def test_a_limit_is_taken_away_by_two_people_and_what_it_held_back_goes_on(standing, clerk, clock):
    for number in range(3):
        perform(number)
    assert len(clerk.calls) == 2
    answer = take_away(standing)
    assert (answer.verdict, "Asked for" in answer.message) == (Verdict.DONE, True)
    standing.refresh_from_db()
    assert standing.lifted_at is None
    approval = asked_about(standing)
    assert (approval.tenant, approval.action, approval.reason) == (":all", "lift_limit", BECAUSE)
    assert press("approve", approval, ANN).verdict is Verdict.REFUSED
    answer = press("approve", approval, CLEO)
    assert "Taken away" in answer.message
    standing.refresh_from_db()
    assert (standing.lifted_by, asked_about(standing).state) == (CLEO.id, ApprovalState.CONSUMED)
    assert both_are_told(standing.subject, "limit_lifted")
    sweeping.sweep()
    assert len(clerk.calls) == 3
    assert list(verify(registered_heads())) == []


def test_a_limit_is_raised_in_one_step_by_two_people(standing, clerk):
    for number in range(3):
        perform(number)
    assert "Asked for" in change(standing, 5).message
    assert Limit.objects.get().most == 2
    approval = asked_about(standing)
    assert (approval.action, approval.inputs) == ("raise_limit", '{"most":5}')
    press("approve", approval, CLEO)
    after = Limit.objects.get()
    assert (after.most, after.version, after.lifted_at) == (5, 2, None)
    assert both_are_told(standing.subject, "limit_changed")
    sweeping.sweep()
    assert len(clerk.calls) == 3
    assert list(verify(registered_heads())) == []


def test_a_limit_is_lowered_by_one_person_at_once(standing, clerk):
    assert "Changed" in change(standing, 1).message
    assert (Limit.objects.get().most, Approval.objects.count()) == (1, 0)
    for number in range(2):
        perform(number)
    assert len(clerk.calls) == 1


def test_a_stop_switch_is_pulled_and_released_by_one(clerk, clock):
    put("stop", actor=ANN)
    clock.advance(days=1)
    assert take_away(Limit.objects.get(), actor=ROOT).message == "Released. What it held back is due now."
    assert not Approval.objects.exists()


@pytest.mark.parametrize(
    ("who", "minutes", "alone"), [(ANN, 14, True), (ANN, 15, False), (ROOT, 1, False)], ids=["slip", "late", "another"]
)
def test_ones_own_slip_is_mended_alone_for_a_quarter_of_an_hour(clerk, clock, who, minutes, alone):
    put("rate", most=2, window_seconds=3600, actor=ANN)
    clock.advance(minutes=minutes)
    take_away(Limit.objects.get(), actor=who)
    assert (Limit.objects.get().lifted_at is not None) is alone


def test_a_limit_that_another_person_has_lowered_is_no_slip_any_more(clerk):
    put("rate", most=9, window_seconds=3600, actor=ANN)
    change(Limit.objects.get(), 1, actor=ROOT)
    assert "Asked for" in change(Limit.objects.get(), 9, actor=ANN).message


def test_a_change_meanwhile_ends_the_request_and_what_was_agreed_to_is_not_done(standing, clerk):
    take_away(standing)
    change(standing, 7)
    first, second = Approval.objects.order_by("id")
    change(standing, 1)
    for approval in (first, second):
        approval.refresh_from_db()
        assert approval.state == ApprovalState.SUPERSEDED
        assert press("approve", approval, CLEO).verdict is not Verdict.DONE
    limit = Limit.objects.get()
    assert (limit.most, limit.lifted_at) == (1, None)
    assert take_away(standing).verdict is Verdict.CONFLICT, "the page is out of date"


def test_the_database_itself_refuses_a_consent_that_was_given_to_another_limit(standing, clerk, clock):
    put("rate", most=4, window_seconds=60, provider="clerk", actor=ANN)
    clock.advance(LATER.total_seconds())
    other = Limit.objects.latest("id")
    take_away(other)
    agreed = asked_about(other)
    transition.move_approval(agreed, to="approved", who=[], patch={"decided_by": CLEO.id}, fact=CLEO.fact("approved"))
    agreed.refresh_from_db()
    for use in ({"id": agreed.pk, "action": "lift_limit", "fingerprint": agreed.fingerprint}, {"id": agreed.pk}):
        whole = {"asked_by": ANN.id, "approved_by": CLEO.id, **use}
        with pytest.raises(transition.ApprovalOfAnother):
            limits.lift_agreed(standing, use=whole, actor=CLEO, reason=BECAUSE)
    assert Limit.objects.get(pk=standing.pk).lifted_at is None


def test_a_request_about_a_limit_ends_when_nobody_answers(standing, clock):
    take_away(standing)
    clock.set(asked_about(standing).expires_at)
    sweeping.sweep()
    assert asked_about(standing).state == ApprovalState.EXPIRED
    assert Limit.objects.get().lifted_at is None


def test_asking_twice_asks_once_and_another_number_is_another_question(standing):
    take_away(standing)
    assert "asked for already" in take_away(standing).message
    change(standing, 5)
    change(standing, 6)
    assert Approval.objects.count() == 3


@pytest.mark.parametrize("most", [None, 0, 2, 2**63])
def test_a_number_that_changes_nothing_or_is_none_is_refused(standing, most):
    assert change(standing, most).verdict is Verdict.REFUSED
    assert (Limit.objects.get().most, Approval.objects.count()) == (2, 0)


def test_who_may_not_stop_may_not_ask_to_loosen_either(standing):
    viewer = Actor(id="person:9", kind="person", permissions=frozenset({Permission.VIEW}))
    assert take_away(standing, actor=viewer).verdict is Verdict.REFUSED
    assert change(standing, 5, actor=viewer).verdict is Verdict.REFUSED
    assert not Approval.objects.exists()


# Schedules


def telegrams(clock: Any, **terms: Any) -> Job:
    return timetable.job(at=utc("2026-01-02T12:00"), clock=clock, workflow="telegram", actor=ANN, **terms)


@pytest.mark.case("E6")
def test_every_missed_start_of_what_has_no_key_is_run_only_when_two_people_accept_that(office, clock):  # noqa: F811
    daily = telegrams(clock, expression="1 0 * * *")
    answer = timetable.edit(daily, actor=ANN, missed="run_all", repeats_accepted=True)
    assert "Asked for" in answer.message
    daily.refresh_from_db()
    assert (daily.missed, daily.repeats_accepted, daily.version) == ("latest_only", False, 1)
    assert press("approve", asked_about(daily), ANN).verdict is Verdict.REFUSED
    assert "runs every missed start" in press("approve", asked_about(daily), CLEO).message
    daily.refresh_from_db()
    assert (daily.missed, daily.repeats_accepted, daily.version) == ("run_all", True, 2)
    assert both_are_told(daily.subject, "job_edited")
    assert "Next run" in timetable.edit(daily, actor=ANN, overlap="allow").message, "it is accepted once"
    assert list(verify(registered_heads())) == []


def test_a_new_job_or_one_with_other_changes_does_not_smuggle_it_in(office, clock):  # noqa: F811
    with pytest.raises(jobs.Refused, match="Create it with another policy"):
        telegrams(clock, missed="run_all", repeats_accepted=True)
    daily = telegrams(clock)
    with pytest.raises(jobs.Refused, match="act has no key"):
        timetable.edit(daily, missed="run_all")
    assert (
        "change it alone" in timetable.edit(daily, missed="run_all", repeats_accepted=True, zone="Asia/Tokyo").message
    )
    assert not Approval.objects.exists()


PIGEON = replace(timetable.WORKFLOWS[2], name="pigeon")


def test_what_was_accepted_for_one_workflow_is_not_accepted_for_another(office, clock, settings):  # noqa: F811
    settings.AFTERCALL_WORKFLOWS = ["tests.timetable.WORKFLOWS", "tests.test_two_people.PIGEON"]
    registry.forget()
    daily = telegrams(clock)
    timetable.edit(daily, actor=ANN, missed="run_all", repeats_accepted=True)
    press("approve", asked_about(daily), CLEO)
    answer = timetable.edit(daily, actor=ANN, workflow="pigeon")
    assert answer.verdict is Verdict.REFUSED
    daily.refresh_from_db()
    assert daily.workflow == "telegram"


def test_an_edit_meanwhile_ends_the_request_about_a_job(office, clock):  # noqa: F811
    daily = telegrams(clock)
    timetable.edit(daily, actor=ANN, missed="run_all", repeats_accepted=True)
    timetable.edit(daily, actor=ROOT, expression="5 0 * * *")
    assert asked_about(daily).state == ApprovalState.SUPERSEDED
    assert press("approve", asked_about(daily), CLEO).verdict is not Verdict.DONE
    daily.refresh_from_db()
    assert (daily.missed, daily.expression) == ("latest_only", "5 0 * * *")


# Reversing by hand


@pytest.fixture
def guarded(clerk: Any, settings: Any) -> Any:
    """A provider whose effects are reversed by hand only if two people agree, and whom both ask for `resolve`."""
    settings.AFTERCALL_WORKFLOWS = ["tests.saga_workflows.SAGA"]
    registry.forget()
    plain = clerk_.actions["keyed"]
    clerk_.actions["keyed"] = replace(plain, undo_second_person=True, undo_by="resolve")
    yield clerk
    clerk_.actions["keyed"] = plain


def charged(guarded: Any, clock: Any) -> Operation:
    start("saga")
    settle(clock)
    charge = Operation.objects.get(step="charge")
    guarded.sees(found(charge.provider_operation_id, order="1002", amount=4200))
    return charge


def test_one_effect_is_reversed_only_after_another_person_agreed_to_exactly_that(guarded, clock):
    charge = charged(guarded, clock)
    sent = len(guarded.calls)
    answer = do(charge, "compensate", ANN)
    assert answer.verdict is Verdict.DONE
    undo = Operation.objects.get(undo_of=charge)
    assert (undo.state, len(guarded.calls)) == (State.AWAITING_APPROVAL, sent)
    approval = Approval.objects.get(operation=undo)
    assert (approval.action, approval.fingerprint) == ("", undo.fingerprint)
    assert set(approval.forbidden) >= set(consent.names(ANN))
    assert press("approve", approval, ANN).verdict is Verdict.REFUSED
    assert press("approve", approval, CLEO).verdict is Verdict.DONE
    settle(clock)
    assert (row(undo.pk).state, guarded.effects.count(undo.key)) == ("succeeded", 1)


def test_why_an_effect_is_reversed_is_read_by_who_must_agree_and_stands_in_the_audit_log(guarded, clock):
    charge = charged(guarded, clock)
    do(charge, "compensate", ANN)
    undo, request = Operation.objects.get(undo_of=charge), Approval.objects.get()
    born = Entry.objects.get(subject=str(undo.subject), seq=1)
    assert (born.actor, born.told("reason"), request.reason) == (ANN.id, BECAUSE, BECAUSE)
    clock.set(request.expires_at)
    settle(clock)
    do(undo, "new_intent", ROOT)
    assert Approval.objects.latest("id").reason == BECAUSE


def test_whose_agent_did_it_does_not_agree_to_its_reversal_through_either_door(guarded, clock):
    agent = Actor(id="agent:desk", kind="agent", owners=(CLEO.id,))
    guarded.answers(applied("r-1"), DOWN)
    runs.start("saga", tenant="acme", workflow_id="w1", input={"order": "1002"}, actor=agent, on_behalf_of="Op_Dora")
    sweeping.sweep()
    run = Run.objects.get()
    do(run, "cancel", ROOT)
    settle(clock)
    do(run, "compensate_run", ANN)
    reserve = Operation.objects.get(step="reserve")
    guarded.sees(found("r-1"))
    do(reserve, "compensate", ANN)
    dora = Actor(id="person:8", kind="person", name="op_dora", permissions=frozenset(Permission))
    requests = list(Approval.objects.order_by("id"))
    assert [each.action for each in requests] == ["compensate_run", ""]
    for request, person in product(requests, (CLEO, dora)):
        assert press("approve", request, person).verdict is Verdict.REFUSED


NOTED = flows.flow("noted", flows.SHIP, flows.reversible("note"))


def test_who_had_an_effect_made_anew_does_not_agree_to_its_reversal(guarded, clock, settings):
    settings.AFTERCALL_WORKFLOWS = ["tests.test_two_people.NOTED"]
    registry.forget()
    guarded.answers(applied("s-1"), REFUSED)
    start("noted")
    settle(clock)
    do(Operation.objects.get(step="note"), "new_intent", ROOT)
    settle(clock)
    note = Operation.objects.get(step="note", intent_version=2)
    guarded.sees(found(note.provider_operation_id, order="1002", amount=4200))
    do(note, "compensate", ANN)
    sent = len(guarded.calls)
    assert press("approve", Approval.objects.get(), ROOT).verdict is Verdict.REFUSED
    assert len(guarded.calls) == sent
    assert press("approve", Approval.objects.get(), CLEO).verdict is Verdict.DONE


def test_a_denied_reversal_sends_nothing_and_can_be_asked_for_again(guarded, clock):
    charge = charged(guarded, clock)
    sent = len(guarded.calls)
    do(charge, "compensate", ANN)
    press("deny", Approval.objects.get(), CLEO)
    assert (Operation.objects.get(undo_of=charge).state, len(guarded.calls)) == (State.FAILED_TERMINAL, sent)
    do(charge, "compensate", ANN)
    undos = Operation.objects.filter(undo_of=charge).order_by("intent_version")
    assert [(o.intent_version, o.state) for o in undos] == [(1, "failed_terminal"), (2, "awaiting_approval")]
    press("approve", Approval.objects.latest("id"), CLEO)
    settle(clock)
    assert (row(undos[1].pk).state, len(guarded.calls)) == ("succeeded", sent + 1)


def test_a_reversal_that_was_taken_back_can_be_asked_for_again(guarded, clock):
    charge = charged(guarded, clock)
    sent = len(guarded.calls)
    do(charge, "compensate", ANN)
    assert press("withdraw", Approval.objects.get(), ANN).verdict is Verdict.DONE
    assert Operation.objects.get(undo_of=charge).state == State.TERMINATED
    assert do(charge, "compensate", ANN).verdict is Verdict.DONE
    undos = Operation.objects.filter(undo_of=charge).order_by("intent_version")
    assert [(o.intent_version, o.state) for o in undos] == [(1, "terminated"), (2, "awaiting_approval")]
    press("approve", Approval.objects.latest("id"), CLEO)
    settle(clock)
    assert (row(undos[1].pk).state, len(guarded.calls)) == ("succeeded", sent + 1)


def test_a_whole_run_is_undone_by_hand_only_if_two_people_agree(guarded, clock):
    run = stopped_run(guarded, clock)
    shown = next(p for p in actions.previews(run, actor=ANN) if p.action == "compensate_run")
    assert (shown.allowed, "reserve is not reversed by one alone" in shown.why) == (True, True)
    assert "Asked for" in do(run, "compensate_run", ANN).message
    run.refresh_from_db()
    assert run.state == RunState.CANCELLED
    approval = asked_about(run)
    assert press("approve", approval, ANN).verdict is Verdict.REFUSED
    assert press("approve", approval, CLEO).verdict is Verdict.DONE
    settle(clock)
    run.refresh_from_db()
    assert run.state == RunState.COMPENSATED
    assert both_are_told(str(run.subject), "compensation_asked")


def test_what_was_taken_away_before_the_second_person_agreed_is_not_undone(guarded, clock):
    run = stopped_run(guarded, clock)
    do(run, "compensate_run", ANN)
    guarded.sees(saw(Finding.REMOVED))
    sent = len(guarded.calls)
    answer = press("approve", asked_about(run), CLEO)
    assert "taken away already: reserve" in answer.message
    settle(clock)
    run.refresh_from_db()
    assert (run.state, len(guarded.calls)) == (RunState.CANCELLED, sent)
    assert asked_about(run).state == ApprovalState.SUPERSEDED


def test_nobody_is_asked_about_what_was_taken_away_already(guarded, clock):
    run = stopped_run(guarded, clock)
    guarded.sees(saw(Finding.REMOVED))
    answer = do(run, "compensate_run", ANN)
    assert (answer.verdict, "taken away already: reserve" in answer.message) == (Verdict.REFUSED, True)
    assert not Approval.objects.exists()


def test_a_whole_run_needs_what_each_of_its_actions_asks_of_a_person(guarded, clock):
    run = stopped_run(guarded, clock)
    lacks = Actor(id="person:6", kind="person", permissions=frozenset({Permission.COMPENSATE}))
    assert do(run, "compensate_run", lacks).verdict is Verdict.REFUSED
    assert not Approval.objects.exists()


def test_where_it_is_not_known_how_many_must_agree_nobody_has_a_run_undone(guarded, clock, monkeypatch):
    run = stopped_run(guarded, clock)
    with monkeypatch.context() as lacking:
        lacking.delitem(clerk_.actions, "keyed")
        answer = do(run, "compensate_run", ANN)
    assert (answer.verdict, "Nothing here says how its steps are undone" in answer.message) == (Verdict.REFUSED, True)
    run.refresh_from_db()
    assert (run.state, Approval.objects.count()) == (RunState.CANCELLED, 0)


def test_a_run_that_walks_back_by_itself_asks_nobody(guarded, clock):
    guarded.answers(applied("r-1"), applied("c-1"), REFUSED)
    run = start("saga")
    settle(clock)
    run.refresh_from_db()
    assert (run.state, Approval.objects.count()) == (RunState.COMPENSATED, 0)


def live_run(guarded: Any, clock: Any, *, name: str = "1") -> tuple[Run, Approval]:
    """A run that goes on while a second person thinks about undoing what it had applied when they were asked."""
    guarded.answers(applied(f"r-{name}"), DOWN, applied(f"c-{name}"), DOWN)
    run = start("saga", workflow_id=f"w{name}")
    sweeping.sweep()
    assert "Asked for" in do(run, "compensate_run", ANN).message
    clock.advance(30)
    sweeping.sweep()
    assert Operation.objects.get(run=run, step="charge").state == State.SUCCEEDED
    return Run.objects.get(pk=run.pk), asked_about(run)


def test_what_a_run_applied_after_it_was_asked_is_not_undone_with_the_rest(guarded, clock):
    run, approval = live_run(guarded, clock)
    shown = next(p for p in actions.previews(approval, actor=CLEO) if p.action == "approve")
    assert (shown.allowed, "changed since it was asked" in shown.why) == (False, True)
    assert press("approve", approval, CLEO).verdict is Verdict.REFUSED
    run.refresh_from_db()
    assert run.state != RunState.COMPENSATING
    assert press("deny", approval, CLEO).verdict is Verdict.DONE


def test_what_was_agreed_to_before_the_run_went_on_is_not_done_either(guarded, clock):
    run, approval = live_run(guarded, clock)
    transition.move_approval(approval, to="approved", who=[], patch={"decided_by": CLEO.id}, fact=CLEO.fact("approved"))
    approvals.end_due(approval.pk)
    run.refresh_from_db()
    assert (run.state != RunState.COMPENSATING, asked_about(run).state) == (True, ApprovalState.SUPERSEDED)
    ended = Entry.objects.filter(subject=str(approval.subject)).order_by("-seq").first()
    assert ended is not None
    assert ended.body["reason_code"] == "changed_since_asked"


def test_what_changed_since_it_was_asked_ends_by_itself_and_says_why(guarded, clock):
    run, approval = live_run(guarded, clock)
    sweeping.sweep()
    approval.refresh_from_db()
    assert (approval.state, approval.decided_by) == (ApprovalState.SUPERSEDED, "")
    ended = Entry.objects.filter(subject=str(approval.subject)).latest("seq")
    assert (ended.actor, ended.reason_code) == ("system:sweep", "changed_since_asked")
    shown = next(p for p in actions.previews(run, actor=ANN) if p.action == "compensate_run")
    assert (shown.allowed, "Asks another person" in shown.why) == (True, True)


def test_what_is_as_it_was_when_it_was_asked_goes_on_waiting(guarded, clock):
    run = stopped_run(guarded, clock)
    do(run, "compensate_run", ANN)
    reserve = Operation.objects.get(step="reserve")
    transition.transition(reserve.subject, to=None, version=reserve.version, fact=ANN.fact("looked"))
    assert sweeping.sweep() == 0
    assert asked_about(run).state == ApprovalState.WAITING


def test_older_requests_that_go_on_waiting_do_not_keep_a_changed_one_from_ending(guarded, clock):
    run = stopped_run(guarded, clock)
    do(run, "compensate_run", ANN)
    reserve = Operation.objects.get(step="reserve")
    transition.transition(reserve.subject, to=None, version=reserve.version, fact=ANN.fact("looked"))
    _, changed = live_run(guarded, clock, name="2")
    for _ in range(60):
        sweeping.sweep(limit=1)
    changed.refresh_from_db()
    assert (asked_about(run).state, changed.state) == (ApprovalState.WAITING, ApprovalState.SUPERSEDED)


LOOKED_FIRST = flows.flow("looked_first", flows.LOOKED.steps[0], flows.reversible("reserve"), flows.SHIP)


def test_a_worker_that_cannot_tell_what_has_an_effect_ends_no_request_and_does_nothing(
    guarded, clock, settings, monkeypatch
):
    settings.AFTERCALL_WORKFLOWS = ["tests.test_two_people.LOOKED_FIRST"]
    registry.forget()
    guarded.answers(applied("l-1"), applied("r-1"), DOWN)
    run = start("looked_first")
    sweeping.sweep()
    do(run, "cancel", ROOT)
    do(run, "compensate_run", ANN)
    approval = asked_about(run)
    look = Operation.objects.get(step="look")
    transition.transition(look.subject, to=None, version=look.version, fact=ANN.fact("looked"))
    with monkeypatch.context() as lacking:
        lacking.delitem(clerk_.actions, "read")
        sweeping.sweep()
        approval.refresh_from_db()
        assert approval.state == ApprovalState.WAITING
        assert "could not be done yet" in press("approve", approval, CLEO).message
        approvals.end_due(approval.pk)
        run.refresh_from_db()
        assert (run.state, asked_about(run).state) == (RunState.CANCELLED, ApprovalState.APPROVED)
    approvals.end_due(approval.pk)
    run.refresh_from_db()
    assert (run.state, asked_about(run).state) == (RunState.COMPENSATING, ApprovalState.CONSUMED)


def test_asked_for_anew_it_is_about_what_the_run_has_applied_by_now(guarded, clock):
    run, first = live_run(guarded, clock)
    assert "Asked for" in do(run, "compensate_run", ANN).message
    first.refresh_from_db()
    later = asked_about(run)
    assert (first.state, later.state) == (ApprovalState.SUPERSEDED, ApprovalState.WAITING)
    assert press("approve", later, CLEO).verdict is Verdict.DONE
    settle(clock)
    assert {o.step for o in Operation.objects.filter(state=State.SUCCEEDED)} >= {"undo:charge", "undo:reserve"}


def test_what_was_agreed_to_and_changed_since_is_asked_for_anew(guarded, clock):
    run, first = live_run(guarded, clock)
    transition.move_approval(first, to="approved", who=[], patch={"decided_by": CLEO.id}, fact=CLEO.fact("approved"))
    assert "Asked for" in do(run, "compensate_run", ANN).message
    first.refresh_from_db()
    assert (first.state, asked_about(run).state) == (ApprovalState.SUPERSEDED, ApprovalState.WAITING)


def stopped_run(guarded: Any, clock: Any) -> Run:
    """A run that was cancelled after its first step."""
    guarded.answers(applied("r-1"), DOWN)
    run = start("saga")
    sweeping.sweep()
    do(run, "cancel", ROOT)
    settle(clock)
    return Run.objects.get(pk=run.pk)
