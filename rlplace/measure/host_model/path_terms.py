"""`PathTerms`: critical paths as sums of terms (seconds, bytes, latencies), each of which scales with a few factors."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from rlplace.jit import Floats, Ints, Longs, kernel
from rlplace.measure.host_model.scales import LARGEST, Scales
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.compiled_problem import PlanBatch
from rlplace.measure.simulate.simulator import Simulator

DIFFERENCE = 1e-3
"""Change of the logarithms of dispatch and co-run in which their effect on a step time is found."""
TIED = 1e-9
"""Links of a route whose logarithms differ by less are equally slow."""


class PathTerms:
    """Critical paths of plans as Q terms: seconds of an op type on a device, latencies and bytes of a route, ops,
    dispatch, co-run, and a part that no factor changes.

    Attributes:
        scales: the factors.
        num_terms: Q.
        layout: where each item is counted.
        has_choice: whether some route has several links, of which the slowest counts.
        route_links: (R, K) links of each route, -1 for none.
        latency_terms, bytes_terms: (R,) terms of each route.
        log_latency_s, log_s_per_byte: (L,) of each link as it was given.
    """

    def __init__(self, scales: Scales) -> None:
        self.scales = scales
        problem, host = scales.problem, scales.problem.host
        rows: list[tuple[tuple[int, float], ...]] = []
        op_term = np.zeros(scales.type_at.shape, dtype=np.int32)
        for device in range(host.num_devices):
            both = np.stack([scales.type_at[:, device], scales.signature_at[:, device]], axis=1)
            distinct, of_op = np.unique(both, axis=0, return_inverse=True)
            op_term[:, device] = len(rows) + of_op.reshape(-1)
            on_device = (int(scales.device_at[device]), 1.0)
            rows += [((of_type, 1.0), on_device, (of_signature, 1.0)) for of_type, of_signature in distinct.tolist()]
        index = {link.name: place for place, link in enumerate(host.links)}
        routes = [route for route in host.routes if route.links and route.source != route.destination]
        self.route_links = np.full((len(routes), max((len(route.links) for route in routes), default=1)), -1)
        self.has_choice = self.route_links.shape[1] > 1
        latency_term, bytes_term = (np.full((host.num_devices,) * 2, -1, dtype=np.int32) for _ in range(2))
        self.latency_terms = np.arange(len(rows), len(rows) + len(routes))
        self.bytes_terms = self.latency_terms + len(routes)
        for k, route in enumerate(routes):
            links = [index[name] for name in dict.fromkeys(route.links)]
            self.route_links[k, : len(links)] = links
            pair = host.device_index[route.source], host.device_index[route.destination]
            latency_term[pair], bytes_term[pair] = self.latency_terms[k], self.bytes_terms[k]
        for places, power in ((scales.latency_at, 1.0), (scales.bandwidth_at, -1.0)):
            rows += [
                tuple((int(places[link]), power) if link >= 0 else (-1, 0.0) for link in links)
                for links in self.route_links.tolist()
            ]
        overhead_term = len(rows) if scales.overhead_at >= 0 else -1
        others = scales.dispatch_at, scales.corun_at, scales.moved_at
        rows += [((place, 1.0),) for place in (scales.overhead_at, *others)]
        self._others = {place: len(rows) - len(others) + k for k, place in enumerate(others) if place >= 0}
        rows.append(())
        self.num_terms = len(rows)
        slots = [(q, slot, *entry) for q, row in enumerate(rows) for slot, entry in enumerate(row) if entry[0] >= 0]
        self._at_q, self._slot, self._at_p = (np.array([entry[k] for entry in slots], dtype=int) for k in range(3))
        self._power = np.array([entry[3] for entry in slots], dtype=float)
        self._starts = np.searchsorted(self._at_q, np.arange(len(rows) + 1))
        self._log_unit = np.zeros(len(rows))
        if overhead_term >= 0:
            self._log_unit[overhead_term] = math.log(scales.prior.overhead_s)
        with np.errstate(divide="ignore"):
            self.log_latency_s = np.log([link.latency_s for link in host.links])
        self.log_s_per_byte = -np.log([link.bandwidth_bytes_per_s for link in host.links])
        self.layout = TermLayout(
            problem.graph.num_ops,
            op_term,
            problem.costs.op_time_s,
            overhead_term,
            problem.graph.tensor_bytes,
            latency_term,
            bytes_term,
        )

    def seconds(self, x: NDArray[np.float64], sharpness: float = math.inf) -> NDArray[np.float64]:
        """(Q,) seconds of one unit of each term of a path under factors x (P,); see `slopes`."""
        return self.seconds_and_exponents(x, sharpness)[0]

    def seconds_and_exponents(
        self, x: NDArray[np.float64], sharpness: float = math.inf
    ) -> tuple[NDArray[np.float64], csr_matrix]:
        """(Q,) seconds of one unit of each term of a path under factors x (P,), and (Q, P) d log seconds / d x.

        Args:
            x: logarithms of factors.
            sharpness: of the soft maximum (a power mean) over the links of a route, of which the slowest counts; it is
                no more than the maximum. Links that are equally slow share the slope.
        """
        logs, share = np.array(self._log_unit), np.ones((self.num_terms, max(self.route_links.shape[1], 3)))
        known = np.append(np.clip(x, -LARGEST, LARGEST), 0.0)
        for terms, log_s in (
            (self.latency_terms, self.log_latency_s + known[self.scales.latency_at]),
            (self.bytes_terms, self.log_s_per_byte - known[self.scales.bandwidth_at]),
        ):
            of_links = np.where(self.route_links >= 0, np.append(log_s, -np.inf)[self.route_links], -np.inf)
            slowest = of_links.max(axis=1)
            behind = of_links - np.where(np.isfinite(slowest), slowest, 0.0)[:, None]
            shares = np.exp(sharpness * behind) if math.isfinite(sharpness) else (behind > -TIED).astype(float)
            total = shares.sum(axis=1)
            if math.isfinite(sharpness):
                slowest = slowest + np.log(np.maximum(total, TIED) / (self.route_links >= 0).sum(axis=1)) / sharpness
            logs[terms] = slowest
            share[terms[:, None], np.arange(shares.shape[1])] = shares / np.maximum(total, TIED)[:, None]
        power = self._power * share[self._at_q, self._slot]
        exponents = csr_matrix((power, self._at_p, self._starts), shape=(self.num_terms, len(self.scales)))
        is_route = np.zeros(self.num_terms, dtype=bool)
        is_route[self.latency_terms] = is_route[self.bytes_terms] = True
        logs = np.where(is_route, logs, self._log_unit + np.clip(exponents @ x, -LARGEST, LARGEST))
        return np.exp(logs) * self.scales.level, exponents

    def of(self, x: NDArray[np.float64], batch: PlanBatch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(B,) step times of plans under factors x (P,), and (B, Q) the terms of a critical path of each.

        A path takes `terms @ seconds(x)`: exactly its step time at this x and, but for launches and co-running, at any
        other no more than the step time there, as the longest path is never shorter than this one. Plans beyond
        memory have an infinite step time and no terms.
        """
        paths = Simulator(self.scales.apply(x), threads=1).critical_paths(batch)
        terms, seconds = np.zeros((len(paths.step_s), self.num_terms)), self.seconds(x)
        add_terms(self.layout, batch, paths.items, paths.offsets, terms)
        fits = np.isfinite(paths.step_s)
        for place, term in self._others.items():
            moved = np.array(x)
            moved[place] += DIFFERENCE
            slower_s = step_times_s(self.scales.apply(moved), batch)
            both = fits & np.isfinite(slower_s)  # slower, a plan may keep more in memory at once
            terms[both, term] = (slower_s[both] - paths.step_s[both]) / (np.expm1(DIFFERENCE) * seconds[term])
        terms[fits, -1] = (paths.step_s[fits] - terms[fits] @ seconds) / seconds[-1]
        return paths.step_s, terms


