"""`explain`: the explanation of one placed step, simulated or measured, from its plan and its timeline.

It consists of the critical path, the costliest cut edges, the devices' shares and memory, and one sentence of advice.
docs/explaining.md lists the rules of `advise_on`; here they stand in the order in which they are tried.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import refuse_if
from rlplace.graphs import BACKWARD, PHASES, UPDATE, OpGraph
from rlplace.graphs.opgraph import RESIDENT_TARGETS
from rlplace.measure.bounds import lower_bound_s
from rlplace.measure.explain.explanation import (
    SCHEMA,
    Advice,
    Alternative,
    CriticalPath,
    CutEdge,
    DeviceShare,
    Explanation,
    MemoryCurve,
    ModuleShare,
    PathPart,
    RouteShare,
)
from rlplace.measure.placement import PlacedSplit
from rlplace.measure.problem import Plan, Problem, Timeline
from rlplace.measure.simulate.compiled_problem import compile_problem, new_scratch, stack_plans
from rlplace.measure.simulate.kernel_batch import critical_path, load_plan
from rlplace.measure.simulate.simulator import Simulator


def critical_items(problem: Problem, plan: Plan, timeline: Timeline) -> NDArray[np.int32]:
    """(P,) int32: the items of the critical path in order of time, op `i` as `i`, transfer `k` as `num_ops + k`.

    An item is bound by the one that ended last of all that it waits for by the rules of docs/step-time-model.md; in a
    measured step, of those that ended before the middle of the item.

    Args:
        problem: the problem to place.
        plan: with a sequence that can be followed.
        timeline: of a step of it.

    Raises:
        InvalidValue: a plan that does not fit the problem, or a timeline of another plan.
    """
    n, k = problem.graph.num_ops, plan.num_transfers
    refuse_if(
        len(timeline.op_start_s) != n or len(timeline.transfer_start_s) != k,
        "timeline",
        f"{len(timeline.op_start_s)} ops and {len(timeline.transfer_start_s)} transfers",
        f"the plan's {n} ops and {k} transfers",
        where="explain",
    )
    compiled = compile_problem(problem)
    batch, scratch = stack_plans(problem, compiled, [plan]), new_scratch(compiled)
    load_plan(scratch, batch, 0)
    scratch.start_s[: n + k] = np.concatenate((timeline.op_start_s, timeline.transfer_start_s))
    scratch.end_s[: n + k] = np.concatenate((timeline.op_end_s, timeline.transfer_end_s))
    return critical_path(compiled, scratch, batch.devices[0])[::-1].copy()


def find_critical_path(problem: Problem, plan: Plan, timeline: Timeline, items: NDArray[np.int32]) -> CriticalPath:
    """The critical path: its parts follow each other without gaps, so that their seconds add up to the step.

    Where two items of a measured path overlap, the later one counts.

    Args:
        problem: the problem to place.
        plan: of the step.
        timeline: of a step of it.
        items: `critical_items` of them.
    """
    start_s = np.concatenate((timeline.op_start_s, timeline.transfer_start_s))[items]
    end_s = np.concatenate((timeline.op_end_s, timeline.transfer_end_s))[items]
    parts: list[PathPart] = []
    next_s = float(end_s[-1]) if len(items) else 0.0
    for item, began_s, ended_s in reversed(list(zip(items.tolist(), start_s.tolist(), end_s.tolist(), strict=True))):
        described = _described(problem, plan, timeline, item)
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


def _described(problem: Problem, plan: Plan, timeline: Timeline, item: int) -> PathPart:
    """The part of an op or a transfer, its times left open."""
    graph, devices = problem.graph, problem.host.devices
    is_op = item < graph.num_ops
    transfer = item - graph.num_ops
    tensor = -1 if is_op else int(plan.transfer_tensor[transfer])
    op = item if is_op else int(graph.tensor_op[tensor])
    source = int(plan.devices[op] if is_op else timeline.transfer_source[transfer])
    return PathPart(
        kind="op" if is_op else "transfer",
        start_s=0.0,
        end_s=0.0,
        device=devices[source if is_op else int(plan.transfer_destination[transfer])].name,
        name=graph.names[op],
        module=graph.modules[op],
        phase=PHASES[int(graph.phases[op])],
        source="" if is_op else devices[source].name,
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
    ops = [part for part in parts if part.kind == "op"]
    seconds = _summed(((part.module, part.phase), part.seconds) for part in ops)
    num_ops = _summed(((part.module, part.phase), part.num_ops) for part in ops)
    shares = [
        ModuleShare(module, phase, taken_s, num_ops[module, phase]) for (module, phase), taken_s in seconds.items()
    ]
    return tuple(sorted(shares, key=lambda share: (-share.seconds, share.module, share.phase)))


def _summed(pairs: Iterable[tuple[Hashable, float]]) -> dict[Any, Any]:
    """The sum of the figures of each key."""
    totals: dict[Any, Any] = defaultdict(int)
    for key, figure in pairs:
        totals[key] += figure
    return totals


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
        problem: the problem to place.
        plan: of the step.
        timeline: of the step.
        items: of its critical path.
        count: how many at most.
    """
    graph, devices = problem.graph, problem.host.devices
    seconds = np.maximum(timeline.transfer_end_s - timeline.transfer_start_s, 0.0)
    ranked = np.argsort(-seconds, kind="stable")
    ranked = ranked[is_copied(problem, timeline)[ranked]][:count]
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
                source=devices[int(timeline.transfer_source[transfer])].name,
                destination=devices[destination].name,
                num_bytes=int(graph.tensor_bytes[tensor]),
                start_s=max(float(timeline.transfer_start_s[transfer]), 0.0),
                seconds=float(seconds[transfer]),
                is_critical=graph.num_ops + transfer in critical,
            )
        )
    return tuple(cuts)


