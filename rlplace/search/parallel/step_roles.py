"""`step_roles`: where along a step's chain of forward ops everything else belongs, whatever micro-batch it works on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.merging import mirrored_twins
from rlplace.graphs.opgraph import FORWARD, OpGraph

SUM = "aten.add.Tensor"
"""What adds a micro-batch's gradient to the sum so far."""


@dataclass(frozen=True, eq=False)
class StepRoles:
    """The roles of a step's N ops, laid out along the chain of those that run forward once a micro-batch.

    Attributes:
        role: (N,) int32, as `roles`.
        position: (R,) int32, the place in the chain, 0..P-1, that each role belongs to: a backward role to the forward
            one whose gradient it computes, a parameter with all that lives with it to the first that reads it.
        num_positions: P; 1 where every forward op belongs to a co-location class, 0 where nothing is cut.
        follows: (N,) int32, the micro-batch that each op goes with; -1 for shared ops, and those of co-location
            classes, which are owned by one replica.
    """

    role: NDArray[np.int32]
    position: NDArray[np.int32]
    num_positions: int
    follows: NDArray[np.int32]

    @property
    def op_position(self) -> NDArray[np.int32]:
        """(N,) int32: the place in the chain that each op belongs to."""
        return self.position[self.role]


def step_roles(graph: OpGraph) -> StepRoles:
    """The roles of `graph`'s ops and their places."""
    role = roles(graph)
    is_owned = graph.colocation >= 0
    follows = np.where(is_owned, -1, graph.micro_batch).astype(np.int32)
    is_own = (follows >= 0) & ~graph.is_source
    is_link = is_own & (graph.phases == FORWARD)
    chain = np.unique(role[is_link])
    first_op = np.unique(role, return_index=True)[1]
    position = np.full(len(first_op), -1, dtype=np.int32)
    if not len(chain):
        return StepRoles(role, np.zeros_like(position), int(graph.num_micro_batches > 1), follows)
    position[chain] = np.arange(len(chain))
    twin = _twins(graph, is_link, is_own & ~is_link)[first_op]
    has_twin = (position < 0) & (twin >= 0)
    position[has_twin] = position[role[twin[has_twin]]]
    places = position[role]
    class_place = _class_places(graph, places, is_link)
    places[is_owned] = class_place[graph.colocation[is_owned]]
    sums = _sums(graph, is_own & ~is_link)
    places[sums >= 0] = class_place[sums[sums >= 0]]
    _settle(graph, places)
    return StepRoles(role, places[first_op].astype(np.int32), len(chain), follows)


def _twins(graph: OpGraph, is_forward: NDArray[np.bool_], is_backward: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(N,) int64: the forward op of the same module and micro-batch whose gradient a backward op computes; else -1."""
    number: dict[str, int] = {}
    modules = np.array([number.setdefault(path, len(number)) for path in graph.modules], dtype=np.int64)
    module = modules * graph.num_micro_batches + np.maximum(graph.micro_batch, 0)
    return np.asarray(
        mirrored_twins(
            module,
            is_forward,
            is_backward,
            graph.is_source,
            graph.tensor_op,
            graph.input_offsets,
            graph.input_tensors,
            *graph.readers,
            len(number) * graph.num_micro_batches,
        )
    )


def _class_places(graph: OpGraph, places: NDArray[np.int32], is_link: NDArray[np.bool_]) -> NDArray[np.int32]:
    """(C,) int32: the place of the first forward op that reads a co-location class; else the last that it reads."""
    count = int(graph.colocation.max(initial=-1)) + 1
    producer, reader = graph.tensor_op[graph.input_tensors], graph.edge_op
    nowhere = np.iinfo(np.int32).max
    found = np.full(count, nowhere, dtype=np.int32)
    out = (graph.colocation[producer] >= 0) & is_link[reader]
    np.minimum.at(found, graph.colocation[producer[out]], places[reader[out]])
    last = np.full(count, -1, dtype=np.int32)
    into = (graph.colocation[reader] >= 0) & (places[producer] >= 0)
    np.maximum.at(last, graph.colocation[reader[into]], places[producer[into]])
    return np.where(found < nowhere, found, np.maximum(last, 0)).astype(np.int32)


def _sums(graph: OpGraph, is_backward: NDArray[np.bool_]) -> NDArray[np.int32]:
    """(N,) int32: the class into which a partial sum of gradients goes, directly or through other sums; else -1."""
    found = np.full(graph.num_ops, -1, dtype=np.int32)
    offsets, readers = graph.readers
    starts = offsets[graph.output_offsets]
    candidates = [op for op in np.flatnonzero(is_backward).tolist() if graph.targets[op] == SUM]
    for op in reversed(candidates):
        into = readers[starts[op] : starts[op + 1]]
        classes = np.maximum(graph.colocation[into], found[into])
        if len(classes) and classes.min() >= 0:
            found[op] = classes[0]
    return found


def _settle(graph: OpGraph, places: NDArray[np.int32]) -> None:
    """Gives the ops without a place that of the last op that they read, or else of the first that reads them."""
    inputs, producers = graph.input_offsets, graph.tensor_op[graph.input_tensors]
    lost = np.flatnonzero((places < 0) & ~graph.is_source).tolist()
    computed = np.where(graph.is_source & (graph.colocation < 0), -1, places)
    for op in lost:
        computed[op] = places[op] = computed[producers[inputs[op] : inputs[op + 1]]].max(initial=-1)
    offsets, readers = graph.readers
    starts = offsets[graph.output_offsets]
    for op in np.flatnonzero(places < 0).tolist()[::-1]:
        into = places[readers[starts[op] : starts[op + 1]]]
        places[op] = into[into >= 0].min(initial=np.iinfo(np.int32).max) if np.any(into >= 0) else 0


def roles(graph: OpGraph) -> NDArray[np.int32]:
    """(N,) int32: ops that do the same for different micro-batches have the same role, 0..R-1; others each their own.

    Copies keep their order, so the r-th op of one micro-batch answers to the r-th of another with the same target,
    module and phase. Roles are numbered by the first op that has them.
    """
    seen: dict[tuple[str, str, int, int, int], int] = {}
    found = np.empty(graph.num_ops, dtype=np.int32)
    count: dict[tuple[int, str, str, int], int] = {}
    labels = zip(graph.micro_batch.tolist(), graph.targets, graph.modules, graph.phases.tolist(), strict=True)
    for op, (micro_batch, target, module, phase) in enumerate(labels):
        if micro_batch < 0:
            key = ("", "", 0, op, -1)
        else:
            nth = count.get((micro_batch, target, module, phase), 0)
            count[micro_batch, target, module, phase] = nth + 1
            key = (target, module, phase, nth, 0)
        found[op] = seen.setdefault(key, len(seen))
    return found
