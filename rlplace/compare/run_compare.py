"""`run_compare`: the command `rlplace compare`, from words to a table and saved placements."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplace.cluster import reach
from rlplace.compare.comparison import Comparison, Row
from rlplace.compare.equal_budgets import OP_ORDER, CompareConfig, check_on, compare
from rlplace.compare.pytorch_baselines import BASELINES, pytorch_baselines
from rlplace.errors import FileProblem, check_known, refuse_if
from rlplace.files import os_errors
from rlplace.measure import Placement, Problem, Simulator, save_placement
from rlplace.measure.timing.threads import one_thread_here
from rlplace.report.console import WIDTH, Progress, compare_table, make_progress, show
from rlplace.say import counted, format_seconds
from rlplace.search.rules.baselines import best_single
from rlplace.session.calibrate import calibrated
from rlplace.session.prepare import Steps, prepare
from rlplace.session.setup import AUTO, Setup
from rlplace.store.log import check_store, measuring
from rlplace.training.config import NUM_TIMED, NUM_TRACED
from rlplace.training.method_choice import METHODS
from rlplace.workloads import default_size


def split_methods(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Search methods, and PyTorch baselines, in a comma-separated list; `all` is all of both.

    Raises:
        UnknownName: no such method.
        InvalidValue: nothing is named.
    """
    words = method_words(text, (OP_ORDER, *METHODS, *BASELINES))
    words = ("all", *BASELINES) if "all" in words else words
    return tuple(word for word in words if word not in BASELINES), tuple(word for word in words if word in BASELINES)


def method_words(text: str, known: Collection[str], what: str = "method") -> tuple[str, ...]:
    """The words of a comma-separated list, each of them `all` or known.

    Raises:
        UnknownName: a name is neither; the argument `what` is the kind of name in the message.
        InvalidValue: nothing is named.
    """
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    refuse_if(not words, "methods", text, "`all`, or names with commas between them", where="compare")
    for word in words:
        check_known(what, word, ("all", *known))
    return words


@dataclass(frozen=True)
class Output:
    """Where a comparison goes, besides `--json`."""

    save: Path | None = None
    """A folder for `METHOD-SEED.placement.json`."""
    plot: Path | None = None
    """A PNG file for the best so far of every search."""
    is_quiet: bool = False
    """No progress."""
    is_table: bool = True
    """Print the table."""

    def check(self) -> None:
        """Makes the folders.

        Raises:
            InvalidValue: the picture is not called `.png`.
            FileProblem: something else is in the place of a folder or of the picture, or a folder cannot be made.
        """
        refuse_if(
            self.plot is not None and self.plot.suffix.lower() != ".png",
            "plot",
            str(self.plot),
            "a file name that ends in .png",
            where="compare",
        )
        if self.plot is not None and self.plot.is_dir():
            raise FileProblem(self.plot, "is a folder: name a file in it.")
        for what, folder in (("placements", self.save), ("pictures", self.plot and self.plot.parent)):
            if folder is not None:
                with os_errors(folder, f"a folder for {what}"):
                    folder.mkdir(parents=True, exist_ok=True)

    def conclude(self, comparison: Comparison, problem: Problem, progress: Progress) -> dict[str, Any]:
        """Keeps placements and picture, and prints the table on stderr, as asked; returns the object of `--json`.

        Args:
            comparison: with all rows.
            problem: whose step times the rows have.
            progress: ends here.

        Raises:
            FileProblem: a file cannot be written.
        """
        for row in comparison.rows:
            if row.plan is not None and self.save is not None:
                path = self.save / f"{row.method}-{row.seed}.placement.json"
                save_placement(Placement.of(problem, row.plan, row.method), path)
        if self.plot is not None:
            draw_rows(problem, comparison, self.plot)
        progress.close()
        result = comparison.to_dict()
        if self.is_table:
            is_file = not sys.stdout.isatty() and "COLUMNS" not in os.environ
            show(compare_table(result), **({"width": WIDTH} if is_file else {}))
        return result