def what_is_sent(graph: OpGraph, op: int) -> What:
    """The kind of an op's outputs."""
    if graph.targets[op] in RESIDENT_TARGETS or graph.phases[op] == UPDATE:
        return "parameter"
    if graph.is_source[op]:
        return "input"
    return "gradient" if graph.phases[op] == BACKWARD else "activation"


MOST_POINTS = 400
"""Of a memory curve that is kept."""


def is_copied(problem: Problem, timeline: Timeline) -> NDArray[np.bool_]:
    """(K,) bool: transfers that are copies; the others hand a tensor over, which takes nothing."""
    ends = timeline.transfer_source, timeline.transfer_destination
    return np.asarray(problem.transfer_s_per_byte[ends] > 0, dtype=np.bool_)


def device_shares(
    problem: Problem, plan: Plan, timeline: Timeline, peak_bytes: Sequence[int]
) -> tuple[DeviceShare, ...]:
    """The shares of every device during the step, in the host's order.

    Args:
        problem: the problem to place.
        plan: of the step.
        timeline: of the step.
        peak_bytes: (D,) most that each device holds.
    """
    graph, host, step_s = problem.graph, problem.host, timeline.step_s
    runs = ~graph.is_source
    copied = is_copied(problem, timeline)
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


def explain(
    problem: Problem,
    plan: Plan,
    timeline: Timeline,
    *,
    method: str = "",
    step_time_s: float | None = None,
    spread_s: float = 0.0,
    alternatives: Sequence[Alternative] = (),
) -> Explanation:
    """Explains the time and memory of a step of `plan`: ops, transfers and waits.

    Args:
        problem: the problem to place.
        plan: the plan that ran, or was simulated.
        timeline: of a step of it.
        method: the method that found it.
        step_time_s: its median step time; by default that of the timeline.
        spread_s: half the interquartile range of the measured steps; 0 if unknown.
        alternatives: step times of alternatives.

    Raises:
        InvalidValue: a plan or a timeline that does not fit the problem.
    """
    peaks = np.array(Simulator(problem, threads=1).retime(plan).peak_bytes, dtype=np.int64)
    if timeline.source == "measured" and len(timeline.memory_bytes):
        peaks[:] = 0
        np.maximum.at(peaks, timeline.memory_device, timeline.memory_bytes)
    items = critical_items(problem, plan, timeline)
    copied = is_copied(problem, timeline)
    bound_s, bound = lower_bound_s(problem)
    explanation = Explanation(
        schema=SCHEMA,
        graph_fingerprint=problem.graph.fingerprint,
        host=problem.host.name,
        method=method,
        kind=timeline.source,
        step_time_s=timeline.step_s if step_time_s is None else step_time_s,
        explained_s=timeline.step_s,
        bound_s=bound_s,
        bound=bound,
        num_ops=int(np.count_nonzero(~problem.graph.is_source)),
        num_micro_batches=problem.graph.num_micro_batches,
        split=str(PlacedSplit.of(problem.graph) or ""),
        num_transfers=int(copied.sum()),
        transfer_bytes=int(problem.graph.tensor_bytes[plan.transfer_tensor[copied]].sum()),
        devices=device_shares(problem, plan, timeline, peaks.tolist()),
        path=find_critical_path(problem, plan, timeline, items),
        cuts=costliest_cuts(problem, plan, timeline, items),
        memory=memory_curves(problem, timeline),
        alternatives=tuple(alternatives),
        advice=Advice("keep", ""),
        spread_s=spread_s,
    )
    return replace(explanation, advice=advise_on(explanation), disturbed=disturbance_of(explanation))


