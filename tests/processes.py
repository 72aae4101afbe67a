"""Child processes of tests: they die with the test process, whatever happens to it."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from time import monotonic, sleep
from typing import Any

from console import tether


def spawn(*argv: str, env: Mapping[str, str], **options: Any) -> "subprocess.Popen[str]":
    """Start `python argv...` tied to this process; forks of it are tied to it in turn."""
    return subprocess.Popen(
        tether.command(sys.executable, *argv), env={**env, "AFTERCALL_TETHERED": "1"}, text=True, **options
    )


def wait_until(condition: Callable[[], Any], *, seconds: float = 10.0, every: float = 0.02) -> Any:
    """Return the first true value of `condition`; fail after `seconds`."""
    deadline = monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert monotonic() < deadline, f"still not so after {seconds} s: {condition}"
        sleep(every)
