"""Files of other tools, and broken ones, where a graph or a host belongs: loaded, or refused in one line."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from asking import asked
from core_hosts import core_host
from graph_files import rich_graph

from rlplace.errors import FileProblem, UserError
from rlplace.graphs.formats import load_graph, save_graph
from rlplace.measure.hosts.host_file import host_to_dict, load_host
from rlplace.say import clean

MXNET = {
    "nodes": [
        {"op": "null", "name": "data", "inputs": []},
        {"op": "FullyConnected", "name": "fc", "attrs": {"num_hidden": "8"}, "inputs": [[0, 0, 0]]},
    ],
    "arg_nodes": [0],
    "node_row_ptr": [0, 1, 2],
    "heads": [[1, 0, 0]],
    "attrs": {"mxnet_version": ["int", 10900]},
}
TVM = {
    "nodes": [
        {"op": "null", "name": "x", "inputs": []},
        {"op": "tvm_op", "name": "relu", "attrs": {"func_name": "fused_nn_relu"}, "inputs": [[0, 0, 0]]},
    ],
    "arg_nodes": [0],
    "heads": [[1, 0, 0]],
    "attrs": {"dltype": ["list_str", ["float32", "float32"]], "shape": ["list_shape", [[1, 4], [1, 4]]]},
    "node_row_ptr": [0, 1, 2],
}
RELAY = {
    "root": 1,
    "nodes": [{"type_key": ""}, {"type_key": "relay.Function", "attrs": {"body": "2"}}],
    "b64ndarrays": [],
}
D3 = {
    "nodes": [{"id": "a", "group": 1}, {"id": "b", "group": 2}],
    "links": [{"source": "a", "target": "b", "value": 1}],
}
KERAS = {
    "class_name": "Functional",
    "config": {"name": "model", "layers": [{"class_name": "Dense", "config": {"units": 8}, "inbound_nodes": []}]},
    "keras_version": "3.0.0",
    "backend": "tensorflow",
}
TFJS = {
    "format": "graph-model",
    "generatedBy": "2.13.0",
    "modelTopology": {"node": [{"name": "x", "op": "Placeholder"}]},
}
CYTOSCAPE = {"elements": {"nodes": [{"data": {"id": "a"}}], "edges": [{"data": {"source": "a", "target": "a"}}]}}
OTHER_TOOLS: dict[str, object] = {
    "mxnet": MXNET,
    "tvm": TVM,
    "relay": RELAY,
    "d3": D3,
    "d3-edges": {"nodes": D3["nodes"], "edges": D3["links"]},
    "keras": KERAS,
    "tfjs": TFJS,
    "cytoscape": CYTOSCAPE,
    "cytoscape-of-networkx": nx.cytoscape_data(nx.DiGraph([(1, 2)])),
    "notebook": {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5},
    "host": host_to_dict(core_host(2)),
    "list": [1, 2],
    "text": "graph",
    "number": 3,
    "null": None,
    "nothing": {},
    "other-format": {"format": "other", "nodes": []},
}


def text_of(document: object) -> bytes:
    return json.dumps(document).encode()


@pytest.mark.parametrize("name", OTHER_TOOLS)
def test_json_of_another_tool_is_no_graph_and_the_formats_are_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    path.write_bytes(text_of(OTHER_TOOLS[name]))
    with pytest.raises(
        FileProblem, match=r"g\.json: no rlplace graph: .*rlplace-graph.*maxFPGAs.*\.graphml.*\.onnx"
    ) as refused:
        load_graph(path)
    assert "\n" not in str(refused.value)


def test_a_workload_of_dnn_partitioning_is_still_known_by_its_numbers_of_devices(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    path.write_bytes(text_of({"maxFPGAs": 2, "nodes": []}))
    with pytest.raises(UserError, match="maxCPUs is missing"):
        load_graph(path)


def own(**change: Any) -> bytes:
    return text_of(OWN | change)


def node_link(**change: Any) -> bytes:
    graph = {"directed": True, "multigraph": False, "graph": {}, "nodes": [{"id": 0}, {"id": 1}]}
    return text_of({**graph, "edges": [{"source": 0, "target": 1}], **change})


OWN: dict[str, Any] = {
    "format": "rlplace-graph", "schema": 1, "strings": ["input", "aten.relu.default", "", "float32"], "shapes": [[2]],
    "names": ["x", "relu"], "targets": [0, 1], "modules": [2, 2], "signatures": [0, 1], "phases": [0, 0],
    "flops": [0, 2], "bytes_moved": [0, 16], "parameter_bytes": [0, 0], "gradient_bytes": [0, 0], "state_bytes": [0, 0],
    "workspace_bytes": [0, 0], "colocation": [-1, -1], "tensor_op": [0, 1], "tensor_output": [0, 0],
    "tensor_bytes": [8, 8], "tensor_shapes": [0, 0], "tensor_dtypes": [3, 3], "input_offsets": [0, 0, 1],
    "input_tensors": [0], "mutation_op": [], "mutation_tensor": [], "output_tensors": [1],
}  # fmt: skip
GRAPHML = b'<graphml xmlns="http://graphml.graphdrawing.org/xmlns"><graph edgedefault="directed">%s</graph></graphml>'
EDGES = b'<node id="a"/><node id="b"/><edge source="a" target="b"/><edge source="b" target="a"/>'
BOMB = b'<!DOCTYPE a [<!ENTITY b "bbbbbbbb"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]><a>&c;</a>'
ODD_GRAPHS: dict[str, bytes] = {
    "good.json": own(),
    "empty.json": b"",
    "blank.json": b" \n\t",
    "cut.json": own()[:200],
    "behind.json": own() + b"{}",
    "bom.json": b"\xef\xbb\xbf" + own(),
    "utf16.json": own().decode().encode("utf-16"),
    "latin1.json": b'{"format": "\xe9"}',
    "zeros.json": b"\0" * 4096,
    "nan.json": own().replace(b'"flops": [0, 2]', b'"flops": [0, NaN]'),
    "infinite.json": own().replace(b'"flops": [0, 2]', b'"flops": [0, -Infinity]'),
    "overflow.json": own().replace(b'"flops": [0, 2]', b'"flops": [0, 1e999]'),
    "twice.json": b'{"format": "rlplace-graph", "format": "rlplace-graph"}',
    "digits.json": own().replace(b'"flops": [0, 2]', b'"flops": [0, ' + b"9" * 5000 + b"]"),
    "big.json": own(tensor_bytes=[8, 2**80]),
    "negative.json": own(tensor_bytes=[8, -8]),
    "bools.json": own(phases=[False, True]),
    "texts.json": own(flops=["0", "2"]),
    "nested.json": own(flops=[[0], [2]]),
    "objects.json": own(names={"x": 0}),
    "nulls.json": own(shapes=None),
    "schema.json": own(schema=2),
    "late.json": own(schema="one"),
    "cycle.json": own(input_offsets=[0, 1, 1], input_tensors=[1]),
    "escapes.json": own(names=["x\x1b[2J\n", "\u202erelu"]),
    "half.json": own().replace(b'"x"', b'"\\ud800"'),
    "long.json": own(names=["x" * 1_000_000, "relu"]),
    "unknown.json": own(**{"flps\n" + "x" * 10_000: 1}),
    "lists.json": b"[" * 200_000,
    "keys.json": b'{"a":' * 200_000,
    "brackets.json": b"[" * (38 << 20),
    "pairs.json": b"[[" + b"]," * (20 << 20),
    "no-nodes.json": node_link(nodes=None),
    "node-is-text.json": node_link(nodes=["a"]),
    "node-is-list.json": node_link(nodes=[{"id": [1]}]),
    "undirected.json": node_link(directed=False),
    "nowhere.json": node_link(edges=[{"source": 0, "target": "\x1b[31m"}]),
    "loop.json": node_link(edges=[{"source": 0, "target": 0}]),
    "cost.json": node_link(nodes=[{"id": 0, "flops": "\n"}, {"id": 1, "flops": -1}]),
    "place.json": node_link(nodes=[{"id": "a\n\x1b[2J", "flops": -1}], edges=[]),
    "adjacency.json": text_of(nx.adjacency_data(nx.DiGraph([(1, 2)]))),
    "workload.json": text_of({"maxFPGAs": 1, "maxCPUs": 1, "maxSizePerFPGA": 1e400, "nodes": {}, "edges": 3}),
    "empty.graphml": b"",
    "page.graphml": b"<!DOCTYPE html><html><body>404</body></html>",
    "picture.xml": b'<svg xmlns="http://www.w3.org/2000/svg"><g><path d="M0 0"/></g></svg>',
    "bomb.graphml": BOMB,
    "cut.graphml": GRAPHML[:90],
    "cycle.graphml": GRAPHML.replace(b"%s", EDGES),
    "deep.graphml": b"<graphml>" * 100_000,
    "coding.graphml": b'<?xml version="1.0" encoding="utf-7"?>' + GRAPHML,
    "text.onnx": b"not a model at all, but some text that goes on for a while",
    "empty.onnx": b"",
    "zip.onnx": b"PK\x03\x04" + b"\0" * 100,
    "random.onnx": np.random.default_rng(0).bytes(4096),
    "nest.onnx": b"\x3a\x80\x80\x04" * 1000,
    "page.txt": b"A page of -- text, that is no profile.\n",
    "times.txt": b"node1 -- a -- forward_compute_time=nan, backward_compute_time=-1, activation_size=[;]\n",
    "table.csv": b"a,b\n1,2\n",
    "code.py": b"import os\n",
    "weights.pt": b"PK\x03\x04" + b"\0" * 100,
    "host.yaml": b"name: host\ndevices: []\n",
    "binary": bytes(range(256)),
    "picture.dot": b"digraph { a -> b }",
}


def host(**change: Any) -> bytes:
    return text_of(core_host(2).to_dict() | change)


def with_device(**change: Any) -> bytes:
    first, *rest = json.loads(host())["devices"]
    return host(devices=[first | change, *rest])


def with_link(**change: Any) -> bytes:
    first, *rest = json.loads(host())["links"]
    return host(links=[first | change, *rest])


LAUGHS = "\n".join(
    ["a0: &a0 [x,x,x,x,x,x,x,x,x]", *(f"a{k + 1}: &a{k + 1} [{','.join([f'*a{k}'] * 9)}]" for k in range(9))]
)
ODD_HOSTS: dict[str, bytes] = {
    "good.json": host(),
    "empty.json": b"",
    "empty.yaml": b"",
    "blank.yaml": b" \n",
    "cut.json": host()[:100],
    "bom.yaml": b"\xef\xbb\xbfname: a\n",
    "utf16.yaml": "name: a".encode("utf-16"),
    "zeros.yaml": b"\0" * 100,
    "tabs.yaml": b"name:\n\t- a",
    "laughs.yaml": LAUGHS.encode(),
    "itself.yaml": b"name: &a [*a]",
    "code.yaml": b"name: !!python/object/apply:os.system ['true']",
    "brackets.yaml": b"[" * 100_000,
    "brackets.json": b"[" * (38 << 20),
    "keys.json": b'{"a":' * 200_000,
    "list.json": b"[1]",
    "graph.json": own(),
    "d3.json": text_of(D3),
    "nan.json": host().replace(b'"dispatch_s": 0.0', b'"dispatch_s": NaN'),
    "twice.json": b'{"name": "a", "name": "b"}',
    "no-devices.json": host(devices=[]),
    "devices.json": host(devices={"a": 1}),
    "count.yaml": b"name: h\ndevices: [{name: c, kind: c, backend: simulated, memory_bytes: 1, count: 100000000}]",
    "memory.json": with_device(memory_bytes=10**30),
    "context.json": with_device(context_bytes=10**17, memory_bytes=10**9),
    "name.json": with_device(name="cpu:0\x1b[2J"),
    "long.json": with_device(name="x" * 2_000_000),
    "peak.json": with_device(peak_flops_per_s={"a\n\x1b[2J": "x"}),
    "cores.json": with_device(cores=[0, 0]),
    "bandwidth.json": with_link(bandwidth_bytes_per_s=1e-300),
    "huge.json": with_link(bandwidth_bytes_per_s=1e400),
    "latency.json": with_link(latency_s=1e300),
    "link.json": host(links=[3]),
    "routes.json": host(routes=[]),
    "route.json": host(routes=[{"source": "a\nb", "destination": "c", "links": []}]),
    "topology.json": host(topology=[{"name": "a:b", "bandwidth_bytes_per_s": 1, "ports": ["*"]}]),
    "slow.json": host(corun_slowdown=[[1e300] * 2] * 2),
    "fingerprint.json": host(fingerprint="\x1b[2J"),
    "unknown.json": host(**{"devcies\n": []}),
    "host.toml": b"name = 'a'",
}


def is_loaded_or_refused_in_one_line(load: Callable[[Path], object], path: Path, *command: str) -> bool:
    refused = None
    with warnings.catch_warnings(action="ignore"):
        try:
            load(path)
        except UserError as error:
            refused = str(error)
        code, said = asked(*command)
    if refused is None:
        assert code == 0
        return True
    assert refused.isprintable()
    assert len(refused) < 2000
    assert clean(path.name) in refused or repr(path.suffix or path.name) in refused
    *before, last = said.splitlines()
    assert (code, last[:15]) == (2, "rlplace: error:")
    assert all(line.startswith("reading ") for line in before)
    return False


@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_an_odd_graph_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(ODD_GRAPHS[name])
    is_loaded = is_loaded_or_refused_in_one_line(load_graph, path, "graph", str(path))
    assert is_loaded == (name in ("good.json", "escapes.json", "coding.graphml"))


@pytest.mark.parametrize("name", ODD_HOSTS)
def test_an_odd_host_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(ODD_HOSTS[name])
    is_loaded = is_loaded_or_refused_in_one_line(load_host, path, "hosts", str(path))
    assert is_loaded == (name == "good.json")


def test_what_is_no_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("folder.json", "loop.json", "pipe.json", "missing.json", "two\nlines.json"):
        path = tmp_path / name
        for load, command in ((load_graph, "graph"), (load_host, "hosts")):
            assert not is_loaded_or_refused_in_one_line(load, path, command, str(path))


def test_the_odd_graphs_are_of_a_good_one(tmp_path: Path) -> None:
    (tmp_path / "g.json").write_bytes(own())
    assert load_graph(tmp_path / "g.json").names == ("x", "relu")
    save_graph(rich_graph(), tmp_path / "rich.json")
    assert load_graph(tmp_path / "rich.json").fingerprint == rich_graph().fingerprint
