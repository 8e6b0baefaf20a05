"""Placements without search: one device, contiguous blocks, round-robin, random."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.measurement import StepTimer
from rlplace.measure.problem import Problem
from rlplace.search.task import Task


def group_cost_s(problem: Problem) -> NDArray[np.float64]:
    """(G, D) float64: seconds of each group's ops on each device."""
    grouping = problem.grouping
    table = np.zeros((grouping.num_groups, problem.host.num_devices))
    np.add.at(table, grouping.op_group, problem.costs.op_time_s)
    return table


def single(problem: Problem, device: int) -> NDArray[np.int32]:
    """(N,) int32: everything on `device`."""
    return np.full(problem.graph.num_ops, device, dtype=np.int32)


def plain_devices(problem: Problem) -> list[int]:
    """Indices of devices that are not gangs."""
    return [index for index, device in enumerate(problem.host.devices) if not device.members]


def best_single(problem: Problem, timer: StepTimer) -> NDArray[np.int32]:
    """(N,) int32: everything on the single device with the shortest step; gangs are no single device.

    Where ops may not be on it they are on the next device where they may be.
    """
    devices = plain_devices(problem)
    singles = np.stack([single(problem, device) for device in devices])
    is_whole = problem.group_allowed[:, devices].all(axis=0)
    singles = singles[is_whole] if is_whole.any() else nearest_allowed(problem, singles)
    best: NDArray[np.int32] = singles[int(np.argmin(timer.step_times(singles)))]
    return best


def blocks(problem: Problem) -> NDArray[np.int32]:
    """(N,) int32: groups in order of their first op, cut into one contiguous block a device, of equal cost."""
    devices = plain_devices(problem)
    cost_s = group_cost_s(problem)[:, devices].mean(axis=1)
    middle = np.cumsum(cost_s) - cost_s / 2
    block = np.minimum((middle / max(cost_s.sum(), 1e-30) * len(devices)).astype(np.int64), len(devices) - 1)
    return problem.grouping.expand(np.array(devices, dtype=np.int32)[block])


def round_robin(problem: Problem) -> NDArray[np.int32]:
    """(N,) int32: group g on device g modulo D, groups in order of their first op."""
    devices = np.array(plain_devices(problem), dtype=np.int32)
    return problem.grouping.expand(devices[np.arange(problem.grouping.num_groups) % len(devices)])


def random(problem: Problem, generator: np.random.Generator, count: int = 1) -> NDArray[np.int32]:
    """(count, N) int32: every group on one of its devices, drawn uniformly."""
    return problem.grouping.expand(problem.draw_groups(generator, count))


def solve_single(task: Task) -> None:
    """Scores every device by itself, where the problem allows it."""
    problem = task.problem
    devices = [device for device in range(problem.host.num_devices) if problem.group_allowed[:, device].all()]
    if devices:
        task.score(np.stack([single(problem, device) for device in devices]))


def solve_blocks(task: Task) -> None:
    """Scores `blocks`."""
    task.score(nearest_allowed(task.problem, blocks(task.problem)))


def solve_round_robin(task: Task) -> None:
    """Scores `round_robin`."""
    task.score(nearest_allowed(task.problem, round_robin(task.problem)))


def solve_random(task: Task) -> None:
    """Scores placements drawn uniformly until the budget ends, one batch at least however little time there is."""
    while True:
        task.score(random(task.problem, task.generator, 64))
        if task.is_spent:
            return


def nearest_allowed(problem: Problem, devices: NDArray[np.int32]) -> NDArray[np.int32]:
    """`devices` (..., N) with every group that may not be where it is on the next device that it may be on."""
    if problem.allowed is None:
        return devices
    first_op = np.unique(problem.grouping.op_group, return_index=True)[1]
    return problem.grouping.expand(problem.nearest_groups(devices[..., first_op]))
