"""`OpGraph` on graphs small enough to work out by hand."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from micrographs import fork_join, op_graph

from rlplace.graphs.opgraph import BACKWARD, FORWARD, OpGraph

#    0 ── 1 ──┐
#    └─── 2 ──┴─ 3      op 3 reads 0 as well
DIAMOND = [[], [0], [0], [0, 1, 2]]


def diamond() -> OpGraph:
    return op_graph(DIAMOND, [8, 4, 2, 1])


def two_outputs() -> OpGraph:
    """Op 0 has two outputs, tensors 0 and 1; op 1 reads both, op 2 the second."""
    return dataclasses.replace(
        op_graph([[], [], []]),
        tensor_op=np.array([0, 0, 1]),
        tensor_output=np.array([0, 1, 0]),
        tensor_bytes=np.array([3, 5, 7]),
        input_offsets=np.array([0, 0, 2, 3]),
        input_tensors=np.array([0, 1, 1]),
    )


def test_counts_and_derived_arrays_of_a_diamond() -> None:
    graph = diamond()
    assert (graph.num_ops, graph.num_tensors, graph.num_edges) == (4, 4, 5)
    assert graph.output_offsets.tolist() == [0, 1, 2, 3, 4]
    assert graph.edge_op.tolist() == [1, 2, 3, 3, 3]
    assert [array.tolist() for array in graph.readers] == [[0, 3, 4, 5, 5], [1, 2, 3, 3, 3]]
    assert graph.output_bytes.tolist() == [8, 4, 2, 1]


def test_an_op_with_two_outputs() -> None:
    graph = two_outputs()
    assert graph.output_offsets.tolist() == [0, 2, 3, 3]
    assert [array.tolist() for array in graph.readers] == [[0, 1, 3, 3], [1, 1, 2]]
    assert graph.output_bytes.tolist() == [8, 7, 0]


def test_sources_and_residents() -> None:
    graph = op_graph([[]] * 6, targets=["parameter", "buffer", "state", "input", "constant", "aten.op"])
    assert graph.is_resident.tolist() == [True, True, True, False, False, False]
    assert graph.is_source.tolist() == [True, True, True, True, True, False]


def test_to_networkx_keeps_facts_and_merges_edges_of_one_pair() -> None:
    graph = dataclasses.replace(
        two_outputs(), phases=np.array([FORWARD, BACKWARD, BACKWARD]), flops=np.array([1, 2, 3])
    )
    converted = graph.to_networkx()
    assert converted.graph["fingerprint"] == graph.fingerprint
    assert dict(converted.nodes[1]) == {
        "name": "op1",
        "target": "aten.op",
        "module": "",
        "signature": "aten.op:1",
        "phase": "backward",
        "flops": 2.0,
        "bytes_moved": 0.0,
        "output_bytes": 7,
        "parameter_bytes": 0,
        "gradient_bytes": 0,
        "state_bytes": 0,
        "workspace_bytes": 0,
        "colocation": -1,
        "tensors": [{"id": 2, "output": 0, "bytes": 7, "shape": [1], "dtype": "uint8"}],
    }
    assert sorted(converted.edges(data=True)) == [
        (0, 1, {"tensors": [0, 1], "bytes": 8}),
        (0, 2, {"tensors": [1], "bytes": 5}),
    ]


def test_arrays_are_read_only_and_typed() -> None:
    graph = diamond()
    assert graph.phases.dtype == np.int8
    assert graph.flops.dtype == np.float64
    assert graph.tensor_bytes.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        graph.flops[0] = 1.0


def test_graphs_compare_by_identity_and_can_be_keys() -> None:
    graph = diamond()
    assert {graph: 1}[graph] == 1
    assert graph != diamond()


@pytest.mark.parametrize(
    "change",
    [
        {"flops": np.ones(4)},
        {"bytes_moved": np.ones(4)},
        {"names": ("a", "b", "c", "d")},
        {"modules": ("m",) * 4},
        {"signatures": ("s",) * 4},
        {"colocation": np.array([0, 0, -1, -1])},
    ],
)
def test_fingerprint_ignores_figures_and_names(change: dict[str, object]) -> None:
    assert dataclasses.replace(diamond(), **change).fingerprint == diamond().fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"targets": ("aten.op", "aten.op", "aten.op", "aten.other")},
        {"tensor_shapes": ((8,), (4,), (2,), (1, 1))},
        {"tensor_dtypes": ("uint8", "uint8", "uint8", "int8")},
        {"input_offsets": np.array([0, 0, 1, 2, 4]), "input_tensors": np.array([0, 0, 1, 2])},
        {"mutation_op": np.array([3]), "mutation_tensor": np.array([0])},
        {"output_tensors": np.array([3])},
    ],
)
def test_fingerprint_sees_what_is_computed(change: dict[str, object]) -> None:
    assert dataclasses.replace(diamond(), **change).fingerprint != diamond().fingerprint


@given(st.integers(1, 5), st.integers(1, 4))
def test_readers_invert_inputs(width: int, depth: int) -> None:
    graph = fork_join(width, depth)
    offsets, ops = graph.readers
    pairs = {(t, int(op)) for t in range(graph.num_tensors) for op in ops[offsets[t] : offsets[t + 1]]}
    assert pairs == set(zip(graph.input_tensors.tolist(), graph.edge_op.tolist(), strict=True))
    assert graph.to_networkx().number_of_edges() == graph.num_edges == 2 * width * depth


def test_a_pickled_graph_is_the_same_without_its_program() -> None:
    graph = dataclasses.replace(fork_join(2, 2), program=object())  # type: ignore[arg-type]
    found = pickle.loads(pickle.dumps(graph))  # noqa: S301 - our own bytes
    assert found.fingerprint == graph.fingerprint
    assert found.program is None
    assert not found.tensor_bytes.flags.writeable
    assert copy.deepcopy(graph) is graph
    assert copy.copy(graph).program is graph.program
