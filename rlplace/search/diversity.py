"""`choose_diverse`: of many placements the best that are unlike each other."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

LEAST_DIFFERENCE = 0.01
"""Share of ops in which placements that are measured in one batch differ, where there is a choice."""


def choose_diverse(
    devices_KN: NDArray[np.int32],
    simulated_s_K: NDArray[np.float64],
    count: int,
    seen: Iterable[NDArray[np.int32]] = (),
) -> list[int]:
    """Rows to take, at most `count`: those unlike all before them by rank, then, if too few, the others by rank.

    A row is unlike another if at least `LEAST_DIFFERENCE` of its ops are on another device. The fastest is looked at
    first; equal step times rank by index.

    Args:
        devices_KN: (K, N) devices of ops.
        simulated_s_K: (K,) seconds that they are ranked by.
        count: how many are wanted.
        seen: placements (N,) that those taken should differ from, too.

    Example:
        >>> choose_diverse(np.array([[0, 0], [0, 1], [0, 0]]), np.array([2.0, 1.0, 1.5]), 2)
        [1, 2]
    """
    devices = _narrow(devices_KN)
    ranked = np.argsort(np.asarray(simulated_s_K), kind="stable").tolist()
    known = [_narrow(row) for row in seen]
    chosen: list[int] = []
    for row in ranked:
        if len(chosen) == count:
            break
        if all(_difference(devices[row], other) >= LEAST_DIFFERENCE for other in reversed(known)):
            known.append(devices[row])
            chosen.append(row)
    taken = set(chosen)
    return [*chosen, *(row for row in ranked if row not in taken)][:count]


def _narrow(devices: NDArray[np.int32]) -> NDArray[np.int32] | NDArray[np.uint8]:
    """The same devices in a quarter of the bytes, where their numbers allow it: comparing is all that is done."""
    devices = np.asarray(devices)
    return devices.astype(np.uint8) if devices.size and devices.max() < 256 else devices


def _difference(one: NDArray[np.integer], other: NDArray[np.integer]) -> float:
    """Share of ops that are on another device."""
    return np.count_nonzero(one != other) / max(len(one), 1)
