"""The published benchmark, every workload: python benchmarks/published.py FOLDER [SECONDS]; writes results/published.*.

FOLDER holds `throughput/*.json`, `latency/*.json` and `values.json`. SECONDS (60) is wall time for all methods.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from published_milp import MOST_ENTRIES, num_entries, solve_milp
from record import as_markdown, record, save, table

from rlplace.graphs.formats.published import DnnPartitioning, load_dnn_partitioning
from rlplace.partitioning import METHODS, PublishedRow, lower_bound_ms, solve
from rlplace.partitioning.objectives import MaxLoad, unit_graph

OBJECTIVES = {"throughput": "max-load", "latency": "piece-latency"}
MILP_SHARE = 1 / 8
"""Of the time of max-load, for the integer program."""


def best_published(values: dict[str, Any]) -> tuple[float, str]:
    """The least value published for a workload that respects memory, and whose it is."""
    feasible = {}
    for name, value in values.items():
        value = value.get("obj") if isinstance(value, dict) else value
        is_figure = isinstance(value, float) and not isinstance(value, bool)
        if is_figure and "no_memory_limit" not in name and not values.get(f"{name}_oom"):
            feasible[name] = value
    if values.get("oneFpga_out_of_memory"):
        feasible.pop("one_device", None)
    name = min(feasible, key=lambda key: feasible[key])
    return feasible[name], name


def run(path: Path, values: dict[str, Any], seconds: float) -> dict[str, Any]:
    objective = OBJECTIVES[path.parent.name]
    workload = load_dnn_partitioning(path)
    wall_s, cpu_s = time.monotonic(), time.process_time()
    share = MILP_SHARE if objective == "max-load" else 0.0
    rows = {row.method: row for row in solve(workload, objective, seconds=seconds * (1 - share)).rows}
    bound_ms, bound = lower_bound_ms(workload, objective)
    if share:
        rows["milp"], proven_ms = by_integer_program(workload, seconds * share)
        bound_ms, bound = max((bound_ms, bound), (proven_ms, "milp"))
    best = min(rows.values(), key=lambda row: row.value_ms)
    published_ms, whose = best_published(values)
    return {
        "workload": path.stem,
        "objective": objective,
        "num_ops": workload.num_ops,
        "value_ms": best.value_ms,
        "method": best.method,
        "published_ms": published_ms,
        "published_by": whose,
        "ratio": best.value_ms / published_ms,
        "lower_bound_ms": bound_ms,
        "bound": bound,
        "wall_s": time.monotonic() - wall_s,
        "cpu_s": time.process_time() - cpu_s,
        "methods": {
            row.method: {
                "value_ms": row.value_ms,
                "plan_s": row.plan_s,
                "evaluations": row.evaluations,
                "status": row.status,
                "why": row.why,
            }
            for row in rows.values()
        },
    }


def by_integer_program(workload: DnnPartitioning, seconds: float) -> tuple[PublishedRow, float]:
    """The row of the integer program, skipped where it is too large, and the bound in milliseconds that it proves."""
    units, begin = unit_graph(workload, workload.units), time.monotonic()
    if num_entries(units) > MOST_ENTRIES:
        return PublishedRow("milp", None, math.inf, 0, 0.0, "skipped", f"more than {MOST_ENTRIES} matrix entries"), 0.0
    found = solve_milp(units, seconds)
    plan_s, why = time.monotonic() - begin, f"bound {found.bound_ms:.6g} ms"
    if found.devices is None:
        return PublishedRow("milp", None, math.inf, 0, plan_s, "infeasible", why), found.bound_ms
    devices, status = units.expand(found.devices), "optimal" if found.is_optimal else "ok"
    value_ms = float(MaxLoad(workload).values_ms(devices)[0])
    return PublishedRow("milp", devices, value_ms, 1, plan_s, status, why), found.bound_ms


def lines_of(rows: list[dict[str, Any]]) -> str:
    """The table of all workloads."""
    shown = (*METHODS[:-1], "milp", METHODS[-1])  # `portfolio` comes last
    head = (
        *("objective", "workload", "ours, ms", "by", "best published, ms", "by", "ratio", "bound, ms"),
        *(*shown, "wall s", "CPU s"),
    )
    return table(
        head,
        *(
            (
                *(row["objective"], f"`{row['workload']}`", f"{row['value_ms']:.4f}", row["method"]),
                *(f"{row['published_ms']:.4f}", row["published_by"], f"{row['ratio']:.4f}"),
                f"{row['lower_bound_ms']:.3f}",
                *(_value(row["methods"].get(method, {}).get("value_ms", math.inf)) for method in shown),
                *(f"{row['wall_s']:.0f}", f"{row['cpu_s']:.0f}"),
            )
            for row in rows
        ),
    )


def _value(value_ms: float) -> str:
    return f"{value_ms:.4g}" if value_ms < float("inf") else "–"


def main(folder: Path, seconds: float) -> None:
    values = json.loads((folder / "values.json").read_text(encoding="utf-8"))
    facts, rows = record("scipy"), []
    for kind in OBJECTIVES:
        for path in sorted((folder / kind).glob("*.json")):
            rows.append(run(path, values[kind][path.stem], seconds))
            print(json.dumps({key: rows[-1][key] for key in ("objective", "workload", "value_ms", "ratio", "cpu_s")}))
    worst = max(rows, key=lambda row: row["ratio"])
    text = (
        f"# The published benchmark of device placement\n\n{as_markdown(facts)}\n"
        "Workloads and values of Tarnawski et al. (NeurIPS 2020); every value of ours is feasible and verified by the "
        f"measurer. All methods together had {seconds:g} s of wall time on two cores, shared with others: the CPU "
        "seconds say how much of them was had. Best published: the least feasible value of the authors' programs, "
        "their integer programs under HiGHS, human experts, Scotch, and annealing.\n\n"
        f"{lines_of(rows)}\nLargest ratio: {worst['ratio']:.4f} (`{worst['workload']}`, {worst['objective']}).\n"
    )
    save("published", {**facts, "seconds": seconds, "rows": rows}, text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 60.0)
