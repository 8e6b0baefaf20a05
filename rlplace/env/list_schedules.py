"""`ListSchedules`: what the list scheduler makes of weights over named groupings, as actions of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.problem import Problem
from rlplace.search.improve.greedy_starts import FIRST_WEIGHTS, GROUPINGS, Pair, Schedulers
from rlplace.search.improve.warm_starts import held_bytes, room_bytes
from rlplace.search.schedule.eft import ESTIMATES, Estimator
from rlplace.search.schedule.greedy import FEATURES

__all__ = ["ESTIMATES", "FEATURES", "FIRST_WEIGHTS", "GROUPINGS", "ListSchedules", "Pair"]


class ListSchedules:
    """A problem's list schedulers over the groupings of `GROUPINGS`, each laid out when it is first asked for.

    Args:
        problem: what is placed.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.schedulers = Schedulers(problem)

    def place(self, pairs: Sequence[Pair]) -> NDArray[np.int32]:
        """(B, N) int32 devices of ops: for each pair of a grouping's name and weights (9,), what it makes of them."""
        placed = np.empty((len(pairs), self._problem.graph.num_ops), dtype=np.int32)
        for row, (name, weights) in enumerate(pairs):
            scheduler = self.schedulers[name]
            placed[row] = scheduler.grouping.expand(scheduler.place(np.array(weights)))[0]
        return placed

    def estimate(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B, 6) `ESTIMATES` of placements (B, N): nothing of it is simulated."""
        return self._estimator.of(placements)

    @cached_property
    def _estimator(self) -> Estimator:
        every = Grouping(np.arange(self._problem.graph.num_ops, dtype=np.int32))
        return Estimator.of_problem(self._problem, held_bytes(self._problem, every), room_bytes(self._problem))
