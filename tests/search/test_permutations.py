"""Relabelled devices: which are found, which are drawn, and what is not allowed."""

from __future__ import annotations

import dataclasses
from itertools import permutations

import numpy as np
import pytest
from numpy.typing import NDArray
from search_problems import barred, chain_problem

from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.diversity import permutations_of, permuted, shuffled


class Table:
    """A timer of placements of one op a device: the sum of what each op takes where it is; keeps what it timed."""

    def __init__(self, op_time_s: NDArray[np.float64]) -> None:
        self.op_time_s = op_time_s
        self.timed: list[tuple[int, ...]] = []

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        self.timed += [tuple(row) for row in placements.tolist()]
        return self.op_time_s[np.arange(placements.shape[1]), placements].sum(axis=1)


def with_kinds(problem: Problem, kinds: str) -> Problem:
    devices = tuple(dataclasses.replace(d, kind=kind) for d, kind in zip(problem.host.devices, kinds, strict=True))
    return dataclasses.replace(problem, host=dataclasses.replace(problem.host, devices=devices))


def test_the_descent_ends_where_no_swap_helps() -> None:
    """Three ops, three devices: op k is best on device 2 - k, which one swap gives."""
    op_time_s = np.array([[3.0, 2.0, 1.0], [2.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
    timer = Table(op_time_s)
    best, best_s = permuted(chain_problem(3, 3), np.array([0, 1, 2], dtype=np.int32), 7.0, timer, most=100)
    assert best.tolist() == [2, 1, 0]
    assert best_s == 3.0
    assert len(timer.timed) == len(set(timer.timed))
    assert (0, 1, 2) not in timer.timed


@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_no_more_are_timed_than_may_be(most: int) -> None:
    timer = Table(np.random.default_rng(0).random((4, 4)))
    start = np.arange(4, dtype=np.int32)
    best, best_s = permuted(chain_problem(4, 4), start, np.inf, timer, most=most)
    assert len(timer.timed) == most
    assert best_s == (min(timer.op_time_s[np.arange(4), row].sum() for row in timer.timed) if most else np.inf)
    assert (best is start) is False
    assert start.tolist() == [0, 1, 2, 3]


def test_only_devices_of_the_same_kind_are_swapped() -> None:
    problem = with_kinds(chain_problem(4, 4), "abab")
    timer = Table(np.array([[9.0, 8.0, 2.0, 0.0]] * 2 + [[1.0] * 4] * 2))
    best, best_s = permuted(problem, np.array([0, 0, 1, 1], dtype=np.int32), 20.0, timer, most=100)
    assert best.tolist() == [2, 2, 1, 1]
    assert best_s == 6.0
    assert {row[0] for row in timer.timed} <= {0, 2}
    drawn = permutations_of(problem, np.array([0, 1, 2, 3], dtype=np.int32), np.random.default_rng(0), 10)
    assert sorted(drawn.tolist()) == [[0, 3, 2, 1], [2, 1, 0, 3], [2, 3, 0, 1]]


def test_pins_hold() -> None:
    problem = barred(chain_problem(3, 3), {0: (0,)})
    timer = Table(np.array([[9.0, 0.0, 0.0], [1.0, 5.0, 4.0], [1.0, 2.0, 6.0]]))
    best, _ = permuted(problem, np.array([0, 1, 2], dtype=np.int32), 20.0, timer, most=100)
    assert best.tolist() == [0, 2, 1]
    assert timer.timed == [(0, 2, 1)]
    drawn = permutations_of(problem, np.array([0, 1, 2], dtype=np.int32), np.random.default_rng(0), 10)
    assert drawn.tolist() == [[0, 2, 1]]


def test_a_swap_of_devices_that_are_not_used_is_not_timed() -> None:
    timer = Table(np.ones((2, 4)))
    permuted(chain_problem(2, 4), np.array([0, 0], dtype=np.int32), 2.0, timer, most=100)
    assert sorted(timer.timed) == [(1, 1), (2, 2), (3, 3)]


def test_all_relabellings_are_drawn_where_all_are_wanted_and_the_same_for_the_same_seed() -> None:
    problem, start = chain_problem(3, 3), np.array([0, 1, 2], dtype=np.int32)
    drawn = permutations_of(problem, start, np.random.default_rng(1), 5)
    assert {tuple(row) for row in drawn.tolist()} == set(permutations(range(3))) - {(0, 1, 2)}
    assert np.array_equal(drawn, permutations_of(problem, start, np.random.default_rng(1), 5))
    assert permutations_of(problem, start, np.random.default_rng(1), 2).shape == (2, 3)
    assert permutations_of(problem, start, np.random.default_rng(1), 0).shape == (0, 3)


def test_one_device_of_each_kind_has_no_other_version() -> None:
    problem, start = with_kinds(chain_problem(3, 2), "ab"), np.array([0, 1, 0], dtype=np.int32)
    assert permutations_of(problem, start, np.random.default_rng(0), 3).shape == (0, 3)
    timer = Table(np.ones((3, 2)))
    best, best_s = permuted(problem, start, 3.0, timer, most=9)
    assert (best.tolist(), best_s, timer.timed) == ([0, 1, 0], 3.0, [])


def test_what_is_relabelled_keeps_to_the_simulators_rules() -> None:
    """Ops 0 and 2 live together; on the simulator a device that is twice as fast gets more of the chain."""
    free = chain_problem(4, 3, colocation=[0, -1, 0, -1])
    costs = Costs(np.array([[2.0, 2.0, 1.0]] * 4), "estimated")
    problem = dataclasses.replace(free, costs=costs)
    simulator, start = Simulator(problem, threads=1), np.array([0, 0, 0, 1], dtype=np.int32)
    best, best_s = permuted(problem, start, float(simulator.step_times(start)[0]), simulator, most=50)
    assert best[0] == best[1] == best[2] == 2
    assert best_s == simulator.step_times(best)[0] < simulator.step_times(start)[0]


def test_a_shuffle_stays_among_the_equals() -> None:
    """Devices 0 and 1 are alike, device 2 is slower: only the two swap, and both ways come up."""
    problem, start = chain_problem(2, 3), np.array([0, 1], dtype=np.int32)
    timer = Table(np.array([[1.0, 1.0, 5.0]] * 2))
    drawn = {
        tuple(shuffled(problem, start, 2.0, timer, np.random.default_rng(seed), swaps=9).tolist()) for seed in range(9)
    }
    assert drawn == {(0, 1), (1, 0)}
    assert len(timer.timed) <= 81
    assert shuffled(problem, start, 2.0, timer, np.random.default_rng(0), swaps=0).tolist() == [0, 1]


def test_a_shuffle_keeps_pins() -> None:
    problem, timer = barred(chain_problem(2, 2), {0: (0,)}), Table(np.ones((2, 2)))
    start = np.array([0, 1], dtype=np.int32)
    assert shuffled(problem, start, 2.0, timer, np.random.default_rng(0), swaps=20).tolist() == [0, 1]
    assert timer.timed == []
