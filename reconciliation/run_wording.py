"""A run in words: pure functions from its row and its operations. No query, no clock of its own."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from .leases import HANDLER, LOCK
from .models import Operation, Run
from .states import RUN_TERMINAL, Basis, RunState, State
from .wording import duration, reason, run_label


def run_lede(run: Run, operations: Iterable[Operation]) -> str:
    """Where a run stands and why, in one or two sentences."""
    every = list(operations)
    unknown = [each.step for each in every if each.state == State.AMBIGUOUS]
    called = [each.step for each in every if each.escalated_at]
    if run.state in RUN_TERMINAL:
        return _ended(run, unknown, called) + _on_a_word(every)
    if run.escalated_at:
        return f"It cannot go on by itself: {reason(run.escalation_reason)}."
    if called:
        return f"It waits for a person to decide about {', '.join(called)}."
    if unknown:
        return f"It waits until the outcome of {', '.join(unknown)} is known."
    if _for_others(run):
        return f"It {_for_others(run)}."
    return {
        RunState.PENDING: f"It goes on when {run.waiting_for or 'it'} is due.",
        RunState.RUNNING: f"A worker holds it{f', at {run.waiting_for}' if run.waiting_for else ''}.",
        RunState.AWAITING_APPROVAL: "It waits for a person's consent.",
        RunState.UNCERTAIN: "A step's outcome was unknown; it goes on as soon as that is settled.",
        RunState.COMPENSATING: "What was applied is being undone.",
    }.get(RunState(run.state), "")


def rests_on_a_word(operation: Operation) -> bool:
    """Whether how it ended is what a person said, and no proof."""
    return operation.basis == Basis.ASSERTED and operation.state in (State.SUCCEEDED, State.FAILED_TERMINAL)


def _on_a_word(operations: Iterable[Operation]) -> str:
    """What an ended run must not pass over: steps whose end is a person's word, and what was seen against it."""
    said = [each for each in operations if rests_on_a_word(each)]
    parts = []
    for each in said:
        seen = (
            ", although the provider showed something of it" if each.sighted and each.state != State.SUCCEEDED else ""
        )
        ended = "applied" if each.state == State.SUCCEEDED else "not applied"
        parts.append(f" {each.step} counts as {ended} on a person's word, not on proof{seen}.")
    return "".join(parts)


def _for_others(run: Run) -> str:
    """What a run waits for that is none of its steps; empty where it waits for none such."""
    if run.waiting_for.startswith(LOCK):
        return f"waits for {run.waiting_for.removeprefix(LOCK).replace('held by ', '')}, which works on the same thing"
    if run.waiting_for.startswith(HANDLER):
        return f"waits for a worker that can go on with it: {lacking(run)}"
    return ""


def lacking(run: Run) -> str:
    """What the worker lacked that left a run to others. It said "here" of its own configuration, not of a reader's."""
    return run.waiting_for.removeprefix(HANDLER).replace(" is configured here", " is configured there")


def _ended(run: Run, unknown: list[str], called: list[str]) -> str:
    told = {
        RunState.SUCCEEDED: "Every step is verified.",
        RunState.FAILED: "A step failed and nothing is left to undo.",
        RunState.COMPENSATED: "Each applied step is undone, or a person waived its undo.",
        RunState.CANCELLED: "A person stopped it; nothing more of it is sent.",
    }[RunState(run.state)]
    if not unknown:
        return told
    by_whom = "waits for a person" if all(each in called for each in unknown) else "is being looked up"
    return f"{told} The outcome of {', '.join(unknown)} is unknown still, and {by_whom}."


def run_stands(run: Run, *, now: datetime) -> str:
    """The same as one phrase for a list, from the run's own row."""
    at = f" at {run.waiting_for}" if run.waiting_for else ""
    if run.escalated_at:
        return f"{reason(run.escalation_reason)}{f' ({run.waiting_for})' if run.waiting_for else ''}"
    if run.state in RUN_TERMINAL or run.state == RunState.COMPENSATING:
        named = f": {run.waiting_for}" if run.waiting_for and run.state != RunState.CANCELLED else ""
        return f"{reason(run.reason_code)}{named}" if run.reason_code else run_label(run.state).word
    if _for_others(run):
        return _for_others(run)
    if run.state == RunState.RUNNING:
        return f"a worker holds it{at}"
    if run.state in (RunState.UNCERTAIN, RunState.AWAITING_APPROVAL):
        return f"{reason(run.reason_code)}{f': {run.waiting_for}' if run.waiting_for else ''}"
    due = f", due in {duration(run.due_at - now)}" if run.due_at and run.due_at > now else ""
    return f"waits{at}{due}"
