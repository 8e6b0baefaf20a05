"""`is_cut_faster`: whether micro-batches that are chosen by simulation also pay on this machine, in one race."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import RunnerError
from rlplace.measure.isolate.isolated_runner import make_runner
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.race import RaceProtocol
from rlplace.report.format import format_seconds
from rlplace.search.registry import find
from rlplace.search.rules.baselines import nearest_allowed, single
from rlplace.search.task import Budget

RACE = RaceProtocol(max_rounds=15, min_rounds=15, hopeless=math.inf)
EVALUATIONS = 1000
"""Placements that are simulated to find what the whole batch races with."""


def is_cut_faster(
    cut: Problem,
    devices: NDArray[np.int32],
    whole: Problem,
    *,
    seed: int,
    say: Callable[[str], None],
    isolated: bool | None = None,
) -> bool:
    """Whether a placement of the step in micro-batches is measured faster than a searched one of the whole batch.

    A profile does not know how devices slow each other down, which favours whatever keeps all of them busy. So the
    simulator's choice is raced before it is taken, against everything on one device, or on one gang, too.

    Args:
        cut: in micro-batches, on a host of this machine.
        devices: (N,) of its best placement.
        whole: the same step and host, its batch not cut.
        seed: of the search for the whole batch.
        say: told both step times.
        isolated: whether they run in worker processes, one for each of the two steps; see `Evaluator`.
    """
    planner = Simulator(whole)
    found = find(whole, "portfolio", planner, Budget(evaluations=EVALUATIONS), seed=seed)
    if found.devices is None:
        return True
    first = Simulator(cut)
    with contextlib.ExitStack() as stack:
        runners = []
        for problem, simulator in ((cut, first), (whole, planner)):
            runners.append(make_runner(problem, simulator, reference=None, seed=seed, isolated=isolated))
            stack.callback(runners[-1].close)
        runner, other = runners
        try:
            rivals = [other.timer(planner.plan(each)) for each in (found.devices, _on_one_device(whole, planner))]
            outcome, *rivals_s = runner.measure_plans([first.plan(devices)], protocol=RACE, others=rivals)
        except (RunnerError, TimeoutError, MemoryError) as error:
            say(f"micro-batches are not raced: {error}")
            return False
    beside = min(rivals_s, key=lambda rival: rival.step_time_s)
    count = cut.graph.num_micro_batches
    say(
        f"measured: {format_seconds(outcome.step_time_s)} in {count} micro-batches, "
        f"{format_seconds(beside.step_time_s)} with the whole batch"
    )
    return outcome.ok and outcome.step_time_s <= beside.step_time_s


def _on_one_device(problem: Problem, simulator: Simulator) -> NDArray[np.int32]:
    """(N,) int32: everything on the device, or the gang, with the shortest simulated step."""
    rows = np.stack([single(problem, device) for device in range(problem.host.num_devices)])
    best: NDArray[np.int32] = nearest_allowed(problem, rows)[int(np.argmin(simulator.step_times(rows)))]
    return best
