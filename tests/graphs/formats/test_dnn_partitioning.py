"""The published benchmark's files: fields, splits, round trips, and what malformed files get."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_files import COPIES, load, workload_paths
from published_splits import load_split
from random_published import random_document

from rlplace.errors import FileProblem, InvalidValue, UserError
from rlplace.graphs.formats.published import (
    DnnPartitioning,
    load_dnn_partitioning,
    parse_dnn_partitioning,
)
from rlplace.graphs.opgraph import BACKWARD, FORWARD
from rlplace.partitioning.compare import save_split

#  ids 9 -> 5 -> 7 (backward, class of 5), 9 -> 7; 2 alone
TINY: dict[str, Any] = {
    "maxSizePerFPGA": 10.0,
    "maxFPGAs": 2,
    "maxCPUs": 3,
    "nodes": [
        {"id": 7, "supportedOnFpga": 1, "cpuLatency": 1, "fpgaLatency": 0.5, "isBackwardNode": 1, "colorClass": 40,
         "size": 1.0},
        {"id": 5, "supportedOnFpga": True, "cpuLatency": 2, "fpgaLatency": 0.25, "isBackwardNode": 0,
         "colorClass": 40, "size": 2.0, "layerId": 3},
        {"id": 9, "supportedOnFpga": 0, "cpuLatency": 3, "fpgaLatency": 0.125, "isBackwardNode": False, "size": 3.0},
        {"id": 2, "supportedOnFpga": 1, "cpuLatency": 4, "fpgaLatency": 4, "isBackwardNode": False, "size": 4.0},
    ],
    "edges": [
        {"sourceId": 5, "destId": 7, "cost": 0.5},
        {"sourceId": 9, "destId": 7, "cost": 2.0, "size": 17.0},
        {"sourceId": 9, "destId": 5, "cost": 2.0, "size": 16.0},
    ],
}  # fmt: skip


def same(a: DnnPartitioning, b: DnnPartitioning) -> bool:
    arrays = ("ids", "accelerator_ms", "cpu_ms", "transfer_ms", "size_bytes", "supported", "edge_bytes", "units")
    plain = ("labels", "class_ids", "num_accelerators", "num_cpus", "capacity_bytes")
    graphs = ("names", "modules", "phases", "colocation", "tensor_bytes", "input_offsets", "input_tensors")
    return (
        all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)
        and all(getattr(a, name) == getattr(b, name) for name in plain)
        and all(np.array_equal(getattr(a.graph, name), getattr(b.graph, name)) for name in graphs)
    )


def test_the_fields_of_a_tiny_workload() -> None:
    record = parse_dnn_partitioning(TINY)
    assert record.ids.tolist() == [9, 5, 7, 2]
    assert record.graph.names == ("9", "5", "7", "2")
    assert record.graph.phases.tolist() == [FORWARD, FORWARD, BACKWARD, FORWARD]
    assert record.graph.colocation.tolist() == [-1, 0, 0, -1]
    assert record.class_ids == (40,)
    assert record.units.tolist() == [0, 1, 1, 2]
    assert record.graph.modules == ("", "layer.3", "", "")
    assert record.transfer_ms.tolist() == [2.0, 0.5, 0.0, 0.0]
    assert record.cpu_ms.tolist() == [3, 2, 1, 4]
    assert record.accelerator_ms.tolist() == [0.125, 0.25, 0.5, 4]
    assert record.size_bytes.tolist() == [3, 2, 1, 4]
    assert record.graph.input_offsets.tolist() == [0, 0, 1, 3, 3]
    assert record.graph.input_tensors.tolist() == [0, 0, 1]
    assert record.edge_bytes.tolist() == [16, 17, 0]
    assert record.allowed.tolist() == [[False, False, True], [True] * 3, [True] * 3, [True] * 3]
    assert (record.num_devices, record.num_accelerators, record.num_cpus, record.capacity_bytes) == (3, 2, 3, 10)
    assert record.is_training


@pytest.mark.parametrize("path", workload_paths(), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_workload_round_trips(path: Path, tmp_path: Path) -> None:
    record = load_dnn_partitioning(path)
    record.save(tmp_path / "again.json")
    assert same(record, load_dnn_partitioning(tmp_path / "again.json"))
    document = json.loads(path.read_text(encoding="utf-8"))
    assert record.num_ops == len(document["nodes"])
    assert record.graph.num_edges == len(document["edges"])
    assert record.accelerator_ms.sum() == pytest.approx(sum(node["fpgaLatency"] for node in document["nodes"]))


@given(st.integers(0, 10_000), st.booleans())
@settings(max_examples=40, deadline=None)
def test_random_workloads_round_trip(tmp_path_factory: pytest.TempPathFactory, seed: int, training: bool) -> None:
    path = tmp_path_factory.mktemp("again") / "workload.json"
    record = parse_dnn_partitioning(random_document(seed, training=training))
    record.save(path)
    assert same(record, load_dnn_partitioning(path))


def test_splits_round_trip(tmp_path: Path) -> None:
    record = load("throughput", "op_bert_l-3_inference")
    devices = load_split(COPIES / "splits" / "op_bert_l-3_inference.ip.json", record)
    assert np.bincount(devices).tolist() == [81, 6, 148]
    save_split(tmp_path / "split.json", record, devices)
    assert np.array_equal(load_split(tmp_path / "split.json", record), devices)


def split(tmp_path: Path, **lists: list[list[int]]) -> Path:
    path = tmp_path / "split.json"
    path.write_text(json.dumps({kind: [{"nodes": nodes} for nodes in rows] for kind, rows in lists.items()}))
    return path


def test_a_backward_node_that_a_split_leaves_out_goes_with_its_class(tmp_path: Path) -> None:
    record = parse_dnn_partitioning(TINY)
    path = split(tmp_path, fpgas=[[], [5]], cpus=[[9, 2]])
    assert load_split(path, record).tolist() == [2, 1, 1, 2]


@pytest.mark.parametrize(
    ("lists", "field"),
    [
        ({"fpgas": [[5, 5]], "cpus": [[9, 2]]}, r"fpgas\[0\].nodes\[1\]"),
        ({"fpgas": [[5, 6]], "cpus": [[9, 2]]}, r"fpgas\[0\].nodes\[1\]"),
        ({"fpgas": [[5]], "cpus": [[9]]}, "nodes"),
        ({"fpgas": [[7]], "cpus": [[9, 2]]}, "nodes"),
        ({"fpgas": [[5], [9], [2]], "cpus": []}, "fpgas"),
        ({"fpgas": [[5, 9, 2]]}, "cpus"),
        ({"fpgas": [[5, "9", 2]], "cpus": []}, "nodes"),
    ],
)
def test_a_wrong_split_names_the_field(tmp_path: Path, lists: dict[str, list[list[int]]], field: str) -> None:
    with pytest.raises(InvalidValue, match=field):
        load_split(split(tmp_path, **lists), parse_dnn_partitioning(TINY))


def test_devices_without_nodes_do_not_count(tmp_path: Path) -> None:
    record = parse_dnn_partitioning(TINY)
    assert load_split(split(tmp_path, fpgas=[[], [5], [2]], cpus=[[9]]), record).tolist() == [2, 0, 0, 1]


def changed(**top: Any) -> dict[str, Any]:
    return {**copy.deepcopy(TINY), **top}


def with_node(index: int, **fields: Any) -> dict[str, Any]:
    document = changed()
    document["nodes"][index].update(fields)
    return document


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ([], "file"),
        (changed(maxFPGAs=-1), "maxFPGAs"),
        (changed(maxFPGAs=10**30), "maxFPGAs"),
        (changed(maxFPGAs=0, maxCPUs=0), "maxFPGAs"),
        (changed(maxSizePerFPGA="big"), "maxSizePerFPGA"),
        (changed(nodes=[]), "nodes"),
        (changed(nodes={}), "nodes"),
        (changed(edges=[{"sourceId": 9, "destId": 6, "cost": 1}]), r"edges\[0\].destId"),
        (changed(edges=[{"sourceId": 9, "destId": 5}]), r"edges\[0\].cost"),
        (changed(edges=[*TINY["edges"], {"sourceId": 9, "destId": 2, "cost": 3.0}]), r"edges\[3\].cost"),
        (changed(edges=[*TINY["edges"], {"sourceId": 7, "destId": 9, "cost": 3.0}]), "edges.*cycle"),
        (changed(edges=[{"sourceId": 9, "destId": 9, "cost": 1.0}]), "edges.*cycle"),
        (changed(maxCPUs=0), r"nodes\[2\].supportedOnFpga"),
        (with_node(1, id=7), r"nodes\[1\].id"),
        (with_node(1, id=True), r"nodes\[1\].id"),
        (with_node(2, cpuLatency=-1.0), r"nodes\[2\].cpuLatency"),
        (with_node(2, fpgaLatency=None), r"nodes\[2\].fpgaLatency"),
        (with_node(3, size=1e300), r"nodes\[3\].size"),
        (with_node(3, colorClass="red"), r"nodes\[3\].colorClass"),
        (with_node(3, isBackwardNode=2), r"nodes\[3\].isBackwardNode"),
        (with_node(3, name=3), r"nodes\[3\].name"),
    ],
)
def test_a_malformed_workload_names_the_field(document: Any, field: str) -> None:
    with pytest.raises(InvalidValue, match=field):
        parse_dnn_partitioning(document)


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{"nodes": [')
    with pytest.raises(FileProblem, match="not valid JSON"):
        load_dnn_partitioning(path)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 12), st.integers(), st.just(10**400), st.floats(), st.text(max_size=5),
    st.just([]), st.just({}), st.lists(st.integers(0, 9), max_size=3),
)  # fmt: skip


@st.composite
def mutations(draw: st.DrawFn) -> Any:
    """A valid document with one to three places replaced, removed or repeated."""
    document: Any = json.loads(json.dumps(random_document(draw(st.integers(0, 50)), training=draw(st.booleans()))))
    for _ in range(draw(st.integers(1, 3))):
        place: Any = document
        key: Any = draw(st.sampled_from(sorted(document)))
        while isinstance(place[key], dict | list) and len(place[key]) and draw(st.integers(0, 4)):
            place = place[key]
            keys = sorted(place) if isinstance(place, dict) else range(len(place))
            key = draw(st.sampled_from(keys))
        kind = draw(st.integers(0, 2))
        if kind == 0:
            place[key] = draw(JUNK)
        elif kind == 1 and isinstance(place, list):
            place.append(copy.deepcopy(place[key]))
        elif len(place) > 1 and place is not document:
            del place[key]
        else:
            document = {k: v for k, v in document.items() if k != key} or {"edges": []}
    return document


@given(mutations())
@settings(max_examples=300, deadline=None)
def test_mutated_documents_load_or_say_why(document: Any) -> None:
    try:
        record = parse_dnn_partitioning(document)
    except UserError:
        return
    assert record.num_ops == len(document["nodes"])
