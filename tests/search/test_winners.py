"""Winners of a search: the best that are unlike each other, relabelled, counted.

Which placements are taken, by hand.

Searches whose placements are planned later keep to the problem's own order of ops.

Relabelled devices: which are found, which are drawn, and what is not allowed.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from micro_batched import cut_graph, layered_step, step_problem
from numpy.typing import NDArray
from random_problems import plain_host
from search_problems import barred, chain_problem, fork_problem

from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.methods import (
    DESCENT,
    LEAST_DIFFERENCE,
    WALK,
    OwnOrder,
    Winners,
    choose_diverse,
    find,
    find_winners,
    permuted,
    shuffled,
)
from rlplace.search.task import Budget, Task
from rlplace.training.agent import AgentConfig
from rlplace.training.agent.proposals import Proposer


def moved(*counts: int) -> np.ndarray:
    """One placement a number: so many of 200 ops on device 1."""
    return (np.arange(200)[None] < np.array(counts)[:, None]).astype(np.int32)


def times(winners: Winners, count: int, seen: tuple[np.ndarray, ...] = ()) -> list[float]:
    return [step_s for _, step_s in winners.best(count, seen)]


def test_twins_of_a_better_one_do_not_crowd_others_out() -> None:
    """Near twins come in by the dozen, as annealing scores them; two that differ stay."""
    winners = Winners(capacity=3)
    winners.scored(moved(100, 50), np.array([8.0, 9.0]))
    for k in range(50):
        winners.scored(moved(k % 2), np.array([1.0 + k / 100]))
        winners.scored(moved(*range(150, 152)), np.array([2.0 + k / 100, np.inf]))
    assert times(winners, 4)[2:] == [8.0, 9.0]
    assert times(winners, 2) == sorted(times(winners, 2))
    assert len(times(winners, 4, seen=(moved(100)[0],))) == 4


def test_what_is_infeasible_or_worse_than_all_that_there_is_room_for_is_left_out() -> None:
    winners = Winners(capacity=2)
    winners.scored(moved(0, 10, 20, 30), np.array([1.0, 2.0, 3.0, np.inf]))
    winners.scored(moved(40), np.array([4.0]))  # the fourth: now the two best stay
    winners.scored(moved(50), np.array([2.5]))
    assert times(winners, 9) == [1.0, 2.0]


def test_winners_are_distinct_and_every_simulated_placement_is_counted() -> None:
    problem = fork_problem(0, 3)
    found = find_winners(problem, Simulator(problem, threads=1), Budget(300), 4, seed=1)
    assert len(found.devices) == len({devices.tobytes() for devices in found.devices}) == 4
    assert 300 - 4 * (DESCENT + WALK) <= found.evaluations <= 300
    again = find_winners(problem, Simulator(problem, threads=1), Budget(300), 4, seed=1)
    assert [one.tolist() for one in found.devices] == [one.tolist() for one in again.devices]


def test_the_best_is_among_them_and_what_was_seen_is_not() -> None:
    problem = fork_problem(3)
    simulator = Simulator(problem, threads=1)
    first = find_winners(problem, simulator, Budget(200), 2, seed=0)
    every = (np.arange(64)[:, None] >> np.arange(6) & 1).astype(np.int32)
    best_s = simulator.step_times(every).min()
    assert simulator.step_times(first.devices[0])[0] == best_s
    second = find_winners(problem, simulator, Budget(200), 2, seed=0, seen=first.devices)
    assert not {one.tobytes() for one in first.devices} & {one.tobytes() for one in second.devices}


def test_on_a_symmetric_host_the_labels_are_drawn() -> None:
    """A chain of free moves on alike devices: everything on one device is best, whichever it is."""
    problem = chain_problem(4, 3)
    simulator = Simulator(problem, threads=1)
    labels = {int(find_winners(problem, simulator, Budget(90), 1, seed=s).devices[0][0]) for s in range(12)}
    assert labels == {0, 1, 2}


def placements(*moved: int, num_ops: int = 200) -> np.ndarray:
    """One placement for each number: so many of its first ops are on device 1, the others on device 0."""
    rows = np.zeros((len(moved), num_ops), dtype=np.int32)
    for row, count in zip(rows, moved, strict=True):
        row[:count] = 1
    return rows


def test_rows_unlike_all_before_them_are_taken_by_rank() -> None:
    """Of 200 ops, 2 are a hundredth: enough."""
    assert LEAST_DIFFERENCE == 0.01
    assert choose_diverse(placements(0, 1, 2, 4), np.array([4.0, 3.0, 2.0, 1.0]), 2) == [3, 2]
    assert choose_diverse(placements(0, 1, 2, 4), np.array([4.0, 3.0, 2.0, 1.0]), 3) == [3, 2, 0]  # 1 is a twin of 2


def test_too_few_are_filled_up_by_rank() -> None:
    assert choose_diverse(placements(0, 1, 1, 50), np.array([1.0, 1.2, 1.1, 9.0]), 4) == [0, 3, 2, 1]
    assert choose_diverse(placements(0, 1), np.array([1.0, 2.0]), 5) == [0, 1]


def test_what_was_seen_counts_as_taken() -> None:
    rows, times = placements(0, 1, 50), np.array([1.0, 2.0, 3.0])
    assert choose_diverse(rows, times, 1, seen=placements(0)) == [2]
    assert choose_diverse(rows, times, 2, seen=[*placements(0, 50)]) == [0, 1]  # nothing new: by rank


def test_equal_step_times_rank_by_index_and_infinite_ones_last() -> None:
    assert choose_diverse(placements(0, 20, 40), np.array([np.inf, 1.0, 1.0]), 3) == [1, 2, 0]


def test_of_nothing_nothing_is_taken() -> None:
    assert choose_diverse(np.empty((0, 4), dtype=np.int32), np.empty(0), 3) == []
    assert choose_diverse(placements(0), np.array([1.0]), 0) == []


PROBLEM = step_problem(cut_graph(layered_step(4, layer_bytes=4000), 4), plain_host(3, 40.0, 0.1))
SIMULATOR = Simulator(PROBLEM, threads=1)
BUDGET = Budget(300)
IN_ANOTHER = find(PROBLEM, "portfolio", SIMULATOR, BUDGET)
"""The best in whatever order, which is slower in the problem's own."""


