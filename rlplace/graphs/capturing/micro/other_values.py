"""`other_values`: the samples of a check with other labels, masks and lengths, as those of the next batch may be.

Losses are often means over what counts: `(loss * mask).sum() / mask.sum()`. While all of the given batch counts, slices
weighted by their samples make such a loss; with the next batch they do not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlplace.graphs.slicing import Slicing

MOST_VALUES = 8
"""Other values of a tensor, at most: each of them is another loss to compute."""


@dataclass(frozen=True, eq=False)
class OtherValue:
    """Inputs and targets of which one has another value in some places of its first slice.

    Attributes:
        position: of the tensor that was changed.
        value: what some of its elements are now.
        tensors: all of them.
    """

    position: int
    value: float
    tensors: list[Tensor]


def other_values(
    tensors: Sequence[Tensor], slicing: Slicing, num_inputs: int, compared: Collection[float]
) -> Iterator[OtherValue]:
    """What might become of a loss that counts: every tensor that is cut, with other values in half of its first slice.

    Values are those that something was compared with (`labels != -100`), and what is next to them (`labels > 0`); what
    a mask may hold; and 0 and 1 for a tensor whose elements are all alike (lengths of a batch without padding). Of
    inputs, floats stay as they are.

    Args:
        tensors: inputs, then targets.
        slicing: how they are cut.
        num_inputs: how many are inputs.
        compared: numbers that the step compared tensors with; NaN where it asked for NaN.
    """
    generator = torch.Generator().manual_seed(2)
    for position, (tensor, dim) in enumerate(zip(tensors, slicing.dims, strict=True)):
        is_left = tensor.is_complex() or (position < num_inputs and tensor.is_floating_point())
        if dim is None or not tensor.numel() or is_left:
            continue
        first = tensor.narrow(dim, 0, slicing.sizes[0])
        is_chosen = torch.rand(first.shape, generator=generator) < 0.5
        is_chosen.view(-1)[0] = True
        for value in _candidates(tensor, compared):
            changed = tensor.clone()
            changed.narrow(dim, 0, slicing.sizes[0])[is_chosen] = value
            yield OtherValue(position, value, [*tensors[:position], changed, *tensors[position + 1 :]])


def _candidates(tensor: Tensor, compared: Collection[float]) -> list[float]:
    if tensor.dtype is torch.bool:
        return [0.0, 1.0]
    low, high = float(tensor.min()), float(tensor.max())
    near = {value + step for value in compared for step in (0.0, -1.0, 1.0)}
    if low >= 0 and high <= 1 and bool(((tensor == 0) | (tensor == 1)).all()):
        near.add(0.0)
    if low == high:
        near |= {0.0, 1.0}
    if not tensor.is_floating_point():
        info = torch.iinfo(tensor.dtype)
        near = {float(math.floor(value)) for value in near if info.min <= value <= info.max}
    ranked = sorted(near, key=lambda value: (math.isnan(value), abs(value), value))
    return ranked[:MOST_VALUES]
