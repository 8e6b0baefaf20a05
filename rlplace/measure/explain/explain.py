"""`explain`: the explanation of one placed step, from its plan and its timeline.

`advise_on`: one sentence on what to do with a placement that was explained, by the first rule that applies.

docs/explaining.md lists the rules; here they are in the order in which they are asked.

`disturbance_of`: whether what was measured of a step shows that something else ran on the machine meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from rlplace.measure.bounds import lower_bound_s
from rlplace.measure.explain.critical_path import (
    costliest_cuts,
    critical_items,
    device_shares,
    find_critical_path,
    is_copied,
    memory_curves,
    step_end_s,
)
from rlplace.measure.explain.explanation import SCHEMA, Advice, Alternative, Explanation
from rlplace.measure.plan import Plan, Timeline
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator


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
    """Where the time and memory of a step of `plan` go.

    Args:
        problem: what is placed.
        plan: what ran, or was simulated.
        timeline: of a step of it.
        method: what found it.
        step_time_s: its median step time; by default that of the timeline.
        spread_s: half the interquartile range of the steps that it is the median of; 0 where nobody knows.
        alternatives: what the step would cost otherwise.

    Raises:
        InvalidValue: a plan or a timeline that does not fit the problem.
    """
    peaks = np.array(Simulator(problem, threads=1).retime(plan).peak_bytes, dtype=np.int64)
    if timeline.source == "measured" and len(timeline.memory_bytes):
        peaks[:] = 0
        np.maximum.at(peaks, timeline.memory_device, timeline.memory_bytes)
    items = critical_items(problem, plan, timeline)
    copied = is_copied(problem, plan)
    explained_s = step_end_s(timeline)
    bound_s, bound = lower_bound_s(problem)
    explanation = Explanation(
        schema=SCHEMA,
        graph_fingerprint=problem.graph.fingerprint,
        host=problem.host.name,
        method=method,
        kind=timeline.source,
        step_time_s=explained_s if step_time_s is None else step_time_s,
        explained_s=explained_s,
        bound_s=bound_s,
        bound=bound,
        num_ops=int(np.count_nonzero(~problem.graph.is_source)),
        num_micro_batches=problem.graph.num_micro_batches,
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
    return dataclasses.replace(explanation, advice=advise_on(explanation), disturbed=disturbance_of(explanation))


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
"""Share of the critical path above which transfers, or waits, are what to change."""
MOSTLY = 0.7
"""Share of the critical path above which it is a chain of ops ..."""
IDLE = 0.4
"""... that devices wait for, if they are idle for this share of the step on average."""


def advise_on(explanation: Explanation) -> Advice:
    """What to do, in one sentence; the advice that `explanation` has already is not looked at."""
    if not explanation.explained_s or not explanation.step_time_s:
        return Advice("keep", "Keep this placement: the step takes no time.")
    for name, rule in RULES.items():
        sentence = rule(explanation)
        if sentence:
            return Advice(name, sentence)
    return Advice("keep", _keep(explanation))


def alternative(explanation: Explanation, name: str) -> Alternative | None:
    """The alternative called `name`, if it has a step time."""
    found = (other for other in explanation.alternatives if other.name == name and other.step_time_s is not None)
    return next(found, None)


def _use_eager(explanation: Explanation) -> str:
    eager_s = _step_s(explanation, EAGER)
    single_s = _step_s(explanation, ONE_DEVICE)
    if eager_s is None or eager_s > AS_GOOD * min(explanation.step_time_s, single_s or explanation.step_time_s):
        return ""
    if eager_s < explanation.step_time_s:
        return f"Use eager: it is faster ({_ms(eager_s)} a step, {_ms(explanation.step_time_s)} as placed)."
    return f"Use eager: it is as fast ({_ms(eager_s)} a step, {_ms(explanation.step_time_s)} as placed)."


def _one_device(explanation: Explanation) -> str:
    single_s = _step_s(explanation, ONE_DEVICE)
    if single_s is None or single_s > AS_GOOD * explanation.step_time_s:
        return ""
    return f"One device is as good ({_ms(single_s)} a step, {_ms(explanation.step_time_s)} as placed): export nothing."


def _memory(explanation: Explanation) -> str:
    fullest = max(explanation.devices, key=lambda device: device.peak_bytes / max(device.capacity_bytes, 1))
    share = fullest.peak_bytes / max(fullest.capacity_bytes, 1)
    if share <= NEARLY_FULL:
        return ""
    return (
        f"{fullest.name} is full to {_percent(share)}: leave room before you train for long, with a smaller batch or "
        f"{_more_micro_batches(explanation)}."
    )


def _near_bound(explanation: Explanation) -> str:
    if not 0 < explanation.step_time_s <= NEAR_BOUND * explanation.bound_s:
        return ""
    gap = max(explanation.step_time_s / explanation.bound_s - 1.0, 0.0)
    return f"Keep this placement: it is within {_percent(gap)} of the bound ({explanation.bound})."


def _data_parallel(explanation: Explanation) -> str:
    split_s, eager_s = _step_s(explanation, DATA_PARALLEL), _step_s(explanation, EAGER)
    now_s = explanation.step_time_s if eager_s is None else min(explanation.step_time_s, eager_s)
    if split_s is None or explanation.num_micro_batches > 1 or split_s > FASTER * now_s:
        return ""
    return (
        f"Cut the batch (`--micro-batches auto`): data parallelism is estimated at {_ms(split_s)} a step, this "
        f"placement takes {_ms(explanation.step_time_s)}."
    )


def _transfers(explanation: Explanation) -> str:
    path = explanation.path
    if not path.transfer_s or path.transfer_s < MUCH * explanation.explained_s:
        return ""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for route in path.routes:
        one, other = sorted((route.source, route.destination))
        seconds[one, other] += route.seconds
    (one, other), most_s = max(seconds.items(), key=lambda pair: pair[1])
    others = f", all copies {_percent(path.transfer_s / explanation.explained_s)}" if len(seconds) > 1 else ""
    return (
        f"Copies of {_what(explanation, {one, other})} between {one} and {other} take "
        f"{_percent(most_s / explanation.explained_s)} of the step{others}: a coarser grouping (fewer `--groups`) or "
        f"{_more_micro_batches(explanation)} may help."
    )


def _waits(explanation: Explanation) -> str:
    path = explanation.path
    if not path.wait_s or path.wait_s < MUCH * explanation.explained_s:
        return ""
    return (
        f"Launches and other waits of the host take {_percent(path.wait_s / explanation.explained_s)} of the step: its "
        f"ops are short, and a larger batch may help more than another placement."
    )


def _chain(explanation: Explanation) -> str:
    path, step_s = explanation.path, explanation.explained_s
    plain = [device for device in explanation.devices if not device.members]
    idle = sum(device.idle_s for device in plain) / len(plain)
    if not path.modules or path.op_s < MOSTLY * step_s or idle < IDLE * step_s:
        return ""
    longest = path.modules[0]
    return (
        f"One chain of ops is {_percent(path.op_s / step_s)} of the step, most of it in the {longest.phase} of "
        f"{longest.module or 'the model itself'} ({_percent(longest.seconds / step_s)}), and devices are idle for "
        f"{_percent(idle / step_s)} of it: {_more_micro_batches(explanation)} may give them work."
    )


def _keep(explanation: Explanation) -> str:
    single_s = _step_s(explanation, ONE_DEVICE)
    over_bound = (
        f"none can take less than {_percent(explanation.bound_s / explanation.step_time_s)} of its own step time"
    )
    if single_s is None:
        return f"Keep this placement: {over_bound}."
    share = _percent(explanation.step_time_s / single_s)
    return f"Keep this placement: it takes {share} of one device's step; {over_bound}."


RULES: dict[str, Callable[[Explanation], str]] = {
    "data-parallel": _data_parallel,
    "use-eager": _use_eager,
    "one-device": _one_device,
    "memory": _memory,
    "near-bound": _near_bound,
    "transfers": _transfers,
    "waits": _waits,
    "chain": _chain,
}
"""Rules by name, each a sentence or nothing, in the order in which they are asked; `keep` is what is left."""


def _step_s(explanation: Explanation, name: str) -> float | None:
    found = alternative(explanation, name)
    return None if found is None else found.step_time_s


def _what(explanation: Explanation, pair: set[str]) -> str:
    """What the copies between two devices on the critical path send for most of their time."""
    seconds: dict[str, float] = defaultdict(float)
    for part in explanation.path.parts:
        if part.kind == "transfer" and {part.source, part.device} == pair:
            seconds[part.what] += part.seconds
    return f"{max(seconds, key=lambda what: seconds[what])}s"


def _more_micro_batches(explanation: Explanation) -> str:
    if explanation.num_micro_batches > 1:
        return f"another number of micro-batches than {explanation.num_micro_batches}"
    return "micro-batches (`--micro-batches auto`)"


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
        explanation: of the step; what it says of disturbance already is not looked at.
    """
    step_s, spread_s = explanation.step_time_s, explanation.spread_s
    if explanation.kind != "measured" or not step_s:
        return ""
    signs = []
    if spread_s > SCATTER * step_s:
        signs.append(f"its steps scatter by ± {_percent(spread_s / step_s)} around their median")
        measured = [other for other in explanation.alternatives if other.kind == "measured"]
        near = [
            other.name
            for other in measured
            if other.step_time_s is not None and abs(other.step_time_s - step_s) <= spread_s
        ]
        if near:
            signs.append(f"the difference to {' and '.join(near)} is within that, and tells nothing")
    share = explanation.explained_s / step_s
    if not 1 / UNUSUAL <= share <= UNUSUAL:
        signs.append(f"the step that is explained took {_percent(share)} of the median")
    if not signs:
        return ""
    return f"Disturbed while it was measured: {'; '.join(signs)}. Run it again on a quiet machine before you act on it."
