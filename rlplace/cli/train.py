"""`rlplace train`: finds a placement; the run folder is the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from rlplace.cli.arguments import Batched, Duration, Grouped, Placing, Seed, Stored, check_workload, print_json
from rlplace.policy.config import LearnConfig
from rlplace.training.agent.config import AgentConfig
from rlplace.training.config import SearchConfig, TrainConfig


def train(
    workload: tyro.conf.Positional[str],
    placing: Placing,
    grouping: Grouped,
    batch: Batched,
    storing: Stored,
    search: Annotated[SearchConfig, tyro.conf.arg(name="")],
    learn: Annotated[LearnConfig, tyro.conf.arg(name="")],
    agent: AgentConfig,
    host: str = "auto",
    budget: Duration = TrainConfig.budget_s,
    run: Path | None = None,
    seed: Seed = TrainConfig.seed,
    acyclic: bool = TrainConfig.acyclic,
    track: str = TrainConfig.track,
    overwrite: bool = False,
    in_process: bool = False,
    cluster: str = TrainConfig.cluster,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Find a placement; the run folder is the result.

    Args:
        workload: a name with an optional size (`nmt`, `nmt@small`, `nmt@layers=4`), several (`multi:bert*2,gpt2`),
            `package.module:function`, or for a simulated host a graph file
        placing: where ops may run
        grouping: how ops are grouped
        batch: how the batch of a step is cut
        storing: what becomes of what is measured
        search: how the budget is spent
        learn: how the method `policy` learns
        agent: how the method `learned` explores
        host: `auto` (this machine: its GPUs, else its cores), `cores`, `cores:2x4`, `cuda`, `cuda/2` (each GPU as two
            devices), `cuda+cpu`, a preset, or a host file; `rlplace hosts` lists all of them
        budget: search time of the method and `portfolio` together, e.g. 90, 150s, 5m; the rest comes on top
        run: run folder; by default runs/WORKLOAD
        seed: of the policy, of sampling, of the workload and of random ops
        acyclic: keep the graph of groups without cycles, and say which rules had to give way
        track: Weights & Biases: disabled, offline or online
        overwrite: replace an existing run folder
        in_process: measure placements in this process instead of a worker: for debuggers; one that crashes ends it
        cluster: whose machines measure, or search on a simulated host: off (this one alone), auto (the Ray cluster that
            runs here, else one that is started here), or the ADDRESS of one
        json: print the result as one JSON object on stdout
        quiet: no progress
    """
    spec, asked, found = check_workload(workload), batch.parse(), placing.find_host(host)
    config = TrainConfig(
        budget_s=budget,
        seed=seed,
        num_groups=grouping.num_groups,
        grouping=grouping.word(asked),
        acyclic=acyclic,
        constraints=placing.constraints(found),
        isolated=False if in_process else None,
        track=track,
        cluster=cluster,
        store=storing.store,
        search=search,
        learn=learn,
        agent=agent,
    )
    from rlplace.training.session import run_training

    folder = run if run is not None else Path("runs") / workload.replace("/", "_").replace(":", "_")
    result = run_training(
        spec,
        found,
        config,
        folder,
        host_word=host,
        gangs=placing.gangs,
        asked=asked,
        overwrite=overwrite,
        is_quiet=quiet,
        is_waiting=not storing.no_wait,
    )
    if json:
        print_json(result)
