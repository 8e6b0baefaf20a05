"""The factors on a problem's figures that a host model learns (`Scales`), and their prior distribution.

`Prior` and `Priors` hold the prior's figures for any host, `HostKnowledge` the results of other workloads on this host.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, UnknownName, refuse_if
from rlplace.files import read_json, write_json_atomic
from rlplace.measure.costs.costs import CostSource
from rlplace.measure.hosts.host import Host, Link
from rlplace.measure.problem import Problem
from rlplace.records import (
    AtLeastOne,
    Described,
    FirstSchema,
    NotNegative,
    Number,
    read_record,
    record,
    shortened,
)


@record(frozen=True)
class Prior:
    """Standard deviations of the natural logarithms of factors; 0.7 is about a factor of 2 either way, 0 is known."""

    op_type: NotNegative = 0.5
    """Of the time of an op type on a kind of device."""
    device: NotNegative = 0.12
    """Of a device's speed beside others of its kind."""
    bandwidth: NotNegative = 0.6
    """Of a link's bandwidth."""
    latency: NotNegative = 0.3
    """Of a link's latency."""
    overhead_s: NotNegative = 5e-6
    """Median of the seconds that are added to every op on a device: launches that nothing hides."""
    overhead: NotNegative = 1.0
    """Of these seconds."""
    dispatch_s: NotNegative = 5e-6
    """Median of the seconds that a dispatcher takes to launch an op or a copy, where no figure is given."""
    dispatch: NotNegative = 0.0
    """Of these seconds."""
    corun: NotNegative = 0.05
    """Median of how much a busy device slows another that shares its memory, where no figure is given."""
    corun_deviation: NotNegative = 0.0
    """Of that slowdown."""


SCHEMA: Final = 1
SHIPPED = Path(__file__).with_name("priors.json")
"""The file that is used where no other is named."""
Section = Literal["estimated", "profiled"]
SECTIONS: dict[CostSource, Section] = {"estimated": "estimated", "given": "estimated", "profiled": "profiled"}
"""Which figures hold for which source of costs: times that a graph file gives were measured on no host that we know."""
FIGURES = tuple(field.name for field in fields(Prior))
LARGEST_BYTES = 1 << 20


@record(frozen=True)
class Figure:
    """One figure of a `Prior`."""

    value: NotNegative
    source: str
    """A line: the paper, the measurements that it was fitted to, or that it is assumed."""

    def __post_init__(self) -> None:
        refuse_if(
            not self.source.strip() or "\n" in self.source,
            "source",
            shortened(self.source),
            "one line that says where the value comes from",
        )


@record(frozen=True)
class Priors:
    """The content of a priors file: every figure of `Prior`, twice."""

    estimated: dict[str, Figure]
    """By name, for costs from data sheets."""
    profiled: dict[str, Figure]
    """By name, for costs and links that were measured on the host."""
    schema: FirstSchema = SCHEMA

    def __post_init__(self) -> None:
        for section, figures in (("estimated", self.estimated), ("profiled", self.profiled)):
            for name in figures.keys() - set(FIGURES):
                raise UnknownName(f"figure of {section} priors", name, FIGURES)
            for name in sorted(set(FIGURES) - figures.keys()):
                raise InvalidValue(f"{section}.{name}", Described("missing"), "a value and its source")

    def section(self, section: Section) -> dict[str, Figure]:
        """The figures of one section by name."""
        return self.estimated if section == "estimated" else self.profiled

    def prior(self, section: Section) -> Prior:
        """The prior of one section."""
        return Prior(**{name: figure.value for name, figure in self.section(section).items()})


def load_priors(path: str | os.PathLike[str] | None = None) -> Priors:
    """The figures of a priors file; reading runs no code.

    Args:
        path: of the file; by default the one that ships.

    Raises:
        FileProblem: the file is missing or no JSON.
        InvalidValue: a figure is missing or out of range, or the file has another schema.
        UnknownName: a figure that a prior does not have.
    """
    path = SHIPPED if path is None else Path(path)
    hint = "Name a file that `benchmarks/fit_priors.py` wrote."
    return read_record(Priors, read_json(path, largest_bytes=LARGEST_BYTES, hint=hint), str(path))


