"""The figures of a graph as people see them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from micrographs import op_graph
from rich.console import Console

from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.statistics import describe_graph
from rlplace.report.printed import graph_table

OTHERS: dict[str, Any] = {
    "workload": "toy", "is_file": False, "capture_s": 1.0, "num_groups": 2, "grouping": "none", "costs_host": "host",
    "costs_source": "estimated", "critical_path_s": 1.0, "single_device": "gpu:0", "single_device_s": 1.0,
}  # fmt: skip


def shown(graph: OpGraph) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(graph_table(describe_graph(graph).to_dict() | OTHERS))
    return captured.get()


def test_a_batch_that_is_cut_has_a_line() -> None:
    graph = op_graph([[], [0], [], [2], [1, 3]])
    cut = dataclasses.replace(graph, micro_batch=np.array([0, 0, 1, 1, -1]))
    assert "2 of about 2 ops each; 1 shared by all" in shown(cut)
    assert "micro-batches" not in shown(graph)
