"""`TracedSteps`: a host's factors, fitted to timelines of traced steps. `TracedMedians`: medians in place of a fit.

A step time is one number about many ops; a timeline has a duration for each of them. Durations are taken together by
cells: ops of one signature on one device, and transfers of one size over the same links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack
from scipy.special import ndtr, ndtri

from rlplace.graphs import OpGraph
from rlplace.measure.host_model.path_terms import PathTerms
from rlplace.measure.host_model.scales import LARGEST, Kind, Scales, Tracing
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Problem, Timeline
from rlplace.measure.simulate.compiled_problem import main_producers
from rlplace.records import AtLeastOne, NotNegative, Positive, record

HELD_UP = 2.5
"""Times the median of its cell: a longer op, or transfer, was disturbed."""
LEAST_S = 1e-9
"""A duration that is shorter was not measured: its record is missing."""
SHIPPED = 10.0
"""Deviations as they are given count as much as those of so many cells, or signatures."""
TO_DEVIATION = 1.4826
"""Of normal numbers: standard deviation over the median of distances from their median."""
OWN: tuple[Kind, ...] = ("signature", "moved signature")
"""Factors whose deviation is fitted."""
OTHERS = 2
"""Figures that are fitted beside the factors of the host."""
LARGEST_STEP, NEAR = 3.0, 0.3
"""Of the fit, in deviations; a step after which what is left is noise."""
AS_SLOW = 0.05
"""Links that may be within this logarithm as slow as their route may be the slowest of it."""
MOST_DAMPING = 1e4
"""Of a step, in units of the prior's precision."""
SOFTEST, SHARPER, SHARPEST = 2.0, 2.0, 256.0
"""Of the maximum over the links of a route: at first, from step to step, and before the slowest alone counts."""
OF_MEDIAN = 1.2533
"""Of normal numbers: standard error of the median over that of the mean (sqrt(pi / 2))."""


@record(frozen=True)
class TraceConfig:
    """How durations of traced ops and transfers are weighed."""

    bias: NotNegative = 0.05
    """Log standard deviation by which ops of one signature on one device differ in all traces from untraced steps."""
    common: NotNegative = 0.03
    """Log standard deviation of a factor on all ops of one step."""
    noise: NotNegative = 0.05
    """Log standard deviation of one op's duration, at least; more where the durations of a cell say so."""
    link_noise: NotNegative = 0.10
    """Of one transfer's, likewise."""
    added_s: Positive = 1.5e-6
    """Median of the seconds that tracing adds to an op ..."""
    added: NotNegative = 0.7
    """... and the deviation of its logarithm."""
    added_measured: NotNegative = 0.3
    """The deviation where timelines say what tracing adds (`traced_op_s`), which is the median then."""
    freedom: Positive = 4.0
    """Degrees of freedom of Student's t, by which cells that do not fit count less."""
    iterations: AtLeastOne = 40
    """Steps of the fit at most."""
    tolerance: Positive = 1e-3
    """A step that moves no factor by more deviations is the last ..."""
    gain: NotNegative = 0.05
    """... and so is one that gains less, of the logarithm of the probability."""


@dataclass(frozen=True, eq=False)
class _Cells:
    """C cells: each a sum of a few terms, and its usual log duration.

    Attributes:
        rows: (C, Q) terms of `PathTerms`, in their units.
        is_op: (C,) ops, not transfers.
        is_moved: (C,) ops whose largest input was made elsewhere.
        moved_at: (C,) place of the factor on how much longer that makes them, of their signature; -1 for none.
        beside: (C,) co-run slowdown before anything is measured, by the share of the time that other devices were busy.
        log_s: (C,) the usual one.
        deviation: (C,) their standard deviations.
    """

    rows: csr_matrix
    is_op: NDArray[np.bool_]
    is_moved: NDArray[np.bool_]
    moved_at: NDArray[np.int64]
    beside: NDArray[np.float64]
    log_s: NDArray[np.float64]
    deviation: NDArray[np.float64]


