"""Logging: structlog for our own lines and for those of libraries, readable by default, JSON where asked."""

import logging.config
from typing import Any

import structlog

STEPS: list[Any] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]


class OneLine(logging.Filter):
    """A refused request, or one that met no database, is one line: its traceback says nothing of our code.

    Only a 500 keeps it. The text may repeat what a stranger sent, so line breaks are taken out.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        status = getattr(record, "status_code", 500)
        if record.name.startswith("django.") and status != 500 and record.exc_info:
            what, path = record.exc_info[0], getattr(getattr(record, "request", None), "path", "")
            text = f"{status} {path} {what.__name__ if what else ''}: {record.getMessage()}"
            record.msg, record.args = " ".join(text.split()), ()
            record.exc_info = record.exc_text = None
        return True


def plan(*, level: str, json: bool) -> dict[str, Any]:
    """Return the logging settings: one handler on standard error."""
    last: Any = structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=False)
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "lines": {
                "()": structlog.stdlib.ProcessorFormatter,
                "foreign_pre_chain": STEPS,
                "processors": [structlog.stdlib.ProcessorFormatter.remove_processors_meta, last],
            }
        },
        "filters": {"one line": {"()": OneLine}},
        "handlers": {"lines": {"class": "logging.StreamHandler", "formatter": "lines", "filters": ["one line"]}},
        "root": {"handlers": ["lines"], "level": level},
        "loggers": {"django-q": {"level": "WARNING"}},  # it tells of every process that it forks
    }


def configure(plan: dict[str, Any]) -> None:
    """Apply the plan, and have structlog hand its events to the same handler."""
    logging.config.dictConfig(plan)
    structlog.configure(
        processors=[*STEPS, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
