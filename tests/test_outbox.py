"""The outbox: a message commits with the business's own writes, and becomes one operation however it is published."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import ProgrammingError, connection, connections, transaction
from django_q.models import OrmQ

from audit import verify
from audit.models import Entry
from reconciliation import approvals, executor, outbox, publishing, registry, retention, sweeping, tasks, watch
from reconciliation.actors import Actor, Permission
from reconciliation.claims import Intent
from reconciliation.executor import Disposition
from reconciliation.keys import InvalidField
from reconciliation.models import Approval, Message, Operation, Signal
from reconciliation.policy import ErrorClass, RetryPolicy
from reconciliation.providers.base import OutcomeUnknown, Rejected
from reconciliation.workflows import Consent
from tests.book import DESK, Shelf, entry, trade
from tests.database import Clock
from tests.ledger import changes_without_audit
from tests.processes import wait_until
from tests.scripted import AGENT, OLGA, Clerk, order, row
from tests.test_same_identity import Crowd

EVE = Actor(id="person:5", kind="person", name="vi_eve", permissions=frozenset({Permission.VIEW}))


def wish(number: int | str = 1, action: str = "keyed", **parts: Any) -> Intent:
    return order(action, workflow_id=f"w{number}", **parts)


def put(intent: Intent | None = None, **how: Any) -> int:
    with transaction.atomic():
        return outbox.put(intent or wish(), actor=DESK, **how)


def message(pk: int) -> Message:
    return Message.objects.get(pk=pk)


def states() -> list[str]:
    return list(Message.objects.order_by("id").values_list("state", flat=True))


def publish_all(clock: Clock, rounds: int = 12) -> None:
    """Publish, and move the clock on to what is due next, until nothing waits."""
    for _ in range(rounds):
        publishing.publish(limit=50)
        waiting = Message.objects.filter(state="waiting").order_by("due_at").first()
        if waiting is None:
            return
        clock.set(max(clock.now(), waiting.due_at))
    raise AssertionError(f"after {rounds} rounds still waiting: {list(Message.objects.values())}")


# Put


def test_a_message_commits_with_the_writes_that_it_belongs_to(book: Shelf) -> None:
    pk = trade(wish())
    assert (book.rows(), message(pk).state) == (1, "waiting")


def test_where_the_business_rolls_back_there_is_no_message_and_no_effect(book: Shelf, clerk: Clerk) -> None:
    with contextlib.suppress(LookupError), transaction.atomic():
        trade(wish())
        raise LookupError
    sweeping.sweep()
    assert (book.rows(), Message.objects.count(), Operation.objects.count(), clerk.calls) == (0, 0, 0, [])
    assert OrmQ.objects.count() == 0, "and nobody was woken"


def test_it_cannot_be_put_beside_a_transaction(clerk: Clerk) -> None:
    with pytest.raises(RuntimeError, match="into the transaction of what it is about"):
        outbox.put(wish(), actor=DESK)


def test_the_worker_is_woken_once_when_the_transaction_commits(clerk: Clerk) -> None:
    with transaction.atomic():
        for number in range(5):
            outbox.put(wish(number), actor=DESK)
        assert OrmQ.objects.count() == 0
    assert OrmQ.objects.count() == 1


def test_a_wake_up_that_fails_does_not_fail_the_business(clerk: Clerk, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no queue")

    monkeypatch.setattr(outbox, "async_task", broken)
    assert message(put()).state == "waiting"
    assert tasks._anything_due(), "the beat finds it all the same"


def test_what_is_asked_for_lies_sealed_and_goes_when_it_is_published(clerk: Clerk) -> None:
    pk = put(wish(request={"order": "1002", "amount": 4200, "currency": "USD", "card": "card_of_jane"}))
    stored = str(Message.objects.filter(pk=pk).values().get())
    assert "card_of_jane" not in stored
    publishing.publish(limit=5)
    assert message(pk).request_sealed == ""
    assert Operation.objects.get().request["card"] == "card_of_jane"


def test_asking_twice_for_the_same_is_one_message(clerk: Clerk) -> None:
    assert put() == put()
    publishing.publish(limit=5)
    assert put() == Message.objects.get().pk, "also when it is published already"
    assert states() == ["published"]


def test_asking_for_something_else_under_the_same_identity_is_refused(clerk: Clerk) -> None:
    pk = put()
    other = wish(request={"order": "1002", "amount": 1, "currency": "USD"})
    for changed in (other, wish(action="none"), replace(wish(), consent=Consent())):
        with pytest.raises(outbox.MessageMismatch, match=f"message {pk} asks for something else"):
            put(changed)
    assert put(wish(intent_version=2)) != pk


@pytest.mark.parametrize(
    ("broken", "field"),
    [
        (lambda: wish(request={"n": float("nan")}), "request"),
        (lambda: wish(request=[1]), "request"),
        (lambda: replace(wish(), provider=""), "provider"),
        (lambda: replace(wish(), action="a" * 121), "action"),
        (lambda: replace(wish(), on_behalf_of="a\0b"), "on_behalf_of"),
        (lambda: replace(wish(), requested_by="half \ud800 of a pair"), "requested_by"),
        (lambda: replace(wish(), run_id=7), "intent"),
    ],
)
def test_what_can_never_be_recorded_is_refused_at_once(clerk: Clerk, broken: Callable[[], Intent], field: str) -> None:
    with pytest.raises(InvalidField, match=f"^{field}: "):
        put(broken())


@pytest.mark.parametrize("order_", ["x" * 201, "a\0b", "\ud800"])
def test_an_order_that_cannot_be_kept_is_refused_and_the_business_goes_on(book: Shelf, order_: str) -> None:
    with transaction.atomic():
        with pytest.raises(InvalidField, match=r"^order: "):
            outbox.put(wish(1), actor=DESK, order=order_)
        trade(wish(2))
    assert (book.rows(), states()) == (1, ["waiting"])


def test_two_who_ask_at_once_make_one_message(ledger_db: Any) -> None:
    crowd = Crowd(12)
    answers = crowd.all_at_once(put)
    crowd.leave()
    assert len(set(answers)) == 1
    assert Message.objects.count() == 1


def test_a_process_without_the_provider_can_ask_for_it(clerk: Clerk) -> None:
    assert message(put(wish(provider="elsewhere"))).state == "waiting"


# Publish


def test_it_becomes_an_operation_and_the_same_sweep_does_it(clerk: Clerk, superuser_connection: Any) -> None:
    pk = put()
    sweeping.sweep()
    operation = Operation.objects.get()
    assert (message(pk).state, message(pk).operation_id) == ("published", operation.pk)
    assert (operation.state, operation.requested_by, len(clerk.calls)) == ("succeeded", "agent:desk", 1)
    assert changes_without_audit(superuser_connection) == []
    born = Entry.objects.get(subject=f"operation:{operation.pk}", version=1)
    assert (born.actor, born.reason_code, born.to_state) == ("system:outbox", "queued", "ready")
    assert f'"message":{pk}' in bytes(born.canonical).decode()


def test_all_that_was_asked_for_comes_through(clerk: Clerk) -> None:
    retry = RetryPolicy(attempts=7, intervals=(1.0, 2.0), never=frozenset({ErrorClass.UNAVAILABLE}))
    asked = replace(
        wish(business_object=7), retry=retry, spent_is_final=False, on_behalf_of="person:1", requested_by="agent:x",
        owners=("person:9",),
    )  # fmt: skip
    got = outbox.intent_of(message(put(asked)))
    assert got == replace(asked, intended_at=got.intended_at)
    assert got.intended_at == Message.objects.get().created_at


def test_what_needs_consent_is_asked_for_and_not_done_before(clerk: Clerk) -> None:
    put(replace(wish(), consent=Consent(policy="every one", when=lambda request: True), owners=("person:9",)))
    sweeping.sweep()
    asked = Approval.objects.get()
    assert (Operation.objects.get().state, states(), clerk.calls) == ("awaiting_approval", ["published"], [])
    assert (asked.policy, asked.forbidden) == ("every one", ["agent:desk", "person:9"])
    sweeping.sweep()
    assert clerk.calls == []
    approvals.approve(asked, _press(asked), OLGA)
    sweeping.sweep()
    assert (Operation.objects.get().state, len(clerk.calls)) == ("succeeded", 1)


def _press(asked: Approval) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(version=asked.version, reason="fine", inputs={})


def test_what_needs_no_consent_by_its_rule_is_not_asked_for(clerk: Clerk) -> None:
    put(replace(wish(), consent=Consent(when=lambda request: False)))
    sweeping.sweep()
    assert (Operation.objects.get().state, Approval.objects.count()) == ("succeeded", 0)


def test_publishing_again_what_was_born_already_makes_no_second_one(clerk: Clerk, clock: Clock) -> None:
    pk = put()
    first = executor.submit(outbox.intent_of(message(pk)), actor=publishing.PUBLISHER)
    sweeping.sweep()
    assert (message(pk).state, message(pk).operation_id) == ("published", first.pk)
    assert (Operation.objects.count(), len(clerk.calls)) == (1, 1)


@pytest.mark.parametrize("ended", ["unknown", "refused"])
def test_nor_where_the_one_that_was_born_has_moved_on(clerk: Clerk, ended: str) -> None:
    pk = put(wish(action="none"))
    executor.submit(outbox.intent_of(message(pk)), actor=publishing.PUBLISHER)
    clerk.answers(OutcomeUnknown("lost") if ended == "unknown" else Rejected("no", status=402))
    executor.perform(wish(action="none"), actor=AGENT)
    publishing.publish(limit=5)
    assert (states(), len(clerk.calls)) == (["published"], 1)


def test_nor_where_its_row_was_pruned_long_ago(clerk: Clerk, clock: Clock) -> None:
    pk = put()
    sweeping.sweep()
    clock.advance(days=400)
    retention.tend()
    assert (Operation.objects.count(), Message.objects.count()) == (0, 0)
    again = put(replace(wish(), intended_at=clock.now()))
    publishing.publish(limit=5)
    assert message(again).state == "published"
    assert (again != pk, Operation.objects.count(), len(clerk.calls)) == (True, 0, 1)


def test_submitting_sends_nothing_and_says_that_it_waits(clerk: Clerk) -> None:
    told = executor.submit(wish(), actor=AGENT)
    assert (told.state, told.disposition, told.outcome, clerk.calls) == ("ready", Disposition.QUEUED, "not_sent", [])
    assert executor.submit(wish(), actor=AGENT).pk == told.pk
    sweeping.sweep()
    assert executor.submit(wish(), actor=AGENT).disposition is Disposition.REPLAY
    with pytest.raises(executor.FingerprintMismatch):
        executor.submit(wish(request={"order": "1002", "amount": 1, "currency": "USD"}), actor=AGENT)
    assert len(clerk.calls) == 1


def test_a_batch_is_no_larger_than_asked_for(clerk: Clerk) -> None:
    for number in range(5):
        put(wish(number))
    assert publishing.publish(limit=3) == 3
    assert states().count("published") == 3
    assert publishing.publish(limit=3) == 2


def test_a_drain_empties_a_long_outbox(clerk: Clerk, settings: Any) -> None:
    settings.AFTERCALL_SWEEP_BATCH = 3
    for number in range(10):
        put(wish(number))
    tasks.drain()
    assert states() == ["published"] * 10
    assert Operation.objects.filter(state="succeeded").count() == 10


def test_two_publishers_at_once_take_different_messages_and_make_one_operation_each(
    clerk: Clerk, superuser_connection: Any
) -> None:
    for number in range(40):
        put(wish(number))
    crowd = Crowd(4)
    counts = crowd.all_at_once(lambda: publishing.publish(limit=15))
    crowd.leave()
    publishing.publish(limit=50)
    assert all(isinstance(count, int) for count in counts), counts
    assert states() == ["published"] * 40
    assert Operation.objects.count() == 40
    assert changes_without_audit(superuser_connection) == []


def test_a_publisher_does_not_wait_for_a_message_that_another_holds(clerk: Clerk, superuser_connection: Any) -> None:
    held, free = put(wish(1)), put(wish(2))
    superuser_connection.execute("BEGIN")
    superuser_connection.execute("SELECT 1 FROM reconciliation_message WHERE id = %s FOR UPDATE", [held])
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '2s'")
    publishing.publish(limit=5)
    superuser_connection.execute("ROLLBACK")
    connection.close()
    assert (message(held).state, message(free).state) == ("waiting", "published")


def test_one_that_a_lost_publisher_took_comes_back(clerk: Clerk, clock: Clock, settings: Any) -> None:
    pk = put()
    assert outbox.take(limit=5) == [pk]
    assert (outbox.take(limit=5), publishing.anything_due()) == ([], False)
    clock.advance(settings.AFTERCALL_TAKE_AGAIN + 1)
    sweeping.sweep()
    assert (message(pk).state, len(clerk.calls)) == ("published", 1)


def test_a_slow_publisher_marks_nothing_that_another_or_a_person_has_dealt_with(clerk: Clerk) -> None:
    pk = put(wish(provider="nowhere"))
    slow = message(pk)
    outbox.stick(message(pk), problem="no_handler", detail="-", fact=publishing.PUBLISHER.fact("no_handler"))
    assert not outbox.published(slow, operation=1)
    assert not outbox.later(slow, problem="x", detail="x", seconds=1)
    assert not outbox.stick(slow, problem="x", detail="x", fact=publishing.PUBLISHER.fact("x"))
    assert message(pk).problem == "no_handler"


def test_a_slow_publisher_does_not_undo_what_a_person_decided_meanwhile(clerk: Clerk) -> None:
    """It waits again, as when it was read, and is another one all the same: two decisions lie in between."""
    slow, fact = message(put()), publishing.PUBLISHER.fact("tried")
    assert outbox.stick(slow, problem="no_handler", detail="", fact=fact)
    assert outbox.release(message(slow.pk), fact=fact)
    assert not outbox.stick(slow, problem="no_handler", detail="", fact=fact)
    assert not outbox.later(slow, problem="no_handler", detail="", seconds=60)
    assert (message(slow.pk).state, message(slow.pk).version, message(slow.pk).tries) == ("waiting", 2, 0)


# Within a local effect


def test_a_message_of_a_local_effect_commits_with_effect_and_settlement(book: Shelf, superuser_connection: Any) -> None:
    executor.perform(entry("tell"), actor=AGENT)
    assert (book.rows(), states()) == (1, ["waiting"])
    written = ("test_book", "reconciliation_operation", "reconciliation_message")
    commits = {superuser_connection.execute(f"SELECT xmin FROM {table}").fetchone() for table in written}
    assert len(commits) == 1, "one transaction wrote all three"
    assert OrmQ.objects.count() == 1


def test_a_local_effect_that_is_rolled_back_asks_for_nothing(book: Shelf, clock: Clock) -> None:
    book.does(ValueError())
    outcome = executor.perform(entry("tell"), actor=AGENT)
    assert (outcome.state, book.rows(), states(), OrmQ.objects.count()) == ("failed_retryable", 0, [], 0)
    clock.set(row(outcome.pk).due_at)
    executor.perform(entry("tell"), actor=AGENT)
    assert (book.rows(), states()) == (1, ["waiting"])


# In order


def test_in_one_order_each_waits_until_the_one_before_it_is_settled(clerk: Clerk, clock: Clock) -> None:
    clerk.answers(OutcomeUnknown("lost"))
    first, second, third = (put(wish(number, action="none"), order="order-1002") for number in range(3))
    sweeping.sweep()
    assert (states(), len(clerk.calls)) == (["published", "waiting", "waiting"], 1)
    clock.advance(minutes=5)
    sweeping.sweep()
    assert states()[1] == "waiting", "the first one's outcome is unknown"
    assert not publishing.anything_due()
    known = Operation.objects.get()
    from reconciliation import actions

    press = actions.Press(action="resolve_applied", token=uuid4(), version=known.version, reason="seen in the bank")
    actions.act(known, press, actor=OLGA)
    for _ in range(2):
        sweeping.sweep()
    assert states() == ["published"] * 3
    assert [call.request for call in clerk.calls] == [wish().request] * 3
    assert first < second < third


def test_other_orders_and_other_tenants_do_not_wait(clerk: Clerk) -> None:
    clerk.answers(OutcomeUnknown("lost"))
    put(wish(1, action="none"), order="a")
    put(wish(2), order="a")
    put(wish(3), order="b")
    put(wish(4, tenant="globex"), order="a")
    put(wish(5))
    sweeping.sweep()
    assert states() == ["published", "waiting", "published", "published", "published"]


def test_what_is_behind_a_stuck_one_waits_for_the_person_and_then_goes_on(clerk: Clerk, clock: Clock) -> None:
    bad = put(wish(1, provider="nowhere"), order="a")
    put(wish(2), order="a")
    clock_on(clock)
    assert states() == ["stuck", "waiting"]
    assert pressed(publishing.discard, bad).verdict == "done"
    sweeping.sweep()
    assert states() == ["discarded", "published"]


def clock_on(clock: Clock, rounds: int = 6) -> None:
    for _ in range(rounds):
        sweeping.sweep()
        clock.advance(seconds=40)


def test_the_order_is_that_of_the_commits_and_not_of_the_ids(clerk: Clerk) -> None:
    """Whoever puts second waits for the first to commit; else it could be published before the first is seen."""
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with transaction.atomic():
            outbox.put(wish("first"), actor=DESK, order="a")
            begun.set()
            go_on.wait(20)
        connections.close_all()

    def second() -> None:
        put(wish("second"), order="a")
        done.set()
        connections.close_all()

    threads = [threading.Thread(target=work) for work in (first, second)]
    threads[0].start()
    begun.wait(20)
    threads[1].start()
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    wait_until(lambda: _asked(waits) == 1)
    assert not done.is_set()
    publishing.publish(limit=5)
    assert Operation.objects.count() == 0
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert list(Message.objects.order_by("id").values_list("workflow_id", flat=True)) == ["wfirst", "wsecond"]


def _asked(statement: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute(statement)
        (number,) = cursor.fetchone()
    return int(number)


# What cannot be published


def stuck(clock: Clock, intent: Intent) -> Message:
    pk, other = put(intent), put(wish("other"))
    clock_on(clock)
    assert message(other).state == "published", "it holds up no other"
    found = message(pk)
    assert found.state == "stuck"
    return found


@pytest.mark.parametrize(
    ("intent", "problem", "says"),
    [
        (lambda: wish(provider="nowhere"), "no_handler", "no provider 'nowhere' is configured here"),
        (lambda: wish(action="nothing"), "no_handler", "provider 'clerk' has no action 'nothing'"),
        (lambda: wish(request={"order": "1"}), "invalid_request", "request.amount: must be a whole number"),
    ],
)
def test_a_poisonous_message_goes_to_a_person_with_its_reason(
    clerk: Clerk, clock: Clock, intent: Callable[[], Intent], problem: str, says: str
) -> None:
    found = stuck(clock, intent())
    assert found.problem == problem
    assert says in found.detail
    decided = Entry.objects.get(subject=f"message:{found.pk}")
    assert (decided.actor, decided.from_state, decided.to_state, decided.version) == (
        "system:outbox", "waiting", "stuck", 1,
    )  # fmt: skip
    assert list(verify.verify(verify.registered_heads())) == []


def test_an_identity_that_is_known_with_another_request_goes_to_a_person(clerk: Clerk, clock: Clock) -> None:
    executor.perform(wish(request={"order": "1002", "amount": 1, "currency": "USD"}), actor=AGENT)
    found = stuck(clock, wish())
    assert (found.problem, len(clerk.calls)) == ("fingerprint_mismatch", 2)


def test_one_that_is_older_than_anything_that_is_known_goes_to_a_person(clerk: Clerk, clock: Clock) -> None:
    found = stuck(clock, replace(wish(), intended_at=clock.now() - timedelta(days=400)))
    assert found.problem == "too_old"


def test_one_that_waited_longer_than_anything_is_remembered_is_not_done(clerk: Clerk, clock: Clock) -> None:
    """A publisher that was away for a year must not send what somebody may have done by hand since."""
    pk = put()
    clock.advance(days=400)
    publishing.publish(limit=5)
    assert (message(pk).state, message(pk).problem, clerk.calls) == ("stuck", "too_old", [])


def test_a_newer_version_that_was_asked_for_first_goes_to_a_person(clerk: Clerk, clock: Clock) -> None:
    executor.perform(wish(intent_version=2), actor=AGENT)
    assert stuck(clock, wish()).problem == "newer_version_exists"


def test_one_whose_older_version_is_unknown_waits_for_it_and_not_for_ever(clerk: Clerk, clock: Clock) -> None:
    clerk.answers(OutcomeUnknown("lost"))
    executor.perform(wish(action="none"), actor=AGENT)
    pk = put(wish(action="none", intent_version=2))
    clock_on(clock)
    assert (message(pk).state, message(pk).problem) == ("waiting", "older_version_open")
    clock.advance(hours=2)
    publishing.publish(limit=5)
    assert message(pk).state == "stuck"


def test_a_seal_key_that_is_missing_is_waited_for_and_then_told(clerk: Clerk, clock: Clock, settings: Any) -> None:
    pk = put()
    keys = settings.AFTERCALL_SEAL_KEYS
    from cryptography.fernet import Fernet

    settings.AFTERCALL_SEAL_KEYS = [Fernet.generate_key().decode()]
    publishing.publish(limit=5)
    assert (message(pk).state, message(pk).problem) == ("waiting", "request_unreadable")
    settings.AFTERCALL_SEAL_KEYS = keys
    publish_all(clock)
    assert message(pk).state == "published"


def test_a_provider_that_is_being_rolled_out_is_waited_for(clerk: Clerk, clock: Clock, monkeypatch: Any) -> None:
    pk = put()
    with monkeypatch.context() as patched:
        patched.setattr(registry, "providers", dict)
        publishing.publish(limit=5)
    assert (message(pk).state, message(pk).tries) == ("waiting", 1)
    publish_all(clock)
    assert (message(pk).state, message(pk).problem) == ("published", "")


def test_a_bug_in_publishing_one_stops_no_other(clerk: Clerk, clock: Clock, monkeypatch: Any) -> None:
    plain = executor.submit

    def broken(intent: Intent, **how: Any) -> Any:
        if intent.identity.workflow_id == "w1":
            raise ZeroDivisionError("secret")
        return plain(intent, **how)

    monkeypatch.setattr(executor, "submit", broken)
    found = stuck(clock, wish())
    assert (found.problem, found.detail) == ("cannot_be_published", "Publishing it raised ZeroDivisionError.")
    assert message(found.pk).tries == publishing.TRIES - 1


# A person


def pressed(verb: Any, pk: int, *, actor: Actor = OLGA, reason: str = "looked into it", **how: Any) -> Any:
    whole = {"version": message(pk).version, "token": uuid4(), **how}
    return verb(message(pk), actor=actor, reason=reason, **whole)


def test_a_person_has_it_tried_again_when_the_cause_is_gone(clerk: Clerk, clock: Clock, settings: Any) -> None:
    found = stuck(clock, wish(provider="later"))
    answer = pressed(publishing.release, found.pk)
    assert (answer.verdict, message(found.pk).state, message(found.pk).tries) == ("done", "waiting", 0)
    try:
        registry.providers()["later"] = registry.provider("clerk")
        sweeping.sweep()
    finally:
        registry.forget()
    assert message(found.pk).state == "published"
    told = Entry.objects.filter(subject=f"message:{found.pk}").order_by("seq").values_list("reason_code", flat=True)
    assert list(told) == ["no_handler", "message_released"]
    assert list(verify.verify(verify.registered_heads())) == []


def test_a_discarded_one_is_never_done_and_its_request_is_gone(clerk: Clerk, clock: Clock) -> None:
    found = stuck(clock, wish(provider="nowhere"))
    assert pressed(publishing.discard, found.pk).verdict == "done"
    clock_on(clock, rounds=2)
    assert (message(found.pk).state, message(found.pk).request_sealed) == ("discarded", "")
    assert len(clerk.calls) == 1, "the other one"


def test_what_was_discarded_is_not_done_when_business_code_asks_for_it_again_much_later(
    clerk: Clerk, clock: Clock
) -> None:
    found = stuck(clock, wish(provider="nowhere"))
    assert pressed(publishing.discard, found.pk).verdict == "done"
    clock.advance(days=60)
    tally = retention.tend()
    assert (tally.messages, Message.objects.filter(state="discarded").count()) == (1, 1), "the other one went"
    assert put(wish(provider="nowhere")) == found.pk
    clock_on(clock, rounds=2)
    assert message(found.pk).state == "discarded"


def test_two_people_one_decision(clerk: Clerk, clock: Clock) -> None:
    found = stuck(clock, wish(provider="nowhere"))
    token = uuid4()
    first = pressed(publishing.discard, found.pk, token=token)
    assert pressed(publishing.discard, found.pk, token=token) == first, "the same press gets the same answer"
    late = pressed(publishing.release, found.pk, version=found.version)
    assert (late.verdict, message(found.pk).state) == ("conflict", "discarded")


@pytest.mark.parametrize("verb", [publishing.release, publishing.discard])
def test_whose_role_does_not_reach_and_who_gives_no_reason_are_refused(clerk: Clerk, clock: Clock, verb: Any) -> None:
    found = stuck(clock, wish(provider="nowhere"))
    assert "Your role does not allow this" in pressed(verb, found.pk, actor=EVE).message
    assert "A reason is needed" in pressed(verb, found.pk, reason=" ").message
    assert message(found.pk).state == "stuck"
    assert Entry.objects.filter(subject=f"message:{found.pk}", event="refused").count() == 2


# What is seen of it


def test_the_backlog_says_how_much_waits_and_since_when(clerk: Clerk, clock: Clock) -> None:
    assert publishing.backlog(before=clock.now()) == publishing.Backlog(0, None, 0, 0)
    put(wish(1), order="a"), put(wish(2), order="a")
    clock.advance(minutes=2)
    seen = publishing.backlog(before=clock.now() - timedelta(minutes=1))
    assert (seen.waiting, seen.late, seen.stuck) == (2, 1, 0)
    assert seen.since == Message.objects.earliest("id").created_at


def test_an_outbox_that_nobody_publishes_is_a_signal_until_somebody_does(clerk: Clerk, clock: Clock) -> None:
    put()
    clock.advance(minutes=3)
    watch.look()
    assert Signal.objects.get(kind="outbox_behind").detail == "1 due, 1 wait"
    publishing.publish(limit=5)
    watch.look()
    assert Signal.objects.get(kind="outbox_behind").cleared_at is not None


def test_what_waits_in_its_order_is_not_late(clerk: Clerk, clock: Clock) -> None:
    clerk.answers(OutcomeUnknown("lost"))
    put(wish(1, action="none"), order="a"), put(wish(2), order="a")
    sweeping.sweep()
    clock.advance(minutes=3)
    watch.look()
    assert not Signal.objects.filter(kind="outbox_behind").exists()


def test_a_stuck_message_is_a_signal_of_its_tenant(clerk: Clerk, clock: Clock) -> None:
    found = stuck(clock, wish(provider="nowhere"))
    watch.look()
    signal = Signal.objects.get(kind="message_stuck")
    assert (signal.tenant, signal.subject, signal.since) == ("acme", f"message:{found.pk}", found.changed_at)


def test_what_is_over_goes_after_a_while_and_what_is_open_never_does(clerk: Clerk, clock: Clock) -> None:
    clerk.answers(OutcomeUnknown("lost"))
    unknown, waiting = put(wish(1, action="none"), order="a"), put(wish(2), order="a")
    clock_on(clock)  # alone, so that the lost answer is its own: what is due at one moment is done in any order
    bad = put(wish(3, provider="nowhere"))
    done = put(wish(4))
    clock_on(clock)
    clock.advance(days=13)
    assert retention.tend().messages == 0
    clock.advance(days=2)
    tally = retention.tend()
    assert tally.messages == 1
    assert "1 messages forgotten" in tally.told()
    assert set(Message.objects.values_list("pk", flat=True)) == {unknown, waiting, bad}, "not what orders another"
    assert done not in {unknown, waiting, bad}
    assert list(verify.verify(verify.registered_heads())) == []


def test_the_application_role_cannot_take_a_message_away(clerk: Clerk) -> None:
    put()
    with pytest.raises(ProgrammingError, match="permission denied"), connection.cursor() as cursor:
        cursor.execute("DELETE FROM reconciliation_message")
