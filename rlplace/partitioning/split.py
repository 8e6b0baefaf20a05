"""Splits of a dnn-partitioning workload: which nodes are on which device, JSON in and out."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.files import read_json, write_json_atomic
from rlplace.graphs.formats.dnn_fields import FieldReader
from rlplace.graphs.formats.dnn_partitioning import LARGEST_FILE_BYTES, DnnPartitioning
from rlplace.graphs.opgraph import BACKWARD

Placed = NDArray[np.int32]


def load_split(path: str | os.PathLike[str], record: DnnPartitioning) -> Placed:
    """(N,) int32: the devices that a split file gives; memory is not checked.

    Backward nodes that the file leaves out go where their colour class is.

    Raises:
        FileProblem: the file is missing or not JSON.
        InvalidValue: a field is wrong, a node is unknown, listed twice or left out, or there are more devices than the
            workload has.
    """
    check = FieldReader(os.fspath(path))
    top = check.mapping(read_json(path, largest_bytes=LARGEST_FILE_BYTES), "the document")
    position = {number: op for op, number in enumerate(record.ids.tolist())}
    devices = np.full(record.num_ops, -1, dtype=np.int32)
    for kind in ("fpgas", "cpus"):
        lists = _node_lists(check, top, kind)
        limit = record.num_accelerators if kind == "fpgas" else record.num_cpus
        if len(lists) > limit:
            lists = [nodes for nodes in lists if nodes[1]]
        if len(lists) > limit:
            raise InvalidValue(kind, len(lists), f"at most {limit} devices with nodes", where=check.where)
        for device, (prefix, numbers) in enumerate(lists):
            for i, number in enumerate(numbers):
                if number not in position:
                    raise InvalidValue(f"{prefix}[{i}]", number, "the id of a node", where=check.where)
                if devices[position[number]] >= 0:
                    raise InvalidValue(f"{prefix}[{i}]", number, "a node that is listed once", where=check.where)
                devices[position[number]] = device if kind == "fpgas" else record.num_accelerators
    _complete(record, devices)
    if np.any(devices < 0):
        missing = record.ids[devices < 0].tolist()
        raise InvalidValue("nodes", f"nothing for {missing[:5]}", "every node on a device", where=check.where)
    return devices


def _node_lists(check: FieldReader, top: dict[str, Any], kind: str) -> list[tuple[str, list[int]]]:
    lists = []
    for i, entry in enumerate(check.sequence(top, kind, "")):
        prefix = f"{kind}[{i}]."
        numbers = check.sequence(check.mapping(entry, f"{kind}[{i}]"), "nodes", prefix)
        keyed = {str(k): number for k, number in enumerate(numbers)}
        lists.append((f"{prefix}nodes", [check.integer(keyed, key, f"{prefix}nodes.") for key in keyed]))
    return lists


def _complete(record: DnnPartitioning, devices: Placed) -> None:
    """Puts backward nodes without a device where their colour class is, in place."""
    classes = record.graph.colocation
    device_of = {int(classes[op]): int(devices[op]) for op in np.flatnonzero((classes >= 0) & (devices >= 0))}
    for op in np.flatnonzero((devices < 0) & (classes >= 0) & (record.graph.phases == BACKWARD)):
        devices[op] = device_of.get(int(classes[op]), -1)


def save_split(path: str | os.PathLike[str], record: DnnPartitioning, devices: Placed) -> None:
    """Writes the devices (N,) as a split file: one entry an accelerator, one for the pooled CPUs.

    Raises:
        FileProblem: the file cannot be written.
    """
    lists = [sorted(record.ids[np.asarray(devices) == device].tolist()) for device in range(record.num_devices)]
    entries = [{"nodes": nodes} for nodes in lists]
    count = record.num_accelerators
    write_json_atomic(path, {"cpus": entries[count:], "fpgas": entries[:count]}, indent=1)