def step_times_s(problem: Problem, batch: PlanBatch) -> NDArray[np.float64]:
    """(B,) simulated step times of plans on a problem."""
    return np.array([outcome.step_time_s for outcome in Simulator(problem, threads=1).retime_batch(batch)])


class TermLayout(NamedTuple):
    """Where each item of a path is counted.

    Attributes:
        num_ops: N.
        op_term: (N, D) int32, the term of an op's seconds.
        op_s: (N, D) its seconds.
        overhead_term: counts ops; -1 for nowhere.
        tensor_bytes: (T,) int64.
        latency_term: (D, D) int32, counts latencies of a route; -1 where nothing is copied.
        bytes_term: (D, D) int32, counts bytes that are copied over it.
    """

    num_ops: int
    op_term: Ints
    op_s: Floats
    overhead_term: int
    tensor_bytes: Longs
    latency_term: Ints
    bytes_term: Ints


@kernel
def add_terms(layout: TermLayout, batch: PlanBatch, items: Ints, offsets: Longs, terms: Floats) -> None:
    """Adds up the paths `items` (CSR by `offsets`) of the plans of `batch` into `terms` (B, Q)."""
    n = layout.num_ops
    for b in range(len(offsets) - 1):
        devices, row = batch.devices[b], terms[b]
        for a in range(offsets[b], offsets[b + 1]):
            item = items[a]
            if item < n:
                d = devices[item]
                row[layout.op_term[item, d]] += layout.op_s[item, d]
                if layout.overhead_term >= 0:
                    row[layout.overhead_term] += 1.0
            else:
                k = batch.transfer_offsets[b] + item - n
                t, destination = batch.transfer_tensor[k], batch.transfer_destination[k]
                source = batch.transfer_source[k]
                if layout.latency_term[source, destination] >= 0:
                    row[layout.latency_term[source, destination]] += 1.0
                    row[layout.bytes_term[source, destination]] += layout.tensor_bytes[t]
