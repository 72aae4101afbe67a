"""The page of a run: its steps forth and back, what is in the way, and what became of it."""

import html
import re
from uuid import uuid4

import pytest

from examples.order_desk import feed
from examples.order_desk.workflow import DAMAGED_ITEM
from reconciliation import leases, registry, runs, sweeping, transition
from reconciliation.actors import Actor
from reconciliation.models import Operation, Run
from reconciliation.providers.base import OutcomeUnknown, Rejected
from reconciliation.states import RunState
from tests import cast, run_shapes
from tests.scripted import OLGA, applied
from tests.test_executor import stop
from tests.test_sagas import CLAIM, settle

AGENT = Actor(id="agent:desk-2", kind="agent")


def text(response):
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.content.decode())))


def part(response, beginning, end="</section>"):
    """The text of one part of the page."""
    found = response.content.decode().split(beginning, 1)[1].split(end, 1)[0]
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", found)))


@pytest.fixture
def ann(ledger_db):
    return cast.client(cast.people()["op_ann"])


@pytest.fixture
def desk(ledger_db, world, settings):
    settings.AFTERCALL_PROVIDERS = [f"examples.order_desk.providers.{n}" for n in ("pay", "carrier", "mail", "tickets")]
    settings.AFTERCALL_WORKFLOWS = ["examples.order_desk.workflow.DAMAGED_ITEM"]
    registry.forget()
    yield world
    registry.forget()


@pytest.fixture
def forked(clerk, settings):
    settings.AFTERCALL_WORKFLOWS = ["tests.run_shapes.FORKED"]
    registry.forget()
    run_shapes.PROPOSALS.clear()
    return clerk


def claim(workflow_id="T-77"):
    return runs.start("damaged_item", tenant="t_acme", workflow_id=workflow_id, input=CLAIM, actor=AGENT)


def trip(workflow_id="trip-1", order="1002"):
    return runs.start("forked", tenant="t_acme", workflow_id=workflow_id, input={"order": order}, actor=AGENT)


def stuck(desk, clock):
    """A claim whose refund was refused and whose pickup is on the van already."""
    desk.pay.fault("reject", order="1002", status=422)
    desk.carrier.fault("reject", action="pickup.cancel", status=422, says="already on the van", times=9)
    run = claim()
    settle(clock)
    return Run.objects.get(pk=run.pk)


def saga_of(response):
    return part(response, '<ol class="saga"', "</ol>").replace("How it is taken back: ", "")


# Forth and back


def test_a_run_that_has_not_begun_shows_its_steps_the_pivot_and_what_cannot_be_undone(ann, desk):
    page = ann.get(f"/runs/{claim().pk}")
    saga = saga_of(page)
    assert "create_label not begun label.void, not begun" in saga
    assert "issue_refund pivot not begun" in saga
    assert "from here the way is forward only" in saga
    assert saga.index("issue_refund") < saga.index("from here the way") < saga.index("send_email")
    told = text(page)
    assert "Cannot be undone once it is done:" in told
    for step in DAMAGED_ITEM.effects:
        assert (f"{step.name} (" in told) == (step.undo is None)


def test_who_asked_for_a_run_and_its_steps_is_named_to_those_who_may_see_who_decides(desk):
    who = cast.people()
    bob = Actor(id=f"person:{who['op_bob'].pk}", kind="person", name="op_bob")
    run = runs.start("damaged_item", tenant="t_acme", workflow_id="T-78", input=CLAIM, actor=bob)
    runs.advance(run.pk)
    pages = (f"/runs/{run.pk}", f"/operations/{Operation.objects.filter(run=run).first().pk}")
    for page in pages:
        assert "Requested by op_bob" in text(cast.client(who["op_ann"]).get(page))
        assert f"Requested by {bob.id}" in text(cast.client(who["vi_eve"]).get(page))


