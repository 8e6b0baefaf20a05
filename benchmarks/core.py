"""Every search method on a suite of problems, at equal budgets: python benchmarks/core.py core [--seeds 3].

Writes `results/NAME.json` and `results/NAME.md`: step times, gaps to the bound, ratios to the best known, spreads. The
suites `core-micro` and `core-split` have options of their own (`core.py core-micro --help`).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from functools import partial
from itertools import starmap
from typing import Any

import core_micro
import core_split
from best_known import known
from record import RESULTS, argument, as_markdown, parse, record, save, table
from suites import SUITES, WORKLOADS, key_of, problem_of

from rlplace.cluster import Cluster, reach
from rlplace.compare import CompareConfig, compare, mean_ratio
from rlplace.files import read_json, write_text_atomic
from rlplace.search import METHODS

Rows = list[dict[str, Any]]
HEAD = ("method", "evaluations", "ratio to best known", "ratio to bound", "largest spread over seeds", "solved")
LEARNED_ON = ("rnnlm", "inception_v3", "gpt2", "clip")
"""Workloads of the suite that `rlplace.search.improve.starting_points.START_WEIGHTS` was chosen on ..."""
LEARNED = ("anneal", "evolve", "portfolio", "policy")
"""... and the methods that start from them."""


def run(
    suite: str,
    methods: tuple[str, ...],
    lasting: tuple[str, ...],
    budgets: list[int],
    seeds: int,
    cluster: Cluster | None = None,
) -> Rows:
    """One row a problem, budget, method and seed; only `lasting` methods get more than the first budget.

    On a cluster the rows are the same, timings aside.
    """
    rows: Rows = []
    for workload, host in SUITES[suite]:
        problem = problem_of(workload, host)
        for evaluations in budgets:
            names = methods if evaluations == budgets[0] else lasting
            begin = time.monotonic()
            config = CompareConfig(names, evaluations=evaluations, seeds=seeds)
            told = compare(problem, config, cluster=cluster).to_dict()
            print(
                f"{key_of(workload, host)}, {evaluations:,} evaluations: {time.monotonic() - begin:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            for row in told["rows"]:
                facts = {"problem": key_of(workload, host), "budget": evaluations if _draws(row["method"]) else 0}
                kept = ("method", "seed", "step_time_s", "gap_to_bound", "evaluations", "plan_s", "status", "why")
                rows.append(facts | {key: row[key] for key in kept if key in row})
    return rows


def _draws(method: str) -> bool:
    return METHODS[method].kind in ("exact", "search")


def summary(rows: Rows) -> list[tuple[str, int, str, str, str, str]]:
    """Method, budget, ratio to the best known, gap to the bound, largest spread over seeds, problems solved."""
    best = {key: entry["step_time_s"] for key, entry in known().items() if entry["step_time_s"] is not None}
    runs: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        runs[row["method"], row["budget"]][row["problem"]].append(row)
    lines = []
    for (method, budget), by_problem in runs.items():
        ratios, gaps, names, spreads = [], [], [], [0.0]
        for problem, found in by_problem.items():
            times = [row["step_time_s"] for row in found if row["step_time_s"] is not None]
            if len(times) < len(found) or problem not in best:
                continue
            ratios.append(statistics.median(times) / best[problem])
            gaps.append(statistics.median(1 + row["gap_to_bound"] for row in found))
            names.append(problem.partition("/")[0])
            spreads.append(max(times) / min(times) - 1)
        figures = ("–", "–", "–")
        if ratios:
            figures = (str(mean_ratio(ratios, names)), str(mean_ratio(gaps, names)), f"{max(spreads):.1%}")
        lines.append((method, budget, *figures, f"{len(ratios)} of {len(by_problem)}"))
    return sorted(lines, key=lambda line: (line[1], line[2]))


def markdown(suite: str, rows: Rows, facts: dict[str, Any]) -> str:
    """The table of methods, then the best of each problem."""
    unseen = [row for row in rows if row["problem"].partition("/")[0] not in LEARNED_ON]
    known_starts = ", ".join(f"`{name}`" for name in LEARNED)
    text = [
        f"# Suite `{suite}`: every method at equal budgets\n",
        as_markdown(facts),
        "\nSimulated step times with estimated costs. Ratios are geometric means over problems of the median over\n"
        "seeds, with 95 % intervals bootstrapped by workload; problems that a method could not solve are left out of\n"
        "its mean and counted in the last column. The best known is kept in `benchmarks/best_known.json`; methods\n"
        "without a number of evaluations need no search.\n\n",
        table(HEAD, *((method, budget or "", *figures) for method, budget, *figures in summary(rows))),
        f"\nOf these, {known_starts} start from weights chosen on {', '.join(LEARNED_ON)}\n"
        "on these hosts. On the problems of the other workloads alone:\n\n",
        table(HEAD[:4], *(line[:4] for line in summary(unseen) if line[0] in LEARNED and line[1])),
        *spreads(suite, rows),
        "\n| problem | bound, ms | best known, ms | evaluations | best here, ms | by |\n|---|---|---|---|---|---|\n",
    ]
    entries = known()
    for workload, host in SUITES[suite]:
        key = key_of(workload, host)
        solved = [row for row in rows if row["problem"] == key and row["step_time_s"] is not None]
        best = min(solved, key=lambda row: row["step_time_s"], default=None)
        entry = entries.get(key, {})
        found = (_ms(best["step_time_s"]), f"{best['method']}, {best['budget']:,}") if best else ("–", "")
        text.append(
            f"| {key} | {_ms(entry.get('lower_bound_s'))} | {_ms(entry.get('step_time_s'))} "
            f"| {entry.get('evaluations', 0):,} | {' | '.join(found)} |\n"
        )
    text.append("\nWorkloads: " + "; ".join(f"`{name}` is `{spec}`" for name, spec in WORKLOADS.items()) + ".\n")
    return "".join(text)


def spreads(suite: str, rows: Rows) -> list[str]:
    """The spread over seeds, slowest over fastest, of each problem; nothing where there was one seed."""
    drawn = [row for row in rows if row["method"] in LEARNED and row["budget"] and row["step_time_s"] is not None]
    seeds = len({row["seed"] for row in drawn})
    if seeds < 2:
        return []
    columns = sorted({(row["budget"], row["method"]) for row in drawn})
    times: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for row in drawn:
        times[row["problem"], row["budget"], row["method"]].append(row["step_time_s"])
    spread = {case: f"{max(of) / min(of) - 1:.1%}" for case, of in times.items()}
    lines = ((key, *(spread.get((key, *column), "–") for column in columns)) for key in starmap(key_of, SUITES[suite]))
    return [
        f"\nSpread over {seeds} seeds, the slowest result over the fastest, less one:\n\n",
        table(("problem", *(f"{method} {budget:,}" for budget, method in columns)), *lines),
    ]


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.2f}"


def main() -> None:
    for suite in (core_micro, core_split):
        if sys.argv[1:2] == [suite.NAME]:
            suite.main(sys.argv[2:])
            return
    options = parse(
        __doc__,
        argument("suite", choices=sorted((*SUITES, core_micro.NAME, core_split.NAME))),
        argument("--methods", default="all"),
        argument("--evaluations", default="500,10000", help="budgets, with commas between them"),
        argument("--lasting", default="anneal,evolve,portfolio", help="who gets more than the first budget"),
        argument("--seeds", type=int, default=1),
        argument("--cluster", default="off", help="whose workers search: off, auto or ADDRESS"),
        argument("--name", help="of the results' files; the suite's by default"),
        argument("--render", action="store_true", help="no run: the last one's rows beside the best known now"),
    )
    name = options.name or options.suite
    if options.render:
        kept = read_json(RESULTS / f"{name}.json")
        write_text_atomic(RESULTS / f"{name}.md", markdown(options.suite, kept["rows"], kept))
        return
    methods = CompareConfig(tuple(options.methods.split(","))).names
    facts = record()
    lasting = CompareConfig(tuple(options.lasting.split(","))).names
    budgets = [int(part) for part in options.evaluations.split(",")]
    with reach(options.cluster, say=partial(print, file=sys.stderr)) as cluster:
        rows = run(options.suite, methods, lasting, budgets, options.seeds, cluster)
    save(name, {"schema": 1, **facts, "rows": rows}, markdown(options.suite, rows, facts), indent=None)


if __name__ == "__main__":
    main()
