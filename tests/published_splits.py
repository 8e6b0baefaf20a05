"""Splits of dnn-partitioning workloads, read from their files."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.files import read_json
from rlplace.graphs.formats.published import IGNORING, LARGEST_FILE_BYTES, DnnPartitioning, Id
from rlplace.graphs.opgraph import BACKWARD
from rlplace.records import read_record

Placed = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Device:
    __pydantic_config__ = IGNORING
    nodes: tuple[Id, ...]


@dataclass(frozen=True, slots=True)
class _Split:
    """The nodes on each device, under the benchmark's own names."""

    __pydantic_config__ = IGNORING
    fpgas: tuple[_Device, ...]
    cpus: tuple[_Device, ...]


def load_split(path: str | os.PathLike[str], record: DnnPartitioning) -> Placed:
    """(N,) int32: the devices that a split file gives; memory is not checked.

    Backward nodes that the file leaves out go where their colour class is.

    Raises:
        FileProblem: the file is missing or not JSON.
        InvalidValue: a field is wrong, a node is unknown, listed twice or left out, or there are more devices than the
            workload has.
    """
    where = os.fspath(path)
    split = read_record(_Split, read_json(path, largest_bytes=LARGEST_FILE_BYTES), where)
    position = {number: op for op, number in enumerate(record.ids.tolist())}
    devices = np.full(record.num_ops, -1, dtype=np.int32)
    for kind in ("fpgas", "cpus"):
        lists = [(f"{kind}[{i}].nodes", entry.nodes) for i, entry in enumerate(getattr(split, kind))]
        limit = record.num_accelerators if kind == "fpgas" else record.num_cpus
        if len(lists) > limit:
            lists = [nodes for nodes in lists if nodes[1]]
        if len(lists) > limit:
            raise InvalidValue(kind, len(lists), f"at most {limit} devices with nodes", where=where)
        for device, (field, numbers) in enumerate(lists):
            for i, number in enumerate(numbers):
                if number not in position:
                    raise InvalidValue(f"{field}[{i}]", number, "the id of a node", where=where)
                if devices[position[number]] >= 0:
                    raise InvalidValue(f"{field}[{i}]", number, "a node that is listed once", where=where)
                devices[position[number]] = device if kind == "fpgas" else record.num_accelerators
    _complete(record, devices)
    if np.any(devices < 0):
        missing = record.ids[devices < 0].tolist()
        raise InvalidValue("nodes", f"nothing for {missing[:5]}", "every node on a device", where=where)
    return devices


def _complete(record: DnnPartitioning, devices: Placed) -> None:
    """Puts backward nodes without a device where their colour class is, in place."""
    classes = record.graph.colocation
    device_of = {int(classes[op]): int(devices[op]) for op in np.flatnonzero((classes >= 0) & (devices >= 0))}
    for op in np.flatnonzero((devices < 0) & (classes >= 0) & (record.graph.phases == BACKWARD)):
        devices[op] = device_of.get(int(classes[op]), -1)
