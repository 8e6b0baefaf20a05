"""The figures that a run measured or learned of its host, carried over to another: costs, link figures, factors.

`DeviceMatch`: which device of a new host stands for which of the old one, and which of its links for which.

`op_type_factors`: measured op times, carried over to op types on devices without measurements.

`carried_placement`: a placement of one host as a placement of another, where a search may start.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs import Grouping, OpGraph
from rlplace.measure import Costs, Device, Host, Link, Problem, Simulator
from rlplace.measure.costs.costs import CostSource, estimate_costs
from rlplace.measure.host_model.learned_host import LEAST_LEARNED, Equation, LearnedFactor, LearnedHost, likelihood
from rlplace.measure.host_model.scales import SECTIONS, Kind
from rlplace.search import eft
from rlplace.search.groupings import allowed_devices, atoms, majority_devices

LEFT = " (left behind)"
"""Follows the name of a device or a link that the new host does not have: another may be called so there."""


@dataclass(frozen=True, eq=False)
class CarriedCosts:
    """Costs on a new host.

    Attributes:
        costs: (N, D).
        known: kinds of devices whose op times are those of the run.
        estimated: kinds whose op times come from data sheets, scaled by the run's factors of op types.
    """

    costs: Costs
    known: tuple[str, ...] = ()
    estimated: tuple[str, ...] = ()


def carried_costs(graph: OpGraph, old: Host, costs: Costs, new: Host) -> CarriedCosts | None:
    """The costs of a graph on a new host; None where they have to be profiled there.

    Measured op times of a kind of devices hold for every device of that kind. Other kinds are estimated, each op type
    scaled by its measured over its estimated time on the old devices. On a host of this machine, where everything
    can be measured, they are not: then all costs are to be profiled. Estimates are made anew, and times that a graph
    file gives hold everywhere.

    Args:
        graph: the step.
        old: the host of the run.
        costs: (N, D) of the run.
        new: where it is to go.

    Raises:
        InvalidValue: a simulated device without the figures that an estimate needs.
    """
    kinds = tuple(dict.fromkeys(device.kind for device in new.devices))
    if costs.source == "given":
        return CarriedCosts(Costs.given(costs.op_time_s[:, 0], new), known=kinds)
    if costs.source == "estimated":
        return CarriedCosts(estimate_costs(graph, new), estimated=kinds) if new.is_simulated else None
    by_kind = {device.kind: costs.op_time_s[:, place] for place, device in enumerate(old.devices)}
    unknown = tuple(kind for kind in kinds if kind not in by_kind)
    if unknown and not new.is_simulated:
        return None
    if unknown:
        factors = op_type_factors(graph, list(by_kind.values()))
        by_kind |= {kind: _estimated_s(graph, kind, new) * factors for kind in unknown}
    source: CostSource = "estimated" if unknown else "profiled"
    seconds = np.stack([by_kind[device.kind] for device in new.devices], axis=1)
    carried = Costs(seconds, source, _carried_workspaces(graph, old, costs, new))
    return CarriedCosts(carried, tuple(kind for kind in kinds if kind not in unknown), unknown)


def _carried_workspaces(graph: OpGraph, old: Host, costs: Costs, new: Host) -> NDArray[np.int64] | None:
    """(N, D) scratch as it was seen on devices of the same kind; of other kinds as the graph says."""
    if costs.workspace_bytes is None:
        return None
    by_kind = {device.kind: costs.workspace_bytes[:, place] for place, device in enumerate(old.devices)}
    return np.stack([by_kind.get(device.kind, graph.workspace_bytes) for device in new.devices], axis=1)


def carried_host(match: DeviceMatch) -> Host:
    """The new host, with the link figures that were measured on the old one where both are of a machine.

    A simulated host keeps the figures that it was given.
    """
    if match.old.is_simulated or match.new.is_simulated:
        return match.new
    before = {link.name: link for link in match.old.links}
    return dataclasses.replace(
        match.new,
        links=tuple(_like(link, [before[name] for name in match.links[link.name]]) for link in match.new.links),
    )


def carried_learned(learned: LearnedHost | None, source: CostSource, match: DeviceMatch) -> LearnedHost | None:
    """The host model of a run, by the names of the new host; None where there is none.

    Op types of a kind of devices and figures of the whole host keep their factors, a device has those of the one that
    it stands for, and a link those of the link in its place. Equations stay as they are: a device or link that is gone
        is a factor that the new host does not have. A new link without one in its place is known as the mean of those
        that are like it.

    Args:
        learned: of the run.
        source: of the costs on the new host: factors on measured costs say nothing of estimates.
        match: of the two hosts.
    """
    if learned is None or SECTIONS[learned.cost_source] != SECTIONS[source]:
        return None
    links: tuple[Kind, Kind] = ("bandwidth", "latency")
    names: dict[Kind, Mapping[str, str]] = {"device": match.renamed, **dict.fromkeys(links, match.same_links)}
    factors = [
        dataclasses.replace(one, name=names[one.kind].get(one.name, f"{one.name}{LEFT}")) if one.kind in names else one
        for one in learned.factors
    ]
    by_name = {(factor.kind, factor.name): factor for factor in learned.factors}
    new_links = [name for name in match.links if name not in match.same_links.values()]
    means = [
        _mean(alike, new)
        for kind in links
        for new in new_links
        if (alike := [by_name[kind, old] for old in match.links[new] if (kind, old) in by_name])
    ]
    equations = tuple(_widened(learned.equations, len(factors), means)) if learned.equations else ()
    return LearnedHost(
        match.new.name,
        match.new.fingerprint,
        source,
        learned.prior,
        (*factors, *means),
        (),
        equations=equations,
    )


def _mean(factors: list[LearnedFactor], name: str) -> LearnedFactor:
    """The factor of a link from several like it: they are not independent, so it is known no better than each."""
    return dataclasses.replace(
        factors[0],
        name=name,
        log_mean=float(np.mean([factor.log_mean for factor in factors])),
        log_deviation=float(np.mean([factor.log_deviation for factor in factors])),
        prior_deviation=float(np.mean([factor.prior_deviation for factor in factors])),
        prior_mean=float(np.mean([factor.prior_mean for factor in factors])),
    )


def _widened(equations: Sequence[Equation], num_factors: int, more: Sequence[LearnedFactor]) -> list[Equation]:
    """The equations over further factors too, and one for each of these that something is known of."""
    wide = [Equation(equation.target, (*equation.slopes, *[0.0] * len(more))) for equation in equations]
    for place, factor in enumerate(more):
        if (found := likelihood(factor, LEAST_LEARNED)) is not None:
            slope = 1.0 / math.sqrt(found[1])
            slopes = np.where(np.arange(num_factors + len(more)) == num_factors + place, slope, 0.0)
            wide.append(Equation(found[0] * slope, tuple(slopes.tolist())))
    return wide


def _like(link: Link, others: list[Link]) -> Link:
    medians = np.median([(other.bandwidth_bytes_per_s, other.latency_s) for other in others or [link]], axis=0)
    return Link(link.name, *medians.tolist())


def _estimated_s(graph: OpGraph, kind: str, host: Host) -> NDArray[np.float64]:
    """(N,) seconds on a device of a kind, from its data sheet."""
    device = next(device for device in host.devices if device.kind == kind)
    return estimate_costs(graph, Host(host.name, (dataclasses.replace(device, members=()),))).op_time_s[:, 0]


GONE = -1
"""Where a device is that nothing stands for."""


@dataclass(frozen=True, eq=False)
class DeviceMatch:
    """Devices of two hosts, in pairs.

    Attributes:
        old: the host that a placement was made for.
        new: the one that it is to go to.
        to: for each old device the index of its new one, or `GONE`.
    """

    old: Host
    new: Host
    to: tuple[int, ...]

    @property
    def gone(self) -> tuple[str, ...]:
        """Names of the old devices that nothing stands for."""
        return tuple(device.name for device, index in zip(self.old.devices, self.to, strict=True) if index == GONE)

    @property
    def added(self) -> tuple[str, ...]:
        """Names of the new devices that stand for none."""
        return tuple(device.name for index, device in enumerate(self.new.devices) if index not in self.to)

    @property
    def renamed(self) -> dict[str, str]:
        """Old names to new ones, of all pairs."""
        return {
            device.name: self.new.devices[index].name
            for device, index in zip(self.old.devices, self.to, strict=True)
            if index != GONE
        }

    @property
    def same_links(self) -> dict[str, str]:
        """Old links to new ones, where one is in the other's place: joins devices that stand for each other."""
        return {old: new for new, found in self._links.items() if len(found.same) == 1 for old in found.same}

    @property
    def links(self) -> dict[str, tuple[str, ...]]:
        """For each new link the old ones like it, by name; none where no old one does.

        The link at the same place of the route between the pair that stands for the new one's ends, if kinds are the
        same; else all those of routes between devices of these kinds.
        """
        return {name: tuple(found.same or found.alike) for name, found in self._links.items()}

    @cached_property
    def _links(self) -> dict[str, _OldLinks]:
        back = {new: old for old, new in self.renamed.items()}
        kinds = {device.name: device.kind for device in self.new.devices}
        old_kinds = {device.name: device.kind for device in self.old.devices}
        routes = {(route.source, route.destination): route.links for route in self.old.routes}
        alike: dict[object, dict[str, None]] = {}
        for route in self.old.routes:
            for place, link in enumerate(route.links):
                key = (old_kinds[route.source], old_kinds[route.destination], len(route.links), place)
                alike.setdefault(key, {})[link] = None
        found = {link.name: _OldLinks() for link in self.new.links}
        for route in self.new.routes:
            ends = (back.get(route.source, ""), back.get(route.destination, ""))
            own_kinds = [kinds[route.source], kinds[route.destination]]
            before = routes.get(ends, ()) if [old_kinds.get(end) for end in ends] == own_kinds else ()
            for place, link in enumerate(route.links):
                if len(before) == len(route.links):
                    found[link].same[before[place]] = None
                found[link].alike.update(alike.get((*own_kinds, len(route.links), place), {}))
        return found


