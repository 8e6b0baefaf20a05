"""`rlplace train`: learns a placement; the run folder is the result."""

from __future__ import annotations

from pathlib import Path

import tyro

from rlplace.cli.arguments import GroupingOptions, PlacementOptions, Seed, check_workload, parse_duration, print_json


def train(
    workload: tyro.conf.Positional[str],
    placing: PlacementOptions,
    grouping: GroupingOptions,
    host: str = "auto",
    budget: str = "5m",
    run: Path | None = None,
    seed: Seed = 0,
    acyclic: bool = False,
    reward: str = "log_speedup",
    init: str = "eft",
    simulate_share: float = 0.6,
    track: str = "disabled",
    overwrite: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Learn a placement; the run folder is the result.

    Args:
        workload: a name with an optional size (`nmt`, `nmt@small`, `nmt@layers=4`), several (`multi:bert*2,gpt2`),
            `package.module:function`, or for a simulated host a graph file
        placing: where ops may run
        grouping: how ops are grouped
        host: `auto` (this machine: its GPUs, else its cores), `cores`, `cores:2x4`, a preset, or a host file
        budget: time of search, e.g. 90, 150s, 5m, 1.5h; profiling and the final table come on top
        run: run folder; by default runs/WORKLOAD
        seed: of the policy, of sampling, of the workload and of random ops
        acyclic: keep the graph of groups without cycles, and say which rules had to give way
        reward: log_speedup, or sqrt as in the 2017 paper
        init: what the policy starts by imitating: eft, or none
        simulate_share: share of the budget spent on simulated placements
        track: Weights & Biases: disabled, offline or online
        overwrite: replace an existing run folder
        json: print the result as one JSON object on stdout
        quiet: no progress
    """
    from rlplace.training.config import TrainConfig
    from rlplace.training.session import run_training

    spec, found = check_workload(workload), placing.find_host(host)
    config = TrainConfig(
        budget_s=parse_duration(budget),
        seed=seed,
        num_groups=grouping.num_groups,
        grouping=grouping.rule,
        acyclic=acyclic,
        constraints=placing.constraints(found),
        reward=reward,
        init=init,
        simulate_share=simulate_share,
        track=track,
    )
    folder = run if run is not None else Path("runs") / workload.replace("/", "_").replace(":", "_")
    result = run_training(
        spec,
        found,
        config,
        folder,
        host_word=host,
        gangs=placing.gangs,
        overwrite=overwrite,
        is_quiet=quiet,
    )
    if json:
        print_json(result)
