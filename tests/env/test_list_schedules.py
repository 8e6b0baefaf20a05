"""`ListSchedules`: weights over named groupings as placements of ops."""

from __future__ import annotations

import numpy as np
from search_problems import fork_problem

from rlplace.env.sequential import ESTIMATES, FIRST_WEIGHTS, GROUPINGS, ListSchedules
from rlplace.search.schedule.partial_schedule import Greedy


def test_own_groups_are_placed_as_the_scheduler_places_them() -> None:
    problem = fork_problem(3, num_devices=3)
    weights = FIRST_WEIGHTS[0][1]
    expected = problem.grouping.expand(Greedy.of(problem).place(np.array(weights)))
    assert ListSchedules(problem).place([("own", weights)]).tolist() == expected.tolist()


def test_every_grouping_gives_a_placement_that_the_problem_takes_and_that_can_be_estimated() -> None:
    problem = fork_problem(1)
    schedules = ListSchedules(problem)
    devices = schedules.place([(name, weights) for name in GROUPINGS for _, weights in FIRST_WEIGHTS[:2]])
    problem.check_placement(devices)
    told = schedules.estimate(devices)
    assert told.shape == (2 * len(GROUPINGS), len(ESTIMATES))
    assert np.isfinite(told).all()
