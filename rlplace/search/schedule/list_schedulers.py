"""List schedulers: units in order of priority, each on the device where it would end first.

`eft`: earliest finish time, ops appended to their devices.

`heft`: heterogeneous earliest finish time, with insertion (Topcuoglu, Hariri, Wu 2002), on contended links.

`peft`: predict earliest finish time, which looks ahead by a table of optimistic costs.

`critical-path`: the critical path on one device, everything else where it ends first (CPOP).

`m-topo`, `m-etf`, `m-sct`: the memory-constrained placers of Baechi (Jeon et al., SoCC 2020). `m-sct` keeps a unit and
its favourite child, the reader that should share its device by a linear program, together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.paths import longest_after, longest_before, ready_order
from rlplace.jit import Floats, Ints, Longs, inlined, kernel
from rlplace.measure import Problem
from rlplace.measure.simulate.compiled_problem import list_order, mean_route
from rlplace.measure.simulate.transfer_time import transfer_seconds
from rlplace.search.schedule.list_schedule import (
    Gaps,
    HostResources,
    Memory,
    Schedule,
    Units,
    group_units,
    host_resources,
    may_use,
    new_gaps,
    new_memory,
    new_schedule,
    op_units,
    place_unit,
    schedule_in_order,
    unit_levels,
)
from rlplace.search.task import Task


def eft(problem: Problem) -> NDArray[np.int32]:
    """(N,) int32: ops in the order of the problem, each on the device where it would end first; memory does not count.

    A parameter or input goes where its first reader goes, and ops that live together follow the first of them; ops go
    only where they may. A copy takes its route's time; where it blocks the destination it takes the device's time too.

    Args:
        problem: gangs take part as devices that occupy their members.
    """
    units, resources = op_units(problem), host_resources(problem)
    schedule, memory = new_schedule(units), new_memory(units, resources, 0.0)
    room = resources.replace(room_bytes=np.full(len(resources.room_bytes), np.inf))
    schedule_in_order(units, room, schedule, memory, None, list_order(problem), *_no_choice(units))
    home = np.where(schedule.home >= 0, schedule.home, units.label_allowed.argmax(axis=1))
    return home[units.label].astype(np.int32)


def solve_eft(task: Task) -> None:
    """Scores `eft`."""
    task.score(eft(task.problem))


def solve_heft(task: Task) -> None:
    """Scores `heft` of ops and of groups."""
    score_both(task, lambda units, resources, output_share: heft(units, resources, output_share)[0])


def heft(units: Units, resources: HostResources, output_share: float = 0.0) -> tuple[NDArray[np.int32], float]:
    """(U,) int32 devices, and the makespan of the schedule: units by upward rank, each where it ends first.

    The paper has a link of its own for every pair of processors and lets transfers overlap freely; here they wait for
    the links of their route, in gaps where there are any.

    Args:
        units: the problem to place.
        resources: where.
        output_share: share of all outputs that counts as held at once.
    """
    order = _ready_order(units, upward(units, resources))
    return _inserted(units, resources, output_share, order, *_no_choice(units))


def solve_peft(task: Task) -> None:
    """Scores `peft` of ops and of groups."""
    score_both(task, lambda units, resources, output_share: peft(units, resources, output_share)[0])


def peft(units: Units, resources: HostResources, output_share: float = 0.0) -> tuple[NDArray[np.int32], float]:
    """(U,) int32 devices, and the makespan of the schedule (Arabnejad and Barbosa 2014).

    Units by the mean of their row of the table, each where its end plus its optimistic cost is least. Arguments as
    of `heft`.
    """
    table_s = optimistic_cost_s(units, mean_transfer_s(units, resources))
    order = _ready_order(units, np.asarray(table_s.mean(axis=1)))
    return _inserted(units, resources, output_share, order, table_s, _no_choice(units)[1])


@kernel
def optimistic_cost_s(u: Units, transfer_s: Floats) -> Floats:
    """(U, D) float64: shortest way from the end of a unit on a device to the end, every reader on its best device.

    Equation 2 of the paper: the largest over readers j of the least over devices q of the cost of j on q, its time
    there, and the mean transfer (T,) unless q is the unit's device.
    """
    num_units, num_devices = u.time_s.shape
    table_s = np.zeros((num_units, num_devices))
    for unit in range(num_units - 1, -1, -1):
        for tensor in range(u.output_offsets[unit], u.output_offsets[unit + 1]):
            for place in range(u.reader_offsets[tensor], u.reader_offsets[tensor + 1]):
                reader = u.readers[place]
                elsewhere_s = np.inf
                for q in range(num_devices):
                    if u.label_allowed[u.label[reader], q]:
                        elsewhere_s = min(elsewhere_s, table_s[reader, q] + u.time_s[reader, q] + transfer_s[tensor])
                for p in range(num_devices):
                    here_s = elsewhere_s
                    if u.label_allowed[u.label[reader], p]:
                        here_s = min(here_s, table_s[reader, p] + u.time_s[reader, p])
                    table_s[unit, p] = max(table_s[unit, p], here_s)
    return table_s


def solve_critical_path(task: Task) -> None:
    """Scores `critical_path` of ops and of groups."""
    score_both(task, lambda units, resources, output_share: critical_path(units, resources, output_share)[0])


def critical_path(units: Units, resources: HostResources, output_share: float = 0.0) -> tuple[NDArray[np.int32], float]:
    """(U,) int32 devices, and the makespan of the schedule (CPOP: Topcuoglu, Hariri, Wu 2002, section 4.2).

    Units are given out as they become ready, the longest path through them first. Those on the critical path go to the
    device that runs all of it fastest among those where all of it may run, as far as they fit. Arguments as of `heft`.
    """
    above_s, below_s = downward(units, resources), upward(units, resources)
    path = longest_path(units, above_s, below_s, mean_transfer_s(units, resources))
    bias_s, wanted = _no_choice(units)
    may_run = units.label_allowed[units.label[path]].all(axis=0)
    if len(path) and may_run.any():
        wanted[path] = int(np.argmin(np.where(may_run, units.time_s[path].sum(axis=0), np.inf)))
    return _inserted(units, resources, output_share, _ready_order(units, above_s + below_s), bias_s, wanted)


def longest_path(
    units: Units, above_s: NDArray[np.float64], below_s: NDArray[np.float64], transfer_s: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Units of one critical path, from its first to its last; sources left out.

    Args:
        units: the DAG.
        above_s: (U,) longest path to the start of each unit.
        below_s: (U,) longest path from its start.
        transfer_s: (T,) mean transfer times.
    """
    jobs = np.flatnonzero(~units.is_source)
    if not len(jobs):
        return jobs
    path = [int(jobs[np.argmax((above_s + below_s)[jobs])])]
    while (before := _before(units, path[0], above_s, transfer_s)) >= 0:
        path.insert(0, before)
    while (after := _after(units, path[-1], below_s, transfer_s)) >= 0:
        path.append(after)
    units_on_path = np.array(path, dtype=np.int64)
    return units_on_path[~units.is_source[units_on_path]]


