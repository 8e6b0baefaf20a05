"""Workloads of the dnn-partitioning benchmark (Tarnawski et al., NeurIPS 2020): JSON in and out.

A workload is a graph with costs on two kinds of device, a number of equal accelerators and of CPUs, which count as one
pooled device here. Times stay in the file's milliseconds, so that what is saved is what was loaded, to the bit.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.files import read_json, write_json_atomic
from rlplace.graphs.formats.own_json import LARGEST_COUNT, Fields
from rlplace.graphs.opgraph import BACKWARD, FORWARD, OpGraph
from rlplace.graphs.paths import topological_order

TRANSFER_BYTES_PER_MS = float(1 << 31) / 1e3
"""What a transfer's milliseconds are turned into bytes with: 2 GiB/s, the benchmark's own figure."""
LARGEST_FILE_BYTES = 1 << 28
LARGEST_MS = 1e9
MOST_DEVICES = 256
LARGEST_BYTES = 1e15

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class DnnPartitioning:
    """A workload of the benchmark: N ops in topological order, K accelerators, and the CPUs as one more device.

    Devices are numbered 0..K-1 (accelerators), then K (the pooled CPUs, where there are any).

    Attributes:
        graph: names are the file's ids, `colocation` its colour classes, phases forward or backward; op i has one
            output, tensor i, whose bytes are `transfer_ms` at 2 GiB/s. `modules` holds the layer, where one is given.
        ids: (N,) int64, as in the file.
        labels: (N,) the file's `name` of each node, `""` where it has none.
        class_ids: (C,) the file's number of each colour class, by our number.
        accelerator_ms: (N,) float64, time on an accelerator.
        cpu_ms: (N,) float64, time on a CPU.
        transfer_ms: (N,) float64, time to move the op's output between an accelerator and host memory.
        size_bytes: (N,) float64, held on the accelerator that the op is on.
        supported: (N,) bool, whether an accelerator can run the op.
        edge_bytes: (E,) float64, the `size` of each edge, in the order of the graph's edges: kept, used nowhere.
        num_accelerators: K.
        num_cpus: as in the file.
        capacity_bytes: of each accelerator; CPUs hold anything.
    """

    graph: OpGraph
    ids: NDArray[np.int64]
    labels: tuple[str, ...]
    class_ids: tuple[int, ...]
    accelerator_ms: Floats
    cpu_ms: Floats
    transfer_ms: Floats
    size_bytes: Floats
    supported: NDArray[np.bool_]
    edge_bytes: Floats
    num_accelerators: int
    num_cpus: int
    capacity_bytes: float

    @property
    def num_ops(self) -> int:
        return self.graph.num_ops

    @property
    def num_devices(self) -> int:
        """Accelerators, and one more where there are CPUs."""
        return self.num_accelerators + (1 if self.num_cpus else 0)

    @property
    def is_training(self) -> bool:
        """Whether there are backward nodes; latency is not defined then."""
        return bool(np.any(self.graph.phases == BACKWARD))

    @cached_property
    def units(self) -> NDArray[np.int32]:
        """(N,) int32: what moves together, numbered by first op: a colour class, or an op without one."""
        first: dict[int, int] = {}
        classes = self.graph.colocation.tolist()
        keys = [class_ if class_ >= 0 else -1 - op for op, class_ in enumerate(classes)]
        return np.array([first.setdefault(key, len(first)) for key in keys], dtype=np.int32)

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """(N, D) bool: devices that can run each op; memory is another matter."""
        table = np.ones((self.num_ops, self.num_devices), dtype=np.bool_)
        table[:, : self.num_accelerators] = self.supported[:, None]
        return table

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the workload as the benchmark's JSON.

        Raises:
            FileProblem: the file cannot be written.
        """
        graph, ids = self.graph, self.ids.tolist()
        nodes: list[dict[str, object]] = []
        for op, number in enumerate(ids):
            node: dict[str, object] = {
                "id": number,
                "name": self.labels[op],
                "supportedOnFpga": bool(self.supported[op]),
                "cpuLatency": float(self.cpu_ms[op]),
                "fpgaLatency": float(self.accelerator_ms[op]),
                "isBackwardNode": bool(graph.phases[op] == BACKWARD),
                "size": float(self.size_bytes[op]),
            }
            if graph.colocation[op] >= 0:
                node["colorClass"] = self.class_ids[graph.colocation[op]]
            if graph.modules[op]:
                node["layerId"] = int(graph.modules[op].removeprefix(_LAYER))
            nodes.append(node)
        edges = [
            {"sourceId": ids[source], "destId": ids[reader], "cost": float(self.transfer_ms[source]), "size": size}
            for source, reader, size in zip(
                graph.input_tensors.tolist(), graph.edge_op.tolist(), self.edge_bytes.tolist(), strict=True
            )
        ]
        counts = {"maxSizePerFPGA": self.capacity_bytes, "maxFPGAs": self.num_accelerators, "maxCPUs": self.num_cpus}
        write_json_atomic(path, {**counts, "nodes": nodes, "edges": edges}, indent=1)


