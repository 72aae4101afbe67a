"""Settings of the console: all of them come from the environment or from one file of secrets, and none needs to.

A wrong value never stops the import. It is kept as a problem, which checks.py reports and `manage.py start` prints.
"""

import contextlib
import importlib.util
import os
import sys
import zoneinfo
from pathlib import Path
from typing import Any

from console import database, logs, secrets

# The wheel's zone data counts, not the system's, which may be years old; children inherit the choice.
os.environ["PYTHONTZPATH"] = ""
zoneinfo.reset_tzpath(to=())

AFTERCALL_PROBLEMS: list[str] = []
BASE_DIR = Path(__file__).resolve().parent.parent


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in {"1", "true", "yes", "on"}


def _words(name: str, default: str = "") -> list[str]:
    return [word.strip() for word in os.environ.get(name, default).split(",") if word.strip()]


def _apps(name: str) -> list[str]:
    found = [app for app in _words(name) if importlib.util.find_spec(app.partition(".")[0])]
    AFTERCALL_PROBLEMS.extend(
        f"{name} names {app}, which Python does not find." for app in _words(name) if app not in found
    )
    return found


def _seconds(name: str, default: float) -> float:
    given = os.environ.get(name, "").strip()
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(given or default)) < float("inf"):
            return value
    AFTERCALL_PROBLEMS.append(f"{name} is not a number of seconds; it should look like {default:g}.")
    return default


EXAMPLE_PROVIDERS = ",".join(f"examples.order_desk.providers.{name}" for name in ("pay", "carrier", "mail", "tickets"))
EXAMPLE_WORKFLOWS = ",".join(f"examples.order_desk.workflow.{name}" for name in ("DAMAGED_ITEM", "TICKET_SWEEP"))

# Aftercall
AFTERCALL_VAR = Path(os.environ.get("AFTERCALL_VAR") or BASE_DIR / "var").resolve()
# Receipts that the database would not take; see docs/operate.md.
AFTERCALL_SPOOL = Path(os.environ.get("AFTERCALL_SPOOL") or AFTERCALL_VAR / "spool").resolve()
# What is known of the ledger outside its database, so that a restored one is noticed; see docs/restore.md.
AFTERCALL_ANCHOR = os.environ.get("AFTERCALL_ANCHOR") or str(AFTERCALL_VAR / "anchor.json")
AFTERCALL_ANCHOR_BACKEND = os.environ.get("AFTERCALL_ANCHOR_BACKEND") or "reconciliation.anchor.FileAnchor"
AFTERCALL_ENV = os.environ.get("AFTERCALL_ENV", "")  # "production" refuses the example for good
AFTERCALL_EXAMPLE = _flag("AFTERCALL_EXAMPLE")
AFTERCALL_URL = os.environ.get("AFTERCALL_URL", "http://127.0.0.1:8000").rstrip("/")  # where people reach the console
AFTERCALL_PROVIDERS = _words("AFTERCALL_PROVIDERS", EXAMPLE_PROVIDERS if AFTERCALL_EXAMPLE else "")
AFTERCALL_APPS = _apps("AFTERCALL_APPS")  # Django apps whose tables live beside the ledger
AFTERCALL_WORKFLOWS = _words("AFTERCALL_WORKFLOWS", EXAMPLE_WORKFLOWS if AFTERCALL_EXAMPLE else "")

# Waiting times of the ledger, in seconds. An action's own declaration (ActionSpec) says the rest.
AFTERCALL_LEASE_MARGIN = _seconds("AFTERCALL_LEASE_MARGIN", 10)  # a lease outlives the call's time-out by this
AFTERCALL_BACK_OFF = _seconds("AFTERCALL_BACK_OFF", 2)  # the first back-off; each later one doubles
AFTERCALL_BACK_OFF_CAP = _seconds("AFTERCALL_BACK_OFF_CAP", 300)
AFTERCALL_ABSENCE_SPACING = _seconds("AFTERCALL_ABSENCE_SPACING", 30)  # between two reads that count
AFTERCALL_RETENTION_MARGIN = _seconds("AFTERCALL_RETENTION_MARGIN", 600)  # taken off a provider's key retention
AFTERCALL_TAKE_AGAIN = _seconds("AFTERCALL_TAKE_AGAIN", 60)  # due work comes back if whoever took it is lost
AFTERCALL_SWEEP_BATCH = 50
# More new operations of one kind (tenant, provider, action) a minute than this: dispatch of the kind stops by itself.
AFTERCALL_MASS_LIMIT = max(1, int(_seconds("AFTERCALL_MASS_LIMIT", 1000)))
AFTERCALL_STUCK_AFTER = _seconds("AFTERCALL_STUCK_AFTER", 3600)  # running or uncertain for so long is a signal
AFTERCALL_RETENTION_EVERY = _seconds("AFTERCALL_RETENTION_EVERY", 3600)
AFTERCALL_TOMBSTONES = _seconds("AFTERCALL_TOMBSTONES", 10 * 365 * 86400)  # what is pruned is known so long
AFTERCALL_ANCHOR_EVERY = _seconds("AFTERCALL_ANCHOR_EVERY", 2)  # the anchor is written forward so often
AFTERCALL_REPLAY_WINDOW = _seconds(
    "AFTERCALL_REPLAY_WINDOW", 30 * 86400
)  # what was lost may be asked for again so long
AFTERCALL_OUTBOX_KEEP = _seconds("AFTERCALL_OUTBOX_KEEP", 14 * 86400)  # messages that are over are shown so long
AFTERCALL_NOTIFY = os.environ.get("AFTERCALL_NOTIFY", "")  # dotted path of a callable; see docs/operate.md
AFTERCALL_SCHEDULE_GRACE = _seconds("AFTERCALL_SCHEDULE_GRACE", 15)  # a start that is no later counts as on time
AFTERCALL_AUDIT_HEADS = [
    f"reconciliation.{name}.audit_heads" for name in ("transition", "schedules", "fence", "outbox")
]

