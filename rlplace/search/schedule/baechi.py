"""`m-topo`, `m-etf`, `m-sct`: the memory-constrained placers of Baechi (Jeon et al., SoCC 2020).

Favourite children: which reader of each unit should share a device with it, by a linear program, for `m-sct`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.jit import Floats, Longs, inlined, kernel
from rlplace.measure.simulate.compiled_problem import transfer_seconds
from rlplace.search.schedule.list_schedule import (
    Gaps,
    HostResources,
    Memory,
    Schedule,
    Units,
    group_units,
    may_use,
    new_gaps,
    new_memory,
    new_schedule,
    op_units,
    place_unit,
)
from rlplace.search.schedule.list_schedulers import in_turn, mean_transfer_s, score_both, unit_devices, upward
from rlplace.search.task import Task

MOST_LP_EDGES = 3000
"""Where there are more, favourite children of ops are found over groups."""


def solve_m_topo(task: Task) -> None:
    """Scores `m_topo` of ops and of groups."""
    score_both(task, m_topo)


def solve_m_etf(task: Task) -> None:
    """Scores `m_etf` of ops and of groups."""
    score_both(task, m_etf)


def solve_m_sct(task: Task) -> None:
    """Scores `m_sct` of ops and of groups; where there are too many ops for the program, they take their groups'."""
    problem = task.problem
    known: dict[int, NDArray[np.int64]] = {}

    def favourites(units: Units, resources: HostResources) -> NDArray[np.int64]:
        count = len(units.label)
        if count not in known:
            if count > problem.grouping.num_groups and num_edges(units) > MOST_LP_EDGES:
                children = favourite_children(group_units(problem), resources)
                known[count] = favourites_within(op_units(problem), problem.grouping.op_group, children)
            else:
                known[count] = favourite_children(units, resources)
        return known[count]

    score_both(task, lambda units, resources, share: m_sct(units, resources, share, favourites(units, resources)))


def m_topo(units: Units, resources: HostResources, output_share: float = 0.0) -> NDArray[np.int32]:
    """(U,) int32: units in topological order fill one device after the other, each to an even share of the memory.

    The share is the mean over devices plus the largest label's, so that the last device need not take the rest; labels
    that the device at hand may not hold, or has no room for, go to the next that does. Sources come with their first
    reader. Gangs are left out.
    """
    schedule, memory, gaps = new_schedule(units), new_memory(units, resources, output_share), new_gaps(units, resources)
    plain = _plain_devices(resources)
    need = memory.need_bytes
    share = float(need.sum()) / len(plain) + float(need.max(initial=0.0))
    filled = np.zeros(len(resources.latency_s))
    at = 0
    for unit in np.flatnonzero(~units.is_source).tolist():
        label = int(units.label[unit])
        tensors = units.input_tensors[units.input_offsets[unit] : units.input_offsets[unit + 1]]
        labels = {label, *units.label[units.tensor_unit[tensors]].tolist()}
        new = [other for other in sorted(labels) if schedule.home[other] < 0]
        device = int(schedule.home[label])
        if device < 0:
            wanted = float(need[new].sum())
            while at < len(plain) - 1 and filled[plain[at]] + wanted > share:
                at += 1
            room = resources.room_bytes - memory.used_bytes
            turns = [*plain[at:], *plain[:at]]
            may = [d for d in turns if units.label_allowed[label, d]]
            fitting = [d for d in may if room[resources.account[d]] >= wanted]
            every = np.flatnonzero(units.label_allowed[label]).tolist()
            device = (fitting or may or every or turns)[0]
        _place(units, resources, schedule, memory, gaps, unit, device)
        np.add.at(filled, schedule.home[new], need[new])
    return unit_devices(units, resources, schedule, memory)


def m_etf(units: Units, resources: HostResources, output_share: float = 0.0) -> NDArray[np.int32]:
    """(U,) int32: of all ready units and devices with room, always the pair that can start first (ETF: Hwang 1989)."""
    return m_sct(units, resources, output_share, np.full(len(units.label), -1, dtype=np.int64))


def m_sct(
    units: Units, resources: HostResources, output_share: float = 0.0, favourites: NDArray[np.int64] | None = None
) -> NDArray[np.int32]:
    """(U,) int32: as `m_etf`, but a device waits a transfer's time for the favourite child of its last op.

    Small communication times (Hanen and Munier 1995): while the favourite child could not have started elsewhere for
    want of its parent's output, no other unit may start on the parent's device.

    Args:
        units: the problem to place.
        resources: where.
        output_share: share of all outputs that counts as held at once.
        favourites: (U,) favourite child of each unit, -1 for none; `favourite_children` by default.
    """
    if favourites is None:
        favourites = favourite_children(units, resources)
    schedule, memory, gaps = new_schedule(units), new_memory(units, resources, output_share), new_gaps(units, resources)
    rank = in_turn(units, upward(units, resources))
    _earliest_start(units, resources, schedule, memory, gaps, rank, mean_transfer_s(units, resources), favourites)
    return unit_devices(units, resources, schedule, memory)


