"""The page and the picture of `policies.py`: ratios to the best known, and how they came about."""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from best_known import known
from core import LEARNED_ON
from numpy.typing import NDArray
from record import as_markdown

from rlplace.compare import mean_ratio
from rlplace.compare.comparison import paired_ratio

Rows = Sequence[dict[str, Any]]
BASE = "portfolio"
HEAD = (
    "| row | evaluations | seeds | ratio to best known | over `portfolio` | largest spread over seeds | CPU, s "
    "| solved |\n|---|---|---|---|---|---|---|---|\n"
)
MOST_SHOWN = 1.6
"""Ratio above which the picture shows nothing."""


def best_known_s(rows: Rows) -> dict[str, float]:
    """The best step time known of each problem of `rows`: that of `best_known.json`, else the best of the rows."""
    best: dict[str, float] = {}
    for row in rows:
        if row["step_time_s"] is not None:
            best[row["problem"]] = min(best.get(row["problem"], math.inf), row["step_time_s"])
    kept = {key: entry["step_time_s"] for key, entry in known().items() if entry["step_time_s"] is not None}
    return {problem: kept.get(problem, step_s) for problem, step_s in best.items()}


def summary(rows: Rows, best: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Cells of the table, a row and budget each: the smallest ratio first, budget by budget."""
    runs: dict[tuple[int, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        runs[row["budget"], row["row"]][row["problem"]].append(row)
    medians = {
        key: {problem: time_s for problem, found in of.items() if math.isfinite(time_s := _median(found))}
        for key, of in runs.items()
    }
    lines: list[tuple[tuple[float, float], tuple[str, ...]]] = []
    for (budget, name), by_problem in runs.items():
        solved = medians[budget, name]
        seeds = sorted({len(found) for found in by_problem.values()})
        ratios = [time_s / best[problem] for problem, time_s in solved.items()]
        mean = mean_ratio(ratios, _workloads(solved)) if ratios else None
        spreads = [_spread(found) for found in by_problem.values()]
        cpu_s = statistics.fmean(row["cpu_s"] for found in by_problem.values() for row in found)
        cells = (
            name,
            f"{budget:,}",
            "–".join(str(count) for count in dict.fromkeys((seeds[0], seeds[-1]))),
            "–" if mean is None else str(mean),
            _over(solved, medians.get((budget, BASE), {})) if name != BASE else "",
            f"{max(spreads):.1%}",
            f"{cpu_s:.1f}",
            f"{len(solved)} of {len(by_problem)}",
        )
        lines.append(((budget, math.inf if mean is None else mean.mean), cells))
    return [cells for _, cells in sorted(lines, key=lambda line: line[0])]


def _median(found: Rows) -> float:
    """Median step time over seeds; infinite where one of them found nothing."""
    return statistics.median(math.inf if row["step_time_s"] is None else row["step_time_s"] for row in found)


def _spread(found: Rows) -> float:
    times = [row["step_time_s"] for row in found if row["step_time_s"] is not None]
    return max(times) / min(times) - 1 if times else 0.0


def _over(solved: Mapping[str, float], base: Mapping[str, float]) -> str:
    """The paired ratio to the base on the problems that both solved."""
    both = [problem for problem in solved if problem in base]
    if not both:
        return "–"
    return str(paired_ratio([solved[problem] / base[problem] for problem in both], _workloads(both)))


def _workloads(problems: Sequence[str] | Mapping[str, float]) -> list[str]:
    return [problem.partition("/")[0] for problem in problems]


def markdown(suite: str, rows: Rows, facts: Mapping[str, Any], *, picture: str) -> str:
    """The whole page."""
    best = best_known_s(rows)
    text = [
        f"# Policies on the suite `{suite}`, beside search\n",
        as_markdown(dict(facts)),
        f"\n{facts['note']}\n" if facts.get("note") else "",
        f"\n![learning curves]({picture})\n\n"
        "Simulated step times with estimated costs; one thread. *From nothing*: the policy samples and learns for the\n"
        "whole budget. *Alone*: after it has imitated the portfolio's heuristics and tuned list schedules. *With\n"
        "annealing*: it samples for a twentieth, annealing goes on from there. *Guided*: `portfolio` with a tenth of\n"
        "its starts and of its moves from the policy. *Random weights*: the list scheduler of `portfolio` with random\n"
        "weights over the same seven groupings. Ratios are geometric means over problems of the median over seeds,\n"
        "with 95 % intervals bootstrapped by workload; those over `portfolio` are paired, a workload counting once,\n"
        "with a t-interval over workloads. What it costs is CPU time of one core, capture left out, the mean over all\n"
        "runs. The best so far is noted where a batch was scored: some five list schedules, 16 or 64 samples of a\n"
        "policy, all guesses of `schedule`; curves are that much late. The weights of `schedule` were trained on no\n"
        "workload of this suite, but `vit` has blocks like those of `clip`, and `llama` like those of `mixtral`.\n"
        "The agent (`learned`) has no row: it learns a host from measured steps, and here nothing is measured;\n"
        "[core-true.md](core-true.md) is its table.\n\n",
        *(HEAD, *(f"| {' | '.join(cells)} |\n" for cells in summary(rows, best))),
    ]
    unseen = [row for row in rows if row["problem"].partition("/")[0] not in LEARNED_ON]
    if len(unseen) < len(rows):
        text += [
            f"\nSearches start from weights of list schedules that were chosen on {', '.join(LEARNED_ON)}. On the\n"
            "problems of the other workloads alone:\n\n",
            *(HEAD, *(f"| {' | '.join(cells)} |\n" for cells in summary(unseen, best))),
        ]
    return "".join(text)


def curves(rows: Rows, budget: int) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """For each row evaluations (P,) and ratios (P,): the geometric mean over problems of the median over seeds.

    Infinite until half of the seeds have found something on every problem.
    """
    best, grid = best_known_s(rows), np.unique(np.geomspace(1, budget, 200).round())
    logs: dict[str, dict[str, list[NDArray[np.float64]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["budget"] == budget:
            found = np.array(row["history"], dtype=np.float64).reshape(-1, 2)
            held = np.concatenate(([math.inf], found[:, 1]))[np.searchsorted(found[:, 0], grid, side="right")]
            logs[row["row"]][row["problem"]].append(np.log(held / best.get(row["problem"], math.nan)))
    return {
        name: (grid, np.exp(np.mean([np.median(seeds, axis=0) for seeds in of.values()], axis=0)))
        for name, of in logs.items()
    }


def save_curves(path: str | os.PathLike[str], rows: Rows) -> None:
    """Writes the picture: a panel for each budget, a line for each row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    budgets = sorted({row["budget"] for row in rows})
    figure = Figure(figsize=(1.0 + 5.5 * len(budgets), 8.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(budgets), squeeze=False, sharey=True)[0]
    names = list(dict.fromkeys(row["row"] for row in rows))
    dashes = {"from nothing": ":", "alone": "--", "with annealing": "-", "portfolio, guided by": "-."}
    heads = list(dict.fromkeys(_head(name) for name in names))
    for panel, budget in zip(panels, budgets, strict=True):
        for name, (evaluations, ratios) in sorted(curves(rows, budget).items(), key=lambda one: one[1][1][-1]):
            dash = next((dash for words, dash in dashes.items() if words in name), "-")
            found = np.isfinite(ratios)
            label = f"{name}  {ratios[-1]:.3f}"
            color = "black" if name == BASE else f"C{heads.index(_head(name)) % 10}"
            panel.step(evaluations[found], ratios[found], dash, where="post", color=color, label=label, linewidth=1.5)
        panel.set(xscale="log", ylim=(1.0, MOST_SHOWN), xlabel="placements scored", title=f"{budget:,} evaluations")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.09), ncol=2, frameon=False)
    panels[0].set_ylabel("best so far over the best known, geometric mean over problems")
    figure.savefig(Path(path))


def _head(name: str) -> str:
    """What shares a colour: a policy in all of its rows."""
    return name.removeprefix("portfolio, guided by ").partition("+")[0]
