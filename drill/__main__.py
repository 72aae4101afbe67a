"""`make drill`, or `python -m drill`: break everything that can be broken, and report. See docs/drill.md."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from drill import place, report
from drill.parts import Asked, Told

VAR = Path("var/drill")


PARTS = {
    "crashes": "drill.crashes",
    "processes": "drill.processes",
    "duplicates": "drill.duplicates",
    "model": "drill.model",
    "pulled": "drill.pulled",
    "restored": "drill.restored",
    "mutations": "drill.mutations",
}  # in the order in which they run


def main() -> None:
    """Parse what is asked for, run it, write the report; exit status 1 where something failed."""
    arguments = _arguments()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    told: list[Told] = []
    passed = False
    with place.server() as folder:
        asked = Asked(
            quick=arguments.quick, seed=seed, processes=arguments.processes, say=lambda line: print(line, flush=True),
            folder=folder, workflow=arguments.workflow, input=arguments.input or {},
        )  # fmt: skip
        for name in arguments.only or PARTS:
            told.append(_one(name, asked))
            passed = report.write(told, seed=seed, command=" ".join(sys.argv[1:]), into=arguments.into)
    print(report.text(told, seed=seed))
    print(f"\nThe report is in {arguments.into}: report.html, report.txt, report.json")
    sys.exit(0 if passed else 1)


def _one(name: str, asked: Asked) -> Told:
    asked.say(f"{name} begins")
    began = time.monotonic()
    try:
        part: Callable[[Asked], Told] = import_module(PARTS[name]).part  # it needs Django, which a server sets up
        account = part(asked)
    except KeyboardInterrupt:
        raise
    except BaseException:  # the other parts are still worth a report, and so is this
        account = Told(name=name, asks="This part came to no end.", failures=[traceback.format_exc()[-3000:]])
    account.seconds = time.monotonic() - began
    asked.say(f"{name}: {report.verdict(account)} after {account.seconds:.0f} s")
    return account


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m drill", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sample of each part, in about two minutes")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part; may be given several times")
    parser.add_argument("--seed", type=int, help="repeat a drill (default: a new one each time)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--into", type=Path, default=VAR, help="folder of the report")
    parser.add_argument("--workflow", default="damaged_item", help="another workflow, with DRILL_WORKFLOWS set")
    parser.add_argument("--input", type=json.loads, help="its input, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
