"""`join_outputs`: what a model returns for the slices of a batch, put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlplace.graphs.slicing import Slicing


class Part(NamedTuple):
    """An output of a slice through which a gradient goes."""

    end: Tensor
    """As the model returned it."""
    start: Tensor
    """The same values, from which what is joined is computed."""


@dataclass(frozen=True)
class Joined:
    """Outputs of slices put together.

    Attributes:
        leaves: what the model would return for the batch, flat; empty where its outputs cannot be joined.
        parts: for each slice, its outputs that require a gradient.
        problem: why they cannot be joined, or what makes it doubtful that their loss is that of the batch; else "".
    """

    leaves: list[Any]
    parts: list[list[Part]]
    problem: str = ""


def join_outputs(whole: Sequence[Any], outputs: Sequence[Sequence[Any]], slicing: Slicing) -> Joined:
    """The outputs of slices, put together in the dimension that grows with the batch.

    An output of the same shape for every batch is that of the first slice.

    Args:
        whole: outputs of the batch, flat: their shapes say what grows.
        outputs: those of each slice.
        slicing: how the batch is cut.
    """
    leaves: list[Any] = []
    parts: list[list[Part]] = [[] for _ in outputs]
    problem, has_grown = "", False
    for expected, *found in zip(whole, *outputs, strict=True):
        if not isinstance(expected, Tensor):
            if not isinstance(expected, (bool, int, float, str, type(None))):
                return Joined([], [], f"an output is a {type(expected).__name__}, which cannot be joined")
            leaves.append(found[0])
            continue
        dims = [dim for dim, length in enumerate(expected.shape) if found[0].shape[dim] != length]
        if len(dims) > 1 or (dims and sum(part.shape[dims[0]] for part in found) != expected.shape[dims[0]]):
            shapes = f"{tuple(expected.shape)} for {slicing.batch} samples and {tuple(found[0].shape)} for"
            return Joined([], [], f"an output is of shape {shapes} {slicing.sizes[0]}, which cannot be joined")
        if not dims and not torch.equal(found[0], found[1]):
            what = "already a scalar" if expected.dim() == 0 else f"of shape {tuple(expected.shape)} for any batch"
            problem = f"an output of the model is {what}, and another for every slice"
        used = []
        for own, value in zip(parts, found if dims else found[:1], strict=False):
            start = value.detach()
            if value.requires_grad:
                own.append(Part(value, start.requires_grad_()))
            used.append(start)
        leaves.append(torch.cat(used, dims[0]) if dims else used[0])
        has_grown |= bool(dims)
    if not has_grown:
        is_scalar = all(leaf.dim() == 0 for leaf in leaves if isinstance(leaf, Tensor))
        return Joined([], [], f"the model's output is {'already a scalar' if is_scalar else 'the same for any batch'}")
    return Joined(leaves, parts, problem)
