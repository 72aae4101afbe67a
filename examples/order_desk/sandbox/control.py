"""The control side of a sandbox provider: scripting faults, moving the clock, counting effects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .faults import check
from .store import SETTINGS

if TYPE_CHECKING:
    from .server import Sandbox

Answer = tuple[int, dict[str, Any]]


def control(sandbox: Sandbox, method: str, name: str, query: dict[str, str], body: dict[str, Any]) -> Answer:
    """Answer `<method> /_control/<name>`: an HTTP status and a JSON object."""
    handler = ROUTES.get((method, name))
    return handler(sandbox, query, body) if handler else (404, {"error": f"no control {method} {name}"})


def _effects(sandbox: Sandbox, query: dict[str, str], body: dict[str, Any]) -> Answer:
    return 200, sandbox.store.tally(**query)


def _requests(sandbox: Sandbox, query: dict[str, str], body: dict[str, Any]) -> Answer:
    return 200, {"requests": sandbox.store.requests(**query)}


def _faults(sandbox: Sandbox, query: dict[str, str], body: dict[str, Any]) -> Answer:
    return 200, {"faults": sandbox.store.faults()}


def _add_fault(sandbox: Sandbox, query: dict[str, str], body: dict[str, Any]) -> Answer:
    wrong = check(body)
    if wrong:
        return 400, {"error": wrong}
    sandbox.store.add_fault(body)
    return 201, {}


def _clear_faults(sandbox: Sandbox, query: dict[str, str], body: dict[str, Any]) -> Answer:
    sandbox.store.clear_faults(**query)
    return 200, {}


def _settings(sandbox: Sandbox, query: dict[str, str], body: dict[str, Any]) -> Answer:
    return 200, sandbox.store.settings()


def _set(sandbox: Sandbox, query: dict[str, str], body: dict[str, Any]) -> Answer:
    unknown = set(body) - set(SETTINGS)
    if unknown:
        return 400, {"error": f"unknown settings: {', '.join(sorted(unknown))}"}
    sandbox.store.set(**body)
    return 200, sandbox.store.settings()


def _clock(sandbox: Sandbox, query: dict[str, str], body: dict[str, Any]) -> Answer:
    shift = body.get("shift", sandbox.store.settings()["clock_shift"] + body.get("advance", 0))
    sandbox.store.set(clock_shift=shift)
    return 200, {"clock_shift": shift, "now": sandbox.store.now()}


def _waiting(sandbox: Sandbox, query: dict[str, str], body: dict[str, Any]) -> Answer:
    return 200, {"waiting": sandbox.waiting.listed()}


def _release(sandbox: Sandbox, query: dict[str, str], body: dict[str, Any]) -> Answer:
    return 200, {"released": sandbox.waiting.release(body.get("number"), drop=bool(body.get("drop")))}


def _plant(sandbox: Sandbox, query: dict[str, str], body: dict[str, Any]) -> Answer:
    """An object that somebody else made: it can be found, and it is nobody's effect."""
    way = next((way for way in sandbox.desk.creates if way.kind == body.get("kind")), None)
    if way is None:
        return 400, {"error": f"no kind {body.get('kind')!r} here"}
    planted = sandbox.store.create(
        collection=way.collection,
        kind=way.kind,
        prefix=way.prefix,
        status=body.get("status", way.status),
        fields=body.get("fields", {}),
        key=None,
        epoch=sandbox.store.epoch,
        plant=True,
    )
    return 201, planted.body


def _remove(sandbox: Sandbox, query: dict[str, str], body: dict[str, Any]) -> Answer:
    sandbox.store.remove(body["id"])
    return 200, {}


def _reset(sandbox: Sandbox, query: dict[str, str], body: dict[str, Any]) -> Answer:
    sandbox.store.reset()
    sandbox.waiting.release(drop=True)
    return 200, {}


ROUTES = {
    ("GET", "effects"): _effects,
    ("GET", "requests"): _requests,
    ("GET", "faults"): _faults,
    ("POST", "faults"): _add_fault,
    ("DELETE", "faults"): _clear_faults,
    ("GET", "settings"): _settings,
    ("POST", "settings"): _set,
    ("POST", "clock"): _clock,
    ("GET", "waiting"): _waiting,
    ("POST", "release"): _release,
    ("POST", "plant"): _plant,
    ("POST", "remove"): _remove,
    ("POST", "reset"): _reset,
}
