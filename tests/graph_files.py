"""Graphs to write to files, and when two graphs are the same."""

from __future__ import annotations

import dataclasses

import numpy as np

from rlplace.graphs.opgraph import OpGraph


def assert_same(a: OpGraph, b: OpGraph) -> None:
    """Every field but the program is equal, dtypes included; and notes, which only reading makes."""
    for field in dataclasses.fields(OpGraph):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if field.name in ("program", "notes"):
            continue
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, field.name
            assert np.array_equal(left, right), field.name
        else:
            assert left == right, field.name
    assert a.fingerprint == b.fingerprint


def rich_graph() -> OpGraph:
    """Every field in use: two outputs, an op without one, co-location, an update, awkward names, a scalar shape."""
    return OpGraph(
        names=("w", "x & <y>", 'mm "1"\n\tü', "split", "sink", "update_w"),
        targets=("parameter", "input", "aten.mm.default", "aten.split.Tensor", "aten.op", "update.adam"),
        modules=("enc.0", "", "enc.0", "enc.1", "enc.1", "enc.0"),
        signatures=("parameter", "input", "aten.mm.default(float32(2, 3))", "s", "s", "u"),
        phases=np.array([0, 0, 0, 1, 1, 2]),
        flops=np.array([0, 0, 0.1, 12, 1e18, 14]),
        bytes_moved=np.array([0, 0, 1 / 3, 40, 2, 100]),
        parameter_bytes=np.array([24, 0, 0, 0, 0, 0]),
        gradient_bytes=np.array([24, 0, 0, 0, 0, 0]),
        state_bytes=np.array([0, 0, 0, 0, 0, 48]),
        workspace_bytes=np.array([0, 0, 7, 0, 0, 0]),
        colocation=np.array([0, -1, -1, 0, -1, 0]),
        tensor_op=np.array([0, 1, 2, 3, 3]),
        tensor_output=np.array([0, 0, 0, 0, 2]),
        tensor_bytes=np.array([24, 16, 2**40, 24, 4]),
        tensor_shapes=((2, 3), (4,), (2, 3), (2, 3), ()),
        tensor_dtypes=("float32", "float32", "bfloat16", "float32", "float32"),
        input_offsets=np.array([0, 0, 0, 2, 3, 5, 7]),
        input_tensors=np.array([0, 1, 2, 2, 4, 0, 3]),
        mutation_op=np.array([5, 4]),
        mutation_tensor=np.array([0, 0]),
        output_tensors=np.array([4, 2]),
    )
