"""`run_published`: the comparison on a file of the published benchmark, under its own two objectives.

Splits of a dnn-partitioning workload: which nodes are on which device, JSON in and out.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.compare import CompareConfig, Comparison, Objective, Row, compare
from rlplace.compare.comparison import PUBLISHED, RowStatus
from rlplace.compare.equal_budgets import OP_ORDER
from rlplace.compare.run_compare import Output, method_words, say_row
from rlplace.errors import InvalidValue
from rlplace.files import MOST_GRAPH_VALUES, read_json, write_json_atomic
from rlplace.graphs.formats.published import DnnPartitioning, load_dnn_partitioning
from rlplace.measure import Simulator
from rlplace.partitioning.objectives import published_problem
from rlplace.partitioning.solvers import METHODS, PublishedRow, solve
from rlplace.report.console import make_progress
from rlplace.search import METHODS as STEP_METHODS

DRAWN = ("local-search", "anneal", "portfolio")
"""Methods that a seed changes."""
STATUSES: dict[str, RowStatus] = {
    "ok": "ok",
    "infeasible": "oom",
    "error": "error",
}


def is_published_file(path: Path) -> bool:
    """Whether a graph file is a workload of the published benchmark.

    Raises:
        FileProblem: the file is missing, or no JSON.
    """
    data = read_json(path, most_values=MOST_GRAPH_VALUES) if path.suffix.lower() == ".json" else None
    return isinstance(data, dict) and "maxFPGAs" in data


def run_published(
    path: Path,
    objective: Objective,
    methods: str,
    *,
    evaluations: int | None,
    seconds: float | None,
    seeds: int,
    seed: int = 0,
    output: Output,
) -> dict[str, Any]:
    """Compares on a published workload, prints the table, keeps placements and splits; returns the object of `--json`.

    Under `max-load` and `piece-latency` values are the benchmark's own; under `latency` and `throughput` the workload's
    step is simulated on its own host.

    Raises:
        UserError: a malformed file, or a mistake in the options.
    """
    record = load_dnn_partitioning(path)
    problem = published_problem(record)
    progress = make_progress(is_quiet=output.is_quiet)
    progress.say(f"{path.name}: {record.graph.num_ops} ops, {record.graph.num_edges} edges on its own host")
    is_published = objective in PUBLISHED
    for note in () if is_published else record.graph.notes:
        progress.say(f"{path.name}: {note}")
    if is_published and output.plot is not None:
        hint = f"Under {objective} methods do not tell what they find on the way."
        raise InvalidValue("plot", str(output.plot), "none", where="compare", hint=hint)
    known = METHODS if is_published else (*STEP_METHODS, OP_ORDER)
    names = method_words(methods, known, "method for this file and objective")
    names = known if "all" in names else names
    config = CompareConfig(() if is_published else names, evaluations, seconds, seeds, objective, seed=seed)
    output.check()
    if is_published:
        comparison = _solved(record, path.name, names, config)
    else:
        comparison = compare(problem, config, workload=path.name, on_row=lambda row: progress.say(say_row(row)))
    if output.save is not None:
        simulator, planned = Simulator(problem), []
        for row in comparison.rows:
            if row.devices is not None:
                save_split(output.save / f"{row.method}-{row.seed}.split.json", record, row.devices)
                row = dataclasses.replace(row, plan=simulator.plan(row.devices))
            planned.append(row)
        comparison = dataclasses.replace(comparison, rows=tuple(planned))
    return output.conclude(comparison, problem, progress)


def _solved(record: DnnPartitioning, workload: str, names: tuple[str, ...], config: CompareConfig) -> Comparison:
    """Every method with every seed; one that draws nothing runs with the first alone."""
    rows: list[Row] = []
    deadline_s = time.monotonic() + config.total_s
    bound_ms, bound = 0.0, "none"
    for number, seed in enumerate(range(config.seed, config.seed + config.seeds)):
        seconds = max((deadline_s - time.monotonic()) / (config.seeds - number), 0.05)
        mine = names if number == 0 else tuple(name for name in names if name in DRAWN)
        if not mine:
            break
        result = solve(
            record, config.objective, seconds=seconds, evaluations=config.evaluations, seed=seed, methods=mine
        )
        bound_ms, bound = max((bound_ms, bound), (result.lower_bound_ms, result.bound))
        rows += [_row(found, seed) for found in result.rows]
    return Comparison(
        workload, "dnn-partitioning", config.objective, tuple(rows), bound_ms * 1e-3, bound, config.budget
    )


def _row(found: PublishedRow, seed: int) -> Row:
    return Row(
        found.method,
        seed,
        STATUSES[found.status],
        found.value_ms * 1e-3,
        found.evaluations,
        found.plan_s,
        why=found.why,
        devices=found.placement,
    )


def save_split(path: str | os.PathLike[str], record: DnnPartitioning, devices: NDArray[np.int32]) -> None:
    """Writes the devices (N,) as a split file: one entry an accelerator, one for the pooled CPUs.

    Raises:
        FileProblem: the file cannot be written.
    """
    entries = [{"nodes": sorted(record.ids[devices == device].tolist())} for device in range(record.num_devices)]
    count = record.num_accelerators
    write_json_atomic(path, {"cpus": entries[count:], "fpgas": entries[:count]}, indent=1)