def save_priors(priors: Priors, path: str | os.PathLike[str]) -> None:
    """Writes a priors file, whole or not at all, such that `load_priors` gives equal ones back.

    Raises:
        FileProblem: the file cannot be written.
    """
    write_json_atomic(path, {"schema": priors.schema, **asdict(priors)})


def prior_of(problem: Problem, path: str | os.PathLike[str] | None = None) -> Prior:
    """How far the host may be from the problem's figures, by where its costs come from.

    Args:
        problem: estimated or profiled.
        path: of a priors file; by default the one that ships.

    Raises:
        FileProblem, InvalidValue, UnknownName: as `load_priors`.
    """
    return load_priors(path).prior(SECTIONS[problem.costs.source])


Kind = Literal[
    "op type",
    "device",
    "bandwidth",
    "latency",
    "overhead",
    "dispatch",
    "co-run",
    "signature",
    "moved",
    "moved signature",
]

CARRIED: Mapping[Kind, float] = {
    "op type": 0.2,
    "device": 0.05,
    "bandwidth": 0.05,
    "latency": 0.05,
    "overhead": 0.2,
    "dispatch": 0.2,
    "co-run": 0.2,
    "signature": 0.2,
    "moved": 0.2,
    "moved signature": 0.2,
}
"""How far a factor differs from one workload to the next on the same host, as a share of how far from host to host: an
op type has other shapes there, a link is the same link."""


class Scale(NamedTuple):
    """One factor: its logarithm is normal, and 0 where the problem's figures are right."""

    kind: Kind
    name: str
    """Op type and kind of device, device, or link."""
    deviation: float
    """Of the logarithm, before anything is measured."""
    median: float = 0.0
    """The prior's figure that it is on, in seconds or as a share; 0 where it is on a figure of the problem."""
    mean: float = 0.0
    """Of the logarithm, before anything is measured; 0 unless the host is known from before."""


