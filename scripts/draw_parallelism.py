"""Draws the pictures of docs/parallelism.md: python scripts/draw_parallelism.py [NAME ...]."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from rlplace.measure import Plan, Problem, Simulator, resolve_host
from rlplace.report import save_timeline_png
from rlplace.search import Budget, find
from rlplace.search.parallel.layouts import Layout, layouts, placement_of
from rlplace.session.prepare import build_for, capture_workload
from rlplace.workloads import parse_workload

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
HOST, HOSTS = "4xV100-pcie", {"experts": "4xA100-nvlink"}
DENSE, EXPERTS = "gpt2@paper", "mixtral@paper,layers=2,width=1024,mlp=3584,heads=16,batch=4,tokens=512"
MICRO_BATCHES, EVALUATIONS = 4, 4000
LAYOUTS: dict[str, Callable[[Layout], bool]] = {
    "hybrid": lambda layout: layout.devices.shape == (2, 2),
    "experts": lambda layout: "apart" in layout.name and layout.devices.size == 4,
}
"""Pictures of a layout: `hybrid` itself may find that another is better."""
PICTURES = dict.fromkeys(("data-parallel", "pipeline", "hybrid", "portfolio"), DENSE) | {"experts": EXPERTS}


def problem_of(name: str) -> Problem:
    """Cut into micro-batches, earlier ones first."""
    host = resolve_host(HOSTS.get(name, HOST))
    graph = capture_workload(build_for(parse_workload(PICTURES[name]), host, 0), MICRO_BATCHES)
    return dataclasses.replace(Problem.estimate(graph, host), op_order="tilt")


def plan_of(name: str, problem: Problem, simulator: Simulator) -> Plan:
    """What a method finds, or the best of the layouts that the picture is about."""
    if name not in LAYOUTS:
        found = find(problem, name, simulator, Budget(evaluations=EVALUATIONS))
        assert found.devices is not None
        return found.plan or simulator.plan(found.devices)
    placements = [placement_of(problem, layout) for layout in layouts(problem) if LAYOUTS[name](layout)]
    return simulator.plan(min(placements, key=lambda devices: float(simulator.step_times(devices[None])[0])))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        problem = problem_of(name)
        simulator = Simulator(problem)
        plan = plan_of(name, problem, simulator)
        title = f"{PICTURES[name].partition('@')[0]} on {problem.host.name}: {name}"
        save_timeline_png(FOLDER / f"{name}.png", simulator.timeline(plan), problem.graph, problem.host, title)
        print(f"{title}: {simulator.retime(plan).step_time_s * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
