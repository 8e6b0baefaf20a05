"""`run_problem`: the problem of a run again, its graph captured anew from the model."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from rlplace.errors import InvalidValue
from rlplace.export.registry import ExportRequest
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.host_file import host_from_dict
from rlplace.measure.problem import Problem
from rlplace.runs.micro_batches import CutOptions, read_asked
from rlplace.runs.setup import capture_workload
from rlplace.workloads import build, without_memory


def run_problem(request: ExportRequest) -> Problem:
    """What the run of `request` placed: graph, with its program, host, costs and groups.

    A step of a simulated host is built without memory, as the run itself did.

    Raises:
        InvalidValue: the run is of a graph file, or of a user's function that `workload` does not name again; or its
            `problem.json` is malformed.
        FileProblem: `problem.json` is missing.
        FingerprintMismatch: the placement is for another graph.
    """
    kept, where = request.problem(), str(request.run.path("problem.json"))
    host = host_from_dict(kept.get("host"), where)
    config, placement = request.config, request.placement
    count, asked = read_asked(config.get("micro_batches"))
    if placement.cut is not None and placement.cut.count > 1 and placement.cut.loss:
        asked = CutOptions(count, asked.batch_dims, placement.cut.loss)  # type: ignore[arg-type]  # a kind of loss
    with without_memory() if host.is_simulated else contextlib.nullcontext():
        workload = build(request.spec, default_size=config["default_size"], seed=config["train"]["seed"])
    graph = capture_workload(workload, count, asked)
    placement.require_graph(graph)
    return Problem(graph, host, _costs(kept, host, graph.num_ops, where), *_groups(kept, where))


def _costs(kept: dict[str, Any], host: Host, num_ops: int, where: str) -> Costs:
    try:
        times_s = np.array(kept["costs"].get("op_time_s"), dtype=np.float64)
    except (TypeError, ValueError):
        times_s = np.zeros(0)
    if times_s.shape != (num_ops, host.num_devices):
        raise InvalidValue(
            "costs.op_time_s", f"shape {times_s.shape}", f"shape {(num_ops, host.num_devices)}", where=where
        )
    return Costs(times_s, kept["costs"].get("source", "estimated"))


def _groups(kept: dict[str, Any], where: str) -> tuple[Grouping, Any, str]:
    """Groups, where their ops may be, and the order of ops."""
    try:
        groups = Grouping(np.array(kept["grouping"].get("op_group"), dtype=np.int32), kept["grouping"].get("rule", ""))
        allowed = None if kept.get("allowed") is None else np.array(kept["allowed"], dtype=np.bool_)[groups.op_group]
    except (TypeError, ValueError, IndexError):
        raise InvalidValue("grouping", "malformed", "a group for each op", where=where) from None
    return groups, allowed, kept.get("op_order", "rank")
