"""What an in-place update waits for: the other readers, the transfers and the earlier updates of its tensor."""

from __future__ import annotations

from rlplace.jit import Ints, inlined
from rlplace.measure.simulate.host_tables import HANDOVER
from rlplace.measure.simulate.updates import Updates


@inlined
def is_updater(u: Updates, op: int, tensor: int) -> bool:
    """Whether the op updates the tensor in place."""
    updates = False
    for a in range(u.updater_offsets[tensor], u.updater_offsets[tensor + 1]):
        updates = updates or u.updater_ops[a] == op
    return updates


@inlined
def shares_memory(u: Updates, source: int, device: int) -> bool:
    """Whether ops on `device` read the tensors of `source` where they are."""
    return source == device or u.route_kind[source * u.num_devices + device] == HANDOVER


@inlined
def count_updates(u: Updates, reader_offsets: Ints, reader_ops: Ints, waiting: Ints, devices: Ints) -> None:
    """Add to `waiting` (N,) what in-place updates wait for."""
    for t in range(len(u.updater_offsets) - 1):
        first, last = u.updater_offsets[t], u.updater_offsets[t + 1]
        if first == last:
            continue
        source = devices[u.tensor_op[t]]
        waits = 0
        sent = 0
        for a in range(reader_offsets[t], reader_offsets[t + 1]):
            reader = reader_ops[a]
            e = devices[reader]
            if shares_memory(u, source, e):
                waits += not is_updater(u, reader, t)
            elif not (sent >> e) & 1:
                sent |= 1 << e
                waits += 1
        for a in range(first, last):
            waiting[u.updater_ops[a]] += waits + (a - first)


@inlined
def waiting_updates(u: Updates, devices: Ints, op: int, found: Ints) -> int:
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
