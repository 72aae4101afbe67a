"""`make drill`, or `python -m drill`: break everything that can be broken, and report. See docs/drill.md."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from drill import report
from drill.parts import Asked, Told

VAR = Path("var/drill")


def parts() -> dict[str, Callable[[Asked], Told]]:
    """Every part by its name on the command line, in the order in which they run."""
    from drill import crashes

    return {"crashes": crashes.part}


def main() -> None:
    """Parse what is asked for, run it, write the report; exit status 1 where something failed."""
    asked, chosen, into = _arguments()
    told: list[Told] = []
    for name, part in parts().items():
        if name not in chosen:
            continue
        asked.say(f"{name}")
        began = time.monotonic()
        account = part(asked)
        account.seconds = time.monotonic() - began
        asked.say(f"{name}: {report.verdict(account)}")
        told.append(account)
        passed = report.write(told, seed=asked.seed, command=" ".join(sys.argv[1:]), into=into)
    print(report.text(told, seed=asked.seed))
    print(f"\nThe report is in {into}: report.html, report.txt, report.json")
    sys.exit(0 if told and passed else 1)


def _arguments() -> tuple[Asked, list[str], Path]:
    names = list(parts())
    parser = argparse.ArgumentParser(prog="python -m drill", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sample of each part, in about two minutes")
    parser.add_argument("--only", action="append", choices=names, help="this part; may be given several times")
    parser.add_argument("--seed", type=int, help="repeat a drill (default: a new one each time)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--into", type=Path, default=VAR, help="folder of the report")
    parser.add_argument("--workflow", default="damaged_item", help="another workflow, with DRILL_WORKFLOWS set")
    parser.add_argument("--input", type=json.loads, help="its input, as JSON")
    told = parser.parse_args()
    seed = told.seed if told.seed is not None else random.SystemRandom().randrange(10**6)
    asked = Asked(
        quick=told.quick, seed=seed, processes=told.processes, say=lambda line: print(line, flush=True),
        workflow=told.workflow, input=told.input or {},
    )  # fmt: skip
    return asked, told.only or names, told.into


if __name__ == "__main__":
    main()
