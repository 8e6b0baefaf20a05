"""`rlplace train`: finds a placement; the run folder is the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro

from rlplace.cli.arguments import (
    Batched,
    Duration,
    Grouped,
    Placing,
    Seed,
    Stored,
    check_workload,
    given_options,
    print_json,
)
from rlplace.errors import InvalidValue
from rlplace.policy.config import LearnConfig
from rlplace.training.agent.config import AgentConfig
from rlplace.training.config import SearchConfig, TrainConfig

BESIDE_RESUME = ("resume", "budget", "json", "quiet", "no-wait", "in-process")
"""Options that go with `--resume`; all others are as the run was started."""


def train(
    placing: Placing,
    grouping: Grouped,
    batch: Batched,
    storing: Stored,
    search: Annotated[SearchConfig, tyro.conf.arg(name="")],
    learn: Annotated[LearnConfig, tyro.conf.arg(name="")],
    agent: AgentConfig,
    workload: tyro.conf.Positional[str | None] = None,
    host: str = "auto",
    budget: Duration = TrainConfig.budget_s,
    evaluations: int | None = TrainConfig.evaluations,
    run: Path | None = None,
    resume: Path | None = None,
    seed: Seed = TrainConfig.seed,
    acyclic: bool = TrainConfig.acyclic,
    track: str = TrainConfig.track,
    overwrite: bool = False,
    in_process: bool = False,
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
        evaluations: on a simulated host, placements that each of them scores, in place of a time: the same seed finds
            the same
        run: run folder; by default runs/WORKLOAD
        resume: go on with the run in this folder, after any end, from what it measured and learned, as it was started;
            a larger `--budget` extends it
        seed: of the policy, of sampling, of the workload and of random ops
        acyclic: keep the graph of groups without cycles, and say which rules had to give way
        track: Weights & Biases: disabled, offline or online
        overwrite: replace an existing run folder
        in_process: measure placements in this process instead of a worker: for debuggers; one that crashes ends it
        json: print the result as one JSON object on stdout
        quiet: no progress; the table stays, but beside `--json`
    """
    if resume is not None:
        is_table, is_waiting = not (quiet and json), not storing.no_wait
        result = _resumed(resume, workload, budget, in_process, quiet, is_table=is_table, is_waiting=is_waiting)
        if json:
            print_json(result)
        return
    if workload is None:
        hint = "For example: rlplace train nmt. To go on with a run: rlplace train --resume DIR."
        raise InvalidValue("workload", None, "a name, package.module:function or a graph file", hint=hint)
    if evaluations is not None and "budget" in given_options():
        raise InvalidValue("evaluations", evaluations, "none beside --budget", hint="Leave one of the two out.")
    spec, asked, found = check_workload(workload), batch.parse(), placing.find_host(host)
    config = TrainConfig(
        budget_s=budget,
        evaluations=evaluations,
        seed=seed,
        num_groups=grouping.num_groups,
        grouping=grouping.word(asked),
        acyclic=acyclic,
        constraints=placing.constraints(found),
        isolated=False if in_process else None,
        track=track,
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
        is_table=not (quiet and json),
        is_waiting=not storing.no_wait,
    )
    if json:
        print_json(result)


def _resumed(
    folder: Path,
    workload: str | None,
    budget: float,
    in_process: bool,
    quiet: bool,
    *,
    is_table: bool,
    is_waiting: bool,
) -> dict[str, Any]:
    given = given_options()
    for option in sorted(given - set(BESIDE_RESUME)):
        expected = f"only {', '.join(f'--{name}' for name in BESIDE_RESUME[1:])} beside --resume"
        hint = "The run goes on as it was started; start another one for other options."
        raise InvalidValue("option", f"--{option}", expected, where="train --resume", hint=hint)
    from rlplace.training.session import resume_training

    return resume_training(
        folder,
        workload=workload,
        budget_s=budget if "budget" in given else None,
        isolated=False if in_process else None,
        is_quiet=quiet,
        is_table=is_table,
        is_waiting=is_waiting,
    )
