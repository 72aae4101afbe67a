"""Settings of the console: read from the environment, checked at start (see checks.py)."""

from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent.parent
SECRET_KEY = "only-until-the-house-is-built"
DEBUG = False
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "console.urls"
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "audit",
    "reconciliation",
    "console",
]
DATABASES: dict[str, dict[str, object]] = {}
