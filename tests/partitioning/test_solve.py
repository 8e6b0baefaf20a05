"""`solve`: every method's row holds what the measurer says; seeds, budgets and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from published_files import load
from random_published import random_document, random_workload

from rlplace.errors import InvalidValue, UnknownName
from rlplace.graphs.formats.published import DnnPartitioning, parse_dnn_partitioning
from rlplace.partitioning import METHODS, PublishedResult, solve
from rlplace.partitioning.objectives import MaxLoad, PieceLatency


def check(record: DnnPartitioning, objective: str, result: PublishedResult) -> None:
    timer = (MaxLoad if objective == "max-load" else PieceLatency)(record)
    for row in result.rows:
        if row.placement is None:
            assert row.status == "infeasible"
            assert row.why
            assert row.value_ms == math.inf
        else:
            assert timer.values_ms(row.placement)[0] == row.value_ms
            assert row.value_ms >= result.lower_bound_ms * (1 - 1e-9)
            assert row.evaluations >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target_ms"), [("layer_bert24_training", 39.989), ("op_bert_l-3_inference", 22.018)])
def test_max_load_comes_within_half_a_percent_of_the_best_published(name: str, target_ms: float) -> None:
    record = load("throughput", name)
    methods = ["greedy", "dp", "portfolio"]
    result = solve(record, "max-load", evaluations=300_000, methods=methods)
    check(record, "max-load", result)
    assert [row.method for row in result.rows] == methods
    assert result.best.value_ms <= target_ms


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target_ms"), [("layer_bert24_inference", 100.72), ("op_bert_l-3_inference", 409.28)])
def test_piece_latency_comes_within_half_a_percent_of_the_best_published(name: str, target_ms: float) -> None:
    record = load("latency", name)
    result = solve(record, "piece-latency", evaluations=80_000)
    check(record, "piece-latency", result)
    assert [row.method for row in result.rows] == list(METHODS)
    assert result.best.value_ms <= target_ms


def test_the_same_seed_and_evaluations_give_the_same_placements() -> None:
    record = load("throughput", "layer_bert24_inference")

    first, again = (solve(record, "max-load", evaluations=3000, seed=4) for _ in range(2))
    for a, b in zip(first.rows, again.rows, strict=True):
        assert (a.value_ms, a.evaluations, a.status) == (b.value_ms, b.evaluations, b.status)
        assert np.array_equal(a.placement, b.placement)
    assert first.lower_bound_ms == again.lower_bound_ms


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("objective", ["max-load", "piece-latency"])
def test_random_workloads_with_tight_memory(seed: int, objective: str) -> None:
    record = random_workload(seed, num_nodes=9, devices=1 + seed % 3)
    check(record, objective, solve(record, objective, evaluations=500, seed=seed))


@pytest.mark.slow
def test_a_time_budget_ends() -> None:
    record = load("throughput", "layer_bert24_inference")
    result = solve(record, "max-load", seconds=1.0, methods=("dp", "portfolio"))
    check(record, "max-load", result)
    assert [row.method for row in result.rows] == ["dp", "portfolio"]


def test_where_nothing_fits_no_row_has_a_placement() -> None:
    document = random_document(3) | {"maxSizePerFPGA": 0.0, "maxCPUs": 0}
    for node in document["nodes"]:
        node |= {"supportedOnFpga": 1, "size": 1.0}
    result = solve(parse_dnn_partitioning(document), "max-load", evaluations=100)
    assert [row.status for row in result.rows] == ["infeasible"] * len(METHODS)
    assert all(row.placement is None and row.why for row in result.rows)


def test_wrong_arguments_are_refused() -> None:
    record = load("throughput", "layer_bert24_training")
    with pytest.raises(UnknownName, match="did you mean 'anneal'"):
        solve(record, "max-load", methods=("aneal",))
    with pytest.raises(UnknownName, match="objective"):
        solve(record, "maxload")
    with pytest.raises(InvalidValue, match="inference only"):
        solve(record, "piece-latency")
    with pytest.raises(InvalidValue, match="evaluations"):
        solve(record, "max-load", evaluations=0)
    with pytest.raises(InvalidValue, match="seconds"):
        solve(record, "max-load", seconds=0.0)
    with pytest.raises(InvalidValue, match="seed"):
        solve(record, "max-load", seed=-1)
