"""Stop switches, limits, ceilings and the guard against mass triggering: read by every claim, seen, and never lossy."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

import psycopg
import pytest
from django.db import connections, transaction

from audit.models import Entry
from audit.verify import registered_heads, verify
from reconciliation import executor, limits, outbox, registry, retention, retrying, sweeping, tasks, transition
from reconciliation.actors import Actor, Permission
from reconciliation.executor import Disposition
from reconciliation.keys import InvalidField
from reconciliation.limits import Wanted
from reconciliation.models import HeldBack, Limit, LimitUse, Operation
from reconciliation.pressing import Answer, Verdict
from reconciliation.providers.base import OutcomeUnknown, Rejected, Unavailable
from reconciliation.states import State
from reconciliation.transition import Limited
from tests.database import Clock
from tests.scripted import AGENT, KEYED, LISTED, OLGA, Clerk, applied, found, kinds, order, row, spec
from tests.test_same_identity import Crowd

VERA = Actor(id="person:9", kind="person", name="Vera Viewer", permissions=frozenset({Permission.VIEW}))


def put(kind: str = "stop", *, actor: Actor = OLGA, reason: str = "the desk pays twice", **facts: Any) -> Answer:
    return limits.set_limit(Wanted(kind=kind, **facts), actor=actor, reason=reason, token=uuid.uuid4())


def release(limit: Limit, *, actor: Actor = OLGA, **facts: Any) -> Answer:
    given = {"version": limit.version, "reason": "repaired", "token": uuid.uuid4(), **facts}
    return limits.lift(limit, actor=actor, **given)


def perform(number: int = 1, **parts: Any) -> executor.Outcome:
    parts.setdefault("business_object", f"order-{number}")
    return executor.perform(order(workflow_id=f"w{number}", **parts), actor=AGENT)


def sweep() -> int:
    return sweeping.sweep()


@pytest.fixture
def desk(clerk: Clerk, settings: Any) -> Clerk:
    """The clerk, in a deployment whose workflow is the order desk's."""
    settings.AFTERCALL_WORKFLOWS = ["examples.order_desk.workflow.DAMAGED_ITEM"]
    registry.forget()
    return clerk


# The stop switch


@pytest.mark.parametrize(
    ("covered", "stopped"),
    [
        ({}, True),
        ({"tenant": "acme"}, True),
        ({"provider": "clerk"}, True),
        ({"action": "keyed"}, True),
        ({"tenant": "acme", "provider": "clerk", "action": "keyed", "workflow_type": "damaged_item"}, True),
        ({"tenant": "beta"}, False),
        ({"provider": "blind"}, False),
        ({"action": "lookup"}, False),
        ({"tenant": "acme", "provider": "clerk", "action": "lookup"}, False),
    ],
)
def test_a_stop_switch_covers_what_it_names_and_all_of_what_it_leaves_open(
    desk: Clerk, covered: dict[str, str], stopped: bool
) -> None:
    assert put(**covered).verdict is Verdict.DONE
    outcome = perform()
    assert len(desk.calls) == (0 if stopped else 1)
    assert outcome.state == (State.READY if stopped else State.SUCCEEDED)


@pytest.mark.parametrize(
    ("typo", "told"),
    [
        ({"provider": "Clerk"}, "Nearest: clerk."),
        ({"provider": "paypal"}, "There are: blind, clerk."),
        ({"action": "keyd"}, "Nearest: keyed."),
        ({"provider": "clerk", "action": "keyd"}, "clerk has no action of that name, configured or on record"),
        ({"provider": "blind", "action": "lookup"}, "It is an action of clerk."),
        ({"workflow_type": "damaged-item"}, "Nearest: damaged_item."),
    ],
)
@pytest.mark.parametrize("numbers", [{}, {"kind": "rate", "most": 3, "window_seconds": 60}], ids=["stop", "rate"])
def test_what_nothing_bears_the_name_of_is_refused_with_the_names_that_there_are(
    desk: Clerk, typo: dict[str, str], told: str, numbers: dict[str, Any]
) -> None:
    answer = put(**numbers, **typo)
    assert answer.verdict is Verdict.REFUSED
    assert told in answer.message
    assert not Limit.objects.exists()
    assert Entry.objects.filter(subject="limit:new", event="refused").count() == 1


