"""The table of `core-micro`: each method beside the best known placement of whole ops, and beside each other."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from best_known import known
from record import as_markdown
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
        f"| | {' | '.join(methods)} |\n|---|{'---|' * len(methods)}\n",
    ]
    parts = {
        "all problems": list(found),
        ", ".join(DENSE): [problem for problem in found if problem.partition("/")[0] in DENSE],
        f"on {NARROW}": [problem for problem in found if problem.endswith(f"/{NARROW}")],
    }
    for words, problems in parts.items():
        cells = [
            geometric([found[p][m]["step_time_s"] / whole_s[p] for p in problems if m in found[p] and p in whole_s])
            for m in methods
        ]
        text.append(f"| {words} | {' | '.join(cells)} |\n")
    text.append(f"\n`{SEARCH}` over the best of the others, at the same memory:\n\n| problems | ratio |\n|---|---|\n")
    field_s = {
        problem: min(others)
        for problem, answers in found.items()
        if (others := [row["step_time_s"] for name, row in answers.items() if name != SEARCH])
    }
    text += _ratios(found, parts, field_s)
    text.append(
        f"\n`{SEARCH}` over the best known with any number of micro-batches (`benchmarks/{KNOWN_CUT.name}`,\n"
        "half a million evaluations each or more, those of whole ops included where these are best):\n\n"
        "| problems | ratio |\n|---|---|\n"
    )
    text += _ratios(found, parts, {problem: entry["step_time_s"] for problem, entry in entries.items()})
    text.append(
        "\nStep times in ms, of what is best known too; micro-batches and order of ops in brackets.\n\n"
        f"| problem | whole ops | known | {' | '.join(methods)} | {SEARCH} / whole |\n"
        f"|---|---|---|{'---|' * len(methods)}---|\n"
    )
    for problem, answers in found.items():
        cells = [_answer(answers.get(method)) for method in methods]
        whole, mine = whole_s.get(problem), answers.get(SEARCH)
        ratio = "–" if whole is None or mine is None else f"{mine['step_time_s'] / whole:.3f}"
        known_ms = "–" if whole is None else f"{whole * 1e3:.2f}"
        entry = entries.get(problem)
        text.append(f"| {problem} | {known_ms} | {_answer(entry)} | {' | '.join(cells)} | {ratio} |\n")
    text.append("\nWorkloads: " + "; ".join(f"`{name}` is `{spec}`" for name, spec in WORKLOADS.items()) + ".\n")
    return "".join(text)


def _ratios(
    found: dict[str, dict[str, dict[str, Any]]], parts: dict[str, list[str]], others_s: dict[str, float]
) -> list[str]:
    """A line for each part: what was searched over `others_s`, by problem."""
    ratio = {p: found[p][SEARCH]["step_time_s"] / others_s[p] for p in found if p in others_s and SEARCH in found[p]}
    return [
        f"| {words} | {geometric([ratio[p] for p in problems if p in ratio])} |\n" for words, problems in parts.items()
    ]


def _answer(row: dict[str, Any] | None) -> str:
    return "–" if row is None else f"{row['step_time_s'] * 1e3:.2f} ({row['count']}, {row['op_order']})"
