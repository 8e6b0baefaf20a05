"""Attention as one op a direction beside its definition, on cores: python benchmarks/attention.py WORKLOAD ...

Captures each workload both ways, profiles both, searches placements of both with the same budget, and races all of them
and both on one device in one race. Writes `results/attention.md`.
"""

from __future__ import annotations

import sys
from functools import partial
from unittest.mock import patch

import numpy as np
from record import RESULTS, as_markdown, record
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlplace.files import write_text_atomic
from rlplace.graphs import OpGraph
from rlplace.graphs.capturing import portable
from rlplace.measure import Host, HostRunner, Plan, Problem, RaceProtocol, Simulator
from rlplace.measure.timing.race import idle_share
from rlplace.search import Budget, find
from rlplace.session.prepare import capture_workload
from rlplace.workloads import build, parse_workload

ROUNDS = RaceProtocol(warmup=3, min_rounds=30, max_rounds=30, hopeless=float("inf"))
SEEDS, EVALUATIONS = (0, 1, 2), 1500
HEADER = """| workload | placement | fused, ms | apart, ms | fused / apart | paired | peak, MB | apart, MB |
|---|---|---|---|---|---|---|---|
"""


def captured(workload: str, *, is_fused: bool) -> OpGraph:
    """The workload's step."""
    way = portable.fused_attention if is_fused else partial(sdpa_kernel, SDPBackend.MATH)  # its definition
    with patch.object(portable, "fused_attention", way):
        return capture_workload(build(parse_workload(workload), default_size="small"))


class Side:
    """One way to capture: a runner and its plans, everything on one device first."""

    def __init__(self, graph: OpGraph, host: Host) -> None:
        problem = Problem.profile(graph, host)
        self.simulator = Simulator(problem, threads=1)
        self.runner = HostRunner(problem, self.simulator)
        found = [find(problem, "single", self.simulator, Budget(evaluations=3))]
        found += [find(problem, "portfolio", self.simulator, Budget(evaluations=EVALUATIONS), seed=s) for s in SEEDS]
        self.plans = [self.simulator.plan(one.devices) for one in found if one.devices is not None]

    def peak_mb(self, plan: Plan) -> float:
        """Simulated, of all devices together."""
        return sum(self.simulator.retime(plan).peak_bytes) / 1e6


def rows(workload: str, host: Host) -> str:
    """On one device, and the best of the placements over several."""
    fused, other = (Side(captured(workload, is_fused=is_fused), host) for is_fused in (True, False))
    timers = [other.runner.timer(plan) for plan in other.plans]  # of another runner: no plans of this one
    outcomes = fused.runner.measure_plans(fused.plans, others=timers, protocol=ROUNDS)
    times_s = [np.array(outcome.samples_s) for outcome in outcomes]
    here, there = times_s[: len(fused.plans)], times_s[len(fused.plans) :]
    best = [1 + int(np.argmin([np.median(each) for each in side[1:]])) for side in (here, there)]
    text = ""
    for name, (mine, its) in {"one core": (0, 0), "best of three over both": (best[0], best[1])}.items():
        a, b = here[mine], there[its]
        cells = (
            *(f"{np.median(each) * 1e3:.1f}" for each in (a, b)),
            f"{np.median(a) / np.median(b):.3f}",
            f"{np.median(a / b):.3f}",
            f"{fused.peak_mb(fused.plans[mine]):.1f}",
            f"{other.peak_mb(other.plans[its]):.1f}",
        )
        text += f"| `{workload}` | {name} | {' | '.join(cells)} |\n"
    for side in (fused, other):
        side.runner.close()
    return text


def main() -> None:
    host, idle = Host.detect("cores"), idle_share(1.0)
    table = "".join(rows(workload, host) for workload in sys.argv[1:])
    text = (
        f"# Attention as one op a direction, beside its definition\n\n{as_markdown(record())}"
        f"\nHost `cores`, {idle:.0%} idle before. Each workload is one race of 30 rounds; medians, and the median of\n"
        f"the rounds' ratios. `portfolio` searched {EVALUATIONS:,} placements with each of three seeds on each\n"
        "graph's own profile. Peaks are simulated, of both cores together.\n\n"
    )
    write_text_atomic(RESULTS / "attention.md", text + HEADER + table)


if __name__ == "__main__":
    main()
