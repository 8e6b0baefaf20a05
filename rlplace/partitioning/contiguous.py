"""`dp`: the best contiguous split by dynamic programming over ideals (Tarnawski et al. 2020, section 5.1).

The lattice of ideals: all down-closed sets of a DAG, and which one follows from which by one more unit.

`contract`: the forward graph that contiguous splits are made of, one unit for ops that have to move together.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from rlplace.graphs import BACKWARD
from rlplace.graphs.formats.published import DnnPartitioning
from rlplace.graphs.paths import depth_first_order
from rlplace.jit import Floats, Ints, kernel
from rlplace.partitioning.objectives import UnitGraph, csr, unit_graph

MOST_IDEALS = 200_000
MOST_PAIRS = 800_000_000
"""Pairs of nested ideals that the exact program looks at before it gives up: about 20 s."""
NUM_ORDERS = 12
"""Orders that the graph is cut along before."""


@dataclass(frozen=True, eq=False)
class ContiguousSplit:
    """The result of the dynamic program.

    Attributes:
        devices: (N,) int32, device of each op; None where no contiguous split fits.
        value_ms: its max-load; infinite where there is none.
        is_exact: whether it is the best of all contiguous splits; otherwise the best that is contiguous in one order.
        num_ideals: of the lattice that it comes from.
    """

    devices: Ints | None
    value_ms: float
    is_exact: bool
    num_ideals: int


def dp(
    record: DnnPartitioning, *, in_turn: bool = False, most_ideals: int = MOST_IDEALS, most_pairs: int = MOST_PAIRS
) -> ContiguousSplit:
    """The contiguous split with the least max-load: every device holds a difference of two nested ideals.

    With `in_turn`, the split with the least sum of loads instead: the latency when devices work one after the other,
    which is never less than the true one.

    The graph is first put in depth-first orders, branches drawn at random, and cut along each, which is quick; the best
    value then bounds the program over all ideals, which skips sets whose work alone exceeds it. With more than
    `most_ideals` ideals, or `most_pairs` pairs of them, the best linear split is the answer, and not exact.
    """
    contraction = contract(record)
    units = contraction.units
    linear = ContiguousSplit(None, math.inf, False, units.num_units + 1)
    for order in _orders(contraction):
        found = _solve(units, chain_lattice(order), in_turn, linear.value_ms, sys.maxsize)
        if found is not None and found.value_ms < linear.value_ms:
            linear = found
    edges = contraction.source_offsets, contraction.sources, contraction.reader_offsets, contraction.readers
    lattice = enumerate_ideals(*edges, most=most_ideals)
    exact = _solve(units, lattice, in_turn, linear.value_ms, most_pairs) if lattice is not None else None
    if exact is None:
        return linear
    best = exact if exact.value_ms < linear.value_ms else linear
    return ContiguousSplit(best.devices, best.value_ms, best.devices is not None, exact.num_ideals)


def _orders(contraction: Contraction) -> Iterator[Ints]:
    """Depth-first topological orders (U,), the units' own first; branches are finished one after the other."""
    count = contraction.units.num_units
    yield np.arange(count, dtype=np.int32)
    offsets, readers = contraction.reader_offsets.tolist(), contraction.readers.tolist()
    generator = np.random.default_rng(0)
    for _ in range(NUM_ORDERS - 1):
        key = generator.random(count).tolist()
        waiting = np.diff(contraction.source_offsets).tolist()
        stack = sorted((unit for unit in range(count) if not waiting[unit]), key=key.__getitem__)
        order = []
        while stack:
            unit = stack.pop()
            order.append(unit)
            for reader in sorted(readers[offsets[unit] : offsets[unit + 1]], key=key.__getitem__):
                waiting[reader] -= 1
                if not waiting[reader]:
                    stack.append(reader)
        yield np.array(order, dtype=np.int32)


def _solve(
    units: UnitGraph, lattice: Lattice, in_turn: bool, limit_ms: float, most_pairs: int
) -> ContiguousSplit | None:
    """The best split along `lattice` that is no worse than `limit_ms`; None where `most_pairs` do not suffice."""
    count, width = lattice.num_ideals, units.num_accelerators + 1
    value = np.full((count, 2 * width), np.inf)
    parent = np.full((count, 2 * width), -1, dtype=np.int32)
    value[0, 0] = 0.0
    pairs = _relax(
        lattice.offsets,
        lattice.step_unit,
        lattice.step_ideal,
        units.accelerator_ms,
        units.cpu_ms,
        units.size_bytes,
        units.supported,
        units.net_ms,
        units.net_source,
        np.diff(units.net_offsets).astype(np.int32),
        units.unit_offsets,
        units.unit_nets,
        units.num_accelerators,
        units.num_devices > units.num_accelerators,
        units.capacity_bytes,
        in_turn,
        limit_ms * (1 + 1e-12),
        most_pairs,
        value,
        parent,
    )
    if pairs < 0:
        return None
    state = int(np.argmin(value[-1]))
    best = float(value[-1, state])
    if not math.isfinite(best):
        return ContiguousSplit(None, math.inf, False, count)
    return ContiguousSplit(units.expand(_trace(units, lattice, parent, state)), best, False, count)


