"""Batch norm in micro-batches: each normalises by its own statistics, and running ones are updated apart from that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True)
class Statistics:
    """What one call of a batch norm found in its batch.

    Attributes:
        path: dotted path of the module.
        mean: (C,).
        variance: (C,), unbiased.
    """

    path: str
    mean: Tensor
    variance: Tensor


def normalises_batch(model: nn.Module) -> bool:
    """Whether a layer of `model` normalises by the statistics of its batch."""
    return any(
        isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        for module in model.modules()
    )


def updating_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """By dotted path, the batch norms of `model` that update running statistics."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and type(module).forward is _BatchNorm.forward
        and "forward" not in vars(module)
        and module.training
        and module.running_mean is not None
        and module.running_var is not None
    }


@contextlib.contextmanager
def statistics_handed_out(model: nn.Module) -> Iterator[list[Statistics]]:
    """While active, batch norms leave their running statistics alone: they append those of the batch to the list.

    So nothing that a micro-batch computes waits for another's.
    """
    found: list[Statistics] = []
    norms = updating_norms(model)
    try:
        for path, norm in norms.items():
            vars(norm)["forward"] = _own_norm(path, norm, found)
        yield found
    finally:
        for norm in norms.values():
            del vars(norm)["forward"]


def _own_norm(path: str, norm: _BatchNorm, found: list[Statistics]) -> Callable[[Tensor], Tensor]:
    """The statistics of the batch come out of the same kernel, as running statistics of momentum 1."""

    def forward(x: Tensor) -> Tensor:
        norm._check_input_dim(x)  # type: ignore[no-untyped-call]
        like = norm.running_mean
        assert like is not None
        mean, variance = (torch.zeros(like.shape, dtype=like.dtype, device=like.device) for _ in range(2))
        found.append(Statistics(path, mean, variance))  # before: a recomputed forward may end inside of its last norm
        return functional.batch_norm(x, mean, variance, norm.weight, norm.bias, True, 1.0, norm.eps)

    return forward
