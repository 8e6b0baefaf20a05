"""Sums of gradients over micro-batches: in what order."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlplace.graphs.capturing.micro.assembly import Assembly
from rlplace.graphs.opgraph import BACKWARD
from rlplace.graphs.program import Ref

aten = torch.ops.aten

Range = tuple[int, int]
"""Micro-batches, from the first up to the one behind the last."""


def splits(first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """How micro-batches `first` up to `end` are summed: (first, middle, end) of every sum, those of parts before it.

    A balanced tree over contiguous ranges: replicas with equal shares of a power of two sum what is theirs, and send
    one tensor each.

    >>> list(splits(0, 4))
    [(0, 1, 2), (2, 3, 4), (0, 2, 4)]
    """
    if end - first < 2:
        return
    middle = (first + end + 1) // 2
    yield from splits(first, middle)
    yield from splits(middle, end)
    yield first, middle, end


class Sum:
    """The sum of one gradient over micro-batches, grown as they come.

    Args:
        assembly: takes the additions.
        count: K.
        name: of the parameter.
        module: that it belongs to.
    """

    def __init__(self, assembly: Assembly, count: int, name: str, module: str) -> None:
        self._assembly, self._count, self._name, self._module = assembly, count, name, module
        self._partial: dict[Range, Ref] = {}
        self._num_added = 0
        self._splits: dict[int, list[tuple[int, int]]] = {}  # by where a range ends: its first, and where it is split
        for first, middle, end in splits(0, count):
            self._splits.setdefault(end, []).append((first, middle))

    @property
    def root(self) -> Ref | None:
        """The whole sum; None where no micro-batch has a gradient."""
        return self._partial.get((0, self._count))

    @property
    def is_sum(self) -> bool:
        """Whether it adds anything up: else it is the gradient of a single micro-batch, or none."""
        return self._num_added > 0

    def add(self, micro_batch: int, gradient: Ref | None) -> None:
        """Takes the gradient of a micro-batch, and adds up the ranges that it completes."""
        if gradient is not None:
            self._partial[micro_batch, micro_batch + 1] = gradient
        end = micro_batch + 1
        for first, middle in self._splits.get(end, ()):
            terms = [self._partial.pop(part) for part in ((first, middle), (middle, end)) if part in self._partial]
            if len(terms) == 2:
                is_root = (first, end) == (0, self._count)
                self._num_added += 1
                terms = [
                    self._assembly.call(
                        aten.add.Tensor,
                        *terms,
                        name=f"sum_{self._name}",
                        module=self._module,
                        phase=BACKWARD,
                        micro_batch=-1 if is_root else micro_batch,
                    )
                ]
            if terms:
                self._partial[first, end] = terms[0]
