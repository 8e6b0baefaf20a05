"""`train --cluster`: searches measure on every node of a cluster; on a simulated host each method is a task of it."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.cluster.evaluator import ClusterEvaluator
from rlplace.files import write_bytes_atomic
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.measurement_log import MeasurementLog
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.report.progress import Progress, make_progress
from rlplace.runs.tracking import NoTracker, Tracker
from rlplace.training.agent.config import AgentConfig
from rlplace.training.heuristics import compile_kernels
from rlplace.training.methods import METHODS
from rlplace.training.search_loop import LoopResult
from rlplace.training.side_by_side import search_side_by_side

LEARNED_FILE = "policy.safetensors"
"""What a method learned is saved under this name before it travels."""


def make_evaluator(
    cluster: Cluster | None,
    problem: Problem,
    simulator: Simulator,
    reference: NDArray[np.int32],
    *,
    seed: int,
    log: MeasurementLog | None,
    isolated: bool | None,
    say: Callable[[str], None],
) -> Evaluator:
    """What measures for the searches of a run: every node of a cluster that is like this machine, or this one alone.

    Args:
        cluster: whose nodes measure; None for this machine alone.
        problem: what is placed; on a simulated host nothing is measured.
        simulator: plans.
        reference: (N,) placement that every measured plan is timed beside.
        seed: of random ops.
        log: keeps what is run.
        isolated: whether plans run in a worker process.
        say: told who measures.
    """
    if cluster is None or problem.host.is_simulated:
        return Evaluator(problem, simulator, reference, seed=seed, log=log, isolated=isolated)
    return ClusterEvaluator(cluster, problem, simulator, reference, seed=seed, log=log, isolated=isolated, say=say)


def num_machines(evaluator: Evaluator) -> int:
    """Machines that measure for the searches of a run."""
    return evaluator.num_workers if isinstance(evaluator, ClusterEvaluator) else 1


def agent_for(config: AgentConfig, evaluator: Evaluator) -> AgentConfig:
    """`config` with a batch of one plan at least for each machine that measures."""
    return dataclasses.replace(config, batch=max(config.batch, num_machines(evaluator)))


def search_on_cluster(
    cluster: Cluster,
    methods: Mapping[str, Mapping[str, Any]],
    problem: Problem,
    seconds: float,
    *,
    seed: int,
    progress: Progress,
    tracker: Tracker,
    single_s: float = float("nan"),
    on_best: Callable[[str, Plan, float], None] = lambda method, plan, step_time_s: None,
) -> dict[str, LoopResult]:
    """As `search_side_by_side`, but each method is a task of a cluster, with one CPU and one simulator thread.

    What a method comes to is known when it has ended. Ctrl-C cancels the tasks, and what had not ended is lost.

    Args:
        cluster: whose workers search.
        methods: names of `METHODS`, each with its options.
        problem: on a simulated host.
        seconds: wall time of each.
        seed: of every method's draws.
        progress: told how much time is left.
        tracker: told what was learned, and the best of each method.
        single_s: step time on the best single device.
        on_best: told the best method so far, its plan and step time, whenever a method ends that is better.
    """
    names = [METHODS[name].name for name in methods]
    progress.say(f"searching on the cluster: {', '.join(names)}, each with one core")
    task = partial(_searched, methods, problem, seconds, seed, single_s)
    found: dict[str, LoopResult] = {}
    best_s, begin_s = float("inf"), time.monotonic()

    def tell() -> None:
        progress.update(
            placements=sum(result.num_scored for result in found.values()),
            best_s=best_s,
            single_s=single_s,
            left_s=max(begin_s + seconds - time.monotonic(), 0.0),
            budget_s=seconds,
        )

    for index, result in cluster.map(task, names, on_wait=tell):
        found[names[index]] = result
        for figures in result.learning:
            tracker.log({f"train/{name}": value for name, value in figures.items()})
        if result.history:
            tracker.log_best_so_far(names[index], result.history[-1], single_s)
            if result.plan is not None and result.history[-1].best_s < best_s:
                best_s = result.history[-1].best_s
                on_best(names[index], result.plan, best_s)
        progress.say(f"{names[index]} has ended: {result.num_scored:,} placements in {result.seconds:.3g} s")
    return {name: found[name] for name in names}


@dataclass(frozen=True)
class SavedFiles:
    """What a method learned elsewhere, as the files that it is saved in.

    Attributes:
        files: contents by name; one of them is `LEARNED_FILE`.
    """

    files: Mapping[str, bytes]

    def save(self, path: Path) -> None:
        """Writes them to `path` and beside it, under its own name without the suffix."""
        for name, data in self.files.items():
            write_bytes_atomic(path.with_suffix(Path(name).suffix), data)


def _searched(
    methods: Mapping[str, Mapping[str, Any]], problem: Problem, seconds: float, seed: int, single_s: float, name: str
) -> LoopResult:
    """What one method comes to, on a worker."""
    compile_kernels(problem, Simulator(problem, threads=1))
    found = search_side_by_side(
        {name: methods[name]},
        problem,
        seconds,
        seed=seed,
        progress=make_progress(is_quiet=True),
        tracker=NoTracker(),
        single_s=single_s,
        threads=1,
    )[name]
    if found.learned is None:
        return found
    with tempfile.TemporaryDirectory() as folder:
        found.learned.save(Path(folder) / LEARNED_FILE)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    return dataclasses.replace(found, learned=SavedFiles(files))
