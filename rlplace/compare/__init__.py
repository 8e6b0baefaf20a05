"""Compare: every search method on one problem, at equal budgets, beside a proven bound, in one table.

`equal_budgets` runs methods, `pytorch_baselines` plain PyTorch beside them; `comparison` is the table, and
`run_compare` the command. `simulated_and_measured` holds the simulator against measured steps.
"""

from rlplace.compare.comparison import OBJECTIVES, Comparison, MeanRatio, Objective, Row, mean_ratio
from rlplace.compare.equal_budgets import CompareConfig, compare

__all__ = ["OBJECTIVES", "CompareConfig", "Comparison", "MeanRatio", "Objective", "Row", "compare", "mean_ratio"]
