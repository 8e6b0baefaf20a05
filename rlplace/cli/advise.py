"""`rlplace advise`: whether a workload is worth placing on a host."""

from __future__ import annotations

import tyro

from rlplace.cli.arguments import Batched, Duration, Placing, Seed, check_workload, print_json
from rlplace.errors import InvalidValue


def advise(
    workload: tyro.conf.Positional[str],
    placing: Placing,
    batch: Batched,
    host: str = "auto",
    seconds: Duration = 30.0,
    seed: Seed = 0,
    workload_seed: Seed = 0,
    no_wait: bool = False,
    in_process: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Say whether a step is worth placing at all: place, stay on one device, use eager, or cut the batch.

    On this machine it profiles with few steps and races what it found; on a simulated host it estimates.

    Args:
        workload: a name with an optional size, `package.module:function`, or for a simulated host a graph file
        placing: where ops may run
        batch: how the batch of a step is cut
        host: `auto`, `cores`, `cores:2x4`, `cuda`, `cuda/2`, `cuda+cpu`, a preset, or a host file
        seconds: all of it but capturing takes about so long
        seed: of the search, and of random ops
        workload_seed: of the workload's weights and inputs
        no_wait: while another search measures on this machine, give up instead of waiting for it
        in_process: race in this process instead of a worker: for debuggers; a placement that crashes ends it
        json: print one JSON object on stdout
        quiet: no progress; the answer stays
    """
    spec, asked, found = check_workload(workload), batch.parse(), placing.find_host(host)
    if seconds < 1:
        raise InvalidValue("seconds", seconds, "at least 1s")
    constraints = placing.constraints(found)
    from rlplace.advice.advising import advise_workload
    from rlplace.advice.verdict import WORDS

    told = advise_workload(
        spec,
        found,
        host_word=host,
        seconds=seconds,
        seed=seed,
        workload_seed=workload_seed,
        constraints=constraints,
        asked=asked,
        is_waiting=not no_wait,
        isolated=False if in_process else None,
        is_quiet=quiet,
    )
    if json:
        print_json(told)
        return
    from rlplace.report.console import CleanConsole
    from rlplace.report.printed import advice_panel

    CleanConsole(stderr=True, highlight=False, emoji=False).print(advice_panel(told, WORDS[told["verdict"]]))
