"""The benchmark runs: what it measures is for people to read, that it still measures is for us to know."""

import json
import subprocess
import sys

import pytest

from benchmarks import contenders, report

SLOW = (contenders.DBOS, contenders.EIGHT_PROCESSES, contenders.PGBENCH_EIGHT)


@pytest.mark.processes
def test_one_short_round_compares_the_same_work_and_writes_down_what_it_ran_on(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "--rounds", "1", "--seconds", "0.2", "--results", str(tmp_path)]
    without = [word for name in SLOW for word in ("--without", name)]
    done = subprocess.run([*command, *without], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    pairs = json.loads((tmp_path / "latest.json").read_text())
    assert [set(pair) for pair in pairs] == [{"name", "ours", "other", "unit", "ratio"}] * len(pairs)
    assert pairs[0]["name"] == f"{contenders.ONE_PROCESS} / {contenders.PLAIN}"
    (dated,) = set(tmp_path.glob("*.json")) - {tmp_path / "latest.json"}
    machine = json.loads(dated.read_text())["machine"]
    assert machine["settings"]["fsync"] == machine["settings"]["synchronous_commit"] == "on"
    assert "ledger_open" in done.stdout


def test_a_ratio_is_ours_to_theirs_of_the_medians():
    rates = {contenders.ONE_PROCESS: [90.0, 100.0, 400.0], contenders.PLAIN: [200.0, 10.0, 220.0]}
    (pair,) = report.compared(rates)
    assert (pair["ours"], pair["other"], pair["ratio"]) == (100.0, 200.0, 0.5)
