"""Counters of memory in a simulated timeline, by hand."""

from __future__ import annotations

import numpy as np
from micrographs import op_graph
from random_problems import plain_host

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator


def test_memory_counters_of_a_timeline() -> None:
    """Tensor 0, of 100 bytes, goes over from second 1 to 2, where op 1 makes 20 more."""
    costs = Costs(np.ones((2, 2)), "estimated")
    problem = Problem(op_graph([[], [0]], [100, 20]), plain_host(2), costs, Grouping(np.arange(2)))
    simulator = Simulator(problem)
    timeline = simulator.timeline(simulator.plan(np.array([0, 1])))
    counters = zip(timeline.memory_device, timeline.memory_time_s, timeline.memory_bytes, strict=True)
    assert [tuple(map(float, counter)) for counter in counters] == [
        (0, 0, 100),
        (0, 2, 0),
        (1, 0, 0),
        (1, 1, 100),
        (1, 2, 120),
        (1, 3, 0),
    ]
