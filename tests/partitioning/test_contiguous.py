"""Ideals, the contraction, and the dynamic program, against brute force and published optima."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_brute_force import best_contiguous_ms
from published_files import load, published_values, workload_paths
from random_published import random_document, random_workload, slow_max_load, slow_piece_latency

from rlplace.graphs.formats.published import load_dnn_partitioning, parse_dnn_partitioning
from rlplace.partitioning.contiguous import Lattice, chain_lattice, contract, dp, enumerate_ideals
from rlplace.partitioning.objectives import MaxLoad, PieceLatency


def lattice(sources: list[list[int]], most: int = 10_000) -> Lattice | None:
    readers = [[v for v, before in enumerate(sources) if u in before] for u in range(len(sources))]

    def csr(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        flat = [entry for row in rows for entry in row]
        return np.cumsum([0, *map(len, rows)]).astype(np.int32), np.array(flat, dtype=np.int32)

    return enumerate_ideals(*csr(sources), *csr(readers), most=most)


def count_down_closed(sources: list[list[int]]) -> int:
    units = range(len(sources))
    subsets = itertools.chain.from_iterable(itertools.combinations(units, k) for k in range(len(sources) + 1))
    return sum(all(set(sources[v]) <= set(subset) for v in subset) for subset in subsets)


def test_ideals_of_a_chain_an_antichain_and_a_diamond() -> None:
    chain, loose, diamond = lattice([[], [0], [1]]), lattice([[]] * 5), lattice([[], [0], [0], [1, 2]])
    assert chain is not None
    assert loose is not None
    assert diamond is not None
    assert (chain.num_ideals, loose.num_ideals, diamond.num_ideals) == (4, 32, 6)
    assert chain.step_ideal.tolist() == chain_lattice(np.arange(3)).step_ideal.tolist() == [1, 2, 3]
    assert chain.offsets.tolist() == chain_lattice(np.arange(3)).offsets.tolist()
    assert lattice([[]] * 5, most=31) is None


@given(st.lists(st.integers(0, 2**9 - 1), min_size=1, max_size=9))
@settings(max_examples=40, deadline=None)
def test_every_down_closed_set_is_found_once(masks: list[int]) -> None:
    sources = [[u for u in range(v) if mask >> u & 1] for v, mask in enumerate(masks)]
    found = lattice(sources)
    assert found is not None
    assert found.num_ideals == count_down_closed(sources)
    assert np.all(np.repeat(np.arange(found.num_ideals), np.diff(found.offsets)) < found.step_ideal)


def test_many_ideals_over_several_words() -> None:
    """Two chains of 70: an ideal is a prefix of each."""
    sources = [[v - 2] if v >= 2 else [] for v in range(140)]
    found = lattice(sources)
    assert found is not None
    assert found.num_ideals == 71 * 71
    assert lattice(sources, most=71 * 71 - 1) is None


def test_the_contraction_of_a_small_training_step() -> None:
    """0 -> 1 -> 2 forward, 5 -> 4 -> 3 backward; 1 and 4 share a class, 3 and 5 have none, 0 takes no time."""
    node = {"supportedOnFpga": 1, "cpuLatency": 9.0, "fpgaLatency": 1.0, "size": 1.0}
    nodes = [{**node, "id": i, "isBackwardNode": int(i >= 3)} for i in range(6)]
    nodes[0] |= {"cpuLatency": 0.0, "fpgaLatency": 0.0}
    nodes[1]["colorClass"] = nodes[4]["colorClass"] = 7
    edges = [(0, 1), (1, 2), (2, 5), (5, 4), (4, 3)]
    record = parse_dnn_partitioning(
        {
            "maxSizePerFPGA": 9,
            "maxFPGAs": 2,
            "maxCPUs": 1,
            "nodes": nodes,
            "edges": [{"sourceId": a, "destId": b, "cost": 1.0} for a, b in edges],
        }
    )
    found = contract(record)
    unit = dict(zip(record.graph.names, found.units.op_unit.tolist(), strict=True))
    assert unit["0"] == unit["1"] == unit["4"]
    pairs = {
        (int(found.sources[a]), v)
        for v in range(found.units.num_units)
        for a in range(found.source_offsets[v], found.source_offsets[v + 1])
    }
    assert pairs == {(unit["1"], unit["2"]), (unit["3"], unit["1"]), (unit["1"], unit["5"])}
    assert all(a < b for a, b in pairs)


@pytest.mark.parametrize("path", workload_paths("throughput"), ids=lambda path: path.stem)
def test_dp_reproduces_published_contiguous_optima(path: Path) -> None:
    record = load_dnn_partitioning(path)
    found = dp(record)
    assert found.is_exact
    assert found.devices is not None
    assert found.value_ms == pytest.approx(published_values(path)["contiguous_optimum"], rel=1e-6)
    assert MaxLoad(record).values_ms(found.devices)[0] == pytest.approx(found.value_ms, rel=1e-9)


@given(st.integers(0, 100_000), st.integers(1, 3), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_dp_is_the_best_contiguous_split(seed: int, devices: int, num_nodes: int) -> None:
    record = random_workload(seed, devices=devices, num_nodes=num_nodes)
    assert dp(record).value_ms == pytest.approx(best_contiguous_ms(record, slow_max_load))


@given(st.integers(0, 100_000), st.integers(1, 3), st.integers(1, 8), st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_dp_finds_has_the_value_that_it_says(seed: int, devices: int, num_nodes: int, training: bool) -> None:
    record = random_workload(seed, devices=devices, num_nodes=num_nodes, training=training)
    found = dp(record)
    linear = dp(record, most_ideals=1)
    assert not linear.is_exact
    assert linear.value_ms >= found.value_ms
    for split in (found, linear):
        if split.devices is not None:
            assert MaxLoad(record).values_ms(split.devices)[0] == pytest.approx(split.value_ms)
    if not record.is_training:
        in_turn = dp(record, in_turn=True)
        if in_turn.devices is not None:
            true_ms = PieceLatency(record).values_ms(in_turn.devices)[0]
            assert true_ms <= in_turn.value_ms * (1 + 1e-9)
            assert true_ms == pytest.approx(slow_piece_latency(record, in_turn.devices.tolist()))


def test_dp_gives_up_on_pairs_and_says_so() -> None:
    record = load("throughput", "op_bert_l-3_inference")
    found = dp(record, most_pairs=1000)
    assert not found.is_exact
    assert math.isfinite(found.value_ms)
    assert found.value_ms >= dp(record).value_ms


def test_nothing_fits() -> None:
    document = random_document(3) | {"maxSizePerFPGA": 0.0, "maxCPUs": 0}
    for node in document["nodes"]:
        node |= {"supportedOnFpga": 1, "size": 1.0}
    found = dp(parse_dnn_partitioning(document))
    assert (found.devices, found.value_ms, found.is_exact) == (None, math.inf, False)
