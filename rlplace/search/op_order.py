"""`shorten` and `lighten`: better priorities for the ops of a placement, for a shorter step or a lower peak.

The order of ops that needs least memory: dynamic programming over schedules, with a beam where there are too many.

After SERENITY (Ahn et al., MLSys 2020): what is allocated once a set of ops has run depends on the set alone, so of all
orders of one set only the one with the lowest peak is kept.

Longest paths through the ops of a placement, every op and every transfer where it is.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs.paths import longest_after, longest_before
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.compiled_problem import HANDOVER, Compiled, compile_problem, default_priorities
from rlplace.measure.simulate.simulator import Simulator


@dataclass(frozen=True, eq=False)
class OpOrder:
    """Priorities, and what they gain over the default ones.

    Attributes:
        priorities: (N,) float64 for the simulator, higher runs first.
        rule: what made them.
        step_before_s, step_after_s: step time; infinite where memory does not suffice.
        peak_before_bytes, peak_after_bytes: (D,) peak of each device.
    """

    priorities: NDArray[np.float64]
    rule: str
    step_before_s: float
    step_after_s: float
    peak_before_bytes: tuple[int, ...]
    peak_after_bytes: tuple[int, ...]


def shorten(problem: Problem, devices: NDArray[np.int32], *, evaluations: int = 300, seed: int = 0) -> OpOrder:
    """Priorities for the shortest step found; never worse than the default ones.

    Rules first: the longest path ahead with the actual times and transfers of this placement (Kahn's list scheduling by
    critical path), the same without transfers, the longest path through an op, the given order, the order that needs
    least memory. Then random keys (Bean 1994): the priorities of a few ops at a time are moved, and the move is kept if
    the step is no longer.

    Args:
        problem: the ops.
        devices: (N,) where they are.
        evaluations: plans that may be simulated.
        seed: of the random keys.

    Raises:
        InvalidValue: a placement that does not fit the problem, or no evaluations.
    """
    if evaluations < 1:
        raise InvalidValue("evaluations", evaluations, "at least 1", where="op order")
    simulator = Simulator(problem, threads=1)
    devices = problem.check_placement(devices)
    before = simulator.plan_and_time(devices)[1]
    best, rule, best_s, spent = default_priorities(problem), _default_rule(problem), before.step_time_s, 1
    for name, priorities in _rules(problem, devices):
        if spent >= evaluations:
            break
        step_s = float(simulator.step_times(devices[None], priorities)[0])
        spent += 1
        if step_s < best_s:
            best, rule, best_s = priorities, name, step_s
    keys, start_s = _keys(best), best_s
    generator = np.random.default_rng(seed)
    jobs = np.flatnonzero(~problem.graph.is_source)
    while spent < evaluations and len(jobs) > 1:
        count = int(min(len(jobs), 1 + generator.geometric(0.3)))
        moved = keys.copy()
        chosen = generator.choice(jobs, count, replace=False)
        moved[chosen] += generator.normal(0.0, 0.5 * generator.random() ** 2, count)
        step_s = float(simulator.step_times(devices[None], moved)[0])
        spent += 1
        if step_s <= best_s:
            keys, best_s = moved, step_s
    if best_s < start_s:
        best, rule = keys, f"random keys from {rule}"
    return _order(best, rule, before, simulator.plan_and_time(devices, best)[1])


def lighten(problem: Problem, devices: NDArray[np.int32], *, max_states: int | None = None) -> OpOrder:
    """Priorities for the lowest peak found, as a share of its device's memory; the default ones if they need no more.

    Args:
        problem: the ops.
        devices: (N,) where they are.
        max_states: as in `least_memory_order`.

    Raises:
        InvalidValue: a placement that does not fit the problem.
    """
    simulator = Simulator(problem, threads=1)
    devices = problem.check_placement(devices)
    before = simulator.plan_and_time(devices)[1]
    priorities = _as_priorities(problem, least_memory_order(problem, devices, max_states))
    after = simulator.plan_and_time(devices, priorities)[1]
    if _fullness(problem, after) >= _fullness(problem, before):
        return _order(default_priorities(problem), _default_rule(problem), before, before)
    return _order(priorities, "least memory", before, after)


def _default_rule(problem: Problem) -> str:
    """What makes the default priorities, in words; what is not cut has one order."""
    is_cut = problem.graph.num_micro_batches > 1
    return problem.op_order if is_cut and problem.op_order != "rank" else "upward rank"


def _rules(problem: Problem, devices: NDArray[np.int32]) -> list[tuple[str, NDArray[np.float64]]]:
    paths, without = placed_paths(problem, devices), placed_paths(problem, devices, transfers=False)
    ahead = paths.op_s + paths.after_s
    return [
        ("critical path", ahead),
        ("critical path without transfers", without.op_s + without.after_s),
        ("longest path through", ahead + paths.before_s),
        ("given order", -np.arange(problem.graph.num_ops, dtype=np.float64)),
        ("least memory", _as_priorities(problem, least_memory_order(problem, devices))),
    ]


def _as_priorities(problem: Problem, order: NDArray[np.int64]) -> NDArray[np.float64]:
    priorities = np.zeros(problem.graph.num_ops)
    priorities[order] = np.arange(len(order), 0, -1)
    return priorities


def _keys(priorities: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same order, as keys evenly spread over 0..1."""
    keys = np.empty(len(priorities))
    keys[np.argsort(-priorities, kind="stable")] = np.linspace(1.0, 0.0, len(priorities))
    return keys


