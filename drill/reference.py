"""What a reader would keep on paper beside the ledger, for the part `model`: the reference of its random steps.

It notes what was asked for and by whom, what people pressed and were told was done, what really happened outside, and
what the ledger said last of each operation, run and request for consent. It knows nothing of how the ledger does it.
Every check raises AssertionError with one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from drill.flows import CONSENTED
from reconciliation import registry, second_person
from reconciliation.actors import Actor
from reconciliation.models import Approval, Operation, Run
from reconciliation.providers.base import Repeat
from reconciliation.states import RUN_TERMINAL, TERMINAL, ApprovalState, RunState, State

CONSENTS = {step.name: step.consent for step in CONSENTED.effects if step.consent}
LONG = timedelta(days=365)
GIVEN = frozenset({ApprovalState.APPROVED, ApprovalState.CONSUMED})
UNKNOWN = frozenset({State.AMBIGUOUS, State.PENDING})  # to a sweep: a lease may have run out
GOING = frozenset(RunState) - RUN_TERMINAL
UNDO_BY_HAND = ("compensate", "retry", "send_again", "new_intent")

# What a press that was told "done" starts from, and leads to (None: that is decided by what the provider says).
DEEDS: dict[str, tuple[frozenset[str], frozenset[str] | None]] = {
    "resolve_applied": (frozenset({State.AMBIGUOUS}), frozenset({State.SUCCEEDED})),
    "resolve_not_applied": (
        frozenset({State.AMBIGUOUS}), frozenset({State.FAILED_RETRYABLE, State.FAILED_TERMINAL}),
    ),
    "retry": (frozenset({State.FAILED_RETRYABLE, State.AMBIGUOUS}), None),
    "send_again": (frozenset({State.AMBIGUOUS}), None),
    "new_intent": (frozenset({State.FAILED_TERMINAL, State.TERMINATED}), None),
    "compensate": (frozenset({State.SUCCEEDED}), frozenset({State.SUCCEEDED})),
    "terminate": (frozenset(State) - TERMINAL - {State.PENDING}, frozenset({State.TERMINATED})),
    "withdraw": (frozenset({State.READY, State.AWAITING_APPROVAL}), frozenset({State.TERMINATED})),
    "close": (TERMINAL, TERMINAL),
}  # fmt: skip
DEEDS_ON_RUNS: dict[str, tuple[frozenset[str], frozenset[str] | None]] = {
    "cancel": (GOING, frozenset({RunState.CANCELLED})),
    "compensate_run": (GOING - {RunState.COMPENSATING} | {RunState.CANCELLED}, frozenset({RunState.COMPENSATING})),
    "resume": (GOING, GOING),
    "waive_undo": (frozenset({RunState.COMPENSATING}), frozenset({RunState.COMPENSATING})),
}
DEEDS_ON_APPROVALS: dict[str, tuple[frozenset[str], frozenset[str] | None]] = {
    "approve": (frozenset({ApprovalState.WAITING}), GIVEN | {ApprovalState.SUPERSEDED}),
    "deny": (
        frozenset({ApprovalState.WAITING, ApprovalState.EXPIRED}),
        frozenset({ApprovalState.DENIED, ApprovalState.EXPIRED}),
    ),
    "withdraw": (
        frozenset({ApprovalState.WAITING, ApprovalState.APPROVED}), frozenset({ApprovalState.WITHDRAWN}),
    ),
}  # fmt: skip


@dataclass
class Paper:
    """What is noted of one operation."""

    state: str = ""
    version: int = 0
    attempts: int = 0
    calls: int = 0
    closed: bool = False  # a person has dealt with it: its mark is gone, and what it said is known


@dataclass
class Sheet:
    """What is noted of one run."""

    state: str = ""
    calls: int = 0  # of its forward steps
    undo_calls: int = 0
    undo_by_hand: bool = False  # a person had a single step of it reversed, or such an undo tried again


@dataclass
class Slip:
    """What is noted of one request for consent."""

    about: tuple[int | None, int | None]  # (operation, run)
    action: str  # of an operator; "" for the consent to send
    step: str  # whose undo is to be waived
    askers: frozenset[str]
    over: datetime  # nobody can agree any more, at the latest from then on
    state: str = ""
    agreed: bool = False
    use_by: datetime | None = None
    uses: int = 0


@dataclass
class Step:
    """What happens between two looks at the ledger."""

    began: datetime
    who: str = ""
    runs: set[int] = field(default_factory=set)  # which a person has just set going again


class Reference:
    """The reference model. `calls` and `effects` count in the world, by operation key."""

    def __init__(self, now: datetime) -> None:
        self.wishes: dict[tuple[str, str, int], dict[str, Any]] = {}  # the first request under each identity
        self.papers: dict[int, Paper] = {}
        self.sheets: dict[int, Sheet] = {}
        self.slips: dict[int, Slip] = {}
        self.starters: dict[int, frozenset[str]] = {}  # of runs: who asked, and for whom
        self.renewers: dict[tuple[int | None, str], set[str]] = {}  # (run, step): who asked for a new intent
        self.step = Step(now)

    def begin(self, now: datetime, who: str = "") -> None:
        """Another step begins."""
        self.step = Step(now, who)

    # Presses

    def pressed(
        self, subject: Any, name: str, who: Actor, *, old: bool, done: bool, fresh: Any, calls: bool, now: datetime
    ) -> None:
        """What a press was told, and what it changed. `calls`: whether something was sent while it was made."""
        was = self._known(subject)
        if not done:
            outward = name in (
                "look_up",
                "retry",
                "compensate",
                "send_again",
                "approve",
            )  # they look up, or do it later
            if old or not outward:
                assert fresh.version == subject.version, f"{name} was refused, and changed {subject.subject}"
            return
        assert not old or name == "look_up", f"{name} was done on a page that was out of date"
        sources, targets = self._deed(subject, name)
        assert not sources or was in sources, f"{name} was done on what was {was}"
        assert targets is None or fresh.state in targets, f"{name} led to {fresh.state}"
        if isinstance(subject, Approval):
            self._answered(subject, name, who, now)
        elif isinstance(subject, Run):
            self.step.runs.add(subject.pk)
        else:
            self._pressed_on_operation(subject, name, who, fresh=fresh, calls=calls)

    def _known(self, subject: Any) -> str:
        book: Any = {Operation: self.papers, Run: self.sheets, Approval: self.slips}[type(subject)]
        return str(book[subject.pk].state)

    def _deed(self, subject: Any, name: str) -> tuple[frozenset[str], frozenset[str] | None]:
        table = {Operation: DEEDS, Run: DEEDS_ON_RUNS, Approval: DEEDS_ON_APPROVALS}[type(subject)]
        return table.get(name, (frozenset(), None))

    def _pressed_on_operation(self, operation: Operation, name: str, who: Actor, *, fresh: Any, calls: bool) -> None:
        if name == "close":
            self.papers[operation.pk].closed = True
        if name == "new_intent" and not operation.unknown_attempts:  # else it was only asked for
            self.renewers.setdefault((operation.run_id, operation.step), set()).add(who.id)
        if name == "send_again":
            agreed = any(slip.state == ApprovalState.APPROVED for slip in self._consents(operation, "send_again"))
            assert agreed or not calls, "send_again was done on one person's word"
        if operation.run_id is not None and name in UNDO_BY_HAND:
            self.sheets[operation.run_id].undo_by_hand = True

    def _answered(self, approval: Approval, name: str, who: Actor, now: datetime) -> None:
        slip = self.slips[approval.pk]
        if name != "approve":
            return
        assert who.id not in slip.askers, "a request was approved by who asked for it"
        assert self.step.began < slip.over, "a request was approved after its time"
        lasts = CONSENTS["issue_refund"].use_within if not slip.action else second_person.USE_WITHIN  # type: ignore[union-attr]
        slip.agreed, slip.use_by = True, now + lasts

    # Operations

    def check_operation(self, operation: Operation, *, effects: int, calls: int, is_so: bool, repeat: Repeat) -> None:
        """Compare with what is noted, and note what the ledger says now. `is_so`: its target is as it was asked."""
        paper, name = self.papers.setdefault(operation.pk, Paper()), f"{operation.step} ({operation.state})"
        doubled = [slip for slip in self._consents(operation, "send_again") if slip.agreed]
        assert effects <= 1 + len(doubled), f"{name}: {effects} effects, {len(doubled)} duplicates agreed to"
        assert calls <= operation.attempts, f"{name}: a call that is not on record"
        assert operation.version >= paper.version, f"{name}: an older version came back"
        assert operation.attempts >= paper.attempts, f"{name}: an attempt was forgotten"
        if calls > paper.calls:
            self._sent(operation, paper, name, more=calls - paper.calls, repeat=repeat, doubled=doubled)
        if paper.state in TERMINAL and operation.state != paper.state:
            assert operation.state == State.SUCCEEDED, f"{name}: left {paper.state}"
            assert operation.escalated_at, f"{name}: {paper.state} was contradicted quietly"
        if operation.state == State.SUCCEEDED and operation.basis != "asserted":
            assert effects or is_so, f"{name}, basis {operation.basis}: and it did not happen"
        if operation.state in (State.FAILED_TERMINAL, State.FAILED_RETRYABLE) and effects:
            told = operation.basis == "asserted" or operation.escalated_at is not None or paper.closed
            assert told, f"{name}: and it happened"
        paper.state, paper.version, paper.attempts, paper.calls = (
            operation.state, operation.version, operation.attempts, calls,
        )  # fmt: skip

    def _sent(
        self, operation: Operation, paper: Paper, name: str, *, more: int, repeat: Repeat, doubled: list[Slip]
    ) -> None:  # fmt: skip
        """What was sent needed a consent, or one for each time where what is unknown cannot be repeated."""
        if operation.workflow_type == CONSENTED.name and operation.step in CONSENTS:
            agreed = [slip.use_by for slip in self._consents(operation, "")[-1:] if slip.agreed and slip.use_by]
            assert agreed, f"{name}: sent, and nobody had agreed to it"
            # What may have been applied already is repeated under its key; that adds nothing to what was agreed to.
            again = paper.state in UNKNOWN
            assert again or self.step.began < agreed[0], f"{name}: sent after the consent was over"
        if repeat is Repeat.NONE and paper.state in UNKNOWN:
            left = [slip for slip in doubled if not slip.uses]
            assert len(left) >= more, f"{name}: sent again {more} times, agreed to {len(left)} times"
            for slip in left[:more]:
                slip.uses += 1

    def _consents(self, operation: Operation, action: str) -> list[Slip]:
        return [s for s in self.slips.values() if s.about[0] == operation.pk and s.action == action]

    # Requests for consent

    def check_approval(self, approval: Approval, operation: Operation | None, now: datetime) -> None:
        """Note a new one, with who asked; of a known one compare what became of it with what people pressed."""
        slip = self.slips.get(approval.pk) or self._noted(approval, operation, now)
        if approval.state in GIVEN:
            assert slip.agreed, f"{approval.subject} is {approval.state}, and nobody agreed"
        if (
            slip.state
            and slip.state not in (ApprovalState.WAITING, ApprovalState.APPROVED)
            and approval.state != slip.state
        ):
            over = (slip.state, approval.state)
            assert over == (ApprovalState.CONSUMED, ApprovalState.SUPERSEDED), f"{approval.subject}: {over}"
        slip.state = approval.state

    def _noted(self, approval: Approval, operation: Operation | None, now: datetime) -> Slip:
        if approval.action:
            askers, lasts = frozenset({self.step.who}), second_person.LASTS
        else:
            assert operation is not None
            renewed = self.renewers.get((operation.run_id, operation.step), set())
            askers = self.starters.get(operation.run_id or 0, frozenset()) | renewed
            lasts = CONSENTS[operation.step].expires_after if operation.step in CONSENTS else LONG  # type: ignore[union-attr]
        step = json.loads(approval.inputs).get("step", "") if approval.action == second_person.WAIVE_UNDO else ""
        slip = Slip((approval.operation_id, approval.run_id), approval.action, step, askers, now + lasts)
        self.slips[approval.pk] = slip
        return slip

    # Runs

    def check_run(
        self, run: Run, operations: Sequence[Operation], *, effects: dict[int, int], calls: dict[int, int]
    ) -> None:
        """A run that has ended stays so and sends nothing; its state agrees with its operations; somebody has it."""
        sheet, name = self.sheets.setdefault(run.pk, Sheet()), f"run {run.state}"
        forward = [o for o in operations if o.undo_of_id is None]
        undos = [o for o in operations if o.undo_of_id is not None]
        sent, undone = (sum(calls[o.pk] for o in some) for some in (forward, undos))
        if sheet.state in RUN_TERMINAL:
            assert run.state == sheet.state or self._set_going(run), f"{name}: left {sheet.state}, and no person asked"
            assert sent == sheet.calls, f"{name}: a step was sent after its end"
            if run.state == sheet.state:
                assert undone == sheet.undo_calls or sheet.undo_by_hand, f"{name}: an undo was sent after its end"
        newest = {o.step: o for o in sorted(operations, key=lambda one: one.intent_version)}
        self._agrees(run, name, newest, effects)
        self._held(run, name, operations)
        sheet.state, sheet.calls, sheet.undo_calls = run.state, sent, undone

    def _set_going(self, run: Run) -> bool:
        agreed = [s for s in self.slips.values() if s.about == (None, run.pk) and s.agreed]
        return run.pk in self.step.runs or any(slip.action == second_person.COMPENSATE_RUN for slip in agreed)

    def _agrees(self, run: Run, name: str, newest: dict[str, Operation], effects: dict[int, int]) -> None:
        applied = {o.step for o in newest.values() if o.undo_of_id is None and self._stands(o, effects)}
        agreed = {s.step for s in self.slips.values() if s.about == (None, run.pk) and s.agreed and s.step}
        assert set(run.waived) <= agreed, f"{name}: {run.waived} waived, agreed to {sorted(agreed)}"
        if run.state == RunState.SUCCEEDED:
            left = _steps(run) - {o.step for o in newest.values() if o.state == State.SUCCEEDED}
            assert not left, f"{name}: without {sorted(left)}"
        if run.state == RunState.FAILED:
            assert not applied, f"{name}: and {sorted(applied)} stands"
        if run.state == RunState.COMPENSATED:
            undone = {
                o.step.removeprefix("undo:") for o in newest.values() if o.undo_of_id and o.state == State.SUCCEEDED
            }
            assert applied <= undone | set(run.waived), f"{name}: and {sorted(applied - undone)} stands"

    def _stands(self, operation: Operation, effects: dict[int, int]) -> bool:
        """Applied, as its run could know: not where a person was called since, or vouched for the contrary."""
        closed = self.papers[operation.pk].closed
        loud = operation.escalated_at is not None or operation.basis == "asserted" or closed
        return not loud and (operation.state == State.SUCCEEDED or effects[operation.pk] > 0)

    def _held(self, run: Run, name: str, operations: Iterable[Operation]) -> None:
        if run.state in RUN_TERMINAL:
            return
        if run.state == RunState.RUNNING:
            assert None not in (run.lease_until, run.due_at), f"{name}: nobody holds it"
        waits = any(o.due_at or o.escalated_at or o.state == State.AWAITING_APPROVAL for o in operations)
        assert run.due_at or run.escalated_at or waits, f"{name}: nobody comes back to it"


def _steps(run: Run) -> set[str]:
    return {step.name for step in registry.workflow(run.workflow_type, run.workflow_version).effects}
