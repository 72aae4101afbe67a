"""Business code and publishers are really killed at every boundary of a message: never lost, never done twice."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from reconciliation.models import Message, Operation
from reconciliation.states import State
from tests.book import committed
from tests.nursery import Desk, Worker
from tests.test_local_kill import INTENT as ENTER
from tests.test_same_identity import Crowd

pytestmark = pytest.mark.processes


def refund(number: int = 1) -> dict[str, Any]:
    identity = {
        "tenant": "acme", "workflow_type": "desk", "workflow_id": f"m{number}", "step": "tell",
        "business_object": "1002",
    }  # fmt: skip
    request = {"order": "1002", "amount": 4200, "currency": "USD", "card": "card_1"}
    return {"identity": identity, "provider": "pay", "action": "refund.create", "request": request}


def mail() -> dict[str, Any]:
    """The harder one: the mail server knows no keys, so a second sending would be a second mail."""
    request = {"order": "1002", "to": "jo@example.com", "subject": "Hi", "body": "b"}
    return {**refund(), "provider": "mail", "action": "message.send", "request": request}


def at(desk: Desk, boundary: str, **job: Any) -> Worker:
    worker = desk.worker(stop_at=[boundary], **job)
    worker.reached(boundary)
    return worker


def traded(desk: Desk, intent: dict[str, Any]) -> None:
    desk.worker(do="trade", intent=intent).ended()
    assert Message.objects.get().state == "waiting"


def done_once(desk: Desk) -> None:
    desk.come_to_rest()
    desk.check()
    message, operation = Message.objects.get(), desk.operation()
    assert (message.state, message.operation_id, message.request_sealed) == ("published", operation.pk, "")
    assert operation.state == State.SUCCEEDED
    assert (desk.effects(operation), desk.sent(operation), desk.world.count()) == (1, 1, 1)


# The business's transaction


def test_killed_before_its_commit_the_business_has_neither_row_nor_message(desk: Desk) -> None:
    at(desk, "put", do="trade", intent=refund()).kill()
    desk.come_to_rest()
    assert (committed(desk.clock.connection), Message.objects.count(), desk.world.count()) == (0, 0, 0)


def test_killed_after_its_commit_the_message_is_published_all_the_same(desk: Desk) -> None:
    traded(desk, refund())
    assert committed(desk.clock.connection) == 1
    done_once(desk)


# The publisher


@pytest.mark.parametrize("intent", [refund(), mail()], ids=["with a key", "without a key"])
@pytest.mark.parametrize("boundary", ["taken", "born", "unmarked", "marked"])
def test_a_publisher_killed_at_any_boundary_is_made_up_for(desk: Desk, boundary: str, intent: dict[str, Any]) -> None:
    traded(desk, intent)
    at(desk, boundary, do="publish").kill()
    born = {"taken": 0, "born": 1, "unmarked": 1, "marked": 1}[boundary]
    assert Operation.objects.count() == born
    assert Message.objects.get().state == ("published" if boundary == "marked" else "waiting")
    done_once(desk)


@pytest.mark.parametrize("boundary", ["taken", "born", "unmarked"])
def test_a_publisher_that_freezes_while_others_go_on_changes_nothing_when_it_wakes(desk: Desk, boundary: str) -> None:
    traded(desk, mail())
    slow = at(desk, boundary, do="publish")
    slow.freeze()
    done_once(desk)
    slow.thaw()
    slow.go_on(boundary)
    slow.ended()
    done_once(desk)


def test_publishers_killed_one_after_the_other_lose_nothing(desk: Desk) -> None:
    for number in range(4):
        desk.worker(do="trade", intent=refund(number)).ended()
    for boundary in ("taken", "born", "unmarked", "born"):
        at(desk, boundary, do="publish").kill()
        desk.clock.advance(61)
    desk.come_to_rest()
    desk.check()
    assert set(Message.objects.values_list("state", flat=True)) == {"published"}
    assert [desk.effects(operation) for operation in Operation.objects.all()] == [1] * 4
    assert desk.world.count() == 4


def test_publishers_at_once_in_processes_of_their_own_publish_each_message_once(desk: Desk) -> None:
    for number in range(12):
        desk.worker(do="trade", intent=refund(number)).ended()
    first = at(desk, "born", do="publish", limit=5)  # holds some while the others work
    others = [desk.worker(do="publish", limit=5) for _ in range(3)]
    for worker in others:
        worker.ended()
    first.go_on("born")
    first.ended()
    desk.come_to_rest()
    desk.check()
    assert Operation.objects.count() == Message.objects.filter(state="published").count() == 12
    assert desk.world.count() == 12


def test_sweeps_of_many_threads_publish_and_do_it_once(desk: Desk) -> None:
    traded(desk, mail())
    crowd = Crowd(8)
    crowd.all_at_once(desk.sweep)
    crowd.leave()
    done_once(desk)


# Within a local effect

TELL = {**ENTER, "action": "tell"}


@pytest.mark.parametrize("boundary", ["in_effect", "put", "fenced", "written", "committed"])
def test_killed_in_a_local_effect_that_tells_the_outside_row_and_mail_are_one_each(desk: Desk, boundary: str) -> None:
    at(desk, boundary, do="perform", intent=TELL).kill()
    whole = boundary == "committed"
    assert (committed(desk.clock.connection), Message.objects.count()) == (int(whole), int(whole))
    desk.come_to_rest()
    desk.check()
    assert committed(desk.clock.connection) == 1
    assert desk.world.mail.count() == 1
    assert set(Operation.objects.values_list("state", flat=True)) == {"succeeded"}


# In order


def test_killed_between_two_of_one_order_the_second_still_comes_after_the_first(desk: Desk) -> None:
    for number in range(3):
        desk.worker(do="trade", intent=refund(number), order="order-1002").ended()
    desk.world.pay.fault("reset_after", action="refund.create")
    at(desk, "unmarked", do="sweep").kill()
    desk.come_to_rest()
    desk.check()
    sent = [each["fields"]["reference"] for each in desk.world.pay.effects()]
    asked = [operation.key for operation in Operation.objects.order_by("workflow_id")]
    assert sent == asked
    settled = list(Operation.objects.order_by("workflow_id").values_list("settled_at", "created_at"))
    assert all(before[0] <= after[1] for before, after in pairwise(settled))