_secrets = secrets.load(AFTERCALL_VAR / "secrets.json", environ=os.environ)
SECRET_KEY = _secrets.secret_key
AFTERCALL_KEY_SECRET = _secrets.key_secret  # bytes: HMAC secret of operation keys and fingerprints
AFTERCALL_SEAL_KEYS = _secrets.seal_keys  # 32 bytes each, newest first
AFTERCALL_SECRETS_PROBLEM = _secrets.problem

# Database: two roles on one database. The application works as one, migrations run as the other.
_databases = database.from_environment(os.environ, var=AFTERCALL_VAR)
DATABASES: dict[str, dict[str, Any]] = {"default": _databases.app, "owner": _databases.owner}
AFTERCALL_APP_ROLE = _databases.app["USER"]
AFTERCALL_OWNER_ROLE = _databases.owner["USER"]
AFTERCALL_DATABASE_EMBEDDED = _databases.embedded
AFTERCALL_DATABASE_PROBLEM = _databases.problem
DATABASE_ROUTERS = ["console.database.OneDatabase"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Django
DEBUG = False
USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en-us"
ROOT_URLCONF = "console.urls"
WSGI_APPLICATION = "console.wsgi.application"
INSTALLED_APPS = [
    "console",  # first: its `migrate` stands before Django's
    "reconciliation",
    "audit",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "django_htmx",
    "django_q",
    "csp",
    *AFTERCALL_APPS,
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "console.zone.reader_zone",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "console.bar.bar",
            ]
        },
    }
]
STATIC_URL = "/static/"
STATIC_ROOT = AFTERCALL_VAR / "static"
STATICFILES_DIRS = [BASE_DIR / "static"]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedManifestStaticFilesStorage"},
}
CACHES = {
    "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
    "local": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "LOCATION": "queue"},
}
LOGGING_CONFIG = "console.logs.configure"
LOGGING = logs.plan(level=os.environ.get("AFTERCALL_LOG_LEVEL", "INFO"), json=_flag("AFTERCALL_LOG_JSON"))

# Who may reach it, and what a page may load
LOOPBACK = ["127.0.0.1", "localhost", "[::1]"]
_secure = AFTERCALL_URL.startswith("https://")
ALLOWED_HOSTS = list(dict.fromkeys([*_words("AFTERCALL_HOSTS"), database.host_of(AFTERCALL_URL), *LOOPBACK]))
CSRF_TRUSTED_ORIGINS = [AFTERCALL_URL]
CSRF_COOKIE_SECURE = SESSION_COOKIE_SECURE = _secure
CSRF_COOKIE_HTTPONLY = True
CSRF_FAILURE_VIEW = "console.views.errors.csrf"
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if _flag("AFTERCALL_BEHIND_PROXY") else None
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "img-src": ["'self'", "data:"],
        "font-src": ["'self'"],
        "connect-src": ["'self'"],
        "form-action": ["'self'"],
        "base-uri": ["'none'"],
        "frame-ancestors": ["'none'"],
    }
}

# Sign-in: accounts are given, not taken; a second factor is there for who wants one.
AUTHENTICATION_BACKENDS = [
    "django.contrib.auth.backends.ModelBackend",
    "allauth.account.auth_backends.AuthenticationBackend",
]
LOGIN_URL = "account_login"
LOGIN_REDIRECT_URL = "/"
ACCOUNT_ADAPTER = "console.accounts.GivenAccounts"
ACCOUNT_LOGIN_METHODS = {"username", "email"}
ACCOUNT_EMAIL_VERIFICATION = "none"
MFA_SUPPORTED_TYPES = ["totp", "recovery_codes"]
EMAIL_BACKEND = os.environ.get("AFTERCALL_EMAIL_BACKEND", "django.core.mail.backends.console.EmailBackend")
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in ("UserAttributeSimilarityValidator", "MinimumLengthValidator", "CommonPasswordValidator")
]

# Queue: a wake-up, not a memory. `retry` is held against the number of tasks that may wait in a worker (checks.py):
# the redelivery clock starts when a task is fetched, not when it starts. `timeout` leaves a choice step the time
# that it may take to propose, which is held against it too.
Q_CLUSTER = {
    "name": "aftercall",
    "orm": "default",
    "workers": 2,
    "timeout": 180,
    "retry": 600,
    "queue_limit": 2,
    "bulk": 1,
    "poll": 0.5,
    "max_attempts": 1,
    "ack_failures": True,
    "catch_up": False,
    "save_limit": 100,
    "cache": "local",
    "log_level": "WARNING",
    "ALT_CLUSTERS": {"bulk": {"workers": 1, "timeout": 180, "retry": 600, "queue_limit": 1, "bulk": 1}},
}

# Web, worker, beat and commands are told apart in pg_stat_activity by this name.
for _alias in DATABASES.values():
    _alias["OPTIONS"]["application_name"] = f"aftercall {sys.argv[1] if len(sys.argv) > 1 else 'web'}"[:60]
