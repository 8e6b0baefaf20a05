"""`HostModel`: the factors that explain measured step times best, and their uncertainty.

`FitConfig` weighs the measured step times and bounds the fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.errors import refuse_if
from rlplace.measure.host_model.learned_host import Posterior
from rlplace.measure.host_model.path_terms import PathTerms, step_times_s
from rlplace.measure.host_model.scales import Scales
from rlplace.measure.host_model.traced_steps import TracedSteps
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.simulate.compiled_problem import PlanBatch
from rlplace.measure.simulate.simulator import Simulator
from rlplace.records import AtLeastOne, Count, NotNegative, Positive, record

SMALLEST_S = 1e-12
"""A path is taken to be at least this long where launches and co-running, which are not linear, make it shorter."""

SOFT_LINKS = (2.0, 2.0, 4.0, 4.0, 8.0, 8.0)
"""Sharpness of the maximum over a route's links in the first descents."""
LEAST_DEVIATION = 1e-7
"""Of a log ratio: a figure that is said to be exact is no more exact than that."""
NEAR = 0.1
"""Plans that take at most e to this times the fastest measured one are near it."""
RESTART = 0.5
"""Deviations of the prior, about, by which a descent begins elsewhere than the best so far ended."""


@dataclass(frozen=True, eq=False)
class _Pull:
    """The anchors of a fit besides the measurements.

    Attributes:
        anchor: (P,) where the prior draws to, in its deviations: 0 for the most probable factors.
        noise: (M,) of the M measured step times, in theirs, as if they had been measured so.
    """

    anchor: NDArray[np.float64]
    noise: NDArray[np.float64]


