"""`advise_workload`: what `rlplace advise` does, from words to a verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rlplace.errors import RlplaceError
from rlplace.format import format_seconds
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.profile import profile_costs, profile_links
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Problem
from rlplace.measure.timing.eager_step import EagerStep
from rlplace.measure.timing.threads import one_thread_here
from rlplace.report.console import Progress, make_progress
from rlplace.runs.advise.advise import advise
from rlplace.runs.advise.verdict import Words
from rlplace.runs.host_lock import measuring_alone
from rlplace.session.cut import WHOLE, CutOptions
from rlplace.session.prepare import describe_cut
from rlplace.session.steps import Steps, make_problem
from rlplace.workloads import WorkloadSpec

MOST_COUNT = 16
"""Most micro-batches that `auto` tries."""
PROFILE_SHARE = 0.2
"""Part of the time for traced steps of the whole batch."""
LEAST_STEPS, MOST_STEPS = 1, 8
"""Of one kind of device that are traced."""
COPIES = 7
"""Of each size over each link."""


@one_thread_here()
def advise_workload(
    spec: WorkloadSpec,
    host: Host,
    *,
    host_word: str,
    seconds: float = 30.0,
    seed: int = 0,
    workload_seed: int = 0,
    constraints: Constraints | None = None,
    asked: CutOptions = WHOLE,
    is_waiting: bool = True,
    isolated: bool | None = None,
    is_quiet: bool = False,
) -> dict[str, Any]:
    """What `--json` prints: the verdict with its figures, capture_s, seconds, micro_batches.

    Args:
        spec: the workload.
        host: where; one of this machine is profiled in a hurry.
        host_word: as the user named it.
        seconds: for all but building the model and capturing its step, which are told apart.
        seed: of the search.
        workload_seed: of the workload's weights and inputs.
        constraints: the user's pins and exclusions.
        asked: how the batch may be cut: a number beside the whole batch, or `auto`.
        is_waiting: wait for another search that measures on this machine, instead of giving up.
        isolated: whether placements run in a worker process; see `Evaluator`.
        is_quiet: no progress.

    Raises:
        RunnerError: another search measures here, and nobody wants to wait.
        UserError: the workload cannot be built or captured.
    """
    progress = make_progress(is_quiet=is_quiet)
    with measuring_alone(host, say=progress.say, is_waiting=is_waiting):
        seeds = seed, workload_seed
        return _advised(spec, host, host_word, seconds, seeds, constraints, asked, isolated, progress, is_quiet)


def _advised(
    spec: WorkloadSpec,
    host: Host,
    host_word: str,
    seconds: float,
    seeds: tuple[int, int],
    constraints: Constraints | None,
    asked: CutOptions,
    isolated: bool | None,
    progress: Progress,
    is_quiet: bool,
) -> dict[str, Any]:
    """As `advise_workload`, where nobody else measures."""
    begin_s = time.monotonic()
    progress.say(f"reading {spec}" if spec.is_file else f"building {spec} and capturing its step")
    seed, workload_seed = seeds
    steps = Steps(spec, host, workload_seed, asked)
    graph = steps.graph(1)
    capture_s = time.monotonic() - begin_s
    progress.say(
        f"{spec}: {graph.num_ops:,} ops after {format_seconds(capture_s)}; about {format_seconds(seconds)} from here"
    )
    begin_s = time.monotonic()
    make = _estimated(spec, host, constraints, is_quiet=is_quiet)
    if not host.is_simulated:
        make = _profiled(graph, host, seconds, constraints, progress.say)
    problem = make(graph, 1)
    counts = counts_for(host) if asked.is_auto else () if asked.count == 1 else (int(asked.count),)
    verdict = advise(
        problem,
        seconds=max(seconds - (time.monotonic() - begin_s), 1.0),
        seed=seed,
        cuts={count: partial(_cut, steps, make, count) for count in counts},
        words=Words(str(spec), host_word),
        say=progress.say,
        isolated=isolated,
    )
    progress.close()
    return verdict.to_dict() | {
        "workload": str(spec),
        "seed": seed,
        "workload_seed": workload_seed,
        "host": host.name,
        "capture_s": capture_s,
        "seconds": time.monotonic() - begin_s,
        "micro_batches": describe_cut(graph, asked),
    }


Make = Callable[[OpGraph, int], Problem]


def counts_for(host: Host) -> tuple[int, ...]:
    """The numbers of micro-batches that `auto` tries beside the whole batch while there is time: one a device first."""
    devices = sum(not device.members for device in host.devices)
    wanted = (min(devices, MOST_COUNT), min(2 * devices, MOST_COUNT), 2)
    return tuple(dict.fromkeys(count for count in wanted if count > 1))


def _cut(steps: Steps, make: Make, count: int) -> Problem:
    return make(steps.graph(count), count)


def _estimated(spec: WorkloadSpec, host: Host, constraints: Constraints | None, *, is_quiet: bool) -> Make:
    """Makes problems on a simulated host; that it is one is said once."""
    loud, quiet = make_progress(is_quiet=is_quiet), make_progress(is_quiet=True)

    def make(graph: OpGraph, count: int) -> Problem:
        progress = loud if count == 1 else quiet
        return make_problem(graph, host, 256, progress.say, spec=spec, count=count, constraints=constraints)

    return make


def _profiled(
    graph: OpGraph, host: Host, seconds: float, constraints: Constraints | None, say: Callable[[str], None]
) -> Make:
    """Makes problems of this machine from as few steps and copies as the time allows."""
    say("profiling with few steps: figures are rougher than those of `train`")
    linked = profile_links(host, repeats=COPIES)
    num_steps = _num_steps(graph, host, seconds)

    def make(graph: OpGraph, count: int) -> Problem:
        costs = profile_costs(graph, linked, num_steps=num_steps, warmup=1, on_progress=say)
        return Problem.grouped(graph, linked, costs, constraints=constraints)

    return make


def _num_steps(graph: OpGraph, host: Host, seconds: float) -> int:
    """How many steps may be traced on each kind of device, by the pace of plain PyTorch; few where that cannot run."""
    try:
        eager = EagerStep(graph, host, num_threads=1)
        eager()
        step_s = eager()
    except RlplaceError:
        return LEAST_STEPS
    kinds = len({device.kind for device in host.devices})
    return int(min(max(seconds * PROFILE_SHARE / max(step_s * kinds, 1e-9), LEAST_STEPS), MOST_STEPS))
