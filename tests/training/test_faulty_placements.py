"""Training where the placements that look best end their process: the search goes on and settles on one that runs."""

from __future__ import annotations

import numpy as np
from core_hosts import core_host
from faulty_ops import faulty_graph

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.training import TrainConfig, train
from rlplace.training.config import SearchConfig

SEARCH = SearchConfig(method="random", num_calibrated=0, table_rounds=2)


def problem() -> Problem:
    """The input, an op that aborts on `cpu:1`, where it is said to be fast, and a sum, which is slow there."""
    graph = faulty_graph(("abort",))
    op_time_s = np.array([[0.0, 0.0], [1.0, 0.1], [0.1, 3.0]])
    return Problem(graph, core_host(2), Costs(op_time_s, "estimated"), Grouping(np.arange(3)))


def test_a_search_goes_on_after_placements_that_crash() -> None:
    said = problem()
    result = train(said, TrainConfig(budget_s=3.0, isolated=True, search=SEARCH))
    assert result.is_measured
    assert result.placement.plan.devices[1] == 0
    crashed = [row for row in result.table.rows if row["placement"] and result.table.plans[row["method"]].devices[1]]
    assert crashed, "heuristics believe the costs"
    for row in crashed:
        assert row["status"] == "error"
        assert "SIGABRT" in row["why"]
    ran = [row["method"] for row in result.table.rows if row["placement"] and row["status"] == "ok"]
    assert "single" in ran