def _fullness(problem: Problem, measured: Measurement) -> float:
    """Largest share of its memory that a device's peak takes."""
    capacity = [device.memory_bytes for device in problem.host.devices]
    return max(peak / size for peak, size in zip(measured.peak_bytes, capacity, strict=True))


def _order(priorities: NDArray[np.float64], rule: str, before: Measurement, after: Measurement) -> OpOrder:
    return OpOrder(priorities, rule, before.step_time_s, after.step_time_s, before.peak_bytes, after.peak_bytes)


EXPANSIONS = 20_000
"""Where the number of states is left open: as many a level as make this many over all levels, at most 4,096."""


@dataclass(frozen=True)
class _Job:
    """An op as its memory sees it; accounts are indices of devices and pools, and `scale` turns bytes into shares."""

    before: int
    """Bit mask of the ops that must have run."""
    after: list[int]
    """Ops that may become ready."""
    starts: tuple[tuple[int, int], ...]
    """(account, bytes) of outputs and workspace while it runs."""
    ends: tuple[tuple[int, int], ...]
    """(account, bytes) of outputs and copies when it has ended, before anything is freed."""
    stays: tuple[tuple[int, int], ...]
    """(account, bytes) of `ends` that have a reader, or are kept."""
    frees: tuple[tuple[int, int, int], ...]
    """(mask of readers, account, bytes) of what it reads: freed once all those have run."""


@dataclass
class _State:
    peak: float
    held: list[int]
    ready: tuple[int, ...]
    orders: list[int] = field(default_factory=list)


