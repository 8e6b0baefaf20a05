"""`Scales`: the factors on a problem's figures that its host model is made of, and the problem under given factors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.host_model.knowledge import Factor, HostKnowledge, Kind
from rlplace.measure.host_model.priors import Prior
from rlplace.measure.hosts.host import Host, Link
from rlplace.measure.problem import Problem

LARGEST = 20.0
"""No factor is more than e to this, either way: a fit on the way to its minimum must not overflow."""
LEAST_OP_S = 1e-7
"""An op takes at least this where launching it is accounted for apart."""


@dataclass(frozen=True)
class Scale:
    """One factor: its logarithm is 0 where the problem's figures are right.

    Those of overhead, dispatch and co-run are on the prior's figures, where the problem gives none.
    """

    kind: Kind
    name: str
    """Op type and kind of device, device, or link."""
    deviation: float
    """Of the logarithm, before anything is measured."""
    mean: float = 0.0
    """Of the logarithm, likewise; 0 unless the host is known from before."""


class Scales:
    """The factors of a problem's host model, P in all; x (P,) are their logarithms.

    t'[i, d] = t[i, d] * e^x[type of i, kind of d] * e^x[d] + overhead_s * e^x[overhead]; bandwidth'[l] = bandwidth[l] *
    e^x[l]; latency, dispatch and co-run slowdown likewise. Source ops take no time. Factors that the prior knows
    (deviation 0) or that nothing depends on are left out.

    Attributes:
        problem: with the figures as they were given.
        prior: what is known beforehand.
        items: P scales.
        deviation: (P,) of their logarithms before anything is measured.
        mean: (P,) likewise.
        type_at: (N, D) place of the factor of each op's type; -1 for none, as for those below.
        device_at, bandwidth_at, latency_at: (D,), (L,) and (L,).
        overhead_at, dispatch_at, corun_at: places.

    Args:
        problem: as it was given.
        prior: what is known beforehand of any host.
        knowledge: what is known of this one, from other workloads.
    """

    def __init__(self, problem: Problem, prior: Prior | None = None, knowledge: HostKnowledge | None = None) -> None:
        self.problem = problem
        self.prior = prior = prior or Prior()
        graph, host = problem.graph, problem.host
        self._runs = ~graph.is_source
        items: list[Scale] = []

        def add(kind: Kind, name: str, deviation: float) -> int:
            if deviation <= 0.0:
                return -1
            items.append(Scale(kind, name, deviation))
            return len(items) - 1

        op_type, types = _numbered(graph.targets)
        kind_of, kinds = _numbered([device.kind for device in host.devices])
        self.type_at = np.full((graph.num_ops, host.num_devices), -1, dtype=np.int64)
        takes_time = (problem.costs.op_time_s > 0) & self._runs[:, None]
        for k, kind in enumerate(kinds):
            here = np.flatnonzero(kind_of == k)
            for t in np.unique(op_type[takes_time[:, here].any(axis=1)]).tolist():
                self.type_at[np.ix_(op_type == t, here)] = add("op type", f"{types[t]} on {kind}", prior.op_type)
        self.device_at = np.array([add("device", device.name, prior.device) for device in host.devices])
        self.bandwidth_at = np.array([add("bandwidth", link.name, prior.bandwidth) for link in host.links], dtype=int)
        has_latency = [prior.latency if link.latency_s > 0 else 0.0 for link in host.links]
        self.latency_at = np.array(
            [add("latency", link.name, deviation) for link, deviation in zip(host.links, has_latency)], dtype=int
        )
        self.overhead_at = add("overhead", "every op", prior.overhead if prior.overhead_s > 0 else 0.0)
        has_dispatcher = any(device.dispatcher for device in host.devices)
        self.dispatch_at = add("dispatch", "every launch", prior.dispatch if has_dispatcher else 0.0)
        self._slowdown = slowdown_of(host, prior)
        self.corun_at = add("co-run", "devices that share memory", prior.corun_deviation * bool(self._slowdown.any()))
        self._root: NDArray[np.float64] | None = None
        if knowledge is not None:
            items = self._known(items, knowledge)
        self.items = tuple(items)
        self.deviation = np.array([item.deviation for item in items])
        self.mean = np.array([item.mean for item in items])

    def __len__(self) -> int:
        return len(self.items)

    def at(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """(P,) logarithms of the factors that are z (P,) deviations from what is expected of them."""
        found: NDArray[np.float64] = self.mean + (z * self.deviation if self._root is None else self._root @ z)
        return found

    def spread(self, root: NDArray[np.float64]) -> NDArray[np.float64]:
        """(P, P) a root of a covariance of logarithms, of one in deviations."""
        found: NDArray[np.float64] = self.deviation[:, None] * root if self._root is None else self._root @ root
        return found

    def slopes_of(self, slopes: NDArray[np.float64]) -> NDArray[np.float64]:
        """(B, P) derivatives with respect to deviations, of those with respect to logarithms."""
        found: NDArray[np.float64] = slopes * self.deviation if self._root is None else slopes @ self._root
        return found

    def unspread(self, slopes: NDArray[np.float64]) -> NDArray[np.float64]:
        """The inverse of `slopes_of`."""
        root = np.diag(self.deviation) if self._root is None else self._root
        return np.asarray(np.linalg.solve(root.T, slopes.T).T, dtype=np.float64)

    def apply(self, x: NDArray[np.float64]) -> Problem:
        """The problem with these factors (P,) on its figures."""
        host, factors = self.problem.host, np.append(np.exp(np.clip(x, -LARGEST, LARGEST)), 1.0)  # at -1: no factor
        seconds = self.problem.costs.op_time_s * factors[self.type_at] * factors[self.device_at]
        if self.overhead_at >= 0:
            seconds = seconds + np.where(self._runs, self.prior.overhead_s * factors[self.overhead_at], 0.0)[:, None]
        changed: dict[str, object] = {}
        if self.dispatch_at >= 0:
            dispatch_s = (host.dispatch_s or self.prior.dispatch_s) * float(factors[self.dispatch_at])
            copy_s = (host.copy_dispatch_s or self.prior.dispatch_s) * float(factors[self.dispatch_at])
            changed = {"dispatch_s": dispatch_s, "copy_dispatch_s": copy_s}
            if not host.dispatch_s:  # op times as profiled hold their launches
                seconds = np.where(self._runs[:, None], np.maximum(seconds - dispatch_s, LEAST_OP_S), 0.0)
        if self.corun_at >= 0:
            rows = self._slowdown * float(factors[self.corun_at])
            changed["corun_slowdown"] = tuple(tuple(row) for row in rows.tolist())
        changed["links"] = tuple(
            Link(
                link.name,
                link.bandwidth_bytes_per_s * float(factors[self.bandwidth_at[index]]),
                link.latency_s * float(factors[self.latency_at[index]]),
            )
            for index, link in enumerate(host.links)
        )
        host = dataclasses.replace(host, **changed)  # type: ignore[arg-type]
        return dataclasses.replace(
            self.problem, host=host, costs=dataclasses.replace(self.problem.costs, op_time_s=seconds)
        )

    def _known(self, items: list[Scale], knowledge: HostKnowledge) -> list[Scale]:
        """The factors as other workloads taught them; how they depend on each other is kept as the root."""
        if not items:
            return items
        host, prior = self.problem.host, self.prior
        mean, self._root = knowledge.prior(
            [Factor(item.kind, item.name, item.deviation, median_of(host, prior, item.kind)) for item in items]
        )
        deviation = np.sqrt((self._root**2).sum(axis=1)).tolist()
        return [
            Scale(item.kind, item.name, left, at)
            for item, left, at in zip(items, deviation, mean.tolist(), strict=True)
        ]


def median_of(host: Host, prior: Prior, kind: Kind) -> float:
    """The prior's figure that factors of this kind are on; 0 where the problem gives one."""
    if kind == "overhead":
        return prior.overhead_s
    if kind == "dispatch":
        return 0.0 if host.dispatch_s else prior.dispatch_s
    if kind == "co-run":
        return 0.0 if any(value > 0 for row in host.corun_slowdown for value in row) else prior.corun
    return 0.0


def _numbered(words: object) -> tuple[NDArray[np.int64], list[str]]:
    """Each word's place among the distinct ones, and those, sorted."""
    distinct, places = np.unique(np.asarray(words, dtype=str), return_inverse=True)
    return places.reshape(-1), distinct.tolist()


def slowdown_of(host: Host, prior: Prior) -> NDArray[np.float64]:
    """(D, D) co-run slowdown before anything is measured: the host's, and the prior's where devices share a memory."""
    pools = [device.memory_pool or device.name for device in host.devices]
    given = np.array(host.corun_slowdown or np.zeros((len(pools), len(pools))))
    shares = np.array([[d != e and pools[d] == pools[e] for e in range(len(pools))] for d in range(len(pools))])
    table: NDArray[np.float64] = np.where(given > 0, given, np.where(shares, prior.corun, 0.0))
    return table
