"""Lower bounds on the step time of any placement, and the time of an even split of the batch (data parallelism).

Each bound holds for every placement, order and delay under the rules of docs/step-time-model.md: co-running,
contention, launches and waiting updates only make a step longer. The argument of each stands where it is computed.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.graphs.paths import longest_after, longest_before
from rlplace.jit import Floats, Ints, kernel
from rlplace.measure.host_model.scales import Prior, prior_of, slowdown_of
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Problem, capacity_bytes
from rlplace.measure.simulate.compiled_problem import compile_problem


def lower_bounds(problem: Problem, objective: Literal["latency", "throughput"] = "latency") -> dict[str, float]:
    """Seconds of every bound, by name; 0 where a bound says nothing.

    Args:
        problem: the problem to place.
        objective: `latency`, or `throughput`: seconds per step of a full pipeline, where only work counts, launches
            left out.

    Raises:
        InvalidValue: a host that cannot be simulated.
    """
    known = figures(problem)
    if objective == "throughput":
        time_s = np.where(known.is_job[:, None], problem.costs.op_time_s, 0.0)
        known = known._replace(work_s=np.where(np.isinf(known.work_s), np.inf, time_s))  # without launches
        nothing = np.zeros(problem.graph.num_ops)
        return {
            "total work": float(work_of_labels_s(known, even_weights(known)).sum()),
            "unequal devices": float(work_of_labels_s(known, best_weights(known)).sum()),
            "co-location class": class_s(known, nothing, nothing),
        }
    weights = best_weights(known)
    heads, tails = heads_and_tails(problem.graph, known, with_transfers=True)
    return {
        "critical path": _longest(known, *heads_and_tails(problem.graph, known, with_transfers=False)),
        "total work": float(work_of_labels_s(known, even_weights(known)).sum()),
        "unequal devices": float(work_of_labels_s(known, weights).sum()),
        "path with transfers": _longest(known, heads, tails),
        "heads and tails": max(head_tail_s(known, heads, tails, each) for each in (even_weights(known), weights)),
        "co-location class": class_s(known, heads, tails),
        "dispatcher": _dispatcher_s(problem, known, tails),
        "memory-forced transfer": _forced_transfer_s(problem, known, heads, tails),
    }


def lower_bound_s(problem: Problem, objective: Literal["latency", "throughput"] = "latency") -> tuple[float, str]:
    """The best of `lower_bounds`, and its name."""
    name, bound_s = max(lower_bounds(problem, objective).items(), key=lambda bound: bound[1])
    return bound_s, name


def critical_path_s(problem: Problem) -> float:
    """Seconds of the longest path, every op on its fastest device, every transfer free.

    Ops on a path run one after the other wherever they are, and none takes less than on its fastest device.
    """
    known = figures(problem)
    return _longest(known, *heads_and_tails(problem.graph, known, with_transfers=False))


def _longest(known: Figures, heads: NDArray[np.float64], tails: NDArray[np.float64]) -> float:
    return float((heads + known.path_s.min(axis=1) + tails).max(initial=0.0, where=known.is_job))


def _dispatcher_s(problem: Problem, known: Figures, tails: NDArray[np.float64]) -> float:
    """Seconds to launch everything.

    Each op that can only run on devices with a dispatcher is launched by one; of K dispatchers, one launches at least
    1/K of them, one after the other, and the op that it launches last then runs, and its successors.
    """
    compiled = compile_problem(problem)
    can_go = np.isfinite(known.work_s)
    launched = np.flatnonzero(known.is_job & ~(can_go & (compiled.dispatcher < 0)).any(axis=1))
    if not compiled.launches or not len(launched):
        return 0.0
    time_s = np.where(can_go[launched], problem.costs.op_time_s[launched], np.inf).min(axis=1)
    turns = -(-len(launched) // compiled.num_dispatchers)
    return float(turns * compiled.dispatch_s + (time_s + tails[launched]).min())


def _forced_transfer_s(
    problem: Problem, known: Figures, heads: NDArray[np.float64], tails: NDArray[np.float64]
) -> float:
    """Seconds of a path that must hold a transfer, where memory forces ops apart.

    Parameters, inputs and optimizer state of ops that hang together (by tensors or by co-location) stay all step long.
    Where no device has room for all of them, at least two devices share them, so some tensor goes from one device to
    another: its producer's head and time, its cheapest transfer, and the shortest of its readers' ways to the end.
    Every placement has such a tensor; the least over all of them is the bound.
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    graph, compiled = problem.graph, compile_problem(problem)
    num_labels = int(known.label.max(initial=-1)) + 1
    producers = known.label[graph.tensor_op[graph.input_tensors]]
    readers = known.label[graph.edge_op]
    count, part = connected_components(
        coo_matrix((np.ones(len(readers)), (producers, readers)), shape=(num_labels, num_labels)), directed=False
    )
    part = part[known.label]
    resident = np.where(graph.is_source, graph.output_bytes, 0) + graph.state_bytes
    resident_bytes = np.bincount(part, weights=resident, minlength=count)
    account = np.where(compiled.pool >= 0, compiled.pool, np.arange(compiled.num_devices))
    room_bytes = (compiled.capacity_bytes[account] - compiled.context_bytes).astype(np.float64)
    can_hold = np.ones((count, compiled.num_devices), dtype=np.bool_)
    np.logical_and.at(can_hold, part, np.isfinite(known.work_s))
    is_forced = ~(can_hold & (resident_bytes[:, None] <= room_bytes)).any(axis=1)
    apart = producers != readers
    tensor, reader = graph.input_tensors[apart], graph.edge_op[apart]
    producer = graph.tensor_op[tensor]
    least_s = known.path_s.min(axis=1)
    way_s = heads[producer] + least_s[producer] + known.tensor_s[tensor] + least_s[reader] + tails[reader]
    shortest_s = np.full(count, np.inf)
    np.minimum.at(shortest_s, part[reader], way_s)
    return float(shortest_s[is_forced & np.isfinite(shortest_s)].max(initial=0.0))


