"""Placements of units without search: one device, blocks of a topological order, greedy; each fits where it can."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.partitioning.searches import Search

Ints = NDArray[np.int32]


def single(search: Search) -> Ints:
    """(B, U): everything on the first accelerator, and on the CPUs, as far as allowed."""
    units = search.units
    rows = []
    if units.record.num_accelerators and units.supported.all():
        rows.append(np.zeros(units.num_units, dtype=np.int32))
    if units.record.num_cpus:
        rows.append(np.full(units.num_units, units.record.num_accelerators, dtype=np.int32))
    return np.array(rows, dtype=np.int32).reshape(-1, units.num_units)


def blocks(search: Search) -> Ints:
    """(B, U): the topological order cut into 2, 3, ..., K blocks of equal work, and of equal memory.

    What an accelerator cannot run is on the CPUs.
    """
    units = search.units
    count = units.record.num_accelerators
    rows = []
    for weight in (units.accelerator_ms, units.size_bytes):
        ordered = weight[search.order]
        middle = (np.cumsum(ordered) - ordered / 2) / max(float(ordered.sum()), 1e-30)
        for parts in range(2, count + 1):
            row = np.empty(units.num_units, dtype=np.int32)
            row[search.order] = np.minimum((middle * parts).astype(np.int32), parts - 1)
            row[~units.supported] = count
            rows.append(row)
    return np.array(rows, dtype=np.int32).reshape(-1, units.num_units)


def greedy(search: Search) -> Ints:
    """(B, U): accelerators filled one after the other, up to their memory and to a share of the work.

    Units come in topological order; one that does not fit on the accelerator being filled opens the next; after the
    last it goes to the first with room, and to the CPUs where there is none. The share runs from an even one to all
    work, so that few and many accelerators are tried. This is the latency greedy of Tarnawski et al. (2020), with a cap
    on work.
    """
    units = search.units
    shares = units.accelerator_ms.sum() / np.arange(1, max(units.record.num_accelerators, 1) + 1)
    rows = [_fill(search, share, search.order) for share in (*shares, *(1.05 * shares))]
    rows.append(_fill(search, 0.0, np.argsort(-units.size_bytes, kind="stable").astype(np.int32)))
    return np.array([row for row in rows if row is not None], dtype=np.int32).reshape(-1, units.num_units)


def _fill(search: Search, share_ms: float, order: Ints) -> Ints | None:
    units, record = search.units, search.units.record
    count, capacity = record.num_accelerators, record.capacity_bytes
    held, work = [0.0] * count, 0.0
    row, device = np.empty(units.num_units, dtype=np.int32), 0
    for unit in order.tolist():
        size, ms = float(units.size_bytes[unit]), float(units.accelerator_ms[unit])
        target = count
        if units.supported[unit] and count:
            if device < count - 1 and (held[device] + size > capacity or (work > 0 and work + ms / 2 > share_ms)):
                device, work = device + 1, 0.0
            room = (other for other in (device, *range(count)) if held[other] + size <= capacity)
            target = next(room, count)
        if target == count and not record.num_cpus:
            return None
        if target < count:
            held[target] += size
            work += ms
        row[unit] = target
    return row
