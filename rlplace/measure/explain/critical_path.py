"""`find_critical_path`: what ends a placed step, back from its last item, be it simulated or measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs.opgraph import PHASES
from rlplace.measure.explain.cuts import what_is_sent
from rlplace.measure.explain.explanation import CriticalPath, ModuleShare, PathPart, RouteShare
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.compiled import compile_problem
from rlplace.measure.simulate.kernel_batch import load_plan
from rlplace.measure.simulate.kernel_critical import critical_path
from rlplace.measure.simulate.plan_batch import stack_plans
from rlplace.measure.simulate.scratch import new_scratch
from rlplace.measure.timeline import Timeline


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
