"""`Slicing`: how the tensors of a batch are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Slicing:
    """Which tensors of a step are cut, where, and into how many samples each.

    Attributes:
        dims: for every tensor among the flattened inputs, then the targets: the dimension that it is cut along; None
            for one that all micro-batches share.
        sizes: samples of each of the K micro-batches; their sum is the batch.
    """

    dims: tuple[int | None, ...]
    sizes: tuple[int, ...]

    @property
    def num_micro_batches(self) -> int:
        """K."""
        return len(self.sizes)

    @property
    def batch(self) -> int:
        """Samples of the whole batch."""
        return sum(self.sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first sample of each micro-batch."""
        return tuple(sum(self.sizes[:index]) for index in range(len(self.sizes)))

    def weights(self, kind: Literal["mean", "sum"]) -> tuple[float, ...]:
        """What the loss of each micro-batch counts: its part of the batch where losses are means, 1 for sums."""
        return tuple(size / self.batch if kind == "mean" else 1.0 for size in self.sizes)

    def cut(self, tensors: Sequence[torch.Tensor], index: int) -> list[torch.Tensor]:
        """The tensors of micro-batch `index`: views of those that are cut, and the shared ones as they are."""
        start, size = self.starts[index], self.sizes[index]
        return [
            tensor if dim is None else tensor.narrow(dim, start, size)
            for tensor, dim in zip(tensors, self.dims, strict=True)
        ]


def even_sizes(batch: int, count: int) -> tuple[int, ...]:
    """`batch` samples in `count` slices whose sizes differ by one at most, larger ones first."""
    small, larger = divmod(batch, count)
    return (small + 1,) * larger + (small,) * (count - larger)