class Figures(NamedTuple):
    """A problem as lower bounds see it. Sources take no time; a device where an op may not run takes for ever.

    Attributes:
        path_s: (N, D) float64, from when an op's inputs are on the device to its end, at least.
        work_s: (N, D) float64, for how long an op keeps all that the device holds from other ops, at least.
        holds: (D, A) float64, 1 where a device holds a single device.
        is_job: (N,) bool, ops that are not sources.
        label: (N,) int32: ops of one label share a device; every op has one.
        tensor_s: (T,) float64, least time from one device to another; infinite where there is no other.
    """

    path_s: Floats
    work_s: Floats
    holds: Floats
    is_job: NDArray[np.bool_]
    label: Ints
    tensor_s: Floats


def figures(problem: Problem) -> Figures:
    """The figures of a problem.

    With `run_ahead=1` a device launches an op only when the one before it has ended, so that its launch is work of the
    device; where launches are served by request, its inputs must be there as well, so that it is on every path too.
    """
    graph, compiled = problem.graph, compile_problem(problem)
    num_ops, num_devices = graph.num_ops, compiled.num_devices
    classes = graph.colocation.astype(np.int64)
    key = np.where(classes >= 0, classes, classes.max(initial=-1) + 1 + np.arange(num_ops))
    label = np.unique(key, return_inverse=True)[1].astype(np.int32)
    allowed = np.ones((int(label.max(initial=-1)) + 1, num_devices), dtype=np.bool_)
    if problem.allowed is not None:
        np.logical_and.at(allowed, label, problem.allowed)
    allowed[~allowed.any(axis=1)] = True
    is_job = ~graph.is_source
    time_s = np.where(is_job[:, None], problem.costs.op_time_s, 0.0)
    time_s = np.where(allowed[label], time_s, np.inf)
    launch_s = np.where(compiled.dispatcher >= 0, compiled.dispatch_s, 0.0) * (compiled.run_ahead == 1)
    work_s = np.where(is_job[:, None], time_s + launch_s, time_s)
    holds = ((compiled.atoms[:, None] >> np.arange(num_devices)) & 1).astype(np.float64)
    return Figures(
        path_s=work_s if compiled.by_request else time_s,
        work_s=work_s,
        holds=holds[:, holds.any(axis=0)],
        is_job=is_job,
        label=label,
        tensor_s=_least_transfer_s(problem),
    )


