"""`run_compare`: what `rlplace compare` does, from words to a table and saved placements."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.compare.pytorch_baselines import BASELINES, pytorch_baselines
from rlplace.compare.row import Comparison, Row
from rlplace.compare.run import OP_ORDER, CompareConfig, compare
from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.measure.hosts.host import Host
from rlplace.measure.placement import Placement, save_placement
from rlplace.measure.problem import Problem
from rlplace.measure.run.threads import one_thread_here
from rlplace.report.compare_table import compare_table
from rlplace.report.format import format_seconds
from rlplace.report.progress import make_progress
from rlplace.runs.calibration import calibrated
from rlplace.runs.setup import default_size, graph_for, make_problem
from rlplace.training.methods import METHODS
from rlplace.workloads import WorkloadSpec

if TYPE_CHECKING:
    from rlplace.report.progress import Progress

NUM_CALIBRATED = 12
"""Placements measured on a real host to fit the simulator, before anything is searched on it."""


WIDTH = 120
"""Columns of a table that goes to a file."""


def split_methods(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Search methods, and PyTorch baselines, in a comma-separated list; `all` is all of both.

    Raises:
        UnknownName: no such method.
        InvalidValue: nothing is named.
    """
    words = method_words(text, (OP_ORDER, *METHODS, *BASELINES))
    if "all" in words:
        return ("all",), tuple(BASELINES)
    return tuple(word for word in words if word not in BASELINES), tuple(word for word in words if word in BASELINES)


def method_words(text: str, known: Collection[str], what: str = "method") -> tuple[str, ...]:
    """The words of a comma-separated list, each of them `all` or known.

    Raises:
        UnknownName: one is neither; `what` says what it should have been.
        InvalidValue: nothing is named.
    """
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise InvalidValue("methods", text, "`all`, or names with commas between them", where="compare")
    for word in words:
        if word != "all" and word not in known:
            raise UnknownName(what, word, ("all", *known))
    return words


@one_thread_here()
def run_compare(
    spec: WorkloadSpec,
    host: Host,
    config: CompareConfig,
    baselines: tuple[str, ...],
    *,
    seed: int = 0,
    num_groups: int = 256,
    grouping: str = "heavy-edge",
    constraints: Constraints | None = None,
    save: Path | None = None,
    is_quiet: bool = False,
) -> dict[str, Any]:
    """Compares on a workload, prints the table, keeps the placements; returns what `--json` prints.

    Args:
        spec: the workload.
        host: where.
        config: who takes part and what each may spend.
        baselines: rows of PyTorch baselines.
        seed: of the workload.
        num_groups: groups that searches move.
        grouping: the rule that makes them.
        constraints: the user's pins and exclusions.
        save: a folder for `METHOD-SEED.placement.json`.
        is_quiet: no progress.

    Raises:
        UserError: the workload cannot be built or captured, or `save` cannot be written to.
    """
    check_save(save)
    progress = make_progress(is_quiet=is_quiet)
    graph = graph_for(spec, host, seed)
    progress.say(f"{spec}: {graph.num_ops} ops, {graph.num_edges} edges on {host.name}")
    problem = make_problem(graph, host, num_groups, progress, spec=spec, grouping=grouping, constraints=constraints)
    if not host.is_simulated:
        problem = calibrated(problem, NUM_CALIBRATED, seed=seed, say=progress.say)
    with pytorch_baselines(
        problem, None if spec.is_file else spec, baselines, default_size=default_size(host), seed=seed, say=progress.say
    ) as others:
        comparison = compare(
            problem, config, workload=str(spec), others=others, on_row=lambda row: progress.say(say_row(row))
        )
    if save is not None:
        save_rows(problem, comparison.rows, save)
    return show(comparison, progress, is_quiet=is_quiet)


def check_save(save: Path | None) -> None:
    """Makes the folder for placements.

    Raises:
        FileProblem: something else is in its place, or it cannot be made.
    """
    if save is None:
        return
    try:
        save.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileProblem(save, f"cannot be a folder for placements: {error.strerror or error}.") from error


def save_rows(problem: Problem, rows: tuple[Row, ...], folder: Path) -> None:
    """Writes `METHOD-SEED.placement.json` for every row that has a plan."""
    for row in rows:
        if row.plan is not None:
            placement = Placement.of(problem, row.plan, row.method)
            save_placement(placement, folder / f"{row.method}-{row.seed}.placement.json")


def show(comparison: Comparison, progress: Progress, *, is_quiet: bool) -> dict[str, Any]:
    """Prints the table on stderr; returns what `--json` prints."""
    from rich.console import Console

    progress.close()
    result = comparison.to_dict()
    if not is_quiet:
        console = Console(stderr=True, highlight=False)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = WIDTH
        console.print(compare_table(result))
    return result


def say_row(row: Row) -> str:
    """A row as a line of progress."""
    outcome = format_seconds(row.value_s) if row.ok else f"{row.status}: {row.why}"
    if not row.evaluations:
        return f"{row.method} (seed {row.seed}): {outcome}"
    word = "evaluation" if row.evaluations == 1 else "evaluations"
    return f"{row.method} (seed {row.seed}): {outcome}, {row.evaluations:,} {word} in {format_seconds(row.plan_s)}"
