"""`allocated`: what sizes take in a memory that hands out whole blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Sizes = NDArray[np.int64]


def allocated(num_bytes: Sizes, granularity: int | Sizes) -> Sizes:
    """The sizes in bytes, each rounded up to a multiple of `granularity` (`Device.memory_granularity_bytes`).

    >>> allocated(np.array([0, 1, 512, 513]), 512).tolist()
    [0, 512, 512, 1024]
    """
    rounded: Sizes = -(-num_bytes // granularity) * granularity
    return rounded
