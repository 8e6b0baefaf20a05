"""Tensors that several devices of another machine read: they go there once, and from device to device on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_hosts import crossings, simulated_machines
from micrographs import op_graph
from naive_plan import naive_plan, random_devices
from random_problems import random_graph

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.explain.explain_step import explain
from rlplace.measure.hosts.host import Host, Link, Route
from rlplace.measure.problem import Plan, Problem, transfer_sources
from rlplace.measure.simulate.simulator import Simulator
from rlplace.store.rows import decode_timeline, encode_timeline


def problem_of(host: Host, inputs: list[list[int]], num_bytes: list[int], op_s: list[float]) -> Problem:
    costs = Costs(np.repeat(np.array(op_s)[:, None], host.num_devices, axis=1), "given")
    return Problem(op_graph(inputs, num_bytes), host, costs, Grouping(np.arange(len(op_s))))


def broadcast(host: Host) -> Problem:
    """Op 0 takes a second and makes 300 bytes, which ops 1, 2 and 3 read; op 2 takes a tenth, the others a second."""
    return problem_of(host, [[], [0], [0], [0]], [300, 1, 1, 1], [1.0, 1.0, 0.1, 1.0])


def apart(host: Host) -> Host:
    """The same without the names of machines."""
    return replace(host, devices=tuple(replace(device, machine="") for device in host.devices))


def wire_bytes(problem: Problem, plan: Plan) -> int:
    """That leave machine a."""
    sources = transfer_sources(problem.graph, problem.host, plan)
    leave = (sources < 2) & (plan.transfer_destination >= 2)
    return int(problem.graph.tensor_bytes[plan.transfer_tensor[leave]].sum())


HERE = np.arange(4, dtype=np.int32)


@pytest.mark.parametrize("order", ["plan", "request"])
def test_a_tensor_that_two_devices_of_another_machine_read_crosses_once(order: str) -> None:
    """To b/0 in 1 s + 300 B / 100 B/s, on to b/1 in 300 B / 1,000 B/s; without machines, b/1 waits for the wire."""
    host = simulated_machines(dispatch_order=order, dispatch_s=1e-12)
    devices = tuple(replace(device, dispatcher=device.name) for device in host.devices)
    host = replace(host, devices=devices if order == "request" else host.devices)
    for has_machines, ends_s, sent, sources in (
        (True, [1.3, 5.0, 5.3], 300, [0, 0, 2]),
        (False, [1.3, 5.0, 9.0], 600, [0, 0, 0]),
    ):
        problem = broadcast(host if has_machines else apart(host))
        simulator = Simulator(problem, threads=1)
        plan = simulator.plan(HERE)
        timeline = simulator.timeline(plan)
        assert timeline.transfer_destination.tolist() == [1, 2, 3]
        assert timeline.transfer_end_s.tolist() == pytest.approx(ends_s)
        assert timeline.transfer_source.tolist() == sources
        assert wire_bytes(problem, plan) == sent
        assert timeline.step_s == pytest.approx(ends_s[-1] + 1.0)
        assert simulator.step_times(HERE)[0] == pytest.approx(ends_s[-1] + 1.0)


@pytest.mark.parametrize("order", ["plan", "request"])
def test_a_busy_relay_sends_on_when_its_op_has_ended(order: str) -> None:
    """Op 4 keeps b/0 busy until 7 s; the tensor came at 5 s. Op 6, after op 5 on a/1, starts at 6 s."""
    host = simulated_machines(dispatch_order=order, dispatch_s=1e-12)
    devices = tuple(replace(device, dispatcher=device.name * (order == "request")) for device in host.devices)
    inputs, op_s = [[], [], [0], [0], [], [], [5]], [1.0, 0.1, 0.1, 1.0, 7.0, 6.0, 0.1]
    problem = problem_of(replace(host, devices=devices), inputs, [300, 1, 1, 1, 1, 1, 1], op_s)
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(np.array([0, 0, 2, 3, 2, 1, 1], dtype=np.int32))
    sequence = plan.sequence.tolist()
    assert sequence.index(4) < sequence.index(7) < sequence.index(6) < sequence.index(8) < sequence.index(2)
    timeline = simulator.timeline(plan)
    assert timeline.transfer_start_s.tolist() == pytest.approx([1.0, 7.0])
    assert timeline.op_start_s[[2, 3]].tolist() == pytest.approx([7.0, 7.3]), "it is free again at once"
    parts = explain(problem, plan, timeline).path.parts
    assert [(part.kind, part.name) for part in parts if part.seconds > 1e-9] == [
        ("op", "op4"),
        ("transfer", "op0"),
        ("op", "op3"),
    ]


def test_the_relay_is_the_first_destination_in_the_sequence() -> None:
    """The order of a plan says which device that is."""
    problem = broadcast(simulated_machines())
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(HERE)
    to_b0, to_b1 = (4 + plan.transfer_destination.tolist().index(device) for device in (2, 3))
    turned = [{to_b0: to_b1, to_b1: to_b0}.get(item, item) for item in plan.sequence.tolist()]
    turned.remove(2)  # its reader
    turned = replace(plan, sequence=np.array([*turned, 2], dtype=np.int32))
    assert transfer_sources(problem.graph, problem.host, turned)[[to_b0 - 4, to_b1 - 4]].tolist() == [3, 0]
    timeline = simulator.timeline(turned)
    assert timeline.transfer_end_s[[to_b0 - 4, to_b1 - 4]].tolist() == pytest.approx([5.3, 5.0])


def test_a_relay_holds_its_copy_until_it_has_sent_it_on() -> None:
    """Op 2 on b/0 has read it at 5.1 s; b/1 has its copy at 5.3 s."""
    timeline = (simulator := Simulator(broadcast(simulated_machines()), threads=1)).timeline(simulator.plan(HERE))
    held = [
        (time_s, num_bytes)
        for time_s, device, num_bytes in zip(
            timeline.memory_time_s.tolist(), timeline.memory_device, timeline.memory_bytes.tolist(), strict=True
        )
        if device == 2
    ]
    assert held == [(0.0, 300), (5.0, 301), (pytest.approx(5.1), 300), (pytest.approx(5.3), 0)]


def test_an_update_waits_for_tensors_that_are_sent_on() -> None:
    """Op 4 on a/0 overwrites what b/0 and b/1 read."""
    problem = problem_of(simulated_machines(), [[], [], [0], [0], [1]], [300, 0, 1, 1, 0], [0.0, 1.0, 1.0, 1.0, 1.0])
    graph = replace(
        problem.graph,
        targets=("parameter", *problem.graph.targets[1:]),
        mutation_op=np.array([4], dtype=np.int32),
        mutation_tensor=np.array([0], dtype=np.int32),
    )
    simulator = Simulator(replace(problem, graph=graph), threads=1)
    plan = simulator.plan(np.array([0, 0, 2, 3, 0], dtype=np.int32))
    assert simulator.timeline(plan).op_start_s[4] == pytest.approx(4.3)


def test_nothing_is_relayed_between_threads_by_hand_over_or_from_machines_of_one_device() -> None:
    host = simulated_machines()
    handing = (*host.routes[1:], Route(host.routes[0].source, host.routes[0].destination, ()))
    for other in (apart(host), replace(host, processes=False), replace(host, routes=handing), simulated_machines("ab")):
        assert not other.machine_of.any()
    assert host.machine_of.tolist() == [0, 0, 2, 2]
    assert simulated_machines("aba").machine_of.tolist() == [0, 1, 0]


def test_a_cutoff_is_no_bound_on_a_direct_way_that_is_slower_than_the_relay() -> None:
    """From a/0 to b/1 a direct transfer would take 300 s: it goes by b/0."""
    host = simulated_machines()
    slow = Link("slow", 1.0)
    routes = tuple(
        replace(route, links=("slow",)) if (route.source, route.destination) == ("a/0", "b/1") else route
        for route in host.routes
    )
    simulator = Simulator(broadcast(replace(host, links=(*host.links, slow), routes=routes)), threads=1)
    (step_s,) = simulator.step_times(HERE)
    assert step_s == pytest.approx(6.3)
    assert simulator.step_times_within(HERE, np.array([step_s])).tolist() == [step_s]


def test_the_work_of_a_wire_counts_what_crosses_it() -> None:
    """In a full pipeline: one transfer of 4 s a step, or two."""
    for host, busiest_s in ((simulated_machines(), 4.0), (apart(simulated_machines()), 8.0)):
        simulator = Simulator(broadcast(host), objective="throughput", threads=1)
        assert simulator.step_times(HERE)[0] == pytest.approx(busiest_s)


def test_the_critical_path_and_the_cuts_go_by_the_relay() -> None:
    problem = broadcast(simulated_machines())
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(HERE)
    explained = explain(problem, plan, simulator.timeline(plan))
    ways = [(part.source, part.device) for part in explained.path.parts if part.kind == "transfer"]
    assert ways == [("a/0", "b/0"), ("b/0", "b/1")]
    assert {(cut.source, cut.destination) for cut in explained.cuts} == {("a/0", "a/1"), ("a/0", "b/0"), ("b/0", "b/1")}


def test_a_kept_timeline_gets_its_relays_back() -> None:
    problem = broadcast(simulated_machines())
    plan = (simulator := Simulator(problem, threads=1)).plan(HERE)
    kept = decode_timeline(encode_timeline(simulator.timeline(plan)), plan, problem, "store")
    assert kept.transfer_source.tolist() == [0, 0, 2]


@given(seed=st.integers(0, 2**32 - 1), machines=st.sampled_from(["aab", "abb", "aabb", "abab", "aabbcc", "abcabc"]))
@settings(max_examples=200, deadline=None)
def test_no_tensor_comes_to_a_machine_twice(seed: int, machines: str) -> None:
    """Of plans of the simulator, and of any other order; within one machine it starts where it was made."""
    rng, host = np.random.default_rng(seed), simulated_machines(machines)
    graph = replace(random_graph(rng, 30), mutation_op=np.zeros(0, np.int32), mutation_tensor=np.zeros(0, np.int32))
    costs = Costs(rng.uniform(0.5, 3.0, (30, len(machines))), "given")
    problem = Problem(graph, host, costs, Grouping(np.arange(30)))
    devices = random_devices(graph, len(machines), rng)
    simulator = Simulator(problem, threads=1)
    for plan in (simulator.plan(devices), naive_plan(graph, devices, rng)):
        timeline = simulator.timeline(plan)
        sources = timeline.transfer_source
        assert sources.tolist() == transfer_sources(graph, host, plan).tolist()
        crossed = crossings(host, plan.transfer_tensor, sources, plan.transfer_destination)
        assert len(set(crossed)) == len(crossed)
        homes = plan.devices[graph.tensor_op[plan.transfer_tensor]]
        ends_s = dict(
            zip(zip(plan.transfer_tensor, plan.transfer_destination, strict=True), timeline.transfer_end_s, strict=True)
        )
        for k, (home, source) in enumerate(zip(homes, sources, strict=True)):
            is_near = machines[plan.transfer_destination[k]] == machines[home]
            assert is_near <= (source == home)
            if source != home:
                assert timeline.transfer_start_s[k] >= ends_s[plan.transfer_tensor[k], source]


def test_sums_within_machines_and_one_crossing_are_a_placement() -> None:
    """Gradients of four devices, 300 B each: summed in pairs before one crosses, or all of them on a/0."""
    inputs = [[], [], [], [], [0, 1], [2, 3], [4, 5]]
    problem = problem_of(simulated_machines(), inputs, [300] * 7, [1.0] * 4 + [0.1] * 3)
    simulator = Simulator(problem, threads=1)
    by_machine, at_once = ([*range(4), *sums] for sums in ([0, 2, 0], [0, 0, 0]))
    step_s = simulator.step_times(np.array([by_machine, at_once], dtype=np.int32))
    # 1 s, 0.3 s within b, 0.1 s, 4 s to a, 0.1 s; and two crossings, one after the other
    assert step_s.tolist() == pytest.approx([5.5, 9.2])


def test_a_host_without_machines_is_unchanged() -> None:
    """All devices are peers: figures of routes and of the planner are those of the routes themselves."""
    from rlplace.measure.simulate.compiled_problem import compile_problem

    compiled = compile_problem(broadcast(apart(simulated_machines())))
    assert not compiled.has_relays
    assert not compiled.is_general
    assert compiled.peers.tolist() == [0b1111] * 4
    assert compiled.least_latency_s.tobytes() == compiled.route_latency_s.tobytes()
    assert compiled.least_s_per_byte.tobytes() == compiled.route_s_per_byte.tobytes()
