"""`place_workload`: a placement of a workload after a handful of simulated steps, as `rlplace place` reports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlplace.errors import RunnerError
from rlplace.locks import measuring_alone
from rlplace.measure import Placement, Simulator, save_placement
from rlplace.measure.bounds import lower_bound_s
from rlplace.measure.timing.threads import one_thread_here
from rlplace.report.console import make_progress
from rlplace.search import Budget, find
from rlplace.search.rules import baselines
from rlplace.session.prepare import Steps, prepare
from rlplace.session.setup import Setup
from rlplace.training.method_choice import METHODS

LEAST_TO_CHOOSE = 1000
"""Evaluations of the search that micro-batches and orders of ops are chosen for, at least: few would choose blindly."""


@one_thread_here()
def place_workload(
    setup: Setup, path: Path, *, method: str, evaluations: int, is_quiet: bool = False
) -> dict[str, Any]:
    """The object that `--json` prints:  placement, method, step_time_s, single_s, evaluations, plan_s, the bound,
    micro_batches.

    Args:
        setup: the step; on a host of this machine it is profiled, but no placement is measured.
        path: the placement goes here.
        method: a name of `METHODS`.
        evaluations: placements that it may simulate, beside those that choose how the batch is cut.
        is_quiet: no progress.

    Raises:
        UnknownName: no such method.
        RunnerError: no placement that was tried fits into memory; or another search measures here, and waiting was not
            asked for.
        UserError: the workload cannot be built, captured or cut so.
    """
    chosen = METHODS[method]
    progress = make_progress(is_quiet=is_quiet)
    steps = Steps(setup.spec, setup.host, setup.workload_seed, setup.asked)
    with measuring_alone(setup.host, say=progress.say, is_waiting=setup.is_waiting):  # profiling counts seconds, too
        prepared = prepare(steps, progress.say, setup, evaluations=max(evaluations, LEAST_TO_CHOOSE))
    problem = prepared.problem
    simulator = Simulator(problem)
    found = find(problem, chosen.name, simulator, Budget(evaluations=evaluations), seed=setup.seed)
    if found.devices is None:
        raise RunnerError(f"none of {found.evaluations} placements fits into memory; give more `--evaluations`.")
    plan = found.plan if found.plan is not None else simulator.plan(found.devices)
    save_placement(Placement.of(problem, plan, method), path)
    single_s = float(simulator.step_times(baselines.best_single(problem, simulator)[None])[0])
    bound_s, bound = lower_bound_s(problem)
    return {
        "schema": 1,
        "placement": str(path),
        "method": method,
        "seed": setup.seed,
        "workload_seed": setup.workload_seed,
        "kind": "simulated",
        "step_time_s": found.step_time_s,
        "single_s": single_s,
        "evaluations": found.evaluations,
        "plan_s": found.plan_s,
        "lower_bound_s": bound_s,
        "lower_bound": bound,
        "micro_batches": prepared.to_dict(),
    }