def _before(units: Units, unit: int, above_s: NDArray[np.float64], transfer_s: NDArray[np.float64]) -> int:
    tensors = units.input_tensors[units.input_offsets[unit] : units.input_offsets[unit + 1]]
    if not len(tensors):
        return -1
    producers = units.tensor_unit[tensors]
    return int(producers[np.argmax(above_s[producers] + units.time_s[producers].mean(axis=1) + transfer_s[tensors])])


def _after(units: Units, unit: int, below_s: NDArray[np.float64], transfer_s: NDArray[np.float64]) -> int:
    best, best_s = -1, -1.0
    for tensor in range(units.output_offsets[unit], units.output_offsets[unit + 1]):
        readers = units.readers[units.reader_offsets[tensor] : units.reader_offsets[tensor + 1]]
        if len(readers) and transfer_s[tensor] + below_s[readers].max() > best_s:
            best, best_s = int(readers[np.argmax(below_s[readers])]), float(transfer_s[tensor] + below_s[readers].max())
    return best


def _no_choice(units: Units) -> tuple[Floats, Ints]:
    """No bias of any unit, and no device that one is wanted on."""
    return np.zeros_like(units.time_s), np.full(len(units.label), -1, dtype=np.int32)


def _inserted(
    units: Units, resources: HostResources, output_share: float, order: Longs, bias_s: Floats, wanted: Ints
) -> tuple[NDArray[np.int32], float]:
    """(U,) int32 devices, and the makespan, of `schedule_in_order` with insertion."""
    schedule, memory = new_schedule(units), new_memory(units, resources, output_share)
    schedule_in_order(units, resources, schedule, memory, new_gaps(units, resources), order, bias_s, wanted)
    return unit_devices(units, resources, schedule, memory), float(schedule.end_s.max(initial=0.0))


def unit_devices(units: Units, resources: HostResources, schedule: Schedule, memory: Memory) -> NDArray[np.int32]:
    """(U,) int32; a unit without readers or followers goes to the allowed device with the most free memory."""
    for label in np.flatnonzero(schedule.home < 0).tolist():
        room = (resources.room_bytes - memory.used_bytes)[resources.account]
        device = int(np.argmax(np.where(units.label_allowed[label], room, -np.inf)))
        schedule.home[label] = device
        memory.used_bytes[resources.account[device]] += memory.need_bytes[label]
    return schedule.home[units.label]


OUTPUT_SHARES = (0.0, 0.25, 0.5, 1.0)
"""How much of all outputs a scheduler counts as held at once, from hopeful to safe; the simulator knows the truth."""

