"""Where people reach the console, for commands that run in another shell than `manage.py start`."""

import contextlib
import os
from pathlib import Path

from django.conf import settings


def leave() -> None:
    """Write the address of this start where commands find it; it stays, since the next start is likely to be alike."""
    file = _file()
    new = file.with_name(f"{file.name}.new")
    new.write_text(f"{settings.AFTERCALL_URL}\n", encoding="utf-8")
    new.replace(file)  # whole or not at all: a command may be reading it


def of_console() -> str:
    """Return AFTERCALL_URL where the environment has one, else the address of the last start, else the default."""
    if not os.environ.get("AFTERCALL_URL"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if left := _file().read_text(encoding="utf-8").strip():
                return left
    return str(settings.AFTERCALL_URL)


def _file() -> Path:
    return Path(settings.AFTERCALL_VAR) / "address"