@dataclass(frozen=True)
class _OldLinks:
    """Names of old links like a new one, in order."""

    same: dict[str, None] = field(default_factory=dict)
    alike: dict[str, None] = field(default_factory=dict)


def match_devices(old: Host, new: Host) -> DeviceMatch:
    """Pairs of devices: those of one name and kind first, then of one kind, then of one name, then in their order.

    A gang, which has members, stands for gangs only.
    """
    to = [GONE] * old.num_devices
    for alike in (("name", "kind"), ("kind",), ("name",), ()):

        def facts(device: Device, alike: tuple[str, ...] = alike) -> list[object]:
            return [bool(device.members), *(getattr(device, name) for name in alike)]

        for place, device in enumerate(old.devices):
            if to[place] == GONE:
                free = (k for k, other in enumerate(new.devices) if k not in to and facts(other) == facts(device))
                to[place] = next(free, GONE)
    return DeviceMatch(old, new, tuple(to))


ENDLESS = 1e30
"""FLOP/s or bytes/s of a device that never waits for them."""
LEAST_S = 1e-9
"""Shorter op times than this say nothing."""


def op_type_factors(graph: OpGraph, measured_s: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """(N,) factors on a roofline's estimate of each op, from measured times on other kinds of devices.

    A roofline is fitted to each kind: its FLOP/s, bytes/s and least time of an op, with the efficiencies of
    `estimate_costs`. The excess of an op type over that is partly its own (its formula counts too few bytes) and partly
    the kind's. Taking both for normal with equal variances, the best guess for another kind from K of them is the sum
    of the K logarithms over K + 1. An op of a type that was never measured has the factor 1.

    Args:
        graph: N ops.
        measured_s: (N,) seconds for each kind.
    """
    types, type_of = np.unique(np.asarray(graph.targets, dtype=str), return_inverse=True)
    flops_s, bytes_s = _unit_times(graph, is_compute=True), _unit_times(graph, is_compute=False)
    total = np.zeros(len(types))
    for seconds in measured_s:
        took = (seconds > LEAST_S) & ~graph.is_source
        if took.any():
            types_s, said_s = seconds[took], _fitted(flops_s[took], bytes_s[took], seconds[took])
            weight = np.bincount(type_of[took], weights=types_s, minlength=len(types))
            missed = np.bincount(type_of[took], weights=types_s * np.log(types_s / said_s), minlength=len(types))
            total += missed / np.maximum(weight, LEAST_S)
    return np.asarray(np.exp(total / (len(measured_s) + 1))[type_of])


def _unit_times(graph: OpGraph, *, is_compute: bool) -> NDArray[np.float64]:
    """(N,) seconds at 1 FLOP/s, or at 1 byte/s, with everything else free."""
    flops, bandwidth = (1.0, ENDLESS) if is_compute else (ENDLESS, 1.0)
    device = Device(
        "unit", "unit", "simulated", 1, peak_flops_per_s={"float32": flops}, memory_bandwidth_bytes_per_s=bandwidth
    )
    return estimate_costs(graph, Host("unit", (device,))).op_time_s[:, 0]


def _fitted(
    flops_s: NDArray[np.float64], bytes_s: NDArray[np.float64], measured_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(M,) seconds of the roofline that explains measured times best: least mean |log ratio|, weighted by time."""
    from scipy.optimize import minimize

    whole_s = float(measured_s.sum())
    weight = measured_s / whole_s
    start = np.log(
        [
            max(float(flops_s.sum()), LEAST_S) / whole_s,
            max(float(bytes_s.sum()), LEAST_S) / whole_s,
            max(float(np.quantile(measured_s, 0.1)), LEAST_S),
        ]
    )

    def said_s(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        rate, bandwidth, least_s = (math.exp(min(max(value, -60.0), 60.0)) for value in logs.tolist())
        return np.asarray(np.maximum(np.maximum(flops_s / rate, bytes_s / bandwidth), least_s))

    def loss(logs: NDArray[np.float64]) -> float:
        return float(weight @ np.abs(np.log(measured_s / said_s(logs))))

    found = minimize(loss, start, method="Nelder-Mead", options={"maxfev": 300, "xatol": 1e-3, "fatol": 1e-6})
    return said_s(found.x)


def carried_placement(
    problem: Problem, devices: NDArray[np.int32], match: DeviceMatch, simulator: Simulator
) -> NDArray[np.int32]:
    """(N,) int32: the best simulated placement that leaves ops on the devices that stand for theirs.

    Ops of devices that are gone are tried where they would end first, dealt out evenly, and device by device on each
    of those that are left; so are ops that the problem bars from where they would be. If none of these fits into
    memory, it is the first of them.

    Args:
        problem: on the new host.
        devices: (N,) on the old one.
        match: of the two.
        simulator: of the problem.
    """
    kept = np.array(match.to, dtype=np.int32)[devices]
    if (kept != GONE).all():
        with suppress(InvalidValue):
            problem.check_placement(kept)
            return kept
    fine = atoms(problem)
    leaders = _leaders(problem, fine, kept)
    if (leaders != GONE).all():
        return fine.expand(leaders)
    pinned = _pinned(problem, fine, leaders)
    tried = [eft(pinned), _dealt(pinned, fine, leaders), *_moved(problem, fine, leaders, devices, match)]
    placements = np.stack([fine.expand(majority_devices(pinned, row, fine)) for row in tried])
    placements = placements[np.sort(np.unique(placements, axis=0, return_index=True)[1])]
    return np.asarray(placements[int(np.argmin(simulator.step_times(placements)))])


def _leaders(problem: Problem, fine: Grouping, kept: NDArray[np.int32]) -> NDArray[np.int32]:
    """(A,) int32: where each atom is, that most of its time is on; `GONE` where that is nowhere, or barred."""
    known = np.flatnonzero(kept != GONE)
    weight = np.zeros((fine.num_groups, problem.host.num_devices))
    mean_s = problem.costs.op_time_s.mean(axis=1) + 1e-12  # ops that take no time count by their number
    np.add.at(weight, (fine.op_group[known], kept[known]), mean_s[known])
    weight[~allowed_devices(problem, fine)] = 0.0
    return np.where(weight.max(axis=1) > 0.0, weight.argmax(axis=1), GONE).astype(np.int32)


def _pinned(problem: Problem, fine: Grouping, leaders: NDArray[np.int32]) -> Problem:
    """The problem over atoms, with those that are somewhere pinned there."""
    is_there = leaders[:, None] == np.arange(problem.host.num_devices)
    allowed = allowed_devices(problem, fine) & (is_there | (leaders[:, None] == GONE))
    return dataclasses.replace(problem, grouping=fine, allowed=allowed[fine.op_group])


def _dealt(pinned: Problem, fine: Grouping, leaders: NDArray[np.int32]) -> NDArray[np.int32]:
    """(N,) int32: atoms without a device, the longest first, each where the least time is so far."""
    seconds = np.zeros((fine.num_groups, pinned.host.num_devices))
    np.add.at(seconds, fine.op_group, pinned.costs.op_time_s)
    allowed, dealt = allowed_devices(pinned, fine), leaders.copy()
    busy_s = np.zeros(pinned.host.num_devices)
    placed = np.flatnonzero(leaders != GONE)
    np.add.at(busy_s, leaders[placed], seconds[placed, leaders[placed]])
    free = np.flatnonzero(leaders == GONE)
    for atom in free[np.argsort(-seconds[free].mean(axis=1), kind="stable")].tolist():
        dealt[atom] = int(np.argmin(np.where(allowed[atom], busy_s + seconds[atom], np.inf)))
        busy_s[dealt[atom]] += seconds[atom, dealt[atom]]
    return fine.expand(dealt)


def _moved(
    problem: Problem, fine: Grouping, leaders: NDArray[np.int32], devices: NDArray[np.int32], match: DeviceMatch
) -> list[NDArray[np.int32]]:
    """The atoms of each device that is gone on one that is left, for every way to rotate these; (N,) int32."""
    # of atoms; one that came from several devices is nowhere for another reason
    before = devices[np.unique(fine.op_group, return_index=True)[1]]
    is_free = leaders == GONE
    rank = np.cumsum(np.array(match.to) == GONE)
    count = problem.host.num_devices
    turned = (np.where(is_free, (rank[before] + turn) % count, leaders) for turn in range(count))
    return [fine.expand(moved.astype(np.int32)) for moved in turned]
