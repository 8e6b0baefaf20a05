"""`rlplace simulate`: the simulated step time of one placement.

`rlplace measure`: the step time of one placement, run here.

`rlplace fidelity`: how far the simulator can be trusted on this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tyro

from rlplace.cli.arguments import Batched, Placing, Seed, Stored, print_json, setup_of
from rlplace.format import format_ms
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
    from rlplace.compare.simulated_and_measured import time_placement

    setup = setup_of(workload, host, placing, batch, workload_seed=workload_seed)
    show_step_time(time_placement(setup, placement, is_measured=False, timeline=timeline), json)


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
        storing: what becomes of what is measured
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
    """What `fidelity` tells people, from what it prints as JSON."""
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
