"""Run folders as `rlplace train` leaves them, without a search."""

from __future__ import annotations

from contextlib import closing
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
from rlplace.session.prepare import Prepared, versions
from rlplace.session.session import Session
from rlplace.session.session_records import Request
from rlplace.session.setup import WHOLE, CutOptions
from rlplace.training.config import TrainConfig

WORKED_S = 1e-3
"""What every op takes."""


def placed_run(
    path: Path,
    workload: str,
    graph: OpGraph,
    host: Host,
    devices: NDArray[np.int32],
    *,
    cut: CutOptions = WHOLE,
    seed: int = 0,
) -> RunFolder:
    """A run of `workload`, whose step is `graph`, placed on `devices` (N,)."""
    seconds = np.full((graph.num_ops, host.num_devices), WORKED_S)
    problem = Problem(graph, host, Costs(seconds, "profiled"), Grouping(np.arange(graph.num_ops, dtype=np.int32)))
    return run_of_problem(path, workload, problem, devices, cut=cut, seed=seed)


def run_of_problem(
    path: Path,
    workload: str,
    problem: Problem,
    devices: NDArray[np.int32],
    *,
    cut: CutOptions = WHOLE,
    seed: int = 0,
    host: str = "a host",
) -> RunFolder:
    """A run of `workload`, which is `problem`, placed on `devices` (N,)."""
    folder, fingerprint = RunFolder.create(path), problem.host.fingerprint
    placement = Placement.of(problem, Simulator(problem, threads=1).plan(devices), "by hand")
    request = Request(workload, host, fingerprint, "small", asked=cut, workload_seed=seed, versions=versions())
    with closing(folder), Session.open(folder) as session:
        session.keep(request=request, config=TrainConfig(seed=seed))
        session.keep_problem(Prepared(problem, cut))
        session.keep_placement(placement)
    save_placement(placement, folder.path("placement.json"))
    return folder
