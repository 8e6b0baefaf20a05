"""What a run measured or learned of its host, carried over to another: costs, link figures, factors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs, CostSource, estimate_costs
from rlplace.measure.host_model.learned_host import LEAST_LEARNED, Equation, LearnedFactor, LearnedHost, likelihood
from rlplace.measure.host_model.scales import SECTIONS, Kind
from rlplace.measure.hosts.host import Host, Link
from rlplace.training.elastic.devices import DeviceMatch
from rlplace.training.elastic.op_types import op_type_factors

LEFT = " (left behind)"
"""Follows the name of a device or a link that the new host does not have: another may be called so there."""


@dataclass(frozen=True, eq=False)
class CarriedCosts:
    """Costs on a new host.

    Attributes:
        costs: (N, D).
        known: kinds of devices whose op times are those of the run.
        estimated: kinds whose op times come from data sheets, scaled by what the run says of op types.
    """

    costs: Costs
    known: tuple[str, ...] = ()
    estimated: tuple[str, ...] = ()


def carried_costs(graph: OpGraph, old: Host, costs: Costs, new: Host) -> CarriedCosts | None:
    """The costs of a graph on a new host; None where they have to be profiled there.

    Measured op times of a kind of devices hold for every device of that kind. Other kinds are estimated, each op type
    scaled by what it took on the old devices over what is estimated there. On a host of this machine, where everything
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
    links = tuple(_like(link, [before[name] for name in match.links[link.name]]) for link in match.new.links)
    return dataclasses.replace(match.new, links=links)


def carried_learned(learned: LearnedHost | None, source: CostSource, match: DeviceMatch) -> LearnedHost | None:
    """What a run learned of its host, by the names of the new one; None where that is nothing.

    Op types of a kind of devices and figures of the whole host keep their factors, a device has those of the one that
    it stands for, and a link those of the link in its place. Equations stay as they are: what is gone is a factor that
    the new host does not have. A new link without one in its place is known as the mean of those that are like it.

    Args:
        learned: what the run kept.
        source: of the costs on the new host: what was learned on measured costs says nothing of estimates.
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
    equations = _widened(learned.equations, len(factors), means) if learned.equations else ()
    host = match.new
    return LearnedHost(
        host.name, host.fingerprint, source, learned.prior, (*factors, *means), (), equations=tuple(equations)
    )


def _mean(factors: list[LearnedFactor], name: str) -> LearnedFactor:
    """What several links tell of one like them: they are not independent, so it is known no better than each."""
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
    none = (0.0,) * len(more)
    wide = [Equation(equation.target, equation.slopes + none) for equation in equations]
    for place, factor in enumerate(more):
        if (found := likelihood(factor, LEAST_LEARNED)) is not None:
            slope = 1.0 / math.sqrt(found[1])
            at = num_factors + place
            slopes = tuple(slope if column == at else 0.0 for column in range(num_factors + len(more)))
            wide.append(Equation(found[0] * slope, slopes))
    return wide


def _like(link: Link, others: list[Link]) -> Link:
    if not others:
        return link
    bandwidth = float(np.median([other.bandwidth_bytes_per_s for other in others]))
    return Link(link.name, bandwidth, float(np.median([other.latency_s for other in others])))


def _estimated_s(graph: OpGraph, kind: str, host: Host) -> NDArray[np.float64]:
    """(N,) seconds on a device of a kind, from its data sheet."""
    device = next(device for device in host.devices if device.kind == kind)
    alone = Host(host.name, (dataclasses.replace(device, members=()),))
    seconds: NDArray[np.float64] = estimate_costs(graph, alone).op_time_s[:, 0]
    return seconds
