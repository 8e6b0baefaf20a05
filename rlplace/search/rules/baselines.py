"""Placements without search: one device, contiguous blocks, round-robin, random.

`expert`: as people split a model by hand, by the names of its modules.

Three patterns, each over 2, 4, ... and all devices that are not gangs; the best one counts:

- `layers`: blocks (numbered layers, and the modules beside them: embeddings, heads) in order, in runs of equal cost;
- `numbered`: layer k of every stack on device k, embeddings with the first, heads with the last: how Mirhoseini et al.
  (2017) describe the expert's split of their recurrent models, one LSTM layer a device;
- `halves`: encoder and decoder, or else the two largest parts (towers), on half of the devices each, in runs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.measure import Problem
from rlplace.measure.measurement import StepTimer
from rlplace.search.groupings import group_time_s
from rlplace.search.schedule.list_schedule import next_allowed, op_units
from rlplace.search.task import Task


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
    return np.asarray(singles[int(np.argmin(timer.step_times(singles)))])


def blocks(problem: Problem) -> NDArray[np.int32]:
    """(N,) int32: groups in order of their first op, cut into one contiguous block a device, of equal cost."""
    devices = plain_devices(problem)
    cost_s = group_time_s(problem, problem.grouping)[:, devices].mean(axis=1)
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
    task.score(random(task.problem, task.generator, 64))
    while not task.is_spent:
        task.score(random(task.problem, task.generator, 64))


def nearest_allowed(problem: Problem, devices: NDArray[np.int32]) -> NDArray[np.int32]:
    """`devices` (..., N) with every group that may not be where it is on the next device that it may be on."""
    if problem.allowed is None:
        return devices
    first_op = np.unique(problem.grouping.op_group, return_index=True)[1]
    return problem.grouping.expand(problem.nearest_groups(devices[..., first_op]))


@dataclass(frozen=True, eq=False)
class Blocks:
    """The parts that people move, in order of their first op.

    Attributes:
        op_block: (N,) int64, block of each op.
        paths: module path of each block, `""` for ops that belong to none.
        cost_s: (B,) float64, mean seconds over devices of all its ops, forward, backward and update.
    """

    op_block: NDArray[np.int64]
    paths: tuple[str, ...]
    cost_s: NDArray[np.float64]


def solve_expert(task: Task) -> None:
    """Scores every pattern over every number of devices; equal placements count once."""
    problem = task.problem
    units, split = op_units(problem), find_blocks(problem)
    first_op = np.unique(units.label, return_index=True)[1]
    plain = plain_devices(problem)
    counts = sorted({min(2**k, len(plain)) for k in range(1, len(plain).bit_length() + 1)} - {1}) or [1]
    parts = [pattern(split, count) for count in counts for pattern in (layers, numbered, halves)]
    devices = np.array(plain, dtype=np.int32)
    wanted = [devices[part][split.op_block[first_op]] for part in parts]
    task.score_distinct(np.stack([next_allowed(units, row)[units.label] for row in wanted]))


def find_blocks(problem: Problem) -> Blocks:
    """The blocks of a problem.

    A module with a number in its path belongs to the block up to the first number (`encoder.layers.3`), any other to
    the shortest path that holds no numbered block (`encoder.embedding`, `bert.pooler`). Ops without a block follow
    the first op that they read of one, then the first that reads them.
    """
    graph = problem.graph
    parts = [tuple(path.split(".")) if path else () for path in graph.modules]
    stacks = {part[:k] for part in set(parts) for k in range(_number_at(part) + 1)}
    keys = {part: _block_path(part, stacks) for part in set(parts)}
    paths = [keys[part] for part in parts]
    producers = graph.tensor_op[graph.input_tensors]
    edges = list(zip(producers.tolist(), graph.edge_op.tolist(), strict=True))
    for producer, reader in edges:
        paths[reader] = paths[reader] or paths[producer]
    for producer, reader in reversed(edges):
        paths[producer] = paths[producer] or paths[reader]
    index: dict[str, int] = {}
    jobs = np.flatnonzero(~graph.is_source).tolist()
    for op in [*jobs, *range(graph.num_ops)]:
        index.setdefault(paths[op], len(index))
    op_block = np.array([index[path] for path in paths], dtype=np.int64)
    cost_s = np.bincount(op_block, weights=problem.costs.op_time_s.mean(axis=1), minlength=len(index))
    return Blocks(op_block, tuple(index), cost_s.astype(np.float64))


def layers(split: Blocks, count: int) -> NDArray[np.int64]:
    """(B,) int64, part of each block: runs in order, of equal cost."""
    return _runs(split.cost_s, count)


def numbered(split: Blocks, count: int) -> NDArray[np.int64]:
    """(B,) int64, part of each block: by the number of its layer; before the first layer 0, after a stack the last."""
    numbers = np.array([_number(path) for path in split.paths], dtype=np.int64)
    last = int(numbers.max(initial=-1))
    if last < 0:
        return _runs(split.cost_s, count)
    is_first = np.maximum.accumulate(numbers) < 0
    layer = np.where(numbers >= 0, numbers, np.where(is_first, 0, last))
    return np.asarray(layer if last < count else layer * count // (last + 1))


def halves(split: Blocks, count: int) -> NDArray[np.int64]:
    """(B,) int64, part of each block: encoder and decoder, or the two largest towers, on half of the parts each."""
    is_second = _second_half(split)
    first = max(count // 2, 1)
    parts = np.zeros(len(split.paths), dtype=np.int64)
    parts[~is_second] = _runs(split.cost_s[~is_second], first)
    parts[is_second] = min(first, count - 1) + _runs(split.cost_s[is_second], max(count - first, 1))
    return np.minimum(parts, count - 1)


def _second_half(split: Blocks) -> NDArray[np.bool_]:
    is_decoder = np.array(["decoder" in path for path in split.paths], dtype=np.bool_)
    is_encoder = np.array(["encoder" in path for path in split.paths], dtype=np.bool_)
    if is_decoder.any() and is_encoder.any():
        return is_decoder | (np.logical_or.accumulate(is_decoder) & ~is_encoder)
    roots = [path.split(".")[0] for path in split.paths]
    cost_s: dict[str, float] = defaultdict(float)
    for root, cost in zip(roots, split.cost_s.tolist(), strict=True):
        cost_s[root] += cost
    towers = sorted(cost_s, key=lambda root: -cost_s[root])[:2]
    if len(towers) < 2:
        return np.asarray(_runs(split.cost_s, 2) == 1)
    # a block of no tower stays with the tower before it
    nearest = np.maximum.accumulate(np.where(np.isin(roots, towers), np.arange(len(roots)), 0))
    return np.asarray(np.array(roots)[nearest] == towers[1])


def _runs(cost_s: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    middle = np.cumsum(cost_s) - cost_s / 2
    return np.minimum((middle / max(float(cost_s.sum()), 1e-30) * count).astype(np.int64), count - 1)


def _number_at(part: tuple[str, ...]) -> int:
    """Where the first number stands in a path; -1 if there is none."""
    return next((k for k, word in enumerate(part) if word.isdigit()), -1)


def _number(path: str) -> int:
    return next((int(word) for word in path.split(".") if word.isdigit()), -1)


def _block_path(part: tuple[str, ...], stacks: set[tuple[str, ...]]) -> str:
    at = _number_at(part)
    if at >= 0:
        return ".".join(part[: at + 1])
    shortest = next((k for k in range(1, len(part) + 1) if part[:k] not in stacks), 0)
    return ".".join(part[:shortest])
