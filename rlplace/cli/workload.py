"""The commands that examine a workload, and keep no run.

`graph`: the ops, work and memory of its step. `advise`: whether it is worth placing on a host. `compare`: every method
on it, at equal budgets, beside a proven bound. `simulate`, `measure`: the step time of one placement. `fidelity`: the
error of the simulator on this machine.
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from rlplace.cli.option_groups import (
    Batched,
    Duration,
    Grouped,
    GroupingOptions,
    Placing,
    Seed,
    Stored,
    answer,
    answer_tables,
    print_json,
    setup_of,
)
from rlplace.errors import InvalidValue, RunnerError, UnknownName, refuse_if
from rlplace.measure import Host, resolve_host
from rlplace.say import format_ms, say
from rlplace.session.setup import CutOptions, check_named, number_only
from rlplace.workloads import WorkloadSpec, parse_workload

if TYPE_CHECKING:
    from rlplace.graphs import OpGraph
    from rlplace.measure import Problem

DEFAULT_HOST = "4xV100-pcie"
"""Whose devices costs are estimated on where no host is named, or the host has no published figures."""
PUBLISHED = "published"
"""Target of the ops of a dnn-partitioning file."""


def graph(
    workload: tyro.conf.Positional[str],
    batch: Batched,
    host: str = DEFAULT_HOST,
    groups: int = GroupingOptions.num_groups,
    top: int = 10,
    workload_seed: Seed = 0,
    dims: str = "",
    dot: Path | None = None,
    dot_ops: int = 500,
    save: Path | None = None,
    json: bool = False,
) -> None:
    """Show the ops, work, memory, critical path and groups of a step.

    Costs are estimated by roofline, on the host's devices or, where it has no published figures (this machine), on
    those of 4xV100-pcie; a file that says how long its ops take brings its own. The output names whose they are. A
    workload named without a size is the small one.

    Args:
        workload: a name with an optional size, `package.module:function`, or a graph file
        batch: how the batch of a step is cut
        host: a preset, `auto`, `cores`, `cuda` or a host file
        groups: groups of ops to aim at
        top: how many targets to list
        workload_seed: of the workload's weights and inputs
        dims: sizes of an ONNX model's dynamic dimensions, e.g. batch=8,sequence=128
        dot: write the graph for Graphviz here
        dot_ops: most ops in that file
        save: write the graph here, as .json or .graphml
        json: print one JSON object on stdout
    """
    spec, sizes, asked = parse_workload(workload), parse_dims(dims), batch.parse()
    from rlplace.graphs import save_graph
    from rlplace.graphs.formats import format_to_write
    from rlplace.graphs.formats.graph_files import save_dot
    from rlplace.measure import Problem
    from rlplace.measure.costs.costs import estimate_costs
    from rlplace.report.console import graph_table, targets_table
    from rlplace.session.prepare import given_costs, judged

    if isinstance(asked.count, str):
        raise number_only(asked.count, "`auto` is chosen by a search: `rlplace train` and `compare` do.")
    check_named(asked)
    for field, value in (("groups", groups), ("top", top), ("dot_ops", dot_ops)):
        if value < 1:
            raise InvalidValue(field, value, "at least 1")
    if save is not None:
        format_to_write(save)
    found = costs_host(resolve_host(host))
    say(f"reading {spec}" if spec.is_file else f"building {spec} and capturing its step")
    captured, capture_s = read_or_capture(spec, sizes, workload_seed, asked.count, asked)
    say(f"{captured.num_ops} ops, {captured.num_edges} edges after {capture_s:.1f} s; estimating and grouping")
    for line in judged(captured):
        say(line)
    problem = published(spec, captured)
    if problem is None:
        costs = given_costs(spec, found, asked.count) or estimate_costs(captured, found)
        problem = Problem.grouped(captured, found, costs, groups)
    asked_for = {"workload": str(spec), "is_file": spec.is_file, "workload_seed": workload_seed}
    facts = describe(problem, top) | asked_for | {"capture_s": capture_s}
    if dot is not None:
        save_dot(captured, dot, max_ops=dot_ops)
    if save is not None:
        save_graph(captured, save)
        if problem.costs.source == "given":
            say(f"{save} holds no times: those that {spec.path} gives its ops stay there")
    answer_tables(
        facts,
        lambda: [graph_table(facts), targets_table(facts["top_targets"], facts["costs_host"])],
        json,
        highlight=True,
    )


def describe(problem: Problem, top: int) -> dict[str, Any]:
    """The object that `rlplace graph --json` prints of a graph on a host."""
    import numpy as np

    from rlplace.graphs.statistics import describe_graph
    from rlplace.measure.bounds import critical_path_s

    op_time_s = problem.costs.op_time_s
    single = int(np.argmin(op_time_s.sum(axis=0)))
    return {
        "schema": 1,
        "fingerprint": problem.graph.fingerprint,
        **asdict(describe_graph(problem.graph, op_time_s.min(axis=1), top=top)),
        "notes": list(problem.graph.notes),
        "num_groups": problem.grouping.num_groups,
        "grouping": problem.grouping.rule,
        "costs_host": problem.host.name,
        "costs_source": problem.costs.source,
        "critical_path_s": critical_path_s(problem),
        "single_device": problem.host.devices[single].name,
        "single_device_s": float(op_time_s[:, single].sum()),
    }


def published(spec: WorkloadSpec, graph: OpGraph) -> Problem | None:
    """The problem of a dnn-partitioning file, whose costs and devices are its own; None for any other workload."""
    if not spec.is_file or set(graph.targets) != {PUBLISHED}:
        return None
    from rlplace.graphs.formats.published import load_dnn_partitioning
    from rlplace.partitioning import is_published_file, published_problem

    # such a graph saved in a format of ours holds no costs
    return published_problem(load_dnn_partitioning(spec.path)) if is_published_file(spec.path) else None


def read_or_capture(
    spec: WorkloadSpec, dims: dict[str, int], seed: int, count: int, asked: CutOptions
) -> tuple[OpGraph, float]:
    """The graph in the workload's file, or of one step of the model that it names, and the seconds that it took.

    No named model is ever allocated; building it and imports do not count as capture.

    Raises:
        InvalidValue: sizes are given without an ONNX model, or the file's batch cannot be cut.
    """
    from rlplace.session.prepare import capture_workload, check_no_split, judge_twin, read_graph

    if spec.is_file:
        check_no_split(spec, asked)
        start = time.perf_counter()
        return read_graph(spec, count, dims), time.perf_counter() - start
    if dims:
        raise InvalidValue("dims", dims, "none: only an ONNX model has dynamic dimensions", where=str(spec))
    from rlplace.workloads import build, without_memory

    try:
        with without_memory():
            workload = build(spec, default_size="small", seed=seed)
    except InvalidValue:
        if not spec.is_function:
            raise
        workload = build(spec, default_size="small", seed=seed)  # it may read values, which fake tensors do not have
    verdict = None if count == 1 else judge_twin(spec, workload, count, asked, seed)
    start = time.perf_counter()
    return capture_workload(workload, count, asked, verdict), time.perf_counter() - start


def costs_host(host: Host) -> Host:
    """The host itself if the figures of its devices are known, else the default preset."""
    has_figures = all(device.peak_flops_per_s and device.memory_bandwidth_bytes_per_s > 0 for device in host.devices)
    return host if has_figures else resolve_host(DEFAULT_HOST)


def parse_dims(text: str) -> dict[str, int]:
    """Sizes in `batch=8,sequence=128`.

    Raises:
        InvalidValue: anything else.

    >>> parse_dims("batch=8,input_ids.1=128")
    {'batch': 8, 'input_ids.1': 128}
    """
    sizes: dict[str, int] = {}
    for item in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*(.+?)\s*=\s*([0-9]{1,12})\s*", item)
        if match is None:
            raise InvalidValue("dims", text, "sizes such as batch=8,sequence=128")
        sizes[match[1]] = int(match[2])
    return sizes


def advise(
    workload: tyro.conf.Positional[str],
    placing: Placing,
    batch: Batched,
    host: str = "auto",
    seconds: Duration = 30.0,
    seed: Seed = 0,
    workload_seed: Seed = 0,
    no_wait: bool = False,
    in_process: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Say whether a step is worth placing at all: place, one device, eager, or cut the batch.

    On this machine it profiles with few steps and races the placements that it found; on a simulated host it estimates.

    Args:
        workload: a name with an optional size, `package.module:function`, or for a simulated host a graph file
        placing: where ops may run
        batch: how the batch of a step is cut
        host: `auto`, `cores`, `cores:2x4`, `cuda`, `cuda/2`, `cuda+cpu`, `procs:2`, `cuda-procs`, a preset, or a
            host file
        seconds: all of it but capturing takes about so long
        seed: of the search, and of random ops
        workload_seed: of the workload's weights and inputs
        no_wait: while another search measures on this machine, give up instead of waiting for it
        in_process: race in this process instead of a worker: for debuggers; a placement that crashes ends it
        json: print one JSON object on stdout
        quiet: no progress; the answer stays
    """
    setup = setup_of(
        workload,
        host,
        placing,
        batch,
        no_wait=no_wait,
        in_process=in_process,
        seed=seed,
        workload_seed=workload_seed,
    )
    if seconds < 1:
        raise InvalidValue("seconds", seconds, "at least 1s")
    from rlplace.advice.advising import advise_workload
    from rlplace.advice.verdict import WORDS
    from rlplace.report.console import advice_panel

    told = advise_workload(setup, seconds=seconds, is_quiet=quiet)
    answer_tables(told, lambda: [advice_panel(told, WORDS[told["verdict"]])], json)


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
    seeds: int = 1,
    objective: str = "latency",
    true: str | None = None,
    measured: int | None = None,
    trace: bool = False,
    no_trace: bool = False,
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
        host: `auto` (the default), `cores`, `cores:2x4`, `cuda`, `cuda/2`, `cuda+cpu`, `procs:2`, `cuda-procs`,
            `nodes` (under torchrun), a preset, or a host file; a dnn-partitioning file has its own
        methods: `all`, or names with commas between them
        evaluations: placements that each method may score with each seed
        seconds: wall time of all methods and seeds together; 60 where no budget is given
        seeds: how many seeds each method that draws is run with, from `--seed` on
        objective: latency, throughput, or for dnn-partitioning files max-load or piece-latency
        true: KIND:SEED; methods on a hidden true problem are compared by `python benchmarks/hidden_truth.py` now
        measured: plans that `learned` measures on this machine
        trace: as `--true`: on this machine steps are traced without it
        no_trace: on this machine, plans that calibrate the simulator, or that `learned` measures, run no traced step,
            from whose timeline they learn otherwise
        seed: of every method's draws and of random ops
        workload_seed: of the workload's weights and inputs
        save: write METHOD-SEED.placement.json into this folder (and split files for dnn-partitioning files)
        plot: write a picture of every search's best so far, over placements and seconds, to this PNG file
        in_process: measure in this process instead of a worker: for debuggers; a placement that crashes ends it
        cluster: whose workers search: off, auto (the Ray cluster that runs here, else one that is started here), or the
            ADDRESS of one
        json: print one JSON object on stdout
        quiet: no progress; the table stays, but beside `--json`
    """
    refuse_if(
        true is not None or trace,
        "true",
        true,
        "none, and no --trace",
        where="compare",
        hint="Methods on a hidden true problem are compared by `python benchmarks/hidden_truth.py WORKLOAD --true "
        "KIND:SEED --measured N`, in the repository.",
    )
    spec, asked = parse_workload(workload), batch.parse()
    from rlplace.compare import OBJECTIVES, CompareConfig
    from rlplace.compare.run_compare import Output, run_compare, split_methods
    from rlplace.partitioning import is_published_file, run_published

    if objective not in OBJECTIVES:
        raise UnknownName("objective", objective, OBJECTIVES)
    output = Output(save, plot, is_quiet=quiet, is_table=not (quiet and json))
    if spec.is_file and is_published_file(spec.path):
        for field, value, expected, hint in (
            ("host", host, None, "A dnn-partitioning file carries its own host."),
            ("measured", measured, None, "A dnn-partitioning file says what its steps take."),
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
            objective,
            methods,
            evaluations=evaluations,
            seconds=seconds,
            seeds=seeds,
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
        is_simulated = setup.host.is_simulated
        refuse_if(no_trace and is_simulated, "no_trace", True, "False on a simulated host", where="compare")
        searches, baselines = split_methods(methods)
        config = CompareConfig(
            searches,
            evaluations,
            seconds,
            seeds,
            objective,
            isolated=setup.isolated,
            seed=seed,
            measured=measured,
            is_traced=not no_trace,
        )
        result = run_compare(setup, output, config, baselines, cluster=cluster)
    if json:
        print_json(result)
    if result["interrupted"]:
        raise KeyboardInterrupt
    failed = [row for row in result["rows"] if row["status"] == "error"]
    if failed and not any(row["status"] == "ok" for row in result["rows"]):
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
        host: `auto`, `cores`, `cores:2x4`, `cuda`, `cuda/2`, `cuda+cpu`, `procs:2`, `cuda-procs`, a preset, or a
            host file
        workload_seed: of the workload's weights and inputs
        timeline: write a Chrome trace of the simulated step here, or a picture of it if the name ends in .png
        json: print one JSON object on stdout
    """
    from rlplace.compare.simulated_and_measured import time_placement

    setup = setup_of(workload, host, placing, batch, workload_seed=workload_seed)
    show_step_time(time_placement(setup, placement, is_measured=False, timeline=timeline), json)


def show_step_time(result: dict[str, Any], json: bool) -> None:
    """Prints the results of `simulate` and `measure`: as JSON on stdout, or in a line for people."""
    words = f"{result['status']}: {result['why']}"
    if result["status"] == "ok":
        spread = f" ± {format_ms(result['spread_s'])}" if result["kind"] == "measured" and result["spread_s"] else ""
        bound = f"bound {format_ms(result['lower_bound_s'])} ms ({result['lower_bound']})"
        words = f"{format_ms(result['step_time_s'])} ms{spread}, {bound}"
    answer(result, f"{result['placement']}, {result['kind']}: {words}", json)


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
        host: `auto`, `cores`, `cores:2x4`, `cuda`, `cuda/2`, `cuda+cpu`, `procs:2`, `cuda-procs`, or `nodes` (under
            torchrun)
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
        host: `auto`, `cores`, `cores:2x4`, `cuda`, `cuda/2`, `cuda+cpu`, `procs:2`, `cuda-procs`, or `nodes` (under
            torchrun)
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
    answer(result, fidelity_words(result), json)


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
