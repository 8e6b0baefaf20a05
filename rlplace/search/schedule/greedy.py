"""`Greedy`: a list scheduler over groups that weighs several features of a device; one placement for every weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.groups import Grouping
from rlplace.jit import Floats, Ints, kernel
from rlplace.measure.problem import Problem
from rlplace.search.schedule.decision_features import DECISION_FEATURES
from rlplace.search.schedule.group_layout import GroupLayout, group_layout
from rlplace.search.schedule.partial_schedule import Decided, add_cuts, end_on, place_group, run_op

FEATURES = DECISION_FEATURES[:9]
"""What a device costs a group, `finish` to `order` of `FEATURE_NOTES`."""


@dataclass(frozen=True, eq=False)
class Greedy:
    """A problem and a grouping laid out for the scheduler."""

    grouping: Grouping
    layout: GroupLayout

    @classmethod
    def of(cls, problem: Problem, grouping: Grouping | None = None) -> Greedy:
        """The scheduler of `grouping`'s groups; of the problem's own by default."""
        grouping = problem.grouping if grouping is None else grouping
        return cls(grouping, group_layout(problem, grouping))

    def place(self, weights: NDArray[np.float64]) -> NDArray[np.int32]:
        """(B, G) int32 devices of groups, one row for each row of weights (B, 9) of `FEATURES`.

        Ops are taken in the order of the problem. The first op of a group decides for the group: it goes where the
        weighted sum of features is least (ties: the first such device). Its other ops follow.
        """
        weights = np.atleast_2d(np.asarray(weights, dtype=np.float64))
        placed = np.empty((len(weights), self.grouping.num_groups), dtype=np.int32)
        for row in range(len(weights)):
            _place(placed[row], weights[row], self.layout)
        return placed


@kernel
def _place(placed: Ints, weights: Floats, g: GroupLayout) -> None:
    num_groups, num_devices = g.group_time_s.shape
    num_jobs = len(g.order)
    placed[:] = -1
    s = Decided(
        placed,
        placed,
        np.full((len(g.tensor_op), num_devices), -1.0),
        np.zeros(len(g.op_group)),
        np.zeros(num_devices),
        np.zeros(num_devices),
        np.zeros(num_devices),
        np.zeros((g.module.max() + 1, 2, num_devices)),
        np.zeros(num_devices),
    )
    end, cut = s.latest_end_s, np.zeros((2, num_devices))
    latest = -1
    for position in range(num_jobs + num_groups):
        # after the last op come groups of sources that no op decided for
        op = g.order[position] if position < num_jobs else -1
        group = g.op_group[op] if op >= 0 else position - num_jobs
        device = placed[group]
        if op < 0 and device >= 0:
            continue
        if op >= 0:
            for d in range(num_devices):
                if d == device or (device < 0 and g.allowed[group, d]):
                    end[d] = end_on(g, s, op, d)
        if device < 0:
            earliest = np.inf
            for d in range(num_devices):
                if g.allowed[group, d]:
                    earliest = min(earliest, end[d])
            add_cuts(g, s, group, cut)
            phase = int(g.is_backward[group])
            own, twin = s.module_s[g.module[group], phase], s.module_s[g.module[group], 1 - phase]
            own_s, twin_s = own.sum(), twin.sum()
            least = np.inf
            for d in range(num_devices):
                if not g.allowed[group, d]:
                    continue
                there = 0.0
                for other in range(num_devices):
                    if g.occupies[d, other]:
                        there = max(there, s.load_s[other])
                value = (
                    weights[0] * (end[d] - earliest) / g.unit_s
                    + weights[1] * g.group_time_s[group, d] / g.unit_s
                    + weights[2] * (there + g.group_time_s[group, d]) / g.share_s
                    + weights[3] * cut[0, d] / g.unit_s
                    + weights[4] * cut[1, d] / g.unit_s
                    + weights[5] * (s.used[d] + g.held[group]) / g.room[d]
                )
                if twin_s > 0.0:
                    value += weights[6] * (1.0 - twin[d] / twin_s)
                if own_s > 0.0:
                    value += weights[7] * (1.0 - own[d] / own_s)
                if latest >= 0 and d != latest:
                    value += weights[8]
                if value < least:
                    least, device = value, d
            if device < 0:  # weights that are no numbers
                device = int(np.argmax(g.allowed[group]))
            place_group(g, s, group, device)
            latest = device
        if op >= 0:
            run_op(g, s, op, device, end[device])