@pytest.mark.parametrize("named", [{"provider": "clerk"}, {"provider": "clerk", "action": "keyed"}])
def test_a_provider_that_is_configured_no_more_is_stopped_while_it_is_on_record(
    clerk: Clerk, settings: Any, named: dict[str, str]
) -> None:
    clerk.answers(Unavailable("down", status=503))
    perform()
    settings.AFTERCALL_PROVIDERS = ["tests.scripted.blind"]
    registry.forget()
    assert "Nearest: clerk." in put(provider="clark").message
    assert put(**named, tenant="beta").verdict is Verdict.REFUSED, "on record in another tenant"
    assert put(**named, tenant="acme").verdict is Verdict.DONE
    assert put(**named).verdict is Verdict.DONE


def test_a_workflow_that_is_written_nowhere_but_in_the_ledger_is_stopped_by_its_name(clerk: Clerk) -> None:
    assert put(workflow_type="night_payout").verdict is Verdict.REFUSED
    perform(1, workflow_type="night_payout")
    assert put(workflow_type="night_payout").verdict is Verdict.DONE
    assert perform(2, workflow_type="night_payout").state is State.READY
    assert perform(3).state is State.SUCCEEDED


def test_what_waits_to_be_published_can_be_stopped_before_it_is_an_operation(clerk: Clerk) -> None:
    with transaction.atomic():
        outbox.put(order(workflow_type="newsletter"), actor=AGENT)
    assert put(workflow_type="newsletter").verdict is Verdict.DONE


def test_what_is_stopped_waits_with_its_reason_and_costs_no_attempt(clerk: Clerk) -> None:
    put()
    outcome = perform()
    waiting = row(outcome.pk)
    assert (outcome.disposition, outcome.reason_code, outcome.outcome) == (Disposition.WAIT, "stopped", "not_sent")
    assert (waiting.attempts, waiting.first_sent_at, waiting.lease_until) == (0, None, None)
    assert waiting.due_at is not None
    assert kinds(waiting.pk) == ["held_back"]


def test_a_retry_is_stopped_as_a_first_attempt_is(clerk: Clerk, clock: Clock) -> None:
    clerk.answers(Unavailable("down", status=503))
    pk = perform().pk
    put(provider="clerk")
    clock.advance(minutes=10)
    sweep()
    assert (row(pk).state, row(pk).attempts, len(clerk.calls)) == (State.FAILED_RETRYABLE, 1, 1)
    with pytest.raises(Limited, match="stop switch"):
        retrying.retry(pk, actor=OLGA, version=row(pk).version)
    assert len(clerk.calls) == 1


def test_an_unknown_one_is_still_looked_up_while_it_is_stopped(clerk: Clerk, clock: Clock) -> None:
    clerk.answers(OutcomeUnknown("no answer"))
    clerk.sees(found("r-1"))
    pk = perform().pk
    put()
    clock.advance(minutes=5)
    sweep()
    assert row(pk).state == State.SUCCEEDED


def test_a_same_key_retry_of_an_unknown_one_is_stopped_and_its_look_ups_go_on(clerk: Clerk, clock: Clock) -> None:
    clerk.answers(OutcomeUnknown("no answer"))
    pk = perform().pk
    put()
    with pytest.raises(Limited):
        retrying.retry(pk, actor=OLGA, version=row(pk).version)
    assert (row(pk).state, len(clerk.calls)) == (State.AMBIGUOUS, 1)
    assert row(pk).due_at < clock.now() + timedelta(minutes=10)


def test_release_makes_what_waited_due_at_once_and_loses_nothing(clerk: Clerk) -> None:
    put()
    pks = [perform(number).pk for number in range(3)]
    assert release(Limit.objects.get()).verdict is Verdict.DONE
    sweep()
    assert [row(pk).state for pk in pks] == [State.SUCCEEDED] * 3
    assert [row(pk).attempts for pk in pks] == [1] * 3
    assert len(clerk.effects) == 3


