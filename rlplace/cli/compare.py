"""`rlplace compare`: every method on one problem, at equal budgets, beside a proven bound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from rlplace.cli.arguments import check_workload, find_host, parse_constraints, print_json
from rlplace.errors import InvalidValue, UnknownName


def compare(
    workload: tyro.conf.Positional[str],
    host: str | None = None,
    methods: str = "all",
    evaluations: int | None = None,
    seconds: float | None = None,
    seeds: int = 1,
    objective: str = "latency",
    seed: int = 0,
    groups: int = 256,
    grouping: str = "heavy-edge",
    pin: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    exclude: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    together: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    gangs: bool = False,
    save: Path | None = None,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Compare search methods, solvers and what people run, at equal budgets, beside a proven bound.

    Args:
        workload: a name with an optional size, `package.module:function`, or a graph file
        host: `auto` (the default), `cores`, `cores:2x4`, a preset, or a host file; a dnn-partitioning file has its own
        methods: `all`, or names with commas between them
        evaluations: placements that each method may score with each seed
        seconds: wall time of all methods and seeds together; 60 where no budget is given
        seeds: how many seeds each method that draws is run with
        objective: latency, throughput, or for dnn-partitioning files max-load or piece-latency
        seed: of the workload
        groups: most groups of ops that searches move
        grouping: how ops are grouped: heavy-edge, colocation, module, module:DEPTH, module:DEPTH:apart, metis or none
        pin: PATTERN=DEVICE, again and again: these ops run there (a glob over modules, op names and targets)
        exclude: PATTERN=DEVICE, again and again: these ops never run there
        together: PATTERN,PATTERN,..., again and again: these ops move as one
        gangs: on CPU hosts, also a device that runs an op on all cores at once
        save: write METHOD-SEED.placement.json into this folder (and split files for dnn-partitioning files)
        json: print one JSON object on stdout
        quiet: no progress and no table
    """
    from rlplace.compare.row import OBJECTIVES

    spec = check_workload(workload)
    if objective not in OBJECTIVES:
        raise UnknownName("objective", objective, OBJECTIVES)
    from rlplace.partitioning.compare import is_published_file, run_published

    if spec.is_file and is_published_file(spec.path):
        if host is not None:
            raise InvalidValue(
                "host", host, "none", where="compare", hint="A dnn-partitioning file carries its own host."
            )
        result = run_published(
            spec.path,
            objective,
            methods,
            evaluations=evaluations,
            seconds=seconds,
            seeds=seeds,
            save=save,
            is_quiet=quiet,
        )
    else:
        if objective not in ("latency", "throughput"):
            raise InvalidValue(
                "objective",
                objective,
                "latency or throughput",
                where="compare",
                hint="max-load and piece-latency are for files of the published benchmark.",
            )
        from rlplace.compare.run import CompareConfig
        from rlplace.compare.session import run_compare, split_methods

        searches, people = split_methods(methods)
        config = CompareConfig(searches, evaluations, seconds, seeds, objective)
        found = find_host(host or "auto", gangs=gangs)
        constraints = parse_constraints(pin, exclude, together, found)
        result = run_compare(
            spec,
            found,
            config,
            people,
            seed=seed,
            num_groups=groups,
            grouping=grouping,
            constraints=constraints,
            save=save,
            is_quiet=quiet,
        )
    if json:
        print_json(result)
    if result["interrupted"]:
        raise KeyboardInterrupt


COMMANDS: dict[str, Callable[..., Any]] = {"compare": compare}