def test_a_compensated_run_shows_each_undo_beside_its_step_and_what_was_undone(ann, desk, clock):
    desk.pay.fault("reject", order="1002", status=422)
    run = claim()
    settle(clock)
    page = ann.get(f"/runs/{run.pk}")
    pickup = Operation.objects.get(step="undo:schedule_pickup")
    assert re.search(rf'class="back">.*?href="/operations/{pickup.pk}">undo</a>', page.content.decode(), re.DOTALL)
    account = part(page, 'id="account"')
    assert "Undone: what there was of it" in account
    assert "Applied nothing that still stands" in account
    assert re.search(r"Applied, undone since create_label lb_\w+ schedule_pickup pu_\w+", account)
    assert "Not applied issue_refund the provider found the request malformed" in account
    assert "What is in the way" not in text(page)


def test_a_stuck_undo_is_named_and_so_is_what_waits_for_it(ann, desk, clock):
    run = stuck(desk, clock)
    page = ann.get(f"/runs/{run.pk}")
    block = part(page, "What is in the way")
    assert "The undo of schedule_pickup is stuck: the provider found the request malformed." in block
    assert "already on the van" in block
    assert "create_label waits for it." in block
    assert "create_label ✓ succeeded" in saga_of(page)
    assert "waits for the undo of schedule_pickup" in saga_of(page)
    assert "▲ escalated ↶ compensating" in text(page)
    assert "Being undone: what there is of it" in part(page, 'id="account"')
    assert (
        "The undo of schedule_pickup failed for good: try it again as a new intent on its page, or waive it."
        in text(page)
    )
    assert "Automation stopped: an undo is stuck; a person must finish it." in text(page)


def test_a_stuck_way_back_goes_on_after_a_new_intent_of_its_undo(ann, desk, clock):
    run = stuck(desk, clock)
    desk.carrier.clear_faults()
    undo = Operation.objects.get(step="undo:schedule_pickup")
    form = {"action": "new_intent", "token": str(uuid4()), "version": undo.version, "reason": "The van came back."}
    assert ann.post(f"/operations/{undo.pk}/act", form).status_code == 302
    settle(clock)
    assert Run.objects.get(pk=run.pk).state == "compensated"
    assert "Each applied step is undone" in text(ann.get(f"/runs/{run.pk}"))


def spent(desk, clock):
    """A claim whose refund was refused, and a carrier that was down for as long as its pickup was to be taken back."""
    desk.pay.fault("reject", order="1002", status=422)
    desk.carrier.fault("unavailable", action="pickup.cancel", times=3)
    run = claim()
    settle(clock)
    return Run.objects.get(pk=run.pk)


def test_a_run_stuck_at_an_undo_that_may_be_retried_says_so_and_is_not_resumed_to_stop_again(ann, desk, clock):
    run = spent(desk, clock)
    page = ann.get(f"/runs/{run.pk}")
    block = part(page, "What is in the way")
    assert "The undo of schedule_pickup is stuck: the budget of attempts is spent." in block
    assert "Open it to retry it, or waive it where it was done by hand; the run then goes on by itself." in block
    assert 'value="resume"' not in page.content.decode()
    assert "The undo of schedule_pickup waits for a person: decide about it on its page, or waive it" in text(page)
    undo = Operation.objects.get(step="undo:schedule_pickup")
    form = {"action": "retry", "token": str(uuid4()), "version": undo.version, "reason": "The carrier is back."}
    assert ann.post(f"/operations/{undo.pk}/act", form).status_code == 302
    settle(clock)
    assert Run.objects.get(pk=run.pk).state == "compensated"


def test_a_run_that_waits_for_a_decision_says_where_it_is_made_and_that_nobody_looks_any_more(ann, desk, clock):
    desk.pay.fault("reset_after", order="1002")
    desk.pay.fault("unavailable", action="look_up", times=999)
    desk.pay.fault("bad_gateway_before", times=99)
    run = claim()
    settle(clock)
    page = ann.get(f"/runs/{run.pk}")
    assert "Open it to look it up or to say what became of it; the run then goes on by itself." in part(
        page, "What is in the way"
    )
    assert "It may have been applied; automation has stopped looking, and a person can look it up on its page." in part(
        page, 'id="account"'
    )
    assert "Unknown, and looked up only where a person asks: issue_refund." in part(page, 'id="act-cancel"')
    run.refresh_from_db()
    runs.cancel(run.pk, actor=AGENT, version=run.version, reason="The customer called.")
    told = text(ann.get(f"/runs/{run.pk}"))
    assert "The outcome of issue_refund is unknown still, and waits for a person." in told


