"""`OpGraph` on graphs small enough to work out by hand: its columns, sums of gradients, and micro-batches."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from micrographs import fork_join, op_graph

from rlplace.errors import InvalidValue
from rlplace.graphs.opgraph import BACKWARD, FORWARD, LATER_HALF, OpGraph, edge_readers, gradient_sums
from rlplace.graphs.program import Slicing, even_sizes
from rlplace.graphs.synthetic import synthetic
from rlplace.search.parallel.layouts import roles

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


def test_counts_and_derived_arrays_of_a_diamond_and_of_two_outputs() -> None:
    graph = diamond()
    assert (graph.num_ops, graph.num_tensors, graph.num_edges) == (4, 4, 5)
    assert graph.output_offsets.tolist() == [0, 1, 2, 3, 4]
    assert graph.edge_op.tolist() == [1, 2, 3, 3, 3]
    assert [array.tolist() for array in graph.readers] == [[0, 3, 4, 5, 5], [1, 2, 3, 3, 3]]
    assert graph.output_bytes.tolist() == [8, 4, 2, 1]
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


def test_arrays_are_read_only_and_typed_and_graphs_are_keys() -> None:
    graph = diamond()
    assert graph.phases.dtype == np.int8
    assert graph.flops.dtype == np.float64
    assert graph.tensor_bytes.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        graph.flops[0] = 1.0
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


COLUMNS = op_graph([[], [0], [0], [0, 1, 2]], [8, 4, 2, 1])


def test_each_edge_has_its_reader() -> None:
    assert edge_readers(np.array([0, 0, 1, 2, 5], dtype=np.int32)).tolist() == [1, 2, 3, 3, 3]
    assert edge_readers(np.array([0], dtype=np.int32)).tolist() == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"targets": ("aten.op",) * 3}, "targets"),
        ({"flops": np.zeros(3)}, "flops"),
        ({"tensor_bytes": np.zeros(5)}, "tensor_bytes"),
        ({"names": ("a", "b", "c", "a")}, "names"),
        ({"flops": np.array([0, 0, 0, -1.0])}, "flops"),
        ({"flops": np.array([0, 0, 0, np.nan])}, "flops"),
        ({"tensor_op": np.array([0, 2, 1, 3])}, "tensor_op"),
        ({"tensor_op": np.array([0, 1, 2, 4])}, "tensor_op"),
        ({"input_tensors": np.array([0, 0, 0, 1, 4])}, "input_tensors"),
        ({"input_offsets": np.array([0, 0, 2, 1, 5])}, "input_offsets"),
        ({"input_offsets": np.array([0, 0, 1, 2, 4])}, "input_offsets"),
        ({"input_tensors": np.array([1, 0, 0, 1, 2])}, "input_tensors"),
        ({"input_tensors": np.array([0, 0, 1, 0, 2])}, "input_tensors"),
        ({"input_tensors": np.array([0, 0, 1, 1, 2])}, "input_tensors"),
        ({"phases": np.array([0, 0, 0, 3])}, "phases"),
        ({"colocation": np.array([-2, 0, 0, 0])}, "colocation"),
        ({"colocation": np.array([4, 0, 0, 0])}, "colocation"),
        ({"tensor_output": np.array([-1, 0, 0, 0])}, "tensor_output"),
        ({"tensor_bytes": np.array([2**60, 2**60, 0, 0])}, "tensor_bytes"),
        ({"mutation_op": np.array([0])}, "mutation_tensor"),
        ({"mutation_op": np.array([9]), "mutation_tensor": np.array([0])}, "mutation_op"),
        ({"output_tensors": np.array([-1])}, "output_tensors"),
    ],
)
def test_what_makes_no_graph_is_refused(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        dataclasses.replace(COLUMNS, **change)
    assert refused.value.field == field


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16, 64])
@pytest.mark.parametrize("turn", [0, 1, 6, LATER_HALF])
def test_every_gradient_is_added_once(count: int, turn: int) -> None:
    sums = gradient_sums(count, turn)
    members = [{part} for part in range(count)]
    for one in sums:
        left, right = members[one.left], members[one.right]
        assert max(left) + 1 == min(right)  # neighbours, in order
        members.append(left | right)
        assert one.last == max(members[-1])
        assert one.micro_batch in members[-1] or one is sums[-1]
    assert len(sums) == count - 1
    assert members[-1] == set(range(count))
    assert [one.micro_batch for one in sums[-1:]] == [-1] * min(len(sums), 1)


def test_few_parts_wait_at_a_time() -> None:
    """In order of micro-batches, with each sum made as soon as it can be."""
    sums = gradient_sums(64)
    waiting, most = 0, 0
    for micro_batch in range(64):
        waiting += 1
        most = max(most, waiting)
        waiting -= sum(one.last == micro_batch for one in sums)
    assert (waiting, most) == (1, 7)


def test_turns_deal_sums_out_evenly() -> None:
    """16 micro-batches on 16 devices: what each receives for sums below the root, over 16 parameters."""
    received: Counter[int] = Counter()
    for turn in range(16):
        home = dict(enumerate(range(16)))
        for number, one in enumerate(gradient_sums(16, turn)[:-1]):
            home[16 + number] = one.micro_batch
            received[one.micro_batch] += sum(home[part] != one.micro_batch for part in (one.left, one.right))
    assert set(received.values()) == {14}


def test_a_sum_goes_with_the_micro_batch_that_completes_it() -> None:
    """8 micro-batches on 4 devices, or on 2: every run of one device is a sum of its own, made there."""
    sums = gradient_sums(8, LATER_HALF)
    assert [one.micro_batch for one in sums] == [1, 3, 3, 5, 7, 7, -1]
    assert [one.last for one in sums] == [1, 3, 3, 5, 7, 7, 7]


def chain() -> OpGraph:
    graph = synthetic("layered", layers=2, width=1)
    return dataclasses.replace(graph, targets=("parameter", *["aten.relu"] * (graph.num_ops - 1)))


def test_a_graph_is_not_cut_unless_it_says_so_then_copies_share_a_role() -> None:
    graph = chain()
    assert graph.micro_batch.tolist() == [-1] * graph.num_ops
    assert graph.num_micro_batches == 1
    column = np.full(graph.num_ops, -1)
    column[1:5] = [0, 0, 1, 1]
    cut = dataclasses.replace(graph, micro_batch=column)
    found = roles(cut).tolist()
    assert cut.num_micro_batches == 2
    assert found[1:5] == [found[1], found[2], found[1], found[2]]
    assert len({found[0], found[1], found[2], *found[5:]}) == 3 + graph.num_ops - 5
    assert roles(graph).tolist() == list(range(graph.num_ops))


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidValue, match="micro_batch"):
        dataclasses.replace(chain(), micro_batch=np.zeros(2))


def test_slices_cover_the_batch_and_differ_by_one() -> None:
    assert even_sizes(10, 4) == (3, 3, 2, 2)
    slicing = Slicing(dims=(0, None, 1), sizes=even_sizes(5, 2))
    tensors = [torch.arange(5), torch.ones(3), torch.arange(10).reshape(2, 5)]
    first, second = (slicing.cut(tensors, index) for index in range(2))
    assert slicing.batch == 5
    assert slicing.starts == (0, 3)
    assert torch.equal(torch.cat([first[0], second[0]]), tensors[0])
    assert torch.equal(torch.cat([first[2], second[2]], dim=1), tensors[2])
    assert first[1] is tensors[1]
