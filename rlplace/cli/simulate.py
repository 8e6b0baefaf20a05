"""`rlplace simulate`: the simulated step time of one placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tyro

from rlplace.cli.arguments import Batched, Placing, Seed, check_workload, print_json
from rlplace.report.format import format_ms
from rlplace.say import say


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
    from rlplace.runs.step_time import time_placement

    spec, asked, found = check_workload(workload), batch.parse(), placing.find_host(host)
    result = time_placement(
        spec,
        found,
        placement,
        is_measured=False,
        workload_seed=workload_seed,
        timeline=timeline,
        constraints=placing.constraints(found),
        asked=asked,
    )
    show_step_time(result, json)


def show_step_time(result: dict[str, Any], json: bool) -> None:
    """Prints what `simulate` and `measure` found: as JSON on stdout, or in a line for people."""
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
