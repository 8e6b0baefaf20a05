"""DAPPLE's profiles on its three configurations: python benchmarks/dapple.py FOLDER [--only WORD,...] [--render].

FOLDER holds the layer profiles of github.com/AlibabaPAI/DAPPLE (`profiling_results/`). Every problem that is done is a
line of `results/dapple.jsonl`; a run goes on where the last one ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from core_true import append, read_lines
from record import RESULTS, argument, as_markdown, parse, record, save

from rlplace.graphs import load_graph
from rlplace.graphs.formats import load_times_s
from rlplace.measure import Costs, Problem, Simulator, resolve_host
from rlplace.search import Budget, find

PROFILES = ("vgg-19-pbs-32", "bert-24-pbs-6", "gnmt-16-pbs-64")
HOSTS = ("2x8xV100-25gbe", "16x1xV100-25gbe", "16x1xV100-10gbe")
COUNTS = (16, 64)
FIELD = ("data-parallel", "pipeline", "hybrid")
METHODS = (*FIELD, "portfolio")
EVALUATIONS = 10_000
LINES = RESULTS / "dapple.jsonl"


def main() -> None:
    options = parse(
        __doc__,
        argument("folder", type=Path, help="where the profiles lie"),
        argument("--only", default="", help="problems whose name holds one of these words"),
        argument("--evaluations", type=int, default=EVALUATIONS, help="of each method"),
        argument("--lines", type=Path, default=LINES, help="where finished problems are kept"),
        argument("--render", action="store_true", help="write the table of what is done"),
    )
    words = tuple(word for word in options.only.split(",") if word)
    done = {row["problem"]: row for row in read_lines(options.lines)}
    for profile, host, count in problems():
        name = f"{profile} {host} {count}"
        if name in done or (words and not any(word in name for word in words)) or options.render:
            continue
        row = {"problem": name, **solved(options.folder / f"{profile}.txt", host, count, options.evaluations)}
        append(options.lines, row)
        print(row, flush=True)
    if options.render:
        rows = [done[name] for name in (" ".join(map(str, one)) for one in problems()) if name in done]
        facts = record() | {"command": "python benchmarks/dapple.py FOLDER, then with --render"}
        result = {"schema": 1, **facts, "evaluations": options.evaluations, "rows": rows}
        save("dapple", result, markdown(result))


def problems() -> Iterator[tuple[str, str, int]]:
    """Profile, host and number of micro-batches of every problem."""
    return product(PROFILES, HOSTS, COUNTS)


def solved(path: Path, host_word: str, count: int, evaluations: int) -> dict[str, Any]:
    """Step times of the field and of `portfolio`."""
    host = resolve_host(host_word)
    graph, times_s = load_graph(path, micro_batches=count), load_times_s(path, micro_batches=count)
    assert times_s is not None
    problem = Problem.grouped(graph, host, Costs.given(times_s, host))
    simulator = Simulator(problem)
    row: dict[str, Any] = {"ops": graph.num_ops, "even_s": float(np.sum(times_s)) / host.num_devices}
    for method in METHODS:
        found = find(problem, method, simulator, Budget(evaluations=evaluations))
        row[method] = {"step_s": found.step_time_s, "evaluations": found.evaluations, "plan_s": found.plan_s}
    return row


def ratio(row: dict[str, Any]) -> float:
    """`portfolio` over the best of the field."""
    best = min(row[method]["step_s"] or math.inf for method in FIELD)
    return float(row["portfolio"]["step_s"] / best)


def markdown(result: dict[str, Any]) -> str:
    """The table for people."""
    ratios = [ratio(row) for row in result["rows"]]
    lines = [
        "# DAPPLE's profiles on its three configurations",
        "",
        as_markdown(result),
        "Layer profiles of github.com/AlibabaPAI/DAPPLE (Fan et al., PPoPP 2021), K micro-batches of the profiled "
        "batch, simulated: nothing was measured. Times of layers as profiled on one V100; sums of gradients and "
        f"updates take no time. {result['evaluations']:,} evaluations at most for each method. `hybrid` is the best "
        "over stages x replicas, equal or not, cuts, owners and orders. *Even* is "
        "the work over the number of devices, which no placement can beat.",
        "",
        f"`portfolio` over the best of the field: geometric mean {math.exp(float(np.mean(np.log(ratios)))):.3f}, "
        f"largest {max(ratios):.3f}; below 1 on {sum(one < 1 for one in ratios)} of {len(ratios)}.",
        "",
        "| profile | host | K | even, ms | `data-parallel` | `pipeline` | `hybrid` | `portfolio` | of the best |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join((*lines, *map(line_of, result["rows"]), ""))


def line_of(row: dict[str, Any]) -> str:
    """A problem's line of the table."""
    profile, host, count = row["problem"].split()
    times = " | ".join(milliseconds(row[method]["step_s"]) for method in METHODS)
    return f"| {profile} | `{host}` | {count} | {row['even_s'] * 1e3:.0f} | {times} | {ratio(row):.3f} |"


def milliseconds(step_s: float | None) -> str:
    return "does not fit" if step_s is None or math.isinf(step_s) else f"{step_s * 1e3:.0f}"


if __name__ == "__main__":
    main()
