"""Search for the published benchmark: contiguous splits by dynamic programming, annealing, integer programs, bounds."""

from rlplace.search.published.bounds import lower_bound_ms
from rlplace.search.published.dp import ContiguousSplit, dp
from rlplace.search.published.objectives import OBJECTIVES
from rlplace.search.published.solve import METHODS, PublishedResult, PublishedRow, solve

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
