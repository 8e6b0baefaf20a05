"""`rlplace compare`: every method on one problem, at equal budgets, beside a proven bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from rlplace.cli.arguments import (
    Batched,
    Grouped,
    Placing,
    Seed,
    Stored,
    check_workload,
    given_options,
    print_json,
    setup_of,
)
from rlplace.errors import InvalidValue, RunnerError, UnknownName


def compare(
    workload: tyro.conf.Positional[str],
    placing: Placing,
    grouping: Grouped,
    batch: Batched,
    storing: Stored,
    host: str | None = None,
    methods: str = "all",
    evaluations: int | None = None,
    seconds: float | None = None,
    seeds: int | None = None,
    objective: str | None = None,
    true: str | None = None,
    measured: int | None = None,
    seed: Seed = 0,
    workload_seed: Seed = 0,
    save: Path | None = None,
    plot: Path | None = None,
    in_process: bool = False,
    cluster: str = "off",
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Compare search methods, solvers and PyTorch baselines, at equal budgets, beside a proven bound.

    Args:
        workload: a name with an optional size, `package.module:function`, or a graph file
        placing: where ops may run
        grouping: how ops are grouped
        batch: how the batch of a step is cut
        storing: what becomes of what is measured
        host: `auto` (the default), `cores`, `cores:2x4`, `cuda`, `cuda/2`, `cuda+cpu`, a preset, or a host file; a
            dnn-partitioning file has its own
        methods: `all`, or names with commas between them
        evaluations: placements that each method may score with each seed
        seconds: wall time of all methods and seeds together; 60 where no budget is given
        seeds: how many seeds each method that draws is run with, from `--seed` on; one by default
        objective: latency (the default), throughput, or for dnn-partitioning files max-load or piece-latency
        true: KIND:SEED, a truth that methods do not see (moderate, hard or misfit): on a preset, step times are off by
            factors drawn from it, each method measures a few plans, and its score is the true time of the one it names
        measured: plans that `learned` measures on this machine; with --true, plans that each method may measure
        seed: of every method's draws and of random ops; with --true, that of the truth where none is given
        workload_seed: of the workload's weights and inputs
        save: write METHOD-SEED.placement.json into this folder (and split files for dnn-partitioning files)
        plot: write a picture of every search's best so far, over placements and seconds, to this PNG file
        in_process: measure in this process instead of a worker: for debuggers; a placement that crashes ends it
        cluster: whose workers search: off, auto (the Ray cluster that runs here, else one that is started here), or the
            ADDRESS of one
        json: print one JSON object on stdout
        quiet: no progress; the table stays, but beside `--json`
    """
    spec, asked = check_workload(workload), batch.parse()
    from rlplace.compare.comparison import OBJECTIVES
    from rlplace.compare.equal_budgets import CompareConfig
    from rlplace.compare.run_compare import Output, run_compare, run_true_compare, split_methods, true_config
    from rlplace.partitioning import is_published_file, run_published

    minimised = "latency" if objective is None else objective
    if minimised not in OBJECTIVES:
        raise UnknownName("objective", minimised, OBJECTIVES)
    output = Output(save, plot, is_quiet=quiet, is_table=not (quiet and json))
    if spec.is_file and is_published_file(spec.path):
        for field, value, expected, hint in (
            ("host", host, None, "A dnn-partitioning file carries its own host."),
            ("true", true, None, "A dnn-partitioning file says what its steps take."),
            ("measured", measured, None, "A dnn-partitioning file says what its steps take."),
            ("cluster", cluster, "off", "Problems of the published benchmark are solved on this machine."),
            ("micro_batches", asked.count, 1, "A dnn-partitioning file holds a step as it was cut by others."),
        ):
            if value != expected:
                allowed = f"{'none' if expected is None else expected} with such a file"
                raise InvalidValue(field, value, allowed, where="compare", hint=hint)
        result = run_published(
            spec.path,
            minimised,
            methods,
            evaluations=evaluations,
            seconds=seconds,
            seeds=1 if seeds is None else seeds,
            seed=seed,
            output=output,
        )
    else:
        setup = setup_of(
            workload,
            host or "auto",
            placing,
            batch,
            grouping,
            storing,
            in_process=in_process,
            seed=seed,
            workload_seed=workload_seed,
        )
        if true is not None or (measured is not None and setup.host.is_simulated):
            drawn = seed if "seed" in given_options() else None
            hidden = true_config(
                true, measured, methods, evaluations, seconds, seeds=seeds, objective=objective, seed=drawn
            )
        elif minimised not in ("latency", "throughput"):
            hint = "max-load and piece-latency are for files of the published benchmark."
            raise InvalidValue("objective", minimised, "latency or throughput", where="compare", hint=hint)
        else:
            hidden = None
            searches, baselines = split_methods(methods)
            config = CompareConfig(
                searches,
                evaluations,
                seconds,
                1 if seeds is None else seeds,
                minimised,
                isolated=setup.isolated,
                seed=seed,
                measured=measured,
            )
        if hidden is not None:
            result = run_true_compare(setup, output, hidden, cluster=cluster)
        else:
            result = run_compare(setup, output, config, baselines, cluster=cluster)
    if json:
        print_json(result)
    if result["interrupted"]:
        raise KeyboardInterrupt
    check_any_ran(result["rows"])


def check_any_ran(rows: Sequence[Mapping[str, Any]]) -> None:
    """Ends a comparison in which methods failed and no row has a step time; gives the first failure.

    Args:
        rows: as `--json` prints them.

    Raises:
        RunnerError: no row is `ok`, and one or more are `error`.
    """
    failed = [row for row in rows if row["status"] == "error"]
    if failed and not any(row["status"] == "ok" for row in rows):
        raise RunnerError(f"no method found a placement that runs; {failed[0]['method']}: {failed[0].get('why', '')}")
