"""Start one sandbox provider: `python -m examples.order_desk.sandbox --provider pay --port 8701 --data var/sandbox`."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

from .desks import DESKS
from .server import Sandbox

PR_SET_PDEATHSIG = 1


def main() -> None:
    options = _options()
    if options.parent:
        _die_with(options.parent)
    try:
        sandbox = Sandbox(
            DESKS[options.provider], host=options.host, port=options.port, data=options.data, token=options.token
        )
    except OSError as error:
        sys.exit(f"The sandbox provider {options.provider} cannot listen on {options.host}:{options.port}: {error}.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(f"{options.provider} listens on http://{options.host}:{sandbox.server_address[1]}", flush=True)  # noqa: T201
    try:
        sandbox.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        sys.exit(0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.order_desk.sandbox", description=__doc__)
    parser.add_argument("--provider", "--only", required=True, choices=sorted(DESKS))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one; the first line printed names it")
    parser.add_argument("--data", type=Path, required=True, help="folder of the SQLite file")
    parser.add_argument("--token", help="bearer token; by default $ORDER_DESK_<PROVIDER>_TOKEN or sandbox-token")
    parser.add_argument("--parent", type=int, help="end when this parent process does")
    options = parser.parse_args()
    variable = f"ORDER_DESK_{options.provider.upper()}_TOKEN"
    options.token = options.token or os.environ.get(variable) or "sandbox-token"
    return options


def _die_with(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent dies; it may have died before we asked."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(0)


if __name__ == "__main__":
    main()
