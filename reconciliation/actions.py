"""What a person may do. Each action has a preview that says what it would do and why it is or is not allowed.

Permissions, versions, one-time tokens and guards sit here, behind the door; a page or an API endpoint only shows the
previews and passes on what was pressed. Automation calls the functions that stand behind these actions:
`reconciler.reconcile()`, `executor.retry()`, `runs.advance()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from uuid import UUID

from .actors import Actor, Permission
from .models import Operation, Run

__all__ = ["Actor", "Answer", "Input", "Permission", "Press", "Preview", "Verdict", "act", "answer_of", "previews"]


@dataclass(frozen=True, kw_only=True)
class Input:
    """One more field that an action asks for, beside the reason."""

    name: str
    label: str
    help: str = ""
    required: bool = False
    choices: tuple[tuple[str, str], ...] = ()  # (value, label); empty: free text


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What would happen, and why it is or is not allowed."""

    action: str  # look_up, resolve_applied, resolve_not_applied, retry, terminate, withdraw, resume, ...
    label: str  # "Retry with the same key"
    button: str  # "Retry"
    allowed: bool
    why: str  # allowed: what it will do; else: why not, and what would allow it
    recommended: bool = False
    needs_reason: bool = False
    inputs: tuple[Input, ...] = ()
    shortcut: str = ""  # one letter, or none


class Verdict(StrEnum):
    """How a press ended."""

    DONE = "done"
    JOINED = "joined"  # somebody else's press is doing, or did, the same
    REFUSED = "refused"  # not permitted or not allowed: nothing changed
    CONFLICT = "conflict"  # it changed since the page was drawn: nothing changed
    WORKING = "working"  # the first press with this token is still at it, or was lost on the way


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one press; the same token gets the same one again."""

    verdict: Verdict
    message: str  # one or two sentences for the person
    token: UUID


@dataclass(frozen=True, kw_only=True)
class Press:
    """One press of one button, as a form or an API call carried it."""

    action: str
    token: UUID
    version: int  # of the subject, as the page showed it
    reason: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)


def previews(subject: Operation | Run, *, actor: Actor) -> tuple[Preview, ...]:
    """Every action on `subject`, the allowed ones first, each with what it would do or why it is not allowed."""
    raise NotImplementedError


def act(subject: Operation | Run, press: Press, *, actor: Actor) -> Answer:
    """Carry out one press. Refusals and conflicts are answers, recorded in the audit log, and change nothing."""
    raise NotImplementedError


def answer_of(token: UUID, *, actor: Actor) -> Answer | None:
    """The stored answer of an earlier press by this actor, for the page that shows it (again)."""
    raise NotImplementedError
