"""How a timeline's picture tells micro-batches apart: a shade for each, and its number on what it keeps busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.timeline import Timeline

LIGHTEST = 0.62
"""Part of white in the colour of the last micro-batch."""
JOINED = 0.004
"""A break of up to this part of the step does not end a run of ops ..."""
BUSY = 0.6
"""... which is one as long as its own ops take this part of it: others may take turns with them."""


@dataclass
class _Run:
    op: int
    start_s: float
    end_s: float
    busy_s: float = 0.0


def shade(color: str, micro_batch: int, num_micro_batches: int) -> str:
    """`color` mixed with white, the more the later the micro-batch; as it is for ops that all of them share.

    >>> shade("#0072B2", 0, 4), shade("#000000", 3, 4)
    ('#0072B2', '#9E9E9E')
    """
    if micro_batch <= 0 or num_micro_batches < 2:
        return color
    share = LIGHTEST * micro_batch / (num_micro_batches - 1)
    mixed = (round(int(color[i : i + 2], 16) * (1 - share) + 255 * share) for i in (1, 3, 5))
    return "#" + "".join(f"{part:02X}" for part in mixed)


def op_colors(graph: OpGraph, phase_colors: Sequence[str]) -> NDArray[np.object_]:
    """(N,) the colour of each op: its phase's, in the shade of its micro-batch.

    Args:
        graph: N ops.
        phase_colors: a colour for each phase.
    """
    count = graph.num_micro_batches
    table = np.array([[shade(color, k, count) for k in range(-1, count)] for color in phase_colors], dtype=object)
    colors: NDArray[np.object_] = table[graph.phases, graph.micro_batch + 1]
    return colors


def runs(items: Sequence[int], timeline: Timeline, graph: OpGraph) -> list[tuple[float, float, int]]:
    """Where a device works for one micro-batch and phase, but for short breaks: start and end in seconds, and an op.

    Args:
        items: ops of one device.
        timeline: when they run.
        graph: the graph that they are of; ops that all micro-batches share are in no run.
    """
    gap_s = JOINED * float(timeline.op_end_s.max(initial=0.0))
    found: list[_Run] = []
    last: dict[tuple[int, int], _Run] = {}
    for op in sorted(items, key=lambda item: (timeline.op_start_s[item], timeline.op_end_s[item])):
        if graph.micro_batch[op] < 0:
            continue
        label = int(graph.micro_batch[op]), int(graph.phases[op])
        start_s, end_s = float(timeline.op_start_s[op]), float(timeline.op_end_s[op])
        run = last.get(label)
        if run is None or start_s - run.end_s > gap_s:
            run = last[label] = _Run(op, start_s, start_s)
            found.append(run)
        run.end_s = max(run.end_s, end_s)
        run.busy_s += end_s - start_s
    return [(run.start_s, run.end_s, run.op) for run in found if run.busy_s >= BUSY * (run.end_s - run.start_s)]


def is_light(color: str) -> bool:
    """Whether dark text reads better on it (relative luminance, ITU-R BT.709)."""
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5
