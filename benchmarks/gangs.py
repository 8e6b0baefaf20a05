"""Annealing with gangs against plain PyTorch with all cores, in turn: python benchmarks/gangs.py WORKLOAD OUT.json."""

from __future__ import annotations

import platform
import sys

import torch

from rlplace.files import write_json_atomic
from rlplace.measure import Host, HostRunner, Problem, RaceProtocol, Simulator
from rlplace.measure.timing.eager_step import EagerStep
from rlplace.measure.timing.race import idle_share
from rlplace.measure.timing.threads import one_thread_here
from rlplace.search import Budget, anneal_from, eft
from rlplace.search.groupings import majority_devices
from rlplace.search.rules import baselines
from rlplace.session.calibrate import calibrated
from rlplace.session.prepare import capture_workload
from rlplace.workloads import build, parse_workload

SEARCH_S = 60.0
ROUNDS = RaceProtocol(warmup=3, min_rounds=25, max_rounds=25, hopeless=float("inf"))


@one_thread_here()
def main(workload: str, out: str) -> None:
    graph = capture_workload(build(parse_workload(workload)))
    profiled = Problem.profile(graph, Host.detect("cores", gangs=True), num_groups=256)
    problem, _ = calibrated(profiled, 24, seed=0, say=print)
    simulator = Simulator(problem)
    starts = [eft(problem), *(baselines.single(problem, device) for device in range(problem.host.num_devices))]
    grouped = [majority_devices(problem, devices) for devices in starts]
    start = min(grouped, key=lambda row: float(simulator.step_times(problem.grouping.expand(row)[None])[0]))
    groups, simulated_s = anneal_from(problem, simulator, start, Budget(evaluations=10**9, seconds=SEARCH_S))
    plan = simulator.plan(problem.grouping.expand(groups))
    runner = HostRunner(problem, simulator)
    idle = idle_share()
    eager = EagerStep(graph, problem.host, worker=runner.widest_worker())
    placed, plain = runner.measure_plans([plan], protocol=ROUNDS, others=[eager])
    cost_s = problem.costs.op_time_s
    on_gang = plan.devices == problem.host.num_devices - 1
    result = {
        "schema": 1,
        "workload": workload,
        "placed_s": placed.step_time_s,
        "placed_spread_s": placed.spread_s,
        "eager_s": plain.step_time_s,
        "eager_spread_s": plain.spread_s,
        "ratio": placed.step_time_s / plain.step_time_s,
        "simulated_s": simulated_s,
        "share_of_work_on_gang": float(cost_s[on_gang, 0].sum() / cost_s[:, 0].sum()),
        "idle_share": idle,
        "hardware": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "command": f"python benchmarks/gangs.py {workload} {out}",
    }
    print(result)
    write_json_atomic(out, result)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