class HostModel:
    """Learns the factors of a host from measured step times of plans, a batch after the other.

    The most probable factors (maximum a posteriori) minimise the sum of squared log ratios of simulated and measured
    step times, in units of their noise, and of squared logarithms of factors, in units of the prior's deviation. A
    plan's step time is the longest of many paths, each a sum of exponentials of the logarithms, so that the paths found
    so far bound it from below, exactly at the factors where they were found: Levenberg-Marquardt (Marquardt 1963,
    J. SIAM 11(2)) descends over the known paths, the simulator adds those that are longest there, and so on. The
    posterior is normal, with the curvature at the minimum (Laplace). Factors that no measured plan depends on stay at
    the prior.

    Args:
        scales: the factors.
        config: how measurements are weighed.
    """

    def __init__(self, scales: Scales, config: FitConfig | None = None) -> None:
        self.scales, self.config = scales, config or FitConfig()
        self._terms = PathTerms(scales)
        self._traced = TracedSteps(scales) if scales.is_traced else None
        self._checker = Simulator(scales.problem, threads=1)
        self._plans: list[Plan] = []
        self._target, self._noise = np.zeros(0), np.zeros(0)
        self._batch: PlanBatch | None = None
        self._z = np.zeros(len(scales))
        self._rows, self._plan_of = np.zeros((0, self._terms.num_terms)), np.zeros(0, dtype=np.int64)

    @property
    def num_measured(self) -> int:
        """Step times that it has learned from."""
        return len(self._plans)

    def add(self, plans: Sequence[Plan], step_times_s: ArrayLike, noise: ArrayLike | None = None) -> None:
        """Takes measured step times of plans; those that are not finite teach nothing.

        Args:
            plans: exactly the measured ones.
            step_times_s: of each, in seconds.
            noise: standard deviation of each, as a share of it; the configuration's by default.

        Raises:
            InvalidValue: not one positive time, or noise, for each plan; or a plan that does not fit the problem.
        """
        measured_s = np.asarray(step_times_s, dtype=np.float64)
        noises = np.full(len(plans), self.config.noise) if noise is None else np.asarray(noise, dtype=np.float64)
        refuse_if(
            measured_s.shape != (len(plans),) or np.isnan(measured_s).any() or (measured_s <= 0).any(),
            "step_times_s",
            measured_s.tolist(),
            f"{len(plans)} times > 0",
            where="host model",
        )
        refuse_if(
            noises.shape != (len(plans),) or not (np.isfinite(noises) & (noises >= 0)).all(),
            "noise",
            noises.tolist(),
            f"{len(plans)} numbers >= 0",
            where="host model",
        )
        kept = np.flatnonzero(np.isfinite(measured_s))
        every = [*self._plans, *(plans[k] for k in kept.tolist())]
        self._batch = self._checker.check_plans(every)
        self._plans = every
        self._target = np.append(self._target, np.log(measured_s[kept]))
        self._noise = np.append(self._noise, noises[kept])

    def learn(self, plans: Sequence[Plan], outcomes: Sequence[Measurement]) -> None:
        """Takes measurements of plans, with the noise that their samples show; failed ones teach nothing.

        What their timelines say of the factors becomes the prior of what the step times say.
        """
        traced = [(each.timeline, each.step_time_s) for each in outcomes if each.timeline is not None]
        if self._traced is not None and traced:
            for timeline, step_time_s in traced:
                self._traced.add(timeline, step_time_s)
            self.scales = self._terms.scales = self._traced.known()
            self._z = np.zeros(len(self.scales))
        noise = [outcome.relative_error or self.config.noise for outcome in outcomes]
        self.add(plans, [outcome.step_time_s for outcome in outcomes], np.maximum(noise, self.config.least_noise))
        problem = self.scales.problem
        # elsewhere a duration holds no launch: that a step is longer than its durations says how long launches take
        is_whole = problem.costs.source == "profiled" and all(one.backend == "cpu" for one in problem.host.devices)
        if self.scales.tracing is not None and is_whole:
            self._find_level()

    def _find_level(self) -> None:
        """Finds how many times as long as its traced ops and transfers say a step of this machine takes; the median.

        What disturbs all of a step (other processes, above all) is in no usual duration. Left to the factors, it would
        be explained by whatever traces tell least of, launches and co-running, and plans would be ranked by that.
        """
        self.scales = self._terms.scales = self.scales.at_level(1.0)
        if self._batch is not None:
            said_s = step_times_s(self.scales.apply(self.scales.mean), self._batch)
            told = (self._target - np.log(said_s))[np.isfinite(said_s)]
            if len(told):
                self.scales = self._terms.scales = self.scales.at_level(float(np.exp(np.median(told))))

    def fit(self) -> Posterior:
        """The most probable factors given all that was measured, with the curvature there.

        The best of descents from the last ones, from the prior's with every link of a route counting, and, as
        long as twice the loss is more than one expects of as many measurements (chi-squared, by two deviations), from
        places around the best so far. They are drawn alike in every fit.
        """
        if self._batch is None or not self._plans:
            return Posterior.prior(self.scales)
        pull = _Pull(np.zeros(len(self._z)), np.zeros(len(self._plans)))
        z, loss = self._settle(self._soften(pull), pull)
        starts = [self._z] if np.any(self._z) else []
        generator, count = np.random.default_rng(0), len(self._plans)
        for _ in range(len(starts) + self.config.restarts):
            if not starts and 2.0 * loss <= count + 2.0 * math.sqrt(2.0 * count):
                break
            other_z, other = self._settle(
                starts.pop() if starts else z + RESTART * generator.standard_normal(len(z)), pull
            )
            if other < loss:
                z, loss = other_z, other
        self._z = z
        _, residuals, slopes = self._at(z, pull)
        return Posterior.of(self.scales, self.scales.at(z), slopes, loss, residuals)

    def draw(self, generator: np.random.Generator) -> Problem:
        """The problem under other factors that explain the measurements: a host that may be this one.

        Randomized maximum likelihood (Oliver, He and Reynolds 1996, ECMOR V): the measurements, with noise added once
        more, are fitted with a draw of the prior in the prior's place, from the paths and factors that the last `fit`
        ended with. Were the logarithms of step times linear in the factors, this would be a draw of the posterior. They
        are not, as a step is the longest of many paths: draws of a normal distribution (`Posterior.draw`) take plans to
        be slower than they were measured; these do not.
        """
        anchor = generator.standard_normal(len(self._z))
        if self._batch is None or not self._plans:
            return self.scales.apply(self.scales.at(anchor))
        if self._traced is not None and self._traced.num_steps:
            anchor = self._traced.drawn(anchor, generator)
        pull = _Pull(anchor, generator.standard_normal(len(self._plans)))
        known = self._rows, self._plan_of
        _, missed, slopes = self._at(self._z, pull)  # first as if they were linear
        gap = slopes @ (self._z - anchor) - missed
        start = anchor + slopes.T @ np.linalg.solve(slopes @ slopes.T + np.eye(len(slopes)), gap)
        z, _ = self._settle(start, pull, is_draw=True)
        self._rows, self._plan_of = known
        return self.scales.apply(self.scales.at(z))

    def expected_s(self, known: Posterior) -> dict[str, float]:
        """Step times of the measured plans, by fingerprint, as a fit and the measurements together say.

        A plan takes what the fit says, times what no factors explain. How much that differs is seen from the plans near
        the fastest, beyond the noise of measurements; a measurement counts as much as it is surer than the fit (a
        random-effects model; DerSimonian and Laird 1986, Controlled Clinical Trials 7(3)).

        Args:
            known: the fit.
        """
        if not self._plans:
            return {}
        fitted = np.log(step_times_s(known.problem, self._checker.check_plans(self._plans)))
        fits = np.isfinite(fitted)
        missed, variance = self._target - np.where(fits, fitted, self._target), self._noise**2
        is_near = fits & (self._target <= self._target.min() + NEAR)
        unexplained = max(float(np.mean(missed[is_near] ** 2 - variance[is_near])), 0.0) if is_near.any() else 0.0
        weight = unexplained / np.maximum(unexplained + variance, LEAST_DEVIATION**2)
        log_s = np.where(fits, self._target - (1.0 - weight) * missed, self._target)
        by_plan: dict[str, list[float]] = {}
        for plan, each in zip(self._plans, log_s.tolist(), strict=True):
            by_plan.setdefault(plan.fingerprint, []).append(each)
        return {name: math.exp(float(np.mean(each))) for name, each in by_plan.items()}

    def held_out_errors(self, folds: int = 3) -> tuple[float, float]:
        """Mean |log ratio| of predicted and measured step times, of the prior and of fits that have not seen the plans.

        Every plan is held out once; both are 0 where fewer plans than folds were measured. Those that one of the two
        takes to be beyond memory do not count.
        """
        if len(self._plans) < folds:
            return 0.0, 0.0
        errors = np.zeros((2, len(self._plans)))
        for fold in range(folds):
            out = np.arange(fold, len(self._plans), folds)
            rest = np.setdiff1d(np.arange(len(self._plans)), out)
            other = HostModel(self.scales, self.config)
            other.add([self._plans[k] for k in rest], np.exp(self._target[rest]), self._noise[rest])
            batch = self._checker.check_plans([self._plans[k] for k in out])
            for row, known in enumerate((Posterior.prior(self.scales), other.fit())):
                errors[row, out] = np.abs(np.log(step_times_s(known.problem, batch)) - self._target[out])
        errors = errors[:, np.isfinite(errors).all(axis=0)]
        return (float(errors[0].mean()), float(errors[1].mean())) if errors.size else (0.0, 0.0)

    def _soften(self, pull: _Pull) -> NDArray[np.float64]:
        """Where descents from the prior end in which every link of a route counts, the slowest ever more.

        The slowest alone has a slope otherwise: the fit would slow down the wrong one and never look at the other.
        """
        z = np.array(pull.anchor)
        if not self._terms.has_choice:
            return z
        self._discover(z, pull)
        for sharpness in SOFT_LINKS:
            z, _ = self._descend(z, pull, sharpness)
            self._discover(z, pull)
        return z

    def _settle(
        self, z: NDArray[np.float64], pull: _Pull, *, is_draw: bool = False
    ) -> tuple[NDArray[np.float64], float]:
        """Where descents from z over ever more known paths end, and the loss there."""
        config = self.config
        tolerance = config.draw_tolerance if is_draw else config.tolerance
        best_z, best = z, self._discover(z, pull)
        for _ in range(config.draw_rounds if is_draw else config.max_rounds):
            z, known = self._descend(best_z, pull)
            now = self._discover(z, pull)
            gain = best - now
            if now < best:
                best_z, best = z, now
            if 0 <= gain <= tolerance * max(best, 1e-12) or (gain < 0 and best - known < tolerance * best):
                break
        return best_z, best

    def _descend(
        self, z: NDArray[np.float64], pull: _Pull, sharpness: float = math.inf
    ) -> tuple[NDArray[np.float64], float]:
        """Where Levenberg-Marquardt ends from z over the paths that are known, and the loss over them there."""
        now, residuals, slopes = self._at(z, pull, sharpness)
        damping = 1e-2
        for _ in range(self.config.max_iterations):
            gradient, before = slopes.T @ residuals + (z - pull.anchor), now
            gram = slopes @ slopes.T
            while True:
                # (S'S + (1 + damping) I)^-1 by Woodbury: there are fewer plans than factors
                inner = np.linalg.solve(gram + (1.0 + damping) * np.eye(len(gram)), slopes @ gradient)
                step = (slopes.T @ inner - gradient) / (1.0 + damping)
                moved, *there = self._at(z + step, pull, sharpness)
                if moved <= now or damping > 1e8 * (1.0 + gram.max()):
                    break
                damping = max(damping, 0.1) * 6.0
            if moved > now:
                break
            z, now, (residuals, slopes), damping = z + step, moved, there, damping / 6.0
            if before - now <= self.config.tolerance * max(now, 1e-12):
                break
        return z, now

    def _discover(self, z: NDArray[np.float64], pull: _Pull) -> float:
        """The true loss at z; the critical paths there are known from now on, the shortest of many forgotten."""
        assert self._batch is not None
        x = self.scales.at(z)
        step_s, terms = self._terms.of(x, self._batch)
        fits = np.flatnonzero(np.isfinite(step_s))
        rows, plan_of = np.concatenate((self._rows, terms[fits])), np.concatenate((self._plan_of, fits))
        length_s = rows @ self._terms.seconds(x)
        order = np.lexsort((-length_s, plan_of))
        rows, plan_of, length_s = rows[order], plan_of[order], length_s[order]
        is_new = np.append(True, (np.diff(plan_of) != 0) | (np.abs(np.diff(length_s)) > 1e-12 * length_s[1:]))
        first = np.flatnonzero(np.diff(plan_of, prepend=-1))
        place = np.arange(len(plan_of)) - np.repeat(first, np.diff(np.append(first, len(plan_of))))
        kept = is_new & (place < self.config.paths)
        self._rows, self._plan_of = rows[kept], plan_of[kept]
        residuals = (np.log(step_s[fits]) - self._target[fits]) / self._deviation()[fits] - pull.noise[fits]
        return _loss(residuals, z - pull.anchor)

    def _at(
        self, z: NDArray[np.float64], pull: _Pull, link_sharpness: float = math.inf
    ) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
        """The loss over known paths, (B,) residuals and (B, P) their slopes, with a soft maximum of each plan's."""
        sharpness, rows = self.config.sharpness, self._rows
        seconds, exponents = self._terms.seconds_and_exponents(self.scales.at(z), link_sharpness)
        path_s = np.maximum(rows @ seconds, SMALLEST_S)
        log_s = np.log(path_s)
        first = np.flatnonzero(np.diff(self._plan_of, prepend=-1))
        counts = np.diff(np.append(first, len(log_s)))
        longest = np.maximum.reduceat(log_s, first)
        shares = np.exp(sharpness * (log_s - np.repeat(longest, counts)))
        totals = np.add.reduceat(shares, first)
        soft = longest + np.log(totals) / sharpness
        shares /= np.repeat(totals, counts) * path_s
        owed = np.add.reduceat(shares[:, None] * rows, first) * seconds
        chosen, deviation = self._plan_of[first], self._deviation()
        residuals = (soft - self._target[chosen]) / deviation[chosen] - pull.noise[chosen]
        slopes = self.scales.slopes_of(owed @ exponents) / deviation[chosen][:, None]
        return _loss(residuals, z - pull.anchor), residuals, slopes

    def _deviation(self) -> NDArray[np.float64]:
        """(B,) of the log ratios that are expected of simulated and measured step times."""
        expected = np.hypot(self._noise, self.config.misfit + self.config.far * (self._target - self._target.min()))
        return np.asarray(np.maximum(expected, LEAST_DEVIATION))