def least_memory_order(
    problem: Problem, devices: NDArray[np.int32], max_states: int | None = None
) -> NDArray[np.int64]:
    """(jobs,) int64: ops that are no sources, in an order with the lowest peak, as a share of its account's capacity.

    Ops are taken to run one at a time, over all devices, and transfers to take no time: exact for one device, a guide
    for several. The order is optimal if no level has more than `max_states` sets of ops.

    Args:
        problem: the ops.
        devices: (N,) where they are.
        max_states: sets of ops kept on each level, those with the lowest peak, then the least allocated; by default
            4,096 for small problems, fewer for large ones.
    """
    compiled = compile_problem(problem)
    job_ops = np.flatnonzero(~problem.graph.is_source).tolist()
    if not job_ops:
        return np.zeros(0, dtype=np.int64)
    jobs, held = _jobs(problem, compiled, devices, job_ops)
    if max_states is None:
        max_states = max(4, min(4096, EXPANSIONS // len(jobs)))
    scale = [1.0 / max(int(capacity), 1) for capacity in compiled.capacity_bytes.tolist()]
    peak = max(amount * factor for amount, factor in zip(held, scale, strict=True))
    first = _State(peak, held, tuple(k for k, job in enumerate(jobs) if job.before == 0))
    level: dict[int, _State] = {0: first}
    parents: list[dict[int, tuple[int, int]]] = []
    for _ in jobs:
        found: dict[int, _State] = {}
        parent: dict[int, tuple[int, int]] = {}
        for mask, state in level.items():
            _expand(jobs, scale, mask, state, found, parent)
        if len(found) > max_states:
            best = sorted(found, key=lambda mask: (found[mask].peak, _share(found[mask].held, scale), mask))
            found = {mask: found[mask] for mask in best[:max_states]}
        parents.append({mask: parent[mask] for mask in found})
        level = found
    mask, order = next(iter(level)), []
    for parent in reversed(parents):
        mask, job_index = parent[mask]
        order.append(job_ops[job_index])
    return np.array(order[::-1], dtype=np.int64)


def _expand(
    jobs: list[_Job],
    scale: list[float],
    mask: int,
    state: _State,
    found: dict[int, _State],
    parent: dict[int, tuple[int, int]],
) -> None:
    """The states that follow; only one where an op can run now at no cost.

    An op that does not raise the peak, and after which no more is allocated than before, may as well run first: any
    order that runs it later needs no less memory in between.
    """
    following: list[tuple[int, float, list[int]]] = []
    for index in state.ready:
        peak, held = _run(jobs[index], scale, mask | 1 << index, state)
        is_free = peak <= state.peak and all(now <= was for now, was in zip(held, state.held, strict=True))
        if is_free:
            following = [(index, peak, held)]
            break
        following.append((index, peak, held))
    for index, peak, held in following:
        then = mask | 1 << index
        known = found.get(then)
        if known is None or peak < known.peak:
            new = [k for k in jobs[index].after if jobs[k].before & then == jobs[k].before]
            ready = tuple(sorted({*state.ready, *new} - {index}))
            found[then] = _State(peak, held, ready)
            parent[then] = (mask, index)


def _run(job: _Job, scale: list[float], mask: int, state: _State) -> tuple[float, list[int]]:
    held, peak = state.held.copy(), state.peak
    for phase in (job.starts, job.ends):
        for account, size in phase:
            held[account] += size
        for account, _ in phase:
            peak = max(peak, held[account] * scale[account])
        for account, size in phase:
            held[account] -= size
    for account, size in job.stays:
        held[account] += size
    for readers, account, size in job.frees:
        if readers & mask == readers:
            held[account] -= size
    return peak, held


def _share(held: list[int], scale: list[float]) -> float:
    return max(amount * factor for amount, factor in zip(held, scale, strict=True))


def _jobs(
    problem: Problem, compiled: Compiled, devices: NDArray[np.int32], job_ops: list[int]
) -> tuple[list[_Job], list[int]]:
    """Every job, and what each account holds before the first."""
    graph, where = problem.graph, devices.tolist()
    place = {op: k for k, op in enumerate(job_ops)}
    users = _users(problem, compiled, where, place)
    befores = _befores(problem, users, where, place)
    afters: list[list[int]] = [[] for _ in job_ops]
    for k, before in enumerate(befores):
        for other in sorted(before):
            afters[other].append(k)
    sizes = _Sizes(compiled)
    fixed = [on for d in range(compiled.num_devices) for on in sizes.on_accounts(d, int(compiled.context_bytes[d]))]
    jobs = []
    for op, device in enumerate(where):
        fixed += sizes.of_op(compiled.state_size, op, device)
        outputs = range(int(graph.output_offsets[op]), int(graph.output_offsets[op + 1]))
        made = [on for t in outputs for on in sizes.of_tensor(t, device)]
        sent = [on for t in outputs for other in users[t] if other != device for on in sizes.of_tensor(t, other)]
        if op not in place:
            fixed += made + sent
            continue
        kept = [t for t in outputs if compiled.is_kept[t] or device in users[t]]
        stays = [on for t in kept for on in sizes.of_tensor(t, device)] + sent
        frees = []
        for t in graph.input_tensors[graph.input_offsets[op] : graph.input_offsets[op + 1]].tolist():
            home = where[int(graph.tensor_op[t])]
            holder = _holder(compiled, home, device)
            if holder != home or not compiled.is_kept[t]:
                frees += [(users[t][holder], account, size) for account, size in sizes.of_tensor(t, holder)]
        workspace = sizes.of_op(compiled.workspace_size, op, device)
        needs = sum(1 << other for other in befores[place[op]])
        starts, ends = _summed(made + workspace), _summed(made + sent)
        jobs.append(_Job(needs, afters[place[op]], starts, ends, _summed(stays), tuple(frees)))
    held = [0] * compiled.num_accounts
    for account, size in fixed:
        held[account] += size
    return jobs, held


@dataclass(frozen=True)
class _Sizes:
    """Bytes of tensors and ops, rounded as their device rounds, on all the accounts that they count on."""

    compiled: Compiled

    def on_accounts(self, device: int, size: int) -> list[tuple[int, int]]:
        pool = int(self.compiled.pool[device])
        return [(device, size), (pool, size)] if pool >= 0 else [(device, size)]

    def of_tensor(self, tensor: int, device: int) -> list[tuple[int, int]]:
        row = int(self.compiled.size_class[device]) * self.compiled.num_tensors
        return self.on_accounts(device, int(self.compiled.tensor_size[row + tensor]))

    def of_op(self, table: NDArray[np.int64], op: int, device: int) -> list[tuple[int, int]]:
        return self.on_accounts(device, int(table[int(self.compiled.size_class[device]) * self.compiled.num_ops + op]))


def _holder(compiled: Compiled, home: int, reader: int) -> int:
    """The device that holds what an op on `reader` reads: its own, or its home's where it is handed over."""
    return home if compiled.route_kind[home * compiled.num_devices + reader] == HANDOVER else reader


def _users(problem: Problem, compiled: Compiled, where: list[int], place: dict[int, int]) -> list[dict[int, int]]:
    """For every tensor, the devices that hold it for readers, and a bit mask of those."""
    graph = problem.graph
    offsets, readers = graph.readers
    users = []
    for tensor in range(graph.num_tensors):
        home = where[int(graph.tensor_op[tensor])]
        masks: dict[int, int] = defaultdict(int)
        for reader in readers[offsets[tensor] : offsets[tensor + 1]].tolist():
            masks[_holder(compiled, home, where[reader])] |= 1 << place[reader]
        users.append(dict(masks))
    return users


def _befores(problem: Problem, users: list[dict[int, int]], where: list[int], place: dict[int, int]) -> list[set[int]]:
    """For every job the jobs that must run before: producers of what it reads, and what an update waits for."""
    graph = problem.graph
    befores: list[set[int]] = [set() for _ in place]
    for tensor, reader in zip(graph.input_tensors.tolist(), graph.edge_op.tolist(), strict=True):
        if (producer := int(graph.tensor_op[tensor])) in place:
            befores[place[reader]].add(place[producer])
    updaters: dict[int, set[int]] = defaultdict(set)
    for op, tensor in zip(graph.mutation_op.tolist(), graph.mutation_tensor.tolist(), strict=True):
        updaters[tensor].add(place[op])
    for tensor, jobs in updaters.items():
        at_home = users[tensor].get(where[int(graph.tensor_op[tensor])], 0)
        readers = {k for k in range(at_home.bit_length()) if at_home >> k & 1} - jobs
        for job in jobs:
            befores[job] |= readers | {other for other in jobs if other < job}
    return befores


def _summed(amounts: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    sums: dict[int, int] = defaultdict(int)
    for account, size in amounts:
        sums[account] += size
    return tuple(sorted(sums.items()))


@dataclass(frozen=True, eq=False)
class PlacedPaths:
    """Of a placement's N ops, float64 seconds each.

    Attributes:
        op_s: (N,) each op where it is; 0 for sources.
        before_s: (N,) the longest path to its start.
        after_s: (N,) the longest path from its end.
    """

    op_s: NDArray[np.float64]
    before_s: NDArray[np.float64]
    after_s: NDArray[np.float64]


def placed_paths(problem: Problem, devices: NDArray[np.int32], *, transfers: bool = True) -> PlacedPaths:
    """The longest paths before and after each op.

    Args:
        problem: the ops.
        devices: (N,) where they are.
        transfers: whether what is read on another device counts its transfer.
    """
    graph = problem.graph
    op_s = np.where(graph.is_source, 0.0, problem.costs.op_time_s[np.arange(graph.num_ops), devices])
    producers = graph.tensor_op[graph.input_tensors]
    edge_s = np.zeros(len(producers))
    if transfers:
        pair = devices[producers], devices[graph.edge_op]
        bytes_s = graph.tensor_bytes[graph.input_tensors] * problem.transfer_s_per_byte[pair]
        edge_s = problem.transfer_latency_s[pair] + bytes_s
    edges = graph.input_offsets, producers, edge_s
    return PlacedPaths(op_s, longest_before(op_s, *edges), longest_after(op_s, *edges))
