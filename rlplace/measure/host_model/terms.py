"""`PathTerms`: critical paths as sums of terms, each of which scales with a few factors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from rlplace.measure.host_model.kernel_terms import TermLayout, add_terms
from rlplace.measure.host_model.scales import LARGEST, Scales
from rlplace.measure.simulate.plan_batch import PlanBatch
from rlplace.measure.simulate.simulator import Simulator

DIFFERENCE = 1e-3
"""Change of the logarithms of dispatch and co-run in which their effect on a step time is found."""


class PathTerms:
    """Critical paths of plans as Q terms: seconds of an op type on a device, copying and latency of a link, ops,
    dispatch, co-run, and what no factor changes.

    Attributes:
        scales: the factors.
        exponents: (Q, P) sparse: the factors that each term is multiplied with.
    """

    def __init__(self, scales: Scales) -> None:
        self.scales = scales
        problem, host = scales.problem, scales.problem.host
        rows: list[tuple[tuple[int, float], ...]] = []
        op_term = np.zeros(scales.type_at.shape, dtype=np.int32)
        for device in range(host.num_devices):
            for place in np.unique(scales.type_at[:, device]).tolist():
                op_term[scales.type_at[:, device] == place, device] = len(rows)
                rows.append(((place, 1.0), (int(scales.device_at[device]), 1.0)))
        self._op_term = op_term
        self._latency_term = len(rows) + np.arange(len(host.links))
        rows += [((place, 1.0),) for place in scales.latency_at.tolist()]
        self._bandwidth_term = len(rows) + np.arange(len(host.links))
        rows += [((place, -1.0),) for place in scales.bandwidth_at.tolist()]
        self._overhead_term = len(rows) if scales.overhead_at >= 0 else -1
        rows += [((place, 1.0),) for place in (scales.overhead_at, scales.dispatch_at, scales.corun_at)]
        self._others = {place: len(rows) - 2 + k for k, place in enumerate((scales.dispatch_at, scales.corun_at))}
        rows.append(())
        entries = [(q, place, power) for q, row in enumerate(rows) for place, power in row if place >= 0]
        at_q, at_p, power = (np.array([entry[k] for entry in entries]) for k in range(3))
        self.exponents = csr_matrix((power.astype(float), (at_q, at_p)), shape=(len(rows), len(scales)))
        self._graph, self._costs = problem.graph, problem.costs.op_time_s
        self._link_latency_s = np.array([link.latency_s for link in host.links])
        self._link_s_per_byte = np.array([1.0 / link.bandwidth_bytes_per_s for link in host.links])
        self._routes = [
            (
                host.device_index[route.source],
                host.device_index[route.destination],
                np.array([[link.name for link in host.links].index(name) for name in route.links]),
            )
            for route in host.routes
            if route.links
        ]

    def seconds(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """(Q,) what one unit of each term of a path takes under factors x (P,)."""
        logs = self.exponents @ x
        found: NDArray[np.float64] = np.exp(np.clip(logs, -LARGEST, LARGEST))
        if self._overhead_term >= 0:
            found[self._overhead_term] *= self.scales.prior.overhead_s
        return found

    def of(self, x: NDArray[np.float64], batch: PlanBatch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(B,) step times of plans under factors x (P,), and (B, Q) the terms of a critical path of each.

        A path takes `terms @ seconds(x)`: exactly its step time at this x and, but for launches and co-running, at any
        other no more than the step time there, as the longest path is never shorter than this one. Plans beyond
        memory have an infinite step time and no terms.
        """
        problem = self.scales.apply(x)
        paths = Simulator(problem, threads=1).critical_paths(batch)
        terms, seconds = np.zeros((len(paths.step_s), self.exponents.shape[0])), self.seconds(x)
        add_terms(self._layout(seconds), batch, paths.items, paths.offsets, terms)
        fits = np.isfinite(paths.step_s)
        for place, term in self._others.items():
            if place >= 0:
                moved = np.array(x)
                moved[place] += DIFFERENCE
                outcomes = Simulator(self.scales.apply(moved), threads=1).retime_batch(batch)
                slower_s = np.array([outcome.step_time_s for outcome in outcomes])
                terms[fits, term] = (slower_s - paths.step_s)[fits] / (np.expm1(DIFFERENCE) * seconds[term])
        terms[fits, -1] = paths.step_s[fits] - terms[fits] @ seconds
        return paths.step_s, terms

    def _layout(self, seconds: NDArray[np.float64]) -> TermLayout:
        """Which link gives each route's latency, and which its bandwidth, depends on the factors."""
        size = self.scales.problem.host.num_devices
        latency_term, bandwidth_term = (np.full((size, size), -1, dtype=np.int32) for _ in range(2))
        latency_s, s_per_byte = np.zeros((size, size)), np.zeros((size, size))
        now_latency_s = self._link_latency_s * seconds[self._latency_term]
        now_s_per_byte = self._link_s_per_byte * seconds[self._bandwidth_term]
        for source, destination, links in self._routes:
            late = links[np.argmax(now_latency_s[links])]
            slow = links[np.argmax(now_s_per_byte[links])]
            latency_term[source, destination], latency_s[source, destination] = (
                self._latency_term[late],
                self._link_latency_s[late],
            )
            bandwidth_term[source, destination], s_per_byte[source, destination] = (
                self._bandwidth_term[slow],
                self._link_s_per_byte[slow],
            )
        return TermLayout(
            self._graph.num_ops,
            self._op_term,
            self._costs,
            self._overhead_term,
            self._graph.tensor_op,
            self._graph.tensor_bytes,
            latency_term,
            latency_s,
            bandwidth_term,
            s_per_byte,
        )
