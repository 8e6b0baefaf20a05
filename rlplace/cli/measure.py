"""`rlplace measure`: the step time of one placement, run here."""

from __future__ import annotations

from pathlib import Path

import tyro

from rlplace.cli.arguments import Batched, Placing, Seed, Stored, check_workload
from rlplace.cli.simulate import show_step_time


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
        storing: what becomes of what is measured
        placement: a placement file; without one, everything runs on the best single device
        host: `auto`, `cores`, `cores:2x4`, `cuda`, `cuda/2` or `cuda+cpu`
        seed: of random ops
        workload_seed: of the workload's weights and inputs
        timeline: write a Chrome trace of a measured and of a simulated step here; a picture of the measured one if the
            name ends in .png
        in_process: run in this process instead of a worker: for debuggers; a placement that crashes ends it
        json: print one JSON object on stdout
    """
    from rlplace.runs.step_time import time_placement

    spec, asked, found = check_workload(workload), batch.parse(), placing.find_host(host)
    result = time_placement(
        spec,
        found,
        placement,
        is_measured=True,
        seed=seed,
        workload_seed=workload_seed,
        timeline=timeline,
        constraints=placing.constraints(found),
        asked=asked,
        store=storing.store,
        is_waiting=not storing.no_wait,
        isolated=False if in_process else None,
    )
    show_step_time(result, json)
