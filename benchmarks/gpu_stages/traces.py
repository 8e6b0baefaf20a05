"""What tracing a step costs: traced and untraced steps of the same plans, in turn."""

from __future__ import annotations

import numpy as np

from gpu_stages.subject import Subject, subject
from gpu_stages.verdict import Verdict
from rlplace.measure import Plan
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents
from rlplace.measure.execute.traced_ops import TracingCosts, tracing_costs

WORKLOAD = "nmt@layers=1,units=64,batch=16,steps=6,vocab=500"
NUM_PLANS, NUM_STEPS, WARMUP = 3, 15, 2
MOST_SHARE = 0.1
"""Of a step; twice of what is aimed at, as these are few steps."""


def run(host_word: str) -> Verdict:
    placed = subject(host_word, WORKLOAD)
    crew = Crew(placed.host.devices)
    generator = np.random.default_rng(0)
    try:
        costs = tracing_costs(placed.host, crew)
        rows = [
            _traced(placed, plan, crew, costs, generator) for plan in (placed.plan_on(0), *placed.draw_plans(NUM_PLANS))
        ]
    finally:
        crew.stop()
    per_op = ", ".join(
        f"{seconds * 1e6:.1f} us on {device.name}"
        for device, seconds in zip(placed.host.devices, costs.thread_s, strict=True)
    )
    share = float(np.median([row["share"] for row in rows]))
    kept = float(np.median([row["traced"] for row in rows]))
    line = f"an op takes {per_op}; with {kept:.0%} of the ops traced, a step takes {share:+.1%}"
    is_inside = all(row["inside"] for row in rows)
    return Verdict.of(is_inside and share <= MOST_SHARE, line, plans=rows, thread_s=costs.thread_s.tolist())


def _traced(
    placed: Subject, plan: Plan, crew: Crew, costs: TracingCosts, generator: np.random.Generator
) -> dict[str, float]:
    residents = Residents(placed.graph, placed.host)
    plain = PlacedStep(placed.graph, placed.host, plan, residents, crew)
    step_s = float(np.median([plain.run(k) for k in range(WARMUP + 3)][WARMUP:]))
    traced = costs.traced(placed.graph, plan, step_s, generator)
    step = PlacedStep(placed.graph, placed.host, plan, residents, crew, is_traced=True, traced=traced)
    pairs = np.array([(plain.run(k), step.run(k)) for k in range(WARMUP + NUM_STEPS)])[WARMUP:]
    timeline = step.timeline(has_memory=False)
    seen = np.isfinite(timeline.op_end_s) & ~placed.graph.is_source
    begin_s, end_s = timeline.op_start_s[seen], timeline.op_end_s[seen]
    inside = bool((end_s >= begin_s).all()) and float(end_s.max() - begin_s.min()) <= pairs[-1, 1] + 1e-3
    num_ops = int((~placed.graph.is_source).sum())
    return {
        "step_s": float(np.median(pairs[:, 0])),
        "share": float(np.median(pairs[:, 1] / pairs[:, 0]) - 1),
        "traced": 1.0 if traced is None else sum(item < placed.graph.num_ops for item in traced) / num_ops,
        "inside": float(inside),
    }
