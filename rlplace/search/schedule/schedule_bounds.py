"""`ScheduleBounds`: what is known of every schedule of a problem's groups before it begins."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlplace.errors import UnknownName
from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.paths import longest_after, longest_before
from rlplace.jit import Floats, Longs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.host_tables import account_names
from rlplace.measure.simulate.ranks import upward_ranks
from rlplace.search.improve.moves import main_labels
from rlplace.search.schedule.group_layout import GroupLayout
from rlplace.search.schedule.units import resident_bytes

MEMORY_MASKS = ("resident", "held", "none")
"""What of a group has to fit on a device: `resident`, the parameters, inputs and optimizer state that are there when a
step starts, without which no placement runs; `held`, the estimate of the list scheduler: gradients and all forward
outputs, too, which may bar what would run; or nothing."""


class ScheduleBounds(NamedTuple):
    """Of N ops, G groups, D devices and A memories (of one device, or of a pool of several).

    Attributes:
        first_op: (G,) int64, of each group the op that is scheduled first; -1 for groups of sources.
        has_source_groups: whether there are any.
        least_end_s: (N,) float64, before which no op can end: its longest path of least times, copies aside.
        least_after_s: (N,) float64, the least time from the end of each op to the end of the step.
        least_s: the longest path of least times.
        account: (D,) int64, the memory of each device.
        account_room: (A,) float64, bytes beside contexts.
        group_bytes: (G,) float64, what each group takes of them.
        micro_batch: (G,) int64, 1 + the micro-batch that most of a group's time is in; 0 for what all share.
        num_micro_batches: of the step, 1 where it is not cut.
        rank: (G,) float64, longest path of mean times from a group's first op to the end, over the longest of all.
        speed: (D,) float64, time of all ops on the fastest device over that on each.
    """

    first_op: Longs
    has_source_groups: bool
    least_end_s: Floats
    least_after_s: Floats
    least_s: float
    account: Longs
    account_room: Floats
    group_bytes: Floats
    micro_batch: Longs
    num_micro_batches: int
    rank: Floats
    speed: Floats


def schedule_bounds(
    problem: Problem, grouping: Grouping, layout: GroupLayout, memory_mask: str = "resident"
) -> ScheduleBounds:
    """The bounds of schedules of `grouping`'s groups, whose `layout` it is.

    Args:
        problem: what is scheduled.
        grouping: what is placed together.
        layout: both as arrays.
        memory_mask: one of `MEMORY_MASKS`.

    Raises:
        UnknownName: no mask has that name.
    """
    if memory_mask not in MEMORY_MASKS:
        raise UnknownName("memory mask", memory_mask, MEMORY_MASKS)
    graph = problem.graph
    first_op = np.full(grouping.num_groups, -1, dtype=np.int64)
    first_op[layout.op_group[layout.order[::-1]]] = layout.order[::-1]  # the last write is the first op
    may = layout.allowed[layout.op_group]
    least_op_s = np.where(graph.is_source, 0.0, np.where(may, layout.op_time_s, np.inf).min(axis=1))
    producers = graph.tensor_op[graph.input_tensors]
    edges = graph.input_offsets, producers, np.zeros(len(producers))
    least_end_s = least_op_s + longest_before(least_op_s, *edges)
    account, room = memory_accounts(problem)
    ranks = upward_ranks(problem)
    total_s = layout.group_time_s.sum(axis=0)
    return ScheduleBounds(
        first_op=first_op,
        has_source_groups=bool(np.any(first_op < 0)),
        least_end_s=least_end_s,
        least_after_s=longest_after(least_op_s, *edges),
        least_s=float(least_end_s.max(initial=0.0)),
        account=account,
        account_room=room,
        group_bytes=_group_bytes(problem, grouping, layout, memory_mask),
        micro_batch=main_labels(problem, grouping, graph.micro_batch.astype(np.int64) + 1),
        num_micro_batches=graph.num_micro_batches,
        rank=np.where(first_op >= 0, ranks[first_op], 0.0) / max(float(ranks.max(initial=0.0)), 1e-30),
        speed=np.where(total_s > 0.0, total_s.min() / np.maximum(total_s, 1e-30), 1.0),
    )


def _group_bytes(problem: Problem, grouping: Grouping, layout: GroupLayout, memory_mask: str) -> Floats:
    if memory_mask == "held":
        return layout.held
    if memory_mask == "none":
        return np.full(grouping.num_groups, -np.inf)  # contexts alone may leave less than no room
    return np.bincount(grouping.op_group, weights=resident_bytes(problem)).astype(np.float64)


def memory_accounts(problem: Problem) -> tuple[Longs, Floats]:
    """(D,) int64 the memory of each device, and (A,) float64 the bytes that each has beside contexts."""
    devices = problem.host.devices
    names = account_names(problem.host)
    pools = names[len(devices) :]
    account = [
        len(devices) + pools.index(device.memory_pool) if device.memory_pool in pools else index
        for index, device in enumerate(devices)
    ]
    room = np.full(len(names), np.inf)
    for at, device in zip(account, devices, strict=True):
        room[at] = min(room[at], float(device.memory_bytes))
    for at, device in zip(account, devices, strict=True):
        room[at] -= float(device.context_bytes)
    return np.array(account, dtype=np.int64), room
