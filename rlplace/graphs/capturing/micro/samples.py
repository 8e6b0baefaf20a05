"""The few samples that a check computes: cut from a user's batch, unevenly, and some with labels that do not count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlplace.graphs.capturing.micro.other_values import with_value
from rlplace.graphs.capturing.micro.pinned import Labels, Pinned
from rlplace.graphs.capturing.micro.trial import Trial, rehearsal
from rlplace.graphs.slicing import Slicing, even_sizes

MOST_SLICES = 3
"""Slices of a check: what mixes samples shows in two, a mean of means in uneven ones."""


def few_samples(
    tensors: Sequence[Tensor], slicing: Slicing, *, is_even: bool = False, is_spread: bool = True
) -> tuple[list[Tensor], Slicing]:
    """A few samples of a batch, at most two a slice, and how to cut them.

    They are from all over it: it may be sorted, by length for one, and padded at its end alone. Sizes differ, so that a
    mean of means is told from a mean, and are above 1 where those of the batch are and there is room. A tensor whose
    samples are all alike, as in `torch.ones(8, 16)`, gets others in their range: alike, they would hide what mixes
    them.

    Args:
        tensors: inputs and targets.
        slicing: how they are to be cut.
        is_even: whether sizes are the same instead, where they can be.
        is_spread: else they are the first.
    """
    count = min(slicing.num_micro_batches, MOST_SLICES)
    batch = min(slicing.batch, 2 * count)
    if count > 2 and (batch == count or slicing.sizes[-1] > 1):
        count -= 1
    sizes = [*even_sizes(batch, count)]
    if sizes[0] == sizes[-1] > 1 and not is_even:
        sizes[0] += 1
        sizes[-1] -= 1
    generator = torch.Generator().manual_seed(0)
    taken = torch.arange(batch) * slicing.batch // batch if is_spread else torch.arange(batch)
    cut = [
        tensor if dim is None else _varied(tensor.index_select(dim, taken), dim, generator)
        for tensor, dim in zip(tensors, slicing.dims, strict=True)
    ]
    return cut, Slicing(slicing.dims, tuple(sizes))


def padded(
    trial: Trial, tensors: Sequence[Tensor], slicing: Slicing, deadline: float
) -> tuple[list[Tensor], list[Labels]]:
    """The same samples with labels of the first slice set to the `ignore_index` of the losses that read them.

    A tensor of integers holds labels if such a change reaches a loss of negative log-likelihood; where the step fails
    on it (an embedding reads the tensor too), labels cannot be ignored so.

    Args:
        trial: the step.
        tensors: its inputs and targets.
        slicing: how they are cut.
        deadline: in the time of `time.monotonic`; `TimeUp` is raised after it.

    Returns:
        the tensors, and what the losses read of them; the same as before where no loss reads labels.
    """
    draws = np.random.default_rng(1)  # none of torch, which a check has return constants
    found, now = list(tensors), _labels(trial, tensors, deadline)
    for position, (tensor, dim) in enumerate(zip(tensors, slicing.dims, strict=True)):
        if dim is None or tensor.dtype not in (torch.int64, torch.uint8):
            continue
        in_range = torch.iinfo(tensor.dtype)
        for ignored in sorted({label.ignore_index for label in now}):
            for share in (0.5, 1.0) if in_range.min <= ignored <= in_range.max else ():
                other = with_value(tensor, dim, slicing.sizes[0], ignored, share, draws)
                if other is None:
                    continue
                changed = [*found[:position], other, *found[position + 1 :]]
                try:
                    read = _labels(trial, changed, deadline)
                except (IndexError, RuntimeError, ValueError):  # whatever else reads them
                    continue
                if _num_ignored(read) > _num_ignored(now):
                    found, now = changed, read
                    break
    return found, now


def _labels(trial: Trial, tensors: Sequence[Tensor], deadline: float) -> list[Labels]:
    """What the losses of one step read."""
    pinned = Pinned(is_double=trial.is_double, deadline=deadline)
    with rehearsal(pinned, is_double=trial.is_double), torch.no_grad():
        trial.loss(trial.output(tensors), tensors)
    return pinned.labels


def _num_ignored(labels: Sequence[Labels]) -> int:
    return sum(label.num_ignored for label in labels)


def _varied(tensor: Tensor, dim: int, generator: torch.Generator) -> Tensor:
    """The tensor, or others in its range where all its samples are alike."""
    if tensor.shape[dim] < 2 or tensor.numel() == 0 or tensor.dtype is torch.bool or tensor.is_complex():
        return tensor
    if bool((tensor != tensor.narrow(dim, 0, 1)).any()):
        return tensor
    if not tensor.is_floating_point():
        low, high = int(tensor.min()), int(tensor.max())
        return torch.randint(low, high + 1, tensor.shape, generator=generator, dtype=tensor.dtype)
    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
    return tensor * (1 - noise / 2) if bool(tensor.any()) else noise / 2
