"""Workloads of the dnn-partitioning benchmark (Tarnawski et al., NeurIPS 2020): JSON in and out.

A workload is a graph with costs on two kinds of device, a number of equal accelerators and of CPUs, which count as one
pooled device here. Times stay in the file's milliseconds, so that a saved workload equals the loaded one, to the bit.

Layer profiles in the text format of PipeDream's profiler, which DAPPLE's are in too, as steps of K micro-batches.

One line a node, `node5 -- layer_0 -- forward_compute_time=8.07, backward_compute_time=13.4, activation_size=12976128,
parameter_size=50384896`, milliseconds and bytes of one batch, and one indented line an edge, `node4 -- node5`
(PipeDream: Narayanan et al., SOSP 2019; DAPPLE: Fan et al., PPoPP 2021, github.com/AlibabaPAI/DAPPLE).

`LayerSteps`: a training step of profiled layers, cut into micro-batches, as a graph.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, ConfigDict, Field

from rlplace.errors import FileProblem, InvalidValue, refuse_if
from rlplace.files import MOST_GRAPH_VALUES, read_json, read_plain, write_json_atomic
from rlplace.graphs.opgraph import (
    BACKWARD,
    FORWARD,
    LARGEST_COUNT,
    UPDATE,
    GradientSum,
    GraphBuilder,
    OpGraph,
    OpRow,
    gradient_sums,
    read_only,
)
from rlplace.graphs.paths import topological_order
from rlplace.records import Number, Whole, read_record, shortened
from rlplace.say import format_bytes

TRANSFER_BYTES_PER_MS = float(1 << 31) / 1e3
"""The rate that turns a transfer's milliseconds into bytes: 2 GiB/s, the benchmark's own figure."""
LARGEST_FILE_BYTES = 1 << 28
LARGEST_MS = 1e9
MOST_DEVICES = 256
LARGEST_BYTES = 1e15

Floats = NDArray[np.float64]
IGNORING = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
"""Of records in files of others, whose fields that a record does not have are ignored."""

Id = Annotated[Whole, Field(ge=-LARGEST_COUNT, le=LARGEST_COUNT)]
Milliseconds = Annotated[Number, Field(ge=0, le=LARGEST_MS)]
Bytes = Annotated[Number, Field(ge=0, le=LARGEST_BYTES)]
NumDevices = Annotated[Whole, Field(ge=0, le=MOST_DEVICES)]


Flag = Annotated[
    bool, BeforeValidator(lambda value: bool(value) if isinstance(value, int | float) and value in (0, 1) else value)
]
"""True, false, 0 or 1."""


@dataclass(frozen=True, slots=True)
class _Node:
    """A node, under the benchmark's own names: an FPGA is an accelerator."""

    __pydantic_config__ = IGNORING
    id: Id
    supportedOnFpga: Flag
    cpuLatency: Milliseconds
    fpgaLatency: Milliseconds
    isBackwardNode: Flag
    size: Bytes
    name: str = ""
    colorClass: Id | None = None
    layerId: Id | None = None


@dataclass(frozen=True, slots=True)
class _Edge:
    __pydantic_config__ = IGNORING
    sourceId: Id
    destId: Id
    cost: Milliseconds
    size: Bytes = 0.0


@dataclass(frozen=True, slots=True)
class _File:
    __pydantic_config__ = IGNORING
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
        """(N,) int32: the groups of ops that move together, numbered by first op: a colour class, or an op without
        one."""
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
        nodes = [
            {
                "id": number,
                "name": self.labels[op],
                "supportedOnFpga": bool(self.supported[op]),
                "cpuLatency": float(self.cpu_ms[op]),
                "fpgaLatency": float(self.accelerator_ms[op]),
                "isBackwardNode": bool(graph.phases[op] == BACKWARD),
                "size": float(self.size_bytes[op]),
                **({"colorClass": self.class_ids[graph.colocation[op]]} if graph.colocation[op] >= 0 else {}),
                **({"layerId": int(graph.modules[op].removeprefix(_LAYER))} if graph.modules[op] else {}),
            }
            for op, number in enumerate(ids)
        ]
        edges = [
            {"sourceId": ids[source], "destId": ids[reader], "cost": float(self.transfer_ms[source]), "size": size}
            for source, reader, size in zip(
                graph.input_tensors.tolist(), graph.edge_op.tolist(), self.edge_bytes.tolist(), strict=True
            )
        ]
        document = {
            "maxSizePerFPGA": self.capacity_bytes,
            "maxFPGAs": self.num_accelerators,
            "maxCPUs": self.num_cpus,
            "nodes": nodes,
            "edges": edges,
        }
        write_json_atomic(path, document, indent=1)


