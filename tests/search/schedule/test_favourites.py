"""Which reader of a unit shares its device: on a fork, by hand, and what holds on any problem."""

from __future__ import annotations

import numpy as np
import pytest
from micrographs import op_graph
from random_problems import plain_host, random_problem

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.search.schedule.list_schedule import host_resources, op_units
from rlplace.search.schedule.list_schedulers import favourite_children, favourites_within, job_edges, m_sct


def fork() -> Problem:
    """0 -> 1 (1 s) and 0 -> 2 (9 s), equal bytes: the makespan is least with 2 beside 0."""
    costs = Costs(np.repeat([[1.0], [1.0], [9.0]], 2, axis=1), "estimated")
    return Problem(op_graph([[], [0], [0]], 3), plain_host(2, 1.0), costs, Grouping(np.arange(3)))


def test_the_favourite_child_is_the_one_on_the_longest_path() -> None:
    problem = fork()
    units, resources = op_units(problem), host_resources(problem)
    favourites = favourite_children(units, resources)
    assert favourites.tolist() == [2, -1, -1]
    devices = m_sct(units, resources, 0.0, favourites)
    assert devices[0] == devices[2]


def test_within_groups_it_is_the_reader_of_most_bytes_in_the_group_or_in_its_favourite() -> None:
    units = op_units(fork())
    groups = np.array([0, 1, 2], dtype=np.int32)
    assert len(job_edges(units, units.tensor_bytes)[0]) == 2
    assert favourites_within(units, groups, np.array([2, -1, -1])).tolist() == [2, -1, -1]
    assert favourites_within(units, groups, np.array([-1, -1, -1])).tolist() == [-1, -1, -1]
    assert favourites_within(units, np.array([0, 0, 1], dtype=np.int32), np.array([-1, -1])).tolist() == [1, -1, -1]


@pytest.mark.parametrize("seed", range(4))
def test_a_favourite_is_a_reader_and_nobody_has_two(seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed), 30, plain_host(3, 100.0))
    units = op_units(problem)
    favourites = favourite_children(units, host_resources(problem))
    children = favourites[favourites >= 0].tolist()
    assert len(set(children)) == len(children)
    for parent in np.flatnonzero(favourites >= 0).tolist():
        child = int(favourites[parent])
        tensors = units.input_tensors[units.input_offsets[child] : units.input_offsets[child + 1]]
        assert parent in units.tensor_unit[tensors].tolist()