def _trace(units: UnitGraph, lattice: Lattice, parent: Ints, state: int) -> Ints:
    """(U,) devices of units along the chain of ideals that ends at the full one in `state`."""
    arrivals, step = np.unique(lattice.step_ideal, return_index=True)
    step_of = dict(zip(arrivals.tolist(), step.tolist(), strict=True))
    ideal_of_step = np.repeat(np.arange(lattice.num_ideals), np.diff(lattice.offsets))

    def members(ideal: int) -> NDArray[np.bool_]:
        inside = np.zeros(units.num_units, dtype=np.bool_)
        while ideal:
            inside[lattice.step_unit[step_of[ideal]]] = True
            ideal = int(ideal_of_step[step_of[ideal]])
        return inside

    devices = np.full(units.num_units, -1, dtype=np.int32)
    width, ideal, inside = units.num_accelerators + 1, lattice.num_ideals - 1, members(lattice.num_ideals - 1)
    while ideal:
        link = int(parent[ideal, state])
        before = members(abs(link) - 1)
        devices[inside & ~before] = state % width - 1 if link > 0 else units.num_accelerators
        state -= 1 if link > 0 else width
        ideal, inside = abs(link) - 1, before
    return devices


@kernel
def _relax(
    offsets: NDArray[np.int64],
    step_unit: Ints,
    step_ideal: Ints,
    accelerator_ms: Floats,
    cpu_ms: Floats,
    size_bytes: Floats,
    supported: NDArray[np.bool_],
    net_ms: Floats,
    net_source: Ints,
    net_sinks: Ints,
    unit_offsets: Ints,
    unit_nets: Ints,
    num_accelerators: int,
    has_cpu: bool,
    capacity_bytes: float,
    in_turn: bool,
    limit_ms: float,
    most_pairs: int,
    value: Floats,
    parent: Ints,
) -> int:
    """Fill `value` (I, 2 (K + 1)) and `parent`; the number of pairs of ideals looked at, -1 where they are too many.

    `value[i, c (K + 1) + k]` is the least max-load (or sum, with `in_turn`) of ideal i on k accelerators, and the
    CPUs where c is 1. From each ideal, all larger ones are reached depth first, one unit more at a time, and the load
    of the difference is kept up to date: a net is paid for by a set that holds its source but not all its sinks, or a
    sink but not its source. A set whose work alone is over the limit on either kind of device, or does not fit, is not
    grown further.
    """
    count, width = len(offsets) - 1, num_accelerators + 1
    num_units = len(accelerator_ms)
    stamp = np.full(count, -1, dtype=np.int32)
    path_ideal = np.empty(num_units + 1, dtype=np.int32)
    path_step = np.empty(num_units + 1, dtype=np.int64)
    path_work = np.empty((num_units + 1, 4))
    net_inside = np.zeros(len(net_ms), dtype=np.int32)
    source_inside = np.zeros(len(net_ms), dtype=np.bool_)
    active = np.empty(2 * width, dtype=np.int32)
    pairs = 0
    for start in range(count):
        # which states (accelerators and CPUs used so far) of this ideal are worth going on from: those within the
        # limit that no state with fewer devices equals
        num_active = 0
        for state in range(2 * width):
            reached = value[start, state]
            if reached > limit_ms:
                continue
            used = state % width
            is_beaten = np.any(value[start, state - used : state] <= reached)
            if state >= width:
                is_beaten = is_beaten or np.any(value[start, : used + 1] <= reached)
            if not is_beaten:
                active[num_active] = state
                num_active += 1
        if num_active == 0:
            continue
        # depth-first over all larger ideals; path_* is the stack, and path_work[level] are the sums over the set of
        # units added so far: work on an accelerator, on the CPUs, bytes, and transfers of the nets that it cuts
        level = 0
        path_ideal[0], path_step[0] = start, offsets[start]
        path_work[0, :] = 0.0
        while level >= 0:
            ideal = path_ideal[level]
            if path_step[level] == offsets[ideal + 1]:
                if level > 0:  # all steps from here are done: the unit that led here is taken out of its nets
                    unit = step_unit[path_step[level - 1] - 1]
                    for a in range(unit_offsets[unit], unit_offsets[unit + 1]):
                        net = unit_nets[a]
                        if net_source[net] == unit:
                            source_inside[net] = False
                        else:
                            net_inside[net] -= 1
                level -= 1
                continue
            step = path_step[level]
            path_step[level] += 1
            grown, unit = step_ideal[step], step_unit[step]
            if stamp[grown] == start:  # reached before from this start, by its units in another order
                continue
            stamp[grown] = start
            pairs += 1
            work = path_work[level, 0] + accelerator_ms[unit]
            cpu = path_work[level, 1] + cpu_ms[unit]
            held = path_work[level, 2] + (size_bytes[unit] if supported[unit] else np.inf)
            on_accelerator = work <= limit_ms and held <= capacity_bytes
            on_cpu = has_cpu and cpu <= limit_ms
            if not on_accelerator and not on_cpu:
                continue
            # the unit enters its nets: a cut net is paid for once, whether for its source or for a sink
            moved = path_work[level, 3]
            for a in range(unit_offsets[unit], unit_offsets[unit + 1]):
                net = unit_nets[a]
                if source_inside[net]:
                    net_inside[net] += 1
                    if net_inside[net] == net_sinks[net]:
                        moved -= net_ms[net]
                elif net_source[net] == unit:
                    source_inside[net] = True
                    paid, pays = net_inside[net] > 0, net_inside[net] < net_sinks[net]
                    moved += net_ms[net] * (int(pays) - int(paid))
                else:
                    net_inside[net] += 1
                    if net_inside[net] == 1:
                        moved += net_ms[net]
            level += 1
            path_ideal[level], path_step[level] = grown, offsets[grown]
            path_work[level, 0], path_work[level, 1], path_work[level, 2] = work, cpu, held
            path_work[level, 3] = moved
            # the added set as one more accelerator's share, or as the share of the CPUs
            load = work + moved if on_accelerator else np.inf
            for a in range(num_active):
                state = active[a]
                reached = value[start, state]
                if load <= limit_ms and state % width < num_accelerators:
                    reaches = reached + load if in_turn else max(reached, load)
                    if reaches <= limit_ms and reaches < value[grown, state + 1]:
                        value[grown, state + 1] = reaches
                        parent[grown, state + 1] = start + 1
                if on_cpu and state < width:
                    reaches = reached + cpu if in_turn else max(reached, cpu)
                    if reaches <= limit_ms and reaches < value[grown, state + width]:
                        value[grown, state + width] = reaches
                        parent[grown, state + width] = -start - 1
        if pairs > most_pairs:
            return -1
    return pairs


