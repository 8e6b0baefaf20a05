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
from rlplace.session.cut import WHOLE, CutOptions
from rlplace.session.folder import RunFolder
from rlplace.session.prepare import Prepared
from rlplace.session.session import Request, Session
from rlplace.session.steps import versions
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
    cut: CutOptions | None = None,
    seed: int = 0,
) -> RunFolder:
    """A run of `workload`, whose step is `graph`, placed on `devices` (N,)."""
    seconds = np.full((graph.num_ops, host.num_devices), WORKED_S)
    problem = Problem(graph, host, Costs(seconds, "profiled"), Grouping(np.arange(graph.num_ops, dtype=np.int32)))
    folder = RunFolder.create(path)
    prepared = Prepared(problem, WHOLE if cut is None else cut)
    words = {"asked": prepared.asked, "workload_seed": seed}
    request = Request(workload, "a host", host.fingerprint, "small", versions=versions(), **words)
    placement = Placement.of(problem, Simulator(problem, threads=1).plan(devices), "by hand")
    with closing(folder), Session.open(folder) as session:
        session.keep(request=request, config=TrainConfig(seed=seed))
        session.keep_problem(prepared)
        session.keep_placement(placement)
    save_placement(placement, folder.path("placement.json"))
    return folder