ONE_DEVICE, DATA_PARALLEL, EAGER = "one device", "data parallel", "eager"
"""Names of alternatives."""
AS_GOOD = 1.03
"""An alternative that takes at most this many times as long as the placement, and is simpler, is as good."""
FASTER = 0.9
"""An estimate must promise this share of the step time, or less, to be followed."""
NEAR_BOUND = 1.05
"""A step at most this many times the bound cannot be made much shorter."""
NEARLY_FULL = 0.95
"""Share of a device's memory above which it may not suffice for long."""
MUCH = 0.2
"""Share of the critical path above which transfers, or waits, are worth a change."""
MOSTLY = 0.7
"""Share of the critical path above which it is a chain of ops ..."""
IDLE = 0.4
"""... that devices wait for, if they are idle for this share of the step on average."""


RULES = ("data-parallel", "use-eager", "one-device", "memory", "near-bound", "transfers", "waits", "chain")
"""Names of the rules, in the order in which they are tried; `keep` is the rule for all other steps."""


def advise_on(explanation: Explanation) -> Advice:
    """The advice, in one sentence; the advice that `explanation` has already is not looked at."""
    if not explanation.explained_s or not explanation.step_time_s:
        return Advice("keep", "Keep this placement: the step takes no time.")
    return next(_advice(explanation))


