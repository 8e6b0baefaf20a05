"""Annealing finds optima that brute force knows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from micrographs import op_graph

from rlplace.errors import InvalidValue
from rlplace.graphs import Grouping
from rlplace.measure.costs import Costs
from rlplace.measure.host import Device, Host, Link, Route
from rlplace.measure.problem import Problem
from rlplace.measure.simulator import Simulator
from rlplace.search import AnnealConfig, anneal


def fork_problem(seed: int) -> Problem:
    generator = np.random.default_rng(seed)
    reads = [[], [0], [0], [0], [1, 2], [2, 3], [4, 5]]
    host = Host(
        "two", tuple(Device(f"d{k}", "k", "simulated", 1 << 30) for k in range(2)),
        (Link("a", 1e3), Link("b", 1e3)), (Route("d0", "d1", ("a",)), Route("d1", "d0", ("b",))),
    )  # fmt: skip
    graph = op_graph(reads, generator.integers(1, 3000, len(reads)).tolist())
    costs = Costs(generator.uniform(0.5, 3.0, (len(reads), 2)), "estimated")
    return Problem(graph, host, costs, Grouping(np.arange(len(reads))))


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_the_brute_force_optimum(seed: int) -> None:
    problem = fork_problem(seed)
    simulator = Simulator(problem, threads=1)
    every = np.array(list(itertools.product(range(2), repeat=7)), dtype=np.int32)
    best_s = simulator.step_times(every).min()
    start = np.zeros(7, dtype=np.int32)
    placement, step_s = anneal(problem, simulator, start, AnnealConfig(evaluations=4000, hot=0.3, seed=seed))
    assert step_s == pytest.approx(best_s, rel=1e-12)
    assert simulator.step_times(placement[None])[0] == step_s


def test_same_seed_same_answer_and_never_worse_than_its_start() -> None:
    problem = fork_problem(7)
    simulator = Simulator(problem, threads=1)
    start = np.array([0, 1, 0, 1, 0, 1, 0], dtype=np.int32)
    first = anneal(problem, simulator, start, AnnealConfig(evaluations=200, seed=3))
    second = anneal(problem, simulator, start, AnnealConfig(evaluations=200, seed=3))
    assert np.array_equal(first[0], second[0])
    assert first[1] == second[1] <= simulator.step_times(start[None])[0]


def test_an_infeasible_start_is_left_behind_and_no_infeasible_placement_wins() -> None:
    problem = fork_problem(1)

    class OnlyMixed:
        def step_times(self, placements: np.ndarray) -> np.ndarray:
            mixed = placements.sum(axis=1)
            return np.where(mixed == 0, np.inf, mixed.astype(float))

    placement, step_s = anneal(problem, OnlyMixed(), np.zeros(7, dtype=np.int32), AnnealConfig(evaluations=500))
    assert step_s == 1.0
    assert placement.sum() == 1


def test_nonsense_options_are_refused() -> None:
    with pytest.raises(InvalidValue, match="evaluations"):
        AnnealConfig(evaluations=0)
