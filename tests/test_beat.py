"""The beat: asks the queue for a sweep while something is due, and now and then while nothing is."""

import pytest
from django_q.models import OrmQ

from audit.models import Entry
from reconciliation import anchor, tasks, transition, workers
from reconciliation.executor import perform
from reconciliation.models import Tick, Worker
from tests import cast
from tests.scripted import AGENT, order


@pytest.fixture(autouse=True)
def new_process(ledger_db):
    workers._known.clear()


def sweep_of_a_worker():
    OrmQ.objects.all().delete()
    tasks.drain()


def test_a_quiet_ledger_still_sees_its_workers(clock):
    tasks.beat_once()
    assert OrmQ.objects.count() == 1, "the first sweep is asked for at once"
    sweep_of_a_worker()
    tasks.beat_once()
    assert OrmQ.objects.count() == 0, "not at every beat"
    clock.advance(11)
    tasks.beat_once()
    assert OrmQ.objects.count() == 1
    seen = Worker.objects.get(name=workers.me()).seen_at
    sweep_of_a_worker()
    assert Worker.objects.get(name=workers.me()).seen_at >= seen


def test_due_work_is_asked_for_at_once_and_not_over_and_over(clock):
    sweep_of_a_worker()
    cast.operation(due_at=transition.database_now())
    for _ in range(5):
        tasks.beat_once()
    assert OrmQ.objects.count() == 2, "one for each worker of the queue"


def test_a_clock_that_is_set_back_keeps_no_duty_waiting_for_as_long(clerk, clock):
    sweep_of_a_worker()
    tasks.beat_once()
    perform(order(), actor=AGENT)
    clock.jump(-3600)
    tasks.beat_once()
    assert OrmQ.objects.count() == 2, "a sweep and a round of retention: what lies in the future was not lately"
    now, newest = clock.now(), Entry.objects.order_by("-id").values_list("id", flat=True)[0]
    for name in ("anchor", "watch", "retention"):
        assert Tick.objects.get(name=name).at <= now, name
    known = anchor.current().read()
    assert known is not None
    assert known.position >= newest - 1  # all but the entry of the setting itself, at the most
