"""`RandomSearch`: groups on devices drawn uniformly, at the same budget as everyone else."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.training.candidates import Candidates

BATCH = 64


class RandomSearch:
    """A `Proposer` that learns nothing.

    Args:
        problem: what is placed.
        seed: of what is drawn.
    """

    def __init__(self, problem: Problem, *, seed: int) -> None:
        self._problem = problem
        self._simulator = Simulator(problem)
        self._generator = np.random.default_rng(seed)

    def simulate(self, candidates: Candidates, deadline_s: float, on_round: Callable[[], None]) -> None:
        """Draws and simulates until `deadline_s`."""
        while time.monotonic() < deadline_s:
            drawn = self.propose(BATCH)
            candidates.propose(drawn, self._simulator.step_times(self._problem.grouping.expand(drawn)))
            on_round()

    def propose(self, count: int) -> NDArray[np.int32]:
        """(count, G) uniform placements, over the devices that each group may be on."""
        return self._problem.draw_groups(self._generator, count)

    def learn(self, group_devices_BG: NDArray[np.int32], ratios: NDArray[np.float64]) -> None:
        """Nothing."""