@dataclass(frozen=True, eq=False)
class Lattice:
    """I ideals, smaller ones first, the empty one at 0 and the full one at I - 1.

    Attributes:
        offsets: (I + 1,) int64, CSR of the steps from each ideal.
        step_unit: (L,) int32, the unit that the step adds.
        step_ideal: (L,) int32, the ideal that it leads to.
    """

    offsets: NDArray[np.int64]
    step_unit: Ints
    step_ideal: Ints

    @property
    def num_ideals(self) -> int:
        return len(self.offsets) - 1


def chain_lattice(order: Ints) -> Lattice:
    """The prefixes of the topological order (U,): the lattice of a linearised graph."""
    count = len(order)
    offsets = np.minimum(np.arange(count + 2, dtype=np.int64), count)
    return Lattice(offsets, np.ascontiguousarray(order, dtype=np.int32), np.arange(1, count + 1, dtype=np.int32))


def enumerate_ideals(
    source_offsets: Ints, sources: Ints, reader_offsets: Ints, readers: Ints, *, most: int
) -> Lattice | None:
    """All ideals of a DAG given as CSRs of the units before and after each unit; None where there are more than `most`.

    Ideals are bit masks, found breadth first. With each goes the mask of the units that may be added to it.
    """
    num_units = len(source_offsets) - 1
    before = [sum(1 << u for u in sources[a:b].tolist()) for a, b in itertools.pairwise(source_offsets.tolist())]
    after = [readers[a:b].tolist() for a, b in itertools.pairwise(reader_offsets.tolist())]
    found, waiting = {0: 0}, [(0, sum(1 << unit for unit in range(num_units) if not before[unit]))]
    offsets, step_unit, step_ideal = [0], [], []
    for ideal, ready in waiting:  # which grows meanwhile
        left = ready
        while left:
            bit = left & -left
            left, unit, grown = left - bit, bit.bit_length() - 1, ideal | bit
            if grown not in found:
                if len(found) == most:
                    return None
                found[grown] = len(found)
                new = sum(1 << reader for reader in after[unit] if before[reader] & grown == before[reader])
                waiting.append((grown, ready - bit | new))
            step_unit.append(unit)
            step_ideal.append(found[grown])
        offsets.append(len(step_unit))
    return Lattice(
        np.array(offsets, dtype=np.int64), np.array(step_unit, dtype=np.int32), np.array(step_ideal, dtype=np.int32)
    )