def test_many_sweeps_over_a_stopped_operation_leave_one_record(clerk: Clerk, clock: Clock) -> None:
    put()
    pk = perform().pk
    entries = Entry.objects.count()
    for _ in range(8):
        clock.advance(hours=2)
        sweep()
        perform()  # and the caller comes again
    assert kinds(pk) == ["held_back"]
    held = HeldBack.objects.get()
    assert held.times > 8
    assert Entry.objects.count() == entries
    assert row(pk).version == 1
    assert clerk.calls == []


def test_a_stop_without_permission_or_reason_is_refused_and_on_record(clerk: Clerk) -> None:
    assert put(actor=VERA).verdict is Verdict.REFUSED
    assert put(reason="  ").verdict is Verdict.REFUSED
    assert not Limit.objects.exists()
    assert Entry.objects.filter(subject="limit:new", event="refused").count() == 2
    assert perform().state is State.SUCCEEDED


def test_setting_and_releasing_are_audited_with_reason_and_version(clerk: Clerk) -> None:
    put(tenant="acme", provider="clerk")
    limit = Limit.objects.get()
    release(limit)
    first, last = Entry.objects.filter(subject=limit.subject).order_by("seq")
    assert (first.actor, first.to_state, first.version, first.told("reason")) == (
        "person:1", "set", 1, "the desk pays twice",
    )  # fmt: skip
    assert (last.from_state, last.to_state, last.version, last.told("reason")) == ("set", "lifted", 2, "repaired")
    assert first.body["details"] == {"kind": "stop", "tenant": "acme", "provider": "clerk"} | {
        "action": "", "workflow_type": "", "currency": "",
    }  # fmt: skip
    assert list(verify(registered_heads())) == []


def test_the_same_token_gets_the_same_answer_and_a_second_release_is_told(clerk: Clerk) -> None:
    token = uuid.uuid4()
    for _ in range(2):
        answer = limits.set_limit(Wanted(kind="stop"), actor=OLGA, reason="why", token=token)
        assert answer.verdict is Verdict.DONE
    assert put().verdict is Verdict.JOINED
    limit = Limit.objects.get()
    assert release(limit).verdict is Verdict.DONE
    assert release(limit).verdict is Verdict.CONFLICT


def test_the_application_role_cannot_write_a_limit_by_itself(clerk: Clerk) -> None:
    put()
    with pytest.raises(Exception, match="permission denied"), connections["default"].cursor() as cursor:
        cursor.execute("UPDATE reconciliation_limit SET lifted_at = now()")
    connections["default"].close()
    assert perform().state is State.READY


# Limits


def test_no_more_are_in_flight_at_once_than_the_limit_allows(clerk: Clerk) -> None:
    put("concurrency", provider="clerk", most=2)
    perform(0)
    crowd = Crowd(8)
    gate, most = [], []

    def slow(call: Any) -> Any:
        gate.append(call.key)
        most.append(Operation.objects.filter(state=State.PENDING).count())
        connections["default"].cursor().execute("SELECT pg_sleep(0.2)")
        return applied(call.key[-8:])

    clerk.answers(*[slow] * 8)
    duties = [lambda number=number: perform(number) for number in range(1, 9)]
    answers = crowd.all_at_once(*duties)
    crowd.leave()
    assert {answer.state for answer in answers} == {State.SUCCEEDED, State.READY}
    assert max(most) <= 2
    assert len(gate) == sum(answer.state is State.SUCCEEDED for answer in answers)


def test_what_found_no_room_goes_on_when_there_is_some(desk: Clerk, clock: Clock) -> None:
    put("concurrency", workflow_type="damaged_item", most=1)

    def another_meanwhile(call: Any) -> Any:
        meanwhile.append(perform(2))
        return applied("r-first")

    meanwhile: list[executor.Outcome] = []
    desk.answers(another_meanwhile)
    perform(1)
    assert (meanwhile[0].state, meanwhile[0].reason_code) == (State.READY, "limit_concurrency")
    clock.advance(seconds=5)
    sweep()
    assert row(meanwhile[0].pk).state == State.SUCCEEDED


