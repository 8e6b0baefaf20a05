"""A process that is suspended (Ctrl-Z, `docker pause`, a batch system) blames no placement for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlplace.measure.timing import race as suspensions
from rlplace.measure.timing.race import MOST_TRIES, Suspensions, Unwatched, watched

LIMIT_S, SUSPENDED_S = 2.5, 3.0
RACES = """
import sys
import numpy as np
sys.path[:0] = sys.argv[1:3]
from faulty_ops import paused_graph
from naive_plan import naive_plan
from rlplace.measure.isolate.isolated_runner import IsolatedRunner
from rlplace.measure.isolate.messages import TimeLimits
from rlplace.measure.timing.race import MOST_TRIES, RaceProtocol
from rlplace.measure.timing.host_runner import HostRunner
from test_runner import NaivePlanner, problem_of

graph, limit_s = paused_graph(()), float(sys.argv[3])
problem, planner = problem_of(graph), NaivePlanner(graph)
plan = naive_plan(graph, np.zeros(graph.num_ops, dtype=np.int32))
here = HostRunner(problem, planner, step_timeout_s=limit_s)
apart = IsolatedRunner(problem, planner, limits=TimeLimits(longest_s=limit_s))
for runner in (here, apart):
    runner.measure_plans([plan], protocol=RaceProtocol(max_rounds=3))
    print("begins", flush=True)
    (found,) = runner.measure_plans([plan], protocol=RaceProtocol(min_rounds=25, max_rounds=25))
    print(found.status, len(found.samples_s), max(found.samples_s, default=0.0), apart.num_started, flush=True)
    runner.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="nobody stops processes here")
def test_a_suspended_race_has_no_timeout_and_no_sample_of_it() -> None:
    tests = Path(__file__).parents[2]
    command = [sys.executable, "-c", RACES, str(tests), str(tests / "measure" / "isolate"), str(LIMIT_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            for _ in ("in this process", "in a worker"):
                assert process.stdout.readline() == "begins\n"
                time.sleep(0.3)
                os.killpg(process.pid, signal.SIGSTOP)
                time.sleep(SUSPENDED_S)
                os.killpg(process.pid, signal.SIGCONT)
                status, num_samples, longest_s, num_started = process.stdout.readline().split()
                assert (status, int(num_samples), int(num_started)) == ("ok", 25, 1)
                assert float(longest_s) < SUSPENDED_S
            assert process.wait() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class Clocks:
    """Stands for `time`: moves as it is told.

    Attributes:
        now_s: of the system.
        cpu_s: of this process.
    """

    def __init__(self) -> None:
        self.now_s = self.cpu_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.cpu_s

    def move(self, seconds: float, cpu_s: float = 0.0) -> None:
        self.now_s, self.cpu_s = self.now_s + seconds, self.cpu_s + cpu_s


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(suspensions, "time", made)
    return made


def test_a_gap_without_work_is_a_suspension(clocks: Clocks) -> None:
    looks = Suspensions()
    found = []
    for seconds, cpu_s in ((0.1, 0.0), (15.0, 0.1), (0.3, 0.0), (15.0, 14.0), (7.0, 0.0)):
        clocks.move(seconds, cpu_s)
        found.append(looks.look())
    assert found == [0.0, 15.0, 0.0, 0.0, 7.0]
    assert looks.seconds == 22.0


def test_a_suspended_step_is_run_again_and_not_for_ever(clocks: Clocks) -> None:
    stops = iter([7.0, 0.1, *[7.0] * MOST_TRIES])
    ran = []

    def step() -> float:
        ran.append(next(stops))
        clocks.move(ran[-1])
        return ran[-1]

    timer = watched(step, 0, Unwatched(), Suspensions())
    assert (timer(), len(ran)) == (0.1, 2)
    assert (timer(), len(ran)) == (7.0, 2 + MOST_TRIES)
