"""`rlplace compare`: every method on one problem, at equal budgets, beside a proven bound.

`rlplace simulate`: the simulated step time of one placement. `rlplace measure`: the same, run here.

`rlplace fidelity`: how far the simulator can be trusted on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from rlplace.cli.option_groups import (
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
from rlplace.say import format_ms, say


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
    trace: bool = False,
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
        storing: whether measurements are kept
        host: `auto` (the default), `cores`, `cores:2x4`, `cuda`, `cuda/2`, `cuda+cpu`, a preset, or a host file; a
            dnn-partitioning file has its own
        methods: `all`, or names with commas between them
        evaluations: placements that each method may score with each seed
        seconds: wall time of all methods and seeds together; 60 where no budget is given
        seeds: how many seeds each method that draws is run with, from `--seed` on; one by default
        objective: latency (the default), throughput, or for dnn-partitioning files max-load or piece-latency
        true: KIND:SEED, a truth that methods do not see (moderate, hard, misfit or in-place): on a preset, step times
            are off by factors drawn from it, each method measures a few plans, and its score is the true time of the
            one it names
        measured: plans that `learned` measures on this machine; with --true, plans that each method may measure
        trace: with --true, measurements also say when each op and each transfer of a step began and ended
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
    from rlplace.compare import OBJECTIVES, CompareConfig
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
            ("trace", trace, False, "A dnn-partitioning file says what its steps take."),
            ("cluster", cluster, "off", "Problems of the published benchmark are solved on this machine."),
            ("micro_batches", asked.count, 1, "A dnn-partitioning file holds a step as it was cut by others."),
        ):
            if value != expected:
                raise InvalidValue(
                    field,
                    value,
                    f"{'none' if expected is None else expected} with such a file",
                    where="compare",
                    hint=hint,
                )
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
        if true is not None or trace or (measured is not None and setup.host.is_simulated):
            drawn = seed if "seed" in given_options() else None
            hidden = true_config(
                true,
                measured,
                methods,
                evaluations,
                seconds,
                seeds=seeds,
                objective=objective,
                seed=drawn,
                is_traced=trace,
            )
        elif minimised not in ("latency", "throughput"):
            raise InvalidValue(
                "objective",
                minimised,
                "latency or throughput",
                where="compare",
                hint="max-load and piece-latency are for files of the published benchmark.",
            )
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


def simulate(
    workload: tyro.conf.Positional[str],
    placing: Placing,
    batch: Batched,
    placement: Path | None = None,
    host: str = "auto",
    workload_seed: Seed = 0,
    timeline: Path | None = None,
    json: bool = False,
) -> None:
    """Simulate one step of a placement.

    Args:
        workload: a name with an optional size, `package.module:function`, or for a simulated host a graph file
        placing: where ops may run
        batch: how the batch of a step is cut
        placement: a placement file; without one, everything runs on the best single device
        host: `auto`, `cores`, `cores:2x4`, `cuda`, `cuda/2`, `cuda+cpu`, a preset, or a host file
        workload_seed: of the workload's weights and inputs
        timeline: write a Chrome trace of the simulated step here, or a picture of it if the name ends in .png
        json: print one JSON object on stdout
    """
    from rlplace.compare.simulated_and_measured import time_placement

    setup = setup_of(workload, host, placing, batch, workload_seed=workload_seed)
    show_step_time(time_placement(setup, placement, is_measured=False, timeline=timeline), json)


def show_step_time(result: dict[str, Any], json: bool) -> None:
    """Prints the results of `simulate` and `measure`: as JSON on stdout, or in a line for people."""
    if json:
        print_json(result)
    elif result["status"] == "ok":
        spread = f" ± {format_ms(result['spread_s'])}" if result["kind"] == "measured" else ""
        say(
            f"{result['placement']}, {result['kind']}: {format_ms(result['step_time_s'])} ms{spread}, "
            f"bound {format_ms(result['lower_bound_s'])} ms ({result['lower_bound']})"
        )
    else:
        say(f"{result['placement']}, {result['kind']}: {result['status']}: {result['why']}")


def measure(
    workload: tyro.conf.Positional[str],
    placing: Placing,
    batch: Batched,
    storing: Stored,
    placement: Path | None = None,
    host: str = "auto",
    seed: Seed = 0,
    workload_seed: Seed = 0,
    timeline: Path | None = None,
    in_process: bool = False,
    json: bool = False,
) -> None:
    """Run steps of a placement on this machine and time them.

    Args:
        workload: a name with an optional size, or `package.module:function`
        placing: where ops may run
        batch: how the batch of a step is cut
        storing: whether measurements are kept
        placement: a placement file; without one, everything runs on the best single device
        host: `auto`, `cores`, `cores:2x4`, `cuda`, `cuda/2` or `cuda+cpu`
        seed: of random ops
        workload_seed: of the workload's weights and inputs
        timeline: write a Chrome trace of a measured and of a simulated step here; a picture of the measured one if the
            name ends in .png
        in_process: run in this process instead of a worker: for debuggers; a placement that crashes ends it
        json: print one JSON object on stdout
    """
    from rlplace.compare.simulated_and_measured import time_placement

    setup = setup_of(
        workload,
        host,
        placing,
        batch,
        storing=storing,
        in_process=in_process,
        seed=seed,
        workload_seed=workload_seed,
    )
    show_step_time(time_placement(setup, placement, is_measured=True, timeline=timeline), json)


def fidelity(
    workload: tyro.conf.Positional[str],
    placing: Placing,
    batch: Batched,
    storing: Stored,
    host: str = "auto",
    placements: int = 40,
    fit: int = 16,
    seed: Seed = 0,
    workload_seed: Seed = 0,
    plot: Path = Path("fidelity.png"),
    in_process: bool = False,
    json: bool = False,
) -> None:
    """Simulate and measure many unseen placements: how far the simulator can be trusted here.

    Args:
        workload: a name with an optional size, or `package.module:function`
        placing: where ops may run
        batch: how the batch of a step is cut
        storing: whether measurements are kept
        host: `auto`, `cores`, `cores:2x4`, `cuda`, `cuda/2` or `cuda+cpu`
        placements: how many unseen placements
        fit: how many other placements the simulator is calibrated on first
        seed: of the placements that are drawn, and of random ops
        workload_seed: of the workload's weights and inputs
        plot: where the scatter plot goes
        in_process: run in this process instead of a worker: for debuggers; a placement that crashes ends it
        json: print one JSON object on stdout
    """
    from rlplace.compare.simulated_and_measured import run_fidelity

    setup = setup_of(
        workload,
        host,
        placing,
        batch,
        storing=storing,
        in_process=in_process,
        seed=seed,
        workload_seed=workload_seed,
    )
    result = run_fidelity(setup, num_placements=placements, num_fit=fit, plot=plot)
    if json:
        print_json(result)
    else:
        say(fidelity_words(result))


def fidelity_words(result: dict[str, Any]) -> str:
    """The words of `fidelity` for people, from its JSON object."""
    overall, ceiling, best, best_ceiling = (
        "none" if result[f"spearman{which}"] is None else f"{result[f'spearman{which}']:.{digits}f}"
        for which, digits in (("", 3), ("_ceiling", 3), ("_best_quartile", 2), ("_ceiling_best_quartile", 2))
    )
    return (
        f"{result['num_placements']} unseen placements, simulated against measured:\n"
        f"  rank correlation {overall} (two measurements of the same placements: {ceiling}); "
        f"among the best quarter {best} ({best_ceiling})\n"
        f"  error of the step time: median {result['median_abs_rel_error']:.1%}, "
        f"90th percentile {result['p90_abs_rel_error']:.1%}\n"
        f"  the simulator's favourite is {result['pick_regret']:.1%} slower than the best measured\n"
        f"  largest error of a device's peak memory {result['peak_bytes_max_rel_error']:.1%}\n"
        f"  scatter plot: {result['plot']}"
    )
