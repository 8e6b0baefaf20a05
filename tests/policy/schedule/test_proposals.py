"""`propose`: guesses without the simulator, the best first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from search_problems import barred, fork_problem

from rlplace.env.sequential import FIRST_WEIGHTS, ListSchedules
from rlplace.policy.schedule import choose, propose
from rlplace.policy.schedule_network import Components, ScheduleNetwork, new_network


def test_guesses_are_placements_and_no_two_are_the_same() -> None:
    problem = barred(fork_problem(2, num_devices=3), {3: (1,)})
    found = propose(problem, new_network(), 20)
    assert 4 < len(found.pairs) == len(found.devices) <= 20
    problem.check_placement(found.devices)
    assert (found.devices[:, 3] == 1).all()
    assert len(np.unique(found.devices, axis=0)) == len(found.devices)


def test_the_first_guess_is_the_best_of_the_schedules_that_the_ranker_saw() -> None:
    """A new ranker believes what the list schedule says of itself."""
    problem = fork_problem(2, num_devices=3)
    found = propose(problem, new_network(), 5)
    schedules = ListSchedules(problem)
    ends = schedules.estimate(schedules.place(FIRST_WEIGHTS))[:, 0]
    guessed = schedules.estimate(found.devices)[:, 0]
    assert guessed[0] == pytest.approx(ends.min())
    assert (np.diff(guessed) >= -1e-9).all()


def test_without_the_ranker_the_gate_decides() -> None:
    problem = fork_problem(2, num_devices=3)
    network = ScheduleNetwork(Components.of(FIRST_WEIGHTS[:4]))
    with torch.no_grad():
        network.gate[2].bias.copy_(torch.tensor([0.3, 0.1, 0.2, 0.0]))
    found = propose(problem, network, 4, is_ranked=False)
    expected = [FIRST_WEIGHTS[place] for place in (3, 1, 2, 0)]
    kept = [pair for pair in found.pairs if pair in expected]
    assert kept == [pair for pair in expected if pair in kept]
    assert kept[0] == expected[0]


def test_the_same_seed_gives_the_same_guesses() -> None:
    problem = fork_problem(4)
    first, same = (propose(problem, new_network(), 12, seed=3) for _ in range(2))
    assert first.devices.tolist() == same.devices.tolist()
    assert first.pairs == same.pairs


def test_each_guess_adds_most_to_those_before_it() -> None:
    """Worked by hand: the second best on average fails where the best does, the third does not."""
    expected = np.array([0.0, 0.1, 0.2])
    scenarios = np.array([[0.5, 0.5, -0.1], [-0.5, -0.5, 0.1]])
    assert choose(expected, scenarios, 3) == [0, 2, 1]
    assert choose(expected, np.zeros((0, 3)), 2) == [0, 1]
    assert choose(np.array([1.0, 0.0, 0.0]), np.zeros((0, 3)), 9) == [1, 2, 0]
