"""Profiles of PipeDream and DAPPLE: what their lines say, the step that they become, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from layer_profiles import profile_text

from rlplace.errors import FileProblem, InvalidValue
from rlplace.graphs.formats import load_graph, load_times_s
from rlplace.graphs.formats.published import load_pipedream, pipedream_times_s, read_layers
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.search.parallel.layouts import roles

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
    for load in (load_graph, load_times_s):
        with pytest.raises(InvalidValue, match="only a layer profile can be cut"):
            load(tmp_path / "g.json", micro_batches=2)
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
