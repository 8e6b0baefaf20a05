"""`heft`: heterogeneous earliest finish time, with insertion (Topcuoglu, Hariri, Wu 2002), on contended links."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.search.schedule.host_resources import HostResources
from rlplace.search.schedule.list_schedule import new_schedule, schedule_in_order, unit_devices
from rlplace.search.schedule.ranks import ready_order, upward
from rlplace.search.schedule.scoring import score_both
from rlplace.search.schedule.units import Units
from rlplace.search.task import Task


def solve_heft(task: Task) -> None:
    """Scores `heft` of ops and of groups."""
    score_both(task, lambda units, resources, output_share: heft(units, resources, output_share)[0])


def heft(units: Units, resources: HostResources, output_share: float = 0.0) -> tuple[NDArray[np.int32], float]:
    """(U,) int32 devices, and the makespan of the schedule: units by upward rank, each where it ends first.

    The paper has a link of its own for every pair of processors and lets transfers overlap freely; here they wait for
    the links of their route, in gaps where there are any.

    Args:
        units: what is placed.
        resources: where.
        output_share: share of all outputs that counts as held at once.
    """
    schedule = new_schedule(units, resources, output_share)
    order = ready_order(units, upward(units, resources))
    nobody = np.full(len(order), -1, dtype=np.int32)
    schedule_in_order(units, resources, schedule, order, np.zeros_like(units.time_s), nobody)
    return unit_devices(units, resources, schedule), float(schedule.end_s.max(initial=0.0))