def _least_transfer_s(problem: Problem) -> NDArray[np.float64]:
    num_devices, num_bytes = problem.host.num_devices, problem.graph.tensor_bytes.astype(np.float64)
    apart = ~np.eye(num_devices, dtype=np.bool_)
    routes = np.stack((problem.transfer_latency_s[apart], problem.transfer_s_per_byte[apart]), axis=1)
    each_s = (latency_s + num_bytes * s_per_byte for latency_s, s_per_byte in np.unique(routes, axis=0).tolist())
    return functools.reduce(np.minimum, each_s, np.full(len(num_bytes), np.inf))


MOST_ANCESTORS = 24
"""Nearest ancestors of an op that are looked at together."""


def heads_and_tails(
    graph: OpGraph, figures: Figures, *, with_transfers: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(N,) seconds before which no op can start, and (N,) seconds that are left, at least, when it ends.

    Without transfers: the longest path on fastest devices. Ops of a path run one after the other wherever they are.

    With transfers, for an op v and some of its ancestors: *either* all of them are on v's device, which runs them one
    after the other, each no earlier than its own head, on whichever device suits them best; *or* one of them, u, is
    elsewhere. Then on any path from u to v some tensor goes from one device to another, so that v starts no earlier
    than u's head, the ops of the path and the cheapest transfer along it. The lesser of the two is a bound, for any set
    of ancestors (here: those with the latest "or", one by one); after Papadimitriou and Yannakakis 1990, for unequal
    devices. Tails are the same with every edge turned round. Contention, co-running, launches and waiting updates only
    delay.
    """
    producers, readers = graph.tensor_op[graph.input_tensors], graph.edge_op
    is_edge = figures.is_job[producers]
    producers, readers = producers[is_edge], readers[is_edge]
    transfer_s = figures.tensor_s[graph.input_tensors[is_edge]]
    edges = _by_reader(graph.num_ops, readers, producers, transfer_s)
    if not with_transfers:
        least_s, free = figures.path_s.min(axis=1), (*edges[:2], np.zeros(len(producers)))
        return longest_before(least_s, *free), longest_after(least_s, *free)
    last = graph.num_ops - 1
    turned = _by_reader(graph.num_ops, last - producers, last - readers, transfer_s)
    return _earliest(figures.path_s, *edges), _earliest(np.ascontiguousarray(figures.path_s[::-1]), *turned)[::-1]


def _by_reader(
    num_ops: int, readers: Ints, producers: Ints, transfer_s: NDArray[np.float64]
) -> tuple[Ints, Ints, NDArray[np.float64]]:
    """CSR over ops: the producers that each reads, and the transfer if they are apart."""
    order = np.lexsort((producers, readers))
    offsets = np.concatenate(([0], np.cumsum(np.bincount(readers, minlength=num_ops)))).astype(np.int32)
    return offsets, producers[order].astype(np.int32), transfer_s[order]


@kernel
def _earliest(path_s: Floats, offsets: Ints, producers: Ints, transfer_s: Floats) -> Floats:
    num_ops, num_devices = path_s.shape
    least_s = np.zeros(num_ops)
    for op in range(num_ops):
        least_s[op] = path_s[op].min()
    heads = np.zeros(num_ops)
    seen = np.full(num_ops, -1, dtype=np.int64)
    ancestors = np.zeros(MOST_ANCESTORS, dtype=np.int64)
    between_s = np.zeros(MOST_ANCESTORS)  # ops of the path from an ancestor to the op at hand
    cheapest_s = np.zeros(MOST_ANCESTORS)  # least transfer on that path
    apart_s = np.zeros(MOST_ANCESTORS)
    for op in range(num_ops):
        for a in range(offsets[op], offsets[op + 1]):
            heads[op] = max(heads[op], heads[producers[a]] + least_s[producers[a]])
        count, at = 0, -1
        while at < count and count < MOST_ANCESTORS:  # breadth first; at = -1 is the op itself
            here = op if at < 0 else ancestors[at]
            for a in range(offsets[here], offsets[here + 1]):
                producer = producers[a]
                if count < MOST_ANCESTORS and seen[producer] != op:
                    seen[producer] = op
                    ancestors[count] = producer
                    between_s[count] = 0.0 if at < 0 else between_s[at] + least_s[here]
                    cheapest_s[count] = transfer_s[a] if at < 0 else min(cheapest_s[at], transfer_s[a])
                    apart_s[count] = heads[producer] + least_s[producer] + between_s[count] + cheapest_s[count]
                    count += 1
            at += 1
        latest_first = np.argsort(-apart_s[:count])
        by_head = np.argsort(heads[ancestors[:count]])
        place = np.zeros(count, dtype=np.int64)
        for k in range(count):
            place[latest_first[k]] = k
        for k in range(count):
            if apart_s[latest_first[k]] <= heads[op]:
                break
            together_s = np.inf
            for device in range(num_devices):
                if path_s[op, device] == np.inf:
                    continue
                end_s = 0.0
                for which in by_head:
                    if place[which] <= k:
                        end_s = max(end_s, heads[ancestors[which]]) + path_s[ancestors[which], device]
                together_s = min(together_s, end_s)
            heads[op] = max(heads[op], min(apart_s[latest_first[k]], together_s))
    return heads


MOST_THRESHOLDS = 128
"""Heads that are tried as the earliest of a set of ops; more ops than that are sampled."""
MOST_LP_ENTRIES = 20_000
"""Labels x devices up to which weights come from a linear program, else from subgradient steps."""
SUBGRADIENT_STEPS = 100


def even_weights(figures: Figures) -> NDArray[np.float64]:
    """(A,) float64: every single device counts the same."""
    return np.full(figures.holds.shape[1], 1.0 / figures.holds.shape[1])


def work_of_labels_s(figures: Figures, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """(C,) float64: least weighted work of the ops of each label, all on one device.

    Weights over single devices are >= 0 and sum to 1. An op on device d keeps busy all devices that d holds, so its
    weighted work is its time there times the weights of these; in a second, all devices together do at most 1 of it.
    Thus the sum over labels is a bound on the step, for any weights (the dual of spreading fractions of labels over
    devices).
    """
    return _least_load(_label_work_s(figures), figures.holds @ weights)


def best_weights(figures: Figures) -> NDArray[np.float64]:
    """(A,) weights of single devices for which the work is most: dear where devices are slow, or ops have no choice.

    They are the dual solution of spreading labels over devices in fractions (HiGHS); for large problems, the best of
    100 subgradient steps. Any weights give a valid bound, so precision does not matter.
    """
    even = even_weights(figures)
    work_s = _label_work_s(figures)
    work_s = work_s[np.where(np.isfinite(work_s), work_s, 0.0).any(axis=1)]
    is_alike = np.all(figures.holds.sum(axis=1) == 1) and np.all(work_s == work_s[:, :1])
    if len(work_s) == 0 or len(even) == 1 or is_alike:
        return even
    find = _dual_weights if work_s.size <= MOST_LP_ENTRIES else _ascent_weights
    return find(work_s, figures.holds, even)


def head_tail_s(
    figures: Figures, heads: NDArray[np.float64], tails: NDArray[np.float64], weights: NDArray[np.float64]
) -> float:
    """Seconds that sets of ops with late heads and long tails take.

    A set of ops runs no earlier than the least of its heads and ends at least the least of its tails before the step
    does; in between lies its weighted work (see `work_of_labels_s`), done at 1 a second. Sets: all ops with heads from
    h and tails from q on, for every q and up to 128 values of h. After Carlier 1982; one op alone is the longest path.
    """
    jobs = np.flatnonzero(figures.is_job)
    if not len(jobs):
        return 0.0
    work_s = _least_load(figures.work_s[jobs], figures.holds @ weights)
    by_tail = np.argsort(-tails[jobs], kind="stable")
    heads, tails, work_s = heads[jobs][by_tail], tails[jobs][by_tail], work_s[by_tail]
    thresholds = np.unique(heads)
    if len(thresholds) > MOST_THRESHOLDS:
        thresholds = thresholds[np.linspace(0, len(thresholds) - 1, MOST_THRESHOLDS).astype(np.int64)]
    sets = ((head, heads >= head) for head in thresholds.tolist())
    return max(float((head + np.cumsum(work_s[inside]) + tails[inside]).max()) for head, inside in sets)


def class_s(figures: Figures, heads: NDArray[np.float64], tails: NDArray[np.float64]) -> float:
    """Seconds that the worst co-location class takes, on the device that suits it best.

    All its ops run on one device, one after the other: no earlier than the least of their heads, and the least of
    their tails is left when they are done. The same holds for those of its ops with late heads and long tails.
    """
    order = np.argsort(figures.label, kind="stable").astype(np.int32)
    order = order[figures.is_job[order]]
    if not len(order):
        return 0.0
    offsets = np.concatenate(([0], np.flatnonzero(np.diff(figures.label[order])) + 1, [len(order)]))
    return float(_class_s(offsets.astype(np.int32), order, figures.work_s, heads, tails))


def _label_work_s(figures: Figures) -> NDArray[np.float64]:
    table = np.zeros((int(figures.label.max(initial=-1)) + 1, figures.work_s.shape[1]))
    np.add.at(table, figures.label, figures.work_s)
    return table


def _least_load(work_s: Floats, device_weights: Floats) -> NDArray[np.float64]:
    """(rows,) float64: least of work times weight over the devices that a row may use."""
    can_go = np.isfinite(work_s)
    load = np.where(can_go, work_s, 0.0) * device_weights
    return np.asarray(np.where(can_go, load, np.inf).min(axis=1, initial=np.inf))


def _dual_weights(work_s: Floats, holds: Floats, even: Floats) -> NDArray[np.float64]:
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    labels, devices = np.nonzero(np.isfinite(work_s))
    cells, singles = np.arange(len(labels)), holds.shape[1]
    loads = holds[devices] * (work_s[labels, devices] / work_s[np.isfinite(work_s)].max())[:, None]
    cell, single = np.nonzero(loads)
    rows = np.concatenate((single, np.arange(singles)))
    columns = np.concatenate((cell, np.full(singles, len(cells))))
    values = np.concatenate((loads[cell, single], np.full(singles, -1.0)))
    capacity = coo_matrix((values, (rows, columns)), shape=(singles, len(cells) + 1)).tocsr()
    whole = coo_matrix((np.ones(len(cells)), (labels, cells)), shape=(len(work_s), len(cells) + 1)).tocsr()
    solved = linprog(
        np.append(np.zeros(len(cells)), 1.0),
        A_ub=capacity,
        b_ub=np.zeros(singles),
        A_eq=whole,
        b_eq=np.ones(len(work_s)),
    )
    if solved.x is None:
        return even
    weights = np.maximum(-np.asarray(solved.ineqlin.marginals), 0.0)
    return np.asarray(weights / weights.sum()) if weights.sum() > 0 else even


def _ascent_weights(work_s: Floats, holds: Floats, even: Floats) -> NDArray[np.float64]:
    weights, best, best_s = even, even, -np.inf
    can_go = np.isfinite(work_s)
    for step in range(SUBGRADIENT_STEPS):
        load = np.where(can_go, work_s, 0.0) * (holds @ weights)
        chosen = np.where(can_go, load, np.inf).argmin(axis=1)
        picked = work_s[np.arange(len(work_s)), chosen]
        value_s = float((picked * (holds @ weights)[chosen]).sum())
        if value_s > best_s:
            best, best_s = weights, value_s
        slope = picked @ holds[chosen]
        weights = weights * np.exp(slope / max(float(slope.max()), 1e-300) / np.sqrt(step + 1.0))
        weights = weights / weights.sum()
    return best


@kernel
def _class_s(offsets: Ints, order: Ints, work_s: Floats, heads: Floats, tails: Floats) -> float:
    worst_s = 0.0
    for c in range(len(offsets) - 1):
        ops = order[offsets[c] : offsets[c + 1]]
        by_tail = ops[np.argsort(-tails[ops])]
        stride = max(1, len(ops) // 64)
        least_s = np.inf
        for device in range(work_s.shape[1]):
            device_s = 0.0
            for first in range(0, len(ops), stride):
                done_s = heads[ops[first]]
                for op in by_tail:
                    if heads[op] >= heads[ops[first]]:
                        done_s += work_s[op, device]
                        device_s = max(device_s, done_s + tails[op])
            least_s = min(least_s, device_s)
        worst_s = max(worst_s, least_s)
    return worst_s


def ring_all_reduce_s(host: Host, devices: Sequence[int], num_bytes: float) -> float:
    """Seconds of a ring all-reduce of `num_bytes` over `devices`, in their order.

    2 (k - 1) rounds, in each of which every device sends a k-th of the bytes to the next one, all at once (Patarasuk &
    Yuan 2009, J. Parallel Distrib. Comput. 69(2)); hops that share a link share its bandwidth.
    """
    count = len(devices)
    if count < 2:
        return 0.0
    links = {link.name: link for link in host.links}
    routes = {(route.source, route.destination): route for route in host.routes}
    names = [host.devices[device].name for device in devices]
    hops = Counter(link for pair in zip(names, [*names[1:], names[0]], strict=True) for link in routes[pair].links)
    latency_s = max((links[name].latency_s for name in hops), default=0.0)
    slowest = max((count_ / links[name].bandwidth_bytes_per_s for name, count_ in hops.items()), default=0.0)
    return 2 * (count - 1) * (latency_s + num_bytes / count * slowest)


def can_be_split(graph: OpGraph) -> bool:
    """Whether the batch may have several samples: an input's first dimension is 2 or more, or there is no input."""
    first, end = graph.output_offsets[:-1].tolist(), graph.output_offsets[1:].tolist()
    outputs = zip(graph.targets, first, end, strict=True)
    shapes = [graph.tensor_shapes[a] for target, a, b in outputs if target == "input" and a < b]
    return not shapes or any(shape[0] > 1 for shape in shapes if shape)


def even_split_s(problem: Problem) -> float:
    """Seconds of a step whose batch is split over devices by their speed, at best; infinite where it cannot be.

    Each of the devices, the fastest k of them for the best k of 2 or more, holds the model and runs its share of the
    forward and of the backward, ops shrinking with their batch; a ring sums the gradients behind the backward; every
    device updates all parameters, and launches every op. Devices slow each other down as the host says; on this
    machine, where it says nothing, as the host model expects of devices that share a memory. Smaller batches make ops
    less efficient, and activations on all devices are not counted: a real split takes longer.
    """
    graph, host = problem.graph, problem.host
    if not can_be_split(graph):
        return math.inf
    slowdown = slowdown_of(host, Prior(corun=0.0) if host.is_simulated else prior_of(problem))
    np.fill_diagonal(slowdown, 0.0)  # (D, D) by how much each busy device slows each other one
    time_s = np.where(graph.is_source[:, None], 0.0, problem.costs.op_time_s)
    forward_s, backward_s, update_s = (
        time_s[graph.phases == phase].sum(axis=0) for phase in (FORWARD, BACKWARD, UPDATE)
    )
    shared_s = np.maximum(forward_s + backward_s, 1e-30)
    held = int((graph.parameter_bytes + graph.gradient_bytes + graph.state_bytes).sum())
    fits = [
        index
        for index, device in enumerate(host.devices)
        if not device.members and device.context_bytes + held <= capacity_bytes(host, index)
    ]
    fits.sort(key=lambda index: (float(shared_s[index]), index))
    launched_s = host.dispatch_s * int(np.count_nonzero(~graph.is_source))
    best_s = math.inf
    for used in (sorted(fits[:count]) for count in range(2, len(fits) + 1)):
        factor = 1.0 + slowdown[np.ix_(used, used)].sum(axis=1)
        share_s = 1.0 / float((1.0 / (shared_s[used] * factor)).sum())
        backward_share_s = share_s * float((backward_s[used] / shared_s[used]).max())
        all_reduce_s = ring_all_reduce_s(host, used, float(graph.gradient_bytes.sum()))
        step_s = (
            share_s - backward_share_s + max(backward_share_s, all_reduce_s) + float((update_s[used] * factor).max())
        )
        best_s = min(best_s, max(step_s, launched_s))
    return best_s
