"""System checks: what about the settings would be unsafe. `manage.py check` and `manage.py start` run them."""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register

from reconciliation import leases, registry
from reconciliation.workflows import Choice

LOOPBACK_HOSTS = {"127.0.0.1", "localhost", "[::1]", "::1", "testserver"}
SHORTEST_SECRET = 32  # characters; an HMAC secret that can be guessed makes keys that can be guessed
PER_TASK_SLACK = 3  # seconds that a worker may need around a task's timeout


def rule(check: Callable[[], list[CheckMessage]]) -> Callable[[], list[CheckMessage]]:
    """Register a check that needs no app list."""

    def registered(app_configs: Sequence[Any] | None = None, **kwargs: Any) -> list[CheckMessage]:
        return check()

    register(registered)
    return check


@rule
def database_url() -> list[CheckMessage]:
    """A URL that cannot be used is said to be so, without repeating it."""
    if settings.AFTERCALL_DATABASE_PROBLEM:
        return [Error(settings.AFTERCALL_DATABASE_PROBLEM, id="aftercall.E001")]
    return []


@rule
def values() -> list[CheckMessage]:
    """Values of the environment that could not be read stand at their default, which nobody asked for."""
    return [Error(problem, id="aftercall.E007") for problem in settings.AFTERCALL_PROBLEMS]


@rule
def two_roles() -> list[CheckMessage]:
    """With one role for everything, no grant keeps the application from rewriting the past."""
    app, owner = settings.DATABASES["default"], settings.DATABASES["owner"]
    if settings.AFTERCALL_DATABASE_PROBLEM or settings.AFTERCALL_DATABASE_EMBEDDED:
        return []
    if app["USER"] == owner["USER"]:
        return [
            Warning(
                "Console and migrations use the same database role, so no grant protects journal and audit log.",
                hint="Set DATABASE_OWNER_URL to the role that owns the tables and DATABASE_URL to one that does not.",
                id="aftercall.W001",
            )
        ]
    if any(app.get(part, "") != owner.get(part, "") for part in ("HOST", "PORT", "NAME")):
        return [
            Error(
                "DATABASE_URL and DATABASE_OWNER_URL name two databases.",
                hint="They should differ in user and password only.",
                id="aftercall.E002",
            )
        ]
    return []


@rule
def secrets() -> list[CheckMessage]:
    """Secrets can be read, and are long enough not to be guessed."""
    if settings.AFTERCALL_SECRETS_PROBLEM:
        return [Error(settings.AFTERCALL_SECRETS_PROBLEM, id="aftercall.E003")]
    given = {"AFTERCALL_SECRET_KEY": settings.SECRET_KEY, "AFTERCALL_KEY_SECRET": settings.AFTERCALL_KEY_SECRET}
    return [
        Error(
            f"{name} is short enough to be guessed.",
            hint=f"Use at least {SHORTEST_SECRET} random characters, or leave it out and one is made.",
            id="aftercall.E004",
        )
        for name, value in given.items()
        if len(value) < SHORTEST_SECRET or len(set(value)) < 8
    ]


@rule
def console_url() -> list[CheckMessage]:
    """People's address is one: links in mails and the rules of cookies follow from it."""
    parts = urlsplit(settings.AFTERCALL_URL)
    if parts.scheme in {"http", "https"} and parts.hostname:
        return []
    return [
        Error(
            "AFTERCALL_URL is not an address of a web page.",
            hint="It should look like https://aftercall.example.com.",
            id="aftercall.E006",
        )
    ]


@rule
def seal_keys() -> list[CheckMessage]:
    """Each key that seals fields has the form that opens every token, those of Fernet too."""
    from cryptography.fernet import Fernet

    try:
        usable = [Fernet(key) for key in settings.AFTERCALL_SEAL_KEYS]
    except ValueError:
        usable = []
    if usable:
        return []
    return [
        Error(
            "AFTERCALL_SEAL_KEYS holds something that is not a sealing key.",
            hint="Each of its comma-separated keys is 32 random bytes in URL-safe base64, newest first.",
            id="aftercall.E005",
        )
    ]


