"""`Plan`: a placement with every order fixed, as it will run; `Timeline`: when each op and transfer of a step ran.

`single_device_plan` runs everything on one device; `single_device_peak_bytes` tells the memory that this takes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import allocated
from rlplace.measure.hosts.host import Host
from rlplace.say import counted


@dataclass(frozen=True, eq=False)
class Plan:
    """One global sequence of ops and transfers; every static order is this sequence, filtered.

    The order of ops on a device, of transfers on a link and of launches on a dispatcher are sub-sequences of
    `sequence`. Since it is one topological order, no set of threads that follow it can deadlock.

    Attributes:
        devices: (N,) int32, device of each op.
        transfer_tensor: (K,) int32, tensor that each transfer carries ...
        transfer_destination: (K,) int32, ... and the device it goes to (the source is the producer's device).
        sequence: (N + K,) int32, op i as `i`, transfer k as `N + k`, in order of planned start.
    """

    devices: NDArray[np.int32]
    transfer_tensor: NDArray[np.int32]
    transfer_destination: NDArray[np.int32]
    sequence: NDArray[np.int32]

    def __post_init__(self) -> None:
        for name in ("devices", "transfer_tensor", "transfer_destination", "sequence"):
            array = np.ascontiguousarray(getattr(self, name), dtype=np.int32)
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @cached_property
    def fingerprint(self) -> str:
        """Of devices, transfers and every order: equal plans run alike."""
        digest = hashlib.sha256()
        for array in (self.devices, self.transfer_tensor, self.transfer_destination, self.sequence):
            digest.update(len(array).to_bytes(8, "little") + array.tobytes())
        return digest.hexdigest()[:32]

    @property
    def num_transfers(self) -> int:
        return len(self.transfer_tensor)

    def __repr__(self) -> str:
        """In one line: that of a dataclass would print every array."""
        on = f"{counted(len(self.devices), 'op')} on {counted(len(np.unique(self.devices)), 'device')}"
        return f"Plan({on}, {counted(self.num_transfers, 'transfer')})"


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every op and transfer of one step, in seconds from its start.

    Attributes:
        op_device: (N,) int32.
        op_start_s, op_end_s: (N,) float64.
        transfer_tensor, transfer_source, transfer_destination: (K,) int32.
        transfer_start_s, transfer_end_s: (K,) float64.
        memory_time_s, memory_device, memory_bytes: (P,) float64, int32, int64: allocated bytes of a device from each
            instant on; empty where memory was not followed.
        source: `simulated` or `measured`.
    """

    op_device: NDArray[np.int32]
    op_start_s: NDArray[np.float64]
    op_end_s: NDArray[np.float64]
    transfer_tensor: NDArray[np.int32]
    transfer_source: NDArray[np.int32]
    transfer_destination: NDArray[np.int32]
    transfer_start_s: NDArray[np.float64]
    transfer_end_s: NDArray[np.float64]
    memory_time_s: NDArray[np.float64]
    memory_device: NDArray[np.int32]
    memory_bytes: NDArray[np.int64]
    source: Literal["simulated", "measured"]

    @classmethod
    def empty(cls, num_ops: int) -> Timeline:
        """A simulated step of no time in which every op is on device 0 and nothing is sent."""
        ops, none, no_times = np.zeros(num_ops), np.zeros(0, dtype=np.int32), np.zeros(0)
        return cls(
            op_device=np.zeros(num_ops, dtype=np.int32),
            op_start_s=ops,
            op_end_s=ops,
            transfer_tensor=none,
            transfer_source=none,
            transfer_destination=none,
            transfer_start_s=no_times,
            transfer_end_s=no_times,
            memory_time_s=no_times,
            memory_device=none,
            memory_bytes=np.zeros(0, dtype=np.int64),
            source="simulated",
        )

    @property
    def step_s(self) -> float:
        """Seconds from the start of the step to the end of its last op or transfer; 0 without any."""
        return float(max(self.op_end_s.max(initial=0.0), self.transfer_end_s.max(initial=0.0)))

    def __repr__(self) -> str:
        """In one line: that of a dataclass would print every array."""
        count = f"{counted(len(self.op_device), 'op')}, {counted(len(self.transfer_tensor), 'transfer')}"
        return f"Timeline({self.source}, {self.step_s * 1e3:.4g} ms, {count})"


def single_device_plan(graph: OpGraph, device: int) -> Plan:
    """Everything on one device, in index order."""
    n = graph.num_ops
    none = np.zeros(0, dtype=np.int32)
    return Plan(np.full(n, device, dtype=np.int32), none, none, np.arange(n, dtype=np.int32))


def single_device_peak_bytes(
    graph: OpGraph, host: Host, device: int, workspace_bytes: NDArray[np.int64] | None = None
) -> int:
    """Peak bytes of `single_device_plan`, context included, as the simulator counts (docs/step-time-model.md).

    Args:
        graph: whose step it is.
        host: of the device.
        device: where everything is.
        workspace_bytes: (N,) scratch of each op there; by default as the graph says.
    """
    described = host.devices[device]
    scratch = graph.workspace_bytes if workspace_bytes is None else workspace_bytes
    sizes = allocated(graph.tensor_bytes, described.memory_granularity_bytes)
    is_resident = graph.is_source[graph.tensor_op]
    held = described.context_bytes + int(sizes[is_resident].sum())
    held += int(allocated(graph.state_bytes, described.memory_granularity_bytes).sum())
    last = graph.tensor_op.astype(np.int64)  # the op after whose end each tensor is freed
    np.maximum.at(last, graph.input_tensors, graph.edge_op)
    last[graph.output_tensors] = graph.num_ops
    changes = np.zeros(graph.num_ops + 2, dtype=np.int64)
    np.add.at(changes, graph.tensor_op[~is_resident], sizes[~is_resident])
    np.subtract.at(changes, last[~is_resident] + 1, sizes[~is_resident])
    levels = np.cumsum(changes)[: graph.num_ops] + allocated(scratch, described.memory_granularity_bytes)
    return held + int(levels.max(initial=0))


def capacity_bytes(host: Host, device: int) -> int:
    """What the peak of a plan on one device may be: of a pool, what the contexts of its other devices leave."""
    described = host.devices[device]
    others = [
        other
        for other in host.devices
        if other is not described and described.memory_pool and other.memory_pool == described.memory_pool
    ]
    smallest = min(each.memory_bytes for each in (described, *others))
    return smallest - sum(other.context_bytes for other in others)
