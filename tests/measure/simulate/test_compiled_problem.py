"""A host as arrays: kinds of route, the devices behind gangs, accounts of memory.

Orders of ops: upward ranks where nothing is cut; micro-batches after each other, and backward first.

In-place updates as the kernels read them, and those that could never run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
from core_hosts import core_host
from micro_batched import cut_graph, layered_step, step_problem
from micrographs import op_graph
from random_problems import plain_host, random_problem

from rlplace.errors import InvalidValue, UnknownName
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import OP_ORDERS, Problem
from rlplace.measure.simulate.compiled_problem import (
    HANDOVER,
    JOB,
    QUEUED,
    account_limits,
    account_names,
    atoms_of,
    default_priorities,
    lay_out_updates,
    list_order,
    padded_routes,
    route_tables,
    turns,
    upward_ranks,
)
from rlplace.measure.simulate.simulator import Simulator


def with_members(host: Host, members: dict[str, tuple[str, ...]]) -> Host:
    return replace(host, devices=tuple(replace(d, members=members.get(d.name, ())) for d in host.devices))


def test_routes_are_copies_beside_ops_or_jobs_and_have_their_links_in_order() -> None:
    host = plain_host(2)
    index = {link.name: k for k, link in enumerate(host.links)}
    kinds, blocks_source, offsets, links = route_tables(host)
    assert kinds.tolist() == [0, QUEUED, QUEUED, 0]
    assert not blocks_source.any()
    assert offsets.tolist() == [0, 0, 2, 4, 4]
    assert links.tolist() == [index[name] for route in host.routes for name in route.links]
    first, second, third, fourth = links.tolist()
    assert padded_routes(offsets, links).tolist() == [0, 0, first, second, third, fourth, 0, 0]
    jobs = replace(host, routes=tuple(replace(r, blocks_source=True, blocks_destination=True) for r in host.routes))
    assert route_tables(jobs)[0].tolist() == [0, JOB, JOB, 0]
    assert route_tables(jobs)[1].tolist() == [0, 1, 1, 0]


def test_a_route_without_links_is_a_hand_over_and_a_short_one_is_padded_with_its_first_link() -> None:
    kinds = route_tables(core_host(2, has_gang=True))[0].reshape(3, 3)
    assert kinds[2, :2].tolist() == kinds[:2, 2].tolist() == [HANDOVER, HANDOVER]
    assert padded_routes(np.array([0, 1, 3], np.int32), np.array([4, 5, 6], np.int32)).tolist() == [4, 4, 5, 6]


def test_a_gang_keeps_its_single_devices_busy_also_through_another_gang() -> None:
    host = with_members(plain_host(4), {"d2": ("d0", "d1"), "d3": ("d2",)})
    assert atoms_of(host).tolist() == [0b01, 0b10, 0b11, 0b11]


def test_gangs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UnknownName, match="d9"):
        atoms_of(with_members(plain_host(2), {"d1": ("d9",)}))
    with pytest.raises(InvalidValue, match="single devices"):
        atoms_of(with_members(plain_host(2), {"d1": ("d1",)}))


def test_devices_that_share_a_pool_have_an_account_more() -> None:
    host = plain_host(3)
    sizes = zip(host.devices, (10, 30, 20), ("", "ram", "ram"), strict=True)
    pooled = replace(host, devices=tuple(replace(d, memory_bytes=size, memory_pool=pool) for d, size, pool in sizes))
    assert account_names(pooled) == ("d0", "d1", "d2", "ram")
    pool, capacity = account_limits(pooled)
    assert (pool.tolist(), capacity.tolist()) == ([-1, 3, 3], [10, 30, 20, 20])
    alone = replace(pooled, devices=(*pooled.devices[:2], replace(pooled.devices[2], memory_pool="other")))
    assert account_names(alone) == ("d0", "d1", "d2"), "a pool of one is that one's memory"


FAST = 1e30
"""Bytes per second at which a transfer takes no time that a second would notice."""


def ordered(problem: Problem, op_order: str) -> Problem:
    return dataclasses.replace(problem, op_order=op_order)


@pytest.mark.parametrize("op_order", OP_ORDERS)
def test_a_step_that_is_not_cut_has_one_order(op_order: str) -> None:
    for seed in range(5):
        plain = random_problem(np.random.default_rng(seed), 30)
        problem = ordered(plain, op_order)
        assert np.array_equal(default_priorities(problem), upward_ranks(plain))
        assert np.array_equal(turns(problem), np.zeros(30))
        by_rank = np.lexsort((np.arange(30), -upward_ranks(plain)))
        assert np.array_equal(list_order(problem), by_rank)


def pipeline(op_order: str, num_micro_batches: int = 2) -> tuple[Problem, np.ndarray]:
    """Two layers on two devices, a second an op, transfers that take no time; the loss with the second layer."""
    graph = cut_graph(layered_step(2), num_micro_batches)
    problem = step_problem(graph, plain_host(2, FAST), op_order)
    is_second = [
        path in ("l1", "") and target != "input" for path, target in zip(graph.modules, graph.targets, strict=True)
    ]
    return problem, np.array(is_second, dtype=np.int32)


def starts(problem: Problem, devices: np.ndarray) -> dict[str, float]:
    simulator = Simulator(problem, threads=1)
    timeline = simulator.timeline(simulator.plan(devices))
    return dict(zip(problem.graph.names, timeline.op_start_s.tolist(), strict=True))


def test_tilt_lowers_a_micro_batch_by_its_share_of_the_longest_path() -> None:
    problem, _ = pipeline("tilt")
    rank, micro_batch = upward_ranks(problem), problem.graph.micro_batch
    assert rank.max() == pytest.approx(4.0)
    assert default_priorities(problem) == pytest.approx(rank - np.maximum(micro_batch, 0) * 2.0)


def test_by_rank_micro_batches_run_in_lock_step_and_tilted_after_each_other() -> None:
    by_rank, tilted = starts(*pipeline("rank")), starts(*pipeline("tilt"))
    # the second device: forward and backward of layer 1, of micro-batch 0 and of micro-batch 1
    names = ("op4/0", "op4/1", "op6/0", "op6/1")
    assert [by_rank[name] for name in names] == pytest.approx([1, 2, 3, 4])
    assert [tilted[name] for name in names] == pytest.approx([1, 4, 2, 5])


def test_backward_first_runs_what_frees_memory_first() -> None:
    problem, devices = pipeline("backward-first", 4)
    begun = starts(problem, devices)
    # one forward, two backward ops, and the next micro-batch
    assert [begun[f"op4/{k}"] for k in range(4)] == pytest.approx([1, 4, 7, 10])
    assert [begun[f"op6/{k}"] for k in range(4)] == pytest.approx([2, 5, 8, 11])


@pytest.mark.parametrize("count", [2, 4])
def test_backward_first_needs_the_activations_of_one_micro_batch(count: int) -> None:
    peaks = {}
    for op_order in OP_ORDERS:
        graph = cut_graph(layered_step(4, layer_bytes=0, activation_bytes=100 * count), count)
        problem = step_problem(graph, plain_host(1), op_order)
        peaks[op_order] = Simulator(problem, threads=1).measure(np.zeros((1, graph.num_ops), np.int32))[0].peak_bytes[0]
    assert peaks["rank"] > count / 2 * peaks["backward-first"]


@pytest.mark.parametrize("op_order", OP_ORDERS)
def test_lists_keep_to_what_ops_read(op_order: str) -> None:
    problem = step_problem(cut_graph(layered_step(4), 4), plain_host(2), op_order)
    graph, place = problem.graph, np.empty(problem.graph.num_ops, dtype=np.int64)
    place[list_order(problem)] = np.arange(graph.num_ops)
    assert (place[graph.tensor_op[graph.input_tensors]] < place[graph.edge_op]).all()


def test_updates_by_op_and_by_tensor() -> None:
    """Op 2 updates tensor 0, which ops 3 and 4 read as well; op 4 updates tensors 0 and 1."""
    graph = op_graph([[], [], [0, 1], [0], [0, 1]], 100, mutations=[(4, 1), (2, 0), (4, 0), (4, 0)])
    updates = lay_out_updates(graph)
    assert updates["updated_offsets"].tolist() == [0, 0, 0, 1, 1, 3]
    assert updates["updated_tensors"].tolist() == [0, 0, 1]
    assert updates["updater_offsets"].tolist() == [0, 2, 3, 3, 3, 3]
    assert updates["updater_ops"].tolist() == [2, 4, 4]
    assert updates["concerned"].tolist() == [0, 0, 1, 1, 1]


def test_updates_that_wait_for_each_other_are_refused_and_later_readers_are_not() -> None:
    graph = op_graph([[], [0], [0, 1]], targets=["parameter", "aten.a", "aten.b"], mutations=[(1, 0)])
    with pytest.raises(InvalidValue, match="waits for a reader that waits for it"):
        lay_out_updates(graph)
    graph = op_graph([[], [0], [0]], targets=["parameter", "update.sgd", "aten.mm"], mutations=[(1, 0)])
    assert lay_out_updates(graph)["updater_ops"].tolist() == [1]
