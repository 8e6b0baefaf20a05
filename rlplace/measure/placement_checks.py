"""What is wrong with the devices that somebody gives ops or groups, in words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.host import Host


def check_range(devices: NDArray[Any], length: int, num_devices: int, *, one: str, where: str) -> NDArray[Any]:
    """`devices` (..., length) as an array of integers that name devices of a host.

    Args:
        devices: given by somebody.
        length: of the last axis.
        num_devices: of the host.
        one: what each of them is the device of, for messages.
        where: who made them, for messages.

    Raises:
        InvalidValue: wrong length, no integers, or a device out of range.
    """
    devices = np.asarray(devices)
    if devices.shape[-1:] != (length,):
        raise InvalidValue("length", devices.shape, f"{length} devices, one for each {one}", where=where)
    if not np.issubdtype(devices.dtype, np.integer):
        raise InvalidValue("dtype", str(devices.dtype), "integers, indices of devices", where=where)
    if devices.size and (devices.min() < 0 or devices.max() >= num_devices):
        bad = int(devices.min()) if devices.min() < 0 else int(devices.max())
        raise InvalidValue("device", bad, f"0..{num_devices - 1}", where=where)
    return devices


def check_together(
    devices: NDArray[np.integer], graph: OpGraph, members: NDArray[np.int64], leaders: NDArray[np.int64]
) -> None:
    """Refuses a placement that parts ops of one co-location class.

    Args:
        devices: (..., N).
        graph: names them.
        members: ops of classes, but for the first of each.
        leaders: that first one.

    Raises:
        InvalidValue: one is elsewhere than its leader.
    """
    wrong = devices[..., members] != devices[..., leaders]
    if np.any(wrong):
        place = int(np.argmax(wrong.reshape(-1, len(members)).any(axis=0)))
        op, partner = int(members[place]), int(leaders[place])
        raise InvalidValue(
            "device",
            f"op {graph.names[op]!r} away from {graph.names[partner]!r}",
            "one device for ops that live together (a parameter, its gradient and its update)",
            where="placement",
        )


def check_allowed(devices: NDArray[np.integer], graph: OpGraph, host: Host, allowed: NDArray[np.bool_]) -> None:
    """Refuses a placement with an op where it may not run.

    Args:
        devices: (..., N).
        graph: names ops.
        host: names devices.
        allowed: (N, D) bool.

    Raises:
        InvalidValue: one is barred from its device.
    """
    barred = ~allowed[np.arange(graph.num_ops), devices]
    if np.any(barred):
        rows = barred.reshape(-1, graph.num_ops)
        op = int(np.argmax(rows.any(axis=0)))
        found = int(devices.reshape(-1, graph.num_ops)[:, op][rows[:, op]][0])
        may = [device.name for device, is_allowed in zip(host.devices, allowed[op], strict=True) if is_allowed]
        raise InvalidValue(
            "device",
            f"op {graph.names[op]!r} on {host.devices[found].name!r}",
            f"one where it may run: {', '.join(may)}",
            where="placement",
        )
