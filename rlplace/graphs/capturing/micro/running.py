"""Running statistics of batch norm, updated by those of every micro-batch in turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rlplace.graphs.capturing.micro.assembly import Assembly
from rlplace.graphs.opgraph import UPDATE
from rlplace.graphs.program import Ref

aten = torch.ops.aten


def add_running_statistics(
    assembly: Assembly, model: nn.Module, buffers: Mapping[str, Ref], found: Sequence[tuple[str, Ref, Ref]]
) -> None:
    """Adds what batch norms do to their buffers: running statistics move towards those of each call, in order.

    These ops live with the buffer that they update.

    Args:
        assembly: takes them.
        model: has the norms.
        buffers: by dotted name.
        found: path of the norm, mean and unbiased variance of every call, micro-batch after micro-batch.
    """
    calls: dict[str, list[tuple[Ref, Ref]]] = defaultdict(list)
    for path, mean, variance in found:
        calls[path].append((mean, variance))
    for path, statistics in calls.items():
        norm = model.get_submodule(path)
        assert isinstance(norm, _BatchNorm)
        prefix = f"{path}." if path else ""
        count = buffers.get(f"{prefix}num_batches_tracked")
        for name, column in (("running_mean", 0), ("running_var", 1)):
            place = buffers[f"{prefix}{name}"]
            _move(assembly, path, f"{prefix}{name}", place, [each[column] for each in statistics], norm.momentum, count)
        if count is not None:
            name = f"{prefix}num_batches_tracked"
            total = assembly.call(
                aten.add.Tensor, count, len(statistics), name=f"add_{name}", module=path, phase=UPDATE
            )
            assembly.store(count, total, name=f"store_{name}", together=[assembly.ops.producer(total)])


def _move(
    assembly: Assembly,
    path: str,
    name: str,
    place: Ref,
    values: Sequence[Ref],
    momentum: float | None,
    count: Ref | None,
) -> None:
    """Moves a buffer towards each of `values` in turn, by `momentum`; without one, to the average of all so far."""

    def call(target: torch._ops.OpOverload, *args: object, **kwargs: Any) -> Ref:
        made = assembly.call(target, *args, name=f"move_{name}", module=path, phase=UPDATE, **kwargs)
        own.append(assembly.ops.producer(made))
        return made

    own: list[int] = []
    moved = place
    for number, value in enumerate(values, start=1):
        if momentum is not None:
            moved = call(aten.lerp.Scalar, moved, value, momentum)
            continue
        assert count is not None
        seen = call(aten._to_copy.default, call(aten.add.Tensor, count, number), dtype=assembly.ops.value(place).dtype)
        moved = call(aten.lerp.Tensor, moved, value, call(aten.reciprocal.default, seen))
    assembly.store(place, moved, name=f"store_{name}", together=own)
