"""What is said of whoever was at work when a worker ended."""

from __future__ import annotations

import math

import numpy as np
from core_hosts import core_host
from micrographs import fork_join
from naive_plan import naive_plan

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.isolate.isolated_runner import Asked
from rlplace.measure.isolate.messages import IDLE, Race
from rlplace.measure.problem import Problem
from rlplace.measure.timing.eager_step import EagerRecipe
from rlplace.measure.timing.race import REFERENCE, RaceProtocol


def test_contenders_are_not_numbered() -> None:
    """Those that are left are raced again without the others, so a number would be that of another race."""
    graph = fork_join(2, 1, 8)
    costs = Costs(np.ones((graph.num_ops, 2)), "estimated")
    problem = Problem(graph, core_host(2), costs, Grouping(np.arange(graph.num_ops)))
    plan = naive_plan(graph, np.zeros(graph.num_ops, dtype=np.int32))
    race = Race([plan, plan], [(0, 0)] * 2, [EagerRecipe()], RaceProtocol(), math.inf)
    asked = Asked(race, problem, plan)
    said = [asked.describe(contender, "") for contender in (0, 1, 2, REFERENCE, IDLE)]
    assert said[:2] == ["this placement"] * 2
    assert said[2:] == ["plain PyTorch", "the reference placement", "nothing that it was asked for"]