def _plain_devices(resources: HostResources) -> list[int]:
    """Devices that are not gangs."""
    offsets = resources.device_offsets
    firsts = resources.device_holds[offsets[:-1]]
    return [d for d, first in enumerate(firsts.tolist()) if first == d and offsets[d + 1] - offsets[d] == 1]


@kernel
def _place(u: Units, h: HostResources, s: Schedule, m: Memory, gaps: Gaps, unit: int, device: int) -> None:
    place_unit(u, h, s, m, gaps, unit, device)


@inlined
def _free_s(h: HostResources, gaps: Gaps, device: int) -> float:
    """The end of the last item that holds `device`."""
    free_s = 0.0
    for k in range(h.device_offsets[device], h.device_offsets[device + 1]):
        resource = h.device_holds[k]
        if gaps.counts[resource] > 0:
            free_s = max(free_s, gaps.ends[resource, gaps.counts[resource] - 1])
    return free_s


@inlined
def _arrival_s(u: Units, h: HostResources, s: Schedule, unit: int, device: int) -> float:
    """When the inputs of `unit` could be on `device` if links were free."""
    arrival_s = 0.0
    for edge in range(u.input_offsets[unit], u.input_offsets[unit + 1]):
        tensor = u.input_tensors[edge]
        home = s.home[u.label[u.tensor_unit[tensor]]]
        there_s = s.end_s[u.tensor_unit[tensor]]
        if home >= 0 and home != device:
            there_s += transfer_seconds(h.latency_s, h.s_per_byte, (home, device), u.tensor_bytes[tensor])
            if s.there_s[tensor, device] >= 0.0:
                there_s = s.there_s[tensor, device]
        arrival_s = max(arrival_s, there_s)
    return arrival_s


@inlined
def _wait_s(u: Units, transfer_s: Floats, parent: int, child: int) -> float:
    """Seconds of the transfer from `parent` that `child` reads."""
    wait_s = 0.0
    for edge in range(u.input_offsets[child], u.input_offsets[child + 1]):
        if u.tensor_unit[u.input_tensors[edge]] == parent:
            wait_s += transfer_s[u.input_tensors[edge]]
    return wait_s


@kernel
def _earliest_start(
    u: Units,
    h: HostResources,
    s: Schedule,
    m: Memory,
    gaps: Gaps,
    level: Floats,
    transfer_s: Floats,
    favourites: Longs,
) -> None:
    """The pair of a ready unit and a device that can start first is placed, again and again; ties by level, index."""
    num_units, num_devices = u.time_s.shape
    missing = np.zeros(num_units, dtype=np.int64)
    ready = np.zeros(num_units, dtype=np.int64)
    arrival_s = np.zeros((num_units, num_devices))
    released = np.zeros(num_units, dtype=np.int64)
    is_done = np.zeros(num_units, dtype=np.bool_)
    last = np.full(num_devices, -1, dtype=np.int64)
    usable = np.zeros(num_devices, dtype=np.bool_)
    num_ready, num_released = 0, 0
    for unit in range(num_units):
        missing[unit] = u.input_offsets[unit + 1] - u.input_offsets[unit]
        if missing[unit] == 0:
            released[num_released] = unit
            num_released += 1
    while num_released + num_ready > 0:
        while num_released > 0:  # a source or a placed job releases its readers, another job joins the ready ones
            num_released -= 1
            unit = released[num_released]
            if not u.is_source[unit] and not is_done[unit]:
                for device in range(num_devices):
                    arrival_s[unit, device] = _arrival_s(u, h, s, unit, device)
                ready[num_ready] = unit
                num_ready += 1
                continue
            for t in range(u.output_offsets[unit], u.output_offsets[unit + 1]):
                for a in range(u.reader_offsets[t], u.reader_offsets[t + 1]):
                    missing[u.readers[a]] -= 1
                    if missing[u.readers[a]] == 0:
                        released[num_released] = u.readers[a]
                        num_released += 1
        if num_ready == 0:
            break
        place, best, best_s = -1, -1, np.inf
        for k in range(num_ready):
            unit = ready[k]
            may_use(u, h, s, m, unit, usable)
            for device in range(num_devices):
                if not usable[device]:
                    continue
                free_s = _free_s(h, gaps, device)
                child = favourites[last[device]] if last[device] >= 0 else -1
                if child >= 0 and child != unit and not is_done[child]:
                    free_s += _wait_s(u, transfer_s, last[device], child)
                start_s = max(free_s, arrival_s[unit, device])
                is_tie = place >= 0 and start_s == best_s and unit != ready[place]
                if start_s < best_s or (
                    is_tie
                    and (
                        level[unit] > level[ready[place]]
                        or (level[unit] == level[ready[place]] and unit < ready[place])
                    )
                ):
                    place, best, best_s = k, device, start_s
        unit = ready[place]
        num_ready -= 1
        ready[place] = ready[num_ready]
        place_unit(u, h, s, m, gaps, unit, best)
        is_done[unit] = True
        last[best] = unit
        released[0] = unit
        num_released = 1


