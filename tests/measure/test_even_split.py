"""Data parallelism by arithmetic, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_hosts import core_host
from micrographs import op_graph
from random_problems import plain_host

from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE
from rlplace.measure.bounds import can_be_split, even_split_s, ring_all_reduce_s
from rlplace.measure.costs.costs import Costs
from rlplace.measure.host_model import prior_of
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Problem


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
    return Problem(graph, host, Costs(costs, "estimated"), Grouping(np.arange(4)))


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
    problem = Problem(one, host, Costs(np.ones((3, 2)), "estimated"), Grouping(np.arange(3)))
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