@pytest.mark.parametrize("known", [True, False])
def test_a_run_left_to_others_says_what_its_worker_lacked_and_when_it_is_taken_up_again(ann, desk, settings, known):
    run = claim()
    here, settings.AFTERCALL_WORKFLOWS = settings.AFTERCALL_WORKFLOWS, []
    registry.forget()
    sweeping.sweep()
    settings.AFTERCALL_WORKFLOWS = here if known else []
    registry.forget()
    page = ann.get(f"/runs/{run.pk}")
    block = part(page, "What is in the way")
    lacked = "no workflow damaged_item version 1 is configured there; add it to AFTERCALL_WORKFLOWS."
    assert f"A worker left it to another one: {lacked}" in block
    assert re.search(
        r"Once a worker has it, the run goes on by itself; it is taken up again at \d\d:\d\d:\d\d ?\.", block
    )
    assert "It waits for a worker that can go on with it: no workflow damaged_item version 1 is configured there" in (
        text(page)
    )


def test_a_waived_undo_says_that_it_was_done_by_hand(ann, desk, clock):
    run = stuck(desk, clock)
    cast.run_stands(run, None, waived=["schedule_pickup"])
    page = ann.get(f"/runs/{run.pk}")
    assert "done by hand undo a person vouched for it" in saga_of(page)
    assert "Applied, undone since schedule_pickup" in part(page, 'id="account"')


def test_a_cancelled_run_says_what_is_unknown_and_does_not_claim_to_wait(ann, desk, clock):
    desk.pay.fault("reset_after", order="1002")
    desk.pay.fault("unavailable", action="look_up", times=99)
    run = claim()
    sweeping.sweep()
    run.refresh_from_db()
    runs.cancel(run.pk, actor=AGENT, version=run.version, reason="The customer called.")
    page = ann.get(f"/runs/{run.pk}")
    assert "A person stopped it; nothing more of it is sent. The outcome of issue_refund is unknown still" in text(page)
    account = part(page, 'id="account"')
    assert "Cancelled: what there is of it" in account
    assert re.search(r"Applied create_label lb_\w+ schedule_pickup pu_\w+", account)
    assert "Unknown issue_refund" in account
    assert "Cannot be undone issue_refund" in account


def test_the_example_has_a_claim_whose_way_back_is_blocked(ann, desk, clock):
    claim = feed.Claim(15, "t_acme", 5900)
    feed.pickup_on_the_van(claim)
    run = runs.start("damaged_item", tenant="t_acme", workflow_id=claim.id, input=claim.input(), actor=AGENT)
    settle(clock)
    assert feed.pickup_on_the_van in [misfortune for _, misfortune in feed.FIRST_DAY]
    assert "already on the van" in part(ann.get(f"/runs/{run.pk}"), "What is in the way")
    assert "Runs that stopped" in text(ann.get("/"))


# Branches, decisions, caps and the lock


def test_steps_that_need_each_other_not_are_drawn_side_by_side(ann, forked):
    run = trip()
    page = ann.get(f"/runs/{run.pk}")
    beside = re.findall(r'class="step \w* ?beside".*?<b>(\w+)</b>', page.content.decode(), re.DOTALL)
    assert beside == ["hotel", "flight"]
    assert "after hotel, flight" in saga_of(page)


def test_only_what_waits_for_the_pivot_stands_below_its_line(ann, clerk, settings):
    settings.AFTERCALL_WORKFLOWS = ["tests.run_shapes.ASIDE"]
    registry.forget()
    run = runs.start("aside", tenant="t_acme", workflow_id="a-1", input={"order": "1002"}, actor=AGENT)
    saga = saga_of(ann.get(f"/runs/{run.pk}"))
    line = saga.index("from here the way is forward only")
    assert max(saga.index(name) for name in ("hotel", "pay", "print", "post", "stamp")) < line < saga.index("mail")


