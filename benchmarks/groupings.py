"""Annealing over each grouping: python benchmarks/groupings.py [WORKLOAD] [HOST] [OUT] [RULE/COUNT ...]."""

from __future__ import annotations

import datetime
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numba
import numpy as np

from rlplace.cli.words import finite
from rlplace.files import write_json_atomic, write_text_atomic
from rlplace.measure.estimate import estimate_costs
from rlplace.measure.hosts import resolve_host
from rlplace.measure.problem import Problem
from rlplace.measure.simulator import Simulator
from rlplace.search.registry import find
from rlplace.search.task import Budget
from rlplace.training.session import build_for, capture_workload, versions
from rlplace.workloads import parse_workload

NMT = "nmt@layers=4,units=1024,batch=64,steps=20,vocab=32000"
CELLS = "encoder.layers.*,decoder.layers.*,decoder.attention,projection"
RULES = (
    "heavy-edge/256", "heavy-edge/24", "heavy-edge/16", "colocation/256", f"colocation:{CELLS}/256", "module/256",
    "module:2/256", "module:3:apart/256", "metis/256", "metis/64", "none/256",
)  # fmt: skip
EVALUATIONS = 10_000
SEEDS = (0, 1, 2)


def main(workload: str = NMT, host_word: str = "4xV100-pcie", out: str = "groupings", *rules: str) -> None:
    host = resolve_host(host_word)
    graph = capture_workload(build_for(parse_workload(workload), host, 0))
    costs = estimate_costs(graph, host)
    rows: list[dict[str, Any]] = []
    single_s = float("nan")
    Problem.grouped(graph, host, costs)  # compiles the kernels
    for word in rules or RULES:
        rule, _, count = word.rpartition("/")
        begin = time.perf_counter()
        problem = Problem.grouped(graph, host, costs, int(count), rule)
        grouping_s = time.perf_counter() - begin
        simulator = Simulator(problem)
        single_s = find(problem, "single", simulator, Budget(evaluations=100)).step_time_s
        found = [find(problem, "anneal", simulator, Budget(evaluations=EVALUATIONS), seed=seed) for seed in SEEDS]
        step_time_s = [result.step_time_s for result in found]
        rows.append(
            {
                "rule": rule,
                "num_groups_asked": int(count),
                "num_groups": problem.grouping.num_groups,
                "grouping_s": grouping_s,
                "step_time_s": step_time_s,
                "over_single": float(np.median(step_time_s)) / single_s,
                "search_s": float(np.median([result.plan_s for result in found])),
            }
        )
        print(rows[-1], flush=True)
    none_s = next((float(np.median(row["step_time_s"])) for row in rows if row["rule"] == "none"), float("nan"))
    for row in rows:
        row["over_none"] = float(np.median(row["step_time_s"])) / none_s
    result = {
        "schema": 1,
        "date": datetime.date.today().isoformat(),
        "workload": workload,
        "host": host_word,
        "num_ops": graph.num_ops,
        "num_edges": graph.num_edges,
        "single_s": single_s,
        "evaluations": EVALUATIONS,
        "seeds": list(SEEDS),
        "rows": rows,
        "hardware": f"{os.cpu_count()} cores, {_cpu()}",
        "versions": {**versions(), "numpy": np.__version__, "numba": numba.__version__},
        "command": " ".join(["python benchmarks/groupings.py", *map(repr, sys.argv[1:])]),
    }
    results = Path(__file__).parent / "results"
    write_json_atomic(results / f"{out}.json", finite(result))
    write_text_atomic(results / f"{out}.md", markdown(result))


def markdown(result: dict[str, Any]) -> str:
    """The table for people."""
    lines = [
        f"# Groupings of `{result['workload']}` on `{result['host']}`",
        "",
        f"{result['date']} · {result['hardware']}, shared with other work · "
        + ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
        f"`{result['command']}`",
        "",
        f"{result['num_ops']} ops, {result['num_edges']} edges, estimated costs, simulated: nothing was measured. "
        f"One device takes {result['single_s'] * 1e3:.1f} ms. Annealing, {result['evaluations']:,} evaluations, "
        f"seeds {', '.join(map(str, result['seeds']))}; ratios are of the median.",
        "",
        "| rule | groups asked | made | in, s | best steps, ms | of one device | of no grouping |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        steps = ", ".join(f"{seconds * 1e3:.1f}" for seconds in row["step_time_s"])
        lines.append(
            f"| `{row['rule']}` | {row['num_groups_asked']} | {row['num_groups']} | {row['grouping_s']:.2f} | "
            f"{steps} | {row['over_single']:.3f} | {row['over_none']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main(*sys.argv[1:])
