"""Whether a plan that somebody gives can be followed."""

from __future__ import annotations

from rlplace.jit import Ints, kernel
from rlplace.measure.simulate.compiled import Compiled
from rlplace.measure.simulate.kernel_updates import is_updater, shares_memory
from rlplace.measure.simulate.scratch import POSITION, TRANSFERS, Scratch


@kernel
def check(p: Compiled, s: Scratch, devices: Ints) -> int:
    """Position of the first item of the sequence that comes too early or twice, or -1 where the sequence is sound.

    Leaves the number of transfers that the placement needs in `s.state[TRANSFERS]`.
    """
    n, num_devices = p.num_ops, p.num_devices
    input_offsets, input_tensors, output_offsets, tensor_op = (
        p.input_offsets,
        p.input_tensors,
        p.output_offsets,
        p.tensor_op,
    )
    u, sequence, state = p.updates, s.sequence, s.users
    done = s.waiting
    done[:] = 0
    state[:] = 0
    missing, there = 1, 2
    needed = 0
    for i in range(n):
        for a in range(input_offsets[i], input_offsets[i + 1]):
            t = input_tensors[a]
            place = t * num_devices + devices[i]
            if devices[i] != devices[tensor_op[t]] and state[place] == 0:
                state[place] = missing
                needed += 1
    s.state[TRANSFERS] = needed
    for position in range(s.state[POSITION]):
        item = sequence[position]
        if done[item]:
            return position
        done[item] = 1
        if item < n:
            for a in range(input_offsets[item], input_offsets[item + 1]):
                if state[input_tensors[a] * num_devices + devices[item]] != there:
                    return position
            for a in range(u.updated_offsets[item], u.updated_offsets[item + 1]):
                t = u.updated_tensors[a]
                source = devices[tensor_op[t]]
                for e in range(num_devices):
                    if not shares_memory(u, source, e) and state[t * num_devices + e] == missing:
                        return position
                for b in range(p.reader_offsets[t], p.reader_offsets[t + 1]):
                    reader = p.reader_ops[b]
                    if not done[reader] and not is_updater(u, reader, t) and shares_memory(u, source, devices[reader]):
                        return position
                for b in range(u.updater_offsets[t], u.updater_offsets[t + 1]):
                    if u.updater_ops[b] < item and not done[u.updater_ops[b]]:
                        return position
            for t in range(output_offsets[item], output_offsets[item + 1]):
                state[t * num_devices + devices[item]] = there
        else:
            tensor, destination = s.transfer_tensor[item - n], s.transfer_destination[item - n]
            place = tensor * num_devices + destination
            if state[tensor * num_devices + devices[tensor_op[tensor]]] != there or state[place] != missing:
                return position
            state[place] = there
    return -1
