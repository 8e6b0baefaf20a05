"""`explain`: the explanation of one placed step, from its plan and its timeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlplace.measure.bounds.bounds import lower_bound_s
from rlplace.measure.explain.advice import advise_on
from rlplace.measure.explain.critical_path import critical_items, find_critical_path
from rlplace.measure.explain.cuts import costliest_cuts
from rlplace.measure.explain.devices import device_shares, is_copied, memory_curves, step_end_s
from rlplace.measure.explain.disturbance import disturbance_of
from rlplace.measure.explain.explanation import SCHEMA, Advice, Alternative, Explanation
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timeline import Timeline


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
