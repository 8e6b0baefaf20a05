"""The simulator against the plain-Python reference, and what must hold on any problem."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from random_problems import BIG, plain_host, random_graph, random_priorities, random_problem
from reference_simulator import Item, Reference

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Plan, Problem, Timeline
from rlplace.measure.simulate.simulator import Simulator

seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=60, deadline=None)


def items_of(plan: Plan) -> list[Item]:
    n = len(plan.devices)
    sends = list(zip(plan.transfer_tensor.tolist(), plan.transfer_destination.tolist(), strict=True))
    return [("op", item) if item < n else ("send", *sends[item - n]) for item in plan.sequence.tolist()]


def times_of(timeline: Timeline) -> dict[Item, tuple[float, float]]:
    ops = enumerate(zip(timeline.op_start_s.tolist(), timeline.op_end_s.tolist(), strict=True))
    times: dict[Item, tuple[float, float]] = {("op", op): time for op, time in ops}
    for k in range(len(timeline.transfer_tensor)):
        send: Item = ("send", int(timeline.transfer_tensor[k]), int(timeline.transfer_destination[k]))
        times[send] = (float(timeline.transfer_start_s[k]), float(timeline.transfer_end_s[k]))
    return times


@given(seed=seeds, num_ops=st.integers(1, 40))
@few
def test_a_disturbed_step_follows_the_plan_with_longer_transfers(seed: int, num_ops: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, num_ops)
    devices = rng.integers(0, problem.host.num_devices, num_ops).astype(np.int32)
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(devices)
    factor = rng.choice([1.0, 0.5, 2.0, 3.0], plan.num_transfers)
    reference = Reference(problem, devices.tolist(), [0.0] * num_ops)
    sends = zip(plan.transfer_tensor.tolist(), plan.transfer_destination.tolist(), factor.tolist(), strict=True)
    reference.slower = {("send", tensor, destination): slower for tensor, destination, slower in sends}
    reference.follow(items_of(plan))
    times = times_of(simulator.timeline(plan, factor))
    assert times.keys() == reference.start_s.keys()
    for item, (start_s, end_s) in times.items():
        assert (start_s, end_s) == pytest.approx((reference.start_s[item], reference.end_s[item]), rel=1e-9, abs=1e-9)
    undisturbed = simulator.timeline(plan)  # the next step is one as it should be
    reference.slower = {}
    reference.follow(items_of(plan))
    assert undisturbed.step_s == pytest.approx(max(reference.end_s.values(), default=0.0), rel=1e-9, abs=1e-9)


@given(seed=seeds, num_ops=st.integers(1, 60))
@example(seed=1242, num_ops=58)
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_agrees_with_the_reference(seed: int, num_ops: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, num_ops)
    priorities = random_priorities(rng, num_ops)
    devices = rng.integers(0, problem.host.num_devices, num_ops).astype(np.int32)
    if rng.random() < 0.3:
        costs = replace(problem.costs, moved_factor=1.0 + rng.integers(0, 3, num_ops) / 4)
        problem = replace(problem, costs=costs)
    if rng.random() < 0.3 and not any(device.members for device in problem.host.devices):
        own = tuple(replace(device, dispatcher=device.dispatcher and device.name) for device in problem.host.devices)
        if rng.random() < 0.7:
            own = tuple(replace(device, machine=str(rng.choice(["a", "b"]))) for device in own)
        problem = replace(problem, host=replace(problem.host, devices=own, processes=True))
    simulator = Simulator(problem, threads=1)
    plan, measurement = simulator.plan_and_time(devices, priorities)
    reference = Reference(problem, devices.tolist(), priorities.tolist())
    assert items_of(plan) == reference.plan()
    planned_s = dict(reference.start_s), dict(reference.end_s)
    reference.follow(items_of(plan))
    members = [member for device in problem.host.devices for member in device.members]
    # what one gang kept a member free for, another may take in the end: followed, that starts sooner than planned
    if problem.host.dispatch_s == problem.host.copy_dispatch_s == 0 and len(set(members)) == len(members):
        assert planned_s == (reference.start_s, reference.end_s)
    times = times_of(simulator.timeline(plan))
    assert times.keys() == reference.start_s.keys()
    for item, (start_s, end_s) in times.items():
        assert start_s == pytest.approx(reference.start_s[item], rel=1e-12, abs=1e-12)
        assert end_s == pytest.approx(reference.end_s[item], rel=1e-12, abs=1e-12)
    assert measurement.peak_bytes == tuple(reference.peak([d]) for d in range(problem.host.num_devices))
    assert (measurement.status == "oom") == reference.is_oom()
    if measurement.ok:
        assert measurement.step_time_s == pytest.approx(reference.step_s(), rel=1e-12)
        throughput = Simulator(problem, objective="throughput", threads=1).retime(plan)
        assert throughput.step_time_s == pytest.approx(reference.busiest_s(), rel=1e-12)
    assert simulator.retime(plan) == measurement


@pytest.mark.parametrize("num_devices", [8, 9])
def test_agrees_with_the_reference_on_more_wires_than_a_word_has_bits(num_devices: int) -> None:
    """A wire for each pair: the fast planner, which keeps a bit for each device and wire, cannot follow all of them."""
    rng = np.random.default_rng(0)
    names = [f"d{device}" for device in range(num_devices)]
    pairs = [(a, b) for a in names for b in names if a != b]
    wires = tuple(Link(f"{a}>{b}", float(rng.choice([50.0, 100.0])), 0.25) for a, b in pairs)
    routes = tuple(Route(a, b, (f"{a}>{b}",)) for a, b in pairs)
    host = Host("wires", tuple(Device(name, "any", "simulated", BIG) for name in names), wires, routes)
    costs = Costs(rng.uniform(0.5, 3.0, (60, num_devices)), "given")
    problem = Problem(random_graph(rng, 60), host, costs, Grouping(np.arange(60)))
    simulator = Simulator(problem, threads=1)
    for _ in range(10):
        devices, priorities = rng.integers(0, num_devices, 60).astype(np.int32), random_priorities(rng, 60)
        reference = Reference(problem, devices.tolist(), priorities.tolist())
        plan, measurement = simulator.plan_and_time(devices, priorities)
        assert items_of(plan) == reference.plan()
        assert measurement.step_time_s == pytest.approx(reference.step_s(), rel=1e-12)


def roomy(problem: Problem) -> Problem:
    devices = tuple(replace(device, memory_bytes=BIG) for device in problem.host.devices)
    return replace(problem, host=replace(problem.host, devices=devices))


@given(seed=seeds, num_ops=st.integers(1, 60))
@few
def test_a_step_is_no_shorter_than_its_longest_path_and_its_work(seed: int, num_ops: int) -> None:
    rng = np.random.default_rng(seed)
    problem = roomy(random_problem(rng, num_ops))
    graph = problem.graph
    devices = rng.integers(0, problem.host.num_devices, num_ops).astype(np.int32)
    work_s = problem.costs.op_time_s[np.arange(num_ops), devices] * ~graph.is_source
    step_s = float(Simulator(problem, threads=1).step_times(devices)[0])
    longest_s = np.zeros(num_ops)
    for op in range(num_ops):
        inputs = graph.input_tensors[graph.input_offsets[op] : graph.input_offsets[op + 1]]
        longest_s[op] = work_s[op] + max((longest_s[graph.tensor_op[t]] for t in inputs), default=0.0)
    assert step_s >= longest_s.max() * (1 - 1e-12)
    assert step_s >= work_s.sum() / problem.host.num_devices * (1 - 1e-12)


@given(seed=seeds, num_ops=st.integers(1, 60))
@few
def test_threads_change_nothing_and_measure_is_plan_then_retime(seed: int, num_ops: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, num_ops)
    placements = rng.integers(0, problem.host.num_devices, (9, num_ops)).astype(np.int32)
    one, four = Simulator(problem, threads=1), Simulator(problem, threads=4)
    assert one.step_times(placements).tobytes() == four.step_times(placements).tobytes()
    assert one.measure(placements) == four.measure(placements)
    assert one.step_times(np.asfortranarray(placements)).tobytes() == one.step_times(placements).tobytes()
    assert one.measure(placements) == [one.retime(one.plan(devices)) for devices in placements]


@given(seed=seeds, num_ops=st.integers(1, 60), num_devices=st.integers(1, 4))
@few
def test_the_fast_path_changes_nothing(seed: int, num_ops: int, num_devices: int) -> None:
    """Co-running that slows down a device without ops makes the simulator take the general path."""
    rng = np.random.default_rng(seed)
    host = plain_host(num_devices + 1, dispatch_s=float(rng.choice([0.0, 0.3])), run_ahead=int(rng.choice([1, 5])))
    problem = random_problem(rng, num_ops, host)
    slowed = np.zeros((num_devices + 1, num_devices + 1))
    slowed[num_devices, 0] = 1.0
    general = replace(problem, host=replace(host, corun_slowdown=tuple(map(tuple, slowed.tolist()))))
    devices = rng.integers(0, num_devices, num_ops).astype(np.int32)
    priorities = random_priorities(rng, num_ops)
    plan, measurement = Simulator(problem, threads=1).plan_and_time(devices, priorities)
    general_plan, general_measurement = Simulator(general, threads=1).plan_and_time(devices, priorities)
    assert plan.sequence.tolist() == general_plan.sequence.tolist()
    assert measurement == general_measurement


def untied_problem(rng: np.random.Generator, num_ops: int, host: Host) -> Problem:
    """No two events at one instant: no sources, one output an op, times drawn from a range."""
    reads = [sorted(set(rng.integers(max(0, i - 6), i, 2).tolist())) if i else [] for i in range(num_ops)]
    graph = op_graph(reads, rng.integers(1, 500, num_ops).tolist())
    costs = Costs(rng.uniform(0.1, 3.0, (num_ops, host.num_devices)), "estimated")
    return Problem(graph, host, costs, Grouping(np.arange(num_ops)))


@given(seed=seeds, num_ops=st.integers(1, 40))
@few
def test_other_op_numbers_change_nothing(seed: int, num_ops: int) -> None:
    rng = np.random.default_rng(seed)
    problem = untied_problem(rng, num_ops, plain_host(3, dispatch_s=0.1))
    graph = problem.graph
    reads = [graph.input_tensors[graph.input_offsets[i] : graph.input_offsets[i + 1]].tolist() for i in range(num_ops)]
    order: list[int] = []
    while len(order) < num_ops:
        free = [i for i in range(num_ops) if i not in order and all(j in order for j in reads[i])]
        order.append(int(rng.choice(free)))
    number = {op: place for place, op in enumerate(order)}
    renumbered = op_graph(
        [sorted(number[j] for j in reads[i]) for i in order], [int(graph.tensor_bytes[i]) for i in order]
    )
    costs = Costs(problem.costs.op_time_s[order], "estimated")
    other = Problem(renumbered, problem.host, costs, problem.grouping)
    devices, priorities = rng.integers(0, 3, num_ops), rng.permutation(num_ops).astype(float)
    expected = Simulator(problem, threads=1).step_times(devices, priorities)
    assert Simulator(other, threads=1).step_times(devices[order], priorities[order]) == expected


@given(seed=seeds, num_ops=st.integers(1, 40))
@few
def test_other_device_numbers_change_nothing(seed: int, num_ops: int) -> None:
    rng = np.random.default_rng(seed)
    problem = untied_problem(rng, num_ops, plain_host(2, dispatch_s=0.1))
    host = replace(problem.host, devices=problem.host.devices[::-1])
    other = replace(problem, host=host, costs=Costs(problem.costs.op_time_s[:, ::-1], "estimated"))
    devices, priorities = rng.integers(0, 2, num_ops), rng.permutation(num_ops).astype(float)
    expected = Simulator(problem, threads=1).step_times(devices, priorities)
    assert Simulator(other, threads=1).step_times(1 - devices, priorities) == expected


@given(seed=seeds, num_ops=st.integers(1, 60))
@few
def test_more_bandwidth_never_hurts_a_fixed_plan(seed: int, num_ops: int) -> None:
    rng = np.random.default_rng(seed)
    problem = roomy(random_problem(rng, num_ops))
    host = replace(problem.host, corun_slowdown=(), dispatch_order="plan")
    links = tuple(replace(link, bandwidth_bytes_per_s=2 * link.bandwidth_bytes_per_s) for link in host.links)
    devices = rng.integers(0, host.num_devices, num_ops).astype(np.int32)
    simulator = Simulator(replace(problem, host=host), threads=1)
    plan, measurement = simulator.plan_and_time(devices)
    faster = Simulator(replace(problem, host=replace(host, links=links)), threads=1)
    assert faster.retime(plan).step_time_s <= measurement.step_time_s


def test_a_host_of_one_device_needs_no_routes() -> None:
    host = Host("one", (Device("d0", "any", "simulated", BIG),), (), ())
    problem = Problem(op_graph([[], [0]]), host, Costs(np.ones((2, 1)), "estimated"), Grouping(np.arange(2)))
    assert Simulator(problem).step_times(np.zeros((3, 2), int)).tolist() == [2, 2, 2]


def test_a_host_of_hand_overs_needs_no_links() -> None:
    devices = tuple(Device(f"d{d}", "any", "simulated", BIG) for d in range(2))
    host = Host("two", devices, (), (Route("d0", "d1", ()), Route("d1", "d0", ())))
    problem = Problem(op_graph([[], [0]]), host, Costs(np.ones((2, 2)), "estimated"), Grouping(np.arange(2)))
    assert Simulator(problem).step_times(np.array([[0, 1], [1, 1]])).tolist() == [2, 2]


@given(seed=seeds, num_ops=st.integers(1, 60), threads=st.sampled_from([1, 2]), throughput=st.booleans())
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_cutoff_changes_nothing_below_it(seed: int, num_ops: int, threads: int, throughput: bool) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, num_ops)
    devices = rng.integers(0, problem.host.num_devices, (8, num_ops)).astype(np.int32)
    simulator = Simulator(problem, objective="throughput" if throughput else "latency", threads=threads)
    step_s = simulator.step_times(devices)
    finite_s = step_s[np.isfinite(step_s)]
    cutoff_s = rng.choice(finite_s, 8) if len(finite_s) else np.ones(8)
    within_s = simulator.step_times_within(devices, cutoff_s)
    assert np.array_equal(within_s[step_s <= cutoff_s], step_s[step_s <= cutoff_s])
    slow = within_s[step_s > cutoff_s]
    assert np.all(np.isinf(slow) | (slow == step_s[step_s > cutoff_s]))
    assert np.array_equal(simulator.step_times(devices), step_s)  # nothing is left over from what was given up
