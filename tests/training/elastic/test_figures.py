"""Costs, links and factors of one host, carried over to another."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from core_hosts import core_host
from elastic_hosts import simulated_host
from search_problems import chain_problem

from rlplace.errors import InvalidValue
from rlplace.graphs.synthetic import synthetic
from rlplace.measure.costs.costs import Costs, estimate_costs
from rlplace.measure.host_model import LearnedHost, Posterior, Prior, Scales, knowledge_of
from rlplace.measure.host_model.learned_host import Equation, LearnedFactor
from rlplace.measure.hosts.host import Host
from rlplace.training.elastic.carried import carried_costs, carried_host, carried_learned, match_devices

GRAPH = synthetic("layered", seed=2, layers=4, width=3)


def profiled(host: Host, factor: float = 1.0) -> Costs:
    """As estimated, but for a factor: figures that one can tell from an estimate."""
    return Costs(estimate_costs(GRAPH, host).op_time_s * factor, "profiled")


def test_measured_op_times_hold_for_every_device_of_their_kind() -> None:
    old, new = simulated_host("fast", "slow"), simulated_host("slow", "slow", "fast", "fast")
    costs = profiled(old, 3.0)
    carried = carried_costs(GRAPH, old, costs, new)
    assert carried is not None
    assert (carried.costs.source, carried.known, carried.estimated) == ("profiled", ("slow", "fast"), ())
    assert (carried.costs.op_time_s == costs.op_time_s[:, [1, 1, 0, 0]]).all()


def test_an_unknown_kind_is_estimated_where_that_is_all_there_is() -> None:
    old, new = simulated_host("fast"), simulated_host("fast", "slow")
    carried = carried_costs(GRAPH, old, profiled(old, 3.0), new)
    assert carried is not None
    assert (carried.costs.source, carried.known, carried.estimated) == ("estimated", ("fast",), ("slow",))
    runs = ~GRAPH.is_source
    ratio = carried.costs.op_time_s[runs] / estimate_costs(GRAPH, new).op_time_s[runs]
    assert ratio[:, 0] == pytest.approx(3.0)
    assert 0.7 < np.median(ratio[:, 1]) < 1.4, "a fitted roofline takes up what is the kind's own"


def test_on_this_machine_an_unknown_kind_is_to_be_profiled() -> None:
    old = simulated_host("fast")
    assert carried_costs(GRAPH, old, profiled(old), core_host(2)) is None
    assert carried_costs(GRAPH, old, estimate_costs(GRAPH, old), core_host(2)) is None
    cores = core_host(2)
    costs = Costs(np.ones((GRAPH.num_ops, 2)), "profiled")
    carried = carried_costs(GRAPH, cores, costs, core_host(3))
    assert carried is not None
    assert carried.costs.op_time_s.shape == (GRAPH.num_ops, 3)


def test_estimates_are_made_anew_and_given_times_hold_everywhere() -> None:
    old, new = simulated_host("fast"), simulated_host("fast", "slow")
    carried = carried_costs(GRAPH, old, Costs(np.full((GRAPH.num_ops, 1), 7.0), "estimated"), new)
    assert carried is not None
    assert (carried.costs.op_time_s == estimate_costs(GRAPH, new).op_time_s).all()
    times_s = np.arange(float(GRAPH.num_ops))
    given = carried_costs(GRAPH, old, Costs.given(times_s, old), new)
    assert given is not None
    assert given.costs.source == "given"
    assert (given.costs.op_time_s == times_s[:, None]).all()


def test_scratch_goes_with_its_kind_of_devices() -> None:
    old, new = core_host(1), core_host(2)
    seen = np.arange(GRAPH.num_ops, dtype=np.int64)[:, None]
    carried = carried_costs(GRAPH, old, Costs(np.ones((GRAPH.num_ops, 1)), "profiled", seen), new)
    assert carried is not None
    assert carried.costs.workspace_bytes is not None
    assert carried.costs.workspace_bytes.tolist() == seen.repeat(2, axis=1).tolist()


def test_a_simulated_kind_without_figures_is_refused() -> None:
    bare = simulated_host("slow")
    bare = dataclasses.replace(
        bare, devices=tuple(dataclasses.replace(device, peak_flops_per_s={}) for device in bare.devices)
    )
    old = simulated_host("fast")
    with pytest.raises(InvalidValue, match="peak_flops_per_s"):
        carried_costs(GRAPH, old, profiled(old), bare)


def test_measured_links_are_carried_between_hosts_of_machines_only() -> None:
    old = core_host(2)
    measured = dataclasses.replace(
        old, links=tuple(dataclasses.replace(link, latency_s=1e-3 * (k + 1)) for k, link in enumerate(old.links))
    )
    links = {link.name: link.latency_s for link in carried_host(match_devices(measured, core_host(3))).links}
    assert links["cpu:0->cpu:1"] == 1e-3
    assert links["cpu:1->cpu:0"] == 2e-3
    assert links["cpu:2->cpu:1"] == pytest.approx(1.5e-3)
    simulated = simulated_host("fast", "fast")
    assert carried_host(match_devices(measured, simulated)) is simulated


def learned(*factors: tuple[str, str, float]) -> LearnedHost:
    """Factors whose measured logarithm is as said, all but certain."""
    found = tuple(LearnedFactor(kind, name, mean, 0.01, 0.5) for kind, name, mean in factors)  # type: ignore[arg-type]
    return LearnedHost("cores", "0" * 16, "profiled", Prior(), found, ())


def test_factors_go_by_the_names_of_the_new_host() -> None:
    known = learned(
        ("op type", "aten.mm on cpu-core", 0.5),
        ("device", "cpu:1", 0.2),
        ("device", "cpu:0", 0.1),
        ("bandwidth", "cpu:0->cpu:1", math.log(2.0)),
        ("bandwidth", "cpu:1->cpu:0", math.log(8.0)),
    )
    match = match_devices(core_host(2), core_host(3))
    carried = carried_learned(known, "profiled", match)
    assert carried is not None
    assert carried.host_fingerprint == match.new.fingerprint
    means = {(factor.kind, factor.name): factor.log_mean for factor in carried.factors}
    assert means["op type", "aten.mm on cpu-core"] == 0.5
    assert means["device", "cpu:1"] == 0.2
    assert ("device", "cpu:2") not in means
    assert means["bandwidth", "cpu:0->cpu:1"] == math.log(2.0)
    assert means["bandwidth", "cpu:2->cpu:0"] == pytest.approx(math.log(4.0))


def test_a_device_that_is_gone_takes_its_factors_along() -> None:
    carried = carried_learned(
        learned(("device", "cpu:1", 0.2), ("device", "cpu:0", 0.1)),
        "profiled",
        match_devices(core_host(2), core_host(1)),
    )
    assert carried is not None
    assert [factor.name for factor in carried.factors] == ["cpu:1 (left behind)", "cpu:0"]


def test_equations_between_what_stays_and_what_is_gone_stay() -> None:
    known = learned(
        ("device", "cpu:0", 0.0),
        ("device", "cpu:1", 0.0),
        ("bandwidth", "cpu:0->cpu:1", 0.3),
        ("bandwidth", "cpu:1->cpu:0", 0.3),
    )
    equation = Equation(2.0, (10.0, -10.0, 0.0, 0.0))
    known = dataclasses.replace(known, equations=(equation,))
    fewer = carried_learned(known, "profiled", match_devices(core_host(2), core_host(1)))
    assert fewer is not None
    assert fewer.equations == (equation,)
    more = carried_learned(known, "profiled", match_devices(core_host(2), core_host(3)))
    assert more is not None
    new_links = ["cpu:0->cpu:2", "cpu:1->cpu:2", "cpu:2->cpu:0", "cpu:2->cpu:1"]
    assert [factor.name for factor in more.factors[4:]] == new_links
    assert more.equations[0] == Equation(2.0, (10.0, -10.0, *[0.0] * 6))
    assert len(more.equations) == 5, "and one for each new link"
    knowledge = knowledge_of([more], "profiled")
    assert knowledge is not None
    assert ("bandwidth", "cpu:2->cpu:0") in knowledge.factors


def test_what_was_learned_on_measured_costs_says_nothing_of_estimates() -> None:
    match = match_devices(core_host(2), core_host(2))
    assert carried_learned(learned(("device", "cpu:1", 0.2)), "estimated", match) is None
    assert carried_learned(None, "profiled", match) is None


def test_what_is_carried_is_known_of_the_new_host() -> None:
    match = match_devices(core_host(2), core_host(3))
    carried = carried_learned(learned(("device", "cpu:1", math.log(2.0))), "profiled", match)
    assert carried is not None
    problem = chain_problem(4, 3)
    problem = dataclasses.replace(problem, host=core_host(3), costs=Costs(np.ones((4, 3)), "profiled"))
    scales = Scales(problem, Prior(overhead=0.0, overhead_s=0.0), knowledge_of([carried], "profiled"))
    column = Posterior.prior(scales).problem.costs.op_time_s[1]
    assert column[1] > 1.5 * column[0]
    assert column[2] == pytest.approx(column[0])
