"""`other_values`: the samples of a check with other labels, masks and lengths, as those of the next batch may be.

Losses are often means over what counts: `(loss * mask).sum() / mask.sum()`. While all of the given batch counts, slices
weighted by their samples make such a loss; with the next batch they do not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
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
    tensors: Sequence[Tensor],
    slicing: Slicing,
    num_inputs: int,
    compared: Collection[float],
    *,
    with_inputs: bool = True,
) -> Iterator[OtherValue]:
    """What might become of a loss that counts: every tensor that is cut, with other values in half of its first slice.

    Values are those that something was compared with (`labels != -100`), and what is next to them (`labels > 0`); 0 in
    targets and in masks; and 0 and 1 for a tensor whose elements are all alike (lengths of a batch without padding).
    Inputs of floats, which are samples mostly, become 0 where they are masks, and NaN where the step asked for that.
    One value of each tensor comes first, of masks before others, then the next of each.

    Args:
        tensors: inputs, then targets.
        slicing: how they are cut.
        num_inputs: how many are inputs.
        compared: numbers that the step compared tensors with; NaN where it asked for NaN.
        with_inputs: else targets alone change.
    """
    cut = [
        (position, tensor)
        for position, (tensor, dim) in enumerate(zip(tensors, slicing.dims, strict=True))
        if dim is not None and tensor.numel() and not tensor.is_complex() and (with_inputs or position >= num_inputs)
    ]
    values = {
        position: _candidates(tensor, compared, is_input=position < num_inputs)
        for position, tensor in sorted(cut, key=lambda one: not _is_mask(one[1]))
    }
    draws = np.random.default_rng(2)  # none of torch, which a check has return constants
    for turn in itertools.zip_longest(*([(position, value) for value in each] for position, each in values.items())):
        for position, value in filter(None, turn):
            dim = slicing.dims[position]
            assert dim is not None
            if (changed := with_value(tensors[position], dim, slicing.sizes[0], value, 0.5, draws)) is not None:
                yield OtherValue(position, value, [*tensors[:position], changed, *tensors[position + 1 :]])


def with_value(
    tensor: Tensor, dim: int, size: int, value: float, share: float, draws: np.random.Generator
) -> Tensor | None:
    """A copy with `value` in a share of the elements of the first samples that have another, one at least.

    Args:
        tensor: whose samples are along `dim`.
        dim: of the batch.
        size: how many samples.
        value: in the range of the tensor's type.
        share: of the elements.
        draws: which.

    Returns:
        None where all of them have that value.
    """
    changed = tensor.clone()
    first = changed.narrow(dim, 0, size)
    others = torch.nonzero(torch.isnan(first).logical_not() if math.isnan(value) else first != value)
    if not len(others):
        return None
    count = max(round(share * len(others)), 1)
    chosen = others[torch.from_numpy(np.sort(draws.permutation(len(others))[:count]))]
    first[tuple(chosen.T)] = value
    return changed


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _candidates(tensor: Tensor, compared: Collection[float], *, is_input: bool) -> list[float]:
    if tensor.dtype is torch.bool:
        return [0.0, 1.0]
    zero = {0.0} if _is_mask(tensor) or not is_input else set()
    if is_input and tensor.is_floating_point():
        return [*zero, *(value for value in compared if math.isnan(value))]
    near = {value + step for value in compared for step in (0.0, -1.0, 1.0)} | zero
    if bool((tensor == tensor.flatten()[0]).all()):
        near |= {0.0, 1.0}
    if not tensor.is_floating_point():
        info = torch.iinfo(tensor.dtype)
        near = {float(math.floor(value)) for value in near if info.min <= value <= info.max}
    ranked = sorted(near, key=lambda value: (value not in compared, math.isnan(value), abs(value), value))
    return ranked[:MOST_VALUES]