@dataclass(frozen=True, eq=False)
class SeenRun:
    """The statement of one run's measured steps, as linear equations in the logarithms u of its K factors.

    Attributes:
        factors: K of them.
        slopes: (R, K); `slopes @ u` is `targets`, each with a standard deviation of 1.
        targets: (R,).
    """

    factors: tuple[Scale, ...]
    slopes: NDArray[np.float64]
    targets: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class HostKnowledge:
    """Measured steps of other workloads on one host.

    Attributes:
        runs: searches that they come from.
    """

    runs: tuple[SeenRun, ...]

    @property
    def num_runs(self) -> int:
        """Searches that taught something."""
        return len(self.runs)

    @property
    def factors(self) -> frozenset[tuple[Kind, str]]:
        """Kinds and names of the factors that some measured step depended on."""
        return frozenset(
            (factor.kind, factor.name)
            for run in self.runs
            for factor, slopes in zip(run.factors, run.slopes.T, strict=True)
            if slopes.any()
        )

    def prior(self, factors: Sequence[Scale]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Means (P,) of the logarithms of a workload's factors, and a root (P, P) of their covariance.

        The host has h, of which each run, and the next workload, has its own with a deviation of c = `CARRIED` of the
        factor's; h has the rest of its variance. A run's equations S u = t + noise are then S h = t + noise of the
        covariance I + S diag(c^2) S'. All are solved together with the prior (least squares by QR), also for factors
        that the next workload does not have: their uncertainty makes the equations that they are in say less of the
        others, and two such equations may still tell a difference.

        Args:
            factors: of the next workload, P of them. One on a figure of the prior is known as that figure.
        """
        seen = (*factors, *(factor for run in self.runs for factor in run.factors))
        first = {_key(factor): factor for factor in reversed(seen)}
        every = [first[key] for key in dict.fromkeys(map(_key, seen))]
        place = {_key(factor): k for k, factor in enumerate(every)}
        deviation = np.array([factor.deviation for factor in every])
        centre = np.array([_log_median(factor) for factor in every])
        own = deviation * [CARRIED[factor.kind] for factor in every]
        of_host = np.sqrt(deviation**2 - own**2)
        rows, targets = [np.eye(len(every))], [np.zeros(len(every))]
        for run in self.runs:
            at = [place[_key(factor)] for factor in run.factors]
            medians = np.array([_log_median(factor) for factor in run.factors])
            left = run.targets + run.slopes @ (medians - centre[at])
            spread = run.slopes * own[at]
            whitened = np.linalg.cholesky(np.eye(len(left)) + spread @ spread.T)
            equations = np.zeros((len(left), len(every)))
            equations[:, at] = np.linalg.solve(whitened, run.slopes * of_host[at])
            rows.append(equations)
            targets.append(np.linalg.solve(whitened, left))
        stacked, target = np.concatenate(rows), np.concatenate(targets)
        triangle = np.linalg.qr(stacked, mode="r")
        root = of_host[:, None] * np.linalg.inv(triangle)
        count = len(factors)
        mean = (root @ (np.linalg.inv(triangle).T @ (stacked.T @ target)))[:count]
        return mean, np.linalg.cholesky(root[:count] @ root[:count].T + np.diag(own[:count] ** 2))


def _key(factor: Scale) -> tuple[Kind, str, bool]:
    """The key by which two runs share a factor: a factor on the problem's figure is another than one on the prior's."""
    return factor.kind, factor.name, factor.median > 0


def _log_median(factor: Scale) -> float:
    return math.log(factor.median) if factor.median > 0 else 0.0


LARGEST = 20.0
"""No factor is more than e to this, either way: a fit on the way to its minimum must not overflow."""
LEAST_OP_S = 1e-7
"""An op takes at least this where launching it is accounted for apart."""


@record(frozen=True)
class TracedPrior:
    """The prior of the factors that only timelines tell apart; deviations are of natural logarithms, and assumed."""

    signature: NotNegative = 0.15
    """Standard deviation of the time of an op of one signature (target and shapes) beside its type's."""
    moved: NotNegative = 0.01
    """Median of the share by which an op takes longer where its largest input was made on another device."""
    moved_deviation: NotNegative = 2.0
    """Of that share."""
    moved_signature: NotNegative = 0.7
    """Of that share of one signature beside that of all ops."""


LEAST_TOLD = 1e-4
"""Of a combination of factors: what traced steps tell of it at least, in units of what was known, to be kept."""


@record(frozen=True)
class Tracing:
    """What tracing steps cost."""

    num_steps: AtLeastOne
    """That were traced."""
    added_s: NotNegative
    """Seconds by which recording makes an op longer, as fitted."""
    share: Number
    """Share by which a traced step is longer than the untraced ones of the same visit; the median."""


MOST_SIGNATURES, MOST_MOVED = 300, 100
"""Signatures, on one kind of device, that have a factor of their own: those that most of the step is spent in; and
those that have one on the share by which moved inputs make an op longer."""


class Scales:
    """The factors of a problem's host model, P in all; x (P,) are their logarithms.

    t'[i, d] = t[i, d] * e^x[type of i, kind of d] * e^x[d] + overhead_s * e^x[overhead]; bandwidth'[l] = bandwidth[l] *
    e^x[l]; latency, dispatch and co-run slowdown likewise. Source ops take no time. Factors that the prior knows
    (deviation 0) or that nothing depends on are left out. Where steps are traced, t[i, d] also has a factor
    e^x[signature of i, kind of d], and all of t' has 1 + moved * e^(x[moved] + x[moved, signature of i]) where the
    largest input was made elsewhere.

    Attributes:
        problem: with the figures as they were given.
        prior: of any host.
        is_traced: whether there are factors that only timelines tell apart.
        moved: median of the share that x[moved] is on.
        slowdown: (D, D) by how much a busy device slows another before anything is measured.
        items: P scales.
        untraced: these factors before any step was traced; None where none was.
        tracing: what traced steps cost; None likewise.
        level: how many times as long as these factors say all of a step takes; 1 unless measured steps say so.
        deviation: (P,) of their logarithms before anything is measured.
        mean: (P,) likewise.
        type_at: (N, D) place of the factor of each op's type; -1 for none, as for those below.
        signature_at: (N, D) of each op's signature.
        moved_signature_at: (N,) of each op's signature, where its largest input was made elsewhere.
        device_at, bandwidth_at, latency_at: (D,), (L,) and (L,).
        overhead_at, dispatch_at, corun_at, moved_at: places.

    Args:
        problem: as it was given.
        prior: of any host.
        knowledge: of this one, from other workloads.
        traced: prior of what only timelines tell; nothing by default.
    """

    def __init__(
        self,
        problem: Problem,
        prior: Prior | None = None,
        knowledge: HostKnowledge | None = None,
        traced: TracedPrior | None = None,
    ) -> None:
        self.problem = problem
        self.prior = prior = prior or Prior()
        graph, host = problem.graph, problem.host
        self._runs = ~graph.is_source
        items: list[Scale] = []

        def add(kind: Kind, name: str, deviation: float) -> int:
            if deviation <= 0.0:
                return -1
            items.append(Scale(kind, name, deviation, median_of(host, prior, kind)))
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
        self.latency_at = np.array(
            [add("latency", link.name, prior.latency * (link.latency_s > 0)) for link in host.links], dtype=int
        )
        self.overhead_at = add("overhead", "every op", prior.overhead if prior.overhead_s > 0 else 0.0)
        self.dispatch_at = add(
            "dispatch", "every launch", prior.dispatch * any(device.dispatcher for device in host.devices)
        )
        self.slowdown = slowdown_of(host, prior)
        self.corun_at = add("co-run", "devices that share memory", prior.corun_deviation * bool(self.slowdown.any()))
        self.signature_at, self.moved_at = np.full_like(self.type_at, -1), -1
        self.moved_signature_at = np.full(graph.num_ops, -1, dtype=np.int64)
        self.untraced: Scales | None = None
        self.tracing: Tracing | None = None
        self.level = 1.0
        self.is_traced, self.moved = traced is not None, 0.0 if traced is None else traced.moved
        if traced is not None:
            for k, kind in enumerate(kinds):
                self._add_signatures(np.flatnonzero(kind_of == k), kind, traced.signature, takes_time, add)
            self.moved_at = add("moved", "every op", traced.moved_deviation * (self.moved > 0 and len(kind_of) > 1))
            if self.moved_at >= 0:
                signature, words = _numbered(graph.signatures)
                for s in self._longest(signature, takes_time)[:MOST_MOVED]:
                    self.moved_signature_at[signature == s] = add("moved signature", words[s], traced.moved_signature)
        if knowledge is None or not items:
            self._set(tuple(items), None)
        else:
            mean, root = knowledge.prior(items)
            self._set(_known(items, mean, root), root)

    def _set(self, items: tuple[Scale, ...], root: NDArray[np.float64] | None) -> None:
        self.items, self._root = items, root
        self.deviation = np.array([item.deviation for item in items])
        self.mean = np.array([item.mean for item in items])

    def _add_signatures(
        self,
        here: NDArray[np.int64],
        kind: str,
        deviation: float,
        takes_time: NDArray[np.bool_],
        add: Callable[[Kind, str, float], int],
    ) -> None:
        """A factor for each of the signatures that matter most on devices of a kind, of types that have several."""
        signature, words = _numbered(self.problem.graph.signatures)
        runs = takes_time[:, here].any(axis=1)
        of_type = self.type_at[:, here[0]]
        pairs = np.unique(np.stack([of_type[runs], signature[runs]], axis=1), axis=0)
        several = set(np.flatnonzero(np.bincount(pairs[:, 0][pairs[:, 0] >= 0]) > 1).tolist())
        for s in self._longest(signature, takes_time[:, here], here)[:MOST_SIGNATURES]:
            ops = np.flatnonzero((signature == s) & runs)
            if int(of_type[ops[0]]) in several:
                name = f"{words[s]} on {kind}"
                self.signature_at[np.ix_(ops, here)] = add("signature", name, deviation)

    def _longest(
        self, signature: NDArray[np.int64], takes_time: NDArray[np.bool_], here: NDArray[np.int64] | None = None
    ) -> list[int]:
        """Signatures (N,) of ops that take time on devices `here` (all by default), those that take most first."""
        op_time_s = self.problem.costs.op_time_s if here is None else self.problem.costs.op_time_s[:, here]
        seconds = np.bincount(signature, np.where(takes_time, op_time_s, 0.0).mean(axis=1))
        return [s for s in np.argsort(-seconds, kind="stable").tolist() if seconds[s] > 0]

    def known_as(self, mean: NDArray[np.float64], root: NDArray[np.float64], tracing: Tracing) -> Scales:
        """The same factors, of which traced steps tell so much before step times are measured.

        Args:
            mean: (P,) of their logarithms.
            root: (P, P) a root of the covariance of these.
            tracing: what the steps cost.
        """
        known = copy.copy(self)
        known._set(_known(self.items, mean, root), root)
        known.untraced, known.tracing = self, tracing
        return known

    def at_level(self, level: float) -> Scales:
        """The same factors, where all of a step takes so many times as long."""
        other = copy.copy(self)
        other.level = level
        return other

    @property
    def is_correlated(self) -> bool:
        """Whether some factors are known together with others."""
        return self._root is not None

    def widened(self, kind: Kind, factor: float) -> Scales:
        """The same factors, those of a kind with so many times the deviation; none of them is known with others."""
        other = copy.copy(self)
        of_kind = (
            item._replace(deviation=item.deviation * factor) if item.kind == kind else item for item in self.items
        )
        other._set(tuple(of_kind), None)
        return other

    def told_by_traces(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The statement of the traced steps alone: slopes (R, P) and targets (R,).

        `slopes @ x` is `targets` at the logarithms x of the factors, each with a standard deviation of 1: the quotient
        of two normal distributions, what is known with traces and what was known without them.
        """
        before = self.untraced
        if before is None or self._root is None:
            return np.zeros((0, len(self))), np.zeros(0)
        to_deviations = before.unspread(np.eye(len(self)))
        inverse = np.linalg.inv(to_deviations @ self._root)
        precision = inverse.T @ inverse
        told, axes = np.linalg.eigh(precision - np.eye(len(self)))
        weight, axes = np.sqrt(told[told > LEAST_TOLD]), axes[:, told > LEAST_TOLD]
        targets = axes.T @ precision @ to_deviations @ (self.mean - before.mean) / weight
        slopes = before.unspread(weight[:, None] * axes.T)
        return slopes, targets + slopes @ before.mean

    def __len__(self) -> int:
        return len(self.items)

    def at(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """(P,) logarithms of the factors that are z (P,) deviations from their expected values."""
        return np.asarray(self.mean + (z * self.deviation if self._root is None else self._root @ z))

    def deviations_of(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """The inverse of `at`."""
        away = x - self.mean
        return np.asarray(away / self.deviation if self._root is None else np.linalg.solve(self._root, away))

    def spread(self, root: NDArray[np.float64]) -> NDArray[np.float64]:
        """(P, P) a root of a covariance of logarithms, of one in deviations."""
        return np.asarray(self.deviation[:, None] * root if self._root is None else self._root @ root)

    def slopes_of(self, slopes: NDArray[np.float64]) -> NDArray[np.float64]:
        """(B, P) derivatives with respect to deviations, of those with respect to logarithms."""
        return np.asarray(slopes * self.deviation if self._root is None else slopes @ self._root)

    def unspread(self, slopes: NDArray[np.float64]) -> NDArray[np.float64]:
        """The inverse of `slopes_of`."""
        root = np.diag(self.deviation) if self._root is None else self._root
        return np.asarray(np.linalg.solve(root.T, slopes.T).T, dtype=np.float64)

    def apply(self, x: NDArray[np.float64]) -> Problem:
        """The problem with these factors (P,) on its figures."""
        host, factors = self.problem.host, np.append(np.exp(np.clip(x, -LARGEST, LARGEST)), 1.0)  # at -1: no factor
        seconds = self.problem.costs.op_time_s * factors[self.type_at] * factors[self.device_at]
        if self.is_traced:
            seconds = seconds * factors[self.signature_at]
        if self.overhead_at >= 0:
            seconds = seconds + np.where(self._runs, self.prior.overhead_s * factors[self.overhead_at], 0.0)[:, None]
        changed: dict[str, Any] = {}
        if self.dispatch_at >= 0:
            dispatch_s = (host.dispatch_s or self.prior.dispatch_s) * float(factors[self.dispatch_at])
            copy_s = (host.copy_dispatch_s or self.prior.dispatch_s) * float(factors[self.dispatch_at])
            changed = {"dispatch_s": dispatch_s, "copy_dispatch_s": copy_s}
            if not host.dispatch_s:  # op times as profiled hold their launches
                seconds = np.where(self._runs[:, None], np.maximum(seconds - dispatch_s, LEAST_OP_S), 0.0)
        if self.corun_at >= 0:
            changed["corun_slowdown"] = tuple(map(tuple, (self.slowdown * float(factors[self.corun_at])).tolist()))
        changed["links"] = tuple(
            Link(
                link.name,
                link.bandwidth_bytes_per_s * float(factors[self.bandwidth_at[index]]),
                link.latency_s * float(factors[self.latency_at[index]]),
            )
            for index, link in enumerate(host.links)
        )
        costs = dataclasses.replace(self.problem.costs, op_time_s=seconds)
        if self.moved_at >= 0:
            longer = 1.0 + self.moved * float(factors[self.moved_at]) * factors[self.moved_signature_at]
            costs = dataclasses.replace(costs, moved_factor=np.where(self._runs, longer, 1.0))
        problem = dataclasses.replace(self.problem, host=dataclasses.replace(host, **changed), costs=costs)
        return problem if self.level == 1.0 else _slower(problem, self.level)


def _slower(problem: Problem, level: float) -> Problem:
    """The problem where all of a step takes so many times as long."""
    host, costs = problem.host, problem.costs
    links = tuple(
        dataclasses.replace(
            link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / level, latency_s=link.latency_s * level
        )
        for link in host.links
    )
    host = dataclasses.replace(
        host, links=links, dispatch_s=host.dispatch_s * level, copy_dispatch_s=host.copy_dispatch_s * level
    )
    costs = dataclasses.replace(costs, op_time_s=costs.op_time_s * level)
    return dataclasses.replace(problem, host=host, costs=costs)


def _known(items: Sequence[Scale], mean: NDArray[np.float64], root: NDArray[np.float64]) -> tuple[Scale, ...]:
    """Factors of which so much is known: means (P,) of their logarithms, and a root (P, P) of their covariance."""
    deviation = np.sqrt((root**2).sum(axis=1)).tolist()
    told = zip(items, deviation, mean.tolist(), strict=True)
    return tuple(item._replace(deviation=left, mean=at) for item, left, at in told)


def median_of(host: Host, prior: Prior, kind: Kind) -> float:
    """The prior's figure that factors of this kind are on; 0 where the problem gives one."""
    has_corun = any(value > 0 for row in host.corun_slowdown for value in row)
    medians: dict[Kind, float] = {
        "overhead": prior.overhead_s,
        "dispatch": 0.0 if host.dispatch_s else prior.dispatch_s,
        "co-run": 0.0 if has_corun else prior.corun,
    }
    return medians.get(kind, 0.0)


def _numbered(words: object) -> tuple[NDArray[np.int64], list[str]]:
    """Each word's place among the distinct ones, and those, sorted."""
    distinct, places = np.unique(np.asarray(words, dtype=str), return_inverse=True)
    return places.reshape(-1), distinct.tolist()


def slowdown_of(host: Host, prior: Prior) -> NDArray[np.float64]:
    """(D, D) co-run slowdown before anything is measured: the host's, and the prior's where devices share a memory."""
    given = np.array(host.corun_slowdown or np.zeros((host.num_devices, host.num_devices)))
    return np.asarray(np.where(given > 0, given, np.where(host.shares_memory, prior.corun, 0.0)))
