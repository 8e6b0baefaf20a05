"""Annealing and bounds, against brute force over all placements of small workloads."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from published_brute_force import best_placement_ms
from published_files import load
from random_published import random_workload, slow_max_load, slow_piece_latency

from rlplace.errors import UnknownName
from rlplace.graphs.formats.published import DnnPartitioning
from rlplace.partitioning.kernel_anneal import Search, exchange, fill, value_ms
from rlplace.partitioning.objectives import unit_graph
from rlplace.partitioning.solvers import (
    blocks,
    forced_work_ms,
    greedy,
    largest_unit_ms,
    longest_path_ms,
    lower_bound_ms,
    shared_work_ms,
    single,
)

CASES = {"max-load": slow_max_load, "piece-latency": slow_piece_latency}


@pytest.mark.parametrize("objective", CASES)
@given(st.integers(0, 100_000), st.integers(1, 3), st.integers(2, 10))
@settings(max_examples=50, deadline=None)
def test_values_follow_moves(objective: str, seed: int, devices: int, num_nodes: int) -> None:
    record = random_workload(seed, devices=devices, num_nodes=num_nodes, training=False)
    search, by_pieces = Search(record, objective), objective == "piece-latency"
    graph, units, draw = search.graph, search.units, np.random.default_rng(seed)
    placed = search.placed(np.full(units.num_units, devices, dtype=np.int32))
    fill(graph, placed)
    for _ in range(30):
        cluster, goes = (draw.integers(most, size=1).astype(np.int32) for most in (units.num_units, devices + 1))
        if goes[0] != placed.devices[cluster[0]] and (goes[0] == devices or units.supported[cluster[0]]):
            exchange(graph, placed, by_pieces, cluster, goes, 1)
    value = value_ms(graph, placed, by_pieces)
    assert value == pytest.approx(search.values_ms(placed.devices)[0], abs=1e-9)
    held = np.bincount(placed.devices, weights=units.size_bytes, minlength=devices + 1)
    assert placed.held_bytes == pytest.approx(held)


def feasible_start(record: DnnPartitioning, objective: str) -> tuple[Search, np.ndarray]:
    search = Search(record, objective)
    rows = np.concatenate((single(search), blocks(search), greedy(search)))
    values = search.values_ms(rows)
    return search, rows[int(np.argmin(values))]


@pytest.mark.slow
@pytest.mark.parametrize("objective", CASES)
@given(st.integers(0, 100_000), st.integers(1, 2), st.integers(2, 6))
@settings(max_examples=40, deadline=None)
def test_annealing_finds_the_optimum_of_small_workloads(
    objective: str, seed: int, devices: int, num_nodes: int
) -> None:
    record = random_workload(seed, devices=devices, num_nodes=num_nodes)
    best = best_placement_ms(record, CASES[objective])
    assume(math.isfinite(best))
    search, start = feasible_start(record, objective)
    found = min((search.anneal(start, k, 4000, 0.3, 1e-4) for k in range(3)), key=lambda answer: answer[1])
    assert search.values_ms(found[0])[0] == pytest.approx(found[1])
    assert found[1] == pytest.approx(best)


@pytest.mark.parametrize("objective", CASES)
def test_the_same_seed_anneals_alike_and_another_does_not(objective: str) -> None:
    folder = "throughput" if objective == "max-load" else "latency"
    search, start = feasible_start(load(folder, "op_bert_l-3_inference"), objective)
    first, again = (search.anneal(start, 5, 3000, 0.02, 1e-4) for _ in range(2))
    assert np.array_equal(first[0], again[0])
    assert first[1] == again[1]
    assert not np.array_equal(first[0], search.anneal(start, 6, 3000, 0.02, 1e-4)[0])


@given(st.integers(0, 100_000), st.integers(1, 3), st.integers(1, 6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_placement_beats_a_bound(seed: int, devices: int, num_nodes: int, training: bool) -> None:
    record = random_workload(seed, devices=devices, num_nodes=num_nodes, training=training)
    units = unit_graph(record, record.units)
    best = best_placement_ms(record, slow_max_load) + 1e-9
    assert shared_work_ms(units) <= best
    assert largest_unit_ms(units) <= best
    if not record.is_training:
        best = best_placement_ms(record, slow_piece_latency) + 1e-9
        assert longest_path_ms(record) <= best
        assert forced_work_ms(record) <= best


def test_bounds_of_a_workload_by_hand() -> None:
    record = load("throughput", "layer_bert24_inference")
    total = record.accelerator_ms.sum()
    # ten times slower CPUs: six accelerators and a tenth of one share the work
    assert shared_work_ms(unit_graph(record, record.units)) == pytest.approx(total / 6.1)
    assert lower_bound_ms(record, "max-load") == (pytest.approx(total / 6.1), "shared work")
    latency = load("latency", "layer_bert24_inference")
    assert longest_path_ms(latency) <= latency.accelerator_ms.sum()


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(UnknownName, match="max-load"):
        Search(load("latency", "layer_bert24_inference"), "latency")