def test_a_rate_counts_attempts_in_its_window(clerk: Clerk, clock: Clock) -> None:
    put("rate", provider="clerk", most=3, window_seconds=60)
    states = [perform(number).state for number in range(5)]
    assert states == [State.SUCCEEDED] * 3 + [State.READY] * 2
    clock.advance(seconds=30)
    sweep()
    assert len(clerk.calls) == 3
    clock.advance(seconds=35)
    sweep()
    assert len(clerk.calls) == 5


def test_twenty_at_once_pass_a_rate_of_five_five_times(clerk: Clerk) -> None:
    put("rate", provider="clerk", most=5, window_seconds=600)
    crowd = Crowd(20)
    crowd.all_at_once(*[lambda number=number: perform(number) for number in range(20)])
    crowd.leave()
    assert len(clerk.calls) == 5
    assert Operation.objects.filter(state=State.READY, reason_code="limit_rate").count() == 15


def test_an_amount_counts_each_operation_once_and_only_its_currency(clerk: Clerk, clock: Clock) -> None:
    put("amount", provider="clerk", currency="USD", most=10_000, window_seconds=86_400)
    clerk.answers(Unavailable("down", status=503))
    first = perform(1).pk
    clock.advance(minutes=10)
    sweep()  # its second attempt is not another 42.00
    assert row(first).state == State.SUCCEEDED
    assert perform(2).state is State.SUCCEEDED
    assert (perform(3).state, perform(3).reason_code) == (State.READY, "limit_amount")
    euros = {"order": "1002", "amount": 99_000, "currency": "EUR"}
    assert perform(4, request=euros).state is State.SUCCEEDED


def test_a_limit_on_one_tenant_leaves_the_others_alone(clerk: Clerk) -> None:
    put("rate", tenant="acme", most=1, window_seconds=600)
    assert [perform(n).state for n in (1, 2)] == [State.SUCCEEDED, State.READY]
    assert perform(3, tenant="beta").state is State.SUCCEEDED


def test_two_windows_of_one_place_are_both_judged_at_claim(clerk: Clerk, clock: Clock) -> None:
    assert put("rate", provider="clerk", most=2, window_seconds=5).verdict is Verdict.DONE
    assert put("rate", provider="clerk", most=3, window_seconds=86_400).verdict is Verdict.DONE
    assert [perform(number).state for number in range(3)] == [State.SUCCEEDED] * 2 + [State.READY]
    clock.advance(seconds=6)
    sweep()
    assert len(clerk.calls) == 3  # the short window is empty again, the long one is full now
    assert (perform(4).state, perform(4).reason_code) == (State.READY, "limit_rate")
    clock.advance(hours=1)
    sweep()
    assert len(clerk.calls) == 3
    clock.advance(days=1)
    sweep()
    assert len(clerk.calls) == 4


def test_sums_may_have_a_window_for_each_currency_and_length(clerk: Clerk) -> None:
    for currency, seconds in (("USD", 3600), ("USD", 86_400), ("EUR", 3600)):
        assert put("amount", currency=currency, most=5_000, window_seconds=seconds).verdict is Verdict.DONE
    assert Limit.objects.count() == 3


def test_a_smaller_number_for_what_is_limited_already_tightens_it_at_once_and_is_audited(clerk: Clerk) -> None:
    put("rate", provider="clerk", most=1000, window_seconds=3600)
    answer = put("rate", provider="clerk", most=1, window_seconds=3600, reason="it sends too much")
    limit = Limit.objects.get()
    assert (answer.verdict, limit.most, limit.version) == (Verdict.DONE, 1, 2)
    assert "1,000" in answer.message
    changed = Entry.objects.filter(subject=limit.subject).latest("seq")
    assert (changed.reason_code, changed.told("reason")) == ("limit_changed", "it sends too much")
    assert (changed.body["details"]["before"], changed.body["details"]["most"]) == (1000, 1)
    assert [perform(number).state for number in (1, 2)] == [State.SUCCEEDED, State.READY]
    assert list(verify(registered_heads())) == []


