"""Schedules, peaks and refusals worked out by hand, the plain-Python reference, and what holds on any problem."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from random_problems import BIG, plain_host, problem_of, random_graph, random_priorities, random_problem
from reference_simulator import Item, Reference

from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Plan, Problem, Timeline
from rlplace.measure.simulate.compiled_problem import upward_ranks
from rlplace.measure.simulate.simulator import Simulator

Times = dict[str, tuple[float, float]]


def uniform(graph: OpGraph, op_time_s: list[float], host: Host) -> Problem:
    times = np.array(op_time_s, dtype=float)[:, None] * np.ones((1, host.num_devices))
    return Problem(graph, host, Costs(times, "estimated"), Grouping(np.arange(graph.num_ops)))


def run(problem: Problem, devices: list[int], priorities: list[float] | None = None) -> Times:
    """Start and end of `op i` and of `tensor -> destination`."""
    simulator = Simulator(problem, threads=1)
    timeline = simulator.timeline(
        simulator.plan(np.array(devices), None if priorities is None else np.array(priorities))
    )
    times = {
        f"op {i}": (float(start), float(end))
        for i, (start, end) in enumerate(zip(timeline.op_start_s, timeline.op_end_s, strict=True))
    }
    for tensor, destination, start, end in zip(
        timeline.transfer_tensor,
        timeline.transfer_destination,
        timeline.transfer_start_s,
        timeline.transfer_end_s,
        strict=True,
    ):
        times[f"{tensor} -> {destination}"] = (float(start), float(end))
    return times


def with_routes(host: Host, **flags: bool) -> Host:
    return replace(host, routes=tuple(replace(route, **flags) for route in host.routes))


def test_chain() -> None:
    problem = uniform(op_graph([[], [0], [1]], 100), [1, 2, 3], plain_host(2))
    assert run(problem, [0, 0, 1]) == {"op 0": (0, 1), "op 1": (1, 3), "1 -> 1": (3, 4), "op 2": (4, 7)}
    assert Simulator(problem).step_times(np.array([[0, 0, 1], [0, 0, 0], [0, 1, 0]])).tolist() == [7, 6, 8]


def test_diamond_overlaps_compute_and_transfer() -> None:
    problem = uniform(op_graph([[], [0], [0], [1, 2]], 100), [1, 2, 3, 1], plain_host(2))
    assert run(problem, [0, 0, 1, 0]) == {
        "op 0": (0, 1),
        "op 1": (1, 3),
        "0 -> 1": (1, 2),
        "op 2": (2, 5),
        "2 -> 0": (5, 6),
        "op 3": (6, 7),
    }


def test_latency_is_the_largest_and_bandwidth_the_least_of_a_route() -> None:
    host = plain_host(2)
    links = (
        Link("up d0", 200, 0.5),
        Link("down d1", 100, 0.25),
        *(link for link in host.links if "d0" not in link.name),
    )
    host = replace(host, links=(*links[:2], Link("down d0", 100), Link("up d1", 100)))
    assert run(uniform(op_graph([[], [0]], 100), [1, 1], host), [0, 1])["0 -> 1"] == (1, 2.5)


def test_fork_join_over_a_shared_link_is_served_in_order_of_destination() -> None:
    problem = uniform(op_graph([[], [0], [0], [0], [1, 2, 3]], 100), [1, 1, 1, 1, 1], plain_host(4))
    times = run(problem, [0, 1, 2, 3, 0])
    assert [times[f"0 -> {d}"] for d in (1, 2, 3)] == [(1, 2), (2, 3), (3, 4)]
    assert [times[f"{t} -> 0"] for t in (1, 2, 3)] == [(3, 4), (4, 5), (5, 6)]
    assert times["op 4"] == (6, 7)


def test_requests_that_share_a_link_do_not_overtake() -> None:
    # 0 -> 1 waits for the way down to d1, so 1 -> 2 waits behind it for the way up of d0, though its own way is free.
    graph = op_graph([[], [], [], [0, 2], [1]], [100, 100, 300, 1, 1])
    problem = uniform(graph, [2, 1, 1, 1, 1], plain_host(4))
    times = run(problem, [0, 0, 3, 1, 2], [9, 8, 7, 6, 5])
    assert times["2 -> 1"] == (1, 4)
    assert times["0 -> 1"] == (4, 5)
    assert times["1 -> 2"] == (5, 6)


def test_a_tensor_goes_to_a_device_once() -> None:
    problem = uniform(op_graph([[], [0], [0]], 100), [1, 1, 1], plain_host(2))
    assert run(problem, [0, 1, 1]) == {"op 0": (0, 1), "0 -> 1": (1, 2), "op 1": (2, 3), "op 2": (3, 4)}


def test_sources_take_no_time_and_their_tensors_travel_from_the_start() -> None:
    graph = op_graph([[], [], [0, 1]], 100, targets=["parameter", "input", "aten.mm"])
    times = run(uniform(graph, [9, 9, 1], plain_host(2)), [0, 0, 1])
    assert times == {"op 0": (0, 0), "op 1": (0, 0), "0 -> 1": (0, 1), "1 -> 1": (1, 2), "op 2": (2, 3)}


def test_ready_ops_run_by_priority_then_by_index() -> None:
    problem = uniform(op_graph([[], [], []]), [1, 1, 1], plain_host(1))
    assert run(problem, [0, 0, 0], [1, 3, 2]) == {"op 1": (0, 1), "op 2": (1, 2), "op 0": (2, 3)}
    assert run(problem, [0, 0, 0], [0, 0, 0]) == {"op 0": (0, 1), "op 1": (1, 2), "op 2": (2, 3)}


def test_upward_rank_counts_mean_ops_and_mean_transfers() -> None:
    problem = uniform(op_graph([[], [0], [0]], [200, 1, 1]), [1, 2, 4], plain_host(3))
    costs = Costs(problem.costs.op_time_s * np.array([[0.5, 1.0, 1.5]]), "estimated")
    assert upward_ranks(replace(problem, costs=costs)).tolist() == pytest.approx([1 + 2 + 4, 2, 4])


def test_a_copy_that_blocks_its_destination_competes_with_ops() -> None:
    host = with_routes(plain_host(2), blocks_destination=True)
    graph = op_graph([[], [0], [], []], 100)
    problem = uniform(graph, [1, 1, 2, 2], host)
    times = run(problem, [0, 1, 1, 1], [9, 5, 8, 1])
    assert times == {"op 0": (0, 1), "op 2": (0, 2), "0 -> 1": (2, 3), "op 1": (3, 4), "op 3": (4, 6)}


def test_a_copy_that_blocks_its_source_starts_before_ops() -> None:
    host = with_routes(plain_host(2), blocks_source=True)
    problem = uniform(op_graph([[], [0], []], 100), [1, 1, 2], host)
    assert run(problem, [0, 1, 0]) == {"op 0": (0, 1), "0 -> 1": (1, 2), "op 1": (2, 3), "op 2": (2, 4)}


def test_a_plain_copy_blocks_both_devices() -> None:
    host = with_routes(plain_host(2), blocks_source=True, blocks_destination=True)
    problem = uniform(op_graph([[], [0], [], []], 100), [1, 1, 2, 3], host)
    times = run(problem, [0, 1, 0, 1], [9, 8, 7, 9])
    assert times == {"op 0": (0, 1), "op 3": (0, 3), "op 2": (1, 3), "0 -> 1": (3, 4), "op 1": (4, 5)}


def gang_host(**options: object) -> Host:
    """Two cores, and the two of them as one device that sees the memory of both."""
    host = plain_host(2)
    gang = Device("both", "gang", "simulated", 1 << 50, members=("d0", "d1"))
    pairs = [("d0", "both"), ("both", "d0"), ("d1", "both"), ("both", "d1")]
    routes = (*host.routes, *(Route(source, destination, ()) for source, destination in pairs))
    return replace(host, devices=(*host.devices, gang), routes=routes, **options)  # type: ignore[arg-type]


def test_a_gang_is_busy_with_its_members_and_is_handed_their_tensors() -> None:
    problem = uniform(op_graph([[], [], [0, 1], [2]], 100), [1, 3, 2, 1], gang_host())
    times = run(problem, [0, 1, 2, 1])
    assert times == {
        "op 0": (0, 1),
        "op 1": (0, 3),
        "0 -> 2": (1, 1),
        "1 -> 2": (3, 3),
        "op 2": (3, 5),
        "2 -> 1": (5, 5),
        "op 3": (5, 6),
    }


def test_idle_members_wait_for_a_gang_with_higher_priority() -> None:
    problem = uniform(op_graph([[], [], [], []]), [1, 2, 1, 1], gang_host())
    assert run(problem, [0, 1, 2, 0], [9, 8, 7, 6])["op 3"] == (3, 4)
    assert run(problem, [0, 1, 2, 0], [9, 8, 6, 7])["op 3"] == (1, 2)


def test_plan_order_launches_one_after_the_other() -> None:
    problem = uniform(op_graph([[], [0], []], 100), [1, 1, 1], plain_host(2, dispatch_s=2, copy_dispatch_s=3))
    times = run(problem, [0, 1, 1], [9, 8, 7])
    # op 0 and op 2 are launched by 2 and 4, the copy by 7, op 1 by 9.
    assert times == {"op 0": (2, 3), "op 2": (4, 5), "0 -> 1": (7, 8), "op 1": (9, 10)}


def test_run_ahead_bounds_how_early_an_op_is_launched() -> None:
    problem = uniform(op_graph([[], [], []]), [5, 5, 5], plain_host(1, dispatch_s=1, run_ahead=1))
    assert run(problem, [0, 0, 0]) == {"op 0": (1, 6), "op 1": (7, 12), "op 2": (13, 18)}
    ahead = replace(problem, host=replace(problem.host, run_ahead=2))
    assert run(ahead, [0, 0, 0]) == {"op 0": (1, 6), "op 1": (6, 11), "op 2": (11, 16)}


def test_by_request_a_lock_goes_to_the_first_to_ask() -> None:
    host = plain_host(2, dispatch_s=1, dispatch_order="request", run_ahead=1)
    problem = uniform(op_graph([[], [0], [], [2]], 0), [1, 1, 3, 1], host)
    # both ask at 0: device 0 first; op 1 asks when op 0 ends at 2.
    assert run(problem, [0, 0, 1, 1]) == {"op 0": (1, 2), "op 2": (2, 5), "op 1": (3, 4), "op 3": (6, 7)}


def test_ops_side_by_side_slow_each_other_down() -> None:
    host = plain_host(2, corun_slowdown=((0.0, 1.0), (0.5, 0.0)))
    problem = uniform(op_graph([[], []]), [4, 2], host)
    # op 1 runs at 2/3 until 3; by then op 0 has done 1.5 of its 4 seconds.
    assert run(problem, [0, 1]) == {"op 0": (0, 5.5), "op 1": (0, 3)}


def test_an_update_waits_for_other_readers_and_for_transfers() -> None:
    graph = op_graph(
        [[], [], [0, 1], [0], [0]],
        100,
        targets=["parameter", "input", "update.sgd", "aten.mm", "aten.mm"],
        mutations=[(2, 0)],
    )
    problem = uniform(graph, [0, 0, 1, 2, 1], plain_host(2))
    times = run(problem, [0, 0, 0, 0, 1], [0, 0, 9, 1, 1])
    assert times["op 3"] == (0, 2)
    assert times["0 -> 1"] == (0, 1)
    assert times["op 2"] == (2, 3)


def test_peak_memory_by_lifetime() -> None:
    graph = replace(
        op_graph([[], [0], [1], [1, 2]], [100, 50, 30, 10], targets=["parameter", *["aten.op"] * 3], outputs=[3]),
        workspace_bytes=np.array([0, 7, 0, 0]),
        state_bytes=np.array([5, 0, 0, 0]),
    )
    problem = uniform(graph, [0, 1, 1, 1], plain_host(2))
    # one device: 105 held; op 1: 57; op 2: 50 + 30; op 3: 50 + 30 + 10.
    assert Simulator(problem).measure(np.array([[0, 0, 0, 0]]))[0].peak_bytes == (195, 0)
    # op 2 on d1: there 50 arrive and 30 are made; on d0, 50 until op 3, which receives 30 and makes 10.
    assert Simulator(problem).measure(np.array([[0, 0, 1, 0]]))[0].peak_bytes == (195, 80)
    rounded = tuple(replace(d, memory_granularity_bytes=64, context_bytes=1000) for d in problem.host.devices)
    problem = replace(problem, host=replace(problem.host, devices=rounded))
    assert Simulator(problem).measure(np.array([[0, 0, 0, 0]]))[0].peak_bytes == (1000 + 128 + 64 + 3 * 64, 1000)


def test_a_step_beyond_memory_is_out_of_memory() -> None:
    problem = uniform(op_graph([[], [0]], [100, 20]), [1, 1], plain_host(2))
    devices = tuple(replace(device, memory_bytes=110) for device in problem.host.devices)
    small = replace(problem, host=replace(problem.host, devices=devices))
    measurement = Simulator(small).measure(np.array([[0, 0]]))[0]
    assert measurement.status == "oom"
    assert measurement.step_time_s == np.inf
    assert measurement.why == "d0: peak of 120 bytes is 10 bytes over its 110"
    assert Simulator(small).step_times(np.array([[0, 0], [0, 1]])).tolist() == [np.inf, np.inf]
    pooled = tuple(replace(device, memory_bytes=199, memory_pool="ram") for device in problem.host.devices)
    shared = replace(problem, host=replace(problem.host, devices=pooled))
    assert Simulator(shared).measure(np.array([[0, 0]]))[0].status == "ok"
    assert Simulator(shared).measure(np.array([[0, 1]]))[0].why == "ram: peak of 200 bytes is 1 bytes over its 199"


def test_throughput_is_the_busiest_device_or_link() -> None:
    problem = uniform(op_graph([[], [0], [0]], 150), [1, 2, 0.5], plain_host(3))
    simulator = Simulator(problem, objective="throughput")
    assert simulator.step_times(np.array([[0, 0, 0], [0, 1, 1], [0, 1, 2]])).tolist() == [3.5, 2.5, 3.0]


def test_retime_refuses_a_plan_that_cannot_be_followed() -> None:
    simulator = Simulator(uniform(op_graph([[], [0]], 100), [1, 1], plain_host(2)))
    plan = simulator.plan(np.array([0, 1]))
    assert simulator.retime(plan).step_time_s == 3
    for sequence in ([2, 0, 1], [0, 1, 2], [0, 2, 2], [0, 0, 2], [0, 2, 9], [0, 1]):
        with pytest.raises(InvalidValue):
            simulator.retime(Plan(plan.devices, plan.transfer_tensor, plan.transfer_destination, np.array(sequence)))
    with pytest.raises(InvalidValue):
        simulator.retime(Plan(np.array([0, 0]), plan.transfer_tensor, plan.transfer_destination, plan.sequence))
    with pytest.raises(InvalidValue):
        simulator.retime(Plan(plan.devices, np.array([], int), np.array([], int), np.array([0, 1])))


@pytest.mark.parametrize("devices", [[[0]], [[0, 7]], [[0, -1]]])
def test_a_bad_placement_is_refused(devices: list[list[int]]) -> None:
    with pytest.raises(InvalidValue, match="placement"):
        Simulator(uniform(op_graph([[], [0]]), [1, 1], plain_host(2))).step_times(np.array(devices))


def test_bad_settings_are_refused() -> None:
    problem = uniform(op_graph([[], [0]]), [1, 1], plain_host(2))
    with pytest.raises(InvalidValue, match="objective"):
        Simulator(problem, objective="speed")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="threads"):
        Simulator(problem, threads=0)
    with pytest.raises(InvalidValue, match="priorities"):
        Simulator(problem).step_times(np.array([[0, 0]]), np.array([1.0]))
    with pytest.raises(InvalidValue, match="priorities"):
        Simulator(problem).step_times(np.array([[0, 0]]), np.array([1.0, np.nan]))


def test_a_cutoff_gives_up_what_cannot_end_by_then() -> None:
    simulator = Simulator(uniform(op_graph([[], [0], [0], [1, 2]], 100), [1, 2, 3, 1], plain_host(2)), threads=1)
    placements = np.array([[0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 0]])  # 7, 7 and 9 seconds
    assert simulator.step_times_within(placements, np.array([7.0, 7.0, 7.0])).tolist() == [7.0, 7.0, np.inf]
    assert simulator.step_times_within(placements, np.array([6.9, 6.9, 9.0])).tolist() == [np.inf, np.inf, 9.0]
    with pytest.raises(InvalidValue, match="cutoff_s"):
        simulator.step_times_within(placements, np.array([7.0]))


@pytest.mark.slow
def test_a_pickled_simulator_simulates_the_same() -> None:
    problem = random_problem(np.random.default_rng(5), 30)
    placements = np.random.default_rng(0).integers(0, problem.host.num_devices, (20, 30)).astype(np.int32)
    for objective in ("latency", "throughput"):
        simulator = Simulator(problem, objective=objective, threads=2)  # type: ignore[arg-type]
        wanted_s = simulator.step_times(placements)
        found = pickle.loads(pickle.dumps(simulator))  # noqa: S301 - our own bytes
        assert (found.objective, found.threads) == (objective, 2)
        assert np.array_equal(found.step_times(placements), wanted_s)


def test_memory_counters_of_a_timeline() -> None:
    """Tensor 0, of 100 bytes, goes over from second 1 to 2, where op 1 makes 20 more."""
    costs = Costs(np.ones((2, 2)), "estimated")
    problem = Problem(op_graph([[], [0]], [100, 20]), plain_host(2), costs, Grouping(np.arange(2)))
    simulator = Simulator(problem)
    timeline = simulator.timeline(simulator.plan(np.array([0, 1])))
    counters = zip(timeline.memory_device, timeline.memory_time_s, timeline.memory_bytes, strict=True)
    assert [tuple(map(float, counter)) for counter in counters] == [
        (0, 0, 100),
        (0, 2, 0),
        (1, 0, 0),
        (1, 1, 100),
        (1, 2, 120),
        (1, 3, 0),
    ]


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
@few
def test_agrees_with_the_reference(seed: int, num_ops: int) -> None:
    check_against_the_reference(seed, num_ops)


@pytest.mark.slow
@given(seed=seeds, num_ops=st.integers(1, 60))
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_agrees_with_the_reference_on_many(seed: int, num_ops: int) -> None:
    check_against_the_reference(seed, num_ops)


def check_against_the_reference(seed: int, num_ops: int) -> None:
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
    problem = problem_of(random_graph(rng, 60), host, rng.uniform(0.5, 3.0, (60, num_devices)), source="given")
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
    return problem_of(graph, host, rng.uniform(0.1, 3.0, (num_ops, host.num_devices)))


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


def test_a_host_of_one_device_needs_no_routes_and_one_of_hand_overs_no_links() -> None:
    host = Host("one", (Device("d0", "any", "simulated", BIG),), (), ())
    problem = problem_of(op_graph([[], [0]]), host)
    assert Simulator(problem).step_times(np.zeros((3, 2), int)).tolist() == [2, 2, 2]
    devices = tuple(Device(f"d{d}", "any", "simulated", BIG) for d in range(2))
    host = Host("two", devices, (), (Route("d0", "d1", ()), Route("d1", "d0", ())))
    problem = problem_of(op_graph([[], [0]]), host)
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
