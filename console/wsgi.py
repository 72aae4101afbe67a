"""The web face of Aftercall for a WSGI server."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
application = get_wsgi_application()

from reconciliation import workers  # noqa: E402 - its tables are known only after the set-up above

workers.serve_as("web")
