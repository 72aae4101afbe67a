"""Jobs for tests: workflows of one step each at the scripted provider, and the beats that bring them to life."""

from uuid import uuid4

from reconciliation import jobs, runs, schedules, sweeping, transition
from reconciliation.actors import Actor, Permission
from reconciliation.jobs import Terms
from reconciliation.models import Job, Run, Slot
from reconciliation.states import RunState
from reconciliation.workflows import Step, Workflow

OLGA = Actor(id="person:1", kind="person", name="Olga Operator", permissions=frozenset(Permission))
EVE = Actor(id="person:9", kind="person", name="Eve Viewer", permissions=frozenset({Permission.VIEW}))


def one_step(name, action):
    return Workflow(
        name=name,
        business_object=lambda given: str(given["scheduled_for"]),
        shown=("scheduled_for", "window_start", "window_end", "order"),
        steps=(
            Step(
                name="act",
                provider="clerk",
                action=action,
                request=lambda facts: {
                    "order": facts.input["scheduled_for"],
                    "amount": 100,
                    "currency": "USD",
                },
                cannot_undo="it is a test",
            ),
        ),
    )


WORKFLOWS = (one_step("mailing", "keyed"), one_step("sweep", "natural"), one_step("telegram", "none"))
KEYED = WORKFLOWS[:1]


def job(name="nightly", *, at, clock, tenant="acme", actor=OLGA, **terms):
    """A job as it was made at `at`, where the clock stays."""
    clock.set(at)
    terms = Terms(**{"expression": "* * * * *", "workflow": "mailing", **terms})
    jobs.create(tenant=tenant, name=name, terms=terms, token=uuid4(), actor=actor)
    return Job.objects.get(tenant=tenant, name=name)


def slots(job, **which):
    return list(Slot.objects.filter(job=job, **which).order_by("scheduled_for"))


def told(job):
    """[(first, state, reason, count)] of a job's slots."""
    return [(f"{s.scheduled_for:%m-%d %H:%M}", s.state, s.reason_code, s.count) for s in slots(job)]


def work():
    """Do what the runs have to do, as the workers would."""
    for _ in range(20):
        if not sweeping.sweep(limit=200):
            return
    raise AssertionError("the same things are due again and again")


def hold(run):
    """Let a run stand where it is, unended."""
    transition.transition(
        run.subject,
        to=RunState.UNCERTAIN if run.state == RunState.RUNNING else None,
        version=run.version,
        patch={"due_at": None},
        fact=OLGA.fact("held"),
    )
    return Run.objects.get(pk=run.pk)


def take(run, *, seconds):
    """Let somebody hold a run."""
    transition.transition(
        run.subject,
        to=RunState.RUNNING,
        version=run.version,
        patch={"generation": run.generation + 1, "lease_owner": "w-3"},
        after={"lease_until": seconds, "due_at": seconds},
        fact=OLGA.fact("taken"),
    )
    return Run.objects.get(pk=run.pk)


def end(run):
    """Bring a run to its end."""
    return runs.advance(run.pk)


def edit(job, *, version=None, token=None, actor=OLGA, reason="as agreed", **terms):
    fresh = Job.objects.get(pk=job.pk)
    base = {name: getattr(fresh, name) for name in Terms.__dataclass_fields__ if name != "input"}
    return jobs.edit(
        fresh,
        terms=Terms(**{**base, **terms}),
        version=version or fresh.version,
        token=token or uuid4(),
        actor=actor,
        reason=reason,
    )


def tick():
    return schedules.tick()
