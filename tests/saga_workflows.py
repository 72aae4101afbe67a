"""Workflows of the saga tests: reserve, charge and ship; a decision; branches; a lock; caps."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from pydantic import BaseModel, PositiveInt

from reconciliation.policy import RetryPolicy
from reconciliation.providers.base import Json
from reconciliation.workflows import Choice, Consent, Facts, Step, StepKind, Undo, Workflow

PATIENT = RetryPolicy(attempts=3, intervals=(1.0, 2.0), jitter=0.0)
PROPOSALS: list[Any] = []  # what the model proposes next; a test fills it
ASKED: list[Facts] = []


class Plan(BaseModel):
    """What the model must propose."""

    amount: PositiveInt
    secret: str = "none"


def propose(facts: Facts) -> Any:
    ASKED.append(facts)
    return PROPOSALS.pop(0)


def order(facts: Facts) -> Json:
    return {"order": facts.input["order"], "amount": 4200, "currency": "USD"}


def undone(facts: Facts, result: Json) -> Json:
    return {**order(facts), "id": result["id"]}


def reversible(name: str, **parts: Any) -> Step:
    undo = Undo(
        action="keyed", request=undone, retry=PATIENT, after=parts.pop("undo_after", None),
        consent=parts.pop("undo_consent", None),
    )  # fmt: skip
    return Step(name=name, provider="clerk", action="keyed", request=order, undo=undo, retry=PATIENT, **parts)


def flow(name: str, *steps: Step | Choice, **parts: Any) -> Workflow:
    return Workflow(name=name, business_object=lambda claim: str(claim["order"]), steps=steps, **parts)


SHIP = Step(name="ship", provider="clerk", action="keyed", request=order, kind=StepKind.PIVOT, retry=PATIENT)
TELL = Step(name="tell", provider="clerk", action="keyed", request=order, kind=StepKind.RETRYABLE, retry=PATIENT)
SAGA = flow("saga", reversible("reserve"), reversible("charge"), SHIP, TELL)
APART = flow(
    "apart",
    reversible("reserve", undo_after=()),
    reversible("charge", after=(), undo_after=()),
    Step(name="ship", provider="clerk", action="keyed", request=order, after=("reserve", "charge"),
         kind=StepKind.PIVOT, retry=PATIENT),
)  # fmt: skip
# A note is made beside the pivot, whichever comes first.
ASIDE = flow("aside", reversible("reserve"), SHIP, reversible("note", after=()))
ASKED_BACK = flow(
    "asked_back",
    reversible("reserve"),
    reversible("charge", undo_consent=Consent(policy="A charge is given back by one more person.")),
    SHIP,
)
NOT_BUILT: set[str] = set()  # steps whose undo cannot be built at the moment


def fragile(name: str) -> Step:
    def request(facts: Facts, result: Json) -> Json:
        return {**undone(facts, result), **({"of": result["missing"]} if name in NOT_BUILT else {})}

    undo = Undo(action="keyed", request=request, retry=PATIENT, after=())
    return Step(name=name, provider="clerk", action="keyed", request=order, undo=undo, retry=PATIENT)


FRAGILE = flow("fragile", fragile("reserve"), fragile("charge"), SHIP)
ASKED_APART = flow(
    "asked_apart",
    Step(name="reserve", provider="clerk", action="keyed", request=order, undo=Undo(action="keyed", request=undone),
         consent=Consent(policy="One more person.")),
    reversible("charge", after=()),
    SHIP,
)  # fmt: skip
ASKED_FIRST = flow("asked_first", replace(SHIP, consent=Consent(policy="One more person.")))
LASTING = flow(
    "lasting",
    Step(name="stamp", provider="clerk", action="keyed", request=order, cannot_undo="a stamp stays", retry=PATIENT),
    SHIP,
)
STAMP = Step(name="stamp", provider="clerk", action="keyed", request=order, cannot_undo="a stamp stays", retry=PATIENT)
LOOKED = flow("looked", Step(name="look", provider="clerk", action="read", request=order), SHIP)
STAMPED = flow("stamped", reversible("reserve"), reversible("charge"), STAMP, SHIP)
STAMP_FIRST = flow("stamp_first", reversible("reserve"), reversible("charge", undo_after=("stamp",)), STAMP, SHIP)
DECIDED = flow(
    "decided",
    Choice(name="plan", choose=propose, schema=Plan, shown=("amount",), proposals=2),
    Step(name="pay", provider="clerk", action="keyed", kind=StepKind.PIVOT,
         request=lambda facts: {**order(facts), "amount": facts.results["plan"]["amount"]}),
)  # fmt: skip
KEPT_APART = flow("kept_apart", reversible("reserve"), lock=lambda claim: f"order:{claim['order']}")
TIMED = flow(
    "timed", reversible("reserve"), replace(SHIP, retry=RetryPolicy(attempts=40, intervals=(60.0,), jitter=0.0)),
    max_elapsed=timedelta(minutes=10),
)  # fmt: skip
# Each of its steps waits longer than its time after a first failure.
HURRY = RetryPolicy(attempts=5, intervals=(300.0,), jitter=0.0, max_elapsed=170)
HURRIED = replace(reversible("reserve"), undo=Undo(action="keyed", request=undone, retry=HURRY))
HASTY = flow("hasty", HURRIED, replace(SHIP, retry=HURRY), replace(TELL, retry=HURRY))
LOCKED = flow("locked", SHIP, lock=lambda claim: f"order:{claim['order']}")
CAPPED = flow("capped", reversible("reserve"), SHIP, max_spend=100)


# Declarations that the check at start refuses; not among what is declared here, but they may be run all the same.
def ringed(name: str, **undo_after: tuple[str, ...] | None) -> Workflow:
    """Steps of which each undo waits for those named; None: for all later ones."""
    return flow(name, *(reversible(step, undo_after=after) for step, after in undo_after.items()), SHIP)


REFUSED = (ringed("ring_of_two", a=("b",), b=("a",)), ringed("ring_of_three", a=("b",), b=None, c=("a",)))
