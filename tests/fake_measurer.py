"""A measurer whose step times anyone can work out in the head."""

from __future__ import annotations

import numpy as np
from micrographs import op_graph
from numpy.typing import NDArray
from random_problems import plain_host

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Problem


def chain_problem(num_ops: int, num_devices: int = 2) -> Problem:
    """A chain of one-second ops, each its own group."""
    chain = op_graph([[], *([i] for i in range(num_ops - 1))])
    costs = Costs(np.ones((num_ops, num_devices)), "estimated")
    return Problem(chain, plain_host(num_devices), costs, Grouping(np.arange(num_ops)))


class CountingMeasurer:
    """A step takes one second and one more for each op that is not where `wanted` has it.

    Attributes:
        batches: the placements of every call.
    """

    def __init__(self, problem: Problem, wanted: list[int], failing: list[int] | None = None) -> None:
        self.problem = problem
        self.wanted = np.array(wanted)
        self.failing = None if failing is None else np.array(failing)
        self.batches: list[NDArray[np.int32]] = []

    def measure(self, placements: NDArray[np.int32]) -> list[Measurement]:
        self.batches.append(placements.copy())
        return [self._measure(placement) for placement in placements]

    def _measure(self, placement: NDArray[np.int32]) -> Measurement:
        if self.failing is not None and np.array_equal(placement, self.failing):
            return Measurement("oom", float("inf"), why="out of memory")
        return Measurement("ok", 1.0 + float((placement != self.wanted).sum()))


class TimingMeasurer(CountingMeasurer):
    """The same with `step_times`, as the simulator has it.

    Attributes:
        timed: the placements of every call of `step_times`.
    """

    def __init__(self, problem: Problem, wanted: list[int], failing: list[int] | None = None) -> None:
        super().__init__(problem, wanted, failing)
        self.timed: list[NDArray[np.int32]] = []

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        self.timed.append(placements.copy())
        return np.array([self._measure(placement).step_time_s for placement in placements])
