"""The table of `core-micro`: each method beside the best known placement of whole ops, and beside each other."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from best_known import known
from record import as_markdown, table
from suites import CORE, WORKLOADS, key_of

Rows = list[dict[str, Any]]
SEARCH = "portfolio"
KNOWN_CUT = Path(__file__).parent / "best_known_micro.json"
"""The best known with any number of micro-batches."""
DENSE = ("bert", "gpt2", "inception_v3")
"""Workloads whose batch is worth cutting on every host."""
NARROW = "4xV100-pcie"
"""The host on which links are narrowest for what its devices compute."""


def by_problem(rows: Rows, allowed: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Rows with a step time, by problem and method, in the order of the suite."""
    found: dict[str, dict[str, dict[str, Any]]] = {key_of(*names): {} for names in CORE}
    for row in rows:
        if row["allowed"] == allowed and row["step_time_s"] is not None:
            found[row["problem"]][row["method"]] = row
    return {problem: methods for problem, methods in found.items() if methods}


def geometric(ratios: list[float]) -> str:
    """Geometric mean and largest, with the number of problems."""
    if not ratios:
        return "–"
    return f"{statistics.geometric_mean(ratios):.3f} (largest {max(ratios):.3f}, {len(ratios)} problems)"


def markdown(rows: Rows, facts: dict[str, Any]) -> str:
    """The whole page; where there were several budgets, of the largest."""
    allowed = max(row["allowed"] for row in rows)
    whole_s = {key: entry["step_time_s"] for key, entry in known().items() if entry["step_time_s"] is not None}
    entries = known(KNOWN_CUT)
    found = by_problem(rows, allowed)
    methods = sorted(dict.fromkeys(row["method"] for row in rows), key=lambda name: name != SEARCH)
    text = [
        "# Suite `core-micro`: batches cut into micro-batches\n\n",
        as_markdown(facts),
        f"\nThe problems of `core` with the same global batch. Every method has {allowed:,} evaluations, those\n"
        "that it chooses the number of micro-batches with included. Simulated step times, estimated costs; ratios are\n"
        "to the best known placement of whole ops (`benchmarks/best_known.json`), geometric means over problems.\n\n",
    ]
    parts = {
        "all problems": list(found),
        ", ".join(DENSE): [problem for problem in found if problem.partition("/")[0] in DENSE],
        f"on {NARROW}": [problem for problem in found if problem.endswith(f"/{NARROW}")],
    }
    field_s = {
        problem: min(others)
        for problem, answers in found.items()
        if (others := [row["step_time_s"] for name, row in answers.items() if name != SEARCH])
    }
    known_s = {problem: entry["step_time_s"] for problem, entry in entries.items()}

    def ratios(others_s: dict[str, float], method: str = SEARCH) -> dict[str, float]:
        """Step times of a method over `others_s`, by problem."""
        both = (problem for problem in found if problem in others_s and method in found[problem])
        return {problem: found[problem][method]["step_time_s"] / others_s[problem] for problem in both}

    def means(columns: dict[str, dict[str, float]], head: str = "problems") -> str:
        """A line for each part of the problems, a column for each mapping of problems to ratios."""
        lines = (
            (words, *(geometric([ratio[p] for p in problems if p in ratio]) for ratio in columns.values()))
            for words, problems in parts.items()
        )
        return table((head, *columns), *lines)

    to_whole = ratios(whole_s)
    steps = (
        (
            problem,
            f"{whole_s[problem] * 1e3:.2f}" if problem in whole_s else "–",
            _answer(entries.get(problem)),
            *(_answer(answers.get(method)) for method in methods),
            f"{to_whole[problem]:.3f}" if problem in to_whole else "–",
        )
        for problem, answers in found.items()
    )
    text += [
        means({method: ratios(whole_s, method) for method in methods}, head=""),
        f"\n`{SEARCH}` over the best of the others, at the same memory:\n\n",
        means({"ratio": ratios(field_s)}),
        f"\n`{SEARCH}` over the best known with any number of micro-batches (`benchmarks/{KNOWN_CUT.name}`,\n"
        "half a million evaluations each or more, those of whole ops included where these are best):\n\n",
        means({"ratio": ratios(known_s)}),
        "\nStep times in ms, of what is best known too; micro-batches and order of ops in brackets.\n\n",
        table(("problem", "whole ops", "known", *methods, f"{SEARCH} / whole"), *steps),
        "\nWorkloads: " + "; ".join(f"`{name}` is `{spec}`" for name, spec in WORKLOADS.items()) + ".\n",
    ]
    return "".join(text)


def _answer(row: dict[str, Any] | None) -> str:
    return "–" if row is None else f"{row['step_time_s'] * 1e3:.2f} ({row['count']}, {row['op_order']})"
