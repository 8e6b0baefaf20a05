"""Races between timers that tell fixed times on a fixed clock.

`idle_share`: from the machine's own counters, here made up.

A process that is suspended (Ctrl-Z, `docker pause`, a batch system) blames no placement for it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from rlplace.errors import InvalidValue
from rlplace.measure.timing import race as idle
from rlplace.measure.timing import race as suspensions
from rlplace.measure.timing.race import (
    MOST_TRIES,
    WARM_S,
    RaceProtocol,
    Suspensions,
    Watch,
    as_in_a_loop,
    idle_share,
    race,
    watched,
)

PROTOCOL = RaceProtocol(warmup=1, min_rounds=3, max_rounds=10, margin=0.05, hopeless=2.0)


class Machine:
    """Time passes only while a timer runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.order: list[str] = []

    def clock(self) -> float:
        return self.now_s

    def timer(self, name: str, times_s: float | Iterable[float]) -> Callable[[], float]:
        times = iter(times_s) if not isinstance(times_s, float) else None

        def run() -> float:
            seconds = next(times) if times is not None else float(times_s)  # type: ignore[arg-type]
            self.now_s += seconds
            self.order.append(name)
            return seconds

        return run


@pytest.mark.parametrize(("cold_s", "expected_s", "steps"), [(WARM_S / 2, 0.001, 2), (WARM_S, WARM_S, 1)])
def test_a_short_step_is_timed_after_another_of_its_own(cold_s: float, expected_s: float, steps: int) -> None:
    machine = Machine()
    timer = as_in_a_loop(machine.timer("step", [cold_s, 0.001]), has_team=False)
    assert (timer(), len(machine.order)) == (expected_s, steps)


def failing(after: int, error: Exception) -> Callable[[], float]:
    calls = 0

    def run() -> float:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        return 1.0

    return run


def test_equal_contenders_run_every_round_beside_the_reference() -> None:
    machine = Machine()
    contenders = [machine.timer(name, 1.0) for name in "ab"]
    lanes = race(contenders, machine.timer("reference", 4.0), PROTOCOL, clock=machine.clock)
    assert [lane.samples_s for lane in lanes] == [[1.0] * 10] * 2
    assert [lane.references_s for lane in lanes] == [[4.0] * 10] * 2
    assert lanes[0].ratios == [0.25] * 10
    assert not any(lane.dropped or lane.error for lane in lanes)
    assert [machine.order.count(name) for name in ("a", "b", "reference")] == [11, 11, 11]
    rounds = [machine.order[3 + 3 * k : 6 + 3 * k] for k in range(10)]
    assert all(round_[0] == "reference" and set(round_[1:]) == {"a", "b"} for round_ in rounds)
    assert len({tuple(round_) for round_ in rounds}) == 2, "the order changes from round to round"


def test_a_clearly_slower_contender_leaves_after_the_least_rounds_and_a_hopeless_one_after_the_first() -> None:
    machine = Machine()
    contenders = [machine.timer("fast", 1.0), machine.timer("slow", 1.2), machine.timer("hopeless", 2.1)]
    lanes = race(contenders, None, PROTOCOL, clock=machine.clock)
    assert [len(lane.samples_s) for lane in lanes] == [10, 3, 1]
    assert [lane.dropped for lane in lanes] == [False, True, True]


@pytest.mark.parametrize("other_s", [1.04, [1.0] + [0.8, 1.8] * 5], ids=["within the margin", "scattered"])
def test_who_is_not_clearly_slower_stays(other_s: float | list[float]) -> None:
    machine = Machine()
    lanes = race([machine.timer("a", 1.0), machine.timer("b", other_s)], None, PROTOCOL, clock=machine.clock)
    assert [len(lane.samples_s) for lane in lanes] == [10, 10]
    assert not lanes[1].dropped


def test_a_drift_of_the_machine_cancels_in_the_ratios() -> None:
    """Everything takes three times as long from the fifth round on, and the ratio stays."""
    machine = Machine()
    drift = [1.0] * 5 + [3.0] * 6
    reference = machine.timer("reference", [2.0 * factor for factor in drift])
    contender = machine.timer("a", [1.0 * factor for factor in drift])
    lanes = race([contender], reference, PROTOCOL, clock=machine.clock)
    assert lanes[0].ratios == [0.5] * 10


