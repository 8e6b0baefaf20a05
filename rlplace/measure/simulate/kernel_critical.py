"""The critical path of a plan that was timed: what each item waited for, back from the one that ends last."""

from __future__ import annotations

import numpy as np

from rlplace.jit import Floats, Ints, kernel, lowest_bit
from rlplace.measure.simulate.compiled import Compiled
from rlplace.measure.simulate.host_tables import HANDOVER, JOB
from rlplace.measure.simulate.kernel_updates import is_updater, shares_memory
from rlplace.measure.simulate.scratch import POSITION, Scratch


@kernel
def critical_path(p: Compiled, s: Scratch, devices: Ints, binding: Ints, path: Ints) -> int:
    """The length of the critical path, which is left in `path`, the last item first.

    Of all that an item waits for (its tensors, its device, its links, readers of what it updates), what ends last binds
    it; of several that end at one instant, the first that is looked at. Where a launch is what an item waited for, it
    begins after the end of what binds it. What ended after the middle of an item did not bind it: a measured one may
    begin before something ends that it would wait for in the model.

    Args:
        p: the problem.
        s: holds the plan and its times, simulated or measured.
        devices: (N,) int32, device of each op.
        binding: (N + K,) int32, overwritten: the item that binds each item, -1 for none.
        path: (N + K,) int32, overwritten.
    """
    n, num_devices, most_links = p.num_ops, p.num_devices, p.max_route_links
    available = np.full(p.num_tensors * num_devices, -1, np.int32)
    updated = np.full(p.num_tensors, -1, np.int32)
    on_atom = np.full(num_devices, -1, np.int32)
    on_link = np.full(max(p.num_links, 1), -1, np.int32)
    end_s, last = s.end_s, -1
    for position in range(s.state[POSITION]):
        item = s.sequence[position]
        limit_s = 0.5 * (s.start_s[item] + s.end_s[item])
        found = -1
        if item < n:
            device = devices[item]
            binding[item] = -1
            if p.is_source[item]:
                continue
            for a in range(p.input_offsets[item], p.input_offsets[item + 1]):
                found = _later(end_s, found, available[p.input_tensors[a] * num_devices + device], limit_s)
            if p.has_updates:
                for a in range(p.updates.updated_offsets[item], p.updates.updated_offsets[item + 1]):
                    found = _later(end_s, found, updated[p.updates.updated_tensors[a]], limit_s)
            rest = p.atoms[device]
            while rest:
                d = lowest_bit(rest)
                rest &= rest - 1
                found = _later(end_s, found, on_atom[d], limit_s)
                on_atom[d] = item
            for t in range(p.output_offsets[item], p.output_offsets[item + 1]):
                available[t * num_devices + device] = item
            if p.has_updates and p.updates.concerned[item]:
                _note_updates(p, end_s, updated, devices, item)
        else:
            t, device = s.transfer_tensor[item - n], s.transfer_destination[item - n]
            source = devices[p.tensor_op[t]]
            pair = source * num_devices + device
            found = _later(end_s, -1, available[t * num_devices + source], limit_s)
            if p.route_kind[pair] != HANDOVER:
                held = 0
                if p.route_kind[pair] == JOB:
                    held = p.atoms[device]
                if p.route_blocks_source[pair]:
                    held |= p.atoms[source]
                for a in range(most_links):
                    link = p.route_padded[pair * most_links + a]
                    if on_link[link] != item:  # a route of fewer links repeats its first
                        found = _later(end_s, found, on_link[link], limit_s)
                        on_link[link] = item
                while held:
                    d = lowest_bit(held)
                    held &= held - 1
                    found = _later(end_s, found, on_atom[d], limit_s)
                    on_atom[d] = item
                if p.has_updates:
                    updated[t] = _later(end_s, updated[t], item, np.inf)
            available[t * num_devices + device] = item
        binding[item] = found
        last = _later(end_s, last, item, np.inf)
    length = 0
    while last >= 0:
        path[length] = last
        length += 1
        last = binding[last]
    return length


@kernel
def _later(end_s: Floats, one: int, other: int, limit_s: float) -> int:
    if other < 0 or end_s[other] > limit_s or (one >= 0 and end_s[one] >= end_s[other]):
        return one
    return other


@kernel
def _note_updates(p: Compiled, end_s: Floats, updated: Ints, devices: Ints, op: int) -> None:
    u = p.updates
    for a in range(u.input_offsets[op], u.input_offsets[op + 1]):
        t = u.input_tensors[a]
        waits = u.updater_offsets[t] < u.updater_offsets[t + 1] and not is_updater(u, op, t)
        if waits and shares_memory(u, devices[u.tensor_op[t]], devices[op]):
            updated[t] = _later(end_s, updated[t], op, np.inf)
    for a in range(u.updated_offsets[op], u.updated_offsets[op + 1]):
        t = u.updated_tensors[a]
        updated[t] = _later(end_s, updated[t], op, np.inf)