@one_thread_here()
def run_compare(
    setup: Setup,
    output: Output,
    config: CompareConfig,
    baselines: tuple[str, ...],
    *,
    cluster: str = "off",
) -> dict[str, Any]:
    """Compares on a workload, prints the table, keeps the placements; returns the object of `--json`.

    Args:
        setup: the problem to place.
        output: where the rows go.
        config: the methods, and the budget of each.
        baselines: rows of PyTorch baselines.
        cluster: whose workers search: `off`, `auto` or an address.

    Raises:
        RunnerError: another search measures here, and `is_waiting` is false; or the cluster is lost.
        InvalidValue: the number of micro-batches is to be chosen for throughput.
        UserError: the workload cannot be built or captured, or a file cannot be written.
    """
    host, spec, is_auto = setup.host, setup.spec, setup.asked.is_auto
    refuse_if(
        is_auto and config.objective == "throughput",
        "micro_batches",
        "auto",
        "a number with --objective throughput",
        where="compare",
        hint="Their number is chosen by the latency of a step: give a number, --micro-batches K.",
    )
    check_on(host, config, is_spread=cluster != "off")
    output.check()
    if not host.is_simulated:
        check_store(setup.store)
    progress = make_progress(is_quiet=output.is_quiet)
    with (
        reach(cluster, say=progress.say) as workers,
        measuring(host, setup.store, workload=str(spec), say=progress.say, is_waiting=setup.is_waiting) as log,
    ):
        steps = Steps(spec, host, setup.workload_seed, setup.asked)
        prepared = prepare(steps, progress.say, setup, evaluations=config.evaluations)
        problem, known = prepared.problem, None
        if not host.is_simulated:
            problem, known = calibrated(
                problem,
                NUM_TRACED if config.is_traced else NUM_TIMED,
                seed=config.seed,
                say=progress.say,
                log=log,
                isolated=config.isolated,
                is_traced=config.is_traced,
            )
        with pytorch_baselines(
            problem,
            None if spec.is_file else spec,
            baselines,
            default_size=default_size(host),
            seed=setup.workload_seed,
            say=progress.say,
            asked=prepared.cut[1],
        ) as others:
            chosen = ("micro_batches",) * is_auto + ("shards",) * (setup.asked.split == AUTO)
            comparison = compare(
                problem,
                dataclasses.replace(config, chosen=chosen),
                workload=str(spec),
                others=others,
                on_row=lambda row: progress.say(say_row(row)),
                log=log,
                cluster=workers,
                known=known,
            )
    told = {"seed": config.seed, "workload_seed": setup.workload_seed, "micro_batches": prepared.to_dict()}
    return output.conclude(comparison, problem, progress) | told


def draw_rows(problem: Problem, comparison: Comparison, path: Path) -> None:
    """Writes the best step so far of all methods that search, over placements and seconds.

    Placements are those scored by the simulator; where the rows are judged by a hidden truth, those measured.

    Args:
        problem: whose step times the rows have.
        comparison: with the rows.
        path: of the PNG file.

    Raises:
        FileProblem: the file cannot be written.
    """
    from rlplace.report import Curve, save_best_so_far_png

    simulator = Simulator(problem, objective="throughput" if comparison.objective == "throughput" else "latency")
    single_s = float(simulator.step_times(best_single(problem, simulator)[None])[0])
    searched = {row.method for row in comparison.rows if row.history}
    curves = [
        Curve(
            row.method,
            [best.to_list() for best in row.history],
            (row.evaluations, row.measured or 0, row.plan_s),
            single_s,
        )
        for row in comparison.rows
        if row.method in searched  # also a seed that found nothing
    ]
    kind = "measured" if comparison.truth else "simulated"
    save_best_so_far_png(path, curves, title=f"{comparison.workload} on {comparison.host}", kind=kind)


def say_row(row: Row) -> str:
    """A row as a line of progress."""
    outcome = format_seconds(row.value_s) if row.ok else f"{row.status}: {row.why}"
    spent = f", {counted(row.evaluations, 'evaluation')} in {format_seconds(row.plan_s)}" if row.evaluations else ""
    return f"{row.method} (seed {row.seed}): {outcome}{spent}"
