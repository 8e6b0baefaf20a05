"""Workloads of the dnn-partitioning benchmark (Tarnawski et al., NeurIPS 2020): JSON in and out.

A workload is a graph with costs on two kinds of device, a number of equal accelerators and of CPUs, which count as one
pooled device here. Times stay in the file's milliseconds, so that what is saved is what was loaded, to the bit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from rlplace.errors import InvalidValue
from rlplace.files import read_json, write_json_atomic
from rlplace.graphs.graph_builder import GraphBuilder, OpRow
from rlplace.graphs.opgraph import BACKWARD, FORWARD, LARGEST_COUNT, OpGraph
from rlplace.graphs.paths import topological_order
from rlplace.records import Number, Whole, described, read_record, record

TRANSFER_BYTES_PER_MS = float(1 << 31) / 1e3
"""What a transfer's milliseconds are turned into bytes with: 2 GiB/s, the benchmark's own figure."""
LARGEST_FILE_BYTES = 1 << 28
LARGEST_MS = 1e9
MOST_DEVICES = 256
LARGEST_BYTES = 1e15

Floats = NDArray[np.float64]
T = TypeVar("T")

Id = Annotated[Whole, Field(ge=-LARGEST_COUNT, le=LARGEST_COUNT)]
Milliseconds = Annotated[Number, Field(ge=0, le=LARGEST_MS)]
Bytes = Annotated[Number, Field(ge=0, le=LARGEST_BYTES)]
NumDevices = Annotated[Whole, Field(ge=0, le=MOST_DEVICES)]


def _flag(value: object) -> object:
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


Flag = Annotated[bool, BeforeValidator(_flag)]
"""True, false, 0 or 1."""


@record(frozen=True, slots=True)
class _Node:
    """A node, under the benchmark's own names: an FPGA is an accelerator."""

    id: Id
    supportedOnFpga: Flag
    cpuLatency: Milliseconds
    fpgaLatency: Milliseconds
    isBackwardNode: Flag
    size: Bytes
    name: str = ""
    colorClass: Id | None = None
    layerId: Id | None = None


@record(frozen=True, slots=True)
class _Edge:
    sourceId: Id
    destId: Id
    cost: Milliseconds
    size: Bytes = 0.0


@record(frozen=True, slots=True)
class _File:
    maxFPGAs: NumDevices
    maxCPUs: NumDevices
    maxSizePerFPGA: Bytes
    nodes: Annotated[tuple[_Node, ...], Field(min_length=1)]
    edges: tuple[_Edge, ...]


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
        keys = [class_ if class_ >= 0 else -1 - op for op, class_ in enumerate(self.graph.colocation.tolist())]
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
    file = read_known(_File, document, where, nodes=_Node, edges=_Edge)
    if file.maxFPGAs + file.maxCPUs == 0:
        raise InvalidValue("maxFPGAs", 0, "at least one accelerator or CPU", where=where)
    nodes = file.nodes
    position: dict[int, int] = {}
    for i, node in enumerate(nodes):
        if position.setdefault(node.id, i) != i:
            raise InvalidValue(f"nodes[{i}].id", node.id, "an id that no other node has", where=where)
    transfer_ms = _check_edges(file.edges, position, where)
    links = [(position[edge.sourceId], position[edge.destId]) for edge in file.edges]
    order = topological_order(len(nodes), dict.fromkeys(links))
    if len(order) < len(nodes):
        stuck = nodes[min(set(range(len(nodes))) - set(order))].id
        raise InvalidValue("edges", f"a cycle that node {stuck} is on or behind", "a graph without cycles", where=where)
    lost = next((i for i in order if not nodes[i].supportedOnFpga), None)
    if lost is not None and not file.maxCPUs:
        raise InvalidValue(f"nodes[{lost}].supportedOnFpga", False, "true, as there are no CPUs", where=where)
    return _built(file, links, order, transfer_ms)


