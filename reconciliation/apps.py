from django.apps import AppConfig


class ReconciliationConfig(AppConfig):
    name = "reconciliation"

    def ready(self) -> None:
        from . import checks  # noqa: F401 - registers them
