"""The ten assertions that any claim of "once" must survive. Each counts effects at the outside system itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from audit.models import Entry
from reconciliation import reconciler, retrying, transition, workers
from reconciliation.executor import FingerprintMismatch
from reconciliation.models import JournalEntry, Operation
from tests.nursery import Desk
from tests.test_freeze import OLGA, frozen_at, sweep_for
from tests.test_kill import intent, kill_at, submit_again
from tests.test_same_identity import Crowd, perform
from tests.test_secrets import everything_stored
from tests.worker_driver import final_answer

pytestmark = pytest.mark.processes


def refund(**request: Any) -> dict[str, Any]:
    """The intent to refund order 1002, or another request under the same identity."""
    made = intent("keyed")
    made["request"] = {**made["request"], **request}
    return made


def journal(kind: str) -> list[str]:
    return list(JournalEntry.objects.filter(kind=kind).order_by("id").values_list("data", flat=True))


def test_1_twenty_workers_with_one_intent_make_one_refund_and_hear_one_answer(desk: Desk) -> None:
    workers.me()
    crowd = Crowd(20)
    answers = crowd.all_at_once(lambda: final_answer(refund()))
    crowd.leave()
    assert desk.world.pay.count(order="1002") == 1
    assert answers == [answers[0]] * 20
    assert desk.operation().attempts == 1


def test_2_another_intent_makes_another_refund_under_another_key(desk: Desk) -> None:
    perform(refund())
    again = refund()
    again["identity"]["intent_version"] = 2
    perform(again)
    keys = [effect["key"] for effect in desk.world.pay.effects(order="1002")]
    assert len(keys) == 2
    assert keys[0] != keys[1]
    assert {operation.key for operation in Operation.objects.all()} == set(keys)


def test_3_another_amount_under_a_known_identity_is_refused_and_nothing_is_sent(desk: Desk) -> None:
    perform(refund())
    with pytest.raises(FingerprintMismatch):
        perform(refund(amount=4201))
    assert [effect["fields"]["amount"] for effect in desk.world.pay.effects()] == [4200]
    assert len(desk.world.pay.requests()) == 1
    assert Entry.objects.get(event="refused").reason_code == "fingerprint_mismatch"


def test_4_a_crash_before_the_request_leaves_refunds_once(desk: Desk) -> None:
    kill_at(desk, "keyed", "sending")
    assert desk.world.pay.requests() == []
    desk.come_to_rest()
    assert desk.world.pay.count(order="1002") == 1
    assert desk.operation().state == "succeeded"
    desk.check()


def test_5_a_crash_between_the_refund_and_its_record_refunds_once_and_never_looks_failed(desk: Desk) -> None:
    kill_at(desk, "keyed", "answered")
    assert desk.world.pay.count(order="1002") == 1
    assert desk.operation().state == "pending"
    desk.come_to_rest()
    operation = desk.operation()
    assert (operation.state, operation.basis, desk.sent(operation)) == ("succeeded", "look_up", 1)
    moves = Entry.objects.filter(subject=str(operation.subject)).order_by("version").values_list("to_state", flat=True)
    assert list(moves) == ["pending", "ambiguous", "succeeded"]


def test_6_a_replay_by_the_provider_is_taken_for_the_same_refund(desk: Desk) -> None:
    desk.world.pay.fault("reset_after")
    desk.world.pay.set(lookup_down=True)
    perform(refund())
    desk.come_to_rest()
    operation = desk.operation()
    assert (operation.state, operation.attempts) == ("succeeded", 2)
    assert desk.world.pay.count(order="1002") == 1
    assert desk.sent(operation) == 2
    assert '"replayed": true' in journal("receipt")[-1]


def test_7_a_slow_original_and_its_redelivery_make_one_refund(desk: Desk) -> None:
    desk.world.pay.fault("hang_before_effect")
    first = desk.worker(do="perform", intent=refund())
    desk.world.pay.await_waiting()
    early = perform(refund())
    assert (early.state, early.disposition) == ("pending", "in_progress")
    desk.clock.advance(41)
    late = perform(refund())
    assert late.disposition == "in_progress", "a lease that ran out is no reason to send"
    desk.world.pay.release()
    first.ended()
    desk.come_to_rest()
    assert desk.world.pay.count(order="1002") == 1
    assert desk.sent(desk.operation()) == 1
    assert submit_again("keyed").replayed
    desk.check()


def test_8_a_stale_owner_that_wakes_and_sends_makes_no_second_refund(desk: Desk) -> None:
    worker = frozen_at(desk, "keyed", "claimed")
    desk.clock.advance(41)
    sweep_for(desk)
    assert desk.world.pay.count(order="1002") == 1, "another worker has done it"
    worker.thaw()
    worker.go_on("claimed")
    worker.ended()
    desk.come_to_rest()
    assert desk.world.pay.count(order="1002") == 1
    assert Entry.objects.filter(reason_code="stale_worker_refused").count() == 1
    desk.check()


def test_9_once_the_provider_has_forgotten_the_key_nobody_sends_under_it(desk: Desk) -> None:
    desk.world.pay.fault("reset_after")
    desk.world.pay.set(lookup_down=True)
    perform(refund())
    desk.clock.advance(days=2)
    desk.world.pay.advance(2 * 86400)
    desk.come_to_rest()
    operation = desk.operation()
    assert (operation.state, bool(operation.escalated_at)) == ("ambiguous", True)
    with pytest.raises(transition.KeyForgotten):
        retrying.retry(operation.pk, actor=OLGA, version=operation.version, reason="again")
    assert desk.sent(operation) == 1
    assert desk.world.pay.count(order="1002") == 1
    desk.world.pay.set(lookup_down=False)
    reconciler.reconcile(operation.pk, actor=OLGA)
    assert (desk.operation().state, desk.operation().basis) == ("succeeded", "look_up")


@pytest.mark.parametrize(("seconds_left", "sent"), [(5, 2), (0, 1)])
def test_9_the_boundary_of_retention_is_exact(desk: Desk, seconds_left: float, sent: int) -> None:
    desk.world.pay.fault("unavailable")
    perform(refund())
    operation = desk.operation()
    desk.clock.set(operation.same_key_until)
    desk.clock.advance(-seconds_left)
    if seconds_left:
        assert retrying.retry(operation.pk, actor=OLGA, reason="in time").state == "succeeded"
    else:
        with pytest.raises(transition.KeyForgotten):
            retrying.retry(operation.pk, actor=OLGA, reason="too late")
    assert desk.sent(operation) == sent
    assert desk.world.pay.count(order="1002") == sent - 1


def test_10_the_whole_story_can_be_read_and_no_secret_in_it(desk: Desk, caplog: Any, superuser_connection: Any) -> None:
    caplog.set_level(logging.DEBUG)
    desk.world.pay.fault("error_echo")
    perform(refund(card="card_CANARY5"))
    desk.world.pay.fault("reset_after")
    again = refund(card="card_CANARY5")
    again["identity"]["step"] = "act2"
    perform(again)
    desk.come_to_rest()
    stored, said = everything_stored(superuser_connection), caplog.text
    for secret in ("card_CANARY5", "sandbox-token", "Bearer"):
        assert secret not in stored
        assert secret not in said
    assert desk.world.pay.count(order="1002") == 1, "the first was refused, the second made once"
    operation = Operation.objects.get(step="act2")
    told = JournalEntry.objects.filter(operation=operation).order_by("id").values_list("kind", flat=True)
    assert list(told) == ["attempt_started", "no_answer", "finding"]
    assert operation.key not in said, "a key is a capability; ids are enough to find it"
    assert Entry.objects.filter(subject=str(operation.subject)).count() == operation.version
