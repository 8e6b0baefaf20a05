"""`carried_placement`: a placement of one host as a placement of another, where a search may start."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.groupings import allowed_devices, atoms, majority_devices
from rlplace.search.schedule.list_schedulers import eft
from rlplace.training.elastic.devices import GONE, DeviceMatch


def carried_placement(
    problem: Problem, devices: NDArray[np.int32], match: DeviceMatch, simulator: Simulator
) -> NDArray[np.int32]:
    """(N,) int32: the best simulated placement that leaves ops on the devices that stand for theirs.

    Ops of devices that are gone are tried where they would end first, dealt out evenly, and device by device on each
    of those that are left; so are ops that the problem bars from where they would be. If none of these fits into
    memory, it is the first of them.

    Args:
        problem: on the new host.
        devices: (N,) on the old one.
        match: of the two.
        simulator: of the problem.
    """
    kept = np.array(match.to, dtype=np.int32)[devices]
    if (kept != GONE).all() and _may_be(problem, kept):
        return kept
    fine = atoms(problem)
    leaders = _leaders(problem, fine, kept)
    if (leaders != GONE).all():
        return fine.expand(leaders)
    pinned = _pinned(problem, fine, leaders)
    tried = [eft(pinned), _dealt(pinned, fine, leaders), *_moved(problem, fine, leaders, devices, match)]
    placements = np.stack([fine.expand(majority_devices(pinned, row, fine)) for row in tried])
    placements = placements[np.sort(np.unique(placements, axis=0, return_index=True)[1])]
    best: NDArray[np.int32] = placements[int(np.argmin(simulator.step_times(placements)))]
    return best


def _may_be(problem: Problem, devices: NDArray[np.int32]) -> bool:
    try:
        problem.check_placement(devices)
    except InvalidValue:
        return False
    return True


def _leaders(problem: Problem, fine: Grouping, kept: NDArray[np.int32]) -> NDArray[np.int32]:
    """(A,) int32: where each atom is, that most of its time is on; `GONE` where that is nowhere, or barred."""
    known = np.flatnonzero(kept != GONE)
    weight = np.zeros((fine.num_groups, problem.host.num_devices))
    mean_s = problem.costs.op_time_s.mean(axis=1) + 1e-12  # ops that take no time count by their number
    np.add.at(weight, (fine.op_group[known], kept[known]), mean_s[known])
    weight[~allowed_devices(problem, fine)] = 0.0
    return np.where(weight.max(axis=1) > 0.0, weight.argmax(axis=1), GONE).astype(np.int32)


def _pinned(problem: Problem, fine: Grouping, leaders: NDArray[np.int32]) -> Problem:
    """The problem over atoms, with those that are somewhere pinned there."""
    allowed = allowed_devices(problem, fine)
    placed = np.flatnonzero(leaders != GONE)
    allowed[placed] = False
    allowed[placed, leaders[placed]] = True
    return dataclasses.replace(problem, grouping=fine, allowed=allowed[fine.op_group])


def _dealt(pinned: Problem, fine: Grouping, leaders: NDArray[np.int32]) -> NDArray[np.int32]:
    """(N,) int32: atoms without a device, the longest first, each where the least time is so far."""
    seconds = np.zeros((fine.num_groups, pinned.host.num_devices))
    np.add.at(seconds, fine.op_group, pinned.costs.op_time_s)
    allowed, dealt = allowed_devices(pinned, fine), leaders.copy()
    busy_s = np.zeros(pinned.host.num_devices)
    placed = np.flatnonzero(leaders != GONE)
    np.add.at(busy_s, leaders[placed], seconds[placed, leaders[placed]])
    free = np.flatnonzero(leaders == GONE)
    for atom in free[np.argsort(-seconds[free].mean(axis=1), kind="stable")].tolist():
        dealt[atom] = int(np.argmin(np.where(allowed[atom], busy_s + seconds[atom], np.inf)))
        busy_s[dealt[atom]] += seconds[atom, dealt[atom]]
    return fine.expand(dealt)


def _moved(
    problem: Problem, fine: Grouping, leaders: NDArray[np.int32], devices: NDArray[np.int32], match: DeviceMatch
) -> list[NDArray[np.int32]]:
    """The atoms of each device that is gone on one that is left, for every way to rotate these; (N,) int32."""
    first_op = np.unique(fine.op_group, return_index=True)[1]
    before = devices[first_op]  # of atoms; one that came from several devices is nowhere for another reason
    is_free = leaders == GONE
    rank = np.cumsum(np.array(match.to) == GONE)
    found = []
    for turn in range(problem.host.num_devices):
        moved = np.where(is_free, (rank[before] + turn) % problem.host.num_devices, leaders)
        found.append(fine.expand(moved.astype(np.int32)))
    return found
