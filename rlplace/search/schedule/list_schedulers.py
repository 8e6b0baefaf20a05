"""List schedulers: units in order of priority, each on the device where it would end first.

`eft`: earliest finish time, ops appended to their devices.

`heft`: heterogeneous earliest finish time, with insertion (Topcuoglu, Hariri, Wu 2002), on contended links.

`peft`: predict earliest finish time, which looks ahead by a table of optimistic costs.

`critical-path`: the critical path on one device, everything else where it ends first (CPOP).

`Estimator`: figures of a placement that need no simulation: when its list schedule ends, and totals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs import Grouping
from rlplace.graphs.paths import longest_after, longest_before, ready_order
from rlplace.jit import Bools, Floats, Ints, Longs, kernel
from rlplace.measure import Problem
from rlplace.measure.simulate.compiled_problem import list_order, transfer_seconds
from rlplace.search.groupings import held_bytes, room_bytes
from rlplace.search.schedule.list_schedule import (
    HostResources,
    Memory,
    Schedule,
    Units,
    append,
    end_on,
    group_units,
    host_resources,
    new_gaps,
    new_memory,
    new_schedule,
    op_units,
    schedule_in_order,
)
from rlplace.search.task import Task


def eft(problem: Problem, priorities: NDArray[np.float64] | None = None) -> NDArray[np.int32]:
    """(N,) int32: ops in order of priority, each on the device where it would end first; memory does not count.

    A parameter or input goes where its first reader goes, and ops that live together follow the first of them; ops go
    only where they may. A copy takes its route's time; where it blocks the destination it takes the device's time too.

    Args:
        problem: gangs take part as devices that occupy their members.
        priorities: (N,) larger first, higher for an op than for its readers; the order of the problem by default.
    """
    order = list_order(problem)
    if priorities is not None:
        order = np.lexsort((np.arange(problem.graph.num_ops), -priorities)).astype(np.int64)
    units, resources = op_units(problem), host_resources(problem)
    schedule, memory = new_schedule(units), new_memory(units, resources, 0.0)
    memory.need_bytes[:] = 0.0
    room = resources.replace(room_bytes=np.full(len(resources.room_bytes), np.inf))
    schedule_in_order(units, room, schedule, memory, None, order, *_no_choice(units))
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
    table_s = optimistic_cost_s(units, resources)
    order = _ready_order(units, np.asarray(table_s.mean(axis=1)))
    return _inserted(units, resources, output_share, order, table_s, _no_choice(units)[1])


def optimistic_cost_s(units: Units, resources: HostResources) -> NDArray[np.float64]:
    """(U, D) float64: shortest way from the end of a unit on a device to the end, every reader on its best device.

    Equation 2 of the paper: the largest over readers j of the least over devices q of the cost of j on q, its time
    there, and the mean transfer unless q is the unit's device.
    """
    return _optimistic(units, mean_transfer_s(units, resources))


@kernel
def _optimistic(u: Units, transfer_s: Floats) -> Floats:
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
    unit = int(jobs[np.argmax((above_s + below_s)[jobs])])
    path = [unit]
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
    problem = task.problem
    resources = host_resources(problem)
    ops = op_units(problem)
    found = [place(ops, resources, share) for share in OUTPUT_SHARES]
    if problem.grouping.num_groups < problem.graph.num_ops:
        groups = group_units(problem)
        found += [problem.grouping.expand(place(groups, resources, share)) for share in OUTPUT_SHARES]
    task.score_distinct(np.stack(found).astype(np.int32))


def mean_transfer_s(units: Units, resources: HostResources) -> NDArray[np.float64]:
    """(T,) float64: transfer time of each tensor, the mean over ordered pairs of distinct devices."""
    num_devices = units.time_s.shape[1]
    pairs = max(num_devices * (num_devices - 1), 1)
    latency_s, s_per_byte = float(resources.latency_s.sum()) / pairs, float(resources.s_per_byte.sum()) / pairs
    return np.asarray(latency_s + units.tensor_bytes * s_per_byte)


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


ESTIMATES = ("finish", "load", "link", "cut", "copies", "memory")
"""Figures of a placement:

- `finish`: seconds until the last op of its list schedule ends: ops in the order of the problem, copies sent as soon as
  their tensors exist, links without queues, launches without cost (the model of `Greedy`);
- `load`: seconds that the busiest device computes;
- `link`: seconds that the busiest link sends;
- `cut`: seconds that all copies take;
- `copies`: how many there are;
- `memory`: bytes kept over room, on the fullest device.
"""


@dataclass(frozen=True, eq=False)
class Estimator:
    """A problem laid out for `of`."""

    units: Units
    resources: HostResources
    order: Longs
    links: Bools
    held: Floats
    room: Floats

    @classmethod
    def of_problem(cls, problem: Problem) -> Estimator:
        """The estimator of a problem: every op is a group of its own."""
        every = Grouping(np.arange(problem.graph.num_ops, dtype=np.int32))
        return cls(
            op_units(problem, every),
            host_resources(problem),
            list_order(problem),
            _links(problem),
            held_bytes(problem, every),
            room_bytes(problem),
        )

    def of(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B, 6) `ESTIMATES` of placements (B, N)."""
        found = np.zeros((len(placements), len(ESTIMATES)))
        for row, devices in enumerate(placements):
            schedule = new_schedule(self.units)._replace(home=np.array(devices, dtype=np.int32))
            _estimate(found[row], self.units, self.resources, schedule, self.order, self.links)
            found[row, 5] = (np.bincount(devices, weights=self.held, minlength=len(self.room)) / self.room).max()
        return found


def _links(problem: Problem) -> Bools:
    """(D, D, L) bool: the links that each route holds."""
    host = problem.host
    number = {link.name: place for place, link in enumerate(host.links)}
    table = np.zeros((host.num_devices, host.num_devices, max(len(number), 1)), dtype=np.bool_)
    for route in host.routes:
        for link in route.links:
            table[host.device_index[route.source], host.device_index[route.destination], number[link]] = True
    return table


@kernel
def _estimate(found: Floats, u: Units, h: HostResources, s: Schedule, order: Longs, links: Bools) -> None:
    load_s, link_s = np.zeros(len(h.occupies)), np.zeros(links.shape[2])
    cut_s, copies = 0.0, 0
    for unit in order:
        if u.is_source[unit]:
            continue
        device = int(np.int64(s.home[unit]))
        for edge in range(u.input_offsets[unit], u.input_offsets[unit + 1]):
            tensor = u.input_tensors[edge]
            home = s.home[u.tensor_unit[tensor]]
            if home != device and s.there_s[tensor, device] < 0.0:
                transfer_s = transfer_seconds(h.latency_s, h.s_per_byte, (home, device), u.tensor_bytes[tensor])
                cut_s += transfer_s
                copies += 1
                for link in range(len(link_s)):
                    if links[home, device, link]:
                        link_s[link] += transfer_s
        append(u, h, s, unit, device, end_on(u, h, s, None, unit, device, False))
        for other in range(len(load_s)):
            if h.occupies[device, other]:
                load_s[other] += u.time_s[unit, device]
    found[0], found[1], found[2] = s.end_s.max(), load_s.max(), link_s.max()
    found[3], found[4] = cut_s, copies