@rule
def example_stays_at_home() -> list[CheckMessage]:
    """The example lets anybody be anybody, so it may only be reachable from this machine and touch its own database."""
    if not settings.AFTERCALL_EXAMPLE:
        return []
    return [
        Error(f"AFTERCALL_EXAMPLE is on, but {reason}.", hint=f"Unset AFTERCALL_EXAMPLE, or {cure}.", id=number)
        for number, wrong, reason, cure in (
            (
                "aftercall.E010",
                settings.AFTERCALL_ENV == "production",
                "AFTERCALL_ENV says production",
                "run the example elsewhere",
            ),
            (
                "aftercall.E011",
                not {host.lower() for host in settings.ALLOWED_HOSTS} <= LOOPBACK_HOSTS,
                "the console may be reached under a name that is not this machine's own",
                "leave AFTERCALL_HOSTS and AFTERCALL_URL to 127.0.0.1 and localhost",
            ),
            (
                "aftercall.E012",
                not _at_home(settings.DATABASES["default"]),
                "the database is on another machine",
                "use the embedded database or one on 127.0.0.1",
            ),
        )
        if wrong
    ]


@rule
def redelivery() -> list[CheckMessage]:
    """A task is not delivered a second time while the first may still be waiting or running in a worker."""
    clusters: dict[str, dict[str, Any]] = {"default": settings.Q_CLUSTER}
    for name, differences in clusters["default"].get("ALT_CLUSTERS", {}).items():
        clusters[name] = {**clusters["default"], **differences}
    return [
        Error(
            f"Q_CLUSTER ({name}) delivers a task again after {cluster['retry']} s, while the first delivery may take "
            f"{least} s.",
            hint=f"Set retry above {least}, or lower timeout or queue_limit.",
            id="aftercall.E020",
        )
        for name, cluster in clusters.items()
        if cluster["retry"] <= (least := longest_delivery(cluster))
    ]


@rule
def time_to_propose() -> list[CheckMessage]:
    """A choice step is not ended in the middle of its answer: it would be asked again and again to no end."""
    try:
        workflows = registry.workflows().values()
    except Exception:  # reconciliation.E001 and E004 say what is wrong with them
        return []
    most = float(str(settings.Q_CLUSTER["timeout"]))
    return [
        Error(
            f"Workflow {workflow.name} version {workflow.version}: choice {step.name!r} may take {longest:g} s with "
            f"its lease's margin, but the queue ends a task after {most:g} s.",
            hint=f"Lower the choice's timeout, or set Q_CLUSTER's timeout to at least {longest + PER_TASK_SLACK:g} and "
            "its retry to what is asked for then.",
            id="aftercall.E023",
        )
        for workflow in workflows
        for step in workflow.steps
        if isinstance(step, Choice)
        and isinstance(step.timeout, timedelta)  # else reconciliation.E003 says so
        and (longest := leases.of_step(step)) + PER_TASK_SLACK > most
    ]


@rule
def queue_without_pool() -> list[CheckMessage]:
    """The cluster forks, and a pool of connections does not survive a fork."""
    if any("pool" in database["OPTIONS"] for database in settings.DATABASES.values()):
        return [
            Error(
                "The database settings ask for a connection pool, which breaks in the forked workers of the queue.",
                hint='Remove "pool" from OPTIONS; connections are kept by CONN_MAX_AGE.',
                id="aftercall.E021",
            )
        ]
    return []


@rule
def waiting_times() -> list[CheckMessage]:
    """A lease or a grace of nothing would protect nothing, and nobody would notice."""
    return [
        Error(
            f"{name} is {getattr(settings, name):g} s, which would protect nothing.",
            hint=f"Leave {name} out, or set it above 0.",
            id="aftercall.E022",
        )
        for name in ("AFTERCALL_LEASE_MARGIN", "AFTERCALL_TAKE_AGAIN", "AFTERCALL_SCHEDULE_GRACE")
        if not getattr(settings, name) > 0
    ]


def longest_delivery(cluster: Mapping[str, Any]) -> int:
    """Seconds from fetching a task until it must be over: the clock of `retry` starts at the fetch, and up to
    `queue_limit` tasks, and one that the pusher holds, are served by `workers` before it."""
    rounds = math.ceil((cluster["queue_limit"] + 1) / cluster["workers"]) + 1
    return int(rounds * (cluster["timeout"] + PER_TASK_SLACK))


def _at_home(database: Mapping[str, Any]) -> bool:
    host = str(database.get("HOST", ""))
    return host in {"", *LOOPBACK_HOSTS} or host.startswith("/") or urlsplit(f"//{host}").hostname == "::1"
