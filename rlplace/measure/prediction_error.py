"""How far simulated step times are from measured ones (`Fidelity`), and a fit that brings them closer (`calibrate`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import refuse_if
from rlplace.measure.hosts.host import Link
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.simulate.simulator import Simulator

PLACEMENT_KINDS = ("random", "blocks", "near-best", "unbalanced")
TRIES = 1000
"""Draws for each placement after which there are too few to draw from."""


@dataclass(frozen=True)
class Fidelity:
    """Simulated against measured step times of unseen placements.

    A rank correlation is None where there is none: all times of one side are equal, as those of the three placements in
    the best quarter of a few may be.

    Attributes:
        spearman: rank correlation over all.
        spearman_best_quartile: among the quarter that measured best.
        median_abs_rel_error: of |simulated / measured - 1|.
        p90_abs_rel_error: 90th percentile of the same.
        pick_regret: measured time of the simulator's favourite over the best measured one, minus 1.
        peak_bytes_max_rel_error: largest |simulated / counted - 1| of a device's peak memory.
        spearman_ceiling: rank correlation of two measurements of the same placements.
        spearman_ceiling_best_quartile: the same among the best quarter.
        num_placements: how many.
    """

    spearman: float | None
    spearman_best_quartile: float | None
    median_abs_rel_error: float
    p90_abs_rel_error: float
    pick_regret: float
    peak_bytes_max_rel_error: float
    spearman_ceiling: float | None
    spearman_ceiling_best_quartile: float | None
    num_placements: int


def draw_mix(
    problem: Problem,
    best: NDArray[np.int32],
    count: int,
    generator: np.random.Generator,
    *,
    unlike: NDArray[np.int32] | None = None,
) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """(count, G) placements of groups, a quarter of each kind in turn, and their kinds.

    `random` is uniform; `blocks` cuts the groups into contiguous blocks at random places; `near-best` changes up to a
    tenth of the groups of `best`; `unbalanced` puts most groups on one device, or all of them. A group that may not be
    where that puts it goes to the next device where it may be.

    Args:
        problem: the problem to place.
        best: (G,) the best placement known.
        count: how many.
        generator: draws them.
        unlike: (_, G) placements that are not to be drawn again.

    Raises:
        InvalidValue: hardly any placement is left to draw.
    """
    seen = set() if unlike is None else {row.tobytes() for row in np.asarray(unlike, dtype=np.int32)}
    groups, devices = problem.grouping.num_groups, problem.host.num_devices
    drawn: list[NDArray[np.int32]] = []
    wanted = [PLACEMENT_KINDS[k % len(PLACEMENT_KINDS)] for k in range(count)]
    for _ in range(TRIES * count):
        if len(drawn) == count:
            break
        kind = wanted[len(drawn)]
        if kind == "random":
            row = problem.draw_groups(generator, 1)[0].astype(np.int64)
        elif kind == "blocks":
            cuts = np.sort(generator.integers(0, groups, int(generator.integers(1, 2 * devices))))
            first = generator.integers(devices)
            row = (first + np.searchsorted(cuts, np.arange(groups), side="right")) % devices
        elif kind == "near-best":
            row = np.array(best, dtype=np.int64)
            changed = generator.choice(groups, int(generator.integers(0, max(groups // 10, 2))), replace=False)
            row[changed] = generator.integers(0, devices, len(changed))
        else:
            favourite = generator.integers(devices)
            share = generator.choice([0.0, 0.1, 0.25])
            row = np.where(generator.random(groups) < share, generator.integers(0, devices, groups), favourite)
        placement = problem.nearest_groups(row)
        if placement.tobytes() not in seen:
            drawn.append(placement)
    refuse_if(
        len(drawn) < count,
        "placements",
        f"{len(drawn)} of {count} that were not drawn before in {TRIES * count:,} draws",
        "fewer of them, or constraints that leave more of them",
        where="fidelity",
    )
    return np.stack(drawn), tuple(wanted)


def judge_fidelity(
    simulated_s: Sequence[float],
    first_s: Sequence[float],
    second_s: Sequence[float],
    simulated_peaks: NDArray[np.float64],
    counted_peaks: NDArray[np.float64],
) -> Fidelity:
    """The figures, from simulated times and two measurements of the same placements.

    Args:
        simulated_s: (P,) predictions.
        first_s: (P,) first measurement ...
        second_s: (P,) ... and second; predictions are compared with their mean.
        simulated_peaks: (P, D) predicted peak bytes.
        counted_peaks: (P, D) the runner's own count.
    """
    simulated, first, second = (np.asarray(values, dtype=np.float64) for values in (simulated_s, first_s, second_s))
    measured = (first + second) / 2
    errors = np.abs(simulated / measured - 1.0)
    quartile = np.argsort(measured)[: max(len(measured) // 4, 3)]
    used = counted_peaks > 0  # a device that a placement leaves out holds nothing
    return Fidelity(
        spearman=_spearman(simulated, measured),
        spearman_best_quartile=_spearman(simulated[quartile], measured[quartile]),
        median_abs_rel_error=float(np.median(errors)),
        p90_abs_rel_error=float(np.percentile(errors, 90)),
        pick_regret=float(measured[int(np.argmin(simulated))] / measured.min() - 1.0),
        peak_bytes_max_rel_error=float(np.abs(simulated_peaks[used] / counted_peaks[used] - 1.0).max(initial=0.0)),
        spearman_ceiling=_spearman(first, second),
        spearman_ceiling_best_quartile=_spearman(first[quartile], second[quartile]),
        num_placements=len(measured),
    )


def _spearman(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    from scipy.stats import spearmanr

    return None if np.ptp(a) == 0.0 or np.ptp(b) == 0.0 else float(spearmanr(a, b).statistic)


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
        figures: the fitted factors, also where they are not kept.
        is_kept: whether `problem` has these figures.
        error_before: median |simulated / measured - 1| on the held-out plans, as profiled.
        error_after: the same, with the fitted figures.
    """

    problem: Problem
    figures: Figures
    is_kept: bool
    error_before: float
    error_after: float


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
    refuse_if(
        len(plans) < 4 or len(plans) != len(measured_s) or not np.all(np.isfinite(measured_s) & (measured_s > 0)),
        "plans",
        len(plans),
        "at least 4, each with a finite measured step time",
        where="calibrate",
    )
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
    return Calibration(chosen, figures, is_kept, before, after)