def _loss(residuals: NDArray[np.float64], moved: NDArray[np.float64]) -> float:
    """Half the sum of squares."""
    return 0.5 * float(residuals @ residuals + moved @ moved)


@record(frozen=True)
class FitConfig:
    """How measured step times are weighed against each other and against the prior."""

    noise: NotNegative = 0.01
    """Standard deviation of a measured step time, as a share of it, where none is given with it."""
    least_noise: NotNegative = 0.005
    """Of a measurement whose samples are closer together by luck."""
    misfit: NotNegative = 0.01
    """The part of the fastest plans' times that no factors explain, likewise: the model is not the host."""
    far: NotNegative = 0.1
    """How much more it is of a plan that takes e times the fastest: slow plans may be fitted worse."""
    max_rounds: AtLeastOne = 12
    """How often the fit looks for paths that it does not know."""
    max_iterations: AtLeastOne = 8
    """Steps of Levenberg-Marquardt between two looks."""
    sharpness: Positive = 1e3
    """Of the soft maximum over a plan's paths: k paths of one length count as one that is log(k) / sharpness longer."""
    paths: AtLeastOne = 12
    """Paths of a plan that are kept, the longest."""
    draw_tolerance: NotNegative = 0.02
    """A round of a draw's fit that gains less than this share of the loss is the last: it need not be the best, but
    measurements must not rule it out."""
    draw_rounds: AtLeastOne = 4
    """As `max_rounds`, of a draw's fit."""
    restarts: Count = 4
    """Descents from elsewhere, at most, while the factors explain less than they should."""
    tolerance: NotNegative = 1e-4
    """A step that gains less than this share of the loss is the last."""
