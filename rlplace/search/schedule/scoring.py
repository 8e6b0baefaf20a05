"""`score_both`: what a list scheduler makes of ops and of groups, scored."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rlplace.search.schedule.host_resources import HostResources, host_resources
from rlplace.search.schedule.units import Units, group_units, op_units
from rlplace.search.task import Task

OUTPUT_SHARES = (0.0, 0.25, 0.5, 1.0)
"""How much of all outputs a scheduler counts as held at once, from hopeful to safe; the simulator knows the truth."""

Place = Callable[[Units, HostResources, float], NDArray[np.int32]]
"""From units, resources and the share of outputs held at once to the device of each unit, (U,) int32."""


def score_both(task: Task, place: Place) -> None:
    """Scores what `place` makes of ops and of groups, for every share of `OUTPUT_SHARES`; equal answers count once."""
    problem = task.problem
    resources = host_resources(problem)
    ops = op_units(problem)
    found = [place(ops, resources, share) for share in OUTPUT_SHARES]
    if problem.grouping.num_groups < problem.graph.num_ops:
        groups = group_units(problem)
        found += [problem.grouping.expand(place(groups, resources, share)) for share in OUTPUT_SHARES]
    rows = np.stack(found).astype(np.int32)
    first = np.sort(np.unique(rows, axis=0, return_index=True)[1])
    task.score(rows[first])
