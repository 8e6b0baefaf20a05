"""Compare: every search method on one problem, at equal budgets, beside a proven bound, in one table."""

from rlplace.compare.comparison import OBJECTIVES, Comparison, MeanRatio, Objective, Row, mean_ratio
from rlplace.compare.equal_budgets import CompareConfig, compare

__all__ = ["OBJECTIVES", "CompareConfig", "Comparison", "MeanRatio", "Objective", "Row", "compare", "mean_ratio"]
