"""`update_runs`: updates of a device that follow each other in a plan, to be done by one fused call."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.program import Program, Update

Run = tuple[int, ...]
"""Update ops in plan order, of parameters of one dtype."""


def update_runs(
    graph: OpGraph, program: Program, items: Sequence[int], waits: Collection[int], sets: Collection[int]
) -> tuple[Run, ...]:
    """Every update among `items`, in runs as long as may be.

    Nothing lies between the updates of a run, so that doing all of them where the last one stands keeps the plan: no
    tensor is made meanwhile, and nobody waits for an update but a later op of the same device. PyTorch's fused kernels
    take each parameter by itself, so a run computes what its updates do one by one, to the bit.

    Args:
        graph: of the plan.
        program: of the graph.
        items: one device's, in plan order.
        waits: items that begin with a signal of a gang: they begin a run.
        sets: items that end with one: they end a run.
    """
    runs: list[list[int]] = []
    is_open = False
    for item in items:
        if item in program.sources:  # no code is made of it
            continue
        call = program.calls.get(item) if item < graph.num_ops else None
        if not isinstance(call, Update):
            is_open = False
            continue
        # a gradient of another layout is copied for the kernel: one at a time, as its workspace says
        is_alone = bool(graph.workspace_bytes[item])
        if (
            not is_open
            or is_alone
            or item in waits
            or _dtype(graph, program, runs[-1][0]) != _dtype(graph, program, item)
        ):
            runs.append([])
        runs[-1].append(item)
        is_open = not is_alone and item not in sets
    return tuple(map(tuple, runs))


def _dtype(graph: OpGraph, program: Program, item: int) -> str:
    call = program.calls[item]
    assert isinstance(call, Update)
    return graph.tensor_dtypes[call.parameter.id]
