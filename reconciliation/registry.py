"""Which providers and workflows this deployment has.

Providers come from the setting AFTERCALL_PROVIDERS (dotted paths of a provider or of a callable that makes one) and
from the entry-point group `aftercall.providers`; workflows from AFTERCALL_WORKFLOWS (dotted paths of a Workflow or of
a sequence of them). Read once a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.utils.module_loading import import_string

from .providers.base import ActionSpec, Provider

if TYPE_CHECKING:
    from .workflows import Workflow


class Unregistered(LookupError):
    """No provider, action or workflow of that name is configured here."""


class DeclaredTwice(Exception):
    """Two things have one name. Which of them is used must not depend on the order of a setting, so neither is."""


def _made(thing: Any) -> Any:
    return thing() if isinstance(thing, type) or (callable(thing) and not hasattr(thing, "actions")) else thing


def _configured_providers() -> Iterator[Any]:
    for path in settings.AFTERCALL_PROVIDERS:
        yield _made(import_string(path))
    for point in entry_points(group="aftercall.providers"):
        yield _made(point.load())


@lru_cache(maxsize=1)
def providers() -> dict[str, Provider]:
    """Every provider by its name. Raises DeclaredTwice."""
    found: dict[str, Provider] = {}
    for provider in _configured_providers():
        if found.setdefault(provider.name, provider) is not provider:
            raise DeclaredTwice(
                f"Two providers are called {provider.name!r}; name one of them otherwise, or take one out of "
                "AFTERCALL_PROVIDERS or of the installed packages that offer it"
            )
    return found


@lru_cache(maxsize=1)
def workflows() -> dict[tuple[str, int], Workflow]:
    """Every workflow by its name and version. Raises DeclaredTwice."""
    found: dict[tuple[str, int], Workflow] = {}
    for path in settings.AFTERCALL_WORKFLOWS:
        thing = import_string(path)
        for workflow in thing if isinstance(thing, tuple | list) else (thing,):
            if found.setdefault((workflow.name, workflow.version), workflow) is not workflow:
                raise DeclaredTwice(
                    f"Two workflows are called {workflow.name!r} in version {workflow.version}; raise the version of "
                    "the newer one, or take one out of AFTERCALL_WORKFLOWS"
                )
    return found


def provider(name: str) -> Provider:
    """The provider called `name`. Raises Unregistered."""
    try:
        return providers()[name]
    except KeyError:
        raise Unregistered(f"no provider {name!r} is configured here; add it to AFTERCALL_PROVIDERS") from None


def spec(provider_name: str, action: str) -> ActionSpec:
    """What the action promises. Raises Unregistered."""
    try:
        return provider(provider_name).actions[action]
    except KeyError:
        raise Unregistered(f"provider {provider_name!r} has no action {action!r}") from None


def look_up_of(name: str) -> Callable[..., Any] | None:
    """The look-up of a provider, where it has one."""
    return getattr(provider(name), "look_up", None)


def workflow(name: str, version: int | None = None) -> Workflow:
    """A workflow in that version, or in its newest. Raises Unregistered."""
    versions = [v for n, v in workflows() if n == name and version in (None, v)]
    if not versions:
        wanted = name if version is None else f"{name} version {version}"
        raise Unregistered(f"no workflow {wanted} is configured here; add it to AFTERCALL_WORKFLOWS")
    return workflows()[name, max(versions)]


def forget() -> None:
    """Read the configuration again: for tests, and after settings changed."""
    providers.cache_clear()
    workflows.cache_clear()