def test_undos_that_wait_for_each_other_are_named_in_the_way(ann, clerk, settings, clock):
    settings.AFTERCALL_WORKFLOWS = ["tests.saga_workflows.REFUSED"]
    registry.forget()
    clerk.answers(applied("a-1"), applied("b-1"), applied("c-1"), Rejected("no", status=402))
    run = runs.start("ring_of_three", tenant="t_acme", workflow_id="r-1", input={"order": "1002"}, actor=AGENT)
    settle(clock)
    page = ann.get(f"/runs/{run.pk}")
    block = part(page, "What is in the way")
    assert "Undos wait for each other, so that none begins: a, b, c. Waive one that was done by hand." in block
    assert "No undo of c, b, a can begin by itself." in text(page)


def test_a_decision_shows_its_version_and_shown_fields_and_masks_the_others(ann, forked):
    run_shapes.PROPOSALS[:] = [{"tier": 7}, {"tier": "gold", "card": "4242 4242"}]
    run = runs.advance(trip().pk)
    page = ann.get(f"/runs/{run.pk}")
    saga = saga_of(page)
    assert "plan decision ✓ decided" in saga
    assert "Version 1, decided" in saga
    assert "tier gold card •••• hidden" in saga
    assert "1 proposal refused" in saga
    assert "for version 1: tier: string_type; card: missing" in saga
    assert "4242 4242" not in page.content.decode()
    assert "cannot be undone: a note that was read stays read" in saga


def test_a_refused_proposal_shows_what_may_be_seen_of_it_and_no_name_that_the_model_made_up(ann, forked):
    run_shapes.PROPOSALS[:] = [{"tier": "gold", "card": 7, "Ada Fenn 4242424242424242": "x"}, {"tier": 8}]
    run = runs.advance(trip().pk)
    page = ann.get(f"/runs/{run.pk}")
    saga = saga_of(page)
    assert "for version 1: card: string_type tier gold card •••• hidden • •••• hidden" in saga
    assert "for version 1: tier: string_type; card: missing tier 8" in saga
    assert "Ada" not in page.content.decode()
    assert "4242" not in page.content.decode()


def test_a_version_that_was_given_up_says_why_also_to_who_may_not_read_the_audit_log(forked, ledger_db):
    run_shapes.PROPOSALS[:] = [{"tier": 7}, {"tier": 8}]
    run = runs.advance(trip().pk)
    runs.choose_again(run.pk, step="plan", actor=OLGA, version=run.version, reason="the price list was old")
    eve = cast.client(cast.people()["vi_eve"])
    assert "Version 1 was given up for a fresh decision: the price list was old" in saga_of(eve.get(f"/runs/{run.pk}"))
    runs.advance(run.pk)
    saga = saga_of(eve.get(f"/runs/{run.pk}"))
    assert "Decided anew the price list was old" in saga
    assert saga.count("the price list was old") == 1


def test_a_proposal_that_nobody_answers_is_told_of(ann, forked):
    run = trip()
    lease = leases.take(Run.objects.get(), to=RunState.RUNNING, actor=AGENT, seconds=60)
    transition.ask_for_proposal(
        run.subject, generation=lease.generation, seconds=60, step="plan", version=1, most=2, observer="worker 1"
    )
    page = ann.get(f"/runs/{run.pk}")
    assert "plan decision → asked 1 proposal asked for, without an answer so far" in saga_of(page)
    assert "Proposal 1 of plan was asked for, for version 1." in text(page)


def test_a_run_without_a_valid_proposal_says_where_it_stands(ann, forked):
    run_shapes.PROPOSALS[:] = [{"tier": 7}, {"tier": 8}]
    run = runs.advance(trip().pk)
    page = ann.get(f"/runs/{run.pk}")
    block = part(page, "What is in the way")
    assert "plan: no proposal of a decision was valid." in block
    assert "hotel, flight, note, pay, mail wait for it." in block
    assert "plan decision ▲ no valid proposal" in saga_of(page)
    assert "Ask for a fresh decision" in text(page)


def test_an_unknown_step_names_who_waits_for_it_and_who_does_not(ann, forked):
    forked.answers(*[_unknown_at("hotel")] * 2)
    run = runs.advance(trip().pk)
    block = part(ann.get(f"/runs/{run.pk}"), "What is in the way")
    assert "hotel is unknown, and is being looked up. note, pay, mail wait for it." in block


def step_of(call):
    return Operation.objects.get(key=call.key).step


