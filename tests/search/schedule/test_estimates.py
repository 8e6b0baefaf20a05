"""`estimates`: what is told of a placement without simulating it, against hand calculations and the simulator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from random_problems import plain_host, random_problem

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.groupings import room_bytes
from rlplace.search.schedule import partial_schedule
from rlplace.search.schedule.partial_schedule import ESTIMATES, group_layout


def estimates(problem: Problem, placements: list[list[int]]) -> np.ndarray:
    layout = group_layout(problem, Grouping(np.arange(problem.graph.num_ops)))
    return partial_schedule.estimates(layout, np.array(placements, dtype=np.int32))


def test_a_diamond_by_hand() -> None:
    """Ops of a second; tensors of 100 bytes take a second: of two branches one is sent there and back."""
    graph = op_graph([[], [0], [0], [1, 2]], 100)
    problem = Problem(graph, plain_host(2), Costs(np.ones((4, 2)), "estimated"), Grouping(np.arange(4)))
    told = estimates(problem, [[0, 0, 0, 0], [0, 0, 1, 0]])
    alone, apart = (dict(zip(ESTIMATES, row, strict=True)) for row in told.tolist())
    assert alone["finish"] == alone["load"] == 4.0
    assert alone["link"] == alone["cut"] == alone["copies"] == 0.0
    # op 0 ends at 1, its copy is there at 2, op 2 ends at 3, its result is there at 4, op 3 ends at 5
    assert apart["finish"] == 5.0
    assert (apart["load"], apart["cut"], apart["copies"]) == (3.0, 2.0, 2.0)
    assert apart["link"] == 1.0  # one copy a way


def test_memory_is_that_of_the_fullest_device() -> None:
    graph = op_graph([[], [], [0, 1]], [300, 100, 0], targets=["parameter", "parameter", "aten.op"])
    problem = Problem(graph, plain_host(2), Costs(np.ones((3, 2)), "estimated"), Grouping(np.arange(3)))
    (room, _) = room_bytes(problem)
    assert estimates(problem, [[0, 1, 0]])[0, 5] == pytest.approx(300 / room)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_no_step_ends_before_its_busiest_device_or_link(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, int(rng.integers(1, 20)))
    placement = problem.grouping.expand(problem.draw_groups(rng, 1))
    told = dict(zip(ESTIMATES, estimates(problem, placement.tolist())[0].tolist(), strict=True))
    measured = Simulator(problem, threads=1).measure(placement)[0]
    assert told["finish"] >= told["load"] * (1 - 1e-12)
    assert told["cut"] >= told["link"] * (1 - 1e-12)
    if measured.ok:
        assert measured.step_time_s >= max(told["load"], told["link"]) * (1 - 1e-9)
