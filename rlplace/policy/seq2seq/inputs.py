"""`Seq2SeqInputs`: what the policy `seq2seq` reads of a problem, group by group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.problem import Problem

MOST_OUTPUTS, MOST_DIMS = 5, 5
"""Outputs of a group, and sizes of each, that are read."""
SHAPE_WIDTH = MOST_OUTPUTS * MOST_DIMS


@dataclass(frozen=True, eq=False)
class Seq2SeqInputs:
    """The three parts of a group's embedding in Mirhoseini et al. 2017 (section 3.2), before what is learned.

    Attributes:
        type_shares: (G, V) float32, share of each op type among the group's ops; a row sums to 1.
        output_shapes: (G, 25) float32, shapes of up to 5 outputs, each of up to 5 sizes, padded with zeros: as
            logarithms, the largest of the graph at 1. An output is a tensor that another group reads or that the step
            returns; those of most bytes come first.
        adjacency: (G, 2G) float32, 1 for each group whose tensors it reads, then for each that reads its tensors.
        allowed: (G, D) bool, devices where each group may be.
        types: V op types, in the order of the alphabet.
    """

    type_shares: NDArray[np.float32]
    output_shapes: NDArray[np.float32]
    adjacency: NDArray[np.float32]
    allowed: NDArray[np.bool_]
    types: tuple[str, ...]


def seq2seq_inputs(problem: Problem) -> Seq2SeqInputs:
    """What the policy reads of `problem`; nothing here depends on a placement."""
    graph, num_groups = problem.graph, problem.grouping.num_groups
    op_group = problem.grouping.op_group.astype(np.int64)
    types = sorted(set(graph.targets))
    index = {target: place for place, target in enumerate(types)}
    counts_GV = np.zeros((num_groups, len(types)))
    op_type = np.array([index[target] for target in graph.targets], dtype=np.int64)
    np.add.at(counts_GV, (op_group, op_type), 1)
    producer_E, reader_E = op_group[graph.tensor_op[graph.input_tensors]], op_group[graph.edge_op]
    crosses_E = producer_E != reader_E
    reads_GG = np.zeros((num_groups, num_groups), dtype=np.float32)
    reads_GG[reader_E[crosses_E], producer_E[crosses_E]] = 1
    leaves_T = np.zeros(graph.num_tensors, dtype=np.bool_)
    leaves_T[graph.input_tensors[crosses_E]] = True
    leaves_T[graph.output_tensors] = True
    return Seq2SeqInputs(
        type_shares=(counts_GV / counts_GV.sum(axis=1, keepdims=True)).astype(np.float32),
        output_shapes=_output_shapes(problem, np.flatnonzero(leaves_T)),
        adjacency=np.concatenate((reads_GG, reads_GG.T), axis=1),
        allowed=problem.group_allowed,
        types=tuple(types),
    )


def _output_shapes(problem: Problem, leaving: NDArray[np.int64]) -> NDArray[np.float32]:
    """(G, 25) float32 of the tensors `leaving`, ascending."""
    graph, op_group = problem.graph, problem.grouping.op_group
    shapes = np.zeros((problem.grouping.num_groups, MOST_OUTPUTS, MOST_DIMS))
    num_outputs = np.zeros(len(shapes), dtype=np.int64)
    for tensor in leaving[np.argsort(-graph.tensor_bytes[leaving], kind="stable")].tolist():
        group, sizes = op_group[graph.tensor_op[tensor]], graph.tensor_shapes[tensor][:MOST_DIMS]
        if num_outputs[group] < MOST_OUTPUTS:
            shapes[group, num_outputs[group], : len(sizes)] = np.log1p(sizes)
            num_outputs[group] += 1
    largest = float(shapes.max(initial=0.0)) or 1.0
    return (shapes / largest).reshape(len(shapes), SHAPE_WIDTH).astype(np.float32)
