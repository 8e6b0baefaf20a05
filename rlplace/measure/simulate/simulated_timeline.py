"""`simulated_timeline`: when the simulator has every op and transfer begin and end, and what memory is held."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.plan import Plan
from rlplace.measure.simulate.compiled import Compiled
from rlplace.measure.simulate.scratch import Scratch
from rlplace.measure.timeline import Timeline


def simulated_timeline(p: Compiled, s: Scratch, plan: Plan) -> Timeline:
    """The timeline of a plan that was just evaluated.

    Args:
        p: the problem.
        s: working memory that the plan was evaluated in.
        plan: for both.
    """
    n = p.num_ops
    items = slice(n, n + plan.num_transfers)
    counters = [_memory_steps(s, device) for device in range(p.num_devices)]
    return Timeline(
        op_device=plan.devices,
        op_start_s=s.start_s[:n].copy(),
        op_end_s=s.end_s[:n].copy(),
        transfer_tensor=plan.transfer_tensor,
        transfer_source=plan.devices[p.tensor_op[plan.transfer_tensor]],
        transfer_destination=plan.transfer_destination,
        transfer_start_s=s.start_s[items].copy(),
        transfer_end_s=s.end_s[items].copy(),
        memory_time_s=np.concatenate([times for times, _ in counters]),
        memory_device=np.repeat(np.arange(p.num_devices, dtype=np.int32), [len(times) for times, _ in counters]),
        memory_bytes=np.concatenate([held for _, held in counters]),
        source="simulated",
    )


def _memory_steps(s: Scratch, device: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Instants at which a device's allocated bytes change, and the bytes from then on."""
    times, deltas = [np.zeros(1)], [s.held_bytes[device : device + 1]]
    for lane, sign in ((2 * device, 1), (2 * device + 1, -1)):
        first = 2 * int(s.event_base[lane])
        events = slice(first, first + 2 * int(s.event_count[lane]))
        times.append(s.events[events][::2])
        deltas.append(sign * s.events.view(np.int64)[events][1::2])
    instants, places = np.unique(np.concatenate(times), return_inverse=True)
    changes = np.zeros(len(instants), dtype=np.int64)
    np.add.at(changes, places, np.concatenate(deltas))
    steps = (changes != 0) | (instants == 0.0)
    return instants[steps], np.cumsum(changes)[steps]
