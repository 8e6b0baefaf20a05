"""`problem_summary`: a problem in a few numbers, whatever its numbers of ops, groups and devices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import BACKWARD, UPDATE
from rlplace.graphs.paths import longest_after
from rlplace.measure.problem import Problem

SUMMARY = (
    "log_devices",
    "device_speed_spread",
    "link_rate_spread",
    "shared_links",
    "blocking",
    "log_transfer_share",
    "log_latency_share",
    "log_launch_share",
    "log_memory_use",
    "log_parameter_share",
    "critical_path_share",
    "largest_op_share",
    "log_ops",
    "log_groups",
    "log_modules",
    "largest_module_share",
    "repetition",
    "unrolling",
    "fan_out",
    "backward_share",
    "update_share",
    "log_micro_batches",
)
"""Names of the numbers; all are without a unit, and the same whichever way devices are numbered."""
_LEAST = 1e-6


def problem_summary(problem: Problem) -> NDArray[np.float32]:
    """(22,) float32 `SUMMARY` of a problem."""
    graph, host = problem.graph, problem.host
    num_devices, num_ops = host.num_devices, max(graph.num_ops, 1)
    time_s = problem.costs.op_time_s.mean(axis=1)
    total_s = max(float(time_s.sum()), 1e-30)
    device_s = np.maximum(problem.costs.op_time_s.sum(axis=0), 1e-30)
    sent = np.unique(graph.input_tensors)
    sent = sent[~graph.is_source[graph.tensor_op[sent]]]
    away = ~np.eye(num_devices, dtype=np.bool_)
    rates, delays = problem.transfer_s_per_byte[away], problem.transfer_latency_s[away]
    rate, delay = (float(table.mean()) if table.size else 0.0 for table in (rates, delays))
    copied = rates[rates > 0.0]
    kept = graph.parameter_bytes + graph.gradient_bytes + graph.state_bytes
    room = sum(max(device.memory_bytes - device.context_bytes, 1) for device in host.devices)
    whole_bytes = float(kept.sum() + graph.tensor_bytes[sent].sum())
    modules = np.unique(np.array(graph.modules), return_inverse=True)[1]
    module_s = np.bincount(modules, weights=time_s)
    kinds = np.unique(np.stack((modules, graph.phases, _numbers(graph.targets), graph.output_bytes)), axis=1).shape[1]
    routes = [route for route in host.routes if route.links]
    uses = np.unique([link for route in routes for link in route.links], return_counts=True)[1]
    values = {
        "log_devices": np.log(num_devices),
        "device_speed_spread": float(np.log(device_s.max() / device_s.min())),
        "link_rate_spread": float(np.log(copied.max() / copied.min())) if copied.size else 0.0,
        "shared_links": float(uses.max() / len(routes)) if uses.size else 0.0,
        "blocking": float(np.mean([route.blocks_destination for route in routes])) if routes else 0.0,
        "log_transfer_share": _log(float(graph.tensor_bytes[sent].sum()) * rate / total_s),
        "log_latency_share": _log(len(sent) * delay / total_s),
        "log_launch_share": _log(num_ops * host.dispatch_s / total_s),
        "log_memory_use": _log(whole_bytes / room),
        "log_parameter_share": _log(float(kept.sum()) / max(whole_bytes, 1.0)),
        "critical_path_share": _critical_path_s(problem, time_s) / total_s,
        "largest_op_share": float(time_s.max(initial=0.0)) / total_s,
        "log_ops": np.log(num_ops),
        "log_groups": np.log(max(problem.grouping.num_groups, 1)),
        "log_modules": np.log(max(len(module_s), 1)),
        "largest_module_share": float(module_s.max(initial=0.0)) / total_s,
        "repetition": 1.0 - kinds / num_ops,
        "unrolling": _unrolling(modules, graph.phases),
        "fan_out": np.log(max(graph.num_edges, 1) / max(len(sent), 1)),
        "backward_share": float(time_s[graph.phases == BACKWARD].sum()) / total_s,
        "update_share": float(time_s[graph.phases == UPDATE].sum()) / total_s,
        "log_micro_batches": np.log(graph.num_micro_batches),
    }
    return np.array([values[name] for name in SUMMARY], dtype=np.float32)


def _log(value: float) -> float:
    return float(np.log(max(value, _LEAST)))


def _numbers(words: tuple[str, ...]) -> NDArray[np.int64]:
    return np.unique(np.array(words), return_inverse=True)[1].astype(np.int64)


def _critical_path_s(problem: Problem, time_s: NDArray[np.float64]) -> float:
    """Seconds of the longest path of ops, transfers left out."""
    graph = problem.graph
    producers = graph.tensor_op[graph.input_tensors]
    after_s = longest_after(time_s, graph.input_offsets, producers, np.zeros(len(producers)))
    return float((time_s + after_s).max(initial=0.0))


def _unrolling(modules: NDArray[np.int64], phases: NDArray[np.int8]) -> float:
    """log of how often the ops of a module and phase are resumed after those of another, on average."""
    label = modules * 3 + phases
    resumed = 1 + int(np.count_nonzero(np.diff(label)))
    return float(np.log(resumed / max(len(np.unique(label)), 1)))
