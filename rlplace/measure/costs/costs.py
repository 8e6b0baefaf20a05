"""`Costs`: seconds of every op on every device, and who says so.

`allocated`: what sizes take in a memory that hands out whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlplace.decode import described
from rlplace.errors import InvalidValue
from rlplace.measure.hosts.host import Host
from rlplace.say import counted

LARGEST = 1 << 50
"""Bytes of scratch beyond which a file is not believed."""

CostSource = Literal["estimated", "profiled", "given"]


@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds per (op, device).

    Attributes:
        op_time_s: (N, D) float64, >= 0; launching (`Host.dispatch_s`) not included.
        source: `estimated` (roofline), `profiled` (measured) or `given` (by the graph file).
        workspace_bytes: (N, D) int64, >= 0: scratch that each op was seen to take on each device while it ran; None:
            as the graph says.
    """

    op_time_s: NDArray[np.float64]
    source: CostSource
    workspace_bytes: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        op_time_s = np.ascontiguousarray(self.op_time_s, dtype=np.float64)
        op_time_s.flags.writeable = False
        object.__setattr__(self, "op_time_s", op_time_s)
        if op_time_s.ndim != 2:
            raise InvalidValue("op_time_s", op_time_s.shape, "an array of shape (N, D)", where="costs")
        if not np.all(np.isfinite(op_time_s)) or np.any(op_time_s < 0):
            raise InvalidValue("op_time_s", "a negative or non-finite entry", "finite seconds >= 0", where="costs")
        if self.workspace_bytes is not None:
            object.__setattr__(self, "workspace_bytes", _checked_workspaces(self.workspace_bytes, op_time_s.shape))

    @staticmethod
    def given(times_s: NDArray[np.float64], host: Host) -> Costs:
        """The times (N,) that a graph file gives its ops, the same on every device."""
        return Costs(np.repeat(times_s[:, None], host.num_devices, axis=1), "given")

    def __repr__(self) -> str:
        """In one line: that of a dataclass would print every array."""
        num_ops, num_devices = self.op_time_s.shape
        total_s = self.op_time_s.sum(axis=0)
        whole = f"{total_s.min() * 1e3:.4g} to {total_s.max() * 1e3:.4g} ms in all"
        return f"Costs({self.source}, {counted(num_ops, 'op')} on {counted(num_devices, 'device')}, {whole})"


def read_workspaces(rows: object, shape: tuple[int, ...], where: str) -> NDArray[np.int64] | None:
    """`Costs.workspace_bytes` as a file keeps it: rows of whole numbers, or None where nothing was seen.

    Args:
        rows: of the file.
        shape: (N, D).
        where: the file.

    Raises:
        InvalidValue: anything else.
    """
    if rows is None:
        return None
    expected = f"{shape[0]} rows of {shape[1]} whole numbers >= 0, or null"
    is_table = isinstance(rows, list) and len(rows) == shape[0]
    for row in rows if isinstance(rows, list) and is_table else ():
        is_table = is_table and isinstance(row, list) and len(row) == shape[1]
        is_table = is_table and all(type(value) is int and 0 <= value <= LARGEST for value in row)
    if not is_table:
        raise InvalidValue("costs.workspace_bytes", described(rows), expected, where=where)
    return np.array(rows, dtype=np.int64).reshape(shape)


def _checked_workspaces(workspace_bytes: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[np.int64]:
    table = np.array(workspace_bytes, dtype=np.int64)
    if table.shape != shape:
        raise InvalidValue("workspace_bytes", table.shape, f"shape {shape}, as of `op_time_s`", where="costs")
    if np.any(table < 0):
        raise InvalidValue("workspace_bytes", int(table.min()), "bytes >= 0", where="costs")
    table.flags.writeable = False
    return table


Sizes = NDArray[np.int64]


def allocated(num_bytes: Sizes, granularity: int | Sizes) -> Sizes:
    """The sizes in bytes, each rounded up to a multiple of `granularity` (`Device.memory_granularity_bytes`).

    >>> allocated(np.array([0, 1, 512, 513]), 512).tolist()
    [0, 512, 512, 1024]
    """
    rounded: Sizes = -(-num_bytes // granularity) * granularity
    return rounded
