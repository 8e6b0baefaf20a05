"""Run folders as `rlplace train` leaves them, without a search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure import Placement, Problem, Simulator
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Host
from rlplace.measure.placement import save_placement
from rlplace.session.folder import RunFolder
from rlplace.session.steps import describe_problem

WORKED_S = 1e-3
"""What every op takes."""


def placed_run(
    path: Path,
    workload: str,
    graph: OpGraph,
    host: Host,
    devices: NDArray[np.int32],
    *,
    cut: dict[str, object] | None = None,
    seed: int = 0,
) -> RunFolder:
    """A run of `workload`, whose step is `graph`, placed on `devices` (N,)."""
    seconds = np.full((graph.num_ops, host.num_devices), WORKED_S)
    problem = Problem(graph, host, Costs(seconds, "profiled"), Grouping(np.arange(graph.num_ops, dtype=np.int32)))
    folder = RunFolder.create(path)
    config = {"workload": workload, "default_size": "small", "train": {"seed": seed}, "micro_batches": cut}
    folder.write_json("config.json", config)
    folder.write_json("problem.json", describe_problem(problem))
    plan = Simulator(problem, threads=1).plan(devices)
    save_placement(Placement.of(problem, plan, "by hand"), folder.path("placement.json"))
    folder.close()
    return folder
