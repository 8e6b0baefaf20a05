"""The published objectives: published values, plain references, and the workload as a problem."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_files import COPIES, folders, load
from published_splits import load_split
from random_published import random_document, random_workload, slow_max_load, slow_piece_latency

from rlplace.errors import InvalidValue
from rlplace.graphs.formats.published import (
    DnnPartitioning,
    load_dnn_partitioning,
    parse_dnn_partitioning,
)
from rlplace.partitioning.objectives import MaxLoad, PieceLatency, published_problem

KEYS = {
    ("throughput", "dp"): "contiguous_optimum",
    ("throughput", "ip"): "noncontiguous_ip",
    ("throughput", "expert"): "expert",
    ("latency", "latency-greedy"): "greedy",
    ("latency", "expert"): "expert",
}


def published_splits() -> list[tuple[str, Path, Path, float]]:
    """(objective, workload, split, value in ms) of every split with a published value."""
    found = {}
    for folder in folders():
        values = json.loads((folder / "values.json").read_text(encoding="utf-8"))
        for split in sorted([*folder.glob("splits/*.json"), *folder.glob("experts/*.json")]):
            name, _, kind = split.name.removesuffix(".json").partition(".")
            for objective in ("throughput", "latency"):
                workload = folder / objective / f"{name}.json"
                key = KEYS.get((objective, kind or "expert"))
                if workload.exists() and key in values[objective].get(name, {}):
                    value = values[objective][name][key]
                    value = value["obj"] if isinstance(value, dict) else value
                    found[objective, split.name] = (objective, workload, split, float(value))
    return list(found.values())


@pytest.mark.parametrize(
    ("objective", "workload", "split", "value_ms"),
    published_splits(),
    ids=lambda value: value.name if isinstance(value, Path) else str(value),
)
def test_published_splits_have_their_published_values(
    objective: str, workload: Path, split: Path, value_ms: float
) -> None:
    record = load_dnn_partitioning(workload)
    if split.parent.name == "experts":  # one expert used six accelerators where the workload has five
        record = dataclasses.replace(record, num_accelerators=max(record.num_accelerators, 6))
    timer = (MaxLoad if objective == "throughput" else PieceLatency)(record, memory_limit=False)
    found_ms = float(timer.values_ms(load_split(split, record))[0])
    rounding_ms = 0.0 if len(str(value_ms)) > 9 else 0.5e-5 * 10 ** math.floor(math.log10(value_ms))
    assert found_ms == pytest.approx(value_ms, rel=1e-6, abs=rounding_ms)


def test_an_expert_that_does_not_fit_has_no_value() -> None:
    record = load("latency", "op_bert_l-3_inference")
    devices = load_split(COPIES / "splits" / "op_bert_l-3_inference.ip.json", record)
    assert PieceLatency(record).values_ms(devices).tolist() == [math.inf]
    assert math.isfinite(PieceLatency(record, memory_limit=False).values_ms(devices)[0])


def random_placements(
    record: DnnPartitioning, seed: int, count: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    draw = np.random.default_rng(seed)
    unit = draw.integers(0, record.num_devices, size=(count, int(record.units.max()) + 1))
    placed = unit[:, record.units]
    barred = np.zeros_like(unit, dtype=bool)
    np.logical_or.at(barred.T, record.units, ~record.supported[:, None])
    return np.where(barred[:, record.units], record.num_accelerators, placed).astype(np.int32)


@given(st.integers(0, 100_000), st.booleans(), st.integers(1, 3), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_the_kernels_agree_with_the_definitions(seed: int, training: bool, devices: int, num_nodes: int) -> None:
    record = random_workload(seed, training=training, devices=devices, num_nodes=num_nodes)
    placements = random_placements(record, seed, 20)
    expected = [slow_max_load(record, row) for row in placements.tolist()]
    assert MaxLoad(record).values_ms(placements) == pytest.approx(expected)
    if not record.is_training:
        expected = [slow_piece_latency(record, row) for row in placements.tolist()]
        assert PieceLatency(record).values_ms(placements) == pytest.approx(expected)


def chain(**top: object) -> DnnPartitioning:
    """Ops 0 -> 1 -> 2 -> 3 of 1 ms on an accelerator and 10 on a CPU, 2 ms a transfer, 1 byte each."""
    nodes = [
        {"id": i, "supportedOnFpga": 1, "cpuLatency": 10, "fpgaLatency": 1, "isBackwardNode": 0, "size": 1}
        for i in range(4)
    ]
    edges = [{"sourceId": i, "destId": i + 1, "cost": 2.0} for i in range(3)]
    document = {"maxSizePerFPGA": 4, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges}
    return parse_dnn_partitioning({**document, **top})


def test_a_chain_worked_out_by_hand() -> None:
    placements = np.array([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [2, 2, 2, 2], [0, 2, 0, 0]], dtype=np.int32)
    timer = MaxLoad(chain())
    # two ops and a transfer; of 0, 1, 0, 1 each sends or receives three times; 0, 2, 0, 0 sends one, receives one
    assert timer.values_ms(placements).tolist() == [4, 4, 8, 40, 10]
    assert timer.loads_ms(placements[4]).tolist() == [7, 0, 10]
    # pieces: {0..3}; {0, 1}, {2, 3} and a transfer at both ends; four pieces; CPU ops; {0}, 1, {2, 3}
    assert PieceLatency(chain()).values_ms(placements).tolist() == [4, 8, 16, 40, 17]
    assert PieceLatency(chain(maxSizePerFPGA=3)).values_ms(placements).tolist() == [math.inf, 8, 16, 40, 17]


def test_pieces_that_wait_for_each_other_are_infeasible() -> None:
    """0 -> 1 and 2 -> 3 crosswise: {0, 3} sends to {1, 2} and reads from it."""
    edges = [{"sourceId": 0, "destId": 1, "cost": 1.0}, {"sourceId": 2, "destId": 3, "cost": 1.0}]
    record = chain(edges=edges)
    placements = np.array([[0, 1, 1, 0], [0, 1, 0, 1]], dtype=np.int32)
    assert PieceLatency(record).values_ms(placements).tolist() == [math.inf, 2 + 2 + 2 + 2]
    assert MaxLoad(record).values_ms(placements).tolist() == [4, 4]


def test_latency_is_refused_for_a_training_step() -> None:
    with pytest.raises(InvalidValue, match="inference only"):
        PieceLatency(load("throughput", "layer_bert24_training"))


def test_placements_that_break_a_rule_are_refused() -> None:
    record = load("throughput", "layer_bert24_training")
    torn = np.zeros(record.num_ops, dtype=np.int32)
    torn[-1] = 1
    with pytest.raises(InvalidValue, match="one device for ops that live together"):
        MaxLoad(record).values_ms(torn)
    nodes = [*random_document(1)["nodes"]]
    barred = parse_dnn_partitioning(random_document(1) | {"nodes": [node | {"supportedOnFpga": 0} for node in nodes]})
    with pytest.raises(InvalidValue, match="may run"):
        MaxLoad(barred).values_ms(np.zeros(barred.num_ops, dtype=np.int32))


def test_the_problem_names_devices_and_keeps_costs() -> None:
    record = chain()
    problem = published_problem(record)
    assert [device.name for device in problem.host.devices] == ["accelerator:0", "accelerator:1", "cpu"]
    assert problem.costs.op_time_s[0].tolist() == pytest.approx([1e-3, 1e-3, 10e-3])
    transfer_s = problem.transfer_s_per_byte * problem.graph.tensor_bytes[0]
    assert transfer_s[0, 2] == pytest.approx(2e-3, rel=1e-6)
    assert problem.grouping.num_groups == 4
    assert problem.allowed is not None
    assert problem.allowed.all()
