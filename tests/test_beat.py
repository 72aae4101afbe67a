"""The beat: asks the queue for a sweep while something is due, and now and then while nothing is."""

import pytest
from django_q.models import OrmQ

from reconciliation import tasks, transition, workers
from reconciliation.models import Worker
from tests import cast


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