def _unknown_at(step):
    return lambda call: OutcomeUnknown("no answer") if step_of(call) == step else applied(call.key[:12])


def test_caps_are_told_with_what_is_used_up(ann, forked):
    run = runs.advance(trip().pk)
    caps = part(ann.get(f"/runs/{run.pk}"), "Caps of the whole run")
    assert "of 2 h 00 m" in caps
    assert "Cost 0.00 of 5.00" in caps
    assert "Decided anew 0 of 3 times" in caps


def test_a_run_that_waits_for_a_lock_leads_to_the_run_that_holds_it(ann, forked):
    forked.answers(*[_unknown_at("hotel")] * 2)
    first = runs.advance(trip().pk)
    second = runs.advance(trip("trip-2").pk)
    page = ann.get(f"/runs/{second.pk}")
    assert "It waits for run trip-1, which works on the same thing." in text(page)
    assert f'href="/runs/{first.pk}">run trip-1</a>' in page.content.decode()
    assert "order 1002 held by this run" in text(ann.get(f"/runs/{first.pk}"))


def test_a_run_whose_workflow_is_not_configured_any_more_still_shows_its_operations(ann, forked, settings):
    forked.answers(*[Rejected("no")] * 2)
    run = runs.advance(trip().pk)
    settings.AFTERCALL_WORKFLOWS = []
    registry.forget()
    page = ann.get(f"/runs/{run.pk}")
    assert page.status_code == 200
    assert "hotel" in saga_of(page)


# From case to case


def test_an_undo_and_what_it_undoes_lead_to_each_other(ann, desk, clock):
    stuck(desk, clock)
    pickup, undo = (Operation.objects.get(step=step) for step in ("schedule_pickup", "undo:schedule_pickup"))
    there = ann.get(f"/operations/{undo.pk}").content.decode()
    assert f'<dt>Undoes</dt><dd><a href="/operations/{pickup.pk}">schedule_pickup</a>' in there
    assert 'aria-current="step"' in there
    back = text(ann.get(f"/operations/{pickup.pk}"))
    assert "Its undo carrier · pickup.cancel failed" in back


# Resuming what would stop again


def panel_of(response):
    return part(response, "What you can do</h2>")


def test_a_run_whose_step_was_stopped_is_not_resumed_and_says_what_helps(ann, desk):
    desk.pay.fault("reset_after", order="1002")
    desk.pay.fault("unavailable", action="look_up", times=99)
    run = claim()
    sweeping.sweep()
    stop(Operation.objects.get(step="issue_refund").pk)
    sweeping.sweep()
    run.refresh_from_db()
    assert run.escalation_reason == "step_terminated"
    page = ann.get(f"/runs/{run.pk}")
    assert 'value="resume"' not in page.content.decode()
    assert "It would stop again at once: issue_refund was stopped by a person. Cancel the run." in panel_of(page)


def test_a_run_whose_cap_is_reached_is_not_resumed_and_says_why(ann, forked, clock):
    run = trip()
    clock.advance(hours=3)
    runs.advance(run.pk)
    run.refresh_from_db()
    assert run.escalation_reason == "run_time_spent"
    told = panel_of(ann.get(f"/runs/{run.pk}"))
    assert "It would stop again at once: the run has taken as long as it may. Cancel the run." in told


def test_a_run_that_was_undone_names_what_rests_on_a_persons_word_and_what_was_shown(ann, desk, clock):
    desk.pay.fault("reset_after", order="1002", change={"amount": 6000})
    run = claim()
    settle(clock)
    case = Operation.objects.get(step="issue_refund")
    assert case.escalation_reason == "mismatch"
    form = {"action": "resolve_not_applied", "token": str(uuid4()), "version": case.version, "reason": "Not ours."}
    assert ann.post(f"/operations/{case.pk}/act", form).status_code == 302
    settle(clock)
    assert Run.objects.get(pk=run.pk).state == "compensated"
    page = ann.get(f"/runs/{run.pk}")
    lede = "issue_refund counts as not applied on a person's word, not on proof, although the provider showed"
    assert lede in text(page)
    assert "issue_refund on op_ann's word not applied; the provider showed 60.00 USD" in part(page, 'id="account"')
