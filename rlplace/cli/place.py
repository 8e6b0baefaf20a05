"""`rlplace place`: a placement at once, of a workload or of a run on another host, by simulated steps alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import tyro

from rlplace.cli.arguments import Batched, Duration, Grouped, Placing, Seed, print_json, setup_of
from rlplace.errors import FileProblem, InvalidValue
from rlplace.format import format_ms
from rlplace.say import say

EVALUATIONS = 16
"""Placements of a workload that are simulated by default."""
METHOD, RUN_METHOD = "schedule", "portfolio"
"""What places a workload, and what places a run's step again."""
PLACEMENT = Path("placement.json")


def place(
    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="WORKLOAD|DIR")],
    placing: Placing,
    grouping: Grouped,
    batch: Batched,
    host: str = "auto",
    evaluations: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    seconds: Duration | None = None,
    method: str | None = None,
    placement: Annotated[Path | None, tyro.conf.arg(aliases=("--out",))] = None,
    run: Path | None = None,
    workload: str | None = None,
    seed: Seed = 0,
    workload_seed: Seed = 0,
    overwrite: bool = False,
    no_wait: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Place a step at once, by simulation: a workload's, or that of a run on another host, from what the run knows.

    Args:
        target: a name with an optional size, `package.module:function`, or for a simulated host a graph file; or a run
            folder, whose step goes to HOST: op times, links, factors and the best placement are carried over, and a
            search goes on from there
        placing: where ops may run; given with a run folder, instead of all that the run had
        grouping: how ops are grouped; a run folder says so itself
        batch: how the batch of a step is cut; likewise
        host: `auto`, `cores`, `cores:2x4`, `cuda`, `cuda/2`, `cuda+cpu`, a preset, or a host file
        evaluations: placements to simulate, by default 16 for a workload; with 1 the policy's first guess is taken
        seconds: search of a run's step for so long, by default 5s where no evaluations are given
        method: what finds it, any method of `rlplace compare`: by default `schedule`, for a run `portfolio`
        placement: the file to write, for `rlplace simulate` and `measure`; by default placement.json where no run
            is named
        run: keep the placement of a run's step as a run folder, for `rlplace export` and `train --resume`
        workload: the workload again, where the run is of your own function
        seed: of methods that draw
        workload_seed: of the workload's weights and inputs; a run folder says so itself
        overwrite: replace an existing file or run
        no_wait: while another search measures on this machine, give up instead of waiting for it
        json: print one JSON object on stdout
        quiet: no progress; the answer stays
    """
    if evaluations is not None and evaluations < 1:
        raise InvalidValue("evaluations", evaluations, "at least 1", where="place")
    folder = Path(target) if _is_run(Path(target)) else None
    path = PLACEMENT if placement is None and run is None else placement
    if folder is None:
        for name, value in (("seconds", seconds), ("run", run), ("workload", workload)):
            if value is not None:
                raise InvalidValue(
                    name,
                    str(value),
                    "none beside a workload",
                    where="place",
                    hint="It is of a run folder that is placed again.",
                )
        path = _free(path or PLACEMENT, overwrite)
        setup = setup_of(
            target, host, placing, batch, grouping, no_wait=no_wait, seed=seed, workload_seed=workload_seed
        )
        from rlplace.training.place import place_workload

        method, count = method or METHOD, evaluations or EVALUATIONS
        result = place_workload(setup, path, method=method, evaluations=count, is_quiet=quiet)
    else:
        if grouping != type(grouping)() or batch != type(batch)():
            raise InvalidValue(
                "options",
                "of groups or of the batch",
                "none beside a run folder",
                where="place",
                hint="Groups and micro-batches are those of the run.",
            )
        if workload_seed:
            raise InvalidValue(
                "workload_seed",
                workload_seed,
                "none beside a run folder",
                where="place",
                hint="The workload is built as the run built it.",
            )
        found = placing.find_host(host)
        has_own = bool(placing.pin or placing.exclude or placing.together)
        constraints = placing.constraints(found) if has_own else None
        path = None if path is None else _free(path, overwrite)
        from rlplace.training.elastic.replace_run import replace_run

        result = replace_run(
            folder,
            found,
            path,
            host_word=host,
            run=run,
            workload=workload,
            method=method or RUN_METHOD,
            seconds=math.inf if seconds is None else seconds,
            evaluations=math.inf if evaluations is None else evaluations,
            seed=seed,
            constraints=constraints,
            gangs=placing.gangs,
            overwrite=overwrite,
            is_waiting=not no_wait,
            is_quiet=quiet,
        )
    if json:
        print_json(result)
        return
    _show(result)


def _is_run(path: Path) -> bool:
    """Whether a run folder is meant; a folder of the current one may be called as a workload is."""
    return path.is_dir() and (len(path.parts) > 1 or (path / "session.db").exists() or (path / "config.json").exists())


def _free(path: Path, overwrite: bool) -> Path:
    """The path, if a placement may be written there.

    Raises:
        FileProblem: a file is there.
    """
    if path.exists() and not overwrite:
        raise FileProblem(path, "is there already: name another file, or give `--overwrite`.")
    return path


def _show(result: dict[str, Any]) -> None:
    count, single_s = result["evaluations"], result["single_s"]
    single = f"best single device {format_ms(single_s)} ms" if math.isfinite(single_s) else "no single device holds it"
    carried = ""
    if math.isfinite(result.get("before_s", math.nan)):
        carried = f"it was {format_ms(result['before_s'])} ms on {result['host']['from']}, "
        carried += _carried_words(result["carried_s"])
    say(
        f"{result['placement'] or result['new_run']}: {format_ms(result['step_time_s'])} ms simulated after "
        f"{count} placement{'s' * (count != 1)} in {result['plan_s']:.2f} s; {carried}{single}, "
        f"bound {format_ms(result['lower_bound_s'])} ms ({result['lower_bound']})"
    )
    if result["step_time_s"] > single_s:
        say(
            "warning: this is slower than the best single device: give more `--evaluations`, or do not place this model"
        )


def _carried_words(carried_s: float) -> str:
    if math.isfinite(carried_s):
        return f"carried over {format_ms(carried_s)} ms; "
    return "carried over it does not fit into memory; "
