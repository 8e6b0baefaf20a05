"""`costliest_cuts`: the tensors that take longest to send from one device to another."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import BACKWARD, RESIDENT_TARGETS, UPDATE, OpGraph
from rlplace.measure.explain.devices import is_copied
from rlplace.measure.explain.explanation import CutEdge
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.timeline import Timeline

MOST = 10
"""Cut edges that an explanation names."""

What = Literal["parameter", "input", "activation", "gradient"]


def costliest_cuts(
    problem: Problem, plan: Plan, timeline: Timeline, items: NDArray[np.int32], count: int = MOST
) -> tuple[CutEdge, ...]:
    """The transfers that take longest, the longest first; of equals, the first of the plan.

    Args:
        problem: what is placed.
        plan: of the step.
        timeline: of the step.
        items: of its critical path.
        count: how many at most.
    """
    graph, devices = problem.graph, problem.host.devices
    seconds = np.maximum(timeline.transfer_end_s - timeline.transfer_start_s, 0.0)
    ranked = np.argsort(-seconds, kind="stable")
    ranked = ranked[is_copied(problem, plan)[ranked]][:count]
    critical = set(items.tolist())
    offsets, readers = graph.readers
    cuts = []
    for transfer in ranked.tolist():
        tensor, destination = int(plan.transfer_tensor[transfer]), int(plan.transfer_destination[transfer])
        op = int(graph.tensor_op[tensor])
        reading = readers[offsets[tensor] : offsets[tensor + 1]]
        reading = reading[plan.devices[reading] == destination]
        first = int(reading[0])
        cuts.append(
            CutEdge(
                op=graph.names[op],
                module=graph.modules[op],
                what=what_is_sent(graph, op),
                reader=graph.names[first],
                reader_module=graph.modules[first],
                num_readers=len(reading),
                source=devices[int(plan.devices[op])].name,
                destination=devices[destination].name,
                num_bytes=int(graph.tensor_bytes[tensor]),
                start_s=max(float(timeline.transfer_start_s[transfer]), 0.0),
                seconds=float(seconds[transfer]),
                is_critical=graph.num_ops + transfer in critical,
            )
        )
    return tuple(cuts)


def what_is_sent(graph: OpGraph, op: int) -> What:
    """What the outputs of an op are."""
    if graph.targets[op] in RESIDENT_TARGETS or graph.phases[op] == UPDATE:
        return "parameter"
    if graph.is_source[op]:
        return "input"
    return "gradient" if graph.phases[op] == BACKWARD else "activation"
