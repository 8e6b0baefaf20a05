"""Published files: profiles of PipeDream and DAPPLE, workloads and splits, round trips, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_profiles import profile_text
from published_files import COPIES, load, workload_paths
from published_splits import load_split
from random_published import random_document

from rlplace.errors import FileProblem, InvalidValue, UserError
from rlplace.graphs.formats import load_graph, load_times_s
from rlplace.graphs.formats.published import (
    DnnPartitioning,
    load_dnn_partitioning,
    load_pipedream,
    parse_dnn_partitioning,
    pipedream_times_s,
    read_layers,
)
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.partitioning.compare import save_split
from rlplace.search.parallel.layouts import roles

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


LOOSE = """\
node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=0.0, parameter_size=0.000

node3 -- LSTM(2048, 1024) -- forward_compute_time=4.649, backward_compute_time=8.641, activation_size=[9175040.0; 262144.0; 262144.5], parameter_size=50364416.000 -- stage_id=1
node2 -- Embedding(36560, 1024, padding_idx=0) -- forward_compute_time=8.07,backward_compute_time=13.4, activation_size=19000000.000, parameter_size=0 \n
  node1 -- node2
\tnode2 -- node3
\tnode2 -- node3
"""  # noqa: E501
HEAD = "node1 -- a -- "
FIELDS = "forward_compute_time=1, backward_compute_time=2, activation_size=3, parameter_size=4"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile.txt"


def reads(graph: OpGraph) -> dict[str, set[str]]:
    """The ops that each op reads, by name."""
    found: dict[str, set[str]] = {name: set() for name in graph.names}
    for reader, tensor in zip(graph.edge_op.tolist(), graph.input_tensors.tolist(), strict=True):
        found[graph.names[reader]].add(graph.names[graph.tensor_op[tensor]])
    return found


def outputs(graph: OpGraph, name: str) -> list[int]:
    op = graph.names.index(name)
    return graph.tensor_bytes[graph.tensor_op == op].tolist()


def test_loose_numbers_lists_and_edges(path: Path) -> None:
    path.write_text(LOOSE)
    first, second, third = read_layers(path)
    assert [layer.module for layer in (first, second, third)] == ["node1.Input0", "node2.Embedding", "node3.LSTM"]
    assert (second.forward_s, second.backward_s) == (0.00807, 0.0134)
    assert (second.activation_bytes, third.activation_bytes) == (19_000_000, 9_175_040 + 262_144 + 262_145)
    assert (third.parameter_bytes, third.reads) == (50_364_416, (1,))


def test_one_micro_batch_is_a_plain_training_step(path: Path) -> None:
    path.write_text(profile_text([(1, 0, 8, 0), (2, 4, 16, 100), (3, 6, 24, 0)]))
    graph, times_s = load_pipedream(path), pipedream_times_s(path)
    assert graph.micro_batch.tolist() == [-1] * graph.num_ops
    assert reads(graph) == {
        "node2.l1": set(),
        "node1.l0.forward": set(),
        "node2.l1.forward": {"node1.l0.forward", "node2.l1"},
        "node3.l2.forward": {"node2.l1.forward"},
        "node3.l2.backward": {"node3.l2.forward"},
        "node2.l1.backward": {"node2.l1.forward", "node3.l2.backward", "node2.l1"},
        "node2.l1.update": {"node2.l1", "node2.l1.backward"},
    }
    assert dict(zip(graph.names, times_s.tolist(), strict=True)) == {
        "node2.l1": 0.0, "node1.l0.forward": 0.001, "node2.l1.forward": 0.002, "node3.l2.forward": 0.003,
        "node3.l2.backward": 0.006, "node2.l1.backward": 0.004, "node2.l1.update": 0.0,
    }  # fmt: skip
    assert outputs(graph, "node3.l2.backward") == [16]  # the gradient of what it reads
    assert outputs(graph, "node2.l1.backward") == [100]  # of its parameter: the input needs none
    assert graph.gradient_bytes.tolist() == graph.parameter_bytes.tolist() == [100, 0, 0, 0, 0, 0, 0]
    assert [graph.names[op] for op in graph.mutation_op] == ["node2.l1.update"]


def test_micro_batches_share_parameters_and_sum_gradients(path: Path) -> None:
    path.write_text(profile_text([(1, 2, 8, 100), (3, 4, 16, 50)]))
    graph, times_s = load_pipedream(path, 4), pipedream_times_s(path, 4)
    names, column = graph.names, dict(zip(graph.names, graph.micro_batch.tolist(), strict=True))
    assert graph.num_micro_batches == 4
    assert times_s.sum() == pytest.approx(4 * (1 + 2 + 3 + 4) / 1e3)
    phases = np.bincount(graph.phases[~graph.is_source])
    assert phases.tolist() == [8, 8 + 2 * 3, 2]
    read = reads(graph)
    assert read["node2.l1.forward.3"] == {"node1.l0.forward.3", "node2.l1"}
    assert read["node1.l0.sum0"] == {"node1.l0.backward.0", "node1.l0.backward.1"}
    assert read["node1.l0.gradient"] == {"node1.l0.sum0", "node1.l0.sum1"}
    assert read["node1.l0.update"] == {"node1.l0", "node1.l0.gradient"}
    assert (column["node1.l0.backward.2"], column["node1.l0.sum1"] in (2, 3)) == (2, True)
    assert [column[name] for name in ("node1.l0", "node1.l0.gradient", "node1.l0.update")] == [-1, -1, -1]
    together = [name for name in names if graph.colocation[names.index(name)] == graph.colocation[0]]
    assert together == ["node1.l0", "node1.l0.gradient", "node1.l0.update"]
    assert not np.any((graph.colocation >= 0) & (graph.micro_batch >= 0))
    sums = [op for op, target in enumerate(graph.targets) if target == "aten.add.Tensor"]
    assert {int(graph.phases[op]) for op in sums} == {BACKWARD}
    role = roles(graph)
    for word, phase in (("forward", FORWARD), ("backward", BACKWARD)):
        copies = [names.index(f"node2.l1.{word}.{k}") for k in range(4)]
        assert len({int(role[op]) for op in copies}) == len({graph.signatures[op] for op in copies}) == 1
        assert {int(graph.phases[op]) for op in copies} == {phase}
    assert graph.phases[names.index("node1.l0.update")] == UPDATE


def test_gradients_go_where_one_is_needed(path: Path) -> None:
    """A mask without parameters before it, read by two layers: nothing is sent back to it."""
    rows = [(1, 0, 7, 0), (1, 1, 8, 10), (1, 1, 9, 0), (1, 1, 11, 0)]
    path.write_text(profile_text(rows, [(0, 2), (1, 2), (0, 3), (2, 3), (1, 3)]))
    graph = load_pipedream(path, 2)
    assert not [name for name in graph.names if name.startswith("node1.l0.backward")]
    assert outputs(graph, "node4.l3.backward.1") == [8, 9]
    assert reads(graph)["node2.l1.backward.1"] == {
        "node2.l1", "node2.l1.forward.1", "node3.l2.backward.1", "node4.l3.backward.1"
    }  # fmt: skip


def test_the_format_is_known_by_its_content(path: Path) -> None:
    path.write_text(profile_text([(1, 2, 3, 4), (1, 2, 3, 4)]))
    assert load_graph(path, micro_batches=3).num_micro_batches == 3
    times_s = load_times_s(path, micro_batches=3)
    assert times_s is not None
    assert len(times_s) == load_graph(path, micro_batches=3).num_ops


def test_only_a_profile_can_be_cut(tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text("{}")
    for loads in (load_graph, load_times_s):
        with pytest.raises(InvalidValue, match="only a layer profile can be cut"):
            loads(tmp_path / "g.json", micro_batches=2)
    with pytest.raises(InvalidValue, match=r"micro_batches is 0, expected 1\.\.4096"):
        load_pipedream(tmp_path / "g.json", 0)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("hello", r"profile.txt: line 1 is 'hello', expected `ID -- NAME -- forward_compute_time="),
        ("", "no node"),
        (f"{HEAD}{FIELDS}\n\n{HEAD}{FIELDS}", "line 3: node is 'node1', expected an id that no other"),
        (f"{HEAD}{FIELDS}\n\tnode1 -- node2", "line 2: edge is 'node2', expected the id of a node"),
        (f"{HEAD}{FIELDS}\n\tnode1 -- node1", "edges is 'a cycle that node1 is on"),
        (f"{HEAD}{FIELDS} -- of -- what", "line 1 is"),
        (f"{HEAD}{FIELDS.replace('=3', '=three')}", "line 1: activation_size is 'three', expected a number"),
        (f"{HEAD}{FIELDS.replace('=3', '=[1; ]')}", "line 1: activation_size is '', expected a number"),
        (f"{HEAD}{FIELDS.replace('=3', '=[1; 2')}", "line 1: fields is"),
        (f"{HEAD}{FIELDS.replace('=1', '=-1')}", r"line 1: forward_compute_time is '-1', expected a number in 0"),
        (f"{HEAD}{FIELDS.replace('=1', '=nan')}", "line 1: forward_compute_time is 'nan'"),
        (f"{HEAD}{FIELDS.replace('=4', '=1e99')}", "line 1: parameter_size is '1e99'"),
        (f"{HEAD}{FIELDS.rpartition(',')[0]}", "line 1: parameter_size is 'missing'"),
        (f"{HEAD}{FIELDS}, parameter_size=4", "line 1: fields is 'parameter_size=4', expected .* each once"),
        (f"{HEAD}{FIELDS}, speed=4", "line 1: fields is 'speed=4'"),
    ],
)
def test_mistakes_are_named_by_their_line(text: str, match: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises((FileProblem, InvalidValue), match=match):
        load_pipedream(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="no such file"):
        load_pipedream(tmp_path / "none.txt")
    (tmp_path / "bytes.txt").write_bytes(b"node1 -- \xff\xfe -- x")
    with pytest.raises(FileProblem, match="not UTF-8"):
        load_pipedream(tmp_path / "bytes.txt")
