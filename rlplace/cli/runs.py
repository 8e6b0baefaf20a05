"""The commands that make run folders and placements, and those that read a run folder.

`train`: finds a placement; the run folder is the result. `place`: a placement at once, of a workload or of a run on
another host, by simulated steps alone. `explain`: where the time of a run's placed step goes. `export`: a run's
placement as a model that runs. `report`: a run as one page for a browser.
"""

from __future__ import annotations

import math
import os
from collections.abc import Set
from pathlib import Path
from typing import Annotated, Any

import tyro

from rlplace.cli.option_groups import (
    GIVEN,
    Batched,
    Budget,
    Duration,
    Grouped,
    MoreTime,
    Placing,
    Seed,
    Stored,
    answer,
    answer_tables,
    print_json,
    setup_of,
)
from rlplace.errors import FileProblem, InvalidValue
from rlplace.measure import resolve_host
from rlplace.measure.hosts.nodes import under_torchrun
from rlplace.policy import LearnConfig
from rlplace.say import counted, format_ms, say
from rlplace.training import SearchConfig, TrainConfig
from rlplace.training.config import AgentConfig

AGAIN = ("in-process", "store", "track", "cluster", "init", "priors")
"""Options that reach out of a run folder, which says nothing of them: they are given again."""
BESIDE_RESUME = ("resume", "budget", *AGAIN, "json", "quiet", "no-wait")
"""Options that go with `--resume`; all others are as the run was started."""
BESIDE_HOST = ("host", "run", "overwrite", "gangs", "pin", "exclude", "together")
"""Those that go with it where `--host` names another host."""


