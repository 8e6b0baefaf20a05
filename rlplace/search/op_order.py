"""`shorten`: better priorities for the ops of a placement, for a shorter step.

`least_memory_order`: dynamic programming over schedules, with a beam where there are too many. After SERENITY (Ahn et
al., MLSys 2020): the memory allocated after a set of ops has run depends on the set alone, so of all orders of one set
only the one with the lowest peak is kept.

`placed_paths`: longest paths through the ops of a placement, every op and every transfer where it is.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import refuse_if
from rlplace.graphs.paths import longest_after, longest_before
from rlplace.measure import Problem, Simulator
from rlplace.measure.simulate.compiled_problem import HANDOVER, Compiled, compile_problem, default_priorities


class OpOrder(NamedTuple):
    """Priorities (N,) float64 for the simulator, higher runs first, and their rule."""

    priorities: NDArray[np.float64]
    rule: str


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
    refuse_if(evaluations < 1, "evaluations", evaluations, "at least 1", where="op order")
    simulator = Simulator(problem, threads=1)
    devices = problem.check_placement(devices)
    # what is not cut has one order, whatever the problem's is called
    is_default = problem.graph.num_micro_batches == 1 or problem.op_order == "rank"
    best = OpOrder(default_priorities(problem), "upward rank" if is_default else problem.op_order)
    best_s = simulator.plan_and_time(devices)[1].step_time_s
    spent = 1
    for order in itertools.islice(_by_rules(problem, devices), evaluations - spent):
        step_s = float(simulator.step_times(devices[None], order.priorities)[0])
        spent += 1
        if step_s < best_s:
            best, best_s = order, step_s
    keys, start_s = np.empty(len(devices)), best_s
    keys[np.argsort(-best.priorities, kind="stable")] = np.linspace(1.0, 0.0, len(devices))
    generator = np.random.default_rng(seed)
    jobs = np.flatnonzero(~problem.graph.is_source)
    for _ in range(evaluations - spent if len(jobs) > 1 else 0):
        count = int(min(len(jobs), 1 + generator.geometric(0.3)))
        moved = keys.copy()
        chosen = generator.choice(jobs, count, replace=False)
        moved[chosen] += generator.normal(0.0, 0.5 * generator.random() ** 2, count)
        step_s = float(simulator.step_times(devices[None], moved)[0])
        if step_s <= best_s:
            keys, best_s = moved, step_s
    return OpOrder(keys, f"random keys from {best.rule}") if best_s < start_s else best


def _by_rules(problem: Problem, devices: NDArray[np.int32]) -> Iterator[OpOrder]:
    op_s, before_s, after_s = placed_paths(problem, devices)
    yield OpOrder(op_s + after_s, "critical path")
    yield OpOrder(op_s + placed_paths(problem, devices, transfers=False)[2], "critical path without transfers")
    yield OpOrder(op_s + after_s + before_s, "longest path through")
    yield OpOrder(-np.arange(problem.graph.num_ops, dtype=np.float64), "given order")
    order, priorities = least_memory_order(problem, devices), np.zeros(problem.graph.num_ops)
    priorities[order] = np.arange(len(order), 0, -1)
    yield OpOrder(priorities, "least memory")


EXPANSIONS = 20_000
"""Where the number of states is left open: as many a level as make this many over all levels, at most 4,096."""


class _Job(NamedTuple):
    """An op as its memory sees it; bytes are (accounts,) int64, and accounts are devices and pools."""

    before: int
    """Bit mask of the ops that must have run."""
    after: list[int]
    """Ops that may become ready."""
    starts: NDArray[np.int64]
    """Outputs and workspace while it runs."""
    ends: NDArray[np.int64]
    """Outputs and copies when it has ended, before anything is freed."""
    stays: NDArray[np.int64]
    """The tensors of `ends` that have a reader, or are kept."""
    frees: list[tuple[int, NDArray[np.int64]]]
    """Its inputs: a mask of readers, and the bytes that are freed once all those have run."""


class _State(NamedTuple):
    """A set of ops that ran: its lowest peak, as a share of an account, the held bytes, and the ready ops."""

    peak: float
    held: NDArray[np.int64]
    ready: tuple[int, ...]


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
    jobs, held = _jobs(problem, compiled, devices, job_ops)
    if max_states is None:
        max_states = max(4, min(4096, EXPANSIONS // max(len(jobs), 1)))
    scale = 1.0 / np.maximum(compiled.capacity_bytes, 1)
    level = {0: _State(float((held * scale).max()), held, tuple(k for k, job in enumerate(jobs) if job.before == 0))}
    parents: list[dict[int, tuple[int, int]]] = []
    for _ in jobs:
        found: dict[int, _State] = {}
        parent: dict[int, tuple[int, int]] = {}
        for mask, state in level.items():
            for index, following in _following(jobs, scale, mask, state):
                then = mask | 1 << index
                if then not in found or following.peak < found[then].peak:
                    found[then], parent[then] = following, (mask, index)
        if len(found) > max_states:
            best = sorted(found, key=lambda then: (found[then].peak, (found[then].held * scale).max(), then))
            found = {then: found[then] for then in best[:max_states]}
        level = found
        parents.append(parent)
    mask, order = next(iter(level)), []
    for parent in reversed(parents):
        mask, index = parent[mask]
        order.append(job_ops[index])
    return np.array(order[::-1], dtype=np.int64)


def _following(jobs: list[_Job], scale: NDArray[np.float64], mask: int, state: _State) -> list[tuple[int, _State]]:
    """The ready ops of a state, and the states after them; only one where an op can run now at no cost.

    An op that does not raise the peak, and after which no more is allocated than before, may as well run first: any
    order that runs it later needs no less memory in between.
    """
    found = []
    for index in state.ready:
        job, then = jobs[index], mask | 1 << index
        peak = max(state.peak, *(float(((state.held + more) * scale).max()) for more in (job.starts, job.ends)))
        held = state.held + job.stays
        for readers, size in job.frees:
            if readers & then == readers:
                held = held - size
        new = [k for k in job.after if jobs[k].before & then == jobs[k].before]
        one = index, _State(peak, held, tuple(sorted({*state.ready, *new} - {index})))
        if peak <= state.peak and np.all(held <= state.held):
            return [one]
        found.append(one)
    return found


def _jobs(
    problem: Problem, compiled: Compiled, devices: NDArray[np.int32], job_ops: list[int]
) -> tuple[list[_Job], NDArray[np.int64]]:
    """Every job, and (accounts,) the bytes that each account holds before the first."""
    graph, where = problem.graph, devices.tolist()
    place = {op: k for k, op in enumerate(job_ops)}
    offsets, readers = graph.readers
    accounts = np.eye(compiled.num_devices, compiled.num_accounts, dtype=np.int64)  # that each device's bytes count on
    pooled = np.flatnonzero(compiled.pool >= 0)
    accounts[pooled, compiled.pool[pooled]] = 1

    def size(table: NDArray[np.int64], count: int, index: int, device: int) -> NDArray[np.int64]:
        """(accounts,) bytes of one of `count` tensors or ops, rounded as the device rounds."""
        return np.asarray(accounts[device] * table[int(compiled.size_class[device]) * count + index])

    def tensor_size(tensor: int, device: int) -> NDArray[np.int64]:
        return size(compiled.tensor_size, compiled.num_tensors, tensor, device)

    def holder(home: int, reader: int) -> int:
        """The device that holds the input of an op on `reader`: its own, or its home's where it is handed over."""
        return home if compiled.route_kind[home * compiled.num_devices + reader] == HANDOVER else reader

    homes = devices[graph.tensor_op].tolist()
    users: list[dict[int, int]] = []  # of every tensor, the devices that hold it for readers, and a mask of those
    for tensor, home in enumerate(homes):
        masks: dict[int, int] = defaultdict(int)
        for reader in readers[offsets[tensor] : offsets[tensor + 1]].tolist():
            masks[holder(home, where[reader])] |= 1 << place[reader]
        users.append(dict(masks))
    befores = _befores(problem, users, where, place)
    afters: list[list[int]] = [[] for _ in job_ops]
    for k, before in enumerate(befores):
        for other in sorted(before):
            afters[other].append(k)
    nothing = np.zeros(compiled.num_accounts, dtype=np.int64)
    held, jobs = compiled.context_bytes @ accounts, []
    for op, device in enumerate(where):
        held = held + size(compiled.state_size, compiled.num_ops, op, device)
        outputs = range(int(graph.output_offsets[op]), int(graph.output_offsets[op + 1]))
        made = sum((tensor_size(t, device) for t in outputs), nothing)
        sent = sum((tensor_size(t, other) for t in outputs for other in users[t] if other != device), nothing)
        if op not in place:
            held = held + made + sent
            continue
        kept = sum((tensor_size(t, device) for t in outputs if compiled.is_kept[t] or device in users[t]), nothing)
        frees = [
            (users[t][at], tensor_size(t, at))
            for t in graph.input_tensors[graph.input_offsets[op] : graph.input_offsets[op + 1]].tolist()
            if (at := holder(homes[t], device)) != homes[t] or not compiled.is_kept[t]
        ]
        starts = made + size(compiled.workspace_size, compiled.num_ops, op, device)
        needs = sum(1 << other for other in befores[place[op]])
        jobs.append(_Job(needs, afters[place[op]], starts, made + sent, kept + sent, frees))
    return jobs, held


def _befores(problem: Problem, users: list[dict[int, int]], where: list[int], place: dict[int, int]) -> list[set[int]]:
    """For every job the jobs that must run before: producers of its inputs, and the ops that an update waits for."""
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


def placed_paths(
    problem: Problem, devices: NDArray[np.int32], *, transfers: bool = True
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """(N,) float64 seconds: of each op where it is, 0 for sources; of the longest path to its start; and from its end.

    Args:
        problem: the ops.
        devices: (N,) where they are.
        transfers: whether an input from another device counts its transfer.
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
    return op_s, longest_before(op_s, *edges), longest_after(op_s, *edges)
