"""`run_compare`: what `rlplace compare` does, from words to a table and saved placements.

`run_true_compare`: what `rlplace compare --true` does, from words to a table.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.cluster import reach
from rlplace.compare.comparison import Comparison, Row
from rlplace.compare.equal_budgets import OP_ORDER, CompareConfig, check_measured, compare
from rlplace.compare.hidden_truth import ROWS, TrueConfig, compare_true
from rlplace.compare.pytorch_baselines import BASELINES, pytorch_baselines
from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.format import format_seconds
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.measure.hosts.host import Host
from rlplace.measure.placement import Placement, save_placement
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.threads import one_thread_here
from rlplace.measure.truth import Truth, check_no_gangs, true_problem
from rlplace.report.console import make_progress
from rlplace.report.printed import compare_table
from rlplace.runs.measuring import measuring
from rlplace.search.rules import baselines
from rlplace.session.calibrate import calibrated
from rlplace.session.cut import WHOLE, CutOptions
from rlplace.session.prepare import prepare
from rlplace.session.steps import Steps
from rlplace.store.log import check_store
from rlplace.training.methods import METHODS
from rlplace.workloads import WorkloadSpec, default_size

if TYPE_CHECKING:
    from rlplace.report.console import Progress

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
    workload_seed: int = 0,
    num_groups: int = 256,
    grouping: str = "heavy-edge",
    constraints: Constraints | None = None,
    asked: CutOptions = WHOLE,
    save: Path | None = None,
    plot: Path | None = None,
    store: str = "off",
    is_waiting: bool = True,
    cluster: str = "off",
    is_quiet: bool = False,
    is_table: bool = True,
) -> dict[str, Any]:
    """Compares on a workload, prints the table, keeps the placements; returns what `--json` prints.

    Args:
        spec: the workload.
        host: where.
        config: who takes part and what each may spend.
        baselines: rows of PyTorch baselines.
        workload_seed: of the workload's weights and inputs.
        num_groups: groups that searches move.
        grouping: the rule that makes them.
        constraints: the user's pins and exclusions.
        asked: how the batch is cut.
        save: a folder for `METHOD-SEED.placement.json`.
        plot: a PNG file for the best so far of every search.
        store: where measured step times are kept: `auto`, `off` or a file.
        is_waiting: wait for another search that measures on this machine, instead of giving up.
        cluster: whose workers search: `off`, `auto` or an address.
        is_quiet: no progress.
        is_table: print the table.

    Raises:
        RunnerError: another search measures here, and nobody wants to wait; or the cluster is lost.
        InvalidValue: the number of micro-batches is to be chosen for throughput.
        UserError: the workload cannot be built or captured, or `save` or `plot` cannot be written to.
    """
    if asked.is_auto and config.objective == "throughput":
        hint = "How many there are is chosen by the latency of a step: give a number, --micro-batches K."
        raise InvalidValue("micro_batches", "auto", "a number with --objective throughput", where="compare", hint=hint)
    check_measured(config, host, is_spread=cluster != "off")
    check_save(save)
    check_plot(plot)
    if not host.is_simulated:
        check_store(store)
    progress = make_progress(is_quiet=is_quiet)
    with (
        reach(cluster, say=progress.say) as workers,
        measuring(host, store, workload=str(spec), say=progress.say, is_waiting=is_waiting) as log,
    ):
        steps = Steps(spec, host, workload_seed, asked)
        prepared = prepare(
            steps,
            progress,
            seed=config.seed,
            num_groups=num_groups,
            grouping=grouping,
            constraints=constraints,
            evaluations=config.evaluations,
            isolated=config.isolated,
        )
        problem, config = prepared.problem, dataclasses.replace(config, is_count_chosen=asked.is_auto)
        known = None
        if not host.is_simulated:
            problem, known = calibrated(
                problem, NUM_CALIBRATED, seed=config.seed, say=progress.say, log=log, isolated=config.isolated
            )
        with pytorch_baselines(
            problem,
            None if spec.is_file else spec,
            baselines,
            default_size=default_size(host),
            seed=workload_seed,
            say=progress.say,
        ) as others:
            comparison = compare(
                problem,
                config,
                workload=str(spec),
                others=others,
                on_row=lambda row: progress.say(say_row(row)),
                log=log,
                cluster=workers,
                known=known,
            )
    if save is not None:
        save_rows(problem, comparison.rows, save)
    if plot is not None:
        draw_rows(problem, comparison, plot)
    told = {"seed": config.seed, "workload_seed": workload_seed, "micro_batches": prepared.to_dict()}
    return show(comparison, progress, is_table=is_table) | told


def check_save(save: Path | None) -> None:
    """Makes the folder for placements.

    Raises:
        FileProblem: something else is in its place, or it cannot be made.
    """
    if save is not None:
        _make_folder(save, "placements")


def check_plot(plot: Path | None) -> None:
    """Makes the folder of a picture.

    Raises:
        InvalidValue: it is not called `.png`.
        FileProblem: a folder is in its place, or its own cannot be made.
    """
    if plot is None:
        return
    if plot.suffix.lower() != ".png":
        raise InvalidValue("plot", str(plot), "a file name that ends in .png", where="compare")
    if plot.is_dir():
        raise FileProblem(plot, "is a folder: name a file in it.")
    _make_folder(plot.parent, "pictures")


def _make_folder(folder: Path, what: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileProblem(folder, f"cannot be a folder for {what}: {error.strerror or error}.") from error


def draw_rows(problem: Problem, comparison: Comparison, path: Path) -> None:
    """Writes the best step so far of all methods that search, over placements and seconds.

    Placements are those scored by the simulator; beside a hidden truth, those measured.

    Args:
        problem: whose step times the rows have: beside a hidden truth, the true one.
        comparison: with the rows.
        path: of the PNG file.

    Raises:
        FileProblem: the file cannot be written.
    """
    from rlplace.report import Curve, save_best_so_far_png

    simulator = Simulator(problem, objective="throughput" if comparison.objective == "throughput" else "latency")
    single_s = float(simulator.step_times(baselines.best_single(problem, simulator)[None])[0])
    searched = {row.method for row in comparison.rows if row.history}
    curves = [
        Curve(row.method, [best.to_list() for best in row.history], _spent(row), single_s)
        for row in comparison.rows
        if row.method in searched  # also a seed that found nothing
    ]
    kind = "measured" if comparison.truth else "simulated"
    save_best_so_far_png(path, curves, title=f"{comparison.workload} on {comparison.host}", kind=kind)


def _spent(row: Row) -> tuple[int, int, float]:
    """Evaluations, measurements and seconds at the end."""
    return row.evaluations, row.measured or 0, row.plan_s


def save_rows(problem: Problem, rows: tuple[Row, ...], folder: Path) -> None:
    """Writes `METHOD-SEED.placement.json` for every row that has a plan."""
    for row in rows:
        if row.plan is not None:
            placement = Placement.of(problem, row.plan, row.method)
            save_placement(placement, folder / f"{row.method}-{row.seed}.placement.json")


def show(comparison: Comparison, progress: Progress, *, is_table: bool) -> dict[str, Any]:
    """Prints the table on stderr, if it is asked for; returns what `--json` prints."""
    from rlplace.report.console import CleanConsole

    progress.close()
    result = comparison.to_dict()
    if is_table:
        console = CleanConsole(stderr=True, highlight=False, emoji=False)
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


def true_config(
    truth: str | None,
    measured: int | None,
    methods: str,
    evaluations: int | None,
    seconds: float | None,
    *,
    seeds: int | None,
    objective: str | None,
    seed: int | None = None,
) -> TrueConfig:
    """What `--true` and `--measured` ask for.

    Args:
        truth: `KIND:SEED`.
        measured: plans that each row may measure.
        methods: `all`, or names with commas between them.
        evaluations: placements that each row may simulate.
        seconds: of all rows.
        seeds: what `--seeds` says; must be None.
        objective: what `--objective` says; latency or None.
        seed: of every row's draws; None for that of the truth.

    Raises:
        UserError: one of the two without the other, an option that does not go with them, or a mistake in one.
    """
    if truth is None:
        raise InvalidValue(
            "true", None, "KIND:SEED beside --measured", where="compare", hint="For example: --true hard:0."
        )
    if measured is None:
        raise InvalidValue(
            "measured", None, "a number of plans beside --true", where="compare", hint="For example: --measured 16."
        )
    if seeds is not None:
        hint = "A row draws from the seed of --true, or from --seed."
        raise InvalidValue("seeds", seeds, "none beside --true", where="compare", hint=hint)
    if objective not in (None, "latency"):
        raise InvalidValue("objective", objective, "latency beside --true", where="compare")
    words = method_words(methods, ROWS, "method with a hidden truth")
    return TrueConfig(Truth.parse(truth), measured, words, evaluations, seconds, seed=seed)


@one_thread_here()
def run_true_compare(
    spec: WorkloadSpec,
    host: Host,
    config: TrueConfig,
    *,
    workload_seed: int = 0,
    num_groups: int = 256,
    grouping: str = "heavy-edge",
    constraints: Constraints | None = None,
    asked: CutOptions = WHOLE,
    save: Path | None = None,
    plot: Path | None = None,
    cluster: str = "off",
    is_quiet: bool = False,
    is_table: bool = True,
) -> dict[str, Any]:
    """Compares on a workload, prints the table, keeps the placements; returns what `--json` prints.

    Args:
        spec: the workload.
        host: a simulated one.
        config: who takes part and what is true.
        workload_seed: of the workload's weights and inputs.
        num_groups: groups that searches move.
        grouping: the rule that makes them.
        constraints: the user's pins and exclusions.
        asked: how the batch is cut.
        save: a folder for `METHOD-SEED.placement.json`.
        plot: where a picture of the best measured step so far goes.
        cluster: whose workers have a row each: `off`, `auto` or an address.
        is_quiet: no progress.
        is_table: print the table.

    Raises:
        UserError: the host is real or has gangs, the workload cannot be built or captured, or `save` cannot be
            written to.
    """
    if not host.is_simulated:
        raise InvalidValue(
            "host",
            host.name,
            "a simulated host beside --true",
            where="compare",
            hint="Give --host a preset (`rlplace hosts` lists them): on this machine the truth is measured.",
        )
    check_no_gangs(host)
    check_save(save)
    check_plot(plot)
    progress = make_progress(is_quiet=is_quiet)
    steps = Steps(spec, host, workload_seed, asked)
    with reach(cluster, say=progress.say) as workers:
        prepared = prepare(
            steps,
            progress,
            seed=config.seed or 0,
            num_groups=num_groups,
            grouping=grouping,
            constraints=constraints,
            evaluations=config.evaluations,
        )
        problem = prepared.problem
        progress.say(f"truth {config.truth}")
        comparison = compare_true(
            problem,
            config,
            workload=str(spec),
            on_row=lambda row: progress.say(say_row(row)),
            cluster=workers,
        )
    if save is not None:
        save_rows(problem, comparison.rows, save)
    if plot is not None:
        draw_rows(true_problem(problem, config.truth), comparison, plot)
    told = {"seed": config.drawn_from, "workload_seed": workload_seed, "micro_batches": prepared.to_dict()}
    return show(comparison, progress, is_table=is_table) | told
