"""The published benchmark of Tarnawski et al. (NeurIPS 2020): contiguous and free splits of layer and op graphs.

Its workloads and two objectives (`objectives`), solvers (`contiguous`, `kernel_anneal`; `solvers` calls all of them),
and `rlplace compare` on its files (`compare`). Other rooms import from here alone.
"""

from typing import TYPE_CHECKING

from rlplace.lazy_imports import lazy

if TYPE_CHECKING:
    from rlplace.partitioning.compare import is_published_file, run_published
    from rlplace.partitioning.contiguous import ContiguousSplit, dp
    from rlplace.partitioning.objectives import OBJECTIVES, published_problem
    from rlplace.partitioning.solvers import METHODS, PublishedResult, PublishedRow, lower_bound_ms, solve
else:
    __getattr__ = lazy(__name__, __file__)

__all__ = [
    "METHODS",
    "OBJECTIVES",
    "ContiguousSplit",
    "PublishedResult",
    "PublishedRow",
    "dp",
    "is_published_file",
    "lower_bound_ms",
    "published_problem",
    "run_published",
    "solve",
]
