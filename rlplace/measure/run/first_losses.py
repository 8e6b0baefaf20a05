"""`FirstLosses`: tells a placement that breaks the arithmetic from a model that gives NaN wherever it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from rlplace.errors import RunnerError

WHY = (
    "the loss is NaN after the first step from the captured parameters, where another placement of the same step gives "
    "a number"
)


class NotANumber(RunnerError):
    """A placement whose first step returned NaN, where others of the same step return numbers."""

    def __init__(self) -> None:
        super().__init__(WHY)


class FirstLosses:
    """What the first step of every placement returned, each from the captured parameters.

    Later steps are not looked at: placements of one race train the same parameters on one batch, so a loss that runs
    away there says nothing about the placement whose turn it was.

    Attributes:
        saw_numbers: whether any step returned no NaN: the model itself is fine then.
    """

    def __init__(self) -> None:
        self.saw_numbers = False

    def is_nan(self, result: Any) -> bool:
        """Whether a first step's result (the loss, or the output) holds a NaN and no earlier result was free of them.

        Args:
            result: tensors, nested.

        Raises:
            NotANumber: it holds one, and an earlier result was free of them.
        """
        if not has_nan(result):
            self.saw_numbers = True
            return False
        if self.saw_numbers:
            raise NotANumber
        return True


def has_nan(result: Any) -> bool:
    """Whether any tensor in `result`, nested tuples, lists or dicts, holds a NaN."""
    return any(
        bool(torch.isnan(leaf).any())
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
    )
