"""Compare: every search method on one problem, at equal budgets, beside a proven bound, in one table."""

from rlplace.compare.ratios import MeanRatio, mean_ratio
from rlplace.compare.row import OBJECTIVES, Comparison, Objective, Row
from rlplace.compare.run import CompareConfig, compare

__all__ = ["OBJECTIVES", "CompareConfig", "Comparison", "MeanRatio", "Objective", "Row", "compare", "mean_ratio"]