def _advice(explanation: Explanation) -> Iterator[Advice]:
    """The advice of each rule that applies, in the order of `RULES`."""
    step_s, explained_s, path = explanation.step_time_s, explanation.explained_s, explanation.path
    known_s = {each.name: each.step_time_s for each in explanation.alternatives if each.step_time_s is not None}
    eager_s, single_s, split_s = (known_s.get(name, math.inf) for name in (EAGER, ONE_DEVICE, DATA_PARALLEL))
    micro_batches = "micro-batches (`--micro-batches auto`)"
    if explanation.num_micro_batches > 1:
        micro_batches = f"another number of micro-batches than {explanation.num_micro_batches}"
    elif split_s <= FASTER * min(step_s, eager_s):
        yield Advice(
            "data-parallel",
            f"Cut the batch (`--micro-batches auto`): data parallelism is estimated at {_ms(split_s)} a step, this "
            f"placement takes {_ms(step_s)}.",
        )
    as_placed = f"a step, {_ms(step_s)} as placed)"
    if eager_s <= AS_GOOD * min(step_s, single_s):
        how = "faster" if eager_s < step_s else "as fast"
        yield Advice("use-eager", f"Use eager: it is {how} ({_ms(eager_s)} {as_placed}.")
    if single_s <= AS_GOOD * step_s:
        yield Advice("one-device", f"One device is as good ({_ms(single_s)} {as_placed}: export nothing.")
    fullness = {device.name: device.peak_bytes / max(device.capacity_bytes, 1) for device in explanation.devices}
    fullest = max(fullness, key=fullness.__getitem__)
    if fullness[fullest] > NEARLY_FULL:
        yield Advice(
            "memory",
            f"{fullest} is full to {_percent(fullness[fullest])}: leave room before you train for long, with a "
            f"smaller batch or {micro_batches}.",
        )
    # a step far below the bound says that the bound's costs are wrong
    if explanation.bound_s / NEAR_BOUND <= step_s <= NEAR_BOUND * explanation.bound_s:
        gap = _percent(max(step_s / explanation.bound_s - 1.0, 0.0))
        yield Advice("near-bound", f"Keep this placement: it is within {gap} of the bound ({explanation.bound}).")
    if path.transfer_s and path.transfer_s >= MUCH * explained_s:
        sent_s = _summed((tuple(sorted((route.source, route.destination))), route.seconds) for route in path.routes)
        (one, other), most_s = max(sent_s.items(), key=lambda pair: pair[1])
        sent = [part for part in path.parts if part.kind == "transfer" and {part.source, part.device} == {one, other}]
        kinds_s = _summed((part.what, part.seconds) for part in sent)
        others = f", all copies {_percent(path.transfer_s / explained_s)}" if len(sent_s) > 1 else ""
        yield Advice(
            "transfers",
            f"Copies of {max(kinds_s, key=kinds_s.__getitem__)}s between {one} and {other} take "
            f"{_percent(most_s / explained_s)} of the step{others}: a coarser grouping (fewer `--groups`) or "
            f"{micro_batches} may help.",
        )
    if path.wait_s and path.wait_s >= MUCH * explained_s:
        yield Advice(
            "waits",
            f"Launches and other waits of the host take {_percent(path.wait_s / explained_s)} of the step: its "
            f"ops are short, and a larger batch may help more than another placement.",
        )
    idle_s = float(np.mean([device.idle_s for device in explanation.devices if not device.members]))
    if path.modules and path.op_s >= MOSTLY * explained_s and idle_s >= IDLE * explained_s:
        longest, split = path.modules[0], "" if explanation.split else ", or a split of its ops (`--split auto`),"
        yield Advice(
            "chain",
            f"One chain of ops is {_percent(path.op_s / explained_s)} of the step, most of it in the {longest.phase} "
            f"of {longest.module or 'the model itself'} ({_percent(longest.seconds / explained_s)}), and devices are "
            f"idle for {_percent(idle_s / explained_s)} of it: {micro_batches}{split} may give them work.",
        )
    takes = "" if math.isinf(single_s) else f"it takes {_percent(step_s / single_s)} of one device's step; "
    least = _percent(explanation.bound_s / step_s)
    yield Advice("keep", f"Keep this placement: {takes}none can take less than {least} of its own step time.")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


SCATTER = 0.1
"""Half the interquartile range of a quiet machine's steps is a smaller share of their median."""
UNUSUAL = 1.25
"""How many times the median, or its share, a typical step that was traced takes at most on a quiet machine."""


def disturbance_of(explanation: Explanation) -> str:
    """Why the figures of a measured step are to be doubted, in a sentence or two; empty where nothing shows.

    Args:
        explanation: of the step; disturbance that it already names is not looked at.
    """
    step_s, spread_s = explanation.step_time_s, explanation.spread_s
    if explanation.kind != "measured" or not step_s:
        return ""
    signs = []
    if spread_s > SCATTER * step_s:
        signs.append(f"its steps scatter by ± {_percent(spread_s / step_s)} around their median")
        near = [
            other.name
            for other in explanation.alternatives
            if other.kind == "measured" and other.step_time_s is not None
            if abs(other.step_time_s - step_s) <= spread_s
        ]
        if near:
            signs.append(f"the difference to {' and '.join(near)} is within that, and tells nothing")
    share = explanation.explained_s / step_s
    if not 1 / UNUSUAL <= share <= UNUSUAL:
        signs.append(f"the step that is explained took {_percent(share)} of the median")
    if not signs:
        return ""
    return f"Disturbed while it was measured: {'; '.join(signs)}. Run it again on a quiet machine before you act on it."
