"""`python -m benchmarks`: the ledger's hot path against others, in turns, on one server. See docs/benchmarks.md."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks import contenders, dbos_steps, phases, place, plain, report


def main() -> None:
    """Parse what is asked for, and run it."""
    asked = _arguments()
    if asked.child:
        contenders.be(asked.child, seconds=asked.seconds, work=asked.work)
        return
    with place.database(parent=asked.data) as superuser, tempfile.TemporaryDirectory() as folder:
        plain.make_tables(superuser)
        work = Path(folder) / "work.json"
        plain.sample(superuser).save(work)
        dbos_steps.make_database(superuser)
        rates = _in_turns(asked, work)
        spent = phases.measure(superuser, count=max(20, int(300 * asked.seconds)))
        print(report.text(rates, spent))
        report.write(rates, spent, machine=place.machine(superuser, data=asked.data), into=asked.results)


def _in_turns(asked: argparse.Namespace, work: Path) -> dict[str, list[float]]:
    """Each round lets everybody run once, so that a slow minute of the machine slows all of them."""
    names = contenders.available(without=set(asked.without))
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(asked.rounds):
        print(f"round {number + 1} of {asked.rounds}", flush=True)
        for name in names:
            rates[name].append(contenders.measure(name, seconds=asked.seconds, work=work))
    return rates


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each contender in each round")
    parser.add_argument("--without", action="append", default=[], metavar="CONTENDER", help="leave one out")
    parser.add_argument("--data", type=Path, help="where the server keeps its data (default: a temporary folder)")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="where the figures are written")
    parser.add_argument("--child", choices=["ours", "plain", "dbos"], help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