_LAYER = "layer."


def load_dnn_partitioning(path: str | os.PathLike[str]) -> DnnPartitioning:
    """The workload in a dnn-partitioning file.

    Raises:
        FileProblem: the file is missing or not JSON.
        InvalidValue: a field is missing, of the wrong type or out of range, an edge names no node, a source's edges
            differ in cost, the graph has a cycle, or a class cannot run anywhere; it names the field.
    """
    return parse_dnn_partitioning(
        read_json(path, largest_bytes=LARGEST_FILE_BYTES, most_values=MOST_GRAPH_VALUES), where=os.fspath(path)
    )


def parse_dnn_partitioning(document: object, *, where: str = "workload") -> DnnPartitioning:
    """The workload in a parsed document; see `load_dnn_partitioning`."""
    file = read_record(_File, document, where)
    refuse_if(file.maxFPGAs + file.maxCPUs == 0, "maxFPGAs", 0, "at least one accelerator or CPU", where=where)
    nodes = file.nodes
    position: dict[int, int] = {}
    for i, node in enumerate(nodes):
        refuse_if(
            position.setdefault(node.id, i) != i, f"nodes[{i}].id", node.id, "an id that no other node has", where=where
        )
    transfer_ms = _check_edges(file.edges, position, where)
    links = [(position[edge.sourceId], position[edge.destId]) for edge in file.edges]
    order = topological_order(len(nodes), dict.fromkeys(links))
    if len(order) < len(nodes):
        stuck = nodes[min(set(range(len(nodes))) - set(order))].id
        raise InvalidValue("edges", f"a cycle that node {stuck} is on or behind", "a graph without cycles", where=where)
    lost = next((i for i in order if not nodes[i].supportedOnFpga), None)
    refuse_if(
        lost is not None and not file.maxCPUs,
        f"nodes[{lost}].supportedOnFpga",
        False,
        "true, as there are no CPUs",
        where=where,
    )
    return _built(file, links, order, transfer_ms)


def _check_edges(edges: Sequence[_Edge], position: Mapping[int, int], where: str) -> dict[int, float]:
    """The cost of each node's edges, in ms."""
    cost_ms: dict[int, float] = {}
    for i, edge in enumerate(edges):
        for field, end in (("sourceId", edge.sourceId), ("destId", edge.destId)):
            refuse_if(end not in position, f"edges[{i}].{field}", end, "the id of a node", where=where)
        first = cost_ms.setdefault(edge.sourceId, edge.cost)
        refuse_if(
            not math.isclose(first, edge.cost, rel_tol=1e-9, abs_tol=1e-12),
            f"edges[{i}].cost",
            edge.cost,
            f"{first!r}, the cost of the source's other edges",
            where=where,
        )
    return cost_ms


def _built(
    file: _File, links: Sequence[tuple[int, int]], order: Sequence[int], cost_ms: Mapping[int, float]
) -> DnnPartitioning:
    """The workload, its nodes in `order`; `links` are the ends of each edge, an edge that is given twice is one."""
    place = {old: op for op, old in enumerate(order)}
    pairs = [*zip(links, file.edges, strict=True)]
    edge_bytes = {(place[reader], place[source]): edge.size for (source, reader), edge in reversed(pairs)}
    reads: list[list[int]] = [[] for _ in order]
    for reader, source in sorted(edge_bytes):
        reads[reader].append(source)
    nodes = [file.nodes[i] for i in order]
    classes = dict.fromkeys(node.colorClass for node in nodes if node.colorClass is not None)
    numbers = {color: number for number, color in enumerate(classes)}
    transfer_ms = read_only([cost_ms.get(node.id, 0.0) for node in nodes], np.float64)
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
    total = format_bytes(sum(node.size for node in nodes))
    note = f"sizes of nodes ({total} in all) count as memory under the objectives max-load and piece-latency alone."
    return DnnPartitioning(
        graph=replace(builder.graph(), notes=(note,) if any(node.size for node in nodes) else ()),
        ids=read_only([node.id for node in nodes], np.int64),
        labels=tuple(node.name for node in nodes),
        class_ids=tuple(classes),
        accelerator_ms=read_only([node.fpgaLatency for node in nodes], np.float64),
        cpu_ms=read_only([node.cpuLatency for node in nodes], np.float64),
        transfer_ms=transfer_ms,
        size_bytes=read_only([node.size for node in nodes], np.float64),
        supported=read_only([node.supportedOnFpga for node in nodes], np.bool_),
        edge_bytes=read_only([edge_bytes[link] for link in sorted(edge_bytes)], np.float64),
        num_accelerators=file.maxFPGAs,
        num_cpus=file.maxCPUs,
        capacity_bytes=file.maxSizePerFPGA,
    )


