"""Annealing over fixed groups finds optima that brute force knows, from wherever it starts."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from search_problems import brute_force_s, fork_problem, tight_problem

from rlplace.measure.simulate.simulator import Simulator
from rlplace.search import AnnealSettings, anneal_from
from rlplace.search.task import Budget


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_it_finds_the_brute_force_optimum(seed: int) -> None:
    problem = fork_problem(seed)
    simulator = Simulator(problem, threads=1)
    start = np.zeros(6, dtype=np.int32)
    placement, step_s = anneal_from(
        problem, simulator, start, Budget(3000), seed=seed, settings=AnnealSettings(hot=0.3)
    )
    assert step_s == pytest.approx(brute_force_s(problem), rel=1e-12)
    assert simulator.step_times(placement[None])[0] == step_s


def test_same_seed_same_answer_and_never_worse_than_its_start() -> None:
    problem = fork_problem(7)
    simulator = Simulator(problem, threads=1)
    start = np.array([0, 1, 0, 1, 0, 1], dtype=np.int32)
    first = anneal_from(problem, simulator, start, Budget(200), seed=3)
    second = anneal_from(problem, simulator, start, Budget(200), seed=3)
    assert np.array_equal(first[0], second[0])
    assert first[1] == second[1] <= simulator.step_times(start[None])[0]


def test_an_infeasible_start_is_left_behind_and_no_infeasible_placement_wins() -> None:
    problem = fork_problem(1)

    class OnlyMixed:
        def step_times(self, placements: np.ndarray) -> np.ndarray:
            mixed = placements.sum(axis=1)
            return np.where(mixed == 0, np.inf, mixed.astype(float))

    placement, step_s = anneal_from(problem, OnlyMixed(), np.zeros(6, dtype=np.int32), Budget(500))
    assert step_s == 1.0
    assert placement.sum() == 1


def test_it_scores_no_more_than_its_budget_and_asks_for_critical_paths_of_what_it_scored() -> None:
    problem = fork_problem(3)

    class Recording(Simulator):
        scored: ClassVar[set[bytes]] = set()
        seen: ClassVar[set[bytes]] = set()
        count = 0

        def step_times(self, placements: np.ndarray, priorities: np.ndarray | None = None) -> np.ndarray:
            self.scored.update(row.tobytes() for row in placements)
            Recording.count += len(placements)
            return super().step_times(placements, priorities)

        def step_times_within(
            self, placements: np.ndarray, cutoff_s: np.ndarray, priorities: np.ndarray | None = None
        ) -> np.ndarray:
            self.scored.update(row.tobytes() for row in placements)
            Recording.count += len(placements)
            return super().step_times_within(placements, cutoff_s, priorities)

        def critical_ops(self, devices: np.ndarray, priorities: np.ndarray | None = None) -> np.ndarray:
            self.seen.add(devices.tobytes())
            return super().critical_ops(devices, priorities)

    anneal_from(problem, Recording(problem, threads=1), np.zeros(6, dtype=np.int32), Budget(200), seed=1)
    assert Recording.count == 200
    assert len(Recording.seen) > 1
    assert Recording.seen <= Recording.scored


@pytest.mark.parametrize("seed", range(5))
def test_it_spreads_what_does_not_fit(seed: int) -> None:
    problem = tight_problem(12, 3, seed)
    simulator = Simulator(problem, threads=1)
    full = np.zeros(12, dtype=np.int32)
    assert simulator.step_times(problem.grouping.expand(full)[None])[0] == np.inf
    placement, step_s = anneal_from(problem, simulator, full, Budget(1500), seed=seed)
    assert np.isfinite(step_s)
    assert simulator.step_times(problem.grouping.expand(placement)[None])[0] == step_s