def test_a_search_finds_placements_for_the_order_in_which_they_are_timed() -> None:
    own = find(PROBLEM, "portfolio", OwnOrder(SIMULATOR), BUDGET)
    assert own.plan is None
    assert own.devices is not None
    assert SIMULATOR.step_times(own.devices[None])[0] == own.step_time_s
    assert IN_ANOTHER.plan is not None
    assert SIMULATOR.step_times(IN_ANOTHER.plan.devices[None])[0] > own.step_time_s


def test_it_scores_as_many_at_once_as_the_simulator() -> None:
    assert Task(PROBLEM, OwnOrder(SIMULATOR)).is_serial
    assert not Task(PROBLEM, OwnOrder(Simulator(PROBLEM, threads=2))).is_serial


def test_what_is_going_to_be_measured_is_fast_in_that_order() -> None:
    assert IN_ANOTHER.devices is not None
    slow_s = SIMULATOR.step_times(IN_ANOTHER.devices[None])[0]
    winners = find_winners(PROBLEM, SIMULATOR, BUDGET, 2, seed=0).devices
    first = Proposer(PROBLEM, np.random.default_rng(0), AgentConfig()).first(SIMULATOR, 2, BUDGET)
    for devices in (winners[0], first[0]):
        assert SIMULATOR.step_times(devices[None])[0] < slow_s


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


def test_pins_hold() -> None:
    problem = barred(chain_problem(3, 3), {0: (0,)})
    timer = Table(np.array([[9.0, 0.0, 0.0], [1.0, 5.0, 4.0], [1.0, 2.0, 6.0]]))
    best, _ = permuted(problem, np.array([0, 1, 2], dtype=np.int32), 20.0, timer, most=100)
    assert best.tolist() == [0, 2, 1]
    assert timer.timed == [(0, 2, 1)]


def test_a_swap_of_devices_that_are_not_used_is_not_timed() -> None:
    timer = Table(np.ones((2, 4)))
    permuted(chain_problem(2, 4), np.array([0, 0], dtype=np.int32), 2.0, timer, most=100)
    assert sorted(timer.timed) == [(1, 1), (2, 2), (3, 3)]


def test_one_device_of_each_kind_has_no_other_version() -> None:
    problem, start = with_kinds(chain_problem(3, 2), "ab"), np.array([0, 1, 0], dtype=np.int32)
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
