"""`rlplace train` and `rlplace export`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from rlplace.cli.arguments import check_workload, find_host, parse_constraints, parse_duration, print_json


def train(
    workload: tyro.conf.Positional[str],
    host: str = "auto",
    budget: str = "5m",
    run: Path | None = None,
    seed: int = 0,
    groups: int = 256,
    grouping: str = "heavy-edge",
    acyclic: bool = False,
    pin: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    exclude: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    together: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    reward: str = "log_speedup",
    init: str = "eft",
    simulate_share: float = 0.6,
    track: str = "disabled",
    gangs: bool = False,
    overwrite: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Learn a placement; the run folder is the result.

    Args:
        workload: a name with an optional size (`nmt`, `nmt@small`, `nmt@layers=4`), several (`multi:bert*2,gpt2`),
            `package.module:function`, or for a simulated host a graph file
        host: `auto` (this machine: its GPUs, else its cores), `cores`, `cores:2x4`, a preset, or a host file
        budget: time of search, e.g. 90, 150s, 5m, 1.5h; profiling and the final table come on top
        run: run folder; by default runs/WORKLOAD
        seed: of the policy, of sampling, of the workload and of random ops
        groups: most groups of ops that the policy places
        grouping: how ops are grouped: heavy-edge, colocation, module, module:DEPTH, module:DEPTH:apart, metis or none
        acyclic: keep the graph of groups without cycles, and say which rules had to give way
        pin: PATTERN=DEVICE, again and again: these ops run there (a glob over modules, op names and targets)
        exclude: PATTERN=DEVICE, again and again: these ops never run there
        together: PATTERN,PATTERN,..., again and again: these ops move as one
        reward: log_speedup, or sqrt as in the 2017 paper
        init: what the policy starts by imitating: eft, or none
        simulate_share: share of the budget spent on simulated placements
        track: Weights & Biases: disabled, offline or online
        gangs: on CPU hosts, also a device that runs an op on all cores at once
        overwrite: replace an existing run folder
        json: print the result as one JSON object on stdout
        quiet: no progress
    """
    from rlplace.training.config import TrainConfig

    spec = check_workload(workload)
    config = TrainConfig(
        budget_s=parse_duration(budget),
        seed=seed,
        num_groups=groups,
        grouping=grouping,
        acyclic=acyclic,
        constraints=parse_constraints(pin, exclude, together),
        reward=reward,
        init=init,
        simulate_share=simulate_share,
        track=track,
    )
    found = find_host(host, gangs=gangs)
    from rlplace.training.session import run_training

    folder = run if run is not None else Path("runs") / workload.replace("/", "_").replace(":", "_")
    result = run_training(spec, found, config, folder, host_word=host, gangs=gangs, overwrite=overwrite, is_quiet=quiet)
    if json:
        print_json(result)


def export(
    folder: tyro.conf.Positional[Path],
    workload: str | None = None,
    format: str = "script",
    check: bool = False,
    json: bool = False,
) -> None:
    """A run's placement as a model that runs or in another format: writes it into FOLDER, or checks it against eager.

    Args:
        folder: a run folder
        workload: the workload again, if it is your own function: code named in a run is imported only if you pass it
        format: script (FOLDER/step.py, a short program that trains as placed), csv (one row an op), or one of yours
        check: compare 5 training steps with eager ones on one device, in float64
        json: print the result as one JSON object on stdout
    """
    from rlplace.export.session import export_run

    result = export_run(folder, workload=workload, is_check=check, format=format)
    if json:
        print_json(result)
    if check and not result["ok"]:
        raise SystemExit(1)


COMMANDS: dict[str, Callable[..., Any]] = {"train": train, "export": export}
