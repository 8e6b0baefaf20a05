"""Lower bounds and data parallelism by arithmetic: by hand, and against brute force over all placements."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from core_hosts import core_host
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import fork_join, op_graph
from random_problems import plain_host, problem_of, random_priorities, random_problem

from rlplace.graphs import Grouping
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE
from rlplace.measure.bounds import (
    _ascent_weights,
    best_weights,
    can_be_split,
    critical_path_s,
    even_split_s,
    even_weights,
    figures,
    heads_and_tails,
    lower_bound_s,
    lower_bounds,
    ring_all_reduce_s,
    work_of_labels_s,
)
from rlplace.measure.costs.costs import Costs
from rlplace.measure.host_model import prior_of
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator


def problem(reads: list[list[int]], costs: list[list[float]], gang: bool = False) -> Problem:
    devices = [Device("d0", "k", "simulated", 1 << 30), Device("d1", "k", "simulated", 1 << 30)]
    if gang:
        devices.append(Device("d0-1", "gang", "simulated", 1 << 30, members=("d0", "d1")))
    names = [device.name for device in devices]
    links = tuple(Link(f"{a}>{b}", 1e9) for a in names for b in names if a != b)
    routes = tuple(Route(a, b, (f"{a}>{b}",)) for a in names for b in names if a != b)
    graph = op_graph(reads)
    return problem_of(graph, Host("h", tuple(devices), links, routes), np.array(costs))


def total_work_s(drawn: Problem) -> float:
    """Launches left out."""
    return lower_bounds(drawn, "throughput")["total work"]


def test_a_chain_is_bounded_by_its_path_and_a_fan_by_its_work() -> None:
    chain = problem([[], [0], [1]], [[1.0, 2.0], [4.0, 3.0], [1.0, 1.0]])
    assert critical_path_s(chain) == 5.0  # 1 + 3 + 1
    bound_s, name = lower_bound_s(chain)
    assert name == "path with transfers"  # staying on d0 or d1 takes 6; else one byte moves, at 1e9 bytes/s, twice
    assert bound_s == pytest.approx(5.0 + 1e-9, rel=1e-12)
    fan = problem([[], [], [], []], [[2.0, 2.0]] * 4)
    assert total_work_s(fan) == 4.0
    assert lower_bound_s(fan) == (4.0, "total work")


def test_work_on_a_gang_keeps_all_members_busy() -> None:
    # 2 s on one device, or 1.5 s on both: alone it is less work (2 against 3)
    assert total_work_s(problem([[]], [[2.0, 2.0, 1.5]], gang=True)) == 1.0
    assert total_work_s(problem([[]], [[2.0, 2.0, 0.5]], gang=True)) == 0.5


@pytest.mark.parametrize("seed", range(10))
def test_no_placement_beats_the_bound(seed: int) -> None:
    generator = np.random.default_rng(seed)
    reads = [sorted({int(r) for r in generator.integers(0, i, 2)}) if i else [] for i in range(6)]
    drawn = problem(reads, generator.uniform(0.1, 2.0, (6, 2)).tolist())
    every = np.array(list(itertools.product(range(2), repeat=6)), dtype=np.int32)
    best_s = Simulator(drawn, threads=1).step_times(every).min()
    assert lower_bound_s(drawn)[0] <= best_s * (1 + 1e-12)


def test_unequal_devices_share_work_by_speed() -> None:
    # 12 ops of 1 s on d0, 2 s on d1: d0 takes 8 of them and d1 takes 4
    drawn = problem([[]] * 12, [[1.0, 2.0]] * 12)
    bounds = lower_bounds(drawn)
    assert bounds["total work"] == 6.0
    assert bounds["unequal devices"] == pytest.approx(8.0)
    known = figures(drawn)
    assert best_weights(known) == pytest.approx([2 / 3, 1 / 3])
    climbed = _ascent_weights(known.work_s, known.holds, even_weights(known))
    assert climbed.sum() == pytest.approx(1.0)
    assert work_of_labels_s(known, climbed).sum() == pytest.approx(8.0, rel=0.02)


def test_work_between_a_head_and_a_tail_counts_with_both() -> None:
    # 3 s, then four ops of 2 s each on two devices, then 5 s
    drawn = problem([[], [0], [0], [0], [0], [1, 2, 3, 4]], [[t, t] for t in (3.0, 2.0, 2.0, 2.0, 2.0, 5.0)])
    assert critical_path_s(drawn) == 10.0
    assert total_work_s(drawn) == 8.0
    assert lower_bounds(drawn)["heads and tails"] == pytest.approx(12.0, rel=1e-6)


def test_a_class_runs_on_one_device_between_its_heads_and_tails() -> None:
    graph = op_graph([[], [0], [0], [1, 2]], colocation=[-1, 0, 0, -1])
    costs = Costs(np.array([[1.0, 1.0], [4.0, 3.0], [1.0, 3.0], [2.0, 2.0]]), "estimated")
    drawn = Problem(graph, plain_host(2, 1e9), costs, Grouping(np.array([0, 1, 1, 2])))
    # on d0 they take 5, on d1 6; one op of 1 s comes before and one of 2 s after
    assert lower_bounds(drawn)["co-location class"] == 8.0


def test_a_join_pays_for_a_transfer_or_for_staying_together() -> None:
    # two ops of 4 s, joined: together they take 8 s; apart, a transfer of 3 s
    graph = op_graph([[], [], [0, 1]], 300)
    drawn = problem_of(graph, plain_host(2, 100.0), np.repeat([[4.0], [4.0], [1.0]], 2, axis=1))
    bounds = lower_bounds(drawn)
    assert bounds["critical path"] == 5.0
    assert bounds["path with transfers"] == 8.0  # 4 + 3 + 1
    slow = replace(drawn, graph=op_graph([[], [], [0, 1]], 900))
    assert lower_bounds(slow)["path with transfers"] == 9.0  # 4 + 4 + 1


def test_heads_and_tails_mirror_each_other() -> None:
    drawn = problem_of(fork_join(3, 2, 5), plain_host(2, 1.0))
    heads, tails = heads_and_tails(drawn.graph, figures(drawn), with_transfers=True)
    assert heads[:5].tolist() == [0.0, 1.0, 1.0, 1.0, 4.0]  # three branches together, or one transfer of 5 s
    assert tails[4:].tolist() == [4.0, 1.0, 1.0, 1.0, 0.0]


def test_one_dispatcher_launches_everything() -> None:
    graph = op_graph([[]] * 5)
    drawn = problem_of(graph, plain_host(2, dispatch_s=1.0), np.full((5, 2), 0.5))
    assert lower_bounds(drawn)["dispatcher"] == 5.5
    assert Simulator(drawn, threads=1).step_times(np.array([[0, 1, 0, 1, 0]], dtype=np.int32))[0] == 5.5
    # launched only when the one before has ended: 1.5 s of device time an op, 5 ops on 2 devices
    idle = replace(drawn, host=replace(drawn.host, run_ahead=1))
    assert lower_bounds(idle)["total work"] == 3.75
    assert total_work_s(idle) == 1.25


def test_parameters_that_fit_no_device_force_a_transfer() -> None:
    # 1 s, then 1 s; the two parameters of 60 bytes do not fit one device of 100
    targets = ["parameter", "parameter", "aten.op", "aten.op"]
    graph = op_graph([[], [], [0], [1, 2]], [60, 60, 40, 1], targets=targets)
    host = plain_host(2, 10.0)
    tight = replace(host, devices=tuple(replace(device, memory_bytes=100) for device in host.devices))
    drawn = problem_of(graph, tight)
    # the cheapest way is the 40 bytes between the ops: 1 + 4 + 1
    assert lower_bounds(drawn)["memory-forced transfer"] == 6.0
    assert lower_bounds(replace(drawn, host=host))["memory-forced transfer"] == 0.0


def test_barred_devices_count_neither_for_paths_nor_for_work() -> None:
    drawn = problem([[], []], [[1.0, 4.0], [1.0, 4.0]])
    pinned = replace(drawn, allowed=np.array([[False, True], [True, True]]))
    bounds = lower_bounds(pinned)
    assert bounds["critical path"] == 4.0
    assert bounds["total work"] == 2.5
    assert lower_bounds(pinned, "throughput")["unequal devices"] == pytest.approx(4.0)


@pytest.mark.slow
@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_no_placement_and_no_priorities_beat_any_bound(seed: int, num_ops: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = random_problem(rng, num_ops)
    if rng.random() < 0.5:
        classes = np.where(rng.random(num_ops) < 0.5, rng.integers(0, min(2, num_ops), num_ops), -1)
        drawn = replace(drawn, graph=replace(drawn.graph, colocation=classes))
    devices = drawn.host.num_devices
    shape = (min(devices**num_ops, 500), num_ops)
    every = np.array(np.unravel_index(rng.permutation(devices**num_ops)[: shape[0]], (devices,) * num_ops)).T
    for label in range(2):
        members = drawn.graph.colocation == label
        every[:, members] = every[:, members][:, :1]
    placements = every.astype(np.int32)
    simulator = Simulator(drawn, threads=1)
    times = (simulator.step_times(placements), simulator.step_times(placements, random_priorities(rng, num_ops)))
    best_s = float(np.minimum(*times).min())
    for name, bound_s in lower_bounds(drawn).items():
        assert bound_s <= best_s * (1 + 1e-9) + 1e-12, name
    busiest_s = float(Simulator(drawn, objective="throughput", threads=1).step_times(placements).min())
    for name, bound_s in lower_bounds(drawn, "throughput").items():
        assert bound_s <= busiest_s * (1 + 1e-9) + 1e-12, name


def full_mesh(count: int, *, shared: bool) -> Host:
    """Every pair by its own link of 10 bytes/s and 1 s of latency, or all by one bus."""
    names = [f"d:{k}" for k in range(count)]
    devices = tuple(Device(name, "d", "simulated", 1 << 30) for name in names)
    pairs = [(a, b) for a in names for b in names if a != b]
    links = (Link("bus", 10.0, 1.0),) if shared else tuple(Link(f"{a}>{b}", 10.0, 1.0) for a, b in pairs)
    return Host("mesh", devices, links, tuple(Route(a, b, ("bus" if shared else f"{a}>{b}",)) for a, b in pairs))


def test_a_ring_by_hand() -> None:
    # 4 devices, 80 bytes: 6 rounds, each 1 s of latency and 20 bytes at 10 bytes/s; on one bus four hops share it
    assert ring_all_reduce_s(full_mesh(4, shared=False), [0, 1, 2, 3], 80.0) == pytest.approx(6 * (1 + 2))
    assert ring_all_reduce_s(full_mesh(4, shared=True), [0, 1, 2, 3], 80.0) == pytest.approx(6 * (1 + 8))
    assert ring_all_reduce_s(full_mesh(2, shared=False), [0, 1], 80.0) == pytest.approx(2 * (1 + 4))
    assert ring_all_reduce_s(full_mesh(2, shared=False), [1], 80.0) == 0.0


def step(host: Host, op_s: list[list[float]], gradient_bytes: float = 0.0) -> Problem:
    """A parameter, then a forward op, a backward op and an update, with seconds on each device."""
    graph = op_graph(
        [[], [0], [1], [0, 2]],
        [50, 1, 1, 1],
        targets=["parameter", "aten.op", "aten.op", "update.sgd"],
        phases=[FORWARD, FORWARD, BACKWARD, UPDATE],
    )
    graph = replace(graph, gradient_bytes=np.array([gradient_bytes, 0, 0, 0]))
    costs = np.array([[9.0] * host.num_devices, *op_s])
    return problem_of(graph, host, costs)


def test_an_even_split_by_hand() -> None:
    host = plain_host(2)
    even = [[4.0, 4.0], [8.0, 8.0], [1.0, 1.0]]
    # half of forward and backward, and the whole update
    assert even_split_s(step(host, even)) == pytest.approx(2.0 + 4.0 + 1.0)
    # the ring takes 2 rounds of 300 bytes at 100 bytes/s: behind 4 s of backward it shows for 2 s
    assert even_split_s(step(host, even, 600.0)) == pytest.approx(2.0 + 6.0 + 1.0)


def test_a_faster_device_takes_more_of_the_batch() -> None:
    uneven = [[4.0, 2.0], [8.0, 4.0], [1.0, 0.5]]
    assert even_split_s(step(plain_host(2), uneven)) == pytest.approx(12.0 / 3 + 1.0)


def test_the_best_number_of_devices_is_taken() -> None:
    slow = [[4.0, 4.0, 400.0], [8.0, 8.0, 800.0], [1.0, 1.0, 100.0]]  # the third one would update for 100 s
    assert even_split_s(step(plain_host(3), slow)) == pytest.approx(7.0)


def test_every_replica_launches_every_op_and_holds_the_model() -> None:
    host = plain_host(2, dispatch_s=5.0)
    assert even_split_s(step(host, [[4.0, 4.0], [8.0, 8.0], [1.0, 1.0]])) == pytest.approx(3 * 5.0)
    small = replace(host, devices=(host.devices[0], replace(host.devices[1], memory_bytes=49)))
    assert even_split_s(step(small, [[4.0, 4.0], [8.0, 8.0], [1.0, 1.0]])) == float("inf")
    assert even_split_s(step(plain_host(1), [[4.0], [8.0], [1.0]])) == float("inf")


def test_a_batch_of_one_sample_cannot_be_split() -> None:
    graph = op_graph([[], [], [0, 1]], targets=["input", "parameter", "aten.op"])
    one, several, scalar = (replace(graph, tensor_shapes=(shape, (4,), (4,))) for shape in ((1, 8), (2, 8), ()))
    assert [can_be_split(step) for step in (one, several, scalar)] == [False, True, False]
    assert can_be_split(op_graph([[], [0]]))
    host = plain_host(2)
    problem = problem_of(one, host)
    assert even_split_s(problem) == float("inf")
    assert even_split_s(replace(problem, graph=several)) == pytest.approx(0.5)


def test_devices_that_slow_each_other_down_take_longer_by_hand() -> None:
    even = [[4.0, 4.0], [8.0, 8.0], [1.0, 1.0]]
    host = plain_host(2, corun_slowdown=((0.0, 0.5), (0.25, 0.0)))
    # all of forward and backward would take them 18 s and 15 s beside each other, the update 1.5 s and 1.25 s
    assert even_split_s(step(host, even)) == pytest.approx(1 / (1 / 18 + 1 / 15) + 1.5)


def test_on_this_machine_cores_slow_each_other_down_as_the_host_model_expects() -> None:
    even = [[4.0, 4.0], [8.0, 8.0], [1.0, 1.0]]
    problem = step(core_host(2), even)
    factor = 1.0 + prior_of(problem).corun
    assert factor > 1.0
    assert even_split_s(problem) == pytest.approx(7.0 * factor)
    known = replace(problem.host, corun_slowdown=((0.0, 0.5), (0.5, 0.0)))
    assert even_split_s(replace(problem, host=known)) == pytest.approx(7.0 * 1.5)
