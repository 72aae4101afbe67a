"""Consent: to exactly one action, once, in time, by a person who is neither who asks nor for whom it is asked."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from audit.models import Entry
from reconciliation import (
    actions,
    approvals,
    consent,
    executor,
    intents,
    registry,
    runs,
    second_person,
    sweeping,
    transition,
    watch,
)  # fmt: skip
from reconciliation.actions import Press, Verdict
from reconciliation.actors import SYSTEM, Actor, Permission
from reconciliation.executor import Disposition, FingerprintMismatch, perform
from reconciliation.models import Approval, Limit, Operation, Run, Signal
from reconciliation.providers.base import OutcomeUnknown, Rejected, Unavailable
from reconciliation.providers.base import Verdict as Saw
from reconciliation.states import ApprovalState, RunState, State
from reconciliation.workflows import Consent
from tests.ledger import changes_without_audit
from tests.scripted import AGENT, Clerk, applied, found, kinds, order, row, saw
from tests.test_limits import put, release
from tests.test_same_identity import Crowd

CLEO = Actor(id="person:3", kind="person", name="ap_cleo", permissions=frozenset({Permission.APPROVE, Permission.VIEW}))
ROOT = Actor(id="person:4", kind="person", name="op_root", permissions=frozenset(Permission))
ANN = Actor(id="person:1", kind="person", name="op_ann", permissions=frozenset(Permission))
POLICY = Consent(policy="Refunds above 500.00 need one approver.", when=lambda request: request["amount"] > 50_000)
BIG = {"order": "1002", "amount": 60_000, "currency": "USD"}
BECAUSE = "The customer is right."


def asked(actor: Actor = AGENT, *, policy: Consent = POLICY, **parts: Any) -> executor.Outcome:
    facts = {name: parts.pop(name) for name in ("requested_by", "on_behalf_of", "owners") if name in parts}
    return perform(replace(order(**{"request": BIG, **parts}), consent=policy, **facts), actor=actor)


def the(pk: int, action: str = "") -> Approval:
    return Approval.objects.filter(operation_id=pk, action=action).latest("id")


def press(action: str, approval: Approval, actor: Actor, *, token: uuid.UUID | None = None, **parts: Any) -> Any:
    whole = {"version": approval.version, "reason": BECAUSE, **parts}
    return actions.act(approval, Press(action=action, token=token or uuid.uuid4(), **whole), actor=actor)


def decisions(approval: Approval) -> list[str]:
    codes = Entry.objects.filter(subject=str(approval.subject), event="transition").order_by("seq")
    return list(codes.values_list("reason_code", flat=True))


# Asking


def test_what_needs_consent_is_recorded_with_its_request_and_not_sent(clerk):
    answer = asked(requested_by="agent:desk-2", on_behalf_of="person:1")
    assert (answer.state, answer.disposition, answer.outcome) == (State.AWAITING_APPROVAL, "wait", "not_sent")
    approval = the(answer.pk)
    assert approval.state == ApprovalState.WAITING
    assert approval.fingerprint == row(answer.pk).fingerprint
    assert approval.policy == POLICY.policy
    assert approval.expires_at - approval.created_at == timedelta(hours=4)
    assert set(approval.forbidden) == {"agent:desk-2", "person:1"}
    assert clerk.calls == []


def test_below_the_threshold_nobody_is_asked(clerk):
    assert asked(request={"order": "1002", "amount": 50_000, "currency": "USD"}).state is State.SUCCEEDED
    assert not Approval.objects.exists()


def test_asking_again_and_again_asks_once(clerk):
    for _ in range(3):
        assert asked().disposition is Disposition.WAIT
    assert Approval.objects.count() == 1
    assert kinds(Operation.objects.get().pk).count("delivery_refused") == 3


def test_callers_at_once_ask_once(clerk):
    crowd = Crowd(20)
    answers = crowd.all_at_once(asked)
    crowd.leave()
    assert {answer.state for answer in answers} == {State.AWAITING_APPROVAL}
    assert (Operation.objects.count(), Approval.objects.count(), clerk.calls) == (1, 1, [])


# Case F1: approved one thing, executed another


@pytest.mark.case("F1")
def test_consent_is_to_this_request_and_to_no_other_and_holds_once(clerk, superuser_connection):
    first = asked(request={**BIG, "to": "acct_7"})
    approval = the(first.pk)
    assert press("approve", approval, CLEO).verdict is Verdict.DONE
    with pytest.raises(FingerprintMismatch):
        asked(request={**BIG, "to": "acct_8"})
    assert clerk.effects == []
    assert the(first.pk).state == ApprovalState.APPROVED
    changed = asked(request={**BIG, "to": "acct_8"}, step="refund-2")
    assert (changed.state, clerk.effects) == (State.AWAITING_APPROVAL, [])
    assert asked(request={**BIG, "to": "acct_7"}).state is State.SUCCEEDED
    again = asked(request={**BIG, "to": "acct_7"})
    assert (again.disposition, len(clerk.effects)) == (Disposition.REPLAY, 1)
    assert the(first.pk).state == ApprovalState.CONSUMED
    assert changes_without_audit(superuser_connection) == []


@pytest.mark.case("F1")
def test_a_changed_request_is_a_new_intent_with_a_request_of_its_own_and_voids_the_old_one(clerk):
    first = asked(request={**BIG, "to": "acct_7"})
    second = asked(request={**BIG, "to": "acct_8"}, intent_version=2)
    assert row(first.pk).state == State.TERMINATED
    assert the(first.pk).state == ApprovalState.SUPERSEDED
    assert second.state is State.AWAITING_APPROVAL
    assert press("approve", the(first.pk), CLEO).verdict is Verdict.REFUSED
    press("approve", the(second.pk), CLEO)
    assert asked(request={**BIG, "to": "acct_8"}, intent_version=2).state is State.SUCCEEDED
    assert [call.request["to"] for call in clerk.calls] == ["acct_8"]


@pytest.mark.case("F1")
def test_two_requests_resumed_in_swapped_order_go_each_to_its_own_consent(clerk):
    one, two = (asked(request={**BIG, "to": to}, step=to) for to in ("acct_7", "acct_8"))
    press("approve", the(two.pk), CLEO)
    assert asked(request={**BIG, "to": "acct_7"}, step="acct_7").state is State.AWAITING_APPROVAL
    assert asked(request={**BIG, "to": "acct_8"}, step="acct_8").state is State.SUCCEEDED
    assert [call.request["to"] for call in clerk.calls] == ["acct_8"]
    assert the(one.pk).state == ApprovalState.WAITING


def test_the_database_claims_nothing_without_a_consent_that_holds(clerk):
    pk = asked().pk
    for state in (State.AWAITING_APPROVAL, State.READY):
        if state is State.READY:
            transition.transition(row(pk).subject, to=State.READY, version=1, fact=AGENT.fact("tried"))
        with pytest.raises(transition.NotApproved):
            executor.claim_again(row(pk), actor=AGENT)
    assert the(pk).state == ApprovalState.WAITING


def test_one_consent_lets_one_of_many_callers_send_once(clerk):
    for number in range(10):
        pk = asked(step=f"refund-{number}").pk
        press("approve", the(pk), CLEO)
        crowd = Crowd(10)
        crowd.all_at_once(lambda number=number: asked(step=f"refund-{number}"))
        crowd.leave()
        assert (len(clerk.effects), the(pk).state) == (number + 1, ApprovalState.CONSUMED)


# Expiry, case F3


@pytest.mark.case("F3")
@pytest.mark.parametrize(
    ("early", "verdict"),
    [
        (timedelta(milliseconds=900), Verdict.DONE),
        (timedelta(0), Verdict.REFUSED),
        (-timedelta(seconds=1), Verdict.REFUSED),
    ],
)
def test_the_moment_of_expiry_is_late_although_no_sweep_ran(clerk, clock, early, verdict):
    approval = the(asked().pk)
    clock.set(approval.expires_at - early)
    answer = press("approve", approval, CLEO)
    assert answer.verdict is verdict
    approval.refresh_from_db()
    assert approval.state == ("approved" if verdict is Verdict.DONE else "waiting")
    assert "ask" in answer.message.lower() or verdict is Verdict.DONE


@pytest.mark.case("F3")
def test_the_database_itself_refuses_at_the_boundary_whoever_calls(clerk, clock):
    """Behind the preview, which another process may have read in time: the statement judges under its own lock."""
    approval = the(asked().pk)
    clock.set(approval.expires_at)
    with pytest.raises(transition.ApprovalExpired):
        transition.move_approval(
            approval, to="approved", who=["person:3"], patch={"decided_by": "person:3"}, operation_to="ready",
            fact=CLEO.fact("approved"),
        )  # fmt: skip
    assert row(approval.operation_id).state == State.AWAITING_APPROVAL


@pytest.mark.case("F3")
def test_a_request_that_nobody_answered_ends_and_the_agent_gets_a_final_answer(clerk, clock):
    pk = asked().pk
    clock.set(the(pk).expires_at)
    sweeping.sweep()
    assert (the(pk).state, row(pk).state, row(pk).reason_code) == ("expired", "failed_terminal", "approval_expired")
    answer = asked()
    assert (answer.disposition, answer.outcome, answer.reason_code) == ("stopped", "not_sent", "approval_expired")
    assert clerk.calls == []


@pytest.mark.case("F3")
def test_a_denial_is_recorded_although_the_time_was_over(clerk, clock):
    swept, unswept = (asked(step=step).pk for step in ("swept", "unswept"))
    clock.set(the(unswept).expires_at + timedelta(hours=1))
    approvals.end_due(the(swept).pk)
    for pk in (swept, unswept):
        assert press("deny", the(pk), CLEO).verdict is Verdict.DONE
        assert row(pk).state == State.FAILED_TERMINAL
        assert Entry.objects.filter(subject=str(the(pk).subject), reason_code__startswith="denied").count() == 1
    assert [the(pk).state for pk in (swept, unswept)] == ["expired", "denied"]


@pytest.mark.case("F3")
def test_a_consent_that_nobody_used_in_time_is_asked_for_again(clerk, clock):
    pk = asked().pk
    first = the(pk)
    press("approve", first, CLEO)
    clock.set(the(pk).use_by)
    assert asked().state is State.AWAITING_APPROVAL
    first.refresh_from_db()
    assert first.state == ApprovalState.EXPIRED
    assert (the(pk).state, the(pk).replaces_id, clerk.calls) == ("waiting", first.pk, [])
    press("approve", the(pk), CLEO)
    assert asked().state is State.SUCCEEDED


@pytest.mark.case("F3")
def test_the_sweep_asks_again_too(clerk, clock):
    pk = asked().pk
    press("approve", the(pk), CLEO)
    clock.set(the(pk).use_by)
    for _ in range(3):
        sweeping.sweep()
        clock.advance(30)
    assert (row(pk).state, the(pk).state, Approval.objects.count(), clerk.calls) == (
        "awaiting_approval",
        "waiting",
        2,
        [],
    )


def test_a_retry_of_what_was_agreed_to_needs_no_second_consent_until_its_use_by(clerk, clock):
    clerk.answers(Unavailable("later", status=503), Unavailable("later", status=503))
    pk = asked().pk
    press("approve", the(pk), CLEO)
    assert asked().state is State.FAILED_RETRYABLE
    clock.advance(minutes=10)
    assert asked().state is State.FAILED_RETRYABLE
    clock.advance(minutes=25)
    assert asked().state is State.AWAITING_APPROVAL
    assert (len(clerk.calls), Approval.objects.count()) == (2, 2)


# Who may


@pytest.mark.parametrize(
    "person",
    [
        Actor(id="person:1", kind="person", name="op_ann", permissions=frozenset(Permission)),
        Actor(id="person:9", kind="person", name="owner", permissions=frozenset(Permission)),
        Actor(id="person:10", kind="person", name="maker", permissions=frozenset(Permission)),
        Actor(id="agent:desk-2", kind="person", name="the agent itself", permissions=frozenset(Permission)),
        Actor(id="person:77", kind="person", name="other", permissions=frozenset(Permission), owners=("person:1",)),
    ],
    ids=["for whom it is asked", "owner of the token", "maker of the token", "who asks", "another token of theirs"],
)
def test_nobody_approves_their_own_request_whatever_their_role(clerk, person):
    pk = asked(requested_by="agent:desk-2", on_behalf_of="op_ann", owners=("person:9", "person:1", "maker")).pk
    assert press("approve", the(pk), person).verdict is Verdict.REFUSED
    with pytest.raises(transition.OwnRequest):
        transition.move_approval(
            the(pk), to="approved", who=consent.names(person), patch={"decided_by": person.id}, operation_to="ready",
            fact=person.fact("approved"),
        )  # fmt: skip
    assert press("deny", the(pk), person).verdict is Verdict.DONE
    assert row(pk).state == State.FAILED_TERMINAL


@pytest.mark.parametrize("whom", ["ann@x.org", "Ann@X.org", "Op_Ann", "person:op_ann", "person:ANN@x.org"])
def test_for_whom_it_is_asked_is_known_by_every_name_that_they_sign_in_with(clerk, whom):
    ann = replace(ANN, emails=("Ann@x.org",))
    pk = asked(requested_by="agent:desk-2", on_behalf_of=whom).pk
    assert press("approve", the(pk), ann).verdict is Verdict.REFUSED
    with pytest.raises(transition.OwnRequest):
        transition.move_approval(
            the(pk), to="approved", who=[whom.upper()], patch={"decided_by": ann.id}, fact=ann.fact("approved")
        )
    assert press("approve", the(pk), CLEO).verdict is Verdict.DONE


def test_automation_and_people_without_the_role_decide_nothing(clerk):
    viewer = Actor(id="person:8", kind="person", name="vi_eve", permissions=frozenset({Permission.VIEW}))
    pk = asked().pk
    for actor in (SYSTEM, AGENT, viewer):
        for action in ("approve", "deny", "withdraw"):
            assert press(action, the(pk), actor).verdict is Verdict.REFUSED
    assert the(pk).state == ApprovalState.WAITING
    assert Entry.objects.filter(subject=str(the(pk).subject), event="refused").count() == 9


def test_who_asked_takes_it_back(clerk):
    pk = asked(requested_by="agent:desk-2", on_behalf_of="op_ann").pk
    asker = Actor(id="person:1", kind="person", name="op_ann")
    assert press("withdraw", the(pk), asker).verdict is Verdict.DONE
    assert (the(pk).state, row(pk).state, asked().disposition) == ("withdrawn", "terminated", "stopped")


def test_a_decision_names_the_version_on_which_it_rests(clerk):
    waiting = the(asked().pk)
    press("approve", waiting, CLEO)
    with pytest.raises(transition.StaleVersion):
        transition.move_approval(waiting, to="withdrawn", operation_to="terminated", fact=ROOT.fact("withdrawn"))
    assert the(waiting.operation_id).state == ApprovalState.APPROVED


def test_what_was_agreed_to_can_be_taken_back_until_it_is_used(clerk):
    pk = asked().pk
    press("approve", the(pk), CLEO)
    assert press("withdraw", the(pk), ROOT).verdict is Verdict.DONE
    assert (the(pk).state, row(pk).state, asked().disposition) == ("withdrawn", "terminated", "stopped")
    assert clerk.calls == []


def test_stopping_an_operation_voids_its_request(clerk):
    pk = asked().pk
    actions.act(row(pk), Press(action="terminate", token=uuid.uuid4(), version=1, reason="no"), actor=ROOT)
    assert the(pk).state == ApprovalState.WITHDRAWN


# Two decisions, case F6


@pytest.mark.case("F6")
def test_approve_and_deny_at_once_is_one_decision_and_the_loser_is_told(clerk):
    crowd = Crowd(2)
    for number in range(100):
        approval = the(asked(step=f"refund-{number}").pk)
        answers = crowd.all_at_once(partial(press, "approve", approval, CLEO), partial(press, "deny", approval, ROOT))
        approval.refresh_from_db()
        won = ["approved", "denied"].index(approval.state)
        assert answers[won].verdict is Verdict.DONE
        loser = answers[1 - won]
        assert not isinstance(loser, BaseException), repr(loser)
        name = (CLEO, ROOT)[won].name
        assert loser.verdict is Verdict.CONFLICT
        assert f"Already {approval.state} by {name} at 20" in loser.message
        assert decisions(approval) == ["approval_requested", approval.state]
        assert row(approval.operation_id).state == ("ready", "failed_terminal")[won]
    crowd.leave()


@pytest.mark.case("F6")
def test_a_double_click_is_one_decision_and_two_friendly_answers(clerk):
    crowd = Crowd(2)
    for number in range(10):
        approval = the(asked(step=f"refund-{number}").pk)
        token = uuid.uuid4()
        one, two = crowd.all_at_once(partial(press, "approve", approval, CLEO, token=token))
        assert (one, one.verdict) == (two, Verdict.DONE)
        other = press("approve", approval, CLEO)
        assert (other.verdict, other.message.startswith("You approved this already")) == (Verdict.JOINED, True)
        assert decisions(approval) == ["approval_requested", "approved"]
    crowd.leave()
    assert [asked(step=f"refund-{number}").state for number in range(10)] == [State.SUCCEEDED] * 10
    assert len(clerk.effects) == 10


# What it rests on


class Till(Clerk):
    """The clerk, who can show what a refund rests on."""

    def clear(self) -> None:
        super().clear()
        self.shows: list[Any] = []

    def precondition(self, call: Any) -> Any:
        shown = self.shows.pop(0) if len(self.shows) > 1 else self.shows[0] if self.shows else None
        if isinstance(shown, BaseException):
            raise shown
        return shown


till_ = Till()


@pytest.fixture
def till(clerk, settings):
    settings.AFTERCALL_PROVIDERS = ["tests.test_approvals.till_"]
    registry.forget()
    till_.clear()
    yield till_
    registry.forget()


def test_what_changed_since_it_was_asked_is_asked_anew_and_nothing_is_sent(till):
    till.shows = [{"amount": 64_000, "etag": "a"}, {"amount": 59_000, "etag": "b"}]
    pk = asked().pk
    first = the(pk)
    assert (first.seen_shown, first.seen["etag"]) == ('{"amount":64000}', "a")
    press("approve", first, CLEO)
    answer = asked()
    assert (answer.state, answer.reason_code, till.calls) == (State.AWAITING_APPROVAL, "precondition_failed", [])
    first.refresh_from_db()
    assert (first.state, the(pk).state, the(pk).seen["etag"]) == ("superseded", "waiting", "b")
    assert row(pk).first_sent_at is None
    assert kinds(pk)[-2:] == ["precondition_failed", "delivery_refused"] or "precondition_failed" in kinds(pk)
    press("approve", the(pk), CLEO)
    assert asked().state is State.SUCCEEDED
    assert len(till.calls) == 1


def test_what_is_still_as_it_was_is_sent(till):
    till.shows = [{"amount": 64_000, "etag": "a"}]
    pk = asked().pk
    press("approve", the(pk), CLEO)
    assert asked().state is State.SUCCEEDED


def test_what_cannot_be_compared_now_is_not_sent_now(till):
    till.shows = [{"etag": "a"}, Unavailable("down"), {"etag": "a"}]
    pk = asked().pk
    press("approve", the(pk), CLEO)
    answer = asked()
    assert (answer.state, row(pk).error_class, till.calls) == (State.FAILED_RETRYABLE, "not_sent", [])


def test_what_could_not_be_read_when_it_was_asked_is_shown_before_it_is_sent(till):
    till.shows = [Unavailable("down"), {"etag": "a"}]
    pk = asked().pk
    assert the(pk).seen == consent.UNREADABLE
    press("approve", the(pk), CLEO)
    assert asked().state is State.AWAITING_APPROVAL
    press("approve", the(pk), CLEO)
    assert asked().state is State.SUCCEEDED


# A run waits for it


NUMBERS = itertools.count(1)


@pytest.fixture
def waiting_run(clerk, settings):
    settings.AFTERCALL_WORKFLOWS = ["tests.scripted_workflows.agreed"]
    registry.forget()
    return started


def started(**facts: Any) -> Run:
    number = str(next(NUMBERS))
    run = runs.start("agreed", tenant="acme", workflow_id=number, input={"order": number, "amount": 60_000},
                     actor=AGENT, **facts)  # fmt: skip
    return runs.advance(run.pk)


def test_a_run_waits_for_consent_and_is_woken_by_the_decision(waiting_run):
    run = waiting_run(on_behalf_of="op_ann")
    assert (run.state, run.waiting_for, run.due_at) == (RunState.AWAITING_APPROVAL, "refund", None)
    approval = Approval.objects.get()
    assert approval.forbidden == ["agent:claims", "op_ann"]
    assert approval.policy == "Refunds above 500.00 need one approver."
    press("approve", approval, CLEO)
    sweeping.sweep()
    run.refresh_from_db()
    assert run.state == RunState.SUCCEEDED


def test_a_denied_step_walks_its_run_back(waiting_run, clerk):
    run = waiting_run()
    told = next(p for p in actions.previews(Approval.objects.get(), actor=CLEO) if p.action == "deny")
    assert told.why.endswith("The run stops at this step and undoes label.")
    press("deny", Approval.objects.get(), CLEO)
    for _ in range(3):
        sweeping.sweep()
    run.refresh_from_db()
    steps = dict(Operation.objects.values_list("step", "state"))
    assert run.state == RunState.COMPENSATED
    assert (steps["refund"], steps["undo:label"]) == ("failed_terminal", "succeeded")


def test_cancelling_a_run_voids_what_it_asked_for(waiting_run, clerk):
    run = waiting_run()
    approval = Approval.objects.get()
    do(run, "cancel", ROOT)
    approval.refresh_from_db()
    assert approval.state == ApprovalState.WITHDRAWN
    assert press("approve", approval, CLEO).verdict is Verdict.REFUSED
    assert [call.request["amount"] for call in clerk.calls] == [0]


def test_the_owner_of_the_token_that_started_a_run_may_not_approve_its_steps(waiting_run, clerk):
    agent = Actor(id="agent:desk", kind="agent", owners=("person:3",))
    run = runs.start("agreed", tenant="acme", workflow_id="x", input={"order": "1", "amount": 60_000}, actor=agent)
    runs.advance(run.pk)
    assert press("approve", Approval.objects.get(), CLEO).verdict is Verdict.REFUSED


def test_a_new_intent_after_a_denial_is_asked_for_anew_and_not_by_who_makes_it(clerk):
    pk = asked().pk
    press("deny", the(pk), CLEO)
    do(row(pk), "new_intent", ANN)
    later = Operation.objects.get(intent_version=2)
    assert (later.state, the(later.pk).state, later.consent == row(pk).consent) == (
        "awaiting_approval",
        "waiting",
        True,
    )
    assert press("approve", the(later.pk), ANN).verdict is Verdict.REFUSED
    assert press("approve", the(later.pk), CLEO).verdict is Verdict.DONE
    sweeping.sweep()
    assert (row(later.pk).state, len(clerk.effects)) == ("succeeded", 1)


# Operator actions with a second person


def unknown(clerk: Any, **parts: Any) -> Operation:
    clerk.answers(OutcomeUnknown("no answer"))
    return row(perform(order("none", **parts), actor=AGENT).pk)


def do(subject: Any, action: str, actor: Actor, **inputs: str) -> Any:
    fresh = type(subject).objects.get(pk=subject.pk)
    return actions.act(
        fresh,
        Press(action=action, token=uuid.uuid4(), version=fresh.version, reason=BECAUSE, inputs=inputs),
        actor=actor,
    )


def test_sending_again_asks_a_second_person_who_carries_it_out(clerk):
    case = unknown(clerk)
    assert "Asked for" in do(case, "send_again", ANN).message
    approval = the(case.pk, "send_again")
    assert (len(clerk.calls), approval.requested_by, row(case.pk).state) == (1, ANN.id, "ambiguous")
    assert do(case, "send_again", ANN).verdict is Verdict.REFUSED
    assert press("approve", approval, ANN).verdict is Verdict.REFUSED
    lacks = Actor(id="person:5", kind="person", permissions=frozenset({Permission.APPROVE}))
    assert press("approve", approval, lacks).verdict is Verdict.REFUSED
    assert press("approve", approval, ROOT).verdict is Verdict.DONE
    assert (len(clerk.calls), row(case.pk).state, the(case.pk, "send_again").state) == (2, "succeeded", "consumed")
    entry = Entry.objects.get(subject=str(case.subject), reason_code="sent_again")
    assert (entry.actor, b'"asked_by":"person:1"' in bytes(entry.canonical)) == (ROOT.id, True)


@pytest.mark.parametrize(
    "parts", [{"on_behalf_of": "ap_cleo"}, {"requested_by": "person:3"}, {"owners": ("person:3",)}],
    ids=["for whom it was done", "who asked for it", "whose token asked for it"],
)  # fmt: skip
def test_whose_agent_it_was_does_not_agree_to_its_duplicate(clerk, parts):
    clerk.answers(OutcomeUnknown("no answer"))
    case = row(perform(replace(order("none"), **parts), actor=AGENT).pk)
    do(case, "send_again", ANN)
    request = the(case.pk, "send_again")
    cleo = replace(CLEO, permissions=frozenset(Permission))
    assert press("approve", request, cleo).verdict is Verdict.REFUSED
    assert press("approve", request, ROOT).verdict is Verdict.DONE


def test_the_owner_of_the_token_that_asked_does_not_agree_to_its_duplicate(clerk):
    clerk.answers(OutcomeUnknown("no answer"))
    agent = Actor(id="agent:desk", kind="agent", owners=("person:3",))
    case = row(perform(order("none"), actor=agent).pk)
    do(case, "send_again", ANN)
    cleo = replace(CLEO, permissions=frozenset(Permission))
    assert press("approve", the(case.pk, "send_again"), cleo).verdict is Verdict.REFUSED


def test_whose_agent_started_a_run_does_not_agree_to_what_is_done_about_it(waiting_run, clerk):
    agent = Actor(id="agent:desk", kind="agent", owners=("person:3",))
    run = runs.start("agreed", tenant="acme", workflow_id="x", input={"order": "1", "amount": 1}, actor=agent)
    clerk.answers(applied("l-1"), OutcomeUnknown("no answer"))
    runs.advance(run.pk)
    for subject in (Run.objects.get(pk=run.pk), Operation.objects.get(step="refund")):
        assert "person:3" in consent.people(subject)


def test_a_request_to_send_a_step_again_ends_with_its_run(waiting_run, clerk, clock):
    run = waiting_run()
    press("approve", Approval.objects.get(), CLEO)
    clerk.answers(OutcomeUnknown("nothing came"))
    sweeping.sweep()
    step = Operation.objects.get(state=State.AMBIGUOUS)
    clock.set(step.same_key_until)
    do(step, "send_again", ANN)
    sweeping.sweep()
    assert the(step.pk, "send_again").state == ApprovalState.WAITING
    do(run, "cancel", ROOT)
    sweeping.sweep()
    assert the(step.pk, "send_again").state == ApprovalState.SUPERSEDED


def test_sending_again_is_for_one_time(clerk):
    case = unknown(clerk)
    do(case, "send_again", ANN)
    clerk.answers(OutcomeUnknown("no answer"))
    press("approve", the(case.pk, "send_again"), ROOT)
    assert row(case.pk).state == "ambiguous"
    assert "Asked for" in do(case, "send_again", ANN).message
    assert len(clerk.calls) == 2
    assert Approval.objects.count() == 2


def test_a_look_up_that_tells_more_comes_before_sending_again(clerk):
    case = unknown(clerk)
    do(case, "send_again", ANN)
    clerk.sees(saw(Saw.MISMATCH, observed={"order": "1002", "amount": 1}))
    answer = press("approve", the(case.pk, "send_again"), ROOT)
    assert ("nothing was sent again" in answer.message, len(clerk.calls)) == (True, 1)


def test_what_a_look_up_before_it_tells_ends_the_consent(clerk):
    case = unknown(clerk)
    do(case, "send_again", ANN)
    clerk.sees(saw(Saw.MISMATCH, observed={"order": "1002", "amount": 1}))
    press("approve", the(case.pk, "send_again"), ROOT)
    assert decisions(the(case.pk, "send_again")) == ["second_person_asked", "approved", "look_up_told_more"]
    assert the(case.pk, "send_again").state == ApprovalState.SUPERSEDED


@pytest.fixture
def stopped(clerk, clock):
    """A case that two people agreed to send again while a stop switch held it back, and the switch."""
    case = unknown(clerk)
    clock.advance(60)
    executor.call_a_person(case, "no_conclusive_answer")
    do(case, "send_again", ANN)
    assert put(provider="clerk").verdict is Verdict.DONE
    answer = press("approve", the(case.pk, "send_again"), ROOT)
    assert "done by itself as soon as nothing is in the way, within 30 min" in answer.message
    assert len(clerk.calls) == 1
    return case, Limit.objects.get()


def test_what_was_agreed_to_and_held_back_is_done_by_itself_when_nothing_is_in_the_way(stopped, clerk, clock):
    case, stop = stopped
    clock.advance(minutes=5)
    sweeping.sweep()
    assert (len(clerk.calls), the(case.pk, "send_again").state) == (1, ApprovalState.APPROVED)
    release(stop)
    clock.advance(minutes=1)
    sweeping.sweep()
    sweeping.sweep()
    operation = row(case.pk)
    assert (len(clerk.calls), operation.state, operation.escalated_at) == (2, "succeeded", None)
    assert the(case.pk, "send_again").state == ApprovalState.CONSUMED
    entry = Entry.objects.get(subject=str(case.subject), reason_code="sent_again")
    told = bytes(entry.canonical)
    assert (entry.actor, b'"asked_by":"person:1"' in told, b'"approved_by":"person:4"' in told) == (
        SYSTEM.id, True, True,
    )  # fmt: skip


def test_what_was_agreed_to_is_never_done_after_its_use_by_and_somebody_is_told(stopped, clerk, clock):
    case, stop = stopped
    use_by = the(case.pk, "send_again").use_by
    clock.set(use_by - timedelta(seconds=20))
    sweeping.sweep()
    assert the(case.pk, "send_again").due_at == use_by
    clock.set(use_by)
    release(stop)
    for _ in range(3):
        sweeping.sweep()
        clock.advance(minutes=2)
    assert (len(clerk.calls), row(case.pk).state) == (1, "ambiguous")
    approval = the(case.pk, "send_again")
    assert (approval.state, decisions(approval)[-1]) == (ApprovalState.EXPIRED, "approval_past_use_by")
    watch.look()
    assert Signal.objects.get(kind="approval_unused", cleared_at=None).subject == str(approval.subject)


def test_a_look_up_on_the_way_that_finds_it_sends_nothing(stopped, clerk, clock):
    case, stop = stopped
    release(stop)
    clerk.sees(found())
    clock.advance(minutes=1)
    sweeping.sweep()
    assert (len(clerk.calls), row(case.pk).state) == (1, "succeeded")
    assert the(case.pk, "send_again").state == ApprovalState.SUPERSEDED


def test_a_page_that_is_lost_after_the_consent_does_not_lose_the_deed(clerk, clock):
    case = unknown(clerk)
    do(case, "send_again", ANN)
    agreed = the(case.pk, "send_again")
    approvals._decide(
        agreed,
        Press(action="approve", token=uuid.uuid4(), version=agreed.version, reason=BECAUSE),
        ROOT, to=ApprovalState.APPROVED, code="approved", operation_to=State.READY,
    )  # fmt: skip
    clock.advance(59)
    sweeping.sweep()
    assert len(clerk.calls) == 1
    clock.advance(1)
    sweeping.sweep()
    assert (len(clerk.calls), row(case.pk).state) == (2, "succeeded")


def test_while_the_same_key_is_safe_no_duplicate_is_offered(clerk, clock):
    clerk.answers(OutcomeUnknown("no answer"))
    case = row(perform(order(), actor=AGENT).pk)
    assert "A retry with the same key is safe now" in do(case, "send_again", ANN).message
    clock.set(case.same_key_until)
    assert "Asked for" in do(case, "send_again", ANN).message


def test_resolving_the_case_voids_the_request_to_send_it_again(clerk):
    case = unknown(clerk)
    do(case, "send_again", ANN)
    do(case, "resolve_applied", ROOT)
    assert the(case.pk, "send_again").state == ApprovalState.SUPERSEDED


def test_the_database_refuses_a_consent_that_was_given_to_something_else(clerk):
    case, other = unknown(clerk), unknown(clerk, step="other")
    for each in (case, other):
        do(each, "send_again", ANN)
    use = {
        "id": the(other.pk, "send_again").pk,
        "action": "send_again",
        "fingerprint": "x",
        "asked_by": "",
        "approved_by": "",
    }
    with pytest.raises(transition.NotApproved):
        executor.claim_again(row(case.pk), actor=ROOT, use=use)
    clerk.answers(OutcomeUnknown("no answer"))
    transition.move_approval(
        the(other.pk, "send_again"), to="approved", who=[], patch={"decided_by": "person:4"}, fact=ROOT.fact("approved")
    )
    with pytest.raises(transition.ApprovalOfAnother):
        executor.claim_again(row(case.pk), actor=ROOT, use=use)
    assert len(clerk.calls) == 2


def test_the_database_refuses_other_inputs_a_consent_that_is_late_and_one_that_is_used(clerk, clock):
    case = unknown(clerk)
    do(case, "send_again", ANN)
    approval = the(case.pk, "send_again")
    transition.move_approval(
        approval, to="approved", who=[], patch={"decided_by": "person:4"}, fact=ROOT.fact("approved")
    )
    approval.refresh_from_db()
    right = second_person.use(approval, case)
    for wrong in ({"fingerprint": "x"}, {"action": "waive_undo"}):
        with pytest.raises(transition.ApprovalOfAnother):
            executor.claim_again(row(case.pk), actor=ROOT, use={**right, **wrong})
    clock.set(approval.use_by)
    with pytest.raises(transition.ApprovalPastUseBy):
        executor.claim_again(row(case.pk), actor=ROOT, use=right)
    clock.advance(-60)
    claim = executor.claim_again(row(case.pk), actor=ROOT, use=right)
    clerk.answers(OutcomeUnknown("no answer"))
    executor.dispatch(claim)
    with pytest.raises(transition.ApprovalUsed):
        executor.claim_again(row(case.pk), actor=ROOT, use=right)
    assert len(clerk.calls) == 2


def test_a_request_for_a_second_person_expires_too(clerk, clock):
    case = unknown(clerk)
    do(case, "send_again", ANN)
    approval = the(case.pk, "send_again")
    clock.set(approval.expires_at)
    approvals.end_due(approval.pk)
    approval.refresh_from_db()
    assert approval.state == ApprovalState.EXPIRED
    assert row(case.pk).state == "ambiguous"


def test_a_new_intent_that_waits_for_consent_lets_its_run_rest(waiting_run, clerk):
    """The version before it has failed; only the newest one says whether there is something to do."""
    run = waiting_run()
    press("deny", Approval.objects.get(), CLEO)
    do(Operation.objects.get(step="refund"), "new_intent", ANN)
    for _ in range(3):
        sweeping.sweep()
    run.refresh_from_db()
    assert (run.state, run.due_at) == (RunState.AWAITING_APPROVAL, None)


def test_an_undo_done_by_hand_is_vouched_for_by_two_people_and_the_run_ends(waiting_run, clerk, clock):
    run = waiting_run()
    clerk.answers(Rejected("no", status=422))
    press("deny", Approval.objects.get(), CLEO)
    for _ in range(3):
        sweeping.sweep()
    run.refresh_from_db()
    assert (run.state, run.escalation_reason) == (RunState.COMPENSATING, "undo_incomplete")
    shown = next(p for p in actions.previews(run, actor=ANN) if p.action == "waive_undo")
    assert (shown.allowed, shown.inputs[0].choices) == (True, (("label", "label"),))
    assert do(run, "waive_undo", ANN, step="refund").verdict is Verdict.REFUSED
    assert do(run, "waive_undo", ANN, step="label").verdict is Verdict.DONE
    approval = Approval.objects.get(action="waive_undo")
    assert press("approve", approval, ANN).verdict is Verdict.REFUSED
    assert press("approve", approval, CLEO).verdict is Verdict.DONE
    sweeping.sweep()
    run.refresh_from_db()
    assert (run.state, run.waived) == (RunState.COMPENSATED, ["label"])
    entry = Entry.objects.get(subject=str(run.subject), reason_code="undo_waived")
    assert (entry.actor, b'"asked_by":"person:1"' in bytes(entry.canonical)) == (CLEO.id, True)


# A new intent after a person's bare word


def called_not_applied(clerk: Any, action: str = "none") -> Operation:
    clerk.answers(OutcomeUnknown("no answer"))
    case = row(perform(order(action), actor=AGENT).pk)
    do(case, "resolve_not_applied", ANN)
    assert (row(case.pk).state, row(case.pk).unknown_attempts) == (State.FAILED_TERMINAL, [1])
    return row(case.pk)


ALL = replace(CLEO, permissions=frozenset(Permission))


def test_after_a_bare_word_a_new_intent_is_made_when_another_person_accepts_a_duplicate(clerk, superuser_connection):
    case = called_not_applied(clerk)
    assert "Asked for" in do(case, "new_intent", ANN).message
    request = the(case.pk, "new_intent")
    assert press("approve", request, ANN).verdict is Verdict.REFUSED
    assert press("approve", request, CLEO).verdict is Verdict.REFUSED, "it needs the permission to send again"
    assert Operation.objects.count() == 1
    assert press("approve", request, ALL).verdict is Verdict.DONE
    sweeping.sweep()
    later = Operation.objects.get(intent_version=2)
    assert (later.state, later.key != case.key, len(clerk.calls)) == (State.SUCCEEDED, True, 2)
    assert the(case.pk, "new_intent").state == ApprovalState.CONSUMED
    details = Entry.objects.get(subject=str(later.subject), reason_code="new_intent").body["details"]
    assert (details["asked_by"], details["approved_by"]) == (ANN.id, ALL.id)
    assert changes_without_audit(superuser_connection) == []


def test_whoever_asks_for_a_new_intent_after_a_bare_word_does_not_agree_to_its_action_either(waiting_run, clerk):
    waiting_run()
    press("approve", Approval.objects.get(), CLEO)
    clerk.answers(OutcomeUnknown("no answer"))
    sweeping.sweep()
    refund = Operation.objects.get(step="refund")
    do(refund, "resolve_not_applied", ROOT)
    do(refund, "new_intent", ROOT)
    assert press("approve", the(refund.pk, "new_intent"), ALL).verdict is Verdict.DONE
    later = Operation.objects.get(step="refund", intent_version=2)
    assert (later.state, later.requested_by) == (State.AWAITING_APPROVAL, ROOT.id)
    assert press("approve", the(later.pk), replace(ROOT, permissions=ALL.permissions)).verdict is Verdict.REFUSED
    assert press("approve", the(later.pk), CLEO).verdict is Verdict.DONE


def test_the_database_itself_refuses_a_new_intent_after_a_bare_word_without_that_consent(clerk):
    case = called_not_applied(clerk)
    with pytest.raises(transition.OlderVersionOpen):
        intents.next_version(case, actor=ANN, reason=BECAUSE)
    do(case, "new_intent", ANN)
    request = the(case.pk, "new_intent")
    use = {"id": request.pk, "action": "new_intent", "fingerprint": request.fingerprint}
    with pytest.raises(transition.NotApproved):
        intents.next_version(case, actor=ANN, reason=BECAUSE, use={**use, "asked_by": ANN.id, "approved_by": ""})
    assert Operation.objects.count() == 1


def test_the_database_itself_makes_no_new_intent_of_what_was_seen_after_the_look_up(clerk):
    case = called_not_applied(clerk)
    do(case, "new_intent", ANN)
    request = the(case.pk, "new_intent")
    transition.move_approval(request, to="approved", who=[], patch={"decided_by": ALL.id}, fact=ALL.fact("approved"))
    use = {"id": request.pk, "action": "new_intent", "fingerprint": request.fingerprint, "asked_by": ANN.id}
    transition.transition(
        case.subject, to=None, version=row(case.pk).version, patch={"sighted": True}, fact=SYSTEM.fact("looked_up")
    )
    with pytest.raises(transition.ApprovalOfAnother):
        intents.next_version(case, actor=ALL, reason=BECAUSE, use={**use, "approved_by": ALL.id})
    assert (Operation.objects.count(), the(case.pk, "new_intent").state) == (1, ApprovalState.APPROVED)


def test_a_look_up_that_finds_the_old_one_makes_no_new_intent(clerk):
    case = called_not_applied(clerk, "keyed")
    do(case, "new_intent", ANN)
    clerk.sees(found("r-9"))
    assert "told more" in press("approve", the(case.pk, "new_intent"), ALL).message
    assert (row(case.pk).state, Operation.objects.count()) == (State.SUCCEEDED, 1)
    assert the(case.pk, "new_intent").state == ApprovalState.SUPERSEDED


def test_what_is_found_before_anybody_agreed_is_not_agreed_to_any_more(clerk):
    case = called_not_applied(clerk, "keyed")
    do(case, "new_intent", ANN)
    clerk.sees(found("r-9"))
    do(case, "look_up", ANN)
    answer = press("approve", the(case.pk, "new_intent"), ALL)
    assert (answer.verdict, "changed since it was asked" in answer.message) == (Verdict.REFUSED, True)
    assert Operation.objects.count() == 1


@pytest.mark.parametrize("mark", ["step_needs_person", "step_failed_after_pivot"])
def test_a_run_goes_on_with_a_new_intent_after_a_bare_word(waiting_run, clerk, mark):
    run = runs.start("agreed", tenant="acme", workflow_id="x", input={"order": "1", "amount": 1}, actor=AGENT)
    clerk.answers(applied("l-1"), OutcomeUnknown("no answer"))
    runs.advance(run.pk)
    refund = Operation.objects.get(step="refund")
    run.refresh_from_db()
    transition.transition(run.subject, to=None, version=run.version, patch={"escalation_reason": mark},
                          after={"escalated_at": 0}, fact=SYSTEM.fact(mark))  # fmt: skip
    asserted = {"basis": "asserted", "reason_code": "asserted_not_applied"}
    transition.transition(refund.subject, to="failed_terminal", version=refund.version, patch=asserted,
                          fact=ANN.fact("asserted_not_applied"))  # fmt: skip
    do(refund, "new_intent", ROOT)
    assert press("approve", the(refund.pk, "new_intent"), ALL).verdict is Verdict.DONE
    for _ in range(3):
        sweeping.sweep()
    run.refresh_from_db()
    assert (run.state, Operation.objects.get(step="refund", intent_version=2).state) == ("succeeded", "succeeded")


# The table of the database


def test_one_operation_has_one_open_request(clerk, superuser_connection):
    pk = asked().pk
    columns = [f.column for f in Approval._meta.fields if f.column != "id"]
    names = ", ".join(columns)
    with pytest.raises(Exception, match="approval_open_once"):
        superuser_connection.execute(
            f"INSERT INTO reconciliation_approval ({names}) SELECT {names} FROM reconciliation_approval"
            " WHERE operation_id = %s",
            [pk],
        )


def test_every_change_of_an_approval_is_one_entry_of_the_audit_log(clerk, clock, superuser_connection):
    for number, way in enumerate(("approve", "deny", "withdraw", "expire")):
        pk = asked(step=f"s{number}").pk
        if way == "expire":
            clock.set(the(pk).expires_at)
            approvals.end_due(the(pk).pk)
        else:
            press(way, the(pk), ROOT)
    asked(step="s0")
    assert changes_without_audit(superuser_connection) == []
