"""Settings of the tests: a throw-away folder and database, never the developer's own.

pytest imports this before anything else. The first process of a run chooses the folder; the workers of xdist and the
child processes of tests inherit it.
"""

import os
import secrets
import tempfile

if "AFTERCALL_TEST_VAR" not in os.environ:
    os.environ["AFTERCALL_TEST_VAR"] = tempfile.mkdtemp(prefix="aftercall-test-")
    os.chmod(os.environ["AFTERCALL_TEST_VAR"], 0o711)  # where root runs the tests, the database is another user's
    os.environ["AFTERCALL_TEST_SERVER"] = os.environ.pop("DATABASE_URL", "")
    os.environ.pop("DATABASE_OWNER_URL", None)
    for name in [name for name in os.environ if name.startswith("AFTERCALL_") and "TEST" not in name]:
        del os.environ[name]
    os.environ["AFTERCALL_VAR"] = os.environ["AFTERCALL_TEST_VAR"]
    os.environ["AFTERCALL_TEST_PASSWORD"] = secrets.token_hex(8)
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"  # playwright keeps an event loop in the tests' thread

from console.settings import *  # noqa: F403
from console.settings import AFTERCALL_DATABASE_EMBEDDED, DATABASES

if os.environ["AFTERCALL_TEST_SERVER"] and AFTERCALL_DATABASE_EMBEDDED:
    # Roles belong to the whole server, which may be a real one: its own are left alone.
    AFTERCALL_APP_ROLE = DATABASES["default"]["USER"] = "aftercall_test_app"
    AFTERCALL_OWNER_ROLE = DATABASES["owner"]["USER"] = "aftercall_test_owner"

STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
}
WHITENOISE_AUTOREFRESH = WHITENOISE_USE_FINDERS = True
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
