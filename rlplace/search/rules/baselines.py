"""Placements without search: one device, contiguous blocks, round-robin, random.

`metis`: balanced parts with few bytes between them (Karypis and Kumar 1998), one a device.

`scotch`: SCOTCH's mapping of the graph onto devices (Pellegrini 1996), where its program is installed.

`expert`: as people split a model by hand, by the names of its modules.

Three patterns, each over 2, 4, ... and all devices that are not gangs; the best one counts:

- `layers`: blocks (numbered layers, and the modules beside them: embeddings, heads) in order, in runs of equal cost;
- `numbered`: layer k of every stack on device k, embeddings with the first, heads with the last: how Mirhoseini et al.
  (2017) describe the expert's split of their recurrent models, one LSTM layer a device;
- `halves`: encoder and decoder, or else the two largest parts (towers), on half of the devices each, in runs.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import MissingExtra, RunnerError
from rlplace.graphs.grouping.groups import check_installed, run_metis
from rlplace.measure import Problem, Simulator
from rlplace.measure.measurement import StepTimer
from rlplace.search.groupings import group_time_s, heaviest_first
from rlplace.search.schedule.list_schedule import Units, next_allowed, op_units, unit_levels
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
    return _best_of(problem, timer, plain_devices(problem))


def whole_single_s(problem: Problem) -> float:
    """Seconds of the step with its batch whole on the best single device, for a step in micro-batches: what it gains is
    against that. Infinite where it does not fit, and where costs are not estimated or the graph has no program."""
    from rlplace.graphs.capturing.capture import capture_step  # it brings torch

    program = problem.graph.program
    if program is None or program.origin.micro is None or problem.costs.source != "estimated":
        return np.inf
    whole = Problem.estimate(capture_step(replace(program.origin, micro=None), program.optimizer), problem.host)
    return float((simulator := Simulator(whole)).step_times(best_single(whole, simulator)[None])[0])


def best_gang(problem: Problem, timer: StepTimer) -> NDArray[np.int32] | None:
    """As `best_single`, on the gang with the shortest step; None without gangs."""
    gangs = [index for index, device in enumerate(problem.host.devices) if device.members]
    return _best_of(problem, timer, gangs) if gangs else None


def without_gangs(problem: Problem) -> Problem | None:
    """The problem with no op allowed on a gang; None without gangs, or where an op may only be on one."""
    is_plain = np.array([not device.members for device in problem.host.devices])
    if is_plain.all() or not problem.group_allowed[:, is_plain].any(axis=1).all():
        return None
    shape = problem.costs.op_time_s.shape
    return replace(problem, allowed=np.broadcast_to(is_plain, shape) & (problem.allowed is None or problem.allowed))


def _best_of(problem: Problem, timer: StepTimer, devices: list[int]) -> NDArray[np.int32]:
    singles = np.stack([single(problem, device) for device in devices])
    is_whole = problem.group_allowed[:, devices].all(axis=0)
    singles = singles[is_whole] if is_whole.any() else nearest_allowed(problem, singles)
    return np.asarray(singles[int(np.argmin(timer.step_times(singles)))])


def blocks(problem: Problem) -> NDArray[np.int32]:
    """(N,) int32: groups in order of their first op, cut into one contiguous block a device, of equal cost."""
    devices = plain_devices(problem)
    cost_s = group_time_s(problem, problem.grouping)[:, devices].mean(axis=1)
    return problem.grouping.expand(np.array(devices, dtype=np.int32)[_runs(cost_s, len(devices))])


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
    edges = list(zip(graph.tensor_op[graph.input_tensors].tolist(), graph.edge_op.tolist(), strict=True))
    for producer, reader in edges:
        paths[reader] = paths[reader] or paths[producer]
    for producer, reader in reversed(edges):
        paths[producer] = paths[producer] or paths[reader]
    ordered = dict.fromkeys(paths[op] for op in (*np.flatnonzero(~graph.is_source).tolist(), *range(graph.num_ops)))
    index = {path: number for number, path in enumerate(ordered)}
    op_block = np.array([index[path] for path in paths], dtype=np.int64)
    cost_s = np.bincount(op_block, weights=problem.costs.op_time_s.mean(axis=1), minlength=len(index))
    return Blocks(op_block, tuple(index), cost_s.astype(np.float64))


def layers(split: Blocks, count: int) -> NDArray[np.int64]:
    """(B,) int64, part of each block: runs in order, of equal cost."""
    return _runs(split.cost_s, count)


def numbered(split: Blocks, count: int) -> NDArray[np.int64]:
    """(B,) int64, part of each block: by the number of its layer; before the first layer 0, after a stack the last."""
    words = [path.split(".") for path in split.paths]
    numbers = np.array([int(path[at]) if (at := _number_at(path)) >= 0 else -1 for path in words], dtype=np.int64)
    last = int(numbers.max(initial=-1))
    if last < 0:
        return _runs(split.cost_s, count)
    layer = np.where(numbers >= 0, numbers, np.where(np.maximum.accumulate(numbers) < 0, 0, last))
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
    is_decoder, is_encoder = (
        np.array([word in path for path in split.paths], dtype=np.bool_) for word in ("decoder", "encoder")
    )
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
    """(B,) int64: the run of each item where items are cut, in order, into `count` runs of equal cost."""
    middle = np.cumsum(cost_s) - cost_s / 2
    return np.minimum((middle / max(float(cost_s.sum()), 1e-30) * count).astype(np.int64), count - 1)


def _number_at(part: Sequence[str]) -> int:
    """Where the first number stands in a path; -1 if there is none."""
    return next((k for k, word in enumerate(part) if word.isdigit()), -1)


def _block_path(part: tuple[str, ...], stacks: set[tuple[str, ...]]) -> str:
    at = _number_at(part)
    if at >= 0:
        return ".".join(part[: at + 1])
    shortest = next((k for k in range(1, len(part) + 1) if part[:k] not in stacks), 0)
    return ".".join(part[:shortest])


SHARES = 1 << 20
"""Weights become whole numbers: the heaviest edge, and all nodes together, are this much."""


@dataclass(frozen=True, eq=False)
class Undirected:
    """An undirected graph as CSR, with whole weights; the edges of a node are in order.

    Attributes:
        offsets: (V + 1,) int64.
        neighbours: (2 E,) int64, every edge from both ends.
        edge_weights: (2 E,) int64, >= 1.
        node_weights: (V,) int64, >= 0.
    """

    offsets: NDArray[np.int64]
    neighbours: NDArray[np.int64]
    edge_weights: NDArray[np.int64]
    node_weights: NDArray[np.int64]


Cut = Callable[[Undirected, NDArray[np.float64]], NDArray[np.int64]]
"""From a graph and the share of each part, (K,) summing to 1, to the part of each node, (V,)."""


def score_cuts(task: Task, cut: Cut) -> None:
    """Scores the parts of ops and of groups, balanced by time and by memory, one part a device that is no gang.

    Fast devices get a larger share of the time, large memories of the memory. Nodes go on to the next device that may
    hold them. A graph on which the partitioner fails is passed over.

    Raises:
        RunnerError: the partitioner failed on every graph.
    """
    problem = task.problem
    devices = plain_devices(problem)
    rows: list[NDArray[np.int32]] = []
    failure: RunnerError | None = None
    for units in unit_levels(problem):
        for weights, shares in balances(problem, units, devices):
            try:
                parts = (
                    cut(undirected(units, weights), shares) if len(devices) > 1 else np.zeros(len(weights), np.int64)
                )
            except RunnerError as error:
                failure = error
                continue
            placed = next_allowed(units, np.array(devices, dtype=np.int32)[parts])[units.label]
            rows.append(placed if len(placed) == problem.graph.num_ops else problem.grouping.expand(placed))
    if failure is not None and not rows:
        raise failure
    task.score_distinct(np.stack(rows))


def balances(
    problem: Problem, units: Units, devices: list[int]
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """The weights by which parts may be balanced: weights of labels (C,), and the share of each part (K,)."""
    time_s = np.bincount(units.label, weights=units.time_s[:, devices].mean(axis=1)).astype(np.float64)
    speed = 1.0 / np.maximum(units.time_s[:, devices].sum(axis=0), 1e-30)
    room = np.array([problem.host.devices[device].memory_bytes for device in devices], dtype=np.float64)
    return [(time_s, speed / speed.sum()), (units.label_resident_bytes + units.label_output_bytes, room / room.sum())]


def undirected(units: Units, node_weight: NDArray[np.float64]) -> Undirected:
    """The graph over labels; an edge weighs the bytes of the tensors that go along it, in either direction."""
    count = len(node_weight)
    a = units.label[units.tensor_unit[units.input_tensors]].astype(np.int64)
    b = units.label[np.repeat(np.arange(len(units.label)), np.diff(units.input_offsets))].astype(np.int64)
    num_bytes = units.tensor_bytes[units.input_tensors]
    apart = a != b
    keys = np.concatenate(((a * count + b)[apart], (b * count + a)[apart]))
    pairs, which = np.unique(keys, return_inverse=True)
    weight = np.bincount(which, weights=np.tile(num_bytes[apart], 2), minlength=len(pairs))
    edge_weights = np.ceil(weight / max(float(weight.max(initial=0.0)), 1e-300) * SHARES).astype(np.int64)
    node_weights = np.round(node_weight / max(float(node_weight.sum()), 1e-300) * SHARES).astype(np.int64)
    offsets = np.searchsorted(pairs // count, np.arange(count + 1)).astype(np.int64)
    return Undirected(offsets, pairs % count, np.maximum(edge_weights, 1), node_weights)


LEAST_NODES = 4
"""Nodes a part that METIS needs; fewer are dealt out."""
ROUNDS = 64
"""How often weights are evened out; each round halves the excess."""


def solve_metis(task: Task) -> None:
    """Scores METIS's parts of ops and of groups, balanced by time and by memory.

    Raises:
        MissingExtra: pymetis is not installed.
        RunnerError: METIS failed on every graph.
    """
    check_installed()
    score_cuts(task, metis_parts)


def metis_parts(graph: Undirected, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """(V,) int64: the part of each node.

    Args:
        graph: the graph to cut.
        shares: (K,) of the weight of all nodes that each part aims at, summing to 1.

    Raises:
        MissingExtra: pymetis is not installed, and there are nodes enough to need it.
        RunnerError: METIS crashed, or did not finish.
    """
    if len(graph.node_weights) < LEAST_NODES * len(shares):
        return heaviest_first(graph.node_weights.astype(np.float64), np.maximum(shares, 1e-12))
    weights = _even_weights(graph.node_weights, float(shares.min()))
    return run_metis(
        len(shares), graph.offsets, graph.neighbours, weights, graph.edge_weights.tolist(), shares / shares.sum()
    )


def _even_weights(node_weights: NDArray[np.int64], share: float) -> list[int]:
    """Weights that leave no part empty: none above half of the least part, none below a tenth of the mean.

    Where one node outweighs a part, METIS's bisections run out of nodes.
    """
    weights = node_weights.astype(np.float64)
    for _ in range(ROUNDS):
        weights = np.maximum(weights, 0.1 * weights.mean())
        weights = np.minimum(weights, 0.5 * share * weights.sum())
    return [max(int(weight), 1) for weight in (weights / max(float(weights.sum()), 1e-300) * SHARES).tolist()]


PROGRAMS = ("gmap", "scotch_gmap")
TIMEOUT_S = 300.0


def solve_scotch(task: Task) -> None:
    """Scores SCOTCH's parts of ops and of groups, balanced by time and by memory.

    Raises:
        MissingExtra: its program is not installed.
        RunnerError: the program failed.
    """
    find_program()
    score_cuts(task, scotch_parts)


def find_program() -> str:
    """Path of SCOTCH's `gmap`.

    Raises:
        MissingExtra: it is not installed.
    """
    if (path := next(filter(None, map(shutil.which, PROGRAMS)), None)) is None:
        raise MissingExtra("scotch (its program gmap)", how="install it with the system's packages: apt install scotch")
    return path


def scotch_parts(graph: Undirected, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """(V,) int64: the part of each node; the target is a complete graph of parts weighted by `shares`.

    Args:
        graph: the graph to cut.
        shares: (K,) of the weight of all nodes that each part aims at, summing to 1.

    Raises:
        MissingExtra: its program is not installed.
        RunnerError: the program failed, or answered nonsense.
    """
    program = find_program()
    with tempfile.TemporaryDirectory(prefix="rlplace-scotch-") as folder:
        source, target, mapping = (Path(folder) / name for name in ("graph.grf", "parts.tgt", "mapping.map"))
        source.write_text(graph_text(graph), encoding="ascii")
        weights = np.maximum(np.round(shares * SHARES / 64), 1).astype(np.int64)
        target.write_text(f"cmpltw {len(shares)} {' '.join(map(str, weights.tolist()))}\n", encoding="ascii")
        command = [program, str(source), str(target), str(mapping)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunnerError(f"scotch: {program} could not finish: {error}") from error
        if done.returncode != 0 or not mapping.exists():
            raise RunnerError(f"scotch: {program} exited with {done.returncode}: {done.stderr.strip()[:500]}")
        return _parts(mapping.read_text(encoding="ascii"), len(graph.node_weights), len(shares), program)


def graph_text(graph: Undirected) -> str:
    """A graph in SCOTCH's source format, version 0: weights of vertices and of edges, numbered from 0."""
    lines = ["0", f"{len(graph.node_weights)} {len(graph.neighbours)}", "0 011"]
    for node, weight in enumerate(graph.node_weights.tolist()):
        first, last = graph.offsets[node], graph.offsets[node + 1]
        edges = zip(graph.edge_weights[first:last].tolist(), graph.neighbours[first:last].tolist(), strict=True)
        lines.append(" ".join([str(weight), str(last - first), *(f"{load} {other}" for load, other in edges)]))
    return "\n".join(lines) + "\n"


def _parts(text: str, num_nodes: int, num_parts: int, program: str) -> NDArray[np.int64]:
    """The mapping that the program wrote: how many nodes, then a node and its part on every line."""
    parts = np.full(num_nodes, -1, dtype=np.int64)
    try:
        table = np.array([line.split() for line in text.splitlines()[1:] if line.strip()], dtype=np.int64)
        parts[table[:, 0]] = table[:, 1]
    except (ValueError, IndexError) as error:
        raise RunnerError(f"scotch: {program} wrote a mapping that cannot be read: {error}") from error
    if np.any(parts < 0) or np.any(parts >= num_parts):
        raise RunnerError(f"scotch: {program} left nodes without one of {num_parts} parts")
    return parts
