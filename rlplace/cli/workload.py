"""`rlplace graph`: what a workload's step is made of.

`rlplace advise`: whether a workload is worth placing on a host.
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
    GroupingOptions,
    Placing,
    Seed,
    check_workload,
    find_host,
    print_json,
    setup_of,
)
from rlplace.errors import InvalidValue
from rlplace.say import say

if TYPE_CHECKING:
    from rlplace.graphs import OpGraph
    from rlplace.measure import Host, Problem
    from rlplace.session.setup import CutOptions
    from rlplace.workloads import WorkloadSpec

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
    """Show what a step is made of: ops, work, memory, critical path, groups.

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
    spec, sizes, asked = check_workload(workload), parse_dims(dims), batch.parse()
    from rlplace.graphs import save_graph
    from rlplace.graphs.formats import format_to_write
    from rlplace.graphs.formats.graph_files import save_dot
    from rlplace.measure import Problem
    from rlplace.measure.costs.costs import estimate_costs
    from rlplace.report.console import graph_table, show, targets_table
    from rlplace.session.prepare import given_costs, judged
    from rlplace.session.setup import number_only

    if isinstance(asked.count, str):
        raise number_only(asked.count, "`auto` is chosen by a search: `rlplace train` and `compare` do.")
    for field, value in (("groups", groups), ("top", top), ("dot_ops", dot_ops)):
        if value < 1:
            raise InvalidValue(field, value, "at least 1")
    if save is not None:
        format_to_write(save)
    found = costs_host(find_host(host))
    say(f"reading {spec}" if spec.is_file else f"building {spec} and capturing its step")
    captured, capture_s = read_or_capture(spec, sizes, workload_seed, asked.count, asked)
    say(f"{captured.num_ops} ops, {captured.num_edges} edges after {capture_s:.1f} s; estimating and grouping")
    for line in judged(captured):
        say(line)
    problem = published(spec, captured)
    if problem is None:
        costs = given_costs(spec, found, asked.count) or estimate_costs(captured, found)
        problem = Problem.grouped(captured, found, costs, groups)
    facts = describe(problem, top) | {"workload": str(spec), "is_file": spec.is_file, "capture_s": capture_s}
    facts["workload_seed"] = workload_seed
    if dot is not None:
        save_dot(captured, dot, max_ops=dot_ops)
    if save is not None:
        save_graph(captured, save)
        if problem.costs.source == "given":
            say(f"{save} holds no times: those that {spec.path} gives its ops stay there")
    if json:
        print_json(facts)
    else:
        show(graph_table(facts), targets_table(facts["top_targets"], facts["costs_host"]), highlight=True)


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
    from rlplace.files import read_json
    from rlplace.graphs.formats.graph_files import is_dnn_partitioning
    from rlplace.graphs.formats.published import load_dnn_partitioning
    from rlplace.partitioning import published_problem

    if spec.path.suffix.lower() != ".json" or not is_dnn_partitioning(read_json(spec.path)):
        return None  # such a graph saved in a format of ours, which holds no costs
    return published_problem(load_dnn_partitioning(spec.path))


def read_or_capture(
    spec: WorkloadSpec, dims: dict[str, int], seed: int, count: int, asked: CutOptions
) -> tuple[OpGraph, float]:
    """The graph in the workload's file, or of one step of the model that it names, and the seconds that it took.

    No named model is ever allocated; building it and imports do not count as capture.

    Raises:
        InvalidValue: sizes are given without an ONNX model, or the file's batch cannot be cut.
    """
    from rlplace.session.prepare import capture_workload, judge_twin, read_graph

    if spec.is_file:
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
    return host if has_figures else find_host(DEFAULT_HOST)


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
    """Say whether a step is worth placing at all: place, stay on one device, use eager, or cut the batch.

    On this machine it profiles with few steps and races what it found; on a simulated host it estimates.

    Args:
        workload: a name with an optional size, `package.module:function`, or for a simulated host a graph file
        placing: where ops may run
        batch: how the batch of a step is cut
        host: `auto`, `cores`, `cores:2x4`, `cuda`, `cuda/2`, `cuda+cpu`, a preset, or a host file
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

    told = advise_workload(setup, seconds=seconds, is_quiet=quiet)
    if json:
        print_json(told)
        return
    from rlplace.report.console import advice_panel, show

    show(advice_panel(told, WORDS[told["verdict"]]))