@dataclass(frozen=True, eq=False)
class Contraction:
    """Units and the forward DAG over them.

    Attributes:
        units: numbered in a topological order.
        source_offsets, sources: CSR (U + 1,), (F,) int32 of the units before each unit.
        reader_offsets, readers: CSR (U + 1,), (F,) int32 of the units after each unit.
    """

    units: UnitGraph
    source_offsets: Ints
    sources: Ints
    reader_offsets: Ints
    readers: Ints


def contract(record: DnnPartitioning) -> Contraction:
    """The contraction of Tarnawski et al. (2020): the meaning of contiguous for graphs with classes and backward nodes.

    1. A colour class is one unit, its forward and backward ops together.
    2. In a training graph, a forward op that takes no time and has a single neighbour joins it.
    3. An edge between forward ops is an edge of the forward graph; so is, reversed, an edge between backward ops of
       which one has no forward op in its unit (a mirror of the backward graph stands for the missing forward part).
    4. Units on a cycle of the forward graph are one unit.
    """
    graph = record.graph
    backward = graph.phases == BACKWARD
    sources, readers = graph.input_tensors, graph.edge_op
    unit = _absorb(record, backward) if record.is_training else record.units
    count = int(unit.max()) + 1
    has_forward = np.zeros(count, dtype=np.bool_)
    has_forward[unit[~backward]] = True
    a, b = unit[sources], unit[readers]
    ahead = ~backward[sources] & ~backward[readers]
    mirrored = backward[sources] & backward[readers] & ~(has_forward[a] & has_forward[b])
    tails, heads = np.concatenate((a[ahead], b[mirrored])), np.concatenate((b[ahead], a[mirrored]))
    _, component = connected_components(
        csr_array((np.ones(len(tails)), (tails, heads)), shape=(count, count)), connection="strong"
    )
    tails, heads, count = component[tails], component[heads], int(component.max()) + 1
    pairs = np.unique(np.stack((tails, heads), axis=1)[tails != heads], axis=0)
    rank = _topological_rank(count, pairs)
    pairs = rank[pairs]
    return Contraction(
        unit_graph(record, rank[component[unit]].astype(np.int32)),
        *csr(count, pairs[:, 1], pairs[:, 0]),
        *csr(count, pairs[:, 0], pairs[:, 1]),
    )


def _absorb(record: DnnPartitioning, backward: NDArray[np.bool_]) -> Ints:
    """(N,) units after forward units without work have joined their only neighbour, again and again."""
    unit, count = record.units, int(record.units.max()) + 1
    idle = np.ones(count, dtype=np.bool_)
    busy = (record.accelerator_ms > 0) | (record.cpu_ms > 0) | backward | ~record.supported
    idle[unit[busy]] = False
    neighbours: list[set[int]] = [set() for _ in range(count)]
    for a, b in zip(unit[record.graph.input_tensors].tolist(), unit[record.graph.edge_op].tolist(), strict=True):
        if a != b:
            neighbours[a].add(b)
            neighbours[b].add(a)
    into = np.arange(count)
    queue = [u for u in range(count) if idle[u] and len(neighbours[u]) == 1]
    while queue:
        u = queue.pop()
        if len(neighbours[u]) != 1:
            continue
        host = neighbours[u].pop()
        neighbours[host].discard(u)
        into[u] = host
        if idle[host] and len(neighbours[host]) == 1:
            queue.append(host)
    while np.any(into != into[into]):
        into = into[into]
    return np.unique(into[unit], return_inverse=True)[1].astype(np.int32)


def _topological_rank(count: int, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """(U,) place of each unit in a depth-first topological order: a branch is finished before the next begins."""
    source, reader = pairs[np.lexsort((-pairs[:, 1], pairs[:, 0]))].T  # the last reader made ready goes first
    offsets = np.searchsorted(source, np.arange(count + 1))
    order, _ = depth_first_order(count, offsets, np.ascontiguousarray(reader))
    return np.argsort(order)