def test_a_larger_number_for_what_is_limited_already_is_refused_with_what_is_in_force(
    clerk: Clerk, clock: Clock
) -> None:
    put("concurrency", provider="clerk", most=5)
    answer = put("concurrency", provider="clerk", most=50)
    limit = Limit.objects.get()
    assert (answer.verdict, limit.most, limit.version) == (Verdict.REFUSED, 5, 1)
    assert "at most 5 in flight" in answer.message
    assert "second person" not in answer.message  # one's own slip is mended alone
    clock.advance(minutes=16)
    assert "a second person has to agree" in put("concurrency", provider="clerk", most=50).message
    assert Entry.objects.filter(subject=limit.subject, event="refused").count() == 2


@pytest.mark.parametrize("wanted", [{"kind": "stop"}, {"kind": "rate", "most": 3, "window_seconds": 60}])
def test_who_sets_what_is_set_already_is_told_and_it_is_on_record(clerk: Clerk, wanted: dict[str, Any]) -> None:
    put(**wanted)
    assert put(**wanted, reason="again").verdict is Verdict.JOINED
    limit = Limit.objects.get()
    joined = Entry.objects.get(subject=limit.subject, event="joined")
    assert (limit.version, joined.told("reason")) == (1, "again")
    assert list(verify(registered_heads())) == []


def test_who_tightens_while_another_does_is_not_lost_between_them(clerk: Clerk, monkeypatch: Any) -> None:
    put("rate", most=9, window_seconds=60)
    crowd, seen = Crowd(1), list[int]()
    look = limits._in_its_place

    def looked_and_overtaken(wanted: Wanted) -> Limit | None:
        standing = look(wanted)
        assert standing is not None
        seen.append(standing.most or 0)
        if len(seen) == 1:
            crowd.all_at_once(lambda: put("rate", most=3, window_seconds=60))
        return standing

    monkeypatch.setattr(limits, "_in_its_place", looked_and_overtaken)
    assert put("rate", most=1, window_seconds=60).verdict is Verdict.DONE
    crowd.leave()
    assert seen == [9, 9, 3]
    assert Limit.objects.get().most == 1


@pytest.mark.parametrize(
    "wanted",
    [
        {"kind": "storm"},
        {"kind": "stop", "most": 3},
        {"kind": "concurrency"},
        {"kind": "rate", "most": 3},
        {"kind": "rate", "most": 0, "window_seconds": 60},
        {"kind": "amount", "most": 3, "window_seconds": 60},
    ],
)
def test_a_limit_that_is_not_whole_is_refused_with_a_sentence(clerk: Clerk, wanted: dict[str, Any]) -> None:
    answer = put(**wanted)
    assert answer.verdict is Verdict.REFUSED
    assert answer.message.endswith(".")
    assert not Limit.objects.exists()


def test_a_currency_that_is_written_otherwise_on_record_is_refused_and_a_new_one_is_not(clerk: Clerk) -> None:
    sums = {"kind": "amount", "most": 5_000, "window_seconds": 60}
    assert put(**sums, currency="usd").verdict is Verdict.DONE  # nobody knows yet
    release(Limit.objects.get())
    perform()
    answer = put(**sums, currency="usd")
    assert (answer.verdict, "on record as USD" in answer.message) == (Verdict.REFUSED, True)
    assert put(**sums, currency="USD").verdict is Verdict.DONE
    assert put(**sums, currency="SEK").verdict is Verdict.DONE


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"action": "unlisted"}, "unlisted declares no money"),
        ({"provider": "clerk", "action": "unlisted"}, "clerk/unlisted declares no money"),
        ({"provider": "blind"}, "No action of blind declares money"),
    ],
)
@pytest.mark.parametrize("kind", ["amount", "rate"])  # an attempt that has no currency is in no window of one
def test_a_limit_in_a_currency_on_what_declares_no_money_is_refused(
    clerk: Clerk, named: dict[str, str], told: str, kind: str
) -> None:
    answer = put(kind, currency="USD", most=1, window_seconds=3600, **named)
    assert answer.verdict is Verdict.REFUSED
    assert f"{told}, so this would hold nothing back. Sums are counted for clerk/keyed." in answer.message
    assert not Limit.objects.exists()
    assert Entry.objects.filter(subject="limit:new", event="refused").count() == 1


