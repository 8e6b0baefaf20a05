"""Winners of a search: the best that are unlike each other, relabelled, counted."""

from __future__ import annotations

import numpy as np
from search_problems import chain_problem, fork_problem

from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.task import Budget
from rlplace.search.winners import DESCENT, WALK, Winners, find_winners


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
