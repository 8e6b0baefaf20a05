"""Sums of gradients over micro-batches, grown as they come."""

from __future__ import annotations

import torch

from rlplace.graphs.capturing.micro.assembly import Assembly
from rlplace.graphs.gradient_sums import LATER_HALF, GradientSum, gradient_sums
from rlplace.graphs.opgraph import BACKWARD
from rlplace.graphs.program import Ref

aten = torch.ops.aten


class Sum:
    """The sum of one gradient over micro-batches, in the tree of `gradient_sums`, each part with its later half.

    Args:
        assembly: takes the additions.
        count: K.
        name: of the parameter.
        module: that it belongs to.
    """

    def __init__(self, assembly: Assembly, count: int, name: str, module: str) -> None:
        self._assembly, self._name, self._module = assembly, name, module
        self._parts: list[Ref | None] = [None] * (2 * count - 1)
        self._num_added = 0
        self._due: dict[int, list[tuple[int, GradientSum]]] = {}  # by micro-batch, what it completes, and its part
        for part, one in enumerate(gradient_sums(count, LATER_HALF), start=count):
            self._due.setdefault(one.last, []).append((part, one))

    @property
    def root(self) -> Ref | None:
        """The whole sum; None where no micro-batch has a gradient."""
        return self._parts[-1]

    @property
    def is_sum(self) -> bool:
        """Whether it adds anything up: else it is the gradient of a single micro-batch, or none."""
        return self._num_added > 0

    def add(self, micro_batch: int, gradient: Ref | None) -> None:
        """Takes the gradient of a micro-batch, and adds up what it completes."""
        self._parts[micro_batch] = gradient
        for part, one in self._due.get(micro_batch, ()):
            left, right = self._parts[one.left], self._parts[one.right]
            if left is None or right is None:
                self._parts[part] = right if left is None else left
                continue
            self._num_added += 1
            self._parts[part] = self._assembly.call(
                aten.add.Tensor,
                left,
                right,
                name=f"sum_{self._name}",
                module=self._module,
                phase=BACKWARD,
                micro_batch=one.micro_batch,
            )