MOST_MICRO_BATCHES = 4096

LONGEST_LINE = 1 << 16
FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_FIELD = re.compile(r"([^=,\[\]]*)=([^,\[\]]*(?:\[[^\[\]]*\]\s*)?)(?:,|$)")
"""Linear: no two neighbours match the same character. Blanks around names and values are stripped."""


def load_pipedream(path: str | os.PathLike[str], micro_batches: int = 1) -> OpGraph:
    """The step of a profile's model on `micro_batches` times the batch that it was profiled with.

    Every layer has a forward op for each micro-batch, and a backward op where it takes time or a gradient is needed:
    for its own parameters or those of a layer before it. A forward op reads its parameter and the outputs of the layers
    before it. A backward op reads the output of its forward op, its parameter and the gradients from the layers after
    it, and gives a gradient of that size to each layer before it that has a backward op, and its parameter's. Gradients
    of micro-batches are added by `gradient_sums`. Sums and updates take no time; updates keep no state.

    Args:
        path: the file.
        micro_batches: K; a step of one micro-batch is not cut.

    Raises:
        FileProblem: the file is missing, or a line is neither a node nor an edge.
        InvalidValue: a field is missing or wrong, an edge names no node, or the graph has a cycle.
    """
    return _steps(path, micro_batches).graph()


def pipedream_times_s(path: str | os.PathLike[str], micro_batches: int = 1) -> NDArray[np.float64]:
    """(N,) float64 seconds of the ops of `load_pipedream`; raises as it does."""
    return np.array(_steps(path, micro_batches).seconds)


def read_layers(path: str | os.PathLike[str]) -> list[Layer]:
    """The layers of a profile, each after those that it reads; raises as `load_pipedream`."""
    layers: dict[str, Layer] = {}
    edges: list[tuple[str, str, str]] = []
    for number, line in enumerate(_lines(Path(path)), start=1):
        if not line.strip():
            continue
        if len(line) > LONGEST_LINE:
            raise FileProblem(path, f"line {number} has {len(line)} characters, expected at most {LONGEST_LINE}.")
        where, parts = f"{path}, line {number}", [part.strip() for part in line.strip().split(" -- ")]
        if len(parts) == 2 and all(parts) and "=" not in line:
            edges.append((parts[0], parts[1], where))
        elif len(parts) in (3, 4) and parts[0] and (len(parts) == 3 or parts[3].startswith("stage_id=")):
            layer = _read_layer(parts[0], parts[1], parts[2], where)
            if layers.setdefault(parts[0], layer) is not layer:
                raise InvalidValue("node", parts[0], "an id that no other node has", where=where)
        else:
            raise FileProblem(
                path,
                f"line {number} is {shortened(line.strip())!r}, expected `ID -- NAME -- {FIELDS[0]}=..., ...` for a "
                "node, or `ID -- ID` for an edge.",
            )
    if not layers:
        raise FileProblem(path, "no node, expected lines of `ID -- NAME -- forward_compute_time=..., ...`.")
    return _ordered(layers, edges, str(path))


def _steps(path: str | os.PathLike[str], micro_batches: int) -> LayerSteps:
    refuse_if(
        not 1 <= micro_batches <= MOST_MICRO_BATCHES,
        "micro_batches",
        micro_batches,
        f"1..{MOST_MICRO_BATCHES}",
        where=str(path),
    )
    return LayerSteps(read_layers(path), micro_batches)


