"""The part `crashes`: every boundary, every fault, every flow."""

from __future__ import annotations

import time

from drill import sweep
from drill.parts import Asked, Told
from reconciliation import registry

ORDER = {
    "order": "1002", "ticket": "T-77", "amount": 4200, "currency": "USD", "card": "card_4242", "customer": "Ada Fenn",
    "email": "ada@example.com", "address": "1 Mill Lane", "window": "tomorrow 9-12", "service": "return",
}  # fmt: skip
ASKS = (
    "A worker is killed or frozen, or a person cancels, at every boundary of a run, with every fault of a provider: "
    "is there at most one effect an operation, does every run end, and has every change one audit entry?"
)
DOUBLES, QUICK_DOUBLES = 6000, 150
QUICK_EVERY, QUICK_SECONDS = 23, 45.0


def part(asked: Asked) -> Told:
    """Run the sweep over one workflow."""
    workflow = registry.workflow(asked.workflow)
    doubles, every = (QUICK_DOUBLES, QUICK_EVERY) if asked.quick else (DOUBLES, 1)
    until = time.monotonic() + QUICK_SECONDS if asked.quick else float("inf")
    share = sweep.jobs(workflow, every=every, doubles=doubles, seed=asked.seed)
    tally = sweep.run(
        asked.folder, workflow=asked.workflow, input=asked.input or ORDER, share=share, processes=asked.processes,
        until=until, say=asked.say,
    )  # fmt: skip
    if tally.places and not any(" ledger_" in name for name in tally.places):
        tally.failures.append({"problems": ["no write to the ledger was a boundary: nothing was crashed there"]})
    if not asked.quick and tally.cases[sweep.DOUBLE] < doubles:
        tally.failures.append({"problems": [f"{tally.cases[sweep.DOUBLE]} double crashes, not {doubles}"]})
    told = _told(tally, seeds=(asked.seed, asked.seed + doubles * sweep.DRAWS))
    if not any(name == "forward: succeeded" for name in tally.ended):
        told.notes.append(
            "No run succeeded. A double answers with an id and the fields of the request; a step that needs more of a "
            "result cannot be built upon that, and the workflow is not drilled beyond it."
        )
    return told


def _told(tally: sweep.Tally, *, seeds: tuple[int, int]) -> Told:
    ended = [(*name.split(": ", 1), count) for name, count in sorted(tally.ended.items())]
    places = sorted(tally.places.items(), key=lambda one: -one[1])
    return Told(
        name="crash sweep",
        asks=ASKS,
        counts={
            **{f"cases, {kind}": count for kind, count in sorted(tally.cases.items())},
            "effects counted in the world": tally.effects,
            "kinds of places": len(places),
        },
        tables={
            "how the runs ended": (("flow", "ended", "cases"), ended),
            "where they were disturbed": (("place", "cases"), places),
        },
        failures=tally.failures,
        notes=[f"Pairs are drawn with seeds from {seeds[0]} to {seeds[1] - 1}, as many as it takes."],
    )