def test_a_sum_is_limited_of_what_declared_money_when_it_was_recorded(clerk: Clerk, settings: Any) -> None:
    perform()
    settings.AFTERCALL_PROVIDERS = ["tests.scripted.blind"]
    registry.forget()
    assert put("amount", provider="clerk", currency="USD", most=1, window_seconds=3600).verdict is Verdict.DONE


def test_only_calls_of_its_currency_take_the_room_of_a_limit_in_one(clerk: Clerk) -> None:
    put("concurrency", provider="clerk", currency="USD", most=1)
    euros = {"order": "1002", "amount": 9_900, "currency": "EUR"}
    meanwhile: list[executor.Outcome] = []

    def dollars_meanwhile(call: Any) -> Any:
        meanwhile.append(perform(2))
        return applied("r-first")

    clerk.answers(dollars_meanwhile)
    perform(1, request=euros)
    assert meanwhile[0].state is State.SUCCEEDED


def test_a_window_counts_what_retention_has_taken_away(clerk: Clerk, clock: Clock, monkeypatch: Any) -> None:
    days = {"replay_window": timedelta(days=1), "dispute_window": timedelta(days=1), "message_lifetime": timedelta(0)}
    monkeypatch.setitem(clerk.actions, "keyed", spec(**KEYED, **LISTED, **days, money=("amount", "currency")))
    put("amount", provider="clerk", currency="USD", most=5_000, window_seconds=30 * 86_400)
    put("rate", provider="clerk", most=1, window_seconds=10 * 86_400)
    assert perform(1).state is State.SUCCEEDED
    clock.advance(days=3)
    assert retention.tend().pruned["operation"] == 1
    assert (perform(2).state, perform(2).reason_code) == (State.READY, "limit_amount")
    clock.advance(days=28)
    retention.tend()
    assert not LimitUse.objects.exists()
    sweep()
    assert len(clerk.calls) == 2


def test_what_takes_money_back_makes_no_room_for_more(clerk: Clerk) -> None:
    put("amount", provider="clerk", currency="USD", most=5_000, window_seconds=86_400)
    back = {"order": "1002", "amount": -900_000, "currency": "USD"}
    clerk.answers(Rejected("no such amount", status=422))
    assert perform(1, request=back).state is State.FAILED_TERMINAL
    assert perform(2).state is State.SUCCEEDED
    assert (perform(3).state, perform(3).reason_code) == (State.READY, "limit_amount")


# Ceilings


@pytest.fixture
def charged(clerk: Clerk) -> Iterator[Clerk]:
    """The clerk, with an action that may not return more than was charged."""
    clerk.actions["back"] = spec(**KEYED, **LISTED, money=("amount", "currency"), ceiling="charged")
    yield clerk
    del clerk.actions["back"]


def back(number: int, amount: int, *, charged: int = 10_000, **parts: Any) -> executor.Outcome:
    request = {"order": "1002", "amount": amount, "currency": "USD", "charged": charged}
    parts.setdefault("business_object", "order-1")
    return perform(number, action="back", request=request, **parts)


def test_refunds_of_one_order_never_come_to_more_than_was_charged(charged: Clerk) -> None:
    assert back(1, 6_000).state is State.SUCCEEDED
    second = back(2, 6_000)
    assert (second.state, second.reason_code, second.disposition) == (State.READY, "ceiling_passed", Disposition.WAIT)
    assert row(second.pk).escalation_reason == "ceiling_passed"
    assert back(3, 4_000).state is State.SUCCEEDED
    assert back(4, 6_000, business_object="order-2").state is State.SUCCEEDED
    assert len(charged.calls) == 3


