"""Seconds of every op on every device.

The table (`costs`), by roofline (`estimate`), or from real steps (`profile`).
"""

from rlplace.partitioning.bounds import lower_bound_ms
from rlplace.partitioning.dp import ContiguousSplit, dp
from rlplace.partitioning.searches import OBJECTIVES
from rlplace.partitioning.solve import METHODS, PublishedResult, PublishedRow, solve

__all__ = [
    "METHODS",
    "OBJECTIVES",
    "ContiguousSplit",
    "PublishedResult",
    "PublishedRow",
    "dp",
    "lower_bound_ms",
    "solve",
]
