"""`rlplace fidelity`: how far the simulator can be trusted on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tyro

from rlplace.cli.arguments import Batched, Placing, Seed, Stored, check_workload, print_json
from rlplace.say import say


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
    from rlplace.runs.fidelity import run_fidelity

    spec, asked, found = check_workload(workload), batch.parse(), placing.find_host(host)
    result = run_fidelity(
        spec,
        found,
        num_placements=placements,
        num_fit=fit,
        seed=seed,
        workload_seed=workload_seed,
        plot=plot,
        constraints=placing.constraints(found),
        asked=asked,
        store=storing.store,
        is_waiting=not storing.no_wait,
        isolated=False if in_process else None,
    )
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
