import os

from django.apps import AppConfig

from console import tether


class ConsoleConfig(AppConfig):
    name = "console"

    def ready(self) -> None:
        from console import checks  # noqa: F401  (registers them)

        # Set by `manage.py start`: forked workers of its children must not outlive them.
        if os.environ.get("AFTERCALL_TETHERED"):
            tether.tie_forks()
