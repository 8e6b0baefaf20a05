"""`rlplace compare`: every method on one problem, at equal budgets, beside a proven bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from rlplace.cli.arguments import Batched, Grouped, Placing, Seed, Stored, check_workload, given_options, print_json
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
    from rlplace.partitioning import is_published_file, run_published

    num_seeds = CompareConfig.seeds if seeds is None else seeds
    minimised = CompareConfig.objective if objective is None else objective
    if minimised not in OBJECTIVES:
        raise UnknownName("objective", minimised, OBJECTIVES)
    is_published = spec.is_file and is_published_file(spec.path)
    found = None if is_published else placing.find_host(host or "auto")
    if found is None:
        if host is not None:
            raise InvalidValue(
                "host", host, "none", where="compare", hint="A dnn-partitioning file carries its own host."
            )
        if true is not None or measured is not None:
            field, given = ("true", true) if true is not None else ("measured", measured)
            hint = "A dnn-partitioning file says what its steps take."
            raise InvalidValue(field, given, "none with such a file", where="compare", hint=hint)
        if cluster != "off":
            hint = "Problems of the published benchmark are solved on this machine."
            raise InvalidValue("cluster", cluster, "off with such a file", where="compare", hint=hint)
        if asked.count != 1:
            hint = "A dnn-partitioning file holds a step as it was cut by others."
            raise InvalidValue("micro_batches", asked.count, "1 with such a file", where="compare", hint=hint)
        result = run_published(
            spec.path,
            minimised,
            methods,
            evaluations=evaluations,
            seconds=seconds,
            seeds=num_seeds,
            seed=seed,
            save=save,
            plot=plot,
            is_quiet=quiet,
            is_table=not (quiet and json),
        )
    elif true is not None or (measured is not None and found.is_simulated):
        from rlplace.compare.run_compare import run_true_compare, true_config

        drawn = seed if "seed" in given_options() else None
        hidden = true_config(
            true, measured, methods, evaluations, seconds, seeds=seeds, objective=objective, seed=drawn
        )
        result = run_true_compare(
            spec,
            found,
            hidden,
            workload_seed=workload_seed,
            num_groups=grouping.num_groups,
            grouping=grouping.word(asked),
            constraints=placing.constraints(found),
            asked=asked,
            save=save,
            plot=plot,
            cluster=cluster,
            is_quiet=quiet,
            is_table=not (quiet and json),
        )
    else:
        if minimised not in ("latency", "throughput"):
            raise InvalidValue(
                "objective",
                minimised,
                "latency or throughput",
                where="compare",
                hint="max-load and piece-latency are for files of the published benchmark.",
            )
        from rlplace.compare.run_compare import run_compare, split_methods

        searches, baselines = split_methods(methods)
        config = CompareConfig(
            searches,
            evaluations,
            seconds,
            num_seeds,
            minimised,
            isolated=False if in_process else None,
            seed=seed,
            measured=measured,
        )
        result = run_compare(
            spec,
            found,
            config,
            baselines,
            workload_seed=workload_seed,
            num_groups=grouping.num_groups,
            grouping=grouping.word(asked),
            constraints=placing.constraints(found),
            asked=asked,
            save=save,
            plot=plot,
            cluster=cluster,
            store=storing.store,
            is_waiting=not storing.no_wait,
            is_quiet=quiet,
            is_table=not (quiet and json),
        )
    if json:
        print_json(result)
    if result["interrupted"]:
        raise KeyboardInterrupt
    check_any_ran(result["rows"])


def check_any_ran(rows: Sequence[Mapping[str, Any]]) -> None:
    """Ends a comparison in which methods failed and nothing came to a step time; says what the first one failed of.

    Args:
        rows: as `--json` prints them.

    Raises:
        RunnerError: no row is `ok`, and one or more are `error`.
    """
    failed = [row for row in rows if row["status"] == "error"]
    if failed and not any(row["status"] == "ok" for row in rows):
        raise RunnerError(f"no method came to a placement that runs; {failed[0]['method']}: {failed[0].get('why', '')}")