def test_a_currency_written_in_another_case_is_the_same_currency_to_a_ceiling(charged: Clerk) -> None:
    small = {"order": "1002", "amount": 6_000, "currency": "usd", "charged": 10_000}
    assert back(1, 6_000).state is State.SUCCEEDED
    assert perform(2, action="back", business_object="order-1", request=small).reason_code == "ceiling_passed"
    later = perform(3, action="back", business_object="order-2", request=small)
    assert (row(later.pk).currency, charged.calls[-1].request["currency"]) == ("USD", "usd")


def test_a_currency_written_in_another_case_is_the_same_currency_to_a_limit(clerk: Clerk) -> None:
    put("amount", provider="clerk", currency="usd", most=10_000, window_seconds=86_400)
    put("amount", provider="clerk", currency="Usd", most=9_000, window_seconds=86_400)
    assert (Limit.objects.get().currency, Limit.objects.get().most) == ("USD", 9_000)
    for number, currency in ((1, "USD"), (2, "usd"), (3, "Usd")):
        last = perform(number, request={"order": "1002", "amount": 4_200, "currency": currency})
    assert (last.reason_code, len(clerk.calls)) == ("limit_amount", 2)


def test_rows_from_before_get_one_spelling_and_two_limits_on_one_place_keep_theirs(
    clerk: Clerk, superuser_connection: psycopg.Connection[Any]
) -> None:
    pk = perform(1).pk
    for currency in ("EUR", "USD", "GBP"):
        put("amount", provider="clerk", currency=currency, most=10_000, window_seconds=60)
    superuser_connection.execute("UPDATE reconciliation_operation SET currency = 'usd'")
    superuser_connection.execute("UPDATE reconciliation_limit SET currency = 'usd' WHERE currency = 'EUR'")
    superuser_connection.execute("UPDATE reconciliation_limit SET currency = 'gbp' WHERE currency = 'GBP'")
    migration = import_module("reconciliation.migrations.0016_owners_and_currencies")
    superuser_connection.execute(migration.OPERATIONS)
    superuser_connection.execute(migration.LIMITS)
    assert row(pk).currency == "USD"
    assert sorted(Limit.objects.values_list("currency", flat=True)) == ["GBP", "USD", "usd"]


def test_under_a_ceiling_unknown_counts_as_applied_and_proven_absence_does_not(charged: Clerk) -> None:
    charged.answers(OutcomeUnknown("no answer"))
    first = back(1, 6_000)
    assert back(2, 6_000).reason_code == "ceiling_passed"
    unknown = row(first.pk)
    transition.transition(
        unknown.subject, to="failed_terminal", version=unknown.version, patch={"unknown_attempts": []},
        fact=OLGA.fact("absent"),
    )  # fmt: skip
    assert back(3, 6_000).state is State.SUCCEEDED


def test_a_negative_amount_lets_no_more_through_under_a_ceiling(charged: Clerk) -> None:
    assert back(1, -50_000).state is State.SUCCEEDED
    assert back(2, 10_000).state is State.SUCCEEDED
    assert back(3, 1).reason_code == "ceiling_passed"


def test_ten_refunds_at_once_stay_under_the_ceiling(charged: Clerk) -> None:
    crowd = Crowd(10)
    crowd.all_at_once(*[lambda number=number: back(number, 3_000) for number in range(10)])
    crowd.leave()
    assert len(charged.calls) == 3


def test_a_retry_above_the_ceiling_calls_a_person(charged: Clerk, clock: Clock) -> None:
    charged.answers(Unavailable("down", status=503))
    first = back(1, 6_000)
    assert back(2, 6_000).state is State.SUCCEEDED
    clock.advance(minutes=10)
    sweep()
    held = row(first.pk)
    assert (held.state, held.escalation_reason, held.attempts) == (State.FAILED_RETRYABLE, "ceiling_passed", 1)
    assert len(charged.calls) == 2


def test_a_request_that_does_not_say_its_ceiling_is_refused(charged: Clerk) -> None:
    with pytest.raises(InvalidField, match=r"request\.charged"):
        perform(1, action="back", request={"order": "1002", "amount": 1, "currency": "USD"})


# The guard against mass triggering


