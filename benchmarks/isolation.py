"""Step times in a worker process against those in the process that asks: python benchmarks/isolation.py.

Both run the same plans, round by round in one race: the worker times its own step, then has this process time one.
Writes `results/isolation.json`; the machine should be idle.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from record import RESULTS, argument, parse, record

from rlplace.files import write_json_atomic
from rlplace.measure import Host, HostRunner, Measurement, Problem, RaceProtocol, Simulator
from rlplace.measure.isolate.isolated_runner import IsolatedRunner
from rlplace.measure.timing.race import idle_share
from rlplace.measure.timing.threads import one_thread_here
from rlplace.search import eft
from rlplace.search.groupings import majority_devices
from rlplace.search.rules import baselines
from rlplace.session.prepare import capture_workload
from rlplace.workloads import build, parse_workload

WORKLOADS = ("nmt@small", "rnnlm@small", "bert@small")
ROUNDS = RaceProtocol(warmup=5, min_rounds=60, max_rounds=60, hopeless=float("inf"))


@one_thread_here()
def main() -> None:
    out = parse(
        __doc__,
        argument("out", nargs="?", type=Path, default=RESULTS / "isolation.json", help="the file to write"),
    ).out
    idle = idle_share()
    rows = [row for workload in WORKLOADS for row in compared(workload)]
    result = {
        "schema": 1,
        **record(),
        "idle_share": idle,
        "rounds": ROUNDS.max_rounds,
        "geometric_mean_ratio": geometric_mean(row["ratio"] for row in rows),
        "within_noise": sum(row["is_within_noise"] for row in rows),
        "rows": rows,
    }
    print({key: value for key, value in result.items() if key != "rows"})
    write_json_atomic(out, result)


def compared(workload: str) -> list[dict[str, Any]]:
    """A row for each of a few placements of a workload."""
    graph = capture_workload(build(parse_workload(workload)))
    problem = Problem.profile(graph, Host.detect("cores"), num_groups=64)
    simulator = Simulator(problem)
    blocks = np.minimum(np.arange(graph.num_ops) * problem.host.num_devices // graph.num_ops, problem.host.num_devices)
    placements = {
        "single": baselines.best_single(problem, simulator),
        "eft": eft(problem),
        "groups at random": problem.grouping.expand(problem.draw_groups(np.random.default_rng(0), 1))[0],
        "blocks": problem.grouping.expand(majority_devices(problem, blocks)),
    }
    rows = []
    with (
        closing(HostRunner(problem, simulator)) as here,
        closing(IsolatedRunner(problem, simulator)) as worker,
    ):
        for name, devices in placements.items():
            plan = simulator.plan(devices)
            step = here.load(plan)
            isolated, own = worker.measure_plans([plan], protocol=ROUNDS, others=[step.run])
            step.unload()
            rows.append(_row(workload, name, isolated, own))
            print(rows[-1])
    return rows


def _row(workload: str, name: str, isolated: Measurement, own: Measurement) -> dict[str, Any]:
    ratio = isolated.step_time_s / own.step_time_s
    error = float(np.hypot(isolated.relative_error, own.relative_error))
    return {
        "workload": workload,
        "placement": name,
        "isolated_s": isolated.step_time_s,
        "in_process_s": own.step_time_s,
        "isolated_spread_s": isolated.spread_s,
        "in_process_spread_s": own.spread_s,
        "ratio": ratio,
        "ratio_error": error,
        "is_within_noise": bool(abs(ratio - 1.0) <= max(2.0 * error, 0.02)),
    }


if __name__ == "__main__":
    main()
