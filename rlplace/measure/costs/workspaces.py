"""`seen_workspaces`: the scratch that ops really take, from a step whose allocations are counted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.single_device import single_device_plan
from rlplace.measure.hosts.host import Host
from rlplace.measure.metering.metered_step import MeteredStep
from rlplace.measure.run.crew.workers import Crew
from rlplace.measure.run.placed.residents import Residents


def seen_workspaces(graph: OpGraph, host: Host, device: int, residents: Residents, crew: Crew) -> NDArray[np.int64]:
    """(N,) bytes that each op holds beside its inputs and outputs while it runs, at least what the graph says.

    Libraries decide what a convolution, a sort or a sum takes, by shapes and by the version that is installed: no
    formula tells it. One step is run with everything on one device; ops of one signature share the most of theirs.

    Args:
        graph: with its program.
        host: of this machine.
        device: a CPU device that holds the whole step.
        residents: of that graph.
        crew: the host's threads.

    Raises:
        RunnerError: an op failed.
    """
    step = MeteredStep(graph, host, single_device_plan(graph, device), residents, crew, marks_ops=True)
    try:
        step.run()
        needed = step.needed_bytes
    finally:
        step.unload()
    own = np.maximum(np.where(graph.is_source, 0, needed - graph.output_bytes), graph.workspace_bytes)
    most: dict[str, int] = {}
    for name, num_bytes in zip(graph.signatures, own.tolist(), strict=True):
        most[name] = max(most.get(name, 0), num_bytes)
    return np.array([most[name] for name in graph.signatures], dtype=np.int64)
