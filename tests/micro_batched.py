"""Training steps cut into micro-batches without a capture: copies of a whole step's ops, each of 1/K of the work."""

from __future__ import annotations

import dataclasses

import numpy as np
from micrographs import op_graph

from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Problem


def cut_graph(graph: OpGraph, count: int) -> OpGraph:
    """`graph` with forward and backward `count` times, sums of gradients in a chain, and one update.

    A gradient is what an update reads and a backward op makes: it keeps its bytes, all else of a copy has 1/K. A
    parameter, the last sum and the update live together; inputs are cut, constants are shared.
    """
    is_shared = graph.is_resident | (graph.phases == UPDATE) | np.array([t == "constant" for t in graph.targets])
    updates = np.flatnonzero(graph.phases == UPDATE).tolist()
    tensors_of = [range(graph.output_offsets[op], graph.output_offsets[op + 1]) for op in range(graph.num_ops)]
    reads_of = [
        graph.input_tensors[graph.input_offsets[op] : graph.input_offsets[op + 1]].tolist()
        for op in range(graph.num_ops)
    ]
    gradients = {t for op in updates for t in reads_of[op] if not is_shared[graph.tensor_op[t]]}
    made: dict[tuple[int, int], int] = {}
    rows: list[tuple[int, int, list[int], str, int]] = []  # op of the whole step, micro-batch, reads, name, class
    tensors: list[tuple[int, int, int]] = []  # new op, tensor of the whole step, bytes

    def add(op: int, micro_batch: int, reads: list[int], name: str, outputs: list[int], colocation: int) -> int:
        rows.append((op, micro_batch, sorted(set(reads)), name, colocation))
        for t in outputs:
            scale = 1 if micro_batch < 0 or t in gradients else count
            tensors.append((len(rows) - 1, t, -(-int(graph.tensor_bytes[t]) // scale)))
            made[t, micro_batch] = len(tensors) - 1
        return len(rows) - 1

    def read(t: int, micro_batch: int) -> int:
        return made[t, -1 if is_shared[graph.tensor_op[t]] else micro_batch]

    for op in np.flatnonzero(is_shared & (graph.phases != UPDATE)).tolist():
        add(op, -1, [], graph.names[op], list(tensors_of[op]), int(graph.colocation[op]))
    for k in range(count):
        for op in np.flatnonzero(~is_shared).tolist():
            inputs = [read(t, k) for t in reads_of[op]]
            add(op, k, inputs, f"{graph.names[op]}/{k}", list(tensors_of[op]), -1)
    sums: set[int] = set()
    roots: dict[int, int] = {}
    for op in updates:
        for t in reads_of[op]:
            if t in gradients and t not in roots:
                last = made[t, 0]
                for k in range(1, count):
                    is_root = k == count - 1
                    home = int(graph.colocation[op]) if is_root else -1
                    source = int(graph.tensor_op[t])
                    new = add(source, -1 if is_root else k, [last, made[t, k]], f"sum{t}/{k}", [], home)
                    sums.add(new)
                    tensors.append((new, t, int(graph.tensor_bytes[t])))
                    last = len(tensors) - 1
                roots[t] = last
        inputs = [roots[t] if t in gradients else made[t, -1] for t in reads_of[op]]
        add(op, -1, inputs, graph.names[op], list(tensors_of[op]), int(graph.colocation[op]))
    order = [op for op, *_ in rows]
    own = np.array([micro_batch >= 0 for _, micro_batch, *_ in rows])
    is_sum = np.array([place in sums for place in range(len(rows))])
    scale = np.where(own & ~is_sum, 1.0 / count, 1.0)
    place_of = {op: place for place, (op, micro_batch, *_) in enumerate(rows) if micro_batch < 0 and place not in sums}
    numbered = {c: i for i, c in enumerate(sorted({c for *_, c in rows if c >= 0}))}
    sizes = np.array([size for *_, size in tensors], dtype=np.int64)
    sum_bytes = np.zeros(len(rows))
    np.add.at(sum_bytes, [op for op, _, _ in tensors], sizes)
    return dataclasses.replace(
        graph,
        names=tuple(name for *_, name, _ in rows),
        targets=tuple("aten.add.Tensor" if s else graph.targets[op] for op, s in zip(order, is_sum, strict=True)),
        modules=tuple(graph.modules[op] for op in order),
        signatures=tuple(
            f"sum:{graph.names[op]}" if s else f"{graph.signatures[op]}/{count}"
            for op, s in zip(order, is_sum, strict=True)
        ),
        phases=np.where(is_sum, BACKWARD, graph.phases[order]).astype(np.int8),
        flops=np.where(is_sum, sum_bytes / 4, graph.flops[order] * scale),
        bytes_moved=np.where(is_sum, 3 * sum_bytes, graph.bytes_moved[order] * scale),
        parameter_bytes=np.where(own | is_sum, 0, graph.parameter_bytes[order]),
        gradient_bytes=np.where(own | is_sum, 0, graph.gradient_bytes[order]),
        state_bytes=np.where(own | is_sum, 0, graph.state_bytes[order]),
        workspace_bytes=np.where(is_sum, 0, graph.workspace_bytes[order] * scale).astype(np.int64),
        colocation=np.array([numbered.get(c, -1) for *_, c in rows]),
        tensor_op=np.array([op for op, _, _ in tensors]),
        tensor_output=_outputs([op for op, _, _ in tensors]),
        tensor_bytes=sizes,
        tensor_shapes=tuple(graph.tensor_shapes[t] for _, t, _ in tensors),
        tensor_dtypes=tuple(graph.tensor_dtypes[t] for _, t, _ in tensors),
        input_offsets=np.cumsum([0, *(len(reads) for _, _, reads, *_ in rows)]),
        input_tensors=np.array([t for _, _, reads, *_ in rows for t in reads], dtype=np.int32),
        mutation_op=np.array([place_of[op] for op in graph.mutation_op.tolist()], dtype=np.int32),
        mutation_tensor=np.array([made[t, -1] for t in graph.mutation_tensor.tolist()], dtype=np.int32),
        output_tensors=np.array(
            [made[t, k] for t in graph.output_tensors.tolist() for k in (*range(count), -1) if (t, k) in made]
        ),
        micro_batch=np.array([micro_batch for _, micro_batch, *_ in rows], dtype=np.int32),
        shard=np.full(len(rows), -1, dtype=np.int32),
        program=None,
    )


def _outputs(producers: list[int]) -> list[int]:
    """The number of each tensor among those of its op."""
    seen: dict[int, int] = {}
    found = []
    for op in producers:
        seen[op] = seen.get(op, -1) + 1
        found.append(seen[op])
    return found


def layered_step(num_layers: int, *, layer_bytes: int = 100, activation_bytes: int = 40) -> OpGraph:
    """A training step of a chain of layers `l0`, `l1`, ...: a forward op each, a loss, two backward ops each, updates.

    Ops in order: parameters, the input, forward ops, the loss, then from the last layer to the first the gradient of
    what the layer reads and that of its parameter, and the updates.
    """
    count = num_layers
    start, loss = count + 1, 2 * count + 1
    reads: list[list[int]] = [[] for _ in range(count + 1)]
    reads += [sorted([layer, start + layer - 1]) for layer in range(count)]
    reads += [[loss - 1]]
    for layer in reversed(range(count)):
        above = len(reads) - 2 if layer < count - 1 else loss
        reads += [sorted([layer, above]), sorted([start + layer - 1, above])]
    gradient = {layer: loss + 2 + 2 * (count - 1 - layer) for layer in range(count)}
    reads += [[layer, gradient[layer]] for layer in range(count)]
    updates = range(len(reads) - count, len(reads))
    layers = [
        *range(count),
        -1,
        *range(count),
        -1,
        *(layer for layer in reversed(range(count)) for _ in "ab"),
        *range(count),
    ]
    is_gradient = {op: layer for layer, op in gradient.items()}
    classes = [-1] * len(reads)
    for layer in range(count):
        for op in (layer, gradient[layer], updates[layer]):
            classes[op] = layer
    phases = [FORWARD] * (loss + 1) + [BACKWARD] * (2 * count) + [UPDATE] * count
    targets = ["parameter"] * count + ["input"] + ["aten.op"] * (len(reads) - 2 * count - 1) + ["update.sgd"] * count
    sizes = [layer_bytes if op < count or op in is_gradient else activation_bytes for op in range(len(reads))]
    sizes[loss] = 4
    graph = op_graph(
        reads,
        sizes,
        targets=targets,
        colocation=classes,
        phases=phases,
        mutations=[(updates[layer], layer) for layer in range(count)],
        outputs=[loss],
    )
    modules = tuple("" if layer < 0 else f"l{layer}" for layer in layers)
    return dataclasses.replace(graph, modules=modules)


def step_problem(graph: OpGraph, host: Host, op_order: str = "rank") -> Problem:
    """`graph` on `host`, a second an op but for the loss, sums of gradients and updates, every op its own group."""
    is_free = (graph.phases == UPDATE) | graph.is_source | (np.array(graph.modules) == "")
    is_free |= np.array([target == "aten.add.Tensor" for target in graph.targets])
    time_s = np.where(is_free, 0.0, 1.0)[:, None] * np.ones((1, host.num_devices))
    classes = np.where(graph.colocation >= 0, graph.num_ops + graph.colocation, np.arange(graph.num_ops))
    first, place = np.unique(classes, return_index=True, return_inverse=True)[1:]
    number = np.empty(len(first), dtype=np.int32)
    number[np.argsort(first)] = np.arange(len(first))
    return Problem(graph, host, Costs(time_s, "estimated"), Grouping(number[place]), op_order=op_order)
