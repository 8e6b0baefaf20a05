"""`peft`: predict earliest finish time, a list scheduler that looks ahead by a table of optimistic costs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.jit import Floats, kernel
from rlplace.search.schedule.host_resources import HostResources
from rlplace.search.schedule.list_schedule import new_schedule, schedule_in_order, unit_devices
from rlplace.search.schedule.ranks import mean_transfer_s, ready_order
from rlplace.search.schedule.scoring import score_both
from rlplace.search.schedule.units import Units
from rlplace.search.task import Task


def solve_peft(task: Task) -> None:
    """Scores `peft` of ops and of groups."""
    score_both(task, lambda units, resources, output_share: peft(units, resources, output_share)[0])


def peft(units: Units, resources: HostResources, output_share: float = 0.0) -> tuple[NDArray[np.int32], float]:
    """(U,) int32 devices, and the makespan of the schedule (Arabnejad and Barbosa 2014).

    Units by the mean of their row of the table, each where its end plus its optimistic cost is least.

    Args:
        units: what is placed.
        resources: where.
        output_share: share of all outputs that counts as held at once.
    """
    table_s = optimistic_cost_s(units, resources)
    schedule = new_schedule(units, resources, output_share)
    order = ready_order(units, np.asarray(table_s.mean(axis=1)))
    schedule_in_order(units, resources, schedule, order, table_s, np.full(len(order), -1, dtype=np.int32))
    return unit_devices(units, resources, schedule), float(schedule.end_s.max(initial=0.0))


def optimistic_cost_s(units: Units, resources: HostResources) -> NDArray[np.float64]:
    """(U, D) float64: shortest way from the end of a unit on a device to the end, every reader on its best device.

    Equation 2 of the paper: the largest over readers j of the least over devices q of the cost of j on q, its time
    there, and the mean transfer unless q is the unit's device.
    """
    return _optimistic(units, mean_transfer_s(units, resources))


@kernel
def _optimistic(u: Units, transfer_s: Floats) -> Floats:
    num_units, num_devices = u.time_s.shape
    table_s = np.zeros((num_units, num_devices))
    for unit in range(num_units - 1, -1, -1):
        for tensor in range(u.output_offsets[unit], u.output_offsets[unit + 1]):
            for place in range(u.reader_offsets[tensor], u.reader_offsets[tensor + 1]):
                reader = u.readers[place]
                elsewhere_s = np.inf
                for q in range(num_devices):
                    if u.label_allowed[u.label[reader], q]:
                        elsewhere_s = min(elsewhere_s, table_s[reader, q] + u.time_s[reader, q] + transfer_s[tensor])
                for p in range(num_devices):
                    here_s = elsewhere_s
                    if u.label_allowed[u.label[reader], p]:
                        here_s = min(here_s, table_s[reader, p] + u.time_s[reader, p])
                    table_s[unit, p] = max(table_s[unit, p], here_s)
    return table_s
