"""`Units`: ops, or groups of ops, as the arrays that list schedulers work on.

`HostResources`: devices and links of a host, and what ops and transfers hold of them while they run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.jit import Bools, Floats, Ints
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.compiled_problem import JOB, Compiled, compile_problem, turns


class Units(NamedTuple):
    """A DAG of U units to place; indices are a topological order.

    Attributes:
        time_s: (U, D) float64.
        is_source: (U,) bool: there at time 0, placed with its first reader.
        label: (U,) int32: units of one label share a device; labels are 0..C-1 and every unit has one.
        label_allowed: (C, D) bool.
        label_resident_bytes: (C,) float64, parameters, inputs and optimizer state.
        label_output_bytes: (C,) float64, all that its ops produce.
        tensor_unit: (T,) int32, ascending.
        tensor_bytes: (T,) float64.
        input_offsets: (U + 1,) int32.
        input_tensors: (E,) int32.
        output_offsets: (U + 1,) int32, tensors of each unit.
        reader_offsets: (T + 1,) int32.
        readers: (E,) int32, units that read each tensor.
        turn: (U,) float64, how much earlier than its priority each comes, in multiples of the largest (`turns`).
    """

    time_s: Floats
    is_source: Bools
    label: Ints
    label_allowed: Bools
    label_resident_bytes: Floats
    label_output_bytes: Floats
    tensor_unit: Ints
    tensor_bytes: Floats
    input_offsets: Ints
    input_tensors: Ints
    output_offsets: Ints
    reader_offsets: Ints
    readers: Ints
    turn: Floats


def op_units(problem: Problem) -> Units:
    """Every op is a unit; ops that live together share a label."""
    graph = problem.graph
    key = np.where(graph.colocation >= 0, graph.colocation, int(graph.colocation.max(initial=-1)) + 1)
    key = key.astype(np.int64) + np.where(graph.colocation >= 0, 0, np.arange(graph.num_ops))
    label = np.unique(key, return_inverse=True)[1].astype(np.int32)
    reader_offsets, readers = graph.readers
    return Units(
        time_s=np.where(graph.is_source[:, None], 0.0, problem.costs.op_time_s),
        is_source=np.asarray(graph.is_source),
        label=label,
        label_allowed=_allowed(problem, label),
        label_resident_bytes=_sums(label, resident_bytes(problem)),
        label_output_bytes=_sums(label, np.where(graph.is_source, 0, graph.output_bytes)),
        tensor_unit=graph.tensor_op,
        tensor_bytes=graph.tensor_bytes.astype(np.float64),
        input_offsets=graph.input_offsets,
        input_tensors=graph.input_tensors,
        output_offsets=graph.output_offsets,
        reader_offsets=reader_offsets,
        readers=readers,
        turn=turns(problem),
    )


def group_units(problem: Problem) -> Units:
    """Every group is a unit that takes the time of its ops.

    Groups may read each other both ways. A tensor that goes from a later group to an earlier one is turned round, so
    that the two still pay for being apart and the graph has no cycle: the schedule of groups is a guide, the step time
    comes from the ops.
    """
    graph, group, count = problem.graph, problem.grouping.op_group, problem.grouping.num_groups
    time_s = np.zeros((count, problem.host.num_devices))
    np.add.at(time_s, group, np.where(graph.is_source[:, None], 0.0, problem.costs.op_time_s))
    pairs = np.unique(np.stack((graph.input_tensors, group[graph.edge_op]), axis=1).astype(np.int64), axis=0)
    producer = group[graph.tensor_op[pairs[:, 0]]].astype(np.int64)
    tensor, reader = pairs[producer != pairs[:, 1]].T
    producer = producer[producer != pairs[:, 1]]
    turned = producer > reader
    # a tensor read by several later groups stays one; each turned one is a tensor of its own
    key = np.where(turned, graph.num_tensors + np.arange(len(tensor)), tensor)
    low, high = np.minimum(producer, reader), np.maximum(producer, reader)
    keys, first, which = np.unique(key, return_index=True, return_inverse=True)
    by_producer = np.argsort(low[first], kind="stable")
    place = np.empty_like(by_producer)
    place[by_producer] = np.arange(len(keys))
    edges = np.unique(np.stack((high, place[which]), axis=1), axis=0)
    tensor_unit = low[first][by_producer].astype(np.int32)
    tensor_bytes = graph.tensor_bytes[tensor[first][by_producer]].astype(np.float64)
    by_tensor = np.lexsort((edges[:, 0], edges[:, 1]))
    has_job = np.zeros(count, dtype=np.bool_)
    has_job[group[~graph.is_source]] = True
    return Units(
        time_s=time_s,
        is_source=~has_job,
        label=np.arange(count, dtype=np.int32),
        label_allowed=np.asarray(problem.group_allowed),
        label_resident_bytes=_sums(group, resident_bytes(problem)),
        label_output_bytes=_sums(group, np.where(graph.is_source, 0, graph.output_bytes)),
        tensor_unit=tensor_unit,
        tensor_bytes=tensor_bytes,
        input_offsets=_offsets(edges[:, 0], count),
        input_tensors=edges[:, 1].astype(np.int32),
        output_offsets=_offsets(tensor_unit, count),
        reader_offsets=_offsets(edges[:, 1], len(keys)),
        readers=edges[by_tensor, 0].astype(np.int32),
        turn=_earliest_turn(problem),
    )


def next_allowed(units: Units, wanted: NDArray[np.int32]) -> NDArray[np.int32]:
    """(C,) int32: for every label the device that is `wanted`, or the next one where it may be."""
    num_devices = units.time_s.shape[1]
    turns = (wanted[:, None] + np.arange(num_devices)) % num_devices
    step = np.take_along_axis(units.label_allowed, turns, axis=1).argmax(axis=1)
    return np.asarray(turns[np.arange(len(wanted)), step], dtype=np.int32)


def resident_bytes(problem: Problem) -> NDArray[np.int64]:
    """(N,) int64: bytes that an op keeps where it is when a step starts: its outputs if it is a source, its state."""
    graph = problem.graph
    return np.asarray(np.where(graph.is_source, graph.output_bytes, 0) + graph.state_bytes)


def _allowed(problem: Problem, label: Ints) -> Bools:
    table = np.ones((int(label.max(initial=-1)) + 1, problem.host.num_devices), dtype=np.bool_)
    if problem.allowed is not None:
        np.logical_and.at(table, label, problem.allowed)
    return table


def _sums(label: Ints, weights: NDArray[np.int64]) -> Floats:
    return np.bincount(label, weights=weights).astype(np.float64)


def _offsets(keys: NDArray[np.integer], count: int) -> Ints:
    return np.concatenate(([0], np.cumsum(np.bincount(keys, minlength=count)))).astype(np.int32)


def _earliest_turn(problem: Problem) -> Floats:
    """(G,) float64: of each group the turn of its op that comes first."""
    earliest = np.full(problem.grouping.num_groups, -np.inf)
    np.maximum.at(earliest, problem.grouping.op_group, turns(problem))
    return earliest


class HostResources(NamedTuple):
    """What ops and transfers hold while they run. Resources are devices 0..D-1, then links.

    Attributes:
        latency_s, s_per_byte: (D, D) float64, of each route.
        device_offsets, device_holds: CSR over devices: what an op on it holds (a gang: its members).
        route_offsets, route_holds: CSR over source * D + destination: links, and the devices that a copy blocks.
        num_resources: devices and links.
        account: (D,) int32, the memory of each device (its own, or its pool's).
        room_bytes: (accounts,) float64, capacity less what is held from the start.
    """

    latency_s: Floats
    s_per_byte: Floats
    device_offsets: Ints
    device_holds: Ints
    route_offsets: Ints
    route_holds: Ints
    num_resources: int
    account: Ints
    room_bytes: Floats


def host_resources(problem: Problem) -> HostResources:
    """The host's devices and routes as resources that are held.

    Raises:
        InvalidValue: a host that cannot be simulated.
    """
    compiled = compile_problem(problem)
    num_devices = compiled.num_devices
    atoms = [[a for a in range(num_devices) if int(mask) >> a & 1] for mask in compiled.atoms]
    holds = [_route_holds(compiled, atoms, pair) for pair in range(num_devices * num_devices)]
    account = np.where(compiled.pool >= 0, compiled.pool, np.arange(num_devices)).astype(np.int32)
    room = compiled.capacity_bytes.astype(np.float64)
    np.subtract.at(room, account, compiled.context_bytes)
    return HostResources(
        latency_s=problem.transfer_latency_s,
        s_per_byte=problem.transfer_s_per_byte,
        device_offsets=np.cumsum([0, *map(len, atoms)]).astype(np.int32),
        device_holds=np.array([a for device in atoms for a in device], dtype=np.int32),
        route_offsets=np.cumsum([0, *map(len, holds)]).astype(np.int32),
        route_holds=np.array([resource for route in holds for resource in route], dtype=np.int32),
        num_resources=num_devices + compiled.num_links,
        account=account,
        room_bytes=room,
    )


def _route_holds(compiled: Compiled, atoms: list[list[int]], pair: int) -> list[int]:
    source, destination = divmod(pair, compiled.num_devices)
    links = compiled.route_links[compiled.route_offsets[pair] : compiled.route_offsets[pair + 1]]
    held = {compiled.num_devices + link for link in links.tolist()}
    if compiled.route_kind[pair] == JOB:
        held |= set(atoms[destination])
    if compiled.route_blocks_source[pair]:
        held |= set(atoms[source])
    return sorted(held)
