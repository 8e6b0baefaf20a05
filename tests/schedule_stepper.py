"""Schedules under construction that tests step through, and problems to step through."""

from __future__ import annotations

import numpy as np
from search_problems import barred

from rlplace.graphs import Grouping
from rlplace.measure.problem import Problem
from rlplace.search.schedule.partial_schedule import (
    DECISION_FEATURES,
    GroupLayout,
    PartialSchedules,
    ScheduleBounds,
    decide,
    group_layout,
    new_schedules,
    next_groups,
    observe,
    schedule_bounds,
)


class Stepper:
    """B schedules of a problem's groups, with features in float64."""

    def __init__(self, problem: Problem, num_episodes: int = 1, memory_mask: str = "resident") -> None:
        grouping = problem.grouping
        self.layout: GroupLayout = group_layout(problem, grouping)
        self.bounds: ScheduleBounds = schedule_bounds(problem, grouping, self.layout, memory_mask)
        self.state: PartialSchedules = new_schedules(self.layout, self.bounds, num_episodes)
        self.episodes = np.arange(num_episodes)

    def next(self) -> np.ndarray:
        groups = np.empty(len(self.episodes), dtype=np.int64)
        next_groups(self.layout, self.state, groups)
        return groups

    def look(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shape = (len(groups), self.layout.units.time_s.shape[1])
        features, mask = np.full((*shape, len(DECISION_FEATURES)), np.nan), np.zeros(shape, dtype=np.bool_)
        observe(self.layout, self.bounds, self.state, self.episodes, groups, features, mask)
        return features, mask

    def decide(self, groups: np.ndarray, devices: np.ndarray) -> None:
        decide(self.layout, self.bounds, self.state, groups.astype(np.int64), devices.astype(np.int64))

    def place(self, placement: np.ndarray, order: np.ndarray) -> PartialSchedules:
        """The finished schedules of one placement, (G,), its groups decided in an order."""
        for group in order.tolist():
            groups = np.full(len(self.episodes), group)
            self.decide(groups, placement[groups])
        return self.state


def coarser(rng: np.random.Generator, problem: Problem) -> Grouping:
    """Groups of random ops, as many as half of them."""
    return Grouping(
        np.unique(rng.integers(0, problem.graph.num_ops // 2, problem.graph.num_ops), return_inverse=True)[1]
    )


def pinned(rng: np.random.Generator, problem: Problem) -> Problem:
    """`problem` with up to three ops that may be on one device only."""
    count = problem.graph.num_ops
    return barred(
        problem, {int(op): (int(rng.integers(problem.host.num_devices)),) for op in rng.integers(0, count, 3)}
    )
