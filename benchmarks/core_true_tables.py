"""The tables of `core_true.py`: ratios to the best known of each truth, by row, by workload and in pairs; wall time."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from hidden_truth import ROWS
from record import as_markdown, table

from rlplace.compare import mean_ratio
from rlplace.compare.comparison import paired_ratio
from rlplace.measure.truth import KINDS

AGENT = "learned"
UNTRACED = "-untraced"
"""After the name of a row without timelines, beside others that have them."""
Rows = list[dict[str, Any]]


def workload_of(problem: str) -> str:
    """The name in `WORKLOAD/HOST`, without its size."""
    return problem.partition("/")[0].partition("@")[0]


def kind_of(row: dict[str, Any]) -> str:
    """The kind of its truth."""
    return str(row["truth"]).partition(":")[0]


def with_ratios(rows: Rows) -> Rows:
    """Every method's row with `ratio`, of its step time to the least that any row or search on that truth has, and with
    `of_search`, to the least of searches on that truth alone.

    Infinite where there is none. Where some rows have timelines, those without are named so.
    """
    is_traced = any(row.get("traced") for row in rows)
    least: dict[tuple[str, str], float] = defaultdict(lambda: math.inf)
    searched: dict[tuple[str, str], float] = defaultdict(lambda: math.inf)
    for row in rows:
        case, step_s = (row["problem"], row["truth"]), math.inf if row["step_time_s"] is None else row["step_time_s"]
        least[case] = min(least[case], step_s)
        if row["method"] not in ROWS:
            searched[case] = min(searched[case], step_s)

    def ratio(row: dict[str, Any], to: dict[tuple[str, str], float]) -> float:
        best_s = to[row["problem"], row["truth"]]
        return math.inf if row["step_time_s"] is None or math.isinf(best_s) else row["step_time_s"] / best_s

    return [
        row
        | {"method": row["method"] + UNTRACED * (is_traced and not row.get("traced"))}
        | {"ratio": ratio(row, least), "of_search": ratio(row, searched)}
        for row in rows
        if row["method"] in ROWS
    ]


def mean(rows: Rows) -> str:
    """Geometric mean of the ratios with its interval by workload, and how many rows have none."""
    solved = [row for row in rows if math.isfinite(row["ratio"])]
    if not solved:
        return "–"
    told = mean_ratio([row["ratio"] for row in solved], [workload_of(row["problem"]) for row in solved])
    return f"{told}{f', {len(rows) - len(solved)} without' if len(solved) < len(rows) else ''}"


def point(rows: Rows) -> str:
    """Geometric mean of the ratios alone."""
    solved = [row["ratio"] for row in rows if math.isfinite(row["ratio"])]
    return f"{statistics.geometric_mean(solved):.3f}" if solved else "–"


def pair(rows: Rows, others: Rows) -> str:
    """The ratio of the first to the second on the cases that both have solved, with its t-interval over workloads."""
    second = {_case(row): row["ratio"] for row in others if math.isfinite(row["ratio"])}
    both = [row for row in rows if math.isfinite(row["ratio"]) and _case(row) in second]
    if not both:
        return "–"
    ratios = [row["ratio"] / second[_case(row)] for row in both]
    return str(paired_ratio(ratios, [workload_of(row["problem"]) for row in both]))


def _case(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["problem"], row["truth"], row["measured"]


def grid(first: str, lines: Iterable[str], columns: list[tuple[str, int]], cell: Callable[[str, str, int], str]) -> str:
    """A table with a line for each word and a column for each kind of truth and number of measurements."""
    head = (first, *(f"{kind} {count}" for kind, count in columns))
    return table(head, *((line, *(cell(line, kind, count) for kind, count in columns)) for line in lines))


def markdown(suite: str, rows: Rows, facts: dict[str, Any]) -> str:
    """All tables."""
    told = with_ratios(rows)
    found = {(kind_of(row), row["measured"]) for row in told}
    columns = sorted(found, key=lambda column: (list(KINDS).index(column[0]), column[1]))
    names = {row["method"] for row in told}
    methods = [name for row in ROWS for name in (row, row + UNTRACED) if name in names]
    others = [name for name in methods if name != AGENT] if AGENT in methods else []
    workloads = list(dict.fromkeys(workload_of(row["problem"]) for row in told))

    def of(method: str, kind: str, count: int, workload: str = "") -> Rows:
        return [
            row
            for row in told
            if (row["method"], kind_of(row), row["measured"]) == (method, kind, count)
            and workload in ("", workload_of(row["problem"]))
        ]

    searches = sorted({row["allowed"] for row in rows if row["method"] not in ROWS})
    num_problems, num_truths = len({row["problem"] for row in told}), len({(r["problem"], r["truth"]) for r in told})
    reference = f"`portfolio` with {' or '.join(f'{count:,}' for count in searches)} evaluations on the truth"
    text = [
        f"# A truth that nobody sees, on suite `{suite}`\n",
        as_markdown(facts),
        f"\n{facts['note']}\n" if facts.get("note") else "",
        f"\n{num_problems} problems, {num_truths} truths. A row is scored by the true step time of the one plan\n"
        f"that it names, over the least that any row or {reference} has.\n"
        "Geometric means with 95 % intervals bootstrapped by workload; docs/comparing.md has the definition.\n\n",
        grid("row, over the best known", methods, columns, lambda m, kind, count: mean(of(m, kind, count))),
        f"\nOver {reference} alone, which rows can be below:\n\n",
        grid(
            *("row, over that search", methods, columns),
            lambda m, kind, count: mean([row | {"ratio": row["of_search"]} for row in of(m, kind, count)]),
        ),
    ]
    if others:
        text += [
            f"\n`{AGENT}` over each row, below 1 where it is better: pairs by problem and seed, logarithms averaged\n"
            f"by workload, 95 % t-interval over the {len(workloads)} workloads.\n\n",
            grid(
                *(f"`{AGENT}` over", others, columns),
                lambda m, kind, count: pair(of(AGENT, kind, count), of(m, kind, count)),
            ),
        ]
    for kind, count in columns:
        points = ((m, *(point(of(m, kind, count, name)) for name in workloads)) for m in methods)
        text += [f"\n{kind}, {count} measurements, by workload:\n\n", table(("row", *workloads), *points)]
    counts = sorted({count for _, count in columns})
    spent = (
        (m, *(seconds([r["plan_s"] for r in told if (r["method"], r["measured"]) == (m, count)]) for count in counts))
        for m in methods
    )
    text += [
        "\nWall time besides measuring, median and most, in seconds:\n\n",
        table(("row", *(f"{count} measured" for count in counts)), *spent),
    ]
    return "".join(text)


def seconds(times: list[float]) -> str:
    """Median and most."""
    return f"{statistics.median(times):.1f}, {max(times):.1f}" if times else "–"