class TracedSteps:
    """Collects timelines of one problem's steps, and fits the factors that make their durations most probable.

    Durations are ends less starts on the clock of one device: offsets between clocks drop out. On cores
    they are as `as_modelled` has them. Ops that take no time, and records that are missing (an end not after
    its start, or no number), say nothing.

    Attributes:
        num_steps: timelines so far.

    Args:
        scales: the factors.
        config: how durations are weighed.
    """

    def __init__(self, scales: Scales, config: TraceConfig | None = None) -> None:
        self.num_steps, self._widened = 0, dict[Kind, float]()
        self._z = np.zeros(OTHERS + len(scales))
        self._scales, self._config, self._terms = scales, config or TraceConfig(), PathTerms(scales)
        graph, host = scales.problem.graph, scales.problem.host
        self._signature = np.unique(graph.signatures, return_inverse=True)[1]
        self._runs, self._largest = ~graph.is_source, main_producers(graph)
        routes = {frozenset(route.links): k for k, route in enumerate(host.routes) if route.links}
        self._route = np.full((host.num_devices,) * 2, -1, dtype=np.int64)
        for route in host.routes:  # pairs with the same links are one
            if route.links and route.source != route.destination:
                pair = host.device_index[route.source], host.device_index[route.destination]
                self._route[pair] = routes[frozenset(route.links)]
        self._op_log_s: list[NDArray[np.float64]] = []
        self._op_device: list[NDArray[np.int32]] = []
        self._beside: list[NDArray[np.float64]] = []
        self._sent: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
        self._longer: list[float] = []

    def add(self, timeline: Timeline, step_time_s: float = math.nan) -> None:
        """Takes the durations of one traced step, and the step time of the untraced ones of the same visit."""
        if math.isfinite(step_time_s):
            self._longer.append(timeline.step_s / step_time_s - 1.0)
        graph, devices = self._scales.problem.graph, timeline.op_device
        timeline = as_modelled(timeline, graph, self._scales.problem.host)
        self._op_device.append(devices)
        self._op_log_s.append(np.where(self._runs, _log_durations(timeline.op_start_s, timeline.op_end_s), np.nan))
        self._beside.append(_busy_beside(timeline, self._scales.slowdown))
        log_s = _log_durations(timeline.transfer_start_s, timeline.transfer_end_s)
        source, destination = timeline.transfer_source, timeline.transfer_destination
        num_bytes = graph.tensor_bytes[timeline.transfer_tensor]
        kinds = np.stack([self._route[source, destination], num_bytes, source, destination], axis=1)
        is_told = np.isfinite(log_s) & (kinds[:, 0] >= 0)
        self._sent.append((kinds[is_told], log_s[is_told]))
        self.num_steps += 1
        if timeline.traced_op_s > 0:
            known = self._config.added_measured
            self._config = replace(self._config, added_s=timeline.traced_op_s, added=known)

    def known(self) -> Scales:
        """The factors as the traced steps have them, with the uncertainty that is left.

        The most probable ones, with the curvature there (Laplace): Gauss-Newton, each cell weighed again in every step
        as Student's t has it (Lange, Little and Taylor 1989, J. Am. Stat. Assoc. 84(408)). Two more figures are fitted
        and left out of the result: the seconds that tracing adds to an op, and a factor on all ops of these steps. How
        far signatures differ from their types, and cells from their factors, is fitted along (`_refined`).
        """
        if not self.num_steps:
            return self._scales
        config, cells = self._config, self._cells()
        common = config.common / math.sqrt(self.num_steps)
        # the slowest link of a route is looked for anew: with a start of before, a wrong one would stay
        z, sharpness = (0.0 * self._z, SOFTEST) if self._terms.has_choice else (self._z, math.inf)
        moved, damping = math.inf, 0.0
        for _ in range(config.iterations):
            predicted, slopes = self._predict(cells, z, common, sharpness)
            missed, is_near = cells.log_s - predicted, math.isinf(sharpness) and moved < NEAR
            z, deviation = self._refined(cells, z, missed, slopes, is_near=is_near)
            residual = missed / deviation
            weight = (config.freedom + 1.0) / (config.freedom + residual**2) / deviation
            gram = self._gram(slopes, weight / deviation)
            gradient = self._spread(np.asarray(slopes.T @ (weight * residual))) - z
            before = self._loss(residual, z)
            while True:  # where another link becomes the slowest, a whole step may lead nowhere
                step = np.linalg.solve(gram + damping * np.eye(len(z)), gradient)
                step = np.clip(step, -LARGEST_STEP, LARGEST_STEP)
                there = self._predict(cells, z + step, common, sharpness)[0]
                gain = before - self._loss((cells.log_s - there) / deviation, z + step)
                if gain >= 0.0 or damping > MOST_DAMPING:
                    break
                damping = max(damping, 1.0) * 10.0
            damping, step = damping / 100.0, step * (gain >= 0.0)
            z, moved = z + step, float(np.abs(step).max(initial=0.0))
            if math.isinf(sharpness) and (moved < config.tolerance or (is_near and gain < config.gain)):
                break
            sharpness = sharpness * SHARPER if sharpness < SHARPEST else math.inf
        self._z = z
        _, slopes = self._predict(cells, z, common, math.inf)
        # of a triangle of the precision, the part after the two others is one of what is left without them
        triangle = np.linalg.cholesky(self._gram(slopes, deviation**-2))[OTHERS:, OTHERS:]
        added_s, scales = config.added_s * math.exp(config.added * float(z[0])), self._scales
        tracing = Tracing(self.num_steps, added_s, float(np.median(self._longer)) if self._longer else 0.0)
        self._known = scales.known_as(scales.at(z[OTHERS:]), scales.spread(np.linalg.inv(triangle).T), tracing)
        sent = ~cells.is_op
        self._transfers = cells.rows[sent], deviation[sent]
        return self._known

    def drawn(self, z: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
        """A draw z (P,) in deviations of what is known, with figures of links that transfers do not rule out.

        The slowest link of a route is as slow as the route, and the others are not slower, which no normal distribution
        says: where several links may be the slowest, one is drawn, and the prior of the others is cut off.
        """
        scales, terms = self._scales, self._terms
        rows, deviation = self._transfers
        if not terms.has_choice or scales.is_correlated or not len(deviation):
            return z
        probable, x = self._known.mean, self._known.at(z)
        alone = rows.multiply(terms.seconds(probable)).tocsr()
        weight = 1.0 / (np.asarray(alone.sum(axis=1)).ravel() * deviation)
        for places, side, columns, log_s in (
            (scales.latency_at, 1.0, terms.latency_terms, terms.log_latency_s),
            (scales.bandwidth_at, -1.0, terms.bytes_terms, terms.log_s_per_byte),
        ):
            told_R = np.asarray(alone[:, columns].multiply(weight[:, None]).power(2).sum(axis=0)).ravel()
            routes = terms.route_links[told_R > 0.0]
            slowness = np.append(log_s + side * np.append(probable, 0.0)[places], -np.inf)
            of_routes = slowness[routes].max(axis=1, initial=-np.inf)
            most = np.full(len(slowness), np.inf)
            np.minimum.at(most, routes, of_routes[:, None])
            told = np.zeros(len(slowness))  # of the links that are the slowest
            for r in generator.permutation(len(routes)).tolist():
                may_be = routes[r][(routes[r] >= 0) & (most[routes[r]] >= of_routes[r] - AS_SLOW)]
                is_it = may_be[told[may_be] > 0.0]
                told[is_it if len(is_it) else generator.choice(may_be)] += told_R[told_R > 0.0][r]
            at = np.flatnonzero(places >= 0)
            spread, below = scales.deviation[places[at]], most[at] - log_s[at]
            free = spread * ndtri(generator.random(len(at)) * ndtr(below / spread))
            fixed = below + generator.standard_normal(len(at)) / np.sqrt(told[at] + spread**-2)
            x[places[at]] = side * np.where(told[at] > 0.0, fixed, np.maximum(free, -LARGEST))
        return self._known.deviations_of(x)

    def _loss(self, residual: NDArray[np.float64], z: NDArray[np.float64]) -> float:
        """Negative logarithm of the probability of residuals (C,) and deviations (2 + P,), but for a constant."""
        freedom = self._config.freedom
        return 0.5 * float((freedom + 1.0) * np.log1p(residual**2 / freedom).sum() + z @ z)

    def _refined(
        self,
        cells: _Cells,
        z: NDArray[np.float64],
        missed: NDArray[np.float64],
        slopes: csr_matrix,
        *,
        is_near: bool,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The same factors, in deviations (2 + P,) that fit how far signatures differ; and (C,) deviations of cells.

        Empirical Bayes (MacKay 1992, Neural Computation 4(3), eq. 2.8 and 4.8): squares over the number of directions
        that the data tell, or that are left. Ops, and transfers, are as far off as they are given, or farther.
        """
        parts = [is_one for is_one in (cells.is_op, ~cells.is_op) if is_one.any()]
        grams = [self._information(slopes[part], cells.deviation[part] ** -2) for part in parts]
        inverse = np.linalg.inv(sum(grams) + np.eye(len(z)))
        deviation = np.array(cells.deviation)
        for part, gram in zip(parts, grams, strict=True):
            left = float(part.sum() - np.sum(inverse * gram))
            middle = TO_DEVIATION * float(np.median(np.abs(missed[part] / cells.deviation[part])))
            deviation[part] *= math.sqrt(max((SHIPPED + part.sum() * middle**2) / (SHIPPED + left), 1.0))
        for kind in OWN if is_near and not self._scales.is_correlated else ():
            at = OTHERS + np.array([k for k, item in enumerate(self._scales.items) if item.kind == kind], dtype=int)
            told, before = float(np.sum(1.0 - np.diag(inverse)[at])), self._widened.get(kind, 1.0)
            wider = math.sqrt((SHIPPED * before**-2 + float(z[at] @ z[at])) / (SHIPPED + told))
            self._scales, self._widened[kind] = self._scales.widened(kind, wider), before * wider
            z = np.array(z)
            z[at] /= wider
        return z, deviation

    def _gram(self, slopes: csr_matrix, weight: NDArray[np.float64]) -> NDArray[np.float64]:
        """(2 + P, 2 + P) curvature by deviations of the factors, of rows that weigh (C,), with that of the prior."""
        gram = self._information(slopes, weight)
        return gram + np.eye(len(gram))

    def _information(self, slopes: csr_matrix, weight: NDArray[np.float64]) -> NDArray[np.float64]:
        """(2 + P, 2 + P) curvature of rows alone, likewise."""
        gram = np.asarray((slopes.T @ slopes.multiply(weight[:, None])).todense())
        return np.asarray(self._spread(self._spread(gram).T))

    def _spread(self, by_factor: NDArray[np.float64]) -> NDArray[np.float64]:
        """Derivatives (2 + P, ...) by deviations, of those by logarithms of factors; the first two are so already."""
        return np.concatenate((by_factor[:OTHERS], self._scales.slopes_of(by_factor[OTHERS:].T).T))

    def _predict(
        self, cells: _Cells, z: NDArray[np.float64], common: float, sharpness: float
    ) -> tuple[NDArray[np.float64], csr_matrix]:
        """(C,) expected log durations, and (C, 2 + P) their derivatives: by deviations of the seconds that tracing adds
        and of the factor that ops of these steps have in common, then by logarithms of factors."""
        scales, config = self._scales, self._config
        x = scales.at(z[OTHERS:])
        seconds, exponents = self._terms.seconds_and_exponents(x, sharpness)
        alone = cells.rows.multiply(seconds).tocsr()
        alone_s = np.asarray(alone.sum(axis=1)).ravel()
        longer = np.zeros(len(alone_s))
        if scales.moved_at >= 0:
            own = np.append(x, 0.0)[cells.moved_at]
            longer = np.where(cells.is_moved, scales.moved * np.exp(x[scales.moved_at] + own), 0.0)
        added_s = np.where(cells.is_op, config.added_s * math.exp(config.added * z[0]), 0.0)
        slower = cells.beside * (math.exp(x[scales.corun_at]) if scales.corun_at >= 0 else 1.0)
        whole_s = alone_s * (1.0 + longer) * (1.0 + slower) + added_s
        slopes = (alone @ exponents).multiply(((1.0 + longer) * (1.0 + slower) / whole_s)[:, None])
        own = np.stack([added_s / whole_s * config.added, np.where(cells.is_op, common, 0.0)], axis=1)
        slopes = hstack([csr_matrix(own), slopes], format="csr")
        for places, by_factor in (
            (np.full(len(longer), scales.moved_at), alone_s * longer * (1.0 + slower)),
            (cells.moved_at, alone_s * longer * (1.0 + slower)),
            (np.full(len(longer), scales.corun_at), alone_s * (1.0 + longer) * slower),
        ):
            row = np.flatnonzero((places >= 0) & (by_factor > 0.0))
            entries = (by_factor[row] / whole_s[row], (row, OTHERS + places[row]))
            slopes = slopes + csr_matrix(entries, shape=slopes.shape)
        return np.log(whole_s) + np.where(cells.is_op, common * z[1], 0.0), slopes

    def _cells(self) -> _Cells:
        """Usual durations over all steps, by cell."""
        config, layout, num_devices = self._config, self._terms.layout, self._scales.problem.host.num_devices
        log_SN, device_SN = np.stack(self._op_log_s), np.stack(self._op_device)
        moved_SN = device_SN[:, self._largest] != device_SN
        beside_SN = np.stack(self._beside)
        is_beside = beside_SN > self._scales.slowdown.max(initial=0.0) / 2
        cell_SN = ((self._signature * num_devices + device_SN) * 2 + moved_SN) * 2 + is_beside
        is_told = np.isfinite(log_SN)
        log_SN = log_SN - _step_effects(log_SN, cell_SN, is_told)[:, None]
        step, op = np.nonzero(is_told)
        op_log_s, op_deviation, first = _usual(cell_SN[is_told], log_SN[is_told], config.noise)
        _, place, counts = np.unique(cell_SN[is_told], return_inverse=True, return_counts=True)
        beside = np.bincount(place, beside_SN[is_told]) / counts
        op, device = op[first], device_SN[step[first], op[first]]
        _, both, cells = np.unique(cell_SN[step[first], op] // 4, return_inverse=True, return_counts=True)
        bias = config.bias * np.sqrt(cells[both])  # wherever they are, ops of a signature on a device are off alike
        columns = [layout.op_term[op, device]]
        values = [layout.op_s[op, device]]
        if layout.overhead_term >= 0:
            columns.append(np.full(len(op), layout.overhead_term))
            values.append(np.ones(len(op)))
        kinds, sent_log_s = (np.concatenate(parts) for parts in zip(*self._sent, strict=True))
        _, place = np.unique(kinds[:, :2], axis=0, return_inverse=True)
        link_log_s, link_deviation, sent = _usual(place.reshape(-1), sent_log_s, config.link_noise)
        pair = kinds[sent, 2], kinds[sent, 3]
        rows = np.concatenate([np.tile(np.arange(len(op)), len(columns)), np.tile(len(op) + np.arange(len(sent)), 2)])
        every_column = np.concatenate([*columns, layout.latency_term[pair], layout.bytes_term[pair]])
        every_value = np.concatenate([*values, np.ones(len(sent)), kinds[sent, 1].astype(np.float64)])
        count = len(op) + len(sent)
        return _Cells(
            csr_matrix((every_value, (rows, every_column)), shape=(count, self._terms.num_terms)),
            np.arange(count) < len(op),
            np.append(moved_SN[step[first], op], np.zeros(len(sent), dtype=bool)),
            np.append(self._scales.moved_signature_at[op], np.full(len(sent), -1)),
            np.append(beside, np.zeros(len(sent))),
            np.append(op_log_s, link_log_s),
            np.append(np.hypot(op_deviation, bias), link_deviation),
        )


class TracedMedians:
    """The simplest use of timelines: medians of durations, without a model of their errors.

    Args:
        problem: as estimated or profiled.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem, self._timelines = problem, list[Timeline]()

    def add(self, timeline: Timeline) -> None:
        """Takes the durations of one traced step."""
        self._timelines.append(as_modelled(timeline, self._problem.graph, self._problem.host))

    def problem(self) -> Problem:
        """The problem with traced figures in the place of its own.

        An op takes the median of the traced ops of its signature on its kind of device; where there are none, its own
        time, times the median ratio of traced and own times on that kind. Durations over each route are regressed on
        bytes (Theil 1950 and Sen 1968: medians of slopes); a link has the best figures of the routes that it is part
        of, as the slowest link of a route counts. A link that too little was sent over keeps its own.
        """
        problem, graph, host = self._problem, self._problem.graph, self._problem.host
        if not self._timelines:
            return problem
        words, signature = np.unique(graph.signatures, return_inverse=True)
        kinds, kind = np.unique([device.kind for device in host.devices], return_inverse=True)
        device_SN = np.stack([step.op_device for step in self._timelines])
        log_SN = np.stack([_log_durations(step.op_start_s, step.op_end_s) for step in self._timelines])
        log_SN[:, graph.is_source] = np.nan
        is_told, cell_SN = np.isfinite(log_SN), signature * len(kinds) + kind[device_SN]
        cells, place = np.unique(cell_SN[is_told], return_inverse=True)
        table = np.full(len(words) * len(kinds), np.nan)
        table[cells] = np.exp(_by_group(place, log_SN[is_told]))
        given_s = problem.costs.op_time_s
        traced_s = table.reshape(-1, len(kinds))[signature][:, kind]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(given_s > 0, traced_s / given_s, np.nan)
        parts = [ratio[:, kind == k] for k in kind]
        typical = [np.nanmedian(part) if np.isfinite(part).any() else 1.0 for part in parts]
        op_time_s = np.where(np.isfinite(traced_s), traced_s, given_s * typical)
        costs = replace(problem.costs, op_time_s=np.where(graph.is_source[:, None], given_s, op_time_s))
        lines, links = self._lines(), []
        for link in host.links:
            found = [line for names, line in lines.items() if link.name in names]
            latency_s = min((line[0] for line in found), default=link.latency_s)
            s_per_byte = min((line[1] for line in found), default=1.0 / link.bandwidth_bytes_per_s)
            links.append(replace(link, bandwidth_bytes_per_s=1.0 / s_per_byte, latency_s=latency_s))
        return replace(problem, host=replace(host, links=tuple(links)), costs=costs)

    def _lines(self) -> dict[tuple[str, ...], tuple[float, float]]:
        """Latency and seconds per byte of the transfers over each route's links, where they had several sizes."""
        host, durations = self._problem.host, dict[tuple[str, ...], dict[int, list[float]]]()
        index = host.device_index
        links = {(index[route.source], index[route.destination]): route.links for route in host.routes if route.links}
        for step in self._timelines:
            pairs = zip(step.transfer_source.tolist(), step.transfer_destination.tolist(), strict=True)
            sizes = self._problem.graph.tensor_bytes[step.transfer_tensor].tolist()
            seconds = (step.transfer_end_s - step.transfer_start_s).tolist()
            for pair, size, duration_s in zip(pairs, sizes, seconds, strict=True):
                if pair in links and duration_s > LEAST_S:
                    durations.setdefault(links[pair], {}).setdefault(size, []).append(duration_s)
        lines = {}
        for names, times in durations.items():
            size = np.array(sorted(times), dtype=np.float64)
            median_s = np.array([np.median(times[int(one)]) for one in size])
            before, after = np.triu_indices(len(size), 1)
            slopes = (median_s[after] - median_s[before]) / (size[after] - size[before])
            if len(slopes) and (slope := float(np.median(slopes))) > 0.0:
                lines[names] = max(float(np.median(median_s - slope * size)), 0.0), slope
        return lines


def _log_durations(start_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logarithms of durations; NaN where there is none."""
    seconds = np.asarray(end_s - start_s)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(seconds > LEAST_S, np.log(seconds), np.nan), dtype=np.float64)


def _step_effects(
    log_SN: NDArray[np.float64], cell_SN: NDArray[np.int64], is_told: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """(S,) by how much all ops of each step are longer than in the other steps, as logarithms; 0 on average."""
    effects = np.zeros(len(log_SN))
    if len(log_SN) < 2 or not is_told.any():
        return effects
    _, place = np.unique(cell_SN[is_told], return_inverse=True)
    step = np.nonzero(is_told)[0]
    for _ in range(2):
        left = log_SN[is_told] - effects[step]
        middle = _by_group(place, left)[place]
        steps, of_op = np.unique(step, return_inverse=True)
        effects[steps] += _by_group(of_op, left - middle)
    return np.asarray(effects - effects.mean())


def as_modelled(timeline: Timeline, graph: OpGraph, host: Host) -> Timeline:
    """The timeline with durations as the step-time model means them, where devices are cores.

    An op begins at the end of the item before it, an op or a tensor that is taken over: what the interpreter does
    between two items (tensors that are freed or sent, the next call) is part of every step, and of profiled times. A
    transfer begins when its tensor was made, or came to the relay that sends it on, since waking the thread that waits
    for it is most of it. Where that thread was busy until later, the transfer has no duration: nobody waited for it. Of
    a device on which only a sample of ops was traced, durations stay as they are: the item before an op may have no
    record.
    """
    op_start_s, sent_start_s, sent_end_s = (
        each.copy() for each in (timeline.op_start_s, timeline.transfer_start_s, timeline.transfer_end_s)
    )
    producer = graph.tensor_op[timeline.transfer_tensor]
    made_s = np.where(graph.is_source[producer], np.inf, timeline.op_end_s[producer])
    for k in np.flatnonzero(timeline.transfer_source != timeline.op_device[producer]):  # sent on by a relay
        is_first = timeline.transfer_tensor == timeline.transfer_tensor[k]
        made_s[k] = sent_end_s[is_first & (timeline.transfer_destination == timeline.transfer_source[k])].item()
    is_core = np.array([device.backend == "cpu" for device in host.devices])
    for index in np.flatnonzero(is_core).tolist():
        runs = (timeline.op_device == index) & ~graph.is_source
        ops = np.flatnonzero(runs & (timeline.op_end_s > timeline.op_start_s))
        taken = np.flatnonzero((timeline.transfer_destination == index) & (sent_end_s > sent_start_s))
        if not len(ops) or len(ops) < runs.sum():
            continue
        ends_s = np.sort(np.concatenate((timeline.op_end_s[ops], sent_end_s[taken])))
        before_s = np.append(0.0, ends_s)
        op_start_s[ops] = np.minimum(op_start_s[ops], before_s[np.searchsorted(ends_s, timeline.op_end_s[ops])])
        taken = taken[is_core[timeline.transfer_source[taken]]]
        is_waited = before_s[np.searchsorted(ends_s, sent_end_s[taken])] < made_s[taken]
        sent_start_s[taken] = np.where(is_waited, np.minimum(made_s[taken], sent_start_s[taken]), sent_end_s[taken])
    return replace(timeline, op_start_s=op_start_s, transfer_start_s=sent_start_s)


def _busy_beside(timeline: Timeline, slowdown: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N,) for each op the sum of `slowdown` (D, D) over the other devices, by the share of its time that each ran ops.

    Devices share a clock where they share a memory. A gap in the records counts as idle: where three in ten ops were
    traced, the slowdown that is learned of this is a tenth too small.
    """
    beside = np.zeros(len(timeline.op_device))
    for other in np.flatnonzero(slowdown.any(axis=0)).tolist():
        there = np.flatnonzero((timeline.op_device == other) & (timeline.op_end_s > timeline.op_start_s))
        there = there[np.argsort(timeline.op_end_s[there], kind="stable")]
        ends_s = np.stack([timeline.op_start_s[there], timeline.op_end_s[there]], axis=1).ravel()
        instants_s = np.maximum.accumulate(np.append(0.0, ends_s))  # idle from the first, busy from the next, ...
        busy_s = np.append(0.0, np.cumsum(np.diff(instants_s) * (np.arange(len(ends_s)) % 2)))
        begin_s, end_s = (np.interp(at_s, instants_s, busy_s) for at_s in (timeline.op_start_s, timeline.op_end_s))
        taken_s = np.maximum(timeline.op_end_s - timeline.op_start_s, LEAST_S)
        beside += slowdown[timeline.op_device, other] * np.clip((end_s - begin_s) / taken_s, 0.0, 1.0)
    return beside


def _usual(
    keys: NDArray[np.int64], log_s: NDArray[np.float64], least_noise: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """For each distinct key the logarithm of the mean duration, its standard deviation, and the place of its first.

    A step is a sum of durations, and small ops have a long tail: their median is too short. Those that are `HELD_UP`
    times as long as the median were disturbed, and are left out. Of two numbers it is the mean of the logarithms.
    """
    if not len(keys):
        return np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64)
    _, first, place, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    middle = _by_group(place, log_s)
    spread = TO_DEVIATION * _by_group(place, np.abs(log_s - middle[place]))
    noise = np.where(counts >= 5, np.maximum(spread, least_noise), least_noise)
    is_usual = log_s < middle[place] + math.log(HELD_UP)
    mean_s = np.bincount(place, np.where(is_usual, np.exp(log_s), 0.0)) / np.bincount(place, is_usual)
    usual = np.where(counts > 2, np.log(mean_s), middle)
    return usual, np.maximum(noise, 1e-6) * np.where(counts > 2, OF_MEDIAN, 1.0) / np.sqrt(counts), first


def _by_group(place: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of the values of each group, numbered from 0."""
    order = np.lexsort((values, place))
    counts = np.bincount(place)
    first = np.cumsum(counts) - counts
    ordered = values[order]
    middle: NDArray[np.float64] = (ordered[first + (counts - 1) // 2] + ordered[first + counts // 2]) / 2
    return middle
