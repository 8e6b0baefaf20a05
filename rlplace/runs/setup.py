"""From the words of a command to a problem: its graph, costs and groups, and what a run keeps of them."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch

from rlplace import __version__
from rlplace.errors import InvalidValue
from rlplace.graphs.capturing.capture import capture
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.costs.estimate import estimate_costs
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.present import check_present
from rlplace.measure.problem import Problem
from rlplace.workloads import Size, Workload, WorkloadSpec, build, without_memory

if TYPE_CHECKING:
    from rlplace.report.progress import Progress


def default_size(host: Host) -> Size:
    """The size of a workload named without one: `small` on a host of cores only, else `paper`."""
    return "small" if all(device.backend == "cpu" for device in host.devices) else "paper"


def capture_workload(workload: Workload) -> OpGraph:
    """The graph of a workload's step."""
    return capture(workload.model, workload.inputs, workload.loss_fn, workload.optimizer, targets=workload.targets)


def graph_for(spec: WorkloadSpec, host: Host, seed: int) -> OpGraph:
    """The graph of one step: captured from the model that `spec` names, or read from the graph file.

    Args:
        spec: the workload.
        host: decides the size of a name without one; a simulated one needs no memory for the model.
        seed: of the model's weights and inputs.

    Raises:
        InvalidValue: the host is not simulated, and this machine lacks a device of it, or `spec` is a graph file.
        UserError: the workload cannot be built or captured, or the file is malformed.
    """
    check_present(host)
    if not spec.is_file:
        return capture_workload(build_for(spec, host, seed))
    if not host.is_simulated:
        raise only_simulated(spec)
    from rlplace.graphs.formats import load_graph

    graph = load_graph(spec.path)
    if graph.num_ops == 0:
        raise InvalidValue("ops", 0, "a graph with an op at least", where=str(spec.path))
    return graph


def make_problem(
    graph: OpGraph,
    host: Host,
    num_groups: int,
    progress: Progress,
    *,
    spec: WorkloadSpec | None = None,
    grouping: str = "heavy-edge",
    acyclic: bool = False,
    constraints: Constraints | None = None,
) -> Problem:
    """The problem: profiled on a host of this machine; on a simulated one estimated, or as the graph file gives it."""
    if host.is_simulated:
        progress.say(f"host {host.name} is simulated: every step time below is the simulator's, none is measured")
        costs = given_costs(spec, host) or estimate_costs(graph, host)
        if costs.source == "given":
            progress.say("times of ops are those that the file gives, in seconds, the same on every device")
        problem = Problem.grouped(graph, host, costs, num_groups, grouping, acyclic=acyclic, constraints=constraints)
    else:
        problem = Problem.profile(
            graph,
            host,
            num_groups=num_groups,
            grouping=grouping,
            acyclic=acyclic,
            constraints=constraints,
            on_progress=progress.say,
        )
    if problem.grouping.dropped:
        progress.say(f"groups without cycles: not followed everywhere: {', '.join(problem.grouping.dropped)}")
    return problem


def given_costs(spec: WorkloadSpec | None, host: Host) -> Costs | None:
    """The costs that a workload's graph file gives; None where it gives none, or the workload is no file.

    Raises:
        UserError: the file is malformed.
    """
    if spec is None or not spec.is_file:
        return None
    from rlplace.graphs.formats import load_times_s

    times_s = load_times_s(spec.path)
    return None if times_s is None else Costs.given(times_s, host)


def describe_problem(problem: Problem) -> dict[str, Any]:
    """What a run keeps of its problem: host, figures, groups and costs."""
    graph = problem.graph
    return {
        "schema": 1,
        "graph": {
            "fingerprint": graph.fingerprint,
            "num_ops": graph.num_ops,
            "num_edges": graph.num_edges,
            "names": list(graph.names),
            "modules": list(graph.modules),
        },
        "host_fingerprint": problem.host.fingerprint,
        "host": problem.host.to_dict(),
        "costs": {"source": problem.costs.source, "op_time_s": problem.costs.op_time_s.tolist()},
        "grouping": {
            "rule": problem.grouping.rule,
            "dropped": list(problem.grouping.dropped),
            "op_group": problem.grouping.op_group.tolist(),
        },
        "allowed": None if problem.allowed is None else problem.group_allowed.tolist(),
    }


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    return {"rlplace": __version__, "python": platform.python_version(), "torch": torch.__version__}


def only_simulated(spec: WorkloadSpec) -> InvalidValue:
    """What to say where a graph file is to be run."""
    return InvalidValue(
        "workload",
        str(spec),
        "a name or package.module:function",
        hint="A graph file alone can be simulated, not measured; give --host a preset (`rlplace hosts` lists them), or "
        "the model that the graph was captured from.",
    )


def build_for(spec: WorkloadSpec, host: Host, seed: int) -> Workload:
    """The workload at the size that suits the host; without memory behind it where the host is simulated."""
    if not host.is_simulated:
        return build(spec, default_size=default_size(host), seed=seed)
    with without_memory():  # a simulated host runs nothing: no need to allocate a model of a paper's size
        return build(spec, default_size=default_size(host), seed=seed)