FAVOURITE_BELOW = 0.1
"""A child is a favourite where the relaxed program puts less than this on the edge (Baechi's threshold)."""


def favourite_children(units: Units, resources: HostResources) -> NDArray[np.int64]:
    """(U,) int64: the child that each unit should share a device with, -1 for none.

    An edge on which the relaxed program puts less than `FAVOURITE_BELOW` makes a favourite; every unit has at most one
    favourite child and is that of at most one parent.
    """
    count = len(units.label)
    parents, children, transfer_s = _edges(units, mean_transfer_s(units, resources))
    share = _relaxed(units, parents, children, transfer_s) if len(parents) else None
    if share is None:
        return np.full(count, -1, dtype=np.int64)
    turns = np.lexsort((np.arange(len(parents)), share))
    return _matched(count, parents, children, turns[share[turns] < FAVOURITE_BELOW])


def favourites_within(
    ops: Units, op_group: NDArray[np.int32], group_favourites: NDArray[np.int64]
) -> NDArray[np.int64]:
    """(N,) int64: favourite children of ops where only those of groups are known.

    An op's is the reader, in its own group or its group's favourite, of the most bytes that is not yet a favourite.
    """
    parents, children, weight = _edges(ops, ops.tensor_bytes)
    near = (op_group[parents] == op_group[children]) | (group_favourites[op_group[parents]] == op_group[children])
    turns = np.lexsort((np.arange(len(parents)), -weight))
    return _matched(len(ops.label), parents, children, turns[near[turns]])


def num_edges(units: Units) -> int:
    """Pairs of units of which one reads the other, sources aside."""
    return len(_edges(units, np.zeros(len(units.tensor_unit)))[0])


def _edges(
    units: Units, tensor_weight: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Pairs (parent, child) of jobs, and the summed weight of the tensors between them."""
    count = len(units.label)
    child = np.repeat(np.arange(count), np.diff(units.input_offsets))
    parent = units.tensor_unit[units.input_tensors].astype(np.int64)
    is_job = ~units.is_source[parent] & ~units.is_source[child]
    pairs, which = np.unique(parent[is_job] * count + child[is_job], return_inverse=True)
    weight = np.bincount(which, weights=tensor_weight[units.input_tensors[is_job]], minlength=len(pairs))
    return pairs // count, pairs % count, weight.astype(np.float64)


def _relaxed(
    units: Units, parents: NDArray[np.int64], children: NDArray[np.int64], transfer_s: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """(E,) float64: the share of its transfer that each edge pays, 0..1; None where no solution was found.

    The linear relaxation of Hanen and Munier's program, by HiGHS: an edge's transfer counts x in 0..1 of its time, a
    unit with k children (or parents) has at least k - 1 of x over them, and the makespan is least.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix, vstack

    count, edges = len(units.label), len(parents)
    time_s = units.time_s.mean(axis=1)
    scale = 1.0 / max(float(time_s.sum() + transfer_s.sum()), 1e-30)
    # columns: starts of units, x of edges, makespan; rows: edges, children, parents, ends
    rows = np.arange(edges)
    ones = np.ones(edges)
    width = count + edges + 1
    after = coo_matrix(
        (
            np.concatenate((ones, -ones, transfer_s * scale)),
            (np.tile(rows, 3), np.concatenate((parents, children, count + rows))),
        ),
        shape=(edges, width),
    )
    by_parent = coo_matrix((-ones, (parents, count + rows)), shape=(count, width))
    by_child = coo_matrix((-ones, (children, count + rows)), shape=(count, width))
    every = np.arange(count)
    signs = np.repeat((1.0, -1.0), count)
    columns = np.concatenate((every, np.full(count, width - 1)))
    ends = coo_matrix((signs, (np.tile(every, 2), columns)), shape=(count, width))
    limits = np.concatenate(
        (
            -time_s[parents] * scale,
            -np.maximum(np.bincount(parents, minlength=count) - 1, 0),
            -np.maximum(np.bincount(children, minlength=count) - 1, 0),
            -time_s * scale,
        )
    )
    goal = np.zeros(width)
    goal[-1] = 1.0
    bounds = np.zeros((width, 2))
    bounds[:, 1] = np.inf
    bounds[count : count + edges, 1] = 1.0
    solved = linprog(goal, A_ub=vstack((after, by_parent, by_child, ends)).tocsr(), b_ub=limits, bounds=bounds)
    return None if solved.x is None else np.asarray(solved.x[count : count + edges])


def _matched(
    count: int, parents: NDArray[np.int64], children: NDArray[np.int64], turns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """(count,) int64: favourite children where edges, in these turns, make one if parent and child have none yet."""
    favourites = np.full(count, -1, dtype=np.int64)
    taken = np.zeros(count, dtype=np.bool_)
    for edge in turns.tolist():
        parent, child = int(parents[edge]), int(children[edge])
        if favourites[parent] < 0 and not taken[child]:
            favourites[parent] = child
            taken[child] = True
    return favourites
