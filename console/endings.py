"""The account of a run that did not simply go through: what stands, what does not, what nobody knows."""

from __future__ import annotations

from dataclasses import dataclass

from audit.models import Entry
from console.ledger import spec_of
from console.stories import decided_moment
from reconciliation import case_wording, run_deeds, run_wording
from reconciliation.models import JournalEntry, Operation, Run
from reconciliation.states import RUN_TERMINAL, Basis, RunState, State


@dataclass(frozen=True)
class Told:
    """The account of a run that did not simply go through."""

    heading: str
    standing: tuple[Operation, ...]  # applied, and not undone
    undone: tuple[Operation, ...]
    unknown: tuple[Operation, ...]
    not_applied: tuple[Operation, ...]
    not_begun: tuple[str, ...]
    never: tuple[tuple[str, str], ...]
    said: list[tuple[Operation, str]]  # what rests on a person's word, and what the provider showed

    @property
    def looked_up(self) -> bool:
        """Whether automation still finds out about one of those that are unknown."""
        return any(operation.due_at is not None for operation in self.unknown)


HEADINGS = {
    RunState.CANCELLED: "Cancelled: what there is of it",
    RunState.COMPENSATING: "Being undone: what there is of it",
    RunState.COMPENSATED: "Undone: what there was of it",
    RunState.FAILED: "Failed: nothing of it stands",
}


def told(run: Run, *, with_names: bool) -> Told | None:
    """None for a run that goes on by itself or went through. `with_names`: whether the reader may see who decided."""
    stopped = run.escalated_at is not None and run.state not in (*RUN_TERMINAL, RunState.COMPENSATING)
    heading = "Stopped for a person: what there is of it" if stopped else HEADINGS.get(RunState(run.state))
    if heading is None:
        return None
    account = run_deeds.account(run)
    return Told(
        heading=heading,
        standing=account.standing,
        undone=account.undone,
        unknown=account.unknown,
        not_applied=account.not_applied,
        not_begun=account.not_begun,
        never=account.cannot_be_undone,
        said=_on_a_word(run, with_names=with_names),
    )


def _on_a_word(run: Run, *, with_names: bool) -> list[tuple[Operation, str]]:
    operations = Operation.objects.filter(run=run, basis=Basis.ASSERTED).order_by("id")
    return [(each, _word(each, with_names)) for each in operations if run_wording.rests_on_a_word(each)]


def _word(operation: Operation, with_names: bool) -> str:
    who = _who_settled(operation) if with_names else ""
    ended = "applied" if operation.state == State.SUCCEEDED else "not applied"
    finding = JournalEntry.objects.filter(operation=operation, kind="finding").order_by("-id").first()
    data = case_wording.facts(finding) if finding and operation.sighted else {}
    seen = case_wording.shown_amount(operation, spec_of(operation), data) or (
        "something of it" if operation.sighted else ""
    )
    return f"on {who or 'a person'}'s word {ended}{f'; the provider showed {seen}' if seen else ''}"


def _who_settled(operation: Operation) -> str:
    entries = Entry.objects.filter(subject=str(operation.subject), to_state=operation.state, event="transition")
    entry = entries.order_by("-seq").exclude(from_state=operation.state).prefetch_related("openings").first()
    return decided_moment(entry).who if entry else ""
