"""What a stop switch or a limit may name: what is configured here, and what is on record though it is not configured.

A name that nothing bears covers nothing, while every page says that it is stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from . import registry
from .models import Message, Operation, Run
from .states import TERMINAL

NEAREST, SHOWN = 3, 8  # names in a sentence: those that are like what was written; else some of all
LOOKED_AT = 1000  # open operations, the newest, from which names are offered; what is written is sought in all


@dataclass(frozen=True)
class Names:
    """What can be named. An action belongs to a provider."""

    pairs: frozenset[tuple[str, str]]
    workflows: list[str]

    @property
    def providers(self) -> list[str]:
        return sorted({provider for provider, _ in self.pairs})

    @property
    def actions(self) -> list[str]:
        return sorted({action for _, action in self.pairs})

    def of(self, provider: str) -> list[str]:
        """The actions of a provider, or of all of them for ""."""
        return sorted({action for name, action in self.pairs if provider in ("", name)})

    def having(self, action: str) -> list[str]:
        """The providers that have an action."""
        return sorted({provider for provider, name in self.pairs if name == action})


def known(tenants: Iterable[str] | None) -> Names:
    """What is configured here, and what stands in open operations of these tenants; of all of them for None."""
    newest = Operation.objects.filter(**_within(tenants)).exclude(state__in=sorted(TERMINAL)).order_by("-id")
    rows = list(newest.values_list("provider", "action", "workflow_type")[:LOOKED_AT])
    return Names(
        frozenset((provider, action) for provider, action, _ in rows) | _pairs(),
        sorted({workflow for *_, workflow in rows} | _workflows()),
    )


def problem(*, tenant: str, provider: str, action: str, workflow_type: str, currency: str) -> str:
    """Why a limit with these names would hold nothing back, and what can be named instead; "" where it would.

    In `tenant`, or in all of them for "". A name that nothing bears is sought in the whole record.
    """
    tenants = [tenant] if tenant else None
    named = {"provider": provider, "action": action, "workflow_type": workflow_type, "currency": currency}
    missing = _borne_by_nothing(tenants, **named)
    if missing == "provider":
        return f"There is no provider {_NOTHING} {_instead(provider, known(tenants).providers)}"
    if missing == "action":
        return _no_action(action, provider, known(tenants))
    if missing == "workflow_type":
        return f"There is no workflow {_NOTHING} {_instead(workflow_type, known(tenants).workflows)}"
    if missing == "currency":
        return f"{_no_money(provider, action)}, so this would hold nothing back. {_count_instead()}"
    if otherwise := _written_otherwise(tenants, currency) if currency else "":
        return f"This currency is on record as {otherwise}, so this would hold nothing back. Write it like that."
    return ""


def idle(*, tenant: str, provider: str, action: str, workflow_type: str, currency: str) -> str:
    """Why a limit with these names, set before there was a rule or a configuration, holds nothing back; "" if it does.

    As a sentence for its readers: it offers no name that is on record in a tenant of others.
    """
    named = {"provider": provider, "action": action, "workflow_type": workflow_type, "currency": currency}
    missing = _borne_by_nothing([tenant] if tenant else None, **named)
    if missing == "currency":
        return f"It holds nothing back: {_no_money(provider, action, ' here')}."
    if not missing:
        return ""
    what = missing.replace("_type", "")
    return f"It holds nothing back: no {what} here is called {named[missing]}, configured or on record."


def _borne_by_nothing(
    tenants: list[str] | None, *, provider: str, action: str, workflow_type: str, currency: str
) -> str:
    """The first of these names that nothing bears; "" where each is borne, or left empty."""
    if provider and not _is_there(tenants, provider, ""):
        return "provider"
    if action and not _is_there(tenants, provider, action):
        return "action"
    if workflow_type and workflow_type not in _workflows() and not _on_record(tenants, workflow_type=workflow_type):
        return "workflow_type"
    return "currency" if currency and not _bears_sums(tenants, provider, action) else ""


def _bears_sums(tenants: list[str] | None, provider: str, action: str) -> bool:
    """Whether an operation of such an action may have a sum. What is neither configured nor on record may."""
    promised = [
        spec.money for name, each in registry.providers().items() for other, spec in each.actions.items()
        if provider in ("", name) and action in ("", other)
    ]  # fmt: skip
    if any(promised):
        return True
    rows = Operation.objects.filter(**_named(provider=provider, action=action), **_within(tenants))
    return rows.filter(amount_minor__isnull=False).exists() or not (promised or rows.exists())


def _no_money(provider: str, action: str, here: str = "") -> str:
    what = "/".join(filter(None, (provider, action)))
    return f"{what} declares no money" if action else f"No action{f' of {what}' if what else here} declares money"


def _count_instead() -> str:
    names = sorted(f"{name}/{other}" for name, each in registry.providers().items()
                   for other, spec in each.actions.items() if spec.money)  # fmt: skip
    more = ", …" if len(names) > SHOWN else "."
    which = f"Sums are counted for {', '.join(names[:SHOWN])}{more}" if names else "No action here declares any."
    return f"{which} Attempts can be limited for every action."


def _no_action(action: str, provider: str, names: Names) -> str:
    why = f"{provider or 'There'} {'has' if provider else 'is'} no action {_NOTHING}"
    if others := names.having(action):
        return f"{why} It is an action of {', '.join(others)}. {_ALL}"
    return f"{why} {_instead(action, names.of(provider))}"


_NOTHING = "of that name, configured or on record, so this would hold nothing back."
_ALL = "Left empty, it covers every one."


def _instead(written: str, names: list[str]) -> str:
    lower = {name.lower(): name for name in names}
    near = [lower[name] for name in get_close_matches(written.lower(), lower, n=NEAREST)]
    if near:
        return f"Nearest: {', '.join(near)}. {_ALL}"
    more = ", …" if len(names) > SHOWN else "."
    return f"There are: {', '.join(names[:SHOWN])}{more} {_ALL}" if names else f"There is none yet. {_ALL}"


def _pairs() -> frozenset[tuple[str, str]]:
    return frozenset((name, action) for name, each in registry.providers().items() for action in each.actions)


def _workflows() -> frozenset[str]:
    return frozenset(name for name, _version in registry.workflows())


def _is_there(tenants: list[str] | None, provider: str, action: str) -> bool:
    if any(provider in ("", one) and action in ("", other) for one, other in _pairs()):
        return True
    return _on_record(tenants, **_named(provider=provider, action=action))


def _on_record(tenants: list[str] | None, **names: str) -> bool:
    """A run names no provider; it has an operation or will have one whose provider is configured."""
    models = (Operation, Message, Run) if "workflow_type" in names else (Operation, Message)
    return any(model._default_manager.filter(**names, **_within(tenants)).exists() for model in models)


def _named(**names: str) -> dict[str, str]:
    return {key: value for key, value in names.items() if value}


def _written_otherwise(tenants: list[str] | None, currency: str) -> str:
    """How a currency is written on record, where that is never as given. One that nobody has seen may come yet."""
    rows = Operation.objects.filter(**_within(tenants))
    if rows.filter(currency=currency).exists():
        return ""
    return rows.filter(currency__iexact=currency).values_list("currency", flat=True).order_by("id").first() or ""


def _within(tenants: Iterable[str] | None) -> dict[str, list[str]]:
    return {} if tenants is None else {"tenant__in": list(tenants)}