_LAYER = "layer."


def load_dnn_partitioning(path: str | os.PathLike[str]) -> DnnPartitioning:
    """The workload in a dnn-partitioning file.

    Raises:
        FileProblem: the file is missing or not JSON.
        InvalidValue: a field is missing, of the wrong type or out of range, an edge names no node, a source's edges
            differ in cost, the graph has a cycle, or a class cannot run anywhere; it names the field.
    """
    return parse_dnn_partitioning(read_json(path, largest_bytes=LARGEST_FILE_BYTES), where=os.fspath(path))


def parse_dnn_partitioning(document: object, *, where: str = "workload") -> DnnPartitioning:
    """The workload in a parsed document; see `load_dnn_partitioning`."""
    top = Fields(document, where=where)
    num_accelerators = top.integer("maxFPGAs", high=MOST_DEVICES)
    num_cpus = top.integer("maxCPUs", high=MOST_DEVICES)
    if num_accelerators + num_cpus == 0:
        raise InvalidValue("maxFPGAs", 0, "at least one accelerator or CPU", where=where)
    capacity = top.number("maxSizePerFPGA", LARGEST_BYTES)
    nodes, edges = top.objects("nodes"), top.objects("edges")
    if not nodes:
        raise InvalidValue("nodes", 0, "at least one node", where=where)
    position: dict[int, int] = {}
    for i, node in enumerate(nodes):
        number = node.integer("id", low=-LARGEST_COUNT)
        if position.setdefault(number, i) != i:
            raise InvalidValue(node.full_name("id"), number, "an id that no other node has", where=where)
    links = _read_edges(edges, position)
    order = _topological_order(len(nodes), [(source, reader) for source, reader, _, _ in links], nodes, where)
    return _build(nodes, links, order, num_accelerators, num_cpus, capacity)


def _read_edges(edges: list[Fields], position: dict[int, int]) -> list[tuple[int, int, float, float]]:
    """(source, reader, cost in ms, bytes) of each edge, nodes by place in the file; an edge given twice is one."""
    found: dict[tuple[int, int], tuple[int, int, float, float]] = {}
    costs: dict[int, float] = {}
    for edge in edges:
        ends = []
        for key in ("sourceId", "destId"):
            number = edge.integer(key, low=-LARGEST_COUNT)
            if number not in position:
                raise InvalidValue(edge.full_name(key), number, "the id of a node", where=edge.where)
            ends.append(position[number])
        source, reader = ends
        cost = edge.number("cost", LARGEST_MS)
        if not math.isclose(costs.setdefault(source, cost), cost, rel_tol=1e-9, abs_tol=1e-12):
            expected = f"{costs[source]!r}, the cost of the source's other edges"
            raise InvalidValue(edge.full_name("cost"), cost, expected, where=edge.where)
        size = edge.number("size", LARGEST_BYTES) if "size" in edge.data else 0.0
        found.setdefault((source, reader), (source, reader, costs[source], size))
    return list(found.values())


def _topological_order(num_nodes: int, links: list[tuple[int, int]], nodes: list[Fields], where: str) -> list[int]:
    """Places in the file, every source before its readers and otherwise as in the file."""
    order = topological_order(num_nodes, links)
    if len(order) < num_nodes:
        stuck = min(set(range(num_nodes)) - set(order))
        raise InvalidValue(
            "edges",
            f"a cycle that node {nodes[stuck].data['id']} is on or behind",
            "a graph without cycles",
            where=where,
        )
    return order