def train(
    placing: Placing,
    grouping: Grouped,
    batch: Batched,
    storing: Stored,
    search: Annotated[SearchConfig, tyro.conf.arg(name="")],
    learn: Annotated[LearnConfig, tyro.conf.arg(name="")],
    agent: AgentConfig,
    workload: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[WORKLOAD]")] = None,
    host: str = "auto",
    budget: Budget = TrainConfig.budget_s,
    total: Annotated[Duration | None, tyro.conf.arg(metavar="TIME")] = TrainConfig.total_s,
    evaluations: Annotated[int | None, tyro.conf.arg(metavar="N")] = TrainConfig.evaluations,
    run: Path | None = None,
    resume: Path | None = None,
    seed: Seed = TrainConfig.seed,
    workload_seed: Seed = 0,
    acyclic: bool = TrainConfig.acyclic,
    track: str = TrainConfig.track,
    overwrite: bool = False,
    in_process: bool = False,
    no_trace: bool = False,
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
        storing: where measurements are kept
        search: how the budget is spent
        learn: how the method `policy` learns
        agent: how the method `learned` explores
        host: `auto` (this machine: its GPUs, else its cores), `cores`, `cores:2x4`, `cuda`, `cuda/2` (each GPU as two
            devices), `cuda+cpu`, `procs`, `procs:2`, `cuda-procs` (a process for each device), `nodes` (under
            torchrun), a preset, or a host file; `rlplace hosts` lists all of them
        budget: search time of the method and `portfolio` together, e.g. 90, 150s, 5m; the rest comes on top
        total: limit of the whole run except capturing. Profiling, calibration and the final table shrink to fit, and
            the search gets the rest, at most `--budget`
        evaluations: on a simulated host, placements that each of them scores, in place of a time: the same seed finds
            the same
        run: run folder; by default runs/WORKLOAD
        resume: continue the run in this folder with its options, measurements and learned state; a larger `--budget`,
            or `--budget +TIME`, extends it; with `--host` a new run on that host starts in a new folder, from the
            results of the run in this folder
        seed: of the policy, of sampling and of random ops
        workload_seed: of the workload's weights and inputs
        acyclic: keep the graph of groups without cycles, and say which rules had to give way
        track: Weights & Biases: disabled, offline or online
        overwrite: replace an existing run folder
        in_process: measure placements in this process instead of a worker: for debuggers; one that crashes ends it
        no_trace: on a real host, plans that calibrate the simulator, or that `learned` measures, run no traced step,
            from whose timeline they learn otherwise
        cluster: whose machines measure, or search on a simulated host: off (this one alone), auto (the Ray cluster that
            runs here, else one that is started here), or the ADDRESS of one
        json: print the result as one JSON object on stdout; the table goes to stderr
        quiet: no progress on stderr; the table stays on stdout, but beside `--json`
    """
    folder = run if run is not None or workload is None else Path("runs") / workload.replace("/", "_").replace(":", "_")
    own: dict[str, Any] = {"track": track, "cluster": cluster, "search": search, "learn": learn}
    is_again = resume is None and folder is not None and _is_restarted(folder)
    if is_again or resume is not None:
        resume, given = (folder, frozenset[str]()) if is_again else (resume, GIVEN.get())
        assert resume is not None
        _check_given(given)
        from rlplace.training.train_and_resume import Shown, resume_training

        more_s = budget if isinstance(budget, MoreTime) else 0.0
        again = TrainConfig(store=storing.store, isolated=False if in_process else None, **own)
        how: dict[str, Any] = {
            "workload": workload,
            "budget_s": budget if "budget" in given and not more_s else None,
            "is_waiting": not storing.no_wait,
            "shown": Shown(quiet, not (quiet and json), json),
        }
        if "host" not in given:
            result = resume_training(resume, again, more_s=more_s, **how)
        elif more_s:
            raise InvalidValue(
                "budget",
                f"+{more_s:g} s",
                "a time without `+` beside --host",
                hint="The run on the new host begins anew, with a budget of its own.",
            )
        else:
            from rlplace.training.place_and_replace import folder_for, resume_elsewhere

            found = resolve_host(host, gangs=placing.gangs)
            result = resume_elsewhere(
                resume,
                found,
                folder_for(resume, host) if run is None else run,
                again,
                host_word=host,
                gangs=placing.gangs,
                constraints=placing.own_constraints(found),
                overwrite=overwrite,
                **how,
            )
    elif workload is None:
        raise InvalidValue(
            "workload",
            None,
            "a name, package.module:function or a graph file",
            hint="For example: rlplace train nmt. To go on with a run: rlplace train --resume DIR.",
        )
    elif isinstance(budget, MoreTime):
        raise InvalidValue(
            "budget",
            f"+{budget:g} s",
            "a time of its own",
            hint="`+` is time on top of what a run was given, beside `--resume DIR`.",
        )
    elif evaluations is not None and "budget" in GIVEN.get():
        raise InvalidValue("evaluations", evaluations, "none beside --budget", hint="Leave one of the two out.")
    else:
        setup = setup_of(
            workload,
            host,
            placing,
            batch,
            grouping,
            storing,
            in_process=in_process,
            seed=seed,
            workload_seed=workload_seed,
            acyclic=acyclic,
        )
        config = TrainConfig.of(
            setup,
            budget_s=budget,
            total_s=total,
            evaluations=evaluations,
            is_traced=not no_trace,
            agent=agent,
            **own,
        )
        from rlplace.training.train_and_resume import Shown, run_training

        assert folder is not None
        result = run_training(
            setup, config, folder, overwrite=overwrite, shown=Shown(quiet, not (quiet and json), json)
        )
    if json:
        print_json(result)


def _is_restarted(folder: Path) -> bool:
    """Whether torchrun may have started this command before, with this run folder: then its run goes on."""
    may_restart = under_torchrun() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return may_restart and (folder / "session.db").is_file()


def _check_given(given: Set[str]) -> None:
    """Refuses options that mean nothing beside `--resume`."""
    known = (*BESIDE_RESUME, *BESIDE_HOST) if "host" in given else BESIDE_RESUME
    for option in sorted(given - set(known)):
        expected = f"only {', '.join(f'--{name}' for name in known[1:])} beside --resume"
        hint = (
            "It goes with another host: name that with `--host` too."
            if option in BESIDE_HOST
            else "The run goes on as it was started; start another one for other options."
        )
        raise InvalidValue("option", f"--{option}", expected, where="train --resume", hint=hint)


EVALUATIONS = 16
"""Placements of a workload that are simulated by default."""
METHOD, RUN_METHOD = "schedule", "portfolio"
"""The methods that place a workload, and the step of a run again."""
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
    """Place a step at once, by simulation: a workload's, or that of a run on another host, by the run's measurements.

    Args:
        target: a name with an optional size, `package.module:function`, or for a simulated host a graph file; or a run
            folder, whose step goes to HOST: op times, links, factors and the best placement are carried over, and a
            search goes on from there
        placing: where ops may run; given with a run folder, instead of all that the run had
        grouping: how ops are grouped; a run folder says so itself
        batch: how the batch of a step is cut; likewise
        host: `auto`, `cores`, `cores:2x4`, `cuda`, `cuda/2`, `cuda+cpu`, `procs:2`, `cuda-procs`, a preset, or a
            host file
        evaluations: placements to simulate, by default 16 for a workload; with 1 the policy's first guess is taken
        seconds: search of a run's step for so long, by default 5s where no evaluations are given
        method: any method of `rlplace compare`; by default `schedule`, for a run `portfolio`
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
    # a folder of the current one may be called as a workload is
    folder, is_path = Path(target), len(Path(target).parts) > 1
    is_run = folder.is_dir() and (is_path or any((folder / name).exists() for name in ("session.db", "config.json")))
    path = PLACEMENT if placement is None and run is None else placement
    if not is_run:
        for name, value in (("seconds", seconds), ("run", run), ("workload", workload)):
            if value is not None:
                raise InvalidValue(
                    name,
                    str(value),
                    "none beside a workload",
                    where="place",
                    hint="It is of a run folder that is placed again.",
                )
        setup = setup_of(
            target, host, placing, batch, grouping, no_wait=no_wait, seed=seed, workload_seed=workload_seed
        )
        from rlplace.training.place_and_replace import place_workload

        result = place_workload(
            setup,
            _free(path or PLACEMENT, overwrite),
            method=method or METHOD,
            evaluations=evaluations or EVALUATIONS,
            is_quiet=quiet,
        )
    else:
        has_options = grouping != type(grouping)() or batch != type(batch)()
        for field, given, hint in (
            ("options", has_options and "of groups or of the batch", "Groups and micro-batches are those of the run."),
            ("workload_seed", workload_seed, "The workload is built as the run built it."),
        ):
            if given:
                raise InvalidValue(field, given, "none beside a run folder", where="place", hint=hint)
        found = resolve_host(host, gangs=placing.gangs)
        from rlplace.training.place_and_replace import replace_run

        result = replace_run(
            folder,
            found,
            None if path is None else _free(path, overwrite),
            host_word=host,
            run=run,
            workload=workload,
            method=method or RUN_METHOD,
            seconds=math.inf if seconds is None else seconds,
            evaluations=math.inf if evaluations is None else evaluations,
            seed=seed,
            constraints=placing.own_constraints(found),
            gangs=placing.gangs,
            overwrite=overwrite,
            is_waiting=not no_wait,
            is_quiet=quiet,
        )
    answer(result, _words(result), json)


def _free(path: Path, overwrite: bool) -> Path:
    """The path, if a placement may be written there."""
    if path.exists() and not overwrite:
        raise FileProblem(path, "is there already: name another file, or give `--overwrite`.")
    return path


def _words(result: dict[str, Any]) -> str:
    """The answer of `place` in words."""
    single_s, carried = result["single_s"], ""
    single = f"best single device {format_ms(single_s)} ms" if math.isfinite(single_s) else "no single device holds it"
    if math.isfinite(result.get("before_s", math.nan)):
        fits = math.isfinite(result["carried_s"])
        now = f"{format_ms(result['carried_s'])} ms" if fits else "it does not fit into memory"
        carried = f"it was {format_ms(result['before_s'])} ms on {result['host']['from']}, carried over {now}; "
    slower = "this is slower than the best single device: give more `--evaluations`, or do not place this model"
    return (
        f"{result['placement'] or result['new_run']}: {format_ms(result['step_time_s'])} ms simulated after "
        f"{counted(result['evaluations'], 'placement')} in {result['plan_s']:.2f} s; {carried}{single}, "
        f"bound {format_ms(result['lower_bound_s'])} ms ({result['lower_bound']})"
        + (f"\nwarning: {slower}" if result["step_time_s"] > single_s else "")
    )


def explain(
    folder: tyro.conf.Positional[Path],
    top: int = 12,
    rank: int | None = None,
    workload: str | None = None,
    json: bool = False,
) -> None:
    """Show where a run's step spends its time: devices, critical path, costliest copies, alternatives, and advice.

    It reads the run folder alone: neither the model nor the host is needed, and no code of yours is imported. With
    `--rank` it shows the program of a device instead, and captures the workload again for it.

    Args:
        folder: a run folder
        top: most modules of the critical path to show
        rank: show what this device of the host (0, 1, ...) does, in order: ops, sends, receives, waits, frees
        workload: with rank, your own function again: code named in a run is imported only if you pass it
        json: print one JSON object on stdout
    """
    from rlplace.report.console import explanation_tables, program_table
    from rlplace.session.session import read_explanation

    if top < 1:
        raise InvalidValue("top", top, "at least 1")
    if rank is None:
        found = read_explanation(folder)
        answer_tables(found.to_dict(), lambda: [explanation_tables(found, top)], json, markup=False)
    else:
        from rlplace.export.formats import program_of_run

        program = program_of_run(folder, rank, workload=workload)
        answer_tables(program, lambda: [program_table(program)], json, markup=False)


def export(
    folder: tyro.conf.Positional[Path],
    workload: str | None = None,
    format: str = "script",
    cache_tokens: int = 0,
    check: bool = False,
    json: bool = False,
) -> None:
    """A run's placement as a model that runs or in another format: writes it into FOLDER, or checks it against eager.

    Args:
        folder: a run folder
        workload: the workload again, if it is your own function: code named in a run is imported only if you pass it
        format: script (FOLDER/step.py, a short program that trains as placed), csv (one row an op), device_map (of
            Hugging Face), dtensor (tensor parallelism of PyTorch), pipeline (torch.distributed.pipelining), torchrec
            (a sharding plan of embedding tables), torchrun (a program with a process for each device, also on several
            machines), or your own format; list shows all formats and their purposes, and writes nothing
        cache_tokens: with device_map, also count keys and values of so many tokens a sequence, prompt and new ones
        check: compare 5 training steps with eager ones on one device, in float64
        json: print the result as one JSON object on stdout
    """
    from rlplace.export.formats import export_run

    result = export_run(folder, workload=workload, is_check=check, format=format, cache_tokens=cache_tokens)
    if json:
        print_json(result)
    if check and not result["ok"]:
        raise SystemExit(1)


def report(folder: tyro.conf.Positional[Path], json: bool = False) -> None:
    """Write a run's report: one page for a browser that needs no network, FOLDER/report.html.

    It reads the run folder alone: neither the model nor the host is needed, and no code of yours is imported.

    Args:
        folder: a run folder
        json: print the result as one JSON object on stdout
    """
    from rlplace.report.html.page import write_report

    path = write_report(folder)
    say(f"wrote {path}: open it in a browser")
    if json:
        print_json({"schema": 1, "path": str(path), "bytes": path.stat().st_size})
