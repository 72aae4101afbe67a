"""A schedule and its expected runs in words."""

from __future__ import annotations

from datetime import timedelta

from .models import Job, Slot
from .occurrences import Missed, Overlap, SlotState
from .sealing import CannotOpen, hidden_names
from .wording import duration, sentence


def slot_story(slot: Slot) -> str:
    """What became of an expected run, or of a range of them, in one sentence."""
    told = _became(slot)
    if slot.count > 1:
        told = f"{slot.count:,} starts. {told}"
    if slot.shifted:
        told += f" {slot.local[11:16]} did not exist that day, so it stands at the first moment after the gap."
    return told


_NOT_YET = {  # what is said of a slot whose run is to come; its reason code is that of the run
    "": "Recorded; its run is about to be started.",
    "waits_for_previous": "Waits for the run before it.",
    "caught_up": "Missed; its run is about to be started.",
    "filled_by_hand": "A person wants it run; its run is about to be started.",
}


def _became(slot: Slot) -> str:
    if slot.state in (SlotState.DUE, SlotState.QUEUED):
        return _NOT_YET.get(slot.reason_code) or sentence(slot.reason_code)
    if slot.state != SlotState.STARTED or slot.started_at is None or slot.manual or slot.reason_code == "on_time":
        return sentence(slot.reason_code)
    late = slot.started_at - slot.scheduled_for
    started = f"started {duration(late)} {'late' if late >= timedelta() else 'early'}."
    if slot.reason_code == "late":
        return started.capitalize()
    return f"{sentence(slot.reason_code).removesuffix('.')}; {started}"


MISSED_POLICIES: dict[str, str] = {
    Missed.LATEST_ONLY: "run only the latest one",
    Missed.SKIP: "run none of them",
    Missed.ASK: "ask a person",
    Missed.RUN_ALL: "run all of them, in order",
}


OVERLAP_POLICIES: dict[str, str] = {
    Overlap.SKIP: "skip the new one",
    Overlap.QUEUE_ONE: "let one wait, skip the others",
    Overlap.CANCEL_PREVIOUS: "cancel the one before",
    Overlap.ALLOW: "start it beside the other",
}


def hidden_input(job: Job) -> tuple[str, ...]:
    """Names of the input's members that are not to be seen."""
    try:
        return hidden_names(job.input_sealed)
    except CannotOpen:
        return ("?",)


def job_terms(job: Job) -> list[tuple[str, str]]:
    """The terms of a schedule as (what, how) for people."""
    limits = [
        ("Catches up", f"on starts of the last {duration(job.max_catch_up)}" if job.max_catch_up else "without limit"),
        ("Start deadline", f"{duration(job.start_deadline)} late at most" if job.start_deadline else "none"),
        ("Longest run", f"{duration(job.max_run_time)}, then a person" if job.max_run_time else "no limit"),
    ]
    accepted = " (accepted for actions without a key)" if job.repeats_accepted else ""
    return [
        ("Missed starts", MISSED_POLICIES.get(job.missed, job.missed) + accepted),
        ("Still running", OVERLAP_POLICIES.get(job.overlap, job.overlap)),
        *limits,
    ]
