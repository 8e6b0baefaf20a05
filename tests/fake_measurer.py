"""A measurer whose step times anyone can work out in the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from micrographs import op_graph
from numpy.typing import NDArray
from random_problems import plain_host

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.timing.eager_step import EagerRecipe
from rlplace.measure.timing.race import RaceProtocol


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


class RacingRunner:
    """A runner whose steps take no time, and as long as they are said to.

    Args:
        steps_s: seconds of a step of each plan, by fingerprint.
        eager_s: of plain PyTorch, with all threads and with one.
    """

    reference = None

    def __init__(self, steps_s: Mapping[str, float], eager_s: tuple[float, float] | None) -> None:
        self._steps_s, self._eager_s = steps_s, eager_s

    def measure_plans(
        self,
        plans: Sequence[Plan],
        *,
        protocol: RaceProtocol,
        others: Sequence[EagerRecipe] = (),
        deadline_s: float = float("inf"),
    ) -> list[Measurement]:
        times_s = [self._steps_s[plan.fingerprint] for plan in plans]
        times_s += [(self._eager_s or ())[other.num_threads == 1] for other in others]
        return [Measurement("ok", each_s, (each_s,) * protocol.max_rounds) for each_s in times_s]
