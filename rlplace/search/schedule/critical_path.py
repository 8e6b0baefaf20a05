"""`critical-path`: the critical path on one device, everything else where it ends first (CPOP)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.search.schedule.host_resources import HostResources
from rlplace.search.schedule.list_schedule import new_schedule, schedule_in_order, unit_devices
from rlplace.search.schedule.ranks import downward, mean_transfer_s, ready_order, upward
from rlplace.search.schedule.scoring import score_both
from rlplace.search.schedule.units import Units
from rlplace.search.task import Task


def solve_critical_path(task: Task) -> None:
    """Scores `critical_path` of ops and of groups."""
    score_both(task, lambda units, resources, output_share: critical_path(units, resources, output_share)[0])


def critical_path(units: Units, resources: HostResources, output_share: float = 0.0) -> tuple[NDArray[np.int32], float]:
    """(U,) int32 devices, and the makespan of the schedule (CPOP: Topcuoglu, Hariri, Wu 2002, section 4.2).

    Units are given out as they become ready, the longest path through them first. Those on the critical path go to the
    device that runs all of it fastest among those where all of it may run, as far as they fit.

    Args:
        units: what is placed.
        resources: where.
        output_share: share of all outputs that counts as held at once.
    """
    above_s, below_s = downward(units, resources), upward(units, resources)
    path = longest_path(units, above_s, below_s, mean_transfer_s(units, resources))
    wanted = np.full(len(units.label), -1, dtype=np.int32)
    may_run = units.label_allowed[units.label[path]].all(axis=0)
    if len(path) and may_run.any():
        wanted[path] = int(np.argmin(np.where(may_run, units.time_s[path].sum(axis=0), np.inf)))
    schedule = new_schedule(units, resources, output_share)
    order = ready_order(units, above_s + below_s)
    schedule_in_order(units, resources, schedule, order, np.zeros_like(units.time_s), wanted)
    return unit_devices(units, resources, schedule), float(schedule.end_s.max(initial=0.0))


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
