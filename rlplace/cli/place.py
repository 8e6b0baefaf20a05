"""`rlplace place`: a placement at once, by a pretrained policy and a handful of simulated steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import tyro

from rlplace.cli.arguments import Batched, Grouped, Placing, Seed, check_workload, print_json, say
from rlplace.errors import FileProblem, InvalidValue


def place(
    workload: tyro.conf.Positional[str],
    placing: Placing,
    grouping: Grouped,
    batch: Batched,
    host: str = "auto",
    evaluations: Annotated[int, tyro.conf.arg(metavar="N")] = 16,
    method: str = "schedule",
    placement: Path = Path("placement.json"),
    seed: Seed = 0,
    overwrite: bool = False,
    no_wait: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Place a step at once: the pretrained policy guesses, and the best guess by simulation is kept.

    Args:
        workload: a name with an optional size, `package.module:function`, or for a simulated host a graph file
        placing: where ops may run
        grouping: how ops are grouped
        batch: how the batch of a step is cut
        host: `auto`, `cores`, `cores:2x4`, `cuda`, `cuda/2`, `cuda+cpu`, a preset, or a host file
        evaluations: placements to simulate; with 1 the policy's first guess is taken
        method: what finds it: `schedule`, or any method of `rlplace compare`
        placement: the file to write, for `rlplace simulate`, `measure` and `export`
        seed: of the workload, and of methods that draw
        overwrite: replace an existing file
        no_wait: while another search measures on this machine, give up instead of waiting for it
        json: print one JSON object on stdout
        quiet: no progress; the answer stays
    """
    spec, asked = check_workload(workload), batch.parse()
    if evaluations < 1:
        raise InvalidValue("evaluations", evaluations, "at least 1", where="place")
    if placement.exists() and not overwrite:
        raise FileProblem(placement, "is there already: name another file, or give `--overwrite`.")
    found = placing.find_host(host)
    constraints = placing.constraints(found)
    from rlplace.training.place import place_workload

    result = place_workload(
        spec,
        found,
        placement,
        method=method,
        evaluations=evaluations,
        seed=seed,
        num_groups=grouping.num_groups,
        grouping=grouping.word(asked),
        constraints=constraints,
        asked=asked,
        is_waiting=not no_wait,
        is_quiet=quiet,
    )
    if json:
        print_json(result)
        return
    count, single_s = result["evaluations"], result["single_s"]
    single = f"best single device {single_s * 1e3:.2f} ms" if math.isfinite(single_s) else "no single device holds it"
    say(
        f"{placement}: {result['step_time_s'] * 1e3:.2f} ms simulated after {count} placement{'s' * (count != 1)} in "
        f"{result['plan_s']:.2f} s; {single}, "
        f"bound {result['lower_bound_s'] * 1e3:.2f} ms ({result['lower_bound']})"
    )
    if result["step_time_s"] > single_s:
        say(
            "warning: this is slower than the best single device: give more `--evaluations`, or do not place this model"
        )
