"""`train --cluster`: searches measure on every node of a cluster; on a simulated host each method is a task of it."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.cluster.cluster_evaluator import ClusterEvaluator
from rlplace.files import write_bytes_atomic
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.measurement import MeasurementLog
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.report.console import Progress, make_progress
from rlplace.search.methods import Method, adopt_methods
from rlplace.search.task import Budget
from rlplace.session.facts import MethodResult
from rlplace.session.session import MethodKeeper
from rlplace.training.agent.config import AgentConfig
from rlplace.training.methods import METHODS
from rlplace.training.searches.side_by_side import search_side_by_side
from rlplace.training.table import compile_kernels
from rlplace.training.tracking import NoTracker, Tracker

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
    budget: Budget,
    *,
    seed: int,
    progress: Progress,
    tracker: Tracker,
    single_s: float = float("nan"),
    on_best: Callable[[str, Plan, float], None] = lambda method, plan, step_time_s: None,
    before: Mapping[str, MethodResult] | None = None,
    keepers: Mapping[str, MethodKeeper] | None = None,
) -> dict[str, MethodResult]:
    """As `search_side_by_side`, but each method is a task of a cluster, with one CPU and one simulator thread.

    Under a budget of evaluations the result is that of this machine, to the bit. What a method comes to is known when
    it has ended: Ctrl-C cancels those that have not, and a run that goes on begins them again.

    Args:
        cluster: whose workers search.
        methods: names of `METHODS`, each with its options.
        problem: on a simulated host.
        budget: of each method.
        seed: of every method's draws.
        progress: told how much time is left.
        tracker: told what was learned, and the best of each method.
        single_s: step time on the best single device.
        on_best: told the best method so far, its plan and step time, whenever a method ends that is better.
        before: what methods had come to where the search was interrupted.
        keepers: keep what methods find.
    """
    before, keepers = before or {}, keepers or {}
    found = {name: before[name] for name in methods if name in before and before[name].is_done}
    options = {METHODS[name].name: _sent(given) for name, given in methods.items() if name not in found}
    names, best_s, begin_s = list(options), float("inf"), time.monotonic()
    if names:
        progress.say(f"searching on the cluster: {', '.join(names)}, each with one core")

    def tell() -> None:
        left_s = max(begin_s + budget.seconds - time.monotonic(), 0.0)
        placements = sum(result.num_scored for result in found.values())
        progress.update(placements=placements, best_s=best_s, single_s=single_s, left_s=left_s, budget_s=budget.seconds)

    task = partial(_searched, [METHODS[name] for name in names], options, problem, budget, seed, single_s)
    for index, result in cluster.map(task, names, on_wait=tell if math.isfinite(budget.seconds) else _nothing):
        name = names[index]
        found[name] = result
        for figures in result.learning:
            tracker.log({f"train/{figure}": value for figure, value in figures.items()})
        if result.history:
            tracker.log_best_so_far(name, result.history[-1], single_s)
            if result.plan is not None and result.history[-1].best_s < best_s:
                best_s = result.history[-1].best_s
                on_best(name, result.plan, best_s)
        if name in keepers:
            if result.learned is not None:
                keepers[name].keep_learned(result.learned)
            keepers[name].keep(result)
        failed = "" if result.failure is None else f" ({result.failure.why}: what it found until then counts)"
        progress.say(f"{name} has ended{failed}: {result.num_scored:,} placements in {result.seconds:.3g} s")
    return {name: found[name] for name in methods}


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


def _nothing() -> None:
    pass


def _sent(options: Mapping[str, Any]) -> dict[str, Any]:
    """A method's options but for files of the run folder, which are on this machine."""
    return {name: value for name, value in options.items() if name != "learner_file"}


def _searched(
    methods: Sequence[Method],
    options: Mapping[str, Mapping[str, Any]],
    problem: Problem,
    budget: Budget,
    seed: int,
    single_s: float,
    name: str,
) -> MethodResult:
    """What one method comes to, on a worker."""
    adopt_methods(methods)
    compile_kernels(problem, Simulator(problem, threads=1))
    found = search_side_by_side(
        {name: options[name]},
        problem,
        budget,
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