def _build(
    nodes: list[Fields],
    links: list[tuple[int, int, float, float]],
    order: list[int],
    num_accelerators: int,
    num_cpus: int,
    capacity: float,
) -> DnnPartitioning:
    n, where = len(nodes), nodes[0].where
    class_ids: dict[int, int] = {}
    colocation = np.full(n, -1)
    ids, labels, modules = np.zeros(n, dtype=np.int64), [], []
    accelerator_ms, cpu_ms, size_bytes = np.zeros(n), np.zeros(n), np.zeros(n)
    supported, backward = np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_)
    for op, i in enumerate(order):
        node = nodes[i]
        ids[op] = node.integer("id", low=-LARGEST_COUNT)
        labels.append(node.text("name", default=""))
        modules.append(f"{_LAYER}{node.integer('layerId', low=-LARGEST_COUNT)}" if "layerId" in node.data else "")
        accelerator_ms[op] = node.number("fpgaLatency", LARGEST_MS)
        cpu_ms[op] = node.number("cpuLatency", LARGEST_MS)
        size_bytes[op] = node.number("size", LARGEST_BYTES)
        supported[op] = node.flag("supportedOnFpga")
        backward[op] = node.flag("isBackwardNode")
        if "colorClass" in node.data:
            color = node.integer("colorClass", low=-LARGEST_COUNT)
            colocation[op] = class_ids.setdefault(color, len(class_ids))
    stuck = ~supported if num_accelerators else np.ones(n, dtype=np.bool_)
    if not num_cpus and np.any(stuck):
        field = f"nodes[{order[int(np.argmax(stuck))]}].supportedOnFpga"
        raise InvalidValue(field, False, "true, as there are no CPUs", where=where)
    place = np.empty(n, dtype=np.int64)
    place[order] = np.arange(n)
    table = sorted((int(place[reader]), int(place[source]), cost, size) for source, reader, cost, size in links)
    transfer_ms = np.zeros(n)
    for _, source, cost, _ in table:
        transfer_ms[source] = cost
    counts = np.bincount(np.array([reader for reader, *_ in table], dtype=np.int64), minlength=n)
    names = tuple(str(number) for number in ids.tolist())
    bytes_ = np.rint(transfer_ms * TRANSFER_BYTES_PER_MS).astype(np.int64)
    graph = OpGraph(
        names=names,
        targets=("published",) * n,
        modules=tuple(modules),
        signatures=names,
        phases=np.where(backward, BACKWARD, FORWARD).astype(np.int8),
        flops=np.zeros(n),
        bytes_moved=np.zeros(n),
        parameter_bytes=np.zeros(n, dtype=np.int64),
        gradient_bytes=np.zeros(n, dtype=np.int64),
        state_bytes=np.zeros(n, dtype=np.int64),
        workspace_bytes=np.zeros(n, dtype=np.int64),
        colocation=colocation.astype(np.int32),
        tensor_op=np.arange(n, dtype=np.int32),
        tensor_output=np.zeros(n, dtype=np.int32),
        tensor_bytes=bytes_,
        tensor_shapes=tuple((b,) for b in bytes_.tolist()),
        tensor_dtypes=("uint8",) * n,
        input_offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        input_tensors=np.array([source for _, source, _, _ in table], dtype=np.int32),
        mutation_op=np.zeros(0, dtype=np.int32),
        mutation_tensor=np.zeros(0, dtype=np.int32),
        output_tensors=np.zeros(0, dtype=np.int32),
    )
    edge_bytes = np.array([size for *_, size in table], dtype=np.float64)
    for array in (ids, accelerator_ms, cpu_ms, transfer_ms, size_bytes, supported, edge_bytes):
        array.flags.writeable = False
    return DnnPartitioning(
        graph,
        ids,
        tuple(labels),
        tuple(class_ids),
        accelerator_ms,
        cpu_ms,
        transfer_ms,
        size_bytes,
        supported,
        edge_bytes,
        num_accelerators,
        num_cpus,
        capacity,
    )
