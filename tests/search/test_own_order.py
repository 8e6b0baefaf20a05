"""Searches whose placements are planned later keep to the problem's own order of ops."""

from __future__ import annotations

import numpy as np
from micro_batched import cut_graph, layered_step, step_problem
from random_problems import plain_host

from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.diversity import OwnOrder
from rlplace.search.registry import find
from rlplace.search.task import Budget, Task
from rlplace.search.winners import find_winners
from rlplace.training.agent import AgentConfig
from rlplace.training.agent.proposals import Proposer

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