Place = Callable[[Units, HostResources, float], NDArray[np.int32]]
"""From units, resources and the share of outputs held at once to the device of each unit, (U,) int32."""


def score_both(task: Task, place: Place) -> None:
    """Scores the placements that `place` makes of ops and of groups, for every share of `OUTPUT_SHARES`; equal answers
    count once."""
    problem, resources = task.problem, host_resources(task.problem)
    found = [place(units, resources, share) for units in unit_levels(problem) for share in OUTPUT_SHARES]
    by_op = [row if len(row) == problem.graph.num_ops else problem.grouping.expand(row) for row in found]
    task.score_distinct(np.stack(by_op).astype(np.int32))


def mean_transfer_s(units: Units, resources: HostResources) -> NDArray[np.float64]:
    """(T,) float64: transfer time of each tensor, the mean over ordered pairs of distinct devices."""
    return np.asarray(mean_route(resources.latency_s) + units.tensor_bytes * mean_route(resources.s_per_byte))


def upward(units: Units, resources: HostResources) -> NDArray[np.float64]:
    """(U,) float64: longest path from the start of each unit to the end (HEFT, equation 6), with mean times."""
    mean_s = np.asarray(units.time_s.mean(axis=1))
    return mean_s + longest_after(mean_s, *_edges(units, resources))


def downward(units: Units, resources: HostResources) -> NDArray[np.float64]:
    """(U,) float64: longest path from the start of the step to the start of each unit (HEFT, equation 8)."""
    return longest_before(np.asarray(units.time_s.mean(axis=1)), *_edges(units, resources))


def in_turn(units: Units, priority: NDArray[np.float64]) -> NDArray[np.float64]:
    """(U,) float64: `priority` with the op order of the problem in it; the same where the step is not cut."""
    return np.asarray(priority + units.turn * priority.max(initial=0.0))


def _ready_order(units: Units, priority: NDArray[np.float64]) -> Longs:
    """(U,) int64: units as a queue of ready ones gives them out, by `in_turn` of priorities, ties by index."""
    starts = units.reader_offsets[units.output_offsets]
    return ready_order(in_turn(units, priority), units.input_offsets, starts, units.readers)


def _edges(units: Units, resources: HostResources) -> tuple[Ints, Ints, NDArray[np.float64]]:
    """Offsets, producers and mean transfer time of the edges into each unit."""
    tensors = units.input_tensors
    return units.input_offsets, units.tensor_unit[tensors], mean_transfer_s(units, resources)[tensors]


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

    @cache
    def favourites(units: Units, resources: HostResources) -> NDArray[np.int64]:
        num_edges = len(job_edges(units, units.tensor_bytes)[0])
        if len(units.label) <= problem.grouping.num_groups or num_edges <= MOST_LP_EDGES:
            return favourite_children(units, resources)
        children = favourite_children(group_units(problem), resources)
        return favourites_within(units, problem.grouping.op_group, children)

    score_both(task, lambda units, resources, share: m_sct(units, resources, share, favourites(units, resources)))


def m_topo(units: Units, resources: HostResources, output_share: float = 0.0) -> NDArray[np.int32]:
    """(U,) int32: units in topological order fill one device after the other, each to an even share of the memory.

    The share is the mean over devices plus the largest label's, so that the last device need not take the rest; labels
    that the device at hand may not hold, or has no room for, go to the next that does. Sources come with their first
    reader. Gangs are left out.
    """
    schedule, memory, gaps = new_schedule(units), new_memory(units, resources, output_share), new_gaps(units, resources)
    plain = np.flatnonzero(resources.occupies.sum(axis=1) == 1).tolist()
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
    parents, children, transfer_s = job_edges(units, mean_transfer_s(units, resources))
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
    parents, children, weight = job_edges(ops, ops.tensor_bytes)
    near = (op_group[parents] == op_group[children]) | (group_favourites[op_group[parents]] == op_group[children])
    turns = np.lexsort((np.arange(len(parents)), -weight))
    return _matched(len(ops.label), parents, children, turns[near[turns]])


def job_edges(
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
    from scipy.sparse import coo_matrix, hstack, identity, vstack

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
    ends = hstack((identity(count), coo_matrix((count, edges)), coo_matrix(-np.ones((count, 1)))))
    limits = np.concatenate(
        (
            -time_s[parents] * scale,
            -np.maximum(np.bincount(parents, minlength=count) - 1, 0),
            -np.maximum(np.bincount(children, minlength=count) - 1, 0),
            -time_s * scale,
        )
    )
    goal = np.append(np.zeros(width - 1), 1.0)
    bounds = [(0.0, np.inf)] * count + [(0.0, 1.0)] * edges + [(0.0, np.inf)]
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
