"""The part `processes`: real workers and beats, stopped at real boundaries and ended with SIGKILL.

These are tests of the suite (tests/nursery.py starts the workers, tests/world.py the outside systems); the drill runs
all that start workers, and those that restore a server's folder, and counts them.
"""

from __future__ import annotations

from drill import suite
from drill.parts import Asked, Told

FILES = (
    "tests/test_kill.py", "tests/test_run_kill.py", "tests/test_freeze.py", "tests/test_ten_assertions.py",
    "tests/test_eight_failures.py", "tests/test_five_of_scheduling.py", "tests/test_many_beats.py",
    "tests/test_local_kill.py", "tests/test_outbox_kill.py", "tests/test_restored_for_real.py",
    "tests/test_evidence.py", "tests/test_same_identity.py", "tests/test_order_desk_kill.py",
)  # fmt: skip
QUICK = ("tests/test_run_kill.py::test_killed_in_the_call_of_a_step_another_worker_goes_on",)


def part(asked: Asked) -> Told:
    """Run them."""
    ran = suite.run(QUICK if asked.quick else FILES, processes=asked.processes)
    return Told(
        name="real processes",
        asks="The same with real processes that are really killed, and effects counted at the sandbox servers.",
        counts={"tests": ran.passed + ran.failed, "passed": ran.passed},
        failures=[] if ran.sound else [ran.said[-3000:]],
    )
