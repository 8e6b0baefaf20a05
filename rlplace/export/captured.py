"""`CapturedRun`: what a run placed, built and captured again from what its folder holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlplace.errors import InvalidValue
from rlplace.export.registry import ExportRequest
from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs, read_workspaces
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.host_file import host_from_dict
from rlplace.measure.problem import Problem
from rlplace.session.cut import read_asked
from rlplace.session.steps import build_for, capture_workload
from rlplace.workloads import Workload


@dataclass(frozen=True, eq=False)
class CapturedRun:
    """A run's workload and its step.

    Attributes:
        request: of the export.
        host: with the figures that were measured for the run.
        workload: without memory behind it where the host is simulated.
        graph: with its program; the placement's.
    """

    request: ExportRequest
    host: Host
    workload: Workload
    graph: OpGraph

    @classmethod
    def of(cls, request: ExportRequest) -> CapturedRun:
        """The workload of a run, captured as it was.

        Raises:
            UserError: the run lacks a file or is malformed, or its workload cannot be built again.
            FingerprintMismatch: the workload is another one now.
        """
        where = str(request.run.path("problem.json"))
        host = host_from_dict(request.problem().get("host"), where)
        workload = build_for(request.spec, host, request.workload_seed)
        graph = capture_workload(workload, *read_asked(request.config.get("micro_batches")))
        request.placement.require_graph(graph)
        return cls(request, host, workload, graph)

    def problem(self) -> Problem:
        """The run's problem with the seconds that it found, every op a group of its own.

        Raises:
            InvalidValue: `problem.json` has no such seconds.
        """
        kept = self.request.problem()["costs"]
        try:
            times_s = np.array(kept["op_time_s"], dtype=np.float64)
            costs = Costs(
                times_s,
                kept["source"],
                read_workspaces(kept.get("workspace_bytes"), times_s.shape, "problem.json"),
            )
        except (KeyError, TypeError, ValueError) as error:
            hint = f"It cannot be read as numbers: {error}."
            raise InvalidValue(
                "costs.op_time_s", "no table", "seconds of every op on every device", where="problem.json", hint=hint
            ) from error
        return Problem(self.graph, self.host, costs, Grouping(np.arange(self.graph.num_ops, dtype=np.int32)))