def test_a_clock_that_sees_no_step_makes_no_ratio_of_nothing() -> None:
    (lane,) = race([lambda: 0.0], lambda: 0.0, PROTOCOL)
    assert lane.samples_s == lane.references_s == [1e-9] * 10
    assert lane.ratios == [1.0] * 10


@pytest.mark.parametrize("after", [0, 1, 4])
def test_who_raises_stops_and_the_race_goes_on(after: int) -> None:
    machine, error = Machine(), ValueError("boom")
    lanes = race([failing(after, error), machine.timer("a", 1.0)], None, PROTOCOL, clock=machine.clock)
    assert lanes[0].error is error
    assert len(lanes[0].samples_s) == max(after - 1, 0)
    assert lanes[1].error is None
    assert len(lanes[1].samples_s) == 10


@pytest.mark.parametrize("after", [0, 3])
def test_what_is_fatal_ends_the_race_for_all(after: int) -> None:
    machine, error = Machine(), ValueError("boom")
    contenders = [failing(after, error), machine.timer("a", 1.0)]
    with pytest.raises(ValueError, match="boom"):
        race(contenders, None, PROTOCOL, is_fatal=lambda each: each is error)
    assert len(race([failing(0, error)], None, PROTOCOL, is_fatal=lambda each: False)) == 1


def test_when_all_have_failed_it_ends_and_a_race_of_nobody_is_no_error() -> None:
    machine = Machine()
    lanes = race([failing(0, ValueError())] * 2, machine.timer("reference", 1.0), PROTOCOL, clock=machine.clock)
    assert all(lane.error is not None and not lane.samples_s for lane in lanes)
    assert machine.order == ["reference"]
    assert race([], None, PROTOCOL) == []


def test_a_failing_reference_and_an_interrupt_are_not_swallowed() -> None:
    with pytest.raises(ValueError, match="boom"):
        race([lambda: 1.0], failing(3, ValueError("boom")), PROTOCOL)

    def interrupted() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race([interrupted], None, PROTOCOL)


def test_the_deadline_ends_it_after_a_round_but_everyone_has_run_once() -> None:
    machine = Machine()
    contenders = [machine.timer(name, 1.0) for name in "abc"]
    lanes = race(contenders, None, PROTOCOL, deadline_s=8.5, clock=machine.clock)
    # warm-up until 3 s, rounds until 6 s and 9 s
    assert [len(lane.samples_s) for lane in lanes] == [2, 2, 2]
    lanes = race(contenders, None, PROTOCOL, deadline_s=0.0, clock=machine.clock)
    assert [len(lane.samples_s) for lane in lanes] == [1, 1, 1]


def test_one_seed_gives_one_order() -> None:
    def order(seed: int) -> list[str]:
        machine = Machine()
        protocol = RaceProtocol(warmup=0, min_rounds=1, max_rounds=6, seed=seed)
        race([machine.timer(name, 1.0) for name in "abcd"], None, protocol, clock=machine.clock)
        return machine.order

    assert order(3) == order(3)
    assert order(3) != order(4)


@pytest.mark.parametrize("rounds", [{"warmup": -1}, {"min_rounds": 0}, {"min_rounds": 4, "max_rounds": 3}])
def test_protocols_without_sense_are_refused(rounds: dict[str, int]) -> None:
    with pytest.raises(InvalidValue, match="min_rounds <= max_rounds"):
        RaceProtocol(**rounds)  # type: ignore[arg-type]


def test_traced_steps_are_no_part_of_what_a_protocol_is_known_by() -> None:
    assert repr(RaceProtocol(num_traced=3)) == repr(RaceProtocol()), "the timed steps are the same"
    assert RaceProtocol(num_traced=3) != RaceProtocol()
    with pytest.raises(InvalidValue, match="num_traced"):
        RaceProtocol(num_traced=-1)


def test_idle_share(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([[10, 0, 10, 100, 0, 0, 0, 0], [40, 0, 20, 150, 10, 0, 0, 0]])
    monkeypatch.setattr(idle, "_cpu_times", lambda: next(times))
    assert idle_share(0.0) == 0.6

    def unknown() -> list[int]:
        raise OSError

    monkeypatch.setattr(idle, "_cpu_times", unknown)
    assert math.isnan(idle_share(0.0))


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
from test_isolated_runner import NaivePlanner, problem_of

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

    timer = watched(step, 0, Watch(), Suspensions())
    assert (timer(), len(ran)) == (0.1, 2)
    assert (timer(), len(ran)) == (7.0, 2 + MOST_TRIES)
