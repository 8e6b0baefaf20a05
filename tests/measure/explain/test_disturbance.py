"""What shows that a machine did something else while a step was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from micrographs import op_graph
from random_problems import plain_host

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.explain.explain_step import disturbance_of, explain
from rlplace.measure.explain.explanation import Alternative, Explanation
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator


def measured(step_time_s: float, spread_s: float, *others: Alternative) -> Explanation:
    """A step of 4 s, as if it had been measured."""
    graph, host = op_graph([[], [0], [1], [2]]), plain_host(2)
    problem = Problem(graph, host, Costs(np.ones((4, 2)), "estimated"), Grouping(np.arange(4)))
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(np.zeros(4, dtype=np.int32))
    timeline = replace(simulator.timeline(plan), source="measured")
    return explain(problem, plan, timeline, step_time_s=step_time_s, spread_s=spread_s, alternatives=others)


@pytest.mark.parametrize(
    ("step_time_s", "spread_s", "words"),
    [
        (4.0, 0.3, ""),
        (4.0, 1.0, "its steps scatter by ± 25 % around their median."),
        (3.3, 0.0, ""),
        (2.5, 0.0, "the step that is explained took 160 % of the median."),
        (8.0, 0.1, "the step that is explained took 50 % of the median."),
        (8.0, 4.0, "scatter by ± 50 % around their median; the step that is explained took 50 % of the median."),
    ],
)
def test_steps_that_scatter_and_an_unusual_one_are_signs(step_time_s: float, spread_s: float, words: str) -> None:
    said = disturbance_of(measured(step_time_s, spread_s))
    assert words in said
    assert bool(said) == bool(words)
    assert measured(step_time_s, spread_s).disturbed == said


def test_what_lies_within_the_scatter_tells_nothing() -> None:
    others = Alternative("one device", 4.5, "measured"), Alternative("eager", 6.0, "measured")
    said = disturbance_of(measured(4.0, 1.0, *others, Alternative("data parallel", 4.1, "estimated")))
    assert "the difference to one device is within that, and tells nothing" in said
    assert disturbance_of(measured(4.0, 0.3, *others)) == ""


def test_a_simulated_step_is_never_disturbed() -> None:
    assert disturbance_of(replace(measured(4.0, 3.0), kind="simulated")) == ""
