"""Which database, and as whom: two roles on one database, from the environment or on the embedded server."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from console import embedded

APP_ROLE = "aftercall_app"
OWNER_ROLE = "aftercall_owner"
NAME = "aftercall"
LONELY_OWNER = "DATABASE_OWNER_URL is set but DATABASE_URL is not; set both, or neither for the embedded database."
RIGHT_URL = "postgresql://user:password@host:5432/database"


@dataclass(frozen=True, kw_only=True)
class Databases:
    """Django's settings for both roles. `problem` says in one sentence what is wrong with the environment's URLs."""

    app: dict[str, Any]
    owner: dict[str, Any]
    embedded: bool
    problem: str = ""


class OneDatabase:
    """Queries use the application role; only the owner migrates."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "default"

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "default"

    def allow_relation(self, first: Any, second: Any, **hints: Any) -> bool:
        return True

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return db == "owner"


def from_environment(environ: Mapping[str, str], *, var: Path) -> Databases:
    """Read DATABASE_URL and DATABASE_OWNER_URL; without the first, the embedded database in `var`. Never raises."""
    if not environ.get("DATABASE_URL"):
        return _embedded(var, lonely_owner=bool(environ.get("DATABASE_OWNER_URL")))
    try:
        app = settings_of(environ["DATABASE_URL"], name="DATABASE_URL")
        owner = settings_of(environ.get("DATABASE_OWNER_URL") or environ["DATABASE_URL"], name="DATABASE_OWNER_URL")
    except ValueError as problem:
        nobody = _settings(NAME="", USER="")
        return Databases(app=nobody, owner=nobody, embedded=False, problem=str(problem))
    return Databases(app=app, owner=owner, embedded=False)


def _embedded(var: Path, *, lonely_owner: bool) -> Databases:
    host = str(embedded.socket_folder(var / "postgres"))
    return Databases(
        app=_settings(NAME=NAME, HOST=host, USER=APP_ROLE),
        owner=_settings(NAME=NAME, HOST=host, USER=OWNER_ROLE),
        embedded=True,
        problem=LONELY_OWNER if lonely_owner else "",
    )


def settings_of(url: str, *, name: str) -> dict[str, Any]:
    """Turn a postgresql:// URL into Django's settings. Raises ValueError with a sentence that names what is right.

    The sentence never repeats the URL, which may hold a password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"{name} cannot be read as a URL; it should look like {RIGHT_URL}.") from None
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError(f"{name} does not begin with postgresql://; it should look like {RIGHT_URL}.")
    if not parts.path.strip("/") or not parts.username:
        missing = "user" if parts.path.strip("/") else "database"
        raise ValueError(f"{name} names no {missing}; it should look like {RIGHT_URL}.")
    options = dict(parse_qsl(parts.query))
    return _settings(
        NAME=unquote(parts.path.strip("/")),
        USER=unquote(parts.username),
        PASSWORD=unquote(parts.password or ""),
        HOST=options.pop("host", unquote(parts.hostname or "")),
        PORT=options.pop("port", str(port or "")),
        options=options,
    )


def _settings(*, options: Mapping[str, str] | None = None, **values: str) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.postgresql",
        **values,
        "CONN_MAX_AGE": 60,
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": {"connect_timeout": 5, **(options or {})},
    }


def host_of(url: str) -> str:
    """Return the host of an address as ALLOWED_HOSTS wants it."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host
