"""Orders of ops: upward ranks where nothing is cut; micro-batches after each other, and backward first."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from micro_batched import cut_graph, layered_step, step_problem
from random_problems import plain_host, random_problem

from rlplace.measure.problem import OP_ORDERS, Problem
from rlplace.measure.simulate.compiled_problem import default_priorities, list_order, turns, upward_ranks
from rlplace.measure.simulate.simulator import Simulator

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