def read_known(kind: type[T], data: object, where: str, **rows: type) -> T:
    """A record from parsed JSON of others, whose fields that it does not have are ignored.

    Args:
        kind: the record.
        data: what the file holds.
        where: the file, for messages.
        **rows: by field that holds a list of records, their kind.

    Raises:
        InvalidValue: a field is missing or wrong; names it.
    """
    if not isinstance(data, dict):
        raise InvalidValue("file", described(data), "a JSON object", where=where)
    found = _known(kind, data)
    found |= {
        name: [_known(row, each) for each in found[name]]
        for name, row in rows.items()
        if isinstance(found.get(name), list)
    }
    return read_record(kind, found, where)


def _known(kind: Any, row: Any) -> Any:
    return {each.name: row[each.name] for each in fields(kind) if each.name in row} if isinstance(row, dict) else row


def _check_edges(edges: Sequence[_Edge], position: Mapping[int, int], where: str) -> dict[int, float]:
    """The cost of each node's edges, in ms.

    Raises:
        InvalidValue: an end is no node, or edges of one source differ in cost.
    """
    cost_ms: dict[int, float] = {}
    for i, edge in enumerate(edges):
        for field, end in (("sourceId", edge.sourceId), ("destId", edge.destId)):
            if end not in position:
                raise InvalidValue(f"edges[{i}].{field}", end, "the id of a node", where=where)
        first = cost_ms.setdefault(edge.sourceId, edge.cost)
        if not math.isclose(first, edge.cost, rel_tol=1e-9, abs_tol=1e-12):
            raise InvalidValue(
                f"edges[{i}].cost", edge.cost, f"{first!r}, the cost of the source's other edges", where=where
            )
    return cost_ms


def _built(
    file: _File, links: Sequence[tuple[int, int]], order: Sequence[int], cost_ms: Mapping[int, float]
) -> DnnPartitioning:
    """The workload, its nodes in `order`; `links` are the ends of each edge, an edge that is given twice is one."""
    place = {old: op for op, old in enumerate(order)}
    edge_bytes: dict[tuple[int, int], float] = {}  # by reader and source
    for (source, reader), edge in zip(links, file.edges, strict=True):
        edge_bytes.setdefault((place[reader], place[source]), edge.size)
    reads: list[list[int]] = [[] for _ in order]
    for reader, source in sorted(edge_bytes):
        reads[reader].append(source)
    nodes = [file.nodes[i] for i in order]
    classes = dict.fromkeys(node.colorClass for node in nodes if node.colorClass is not None)
    numbers = {color: number for number, color in enumerate(classes)}
    transfer_ms = _column([cost_ms.get(node.id, 0.0) for node in nodes])
    builder = GraphBuilder()
    for node, read, milliseconds in zip(nodes, reads, transfer_ms.tolist(), strict=True):
        row = OpRow(
            str(node.id),
            "published",
            "" if node.layerId is None else f"{_LAYER}{node.layerId}",
            BACKWARD if node.isBackwardNode else FORWARD,
            str(node.id),
            read,
            colocation=-1 if node.colorClass is None else numbers[node.colorClass],
        )
        builder.add_outputs(builder.add(row), [round(milliseconds * TRANSFER_BYTES_PER_MS)])
    return DnnPartitioning(
        graph=builder.graph(),
        ids=_column([node.id for node in nodes], np.int64),
        labels=tuple(node.name for node in nodes),
        class_ids=tuple(classes),
        accelerator_ms=_column([node.fpgaLatency for node in nodes]),
        cpu_ms=_column([node.cpuLatency for node in nodes]),
        transfer_ms=transfer_ms,
        size_bytes=_column([node.size for node in nodes]),
        supported=_column([node.supportedOnFpga for node in nodes], np.bool_),
        edge_bytes=_column([edge_bytes[link] for link in sorted(edge_bytes)]),
        num_accelerators=file.maxFPGAs,
        num_cpus=file.maxCPUs,
        capacity_bytes=file.maxSizePerFPGA,
    )


def _column(values: Sequence[Any], dtype: Any = np.float64) -> NDArray[Any]:
    column = np.array(values, dtype=dtype)
    column.flags.writeable = False
    return column
