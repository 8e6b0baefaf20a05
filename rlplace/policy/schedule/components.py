"""`Components`: groupings and weights of the list scheduler, each a guess at any problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.env.list_schedules import FEATURES, FIRST_WEIGHTS, GROUPINGS, Pair
from rlplace.errors import InvalidValue


@dataclass(frozen=True, eq=False)
class Components:
    """C groupings with weights.

    Attributes:
        grouping: (C,) int64 places in `GROUPINGS`.
        weights: (C, 9) float64, in the order of `FEATURES`.
    """

    grouping: NDArray[np.int64]
    weights: NDArray[np.float64]

    def __post_init__(self) -> None:
        if self.weights.shape != (len(self.grouping), len(FEATURES)) or not len(self.grouping):
            expected = f"one at least, each a grouping and {len(FEATURES)} weights"
            raise InvalidValue("components", self.weights.shape, expected, where="policy schedule")

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Components:
        """Those of names of groupings with weights."""
        return cls(
            np.array([GROUPINGS.index(name) for name, _ in pairs], dtype=np.int64),
            np.array([weights for _, weights in pairs], dtype=np.float64),
        )

    @classmethod
    def listed(cls) -> Components:
        """The list that small searches begin with, in its order."""
        return cls.of(FIRST_WEIGHTS)

    def __len__(self) -> int:
        return len(self.grouping)

    def pair(self, component: int) -> Pair:
        """The grouping's name and the weights of one."""
        return GROUPINGS[int(self.grouping[component])], tuple(self.weights[component].tolist())
