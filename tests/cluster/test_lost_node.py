"""A comparison that loses a machine half-way: the rows of a local run all the same."""

from __future__ import annotations

import pytest
from ray_nodes import ray_nodes
from search_problems import tight_problem

from rlplace.cluster import Cluster
from rlplace.compare.comparison import Row
from rlplace.compare.equal_budgets import CompareConfig, compare


@pytest.mark.slow
def test_rows_of_a_node_that_is_lost_are_done_again() -> None:
    problem, config = tight_problem(24, 4), CompareConfig(("anneal",), evaluations=1500, seeds=6)
    told: list[Row] = []
    with ray_nodes() as nodes, Cluster.connect(nodes.address) as cluster:
        (other,) = nodes.worker_nodes

        def lose(row: Row) -> None:
            if not told:
                nodes.remove_node(other, allow_graceful=False)
            told.append(row)

        spread = compare(problem, config, cluster=cluster, on_row=lose)
        nodes.wait_for_nodes(timeout=120)  # until it is known that one is gone
        assert cluster.num_workers == 1
    local = compare(problem, config)
    assert len(told) == len(local.rows) == 6
    assert [(row.method, row.seed, row.value_s, row.evaluations) for row in spread.rows] == [
        (row.method, row.seed, row.value_s, row.evaluations) for row in local.rows
    ]