def _lines(path: Path) -> list[str]:
    try:
        content = read_plain(path, largest_bytes=1 << 26, holds="a profile", follows_links=True)
        return content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise FileProblem(
            path, f"not UTF-8 text ({error.reason} at byte {error.start}), expected a profile."
        ) from error


def _read_layer(node: str, name: str, text: str, where: str) -> Layer:
    """The layer that a line describes, without its inputs."""
    fields: dict[str, str] = {}
    end = 0
    while end < len(text):
        match = _FIELD.match(text, end)
        field = match[1].strip() if match else ""
        if match is None or field not in FIELDS or field in fields:
            raise InvalidValue(
                "fields", shortened(text[end:].strip()), f"{', '.join(FIELDS)}, each once as NAME=NUMBER", where=where
            )
        fields[field] = match[2].strip()
        end = match.end()
    if missing := next((field for field in FIELDS if field not in fields), None):
        raise InvalidValue(missing, "missing", "a field of that name", where=where)
    forward, backward, activation, parameter = FIELDS
    sizes = fields[activation]
    outputs = sizes[1:-1].split(";") if sizes.startswith("[") else [sizes]
    return Layer(
        _module(node, name),
        _number(fields[forward], forward, LARGEST_MS, where) / 1e3,
        _number(fields[backward], backward, LARGEST_MS, where) / 1e3,
        sum(math.ceil(_number(output, activation, LARGEST_COUNT, where)) for output in outputs),
        math.ceil(_number(fields[parameter], parameter, LARGEST_COUNT, where)),
    )


def _number(text: str, field: str, largest: float, where: str) -> float:
    with suppress(ValueError):
        if 0 <= (value := float(text)) <= largest:
            return value
    raise InvalidValue(field, shortened(text.strip()), f"a number in 0..{largest:g}", where=where)


def _ordered(layers: dict[str, Layer], edges: list[tuple[str, str, str]], path: str) -> list[Layer]:
    """The layers in a topological order, with their inputs."""
    place = {name: index for index, name in enumerate(layers)}
    links: set[tuple[int, int]] = set()
    for source, reader, where in edges:
        for end in (source, reader):
            refuse_if(end not in place, "edge", shortened(end), "the id of a node", where=where)
        links.add((place[source], place[reader]))
    order = topological_order(len(layers), links)
    if len(order) < len(layers):
        stuck = list(layers)[min(set(range(len(layers))) - set(order))]
        raise InvalidValue("edges", f"a cycle that {stuck} is on or behind", "a graph without cycles", where=path)
    new = {old: index for index, old in enumerate(order)}
    reads: list[list[int]] = [[] for _ in order]
    for old_source, old_reader in links:
        reads[new[old_reader]].append(new[old_source])
    found = list(layers.values())
    return [replace(found[old], reads=tuple(sorted(read))) for old, read in zip(order, reads, strict=True)]


def _module(node: str, name: str) -> str:
    """`node7.LSTM` for node7, `LSTM(2048, 1024)`: unique, and a path of plain words."""
    return ".".join(filter(None, (re.sub(r"\W+", "_", text).strip("_") for text in (node, name.partition("(")[0]))))


FORWARD_TARGET, BACKWARD_TARGET, SUM_TARGET = "layer.forward", "layer.backward", "aten.add.Tensor"


@dataclass(frozen=True)
class Layer:
    """The profile of a layer, for one batch.

    Attributes:
        module: a path that no other layer has.
        forward_s: seconds of its forward.
        backward_s: seconds of its backward.
        activation_bytes: of its output.
        parameter_bytes: its parameters, and their gradients.
        reads: layers whose outputs it reads, ascending; all of them come before it.
    """

    module: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    parameter_bytes: int
    reads: tuple[int, ...] = ()


