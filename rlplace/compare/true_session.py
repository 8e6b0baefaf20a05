"""`run_true_compare`: what `rlplace compare --true` does, from words to a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlplace.cluster import reach
from rlplace.compare.session import check_plot, check_save, draw_rows, method_words, save_rows, say_row, show
from rlplace.compare.true import TrueConfig, compare_true
from rlplace.compare.true_rows import ROWS
from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.measure.hosts.host import Host
from rlplace.measure.timing.threads import one_thread_here
from rlplace.measure.truth import Truth, check_no_gangs, true_problem
from rlplace.report.console import make_progress
from rlplace.runs.micro_batches import WHOLE, CutOptions
from rlplace.runs.prepared import prepare
from rlplace.runs.setup import Steps
from rlplace.workloads import WorkloadSpec


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
