"""The published benchmark of Tarnawski et al. (NeurIPS 2020): contiguous and free splits of layer and op graphs.

Its two objectives (`objectives`), the workload as a problem (`problem`), solvers (`dp`, `searches` with
`kernel_anneal`, and `solve`, which calls all of them), and `rlplace compare` on its files (`compare`).
"""

from rlplace.partitioning.dp import ContiguousSplit, dp
from rlplace.partitioning.searches import OBJECTIVES
from rlplace.partitioning.solve import METHODS, PublishedResult, PublishedRow, lower_bound_ms, solve

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