class LayerSteps(GraphBuilder):
    """Builds the graph: parameters, then micro-batch by micro-batch forward and backward, then sums and updates.

    Args:
        layers: each after those that it reads.
        micro_batches: K.

    Attributes:
        seconds: of each op.
    """

    def __init__(self, layers: Sequence[Layer], micro_batches: int) -> None:
        super().__init__()
        self._layers, self._count = layers, micro_batches
        self.seconds: list[float] = []
        self._parameters: dict[int, int] = {}  # tensor of each layer that has one
        self._has_backward: list[bool] = []
        for layer in layers:
            is_reached = any(self._has_backward[source] for source in layer.reads)
            self._has_backward.append(is_reached or layer.parameter_bytes > 0 or layer.backward_s > 0)
        count = micro_batches
        for index, layer in enumerate(layers):
            if size := layer.parameter_bytes:
                row = OpRow(layer.module, "parameter", layer.module, parameter_bytes=size, gradient_bytes=size)
                (self._parameters[index],) = self._add(row, [size])
        largest = sorted(self._parameters, key=lambda index: -layers[index].parameter_bytes)
        sums = {index: gradient_sums(count, turn) for turn, index in enumerate(largest)}
        parts: dict[int, list[int]] = {index: [-1] * (2 * count - 1) for index in self._parameters}
        for micro_batch in range(count):
            self._backward(micro_batch, self._forward(micro_batch), parts)
            for index in self._parameters:
                for number, one in enumerate(sums[index][:-1]):
                    if one.last == micro_batch:
                        parts[index][count + number] = self._sum(index, f"sum{number}", one, parts[index])
        for index, parameter in self._parameters.items():
            total = self._sum(index, "gradient", sums[index][-1], parts[index]) if count > 1 else parts[index][0]
            name, update, home = layers[index].module, len(self.ops), self.tensors[parameter].op
            self._add(OpRow(f"{name}.update", "update.sgd", name, UPDATE, reads=[parameter, total]), [])
            self.mutations.append((update, parameter))
            self.together.append((home, self.tensors[total].op, update) if count > 1 else (home, update))

    def _forward(self, micro_batch: int) -> list[int]:
        """The output of each layer."""
        outputs: list[int] = []
        for index, layer in enumerate(self._layers):
            read = [outputs[source] for source in layer.reads]
            read += [self._parameters[index]] if index in self._parameters else []
            row = self._row(layer, "forward", FORWARD_TARGET, FORWARD, micro_batch, read)
            outputs += self._add(row, [layer.activation_bytes], layer.forward_s)
        return outputs

    def _backward(self, micro_batch: int, outputs: Sequence[int], parts: dict[int, list[int]]) -> None:
        """Adds the backward ops and keeps the gradients of parameters in `parts`."""
        gradients: list[list[int]] = [[] for _ in outputs]
        for index in range(len(outputs) - 1, -1, -1):
            if not self._has_backward[index]:
                continue
            layer = self._layers[index]
            wanted = [source for source in layer.reads if self._has_backward[source]]
            given = [self._layers[source].activation_bytes for source in wanted]
            read = [outputs[index], *gradients[index]]
            if index in self._parameters:
                read.append(self._parameters[index])
                given.append(layer.parameter_bytes)
            row = self._row(layer, "backward", BACKWARD_TARGET, BACKWARD, micro_batch, read)
            made = self._add(row, given, layer.backward_s)
            for source, gradient in zip(wanted, made, strict=False):
                gradients[source].append(gradient)
            if index in self._parameters:
                parts[index][micro_batch] = made[-1]

    def _sum(self, index: int, word: str, one: GradientSum, parts: Sequence[int]) -> int:
        layer, read = self._layers[index], [parts[one.left], parts[one.right]]
        row = OpRow(
            f"{layer.module}.{word}", SUM_TARGET, layer.module, BACKWARD, reads=read, micro_batch=one.micro_batch
        )
        return self._add(row, [layer.parameter_bytes])[0]

    def _row(self, layer: Layer, word: str, target: str, phase: int, micro_batch: int, read: Sequence[int]) -> OpRow:
        """An op of a micro-batch, which a step of a single one does not name."""
        name, number = (f"{word}.{micro_batch}", micro_batch) if self._count > 1 else (word, -1)
        return OpRow(f"{layer.module}.{name}", target, layer.module, phase, reads=read, micro_batch=number)

    def _add(self, row: OpRow, outputs: Sequence[int], seconds: float = 0.0) -> list[int]:
        """The tensors of a new op."""
        made = self.add_outputs(self.add(row), outputs)
        row.signature = f"{row.target}({row.module})"
        row.bytes_moved = float(self.bytes_of([*row.reads, *made]))
        self.seconds.append(seconds)
        return made
