"""`find_critical_path`: what ends a placed step, back from its last item, be it simulated or measured.

`costliest_cuts`: the tensors that take longest to send from one device to another.

`device_shares` and `memory_curves`: what each device does during a step, and what it holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs.opgraph import BACKWARD, PHASES, RESIDENT_TARGETS, UPDATE, OpGraph
from rlplace.measure.explain.explanation import (
    CriticalPath,
    CutEdge,
    DeviceShare,
    MemoryCurve,
    ModuleShare,
    PathPart,
    RouteShare,
)
from rlplace.measure.plan import Plan, Timeline
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.compiled import compile_problem
from rlplace.measure.simulate.kernel_batch import critical_path, load_plan
from rlplace.measure.simulate.scratch import new_scratch, stack_plans


def critical_items(problem: Problem, plan: Plan, timeline: Timeline) -> NDArray[np.int32]:
    """(P,) int32: the items of the critical path in order of time, op `i` as `i`, transfer `k` as `num_ops + k`.

    What binds an item is what ended last of all that the rules of docs/step-time-model.md have it wait for; in a
    measured step, of what ended before the middle of the item.

    Args:
        problem: what is placed.
        plan: with a sequence that can be followed.
        timeline: of a step of it.

    Raises:
        InvalidValue: a plan that does not fit the problem, or a timeline of another plan.
    """
    n, k = problem.graph.num_ops, plan.num_transfers
    if len(timeline.op_start_s) != n or len(timeline.transfer_start_s) != k:
        found = f"{len(timeline.op_start_s)} ops and {len(timeline.transfer_start_s)} transfers"
        raise InvalidValue("timeline", found, f"the plan's {n} ops and {k} transfers", where="explain")
    compiled = compile_problem(problem)
    batch, scratch = stack_plans(problem, compiled, [plan]), new_scratch(compiled)
    load_plan(scratch, batch, 0)
    scratch.start_s[: n + k] = np.concatenate((timeline.op_start_s, timeline.transfer_start_s))
    scratch.end_s[: n + k] = np.concatenate((timeline.op_end_s, timeline.transfer_end_s))
    binding = np.empty(n + compiled.max_transfers, dtype=np.int32)
    path = np.empty_like(binding)
    length = critical_path(compiled, scratch, batch.devices[0], binding, path)
    return path[:length][::-1].copy()


def find_critical_path(problem: Problem, plan: Plan, timeline: Timeline, items: NDArray[np.int32]) -> CriticalPath:
    """The critical path: its parts follow each other without gaps, so that their seconds add up to the step.

    Where two items of a measured path overlap, the later one counts.

    Args:
        problem: what is placed.
        plan: of the step.
        timeline: of a step of it.
        items: `critical_items` of them.
    """
    start_s = np.concatenate((timeline.op_start_s, timeline.transfer_start_s))[items]
    end_s = np.concatenate((timeline.op_end_s, timeline.transfer_end_s))[items]
    parts: list[PathPart] = []
    next_s = float(end_s[-1]) if len(items) else 0.0
    for item, began_s, ended_s in reversed(list(zip(items.tolist(), start_s.tolist(), end_s.tolist(), strict=True))):
        described = _described(problem, plan, item)
        ended_s = max(min(ended_s, next_s), 0.0)
        began_s = min(max(began_s, 0.0), ended_s)
        if ended_s < next_s:
            parts.append(_wait(parts[-1], ended_s, next_s))
        parts.append(replace(described, start_s=began_s, end_s=ended_s))
        next_s = began_s
    if next_s > 0:
        parts.append(_wait(parts[-1], 0.0, next_s))
    parts.reverse()
    totals = {kind: sum(part.seconds for part in parts if part.kind == kind) for kind in ("op", "transfer", "wait")}
    return CriticalPath(
        parts=tuple(_joined(parts)),
        op_s=totals["op"],
        transfer_s=totals["transfer"],
        wait_s=totals["wait"],
        modules=_modules(parts),
        routes=_routes(parts),
    )


def _described(problem: Problem, plan: Plan, item: int) -> PathPart:
    """The part of an op or a transfer, its times left open."""
    graph, devices = problem.graph, problem.host.devices
    is_op = item < graph.num_ops
    transfer = item - graph.num_ops
    tensor = -1 if is_op else int(plan.transfer_tensor[transfer])
    op = item if is_op else int(graph.tensor_op[tensor])
    home = devices[int(plan.devices[op])].name
    return PathPart(
        kind="op" if is_op else "transfer",
        start_s=0.0,
        end_s=0.0,
        device=home if is_op else devices[int(plan.transfer_destination[transfer])].name,
        name=graph.names[op],
        module=graph.modules[op],
        phase=PHASES[int(graph.phases[op])],
        source="" if is_op else home,
        num_ops=int(is_op),
        num_bytes=0 if is_op else int(graph.tensor_bytes[tensor]),
        what="" if is_op else what_is_sent(graph, op),
    )


def _wait(after: PathPart, start_s: float, end_s: float) -> PathPart:
    """The wait before a part."""
    return PathPart("wait", start_s, end_s, after.device, after.name, after.module, after.phase)


def _joined(parts: Sequence[PathPart]) -> list[PathPart]:
    """The parts, ops in a row of one module, phase and device as one; transfers that take no time are left out."""
    joined: list[PathPart] = []
    for part in parts:
        if part.kind == "transfer" and part.start_s == part.end_s:
            continue
        before = joined[-1] if joined else None
        if before is not None and part.kind == before.kind == "op" and _place(part) == _place(before):
            joined[-1] = replace(before, end_s=part.end_s, num_ops=before.num_ops + part.num_ops)
        else:
            joined.append(part)
    return joined


def _place(part: PathPart) -> tuple[str, str, str]:
    return part.device, part.module, part.phase


def _modules(parts: Sequence[PathPart]) -> tuple[ModuleShare, ...]:
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    num_ops: dict[tuple[str, str], int] = defaultdict(int)
    for part in parts:
        if part.kind == "op":
            seconds[part.module, part.phase] += part.seconds
            num_ops[part.module, part.phase] += part.num_ops
    shares = [ModuleShare(module, phase, seconds[module, phase], num_ops[module, phase]) for module, phase in seconds]
    return tuple(sorted(shares, key=lambda share: (-share.seconds, share.module, share.phase)))


def _routes(parts: Sequence[PathPart]) -> tuple[RouteShare, ...]:
    sent: dict[tuple[str, str], list[PathPart]] = defaultdict(list)
    for part in parts:
        if part.kind == "transfer" and part.seconds > 0:
            sent[part.source, part.device].append(part)
    shares = [
        RouteShare(source, device, sum(p.seconds for p in found), len(found), sum(p.num_bytes for p in found))
        for (source, device), found in sent.items()
    ]
    return tuple(sorted(shares, key=lambda share: (-share.seconds, share.source, share.destination)))


MOST = 10
"""Cut edges that an explanation names."""

What = Literal["parameter", "input", "activation", "gradient"]


def costliest_cuts(
    problem: Problem, plan: Plan, timeline: Timeline, items: NDArray[np.int32], count: int = MOST
) -> tuple[CutEdge, ...]:
    """The transfers that take longest, the longest first; of equals, the first of the plan.

    Args:
        problem: what is placed.
        plan: of the step.
        timeline: of the step.
        items: of its critical path.
        count: how many at most.
    """
    graph, devices = problem.graph, problem.host.devices
    seconds = np.maximum(timeline.transfer_end_s - timeline.transfer_start_s, 0.0)
    ranked = np.argsort(-seconds, kind="stable")
    ranked = ranked[is_copied(problem, plan)[ranked]][:count]
    critical = set(items.tolist())
    offsets, readers = graph.readers
    cuts = []
    for transfer in ranked.tolist():
        tensor, destination = int(plan.transfer_tensor[transfer]), int(plan.transfer_destination[transfer])
        op = int(graph.tensor_op[tensor])
        reading = readers[offsets[tensor] : offsets[tensor + 1]]
        reading = reading[plan.devices[reading] == destination]
        first = int(reading[0])
        cuts.append(
            CutEdge(
                op=graph.names[op],
                module=graph.modules[op],
                what=what_is_sent(graph, op),
                reader=graph.names[first],
                reader_module=graph.modules[first],
                num_readers=len(reading),
                source=devices[int(plan.devices[op])].name,
                destination=devices[destination].name,
                num_bytes=int(graph.tensor_bytes[tensor]),
                start_s=max(float(timeline.transfer_start_s[transfer]), 0.0),
                seconds=float(seconds[transfer]),
                is_critical=graph.num_ops + transfer in critical,
            )
        )
    return tuple(cuts)


def what_is_sent(graph: OpGraph, op: int) -> What:
    """What the outputs of an op are."""
    if graph.targets[op] in RESIDENT_TARGETS or graph.phases[op] == UPDATE:
        return "parameter"
    if graph.is_source[op]:
        return "input"
    return "gradient" if graph.phases[op] == BACKWARD else "activation"


MOST_POINTS = 400
"""Of a memory curve that is kept."""


def is_copied(problem: Problem, plan: Plan) -> NDArray[np.bool_]:
    """(K,) bool: transfers that are copies; the others hand a tensor over, which takes nothing."""
    host = problem.host
    table = np.zeros((host.num_devices, host.num_devices), dtype=np.bool_)
    for route in host.routes:
        table[host.device_index[route.source], host.device_index[route.destination]] = bool(route.links)
    source = plan.devices[problem.graph.tensor_op[plan.transfer_tensor]]
    return np.asarray(table[source, plan.transfer_destination], dtype=np.bool_)


def step_end_s(timeline: Timeline) -> float:
    """Seconds at which the last op or transfer of a step ends."""
    return float(max(timeline.op_end_s.max(initial=0.0), timeline.transfer_end_s.max(initial=0.0)))


def device_shares(
    problem: Problem, plan: Plan, timeline: Timeline, peak_bytes: Sequence[int]
) -> tuple[DeviceShare, ...]:
    """What every device does during the step, in the host's order.

    Args:
        problem: what is placed.
        plan: of the step.
        timeline: of the step.
        peak_bytes: (D,) most that each device holds.
    """
    graph, host, step_s = problem.graph, problem.host, step_end_s(timeline)
    runs = ~graph.is_source
    copied = is_copied(problem, plan)
    sizes = np.where(copied, graph.tensor_bytes[plan.transfer_tensor], 0)
    shares = []
    for index, device in enumerate(host.devices):
        keeps_busy = np.array([other is device or device.name in other.members for other in host.devices])
        ops = runs & keeps_busy[timeline.op_device]
        leaves = copied & keeps_busy[timeline.transfer_source]
        arrives = copied & keeps_busy[timeline.transfer_destination]
        moves = leaves | arrives
        busy = np.stack((timeline.op_start_s[ops], timeline.op_end_s[ops]), axis=1)
        moving = np.stack((timeline.transfer_start_s[moves], timeline.transfer_end_s[moves]), axis=1)
        busy_s = _covered_s(busy, step_s)
        taken_s = max(_covered_s(np.concatenate((busy, moving)), step_s), busy_s)
        shares.append(
            DeviceShare(
                name=device.name,
                kind=device.kind,
                num_ops=int(np.count_nonzero(runs & (plan.devices == index))),
                busy_s=busy_s,
                transfer_s=taken_s - busy_s,
                idle_s=max(step_s - taken_s, 0.0),
                sent_bytes=int(sizes[leaves].sum()),
                received_bytes=int(sizes[arrives].sum()),
                peak_bytes=int(peak_bytes[index]),
                capacity_bytes=device.memory_bytes,
                memory_pool=device.memory_pool,
                members=device.members,
            )
        )
    return tuple(shares)


def memory_curves(problem: Problem, timeline: Timeline) -> tuple[MemoryCurve, ...]:
    """Allocated bytes of every device over the step; nothing where memory was not followed.

    A curve of more than `MOST_POINTS` steps keeps the highest of every stretch of them.
    """
    if not len(timeline.memory_time_s):
        return ()
    curves = []
    for index, device in enumerate(problem.host.devices):
        here = timeline.memory_device == index
        time_s, held = timeline.memory_time_s[here], timeline.memory_bytes[here]
        kept = _highest(held)
        curves.append(MemoryCurve(device.name, tuple(time_s[kept].tolist()), tuple(held[kept].tolist())))
    return tuple(curves)


def _covered_s(spans: NDArray[np.float64], step_s: float) -> float:
    """Seconds that spans (S, 2) of start and end cover together, within the step."""
    spans = np.clip(spans, 0.0, step_s)
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    if not len(spans):
        return 0.0
    reached_s = np.maximum.accumulate(np.concatenate(([0.0], spans[:-1, 1])))
    return float(np.maximum(spans[:, 1] - np.maximum(spans[:, 0], reached_s), 0.0).sum())


def _highest(held: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of the first value, and of the highest one in each of at most `MOST_POINTS` stretches, ascending."""
    if len(held) <= MOST_POINTS:
        return np.arange(len(held))
    bounds = np.linspace(0, len(held), MOST_POINTS, dtype=np.int64)
    stretches = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    return np.unique([0, *(first + int(held[first:last].argmax()) for first, last in stretches)])
