"""`run_fidelity`: the simulator against this machine, over placements that it was not fitted to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.compare.one_placement import counted_peaks
from rlplace.errors import InvalidValue
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.host_model import describe
from rlplace.measure.measurement import MeasurementLog
from rlplace.measure.plan import Plan
from rlplace.measure.prediction_error import Fidelity, draw_mix, judge_fidelity
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.race import idle_share
from rlplace.measure.timing.threads import one_thread_here
from rlplace.report import save_fidelity_png
from rlplace.report.console import make_progress
from rlplace.search import Budget, anneal_from, eft
from rlplace.search.groupings import majority_devices
from rlplace.session.calibrate import Known, calibrate_on, measure_all, plans_of, step_times
from rlplace.session.prepare import prepare
from rlplace.session.setup import Setup
from rlplace.session.steps import Steps, versions
from rlplace.store.log import check_store, measuring

ROUNDS = 9
SEARCH = Budget(evaluations=4000, seconds=30.0)


@dataclass(frozen=True, eq=False)
class Mix:
    """Measured placements of every kind, and others to calibrate on.

    Attributes:
        known: the problem as profiled, with the placements to calibrate on and their measurements.
        plans: the P unseen ones.
        kinds: of each.
        first_s: (P,) measured seconds ...
        second_s: (P,) ... and again.
        counted: (P, D) peak bytes that the runner counted.
        idle_share: of this machine, before.
    """

    known: Known
    plans: list[Plan]
    kinds: tuple[str, ...]
    first_s: NDArray[np.float64]
    second_s: NDArray[np.float64]
    counted: NDArray[np.float64]
    idle_share: float

    @property
    def measured_s(self) -> NDArray[np.float64]:
        """(P,) the mean of both measurements."""
        return (self.first_s + self.second_s) / 2

    def judge(self, problem: Problem) -> tuple[Fidelity, list[float]]:
        """The figures of the simulator with the costs of `problem`, and its times in seconds.

        Plans are those of the profiled simulator; what is judged re-times exactly these.
        """
        simulator = Simulator(problem)
        outcomes = [simulator.retime(plan) for plan in self.plans]
        simulated_s = [outcome.step_time_s for outcome in outcomes]
        peaks = np.array([outcome.peak_bytes for outcome in outcomes], dtype=np.float64)
        figures = judge_fidelity(simulated_s, self.first_s.tolist(), self.second_s.tolist(), peaks, self.counted)
        return figures, simulated_s


@one_thread_here()
def run_fidelity(setup: Setup, *, num_placements: int, num_fit: int, plot: Path) -> dict[str, Any]:
    """What `rlplace fidelity --json` prints; saves the scatter plot.

    Args:
        setup: the step, on a host of this machine; measured step times are kept in the store, and measured afresh.
        num_placements: unseen placements.
        num_fit: other placements, that the simulator is calibrated on.
        plot: where the picture goes.

    Raises:
        FileProblem: a store was named that cannot be opened.
        InvalidValue: a simulated host, a graph file, or too few placements.
        RunnerError: a placement failed.
    """
    spec, host, seed = setup.spec, setup.host, setup.seed
    if host.is_simulated:
        raise InvalidValue("host", host.name, "a host of this machine (`auto`, `cores`, `cuda`)", where="fidelity")
    if num_placements < 8 or num_fit < 4:
        raise InvalidValue("placements", (num_placements, num_fit), "at least 8, and 4 to fit", where="fidelity")
    check_store(setup.store)
    progress = make_progress()
    with measuring(host, setup.store, workload=str(spec), say=progress.say, is_waiting=setup.is_waiting) as log:
        prepared = prepare(Steps(spec, host, setup.workload_seed, setup.asked), progress.say, setup)
        problem = prepared.problem
        mix = measure_mix(
            problem, num_placements=num_placements, num_fit=num_fit, seed=seed, log=log, isolated=setup.isolated
        )
    calibration = calibrate_on(mix.known)
    for line in calibration.say():
        progress.say(line)
    figures, simulated_s = mix.judge(calibration.problem)
    save_fidelity_png(plot, simulated_s, mix.measured_s.tolist(), mix.kinds, figures.to_dict())
    return {
        "schema": 1,
        "workload": str(spec),
        "seed": seed,
        "workload_seed": setup.workload_seed,
        "micro_batches": prepared.to_dict(),
        "host": host.name,
        **figures.to_dict(),
        "calibration": {
            "is_kept": calibration.is_kept,
            "error_before": calibration.error_before,
            "error_after": calibration.error_after,
            "num_fitted": calibration.num_measured,
            "learned": describe(calibration.posterior),
        },
        "idle_share": mix.idle_share,
        "versions": versions(),
        "simulated_s": simulated_s,
        "measured_s": mix.measured_s.tolist(),
        "kinds": list(mix.kinds),
        "plot": str(plot),
    }


def measure_mix(
    problem: Problem,
    *,
    num_placements: int,
    num_fit: int,
    seed: int,
    log: MeasurementLog | None = None,
    isolated: bool | None = None,
) -> Mix:
    """Draws, measures and counts `num_placements` placements twice, after `num_fit` others.

    Args:
        problem: as profiled, on a host of this machine.
        num_placements: unseen placements.
        num_fit: other placements, to calibrate on.
        seed: of what is drawn.
        log: keeps what is measured.
        isolated: whether placements are measured in a worker process; see `Evaluator`.

    Raises:
        RunnerError: a placement failed.
    """
    progress, simulator = make_progress(), Simulator(problem)
    start = majority_devices(problem, eft(problem))
    best, _ = anneal_from(problem, simulator, start, SEARCH, seed=seed)
    generator = np.random.default_rng(seed)
    test_groups, kinds = draw_mix(problem, best, num_placements, generator)
    fit_groups, _ = draw_mix(problem, best, num_fit, generator, unlike=test_groups)
    evaluator, idle = Evaluator(problem, simulator, log=log, isolated=isolated), idle_share()
    try:
        progress.say(f"measuring {num_fit} placements to calibrate on")
        fit_plans = plans_of(problem, simulator, fit_groups)
        known = Known(problem, fit_plans, measure_all(evaluator, fit_plans, rounds=ROUNDS, seed=seed))
        plans = plans_of(problem, simulator, test_groups)
        progress.say(f"measuring {num_placements} unseen placements, twice")
        first_s, second_s = (step_times(measure_all(evaluator, plans, rounds=ROUNDS, seed=seed + k)) for k in (1, 2))
        traces = (evaluator.trace(plan, num_steps=1, warmup=1)[0] for plan in plans)
        counted = np.stack([counted_peaks(trace, problem.host.num_devices) for trace in traces])
    finally:
        evaluator.close()
    return Mix(known, plans, kinds, first_s, second_s, counted.astype(np.float64), idle)
