"""Annealing over each grouping: python benchmarks/groupings.py [WORKLOAD] [HOST] [OUT] [RULE/COUNT ...]."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from record import as_markdown, record

from rlplace.files import write_json_atomic, write_text_atomic
from rlplace.measure.costs.costs import estimate_costs
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search import anneal_from
from rlplace.search.methods import SearchResult, find
from rlplace.search.task import Budget
from rlplace.session.steps import capture_workload
from rlplace.workloads import build_for, parse_workload

NMT = "nmt@layers=4,units=1024,batch=64,steps=20,vocab=32000"
CELLS = "encoder.layers.*,decoder.layers.*,decoder.attention,projection"
RULES = (
    "heavy-edge/256", "heavy-edge/24", "colocation/256", f"colocation:{CELLS}/256", "module/256", "module:3:apart/256",
    "metis/256", "none/256",
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
        single = find(problem, "single", simulator, Budget(evaluations=100))
        single_s = single.step_time_s
        alone_s = [anneal_alone(problem, simulator, single, seed) for seed in SEEDS]
        found = [find(problem, "anneal", simulator, Budget(evaluations=EVALUATIONS), seed=seed) for seed in SEEDS]
        step_time_s = [result.step_time_s for result in found]
        rows.append(
            {
                "rule": rule,
                "num_groups_asked": int(count),
                "num_groups": problem.grouping.num_groups,
                "grouping_s": grouping_s,
                "alone_s": alone_s,
                "alone_over_single": float(np.median(alone_s)) / single_s,
                "step_time_s": step_time_s,
                "over_single": float(np.median(step_time_s)) / single_s,
                "search_s": float(np.median([result.plan_s for result in found])),
            }
        )
        print(rows[-1], flush=True)
    for figure, ratio in (("alone_s", "alone_over_none"), ("step_time_s", "over_none")):
        none_s = next((float(np.median(row[figure])) for row in rows if row["rule"] == "none"), float("nan"))
        for row in rows:
            row[ratio] = float(np.median(row[figure])) / none_s
    result = {
        "schema": 1,
        **record(),
        "workload": workload,
        "host": host_word,
        "num_ops": graph.num_ops,
        "num_edges": graph.num_edges,
        "single_s": single_s,
        "evaluations": EVALUATIONS,
        "seeds": list(SEEDS),
        "rows": rows,
    }
    results = Path(__file__).parent / "results"
    write_json_atomic(results / f"{out}.json", result)
    write_text_atomic(results / f"{out}.md", markdown(result))


def anneal_alone(problem: Problem, simulator: Simulator, single: SearchResult, seed: int) -> float:
    """Step time that annealing over the problem's groups alone finds, from the best single device."""
    assert single.devices is not None
    start = np.full(problem.grouping.num_groups, single.devices[0], dtype=np.int32)
    return anneal_from(problem, simulator, start, Budget(evaluations=EVALUATIONS), seed=seed)[1]


def markdown(result: dict[str, Any]) -> str:
    """The table for people."""
    lines = [
        f"# Groupings of `{result['workload']}` on `{result['host']}`",
        "",
        as_markdown(result),
        f"{result['num_ops']} ops, {result['num_edges']} edges, estimated costs, simulated: nothing was measured. "
        f"One device takes {result['single_s'] * 1e3:.1f} ms. {result['evaluations']:,} evaluations, "
        f"seeds {', '.join(map(str, result['seeds']))}; ratios are of the median.",
        "",
        "*Alone* is annealing over these groups and nothing else, from the best single device: what the grouping is "
        "worth. The method `anneal` starts from the best list schedule, and also moves blocks of coarser groups and "
        "parts of groups, which it makes itself: even under `none` it is not without groups.",
        "",
        "| rule | asked | made | in, s | alone, ms | of single | of none | `anneal`, ms | of single | of none |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        alone, steps = (", ".join(f"{s * 1e3:.1f}" for s in row[figure]) for figure in ("alone_s", "step_time_s"))
        lines.append(
            f"| `{row['rule']}` | {row['num_groups_asked']} | {row['num_groups']} | {row['grouping_s']:.2f} | "
            f"{alone} | {row['alone_over_single']:.3f} | {row['alone_over_none']:.3f} | "
            f"{steps} | {row['over_single']:.3f} | {row['over_none']:.3f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(*sys.argv[1:])
