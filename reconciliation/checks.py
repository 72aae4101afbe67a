"""Checks of what a deployment declares, made at start: a fault in a declaration must not wait for somebody's money."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, register

from . import registry
from .actors import Permission
from .providers.base import ActionSpec, Repeat
from .providers.sql import SqlProvider
from .soundness import problems, shown_problems


@register("aftercall")
def declarations(app_configs: Sequence[Any] | None, **options: Any) -> list[CheckMessage]:
    """Every configured provider and workflow can be loaded and is sound."""
    try:
        providers, workflows = registry.providers(), registry.workflows()
    except registry.DeclaredTwice as twice:
        return [Error(f"{twice}.", id="reconciliation.E004")]
    except Exception as error:  # whatever an import raises, the person at the start needs its sentence
        return [Error(f"A configured provider or workflow cannot be loaded: {error}", id="reconciliation.E001")]
    found: list[CheckMessage] = []
    for provider in providers.values():
        for name, spec in provider.actions.items():
            found += [
                Error(f"Action {provider.name}/{name}: {problem}.", id="reconciliation.E002")
                for problem in action_problems(provider, spec)
            ]
    for workflow in workflows.values():
        found += [
            Error(f"Workflow {workflow.name} version {workflow.version}: {problem}.", id="reconciliation.E003")
            for problem in problems(workflow, _repeat_of)
        ]
    return found


def _repeat_of(provider: str, action: str) -> Repeat | None:
    try:
        return registry.spec(provider, action).repeat
    except registry.Unregistered:
        return None


def action_problems(provider: Any, spec: ActionSpec) -> Iterator[str]:
    """What is wrong with an action's declaration, a sentence each without its full stop."""
    compared = sorted(set(spec.volatile) & set(spec.compare))
    if compared:
        yield f"{', '.join(compared)} is both volatile and compared; what is compared must be in the fingerprint"
    if spec.repeat is Repeat.LOOKUP and not (spec.absence_is_proof and hasattr(provider, "look_up")):
        yield "repeat is lookup, which needs a look-up and absence_is_proof"
    if spec.repeat is Repeat.KEYED and spec.key_retention.total_seconds() <= 0:
        yield "repeat is keyed, which needs key_retention: how long the provider remembers a key"
    if spec.absence_is_proof and spec.absence_reads < 1:
        yield "absence_reads must be at least 1"
    if spec.compensate_with and spec.compensate_with not in provider.actions:
        yield f"compensate_with names {spec.compensate_with!r}, which this provider does not have"
    if spec.undo_by and spec.undo_by not in list(Permission):
        yield f"undo_by names {spec.undo_by!r}; permissions are {', '.join(Permission)}"
    if spec.attempts < 1:
        yield f"attempts is {spec.attempts}; at least one call must be allowed"
    yield from shown_problems("shown", spec.shown)
    yield from _hidden_problems(spec)
    yield from _local_problems(provider, spec)
    if not spec.timeout <= spec.max_duration:
        yield "timeout is longer than max_duration, which no lease outlives"


def _hidden_problems(spec: ActionSpec) -> Iterator[str]:
    """What is written into a sentence or shown as an amount can be seen, so it must be declared as shown."""
    hidden = [name for name in spec.money or () if name not in spec.shown]
    if hidden:
        yield f"money names {', '.join(hidden)}, which shown does not list; add it to shown, or leave out money"
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(spec.headline) if name is not None]
    except ValueError:
        yield f"headline {spec.headline!r} has a brace without its pair; a field stands in braces: {{order}}"
        return
    seen = {*spec.shown, *(("amount",) if spec.money else ())}
    for name in fields:
        if re.split(r"[.\[]", name)[0] not in seen:
            yield f"headline names {{{name}}}, which shown does not list; add it to shown, or leave it out"


# What keys, look-ups and statuses are told of an action; a local effect has none of them.
_OUTSIDE = (
    "key_retention", "same_key_covers_earlier", "settles_after", "absence_is_proof", "absence_reads", "not_applied",
)  # fmt: skip


def _local_problems(provider: Any, spec: ActionSpec) -> Iterator[str]:
    here = isinstance(provider, SqlProvider)
    if here and spec.repeat is not Repeat.LOCAL:
        yield f"{provider.name} is a SqlProvider, whose effects are local; its repeat must be local, not {spec.repeat}"
    if spec.repeat is not Repeat.LOCAL:
        return
    if not here:
        yield "repeat is local, which only a SqlProvider can keep: the effect and its settlement are one transaction"
    elif type(provider).apply is SqlProvider.apply:
        yield f"{provider.name} defines no apply(), so it does nothing"
    if hasattr(provider, "look_up"):
        yield f"{provider.name} has a look_up, but there is nothing to look up: a local effect commits with its result"
    plain = ActionSpec()
    for name in _OUTSIDE:
        if getattr(spec, name) != getattr(plain, name):
            yield f"{name} says nothing of a local effect, which needs no key and no look-up; leave it out"
