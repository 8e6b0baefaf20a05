"""`gang_signals`: where a gang takes over from its members or they from it, and so waits for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.host import Host
from rlplace.measure.plan import Plan


@dataclass(frozen=True)
class GangSignals:
    """Signals of one step, 0 up to `count`.

    Attributes:
        sets: by item: signals that it sets when it is done.
        waits: by item: signals that it waits for.
        count: how many there are.
    """

    sets: Mapping[int, Sequence[int]]
    waits: Mapping[int, Sequence[int]]
    count: int


def gang_signals(
    graph: OpGraph, host: Host, plan: Plan, is_handover: Sequence[bool], second: Collection[int]
) -> GangSignals:
    """The signals by which gangs and their members take turns.

    A gang is busy when any member is: in plan order, its items wait for theirs and theirs for its.

    Args:
        graph: with its program.
        host: with its gangs.
        plan: made for both.
        is_handover: by transfer: it keeps nobody busy.
        second: items of the second part of a step in two parts, the last ones of the plan's sequence.
    """
    program, n, indices = require_program(graph), graph.num_ops, host.device_index
    cores = [[indices[name] for name in device.members] or [d] for d, device in enumerate(host.devices)]
    sets: dict[int, list[int]] = defaultdict(list)
    waits: dict[int, list[int]] = defaultdict(list)
    last: dict[int, tuple[int, int]] = {}  # core -> (device, item)
    count, is_first = 0, True
    for item in plan.sequence.tolist():
        if item in program.sources or (item >= n and is_handover[item - n]):
            continue
        if is_first and item in second:  # it begins when all devices are done with the first part
            is_first = False
            last.clear()
        device = int(plan.devices[item] if item < n else plan.transfer_destination[item - n])
        for other, earlier in sorted({last[core] for core in cores[device] if core in last}):
            if other != device:
                sets[earlier].append(count)
                waits[item].append(count)
                count += 1
        last.update(dict.fromkeys(cores[device], (device, item)))
    return GangSignals(dict(sets), dict(waits), count)
