"""Workflows that the run page has to draw: side by side, with decisions, caps, a lock, and undos that get stuck."""

from datetime import timedelta

from pydantic import BaseModel

from reconciliation.workflows import Choice, Step, StepKind, Undo, Workflow


class Plan(BaseModel):
    tier: str
    card: str


PROPOSALS: list[object] = []


def plan(facts):
    return PROPOSALS.pop(0) if PROPOSALS else {"tier": "gold", "card": "4242"}


def _of(facts):
    return {"order": facts.input["order"], "amount": 4200, "currency": "USD"}


def _named(facts, result):
    return {"order": facts.input["order"], "of": result["id"]}


def _step(name, *, kind=StepKind.COMPENSABLE, undo=True, after=None, why="", undo_after=None):
    back = Undo(action="natural", request=_named, after=undo_after) if undo else None
    return Step(name=name, provider="clerk", action="keyed", request=_of, kind=kind, undo=back, cannot_undo=why,
                after=after)  # fmt: skip


FORKED = Workflow(
    name="forked",
    business_object=lambda given: given["order"],
    shown=("order",),
    lock=lambda given: f"order {given['order']}",
    max_elapsed=timedelta(hours=2),
    max_spend=500,
    steps=(
        Choice(name="plan", choose=plan, schema=Plan, shown=("tier",), proposals=2),
        _step("hotel"),
        _step("flight", after=("plan",)),
        _step("note", undo=False, why="a note that was read stays read", after=("hotel", "flight")),
        _step("pay", kind=StepKind.PIVOT, undo=False),
        _step("mail", kind=StepKind.RETRYABLE, undo=False),
    ),
)

# Papers are printed and posted beside the pivot, whichever comes first.
ASIDE = Workflow(
    name="aside",
    business_object=lambda given: given["order"],
    shown=("order",),
    steps=(
        _step("hotel"),
        _step("pay", kind=StepKind.PIVOT, undo=False),
        _step("mail", kind=StepKind.RETRYABLE, undo=False),
        _step("print", after=()),
        _step("post", after=("print",)),
        _step("stamp", after=("post",), undo=False, why="a stamp stays"),
    ),
)