@pytest.mark.case("J1")
def test_more_of_one_kind_in_a_minute_than_the_limit_stop_dispatch_by_themselves(clerk: Clerk, settings: Any) -> None:
    settings.AFTERCALL_MASS_LIMIT = 10
    states = [perform(number).state for number in range(15)]
    assert states == [State.SUCCEEDED] * 10 + [State.READY] * 5
    assert len(clerk.calls) == 10
    stop = Limit.objects.get()
    assert (stop.kind, stop.tenant, stop.provider, stop.action, stop.set_by) == (
        "stop", "acme", "clerk", "keyed", limits.GUARD,
    )  # fmt: skip
    entry = Entry.objects.get(subject=stop.subject)
    assert (entry.actor, entry.reason_code) == (limits.GUARD, "mass_trigger")
    assert list(verify(registered_heads())) == []


@pytest.mark.case("J1")
def test_the_guard_stops_one_kind_of_one_tenant_and_no_other(clerk: Clerk, settings: Any) -> None:
    settings.AFTERCALL_MASS_LIMIT = 3
    for number in range(5):
        perform(number)
    assert perform(11, tenant="beta").state is State.SUCCEEDED
    assert perform(12, action="lookup").state is State.SUCCEEDED
    assert perform(13).state is State.READY


@pytest.mark.case("J1")
def test_after_a_release_the_guard_counts_anew(clerk: Clerk, settings: Any, clock: Clock) -> None:
    settings.AFTERCALL_MASS_LIMIT = 3
    for number in range(5):
        perform(number)
    release(Limit.objects.get(lifted_at=None))
    sweep()
    assert len(clerk.calls) == 5
    assert [perform(number).state for number in range(20, 25)] == [State.SUCCEEDED] * 3 + [State.READY] * 2


@pytest.mark.case("J1")
def test_a_slow_trickle_never_trips_the_guard(clerk: Clerk, settings: Any, clock: Clock) -> None:
    settings.AFTERCALL_MASS_LIMIT = 3
    for number in range(9):
        assert perform(number).state is State.SUCCEEDED
        clock.advance(seconds=25)
    assert not Limit.objects.exists()


# J1: a store that came back read-only


@pytest.fixture
def read_only(superuser_connection: psycopg.Connection[Any]) -> Iterator[Any]:
    """A switch that makes the application's database refuse writes, and takes it back."""
    name = connections["default"].settings_dict["NAME"]

    def switch(on: bool) -> None:
        superuser_connection.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = {on}')
        superuser_connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND usename = %s",
            [name, connections["default"].settings_dict["USER"]],
        )
        connections["default"].close()

    yield switch
    superuser_connection.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')


@pytest.mark.case("J1")
def test_where_the_claim_cannot_be_written_nothing_is_charged(clerk: Clerk, read_only: Any) -> None:
    perform(0)
    read_only(True)
    for _ in range(5):
        with pytest.raises(executor.LedgerUnavailable):
            perform(1)
    assert len(clerk.calls) == 1
    read_only(False)
    assert perform(1).state is State.SUCCEEDED
    assert len(clerk.effects) == 2


@pytest.mark.case("J1")
def test_where_only_the_answer_cannot_be_written_there_is_one_charge_and_a_look_up_settles_it(
    clerk: Clerk, read_only: Any, clock: Clock
) -> None:
    def then_read_only(call: Any) -> Any:
        read_only(True)
        return applied("r-1", **call.request)

    clerk.answers(then_read_only)
    outcome = perform(1)
    assert (outcome.state, outcome.reason_code) == (State.PENDING, "settlement_failed")
    for _ in range(3):
        with pytest.raises(executor.LedgerUnavailable):
            perform(1)
    assert len(clerk.effects) == 1
    read_only(False)
    assert perform(1).disposition is Disposition.IN_PROGRESS  # the lease of the lost worker still runs
    clock.advance(minutes=10)
    clerk.sees(found("r-1"))
    tasks.drain()
    assert row(outcome.pk).state == State.SUCCEEDED
    assert perform(1).disposition is Disposition.REPLAY
    assert len(clerk.effects) == 1
