"""`choose_batch`: of many candidates those that are worth measuring together, by draws of what is not ruled out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.scratch import PlanBatch
from rlplace.measure.simulate.simulator import Simulator


def choose_batch(log_s_DC: NDArray[np.float64], best_log_s: float, count: int) -> list[int]:
    """Columns to take, at most `count`: those whose fastest is expected to be the furthest below the best so far.

    Batch expected improvement (Ginsbourger, Le Riche and Carraro 2010, "Kriging is well-suited to parallelize
    optimization", eq. 10), over draws of the posterior and greedily: each taken adds most to what those before it are
    expected to gain. Where nothing adds anything, the fastest on average comes first.

    Args:
        log_s_DC: (D, C) logarithms of step times of candidates under draws; infinite where memory does not suffice.
        best_log_s: of the best measured so far; infinite for none.
        count: how many are wanted.

    Example:
        Under both draws the first is a little faster than the best so far; the others are faster still, or slow.

        >>> choose_batch(np.array([[-0.1, -0.5, 0.4], [-0.1, 0.5, -0.2]]), 0.0, 2)
        [1, 2]
    """
    num_draws, num_candidates = log_s_DC.shape
    mean = log_s_DC.mean(axis=0)
    worst = float(log_s_DC[np.isfinite(log_s_DC)].max(initial=0.0))
    best = np.full(num_draws, min(best_log_s, worst))
    chosen: list[int] = []
    while len(chosen) < min(count, num_candidates):
        gain = np.maximum(best[:, None] - log_s_DC, 0.0).mean(axis=0)
        gain[chosen], mean[chosen] = -1.0, np.inf
        place = int(np.lexsort((mean, -gain))[0])
        best = np.minimum(best, log_s_DC[:, place])
        chosen.append(place)
    return chosen


def log_step_times(plans: Sequence[Plan], simulators: Iterable[Simulator], seconds: float) -> NDArray[np.float64]:
    """(D, C) logarithms of the step times of C plans on D simulators; infinite where memory does not suffice.

    Args:
        plans: of one problem.
        simulators: of that problem under other factors; one at least.
        seconds: after which no other simulator is asked.
    """
    batch: PlanBatch | None = None
    begin, step_s = time.monotonic(), []
    for simulator in simulators:
        batch = batch or simulator.check_plans(plans)
        step_s.append([outcome.step_time_s for outcome in simulator.retime_batch(batch)])
        if time.monotonic() - begin > seconds:
            break
    found: NDArray[np.float64] = np.log(np.array(step_s))
    return found


class AverageTimer:
    """A step timer: the geometric mean of step times on several simulators.

    A search under one set of factors ends where these, and luck, make a placement fast: what is best under many is
    rather that which is fast whatever the factors are (sample average approximation, Kleywegt, Shapiro and
    Homem-de-Mello 2002, SIAM J. Optim. 12(2)).

    Attributes:
        problem: what is searched.
        threads: placements simulated at once.

    Args:
        problem: what heuristics know of it.
        simulators: which step times are averaged; one at least.
    """

    threads = 1

    def __init__(self, problem: Problem, simulators: Sequence[Simulator]) -> None:
        self.problem = problem
        self._simulators = tuple(simulators)

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B,) seconds of placements (B, N); infinite where memory does not suffice."""
        times_s = [simulator.step_times(placements) for simulator in self._simulators]
        found: NDArray[np.float64] = np.exp(np.mean(np.log(times_s), axis=0))
        return found

    @property
    def cost(self) -> int:
        """Placements simulated for each one that is timed."""
        return len(self._simulators)
