"""Orders of a pipeline's micro-batches: GPipe, backward first, and 1F1B, which also bounds how many are under way."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.compiled_problem import default_priorities, upward_ranks
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.parallel.layouts import Layout
from rlplace.search.parallel.step_roles import SUM, StepRoles


def list_priorities(problem: Problem) -> dict[str, NDArray[np.float64]]:
    """(N,) float64 priorities of every order that a list schedule can have, by name."""
    return {
        "gpipe": gpipe_priorities(problem),
        "backward-first": backward_first_priorities(problem),
        "rank": default_priorities(dataclasses.replace(problem, op_order="rank")),
        "tilt": default_priorities(dataclasses.replace(problem, op_order="tilt")),
    }


def gpipe_priorities(problem: Problem) -> NDArray[np.float64]:
    """(N,) float64: forward ops of all micro-batches, then backward ones (Huang et al. 2019)."""
    return _priorities(problem, first=FORWARD)


def backward_first_priorities(problem: Problem) -> NDArray[np.float64]:
    """(N,) float64: backward ops as soon as they are ready, each of the earliest micro-batch."""
    return _priorities(problem, first=BACKWARD)


def _priorities(problem: Problem, first: int) -> NDArray[np.float64]:
    """What is shared and sums of gradients at once, as they free memory; then by phase, micro-batch and upward rank."""
    graph = problem.graph
    at_once = (graph.micro_batch < 0) | is_gradient_sum(graph)
    order = np.lexsort(
        (-upward_ranks(problem), np.where(at_once, 0, graph.micro_batch), ~at_once & (graph.phases != first), ~at_once)
    )
    priorities = np.empty(graph.num_ops)
    priorities[order] = np.arange(graph.num_ops, 0, -1)
    return priorities


def is_gradient_sum(graph: OpGraph) -> NDArray[np.bool_]:
    """(N,) bool: additions whose result only goes into updates, directly or through others of them."""
    found = np.zeros(graph.num_ops, dtype=np.bool_)
    found_or_update = graph.phases == UPDATE
    offsets, readers = graph.readers
    starts = offsets[graph.output_offsets]
    is_sum = np.array([target == SUM for target in graph.targets], dtype=np.bool_) & (graph.phases == BACKWARD)
    for op in np.flatnonzero(is_sum)[::-1].tolist():
        into = readers[starts[op] : starts[op + 1]]
        found[op] = found_or_update[op] = len(into) > 0 and bool(found_or_update[into].all())
    return found


def most_under_way(layout: Layout, num_micro_batches: int) -> NDArray[np.int64]:
    """(p,) int64: micro-batches whose backward is awaited on a device of each stage under 1F1B.

    With d replicas everywhere it is p - s of stage s (PipeDream: Narayanan et al. 2019; DAPPLE's policy A: Fan et al.
    2021, section 5.1); else the devices from a stage on, for each of its own.
    """
    columns = layout.devices[:, layout.replica[np.arange(num_micro_batches)]]
    replicas = np.array([len(np.unique(row)) for row in columns])
    after = np.cumsum(replicas[::-1])[::-1]
    return np.asarray(-(-after // replicas), dtype=np.int64)


def one_f_one_b(
    problem: Problem, step: StepRoles, layout: Layout, devices: NDArray[np.int32], limit: NDArray[np.int64]
) -> Plan:
    """The plan of a placement in which no device of stage s begins a micro-batch before fewer than limit[s] await.

    It is the plan, backward ops first, of a graph in which the forward ops of a micro-batch also wait for the backward
    ops of the one that is so many before it.

    Args:
        problem: what is placed.
        step: its roles.
        layout: whose placement it is.
        devices: (N,) the placement.
        limit: (p,) micro-batches under way.
    """
    graph = _bounded(problem.graph, step, layout, devices, limit)
    bounded = dataclasses.replace(problem, graph=graph)
    return Simulator(bounded, threads=1).plan(devices, backward_first_priorities(problem))


def _bounded(
    graph: OpGraph, step: StepRoles, layout: Layout, devices: NDArray[np.int32], limit: NDArray[np.int64]
) -> OpGraph:
    """`graph` with edges, each within a device, from the last backward op of a block to first forward ones of a later.

    A block is what a stage does of a micro-batch.
    """
    count, stages = graph.num_micro_batches, len(layout.devices)
    is_own = (step.follows >= 0) & ~graph.is_source
    block = layout.role_stage[step.role].astype(np.int64) * count + np.maximum(step.follows, 0)
    is_forward = is_own & (graph.phases == FORWARD)
    is_backward = is_own & (graph.phases == BACKWARD) & ~is_gradient_sum(graph) & (np.diff(graph.output_offsets) > 0)
    last = np.full(stages * count, -1, dtype=np.int64)
    np.maximum.at(last, block[is_backward], np.flatnonzero(is_backward))
    before = _blocks_before(layout, count, limit)
    producer, reader = graph.tensor_op[graph.input_tensors], graph.edge_op
    inside = is_forward[producer] & is_forward[reader] & (block[producer] == block[reader])
    begins = is_forward.copy()
    begins[reader[inside]] = False
    late = np.flatnonzero(begins)
    awaited = np.where(before[block[late]] >= 0, last[before[block[late]]], -1)
    fits = (awaited >= 0) & (awaited < late) & (devices[awaited] == devices[late])
    late, tensors = late[fits], graph.output_offsets[awaited[fits]]
    pairs = np.concatenate((reader.astype(np.int64), late)) * graph.num_tensors
    pairs = np.unique(pairs + np.concatenate((graph.input_tensors, tensors)))
    readers, read = np.divmod(pairs, max(graph.num_tensors, 1))
    offsets = np.concatenate(([0], np.cumsum(np.bincount(readers, minlength=graph.num_ops))))
    return dataclasses.replace(graph, input_offsets=offsets, input_tensors=read, program=None)


def _blocks_before(layout: Layout, count: int, limit: NDArray[np.int64]) -> NDArray[np.int64]:
    """(p * K,) int64: the block whose backward each waits for; -1 for none."""
    before = np.full(len(layout.devices) * count, -1, dtype=np.int64)
    for stage, most in enumerate(limit.tolist()):
        held = layout.devices[stage, layout.replica]
        for device in np.unique(held):
            blocks = stage * count + np.flatnonzero(held == device)
            before[blocks[most:]] = blocks[: max(len(blocks) - most, 0)]
    return before
