"""`calibrate`: fits the simulator's few free figures to measured steps, and says what that gained."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.measure.hosts.host import Link
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator

FIELDS = ("op_scale", "op_overhead_s", "corun", "dispatch_s", "transfer_latency_s", "transfer_scale")
_SMALLEST = 1e-7


@dataclass(frozen=True)
class Figures:
    """The free figures; nothing else is fitted, so the rules of the model stay exact."""

    op_scale: float = 1.0
    """Factor on every op's time."""
    op_overhead_s: float = 0.0
    """Added to every op."""
    corun: float = 0.0
    """How much a busy device slows another that shares its memory or its GPU (`Host.corun_slowdown`)."""
    dispatch_s: float = 0.0
    """Time under the interpreter lock to launch an op or a copy."""
    transfer_latency_s: float = 0.0
    """Added to every link's latency."""
    transfer_scale: float = 1.0
    """Factor on every transfer's seconds per byte."""


@dataclass(frozen=True)
class Calibration:
    """The better of a profiled problem and a fitted one.

    Attributes:
        problem: the same graph and groups, with fitted costs, links and host figures; as profiled where the fit is
            worse on the held-out plans.
        figures: what was fitted, whether it is kept or not.
        is_kept: whether `problem` has these figures.
        error_before: median |simulated / measured - 1| on the held-out plans, as profiled.
        error_after: the same, with the fitted figures.
        num_fitted: plans fitted to.
        num_held_out: plans judged on.
    """

    problem: Problem
    figures: Figures
    is_kept: bool
    error_before: float
    error_after: float
    num_fitted: int
    num_held_out: int


def calibrate(
    problem: Problem,
    plans: Sequence[Plan],
    step_times_s: Sequence[float],
    *,
    num_held_out: int | None = None,
    seed: int = 0,
) -> Calibration:
    """Fits `Figures` to the measured step times of `plans`, and keeps them unless they predict unseen plans worse.

    The fit is by mean absolute and root mean square log ratio. A few plans measured on a busy machine can bend it, so
    the median error on the plans that it has not seen decides: where it is worse there, the problem stays as profiled.

    Args:
        problem: as profiled.
        plans: as they were measured; the fit re-times exactly these.
        step_times_s: their median step times.
        num_held_out: how many of them only judge the fit; a third by default.
        seed: of the choice of those.

    Raises:
        InvalidValue: fewer than four plans, or one without a finite time.
    """
    measured_s = np.asarray(step_times_s, dtype=np.float64)
    if len(plans) < 4 or len(plans) != len(measured_s) or not np.all(np.isfinite(measured_s) & (measured_s > 0)):
        raise InvalidValue("plans", len(plans), "at least 4, each with a finite measured step time", where="calibrate")
    held_out = len(plans) // 3 if num_held_out is None else num_held_out
    order = np.random.default_rng(seed).permutation(len(plans))
    judged, fitted = order[:held_out], order[held_out:]

    def ratios(figures: Figures, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
        simulator = Simulator(apply(problem, figures), threads=1)
        return np.array([simulator.retime(plans[k]).step_time_s for k in chosen]) / measured_s[chosen]

    figures = _fit(lambda candidate: ratios(candidate, fitted), problem)
    before, after = (float(np.median(np.abs(ratios(f, judged) - 1.0))) for f in (as_profiled(problem), figures))
    is_kept = not after > before
    chosen = apply(problem, figures) if is_kept else problem
    return Calibration(chosen, figures, is_kept, before, after, len(fitted), len(judged))


def as_profiled(problem: Problem) -> Figures:
    """The figures that change nothing: where the host slows devices that run together down, they go on doing so."""
    return Figures(corun=max((value for row in problem.host.corun_slowdown for value in row), default=0.0))


def apply(problem: Problem, figures: Figures) -> Problem:
    """The problem with `figures` in its costs, links and host."""
    graph, host = problem.graph, problem.host
    runs = ~graph.is_source[:, None]
    op_time_s = np.where(runs, problem.costs.op_time_s * figures.op_scale + figures.op_overhead_s, 0.0)
    op_time_s = np.maximum(op_time_s - np.where(runs, figures.dispatch_s, 0.0), np.where(runs, _SMALLEST, 0.0))
    pools = [device.memory_pool or device.name for device in host.devices]
    prior = np.array(host.corun_slowdown or np.zeros((len(pools),) * 2))
    slowdown = tuple(
        tuple(figures.corun if d != e and (pools[d] == pools[e] or prior[d, e] > 0) else 0.0 for e in range(len(pools)))
        for d in range(len(pools))
    )
    links = tuple(
        Link(
            link.name, link.bandwidth_bytes_per_s / figures.transfer_scale, link.latency_s + figures.transfer_latency_s
        )
        for link in host.links
    )
    fitted_host = dataclasses.replace(
        host,
        links=links,
        corun_slowdown=slowdown if figures.corun > 0 else (),
        dispatch_s=figures.dispatch_s,
        copy_dispatch_s=figures.dispatch_s,
    )
    return dataclasses.replace(problem, host=fitted_host, costs=dataclasses.replace(problem.costs, op_time_s=op_time_s))


def _fit(ratios_of: object, problem: Problem) -> Figures:
    from scipy.optimize import minimize

    mean_op_s = float(problem.costs.op_time_s[~problem.graph.is_source].mean())
    scale = np.array([1.0, mean_op_s, 1.0, mean_op_s, 1e-4, 1.0])
    start = np.array(dataclasses.astuple(as_profiled(problem))) / scale

    def figures_of(x: NDArray[np.float64]) -> Figures:
        values = np.abs(x) * scale
        values[_FACTORS] = np.clip(values[_FACTORS], 0.05, 20.0)  # a factor of 0 would make a link infinitely fast
        return Figures(**dict(zip(FIELDS, values.tolist(), strict=True)))

    def loss(x: NDArray[np.float64]) -> float:
        errors = np.log(ratios_of(figures_of(x)))  # type: ignore[operator]
        # absolute log errors: one placement disturbed by a neighbour must not bend the fit; a weak pull to the profile
        pull = 1e-3 * float(np.abs(x - start).sum())
        return float(np.mean(np.abs(errors)) + 0.5 * np.sqrt(np.mean(errors**2)) + pull)

    best = minimize(
        loss,
        start,
        method="Nelder-Mead",
        options={"maxfev": 300, "xatol": 1e-3, "fatol": 1e-5, "initial_simplex": _simplex(start)},
    )
    return figures_of(best.x)


_FACTORS = [FIELDS.index("op_scale"), FIELDS.index("transfer_scale")]


def _simplex(start: NDArray[np.float64]) -> NDArray[np.float64]:
    steps = np.array([0.1, 0.05, 0.15, 0.05, 0.2, 0.5])
    return np.vstack([start, start + np.diag(steps)])
