"""What an in-place update waits for: the other readers, the transfers and the earlier updates of its tensor."""

from __future__ import annotations

import numpy as np
from numba import njit

from rlplace.measure.compiled import HANDOVER, Updates


@njit(cache=True, nogil=True)
def is_updater(u: Updates, op, tensor):  # type: ignore[no-untyped-def]
    """Whether the op updates the tensor in place."""
    for a in range(u.updater_offsets[tensor], u.updater_offsets[tensor + 1]):
        if u.updater_ops[a] == op:
            return True
    return False


@njit(cache=True, nogil=True)
def shares_memory(u: Updates, source, device):  # type: ignore[no-untyped-def]
    """Whether ops on `device` read the tensors of `source` where they are."""
    return source == device or u.route_kind[source * u.num_devices + device] == HANDOVER


@njit(cache=True, nogil=True)
def count_updates(u: Updates, reader_offsets, reader_ops, waiting, devices):  # type: ignore[no-untyped-def]
    """Add to `waiting` (N,) what in-place updates wait for."""
    for t in range(len(u.updater_offsets) - 1):
        first, last = u.updater_offsets[t], u.updater_offsets[t + 1]
        if first == last:
            continue
        source = devices[u.tensor_op[t]]
        waits = 0
        sent = np.int64(0)
        for a in range(reader_offsets[t], reader_offsets[t + 1]):
            reader = reader_ops[a]
            e = devices[reader]
            if shares_memory(u, source, e):
                waits += not is_updater(u, reader, t)
            elif not (sent >> e) & 1:
                sent |= np.int64(1) << e
                waits += 1
        for a in range(first, last):
            waiting[u.updater_ops[a]] += waits + (a - first)


@njit(cache=True, nogil=True)
def waiting_updates(u: Updates, devices, op, found):  # type: ignore[no-untyped-def]
    """Number of updates that the end of `op` brings nearer, left in `found`, once for each tensor they wait on."""
    device = devices[op]
    count = 0
    for a in range(u.input_offsets[op], u.input_offsets[op + 1]):
        t = u.input_tensors[a]
        first, last = u.updater_offsets[t], u.updater_offsets[t + 1]
        if first < last and not is_updater(u, op, t) and shares_memory(u, devices[u.tensor_op[t]], device):
            for b in range(first, last):
                found[count] = u.updater_ops[b]
                count += 1
    for a in range(u.updated_offsets[op], u.updated_offsets[op + 1]):
        t = u.updated_tensors[a]
        for b in range(u.updater_offsets[t], u.updater_offsets[t + 1]):
            if u.updater_ops[b] > op:
                found[count] = u.updater_ops[b]
                count += 1
    return count
