"""The problem of a run, read from its `problem.json`: what was profiled once is not profiled again."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import FileProblem, FingerprintMismatch, InvalidValue
from rlplace.measure.costs.costs import Costs, CostSource, read_workspaces
from rlplace.measure.hosts.host_file import host_from_dict
from rlplace.measure.problem import OP_ORDERS, Problem
from rlplace.records import described
from rlplace.session.folder import RunFolder
from rlplace.session.prepare import Prepared
from rlplace.session.steps import Steps, describe_problem
from rlplace.training.config import TrainConfig

FILE = "problem.json"


def describe_prepared(prepared: Prepared) -> dict[str, Any]:
    """What `problem.json` holds."""
    return describe_problem(prepared.problem) | {
        "evaluations": prepared.evaluations,
        "start": None if prepared.start is None else prepared.start.tolist(),
    }


def read_prepared(run: RunFolder, steps: Steps, config: TrainConfig) -> Prepared:
    """The problem as it was profiled, of a step that is captured anew.

    Args:
        run: with a `problem.json`.
        steps: of the workload.
        config: how ops are grouped, and what the user asked for.

    Raises:
        FileProblem, InvalidValue, UnknownName: the file is malformed.
        FingerprintMismatch: the workload's graph, or the host, is another by now.
    """
    data, where = run.read_json(FILE), str(run.path(FILE))
    graph_facts, costs, grouping = (_part(data, name, where) for name in ("graph", "costs", "grouping"))
    count = graph_facts.get("num_micro_batches")
    if type(count) is not int or count < 1:
        raise InvalidValue("graph.num_micro_batches", described(count), "a whole number > 0", where=where)
    graph = steps.graph(count)
    if graph_facts.get("fingerprint") != graph.fingerprint:
        raise FingerprintMismatch("graph", str(graph_facts.get("fingerprint"))[:40], graph.fingerprint)
    host = host_from_dict(data.get("host"), where)
    if host.fingerprint != steps.host.fingerprint:
        raise FingerprintMismatch("host", host.fingerprint, steps.host.fingerprint)
    source = next((known for known in get_args(CostSource) if known == costs.get("source")), None)
    if source is None:
        raise InvalidValue("costs.source", described(costs.get("source")), "where costs come from", where=where)
    times_s = _array(costs.get("op_time_s"), "costs.op_time_s", (graph.num_ops, host.num_devices), where)
    problem = Problem.grouped(
        graph,
        host,
        Costs(times_s, source, read_workspaces(costs.get("workspace_bytes"), times_s.shape, where)),
        config.num_groups,
        config.grouping,
        acyclic=config.acyclic,
        constraints=config.constraints,
    )
    if grouping.get("op_group") != problem.grouping.op_group.tolist():
        raise FileProblem(where, "its groups are not those that its costs give now: start the run again.")
    order, evaluations = data.get("op_order"), data.get("evaluations")
    if order not in OP_ORDERS:
        raise InvalidValue("op_order", described(order), f"one of {', '.join(OP_ORDERS)}", where=where)
    if type(evaluations) is not int or evaluations < 0:
        raise InvalidValue("evaluations", described(evaluations), "a whole number >= 0", where=where)
    problem = Problem(problem.graph, host, problem.costs, problem.grouping, problem.allowed, order)
    start = None
    if data.get("start") is not None:
        devices = _array(data["start"], "start", (graph.num_ops,), where)
        start = problem.check_placement(devices.astype(np.int64))
    return Prepared(problem, steps.asked, evaluations, start)


def _part(data: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    part = data.get(name)
    if not isinstance(part, dict):
        raise InvalidValue(name, described(part), "an object", where=where)
    return part


def _array(data: object, name: str, shape: tuple[int, ...], where: str) -> NDArray[np.float64]:
    try:
        array = np.array(data, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidValue(name, described(data), "numbers", where=where) from error
    if array.shape != shape:
        raise InvalidValue(name, f"an array of shape {array.shape}", f"shape {shape}", where=where)
    return array