def as_profiled(problem: Problem) -> Figures:
    """The figures that change nothing: where the host slows devices that run together down, they go on doing so."""
    return Figures(corun=max((value for row in problem.host.corun_slowdown for value in row), default=0.0))


def apply(problem: Problem, figures: Figures) -> Problem:
    """The problem with `figures` in its costs, links and host."""
    graph, host = problem.graph, problem.host
    runs = ~graph.is_source[:, None]
    op_time_s = np.where(runs, problem.costs.op_time_s * figures.op_scale + figures.op_overhead_s, 0.0)
    op_time_s = np.maximum(op_time_s - np.where(runs, figures.dispatch_s, 0.0), np.where(runs, _SMALLEST, 0.0))
    prior = np.array(host.corun_slowdown or np.zeros((host.num_devices,) * 2))
    is_slowed = host.shares_memory | ((prior > 0) & ~np.eye(host.num_devices, dtype=bool))
    slowdown = tuple(map(tuple, np.where(is_slowed, figures.corun, 0.0).tolist()))
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
        return Figures(*values.tolist())

    def loss(x: NDArray[np.float64]) -> float:
        errors = np.log(ratios_of(figures_of(x)))  # type: ignore[operator]
        # absolute log errors: one placement disturbed by a neighbour must not bend the fit; a weak pull to the profile
        pull = 1e-3 * float(np.abs(x - start).sum())
        return float(np.mean(np.abs(errors)) + 0.5 * np.sqrt(np.mean(errors**2)) + pull)

    best = minimize(
        loss,
        start,
        method="Nelder-Mead",
        options={
            "maxfev": 300,
            "xatol": 1e-3,
            "fatol": 1e-5,
            "initial_simplex": np.vstack([start, start + np.diag(_STEPS)]),
        },
    )
    return figures_of(best.x)


_FACTORS = [name in ("op_scale", "transfer_scale") for name in Figures.__dataclass_fields__]

_STEPS = (0.1, 0.05, 0.15, 0.05, 0.2, 0.5)
"""Of the first simplex around the start, by figure."""
