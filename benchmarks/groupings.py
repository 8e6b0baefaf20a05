"""Annealing over each grouping: python benchmarks/groupings.py [WORKLOAD] [HOST] [OUT] [RULE/COUNT ...]."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from record import as_markdown, record, save, table

from rlplace.measure import Problem, Simulator, resolve_host
from rlplace.measure.costs.costs import estimate_costs
from rlplace.search import Budget, SearchResult, anneal_from, find
from rlplace.session.prepare import Steps
from rlplace.workloads import parse_workload

NMT = "nmt@layers=4,units=1024,batch=64,steps=20,vocab=32000"
CELLS = "encoder.layers.*,decoder.layers.*,decoder.attention,projection"
RULES = (
    "heavy-edge/256", "heavy-edge/24", "colocation/256", f"colocation:{CELLS}/256", "module/256", "module:3:apart/256",
    "metis/256", "none/256",
)  # fmt: skip
EVALUATIONS = 10_000
SEEDS = (0, 1, 2)
HEAD = (
    *("rule", "asked", "made", "in, s", "alone, ms", "of single", "of none"),
    *("`anneal`, ms", "of single", "of none"),
)


def main(workload: str = NMT, host_word: str = "4xV100-pcie", out: str = "groupings", *rules: str) -> None:
    host = resolve_host(host_word)
    graph = Steps(parse_workload(workload), host, 0).graph(1)
    costs = estimate_costs(graph, host)
    rows: list[dict[str, Any]] = []
    Problem.grouped(graph, host, costs)  # compiles the kernels
    for word in rules or RULES:
        rule, _, count = word.rpartition("/")
        begin = time.perf_counter()
        problem = Problem.grouped(graph, host, costs, int(count), rule)
        grouping_s = time.perf_counter() - begin
        simulator = Simulator(problem)
        single = find(problem, "single", simulator, Budget(evaluations=100))
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
                "alone_over_single": float(np.median(alone_s)) / single.step_time_s,
                "step_time_s": step_time_s,
                "over_single": float(np.median(step_time_s)) / single.step_time_s,
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
        "single_s": single.step_time_s,
        "evaluations": EVALUATIONS,
        "seeds": list(SEEDS),
        "rows": rows,
    }
    save(out, result, markdown(result))


def anneal_alone(problem: Problem, simulator: Simulator, single: SearchResult, seed: int) -> float:
    """Step time that annealing over the problem's groups alone finds, from the best single device."""
    assert single.devices is not None
    start = np.full(problem.grouping.num_groups, single.devices[0], dtype=np.int32)
    return anneal_from(problem, simulator, start, Budget(evaluations=EVALUATIONS), seed=seed)[1]


def markdown(result: dict[str, Any]) -> str:
    """The table for people."""
    rows = []
    for row in result["rows"]:
        alone, steps = (", ".join(f"{s * 1e3:.1f}" for s in row[figure]) for figure in ("alone_s", "step_time_s"))
        made = row["num_groups"], f"{row['grouping_s']:.2f}"
        ratios = [f"{row[name]:.3f}" for name in ("alone_over_single", "alone_over_none", "over_single", "over_none")]
        rows.append((f"`{row['rule']}`", row["num_groups_asked"], *made, alone, *ratios[:2], steps, *ratios[2:]))
    return (
        f"# Groupings of `{result['workload']}` on `{result['host']}`\n\n{as_markdown(result)}\n"
        f"{result['num_ops']} ops, {result['num_edges']} edges, estimated costs, simulated: nothing was measured. "
        f"One device takes {result['single_s'] * 1e3:.1f} ms. {result['evaluations']:,} evaluations, "
        f"seeds {', '.join(map(str, result['seeds']))}; ratios are of the median.\n\n"
        "*Alone* is annealing over these groups and nothing else, from the best single device: what the grouping is "
        "worth. The method `anneal` starts from the best list schedule, and also moves blocks of coarser groups and "
        "parts of groups, which it makes itself: even under `none` it is not without groups.\n\n"
    ) + table(HEAD, *rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
