"""`dlrm`: the recommendation model of Naumov et al. 2019 (arXiv:1906.00091)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlplace.workloads.workload import WorkloadConfig

CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Distinct values of each categorical feature of the Criteo Kaggle data, which the paper's model is made for."""


@dataclass(frozen=True, slots=True)
class DLRMConfig(WorkloadConfig):
    """Options of `dlrm`; the defaults are its `small` size.

    Example:
        >>> sum(DLRMConfig.paper().rows) * DLRMConfig.paper().width
        540201232
    """

    NAME: ClassVar[str] = "dlrm"
    LEAST: ClassVar[dict[str, int]] = {"hidden": 8}

    tables: int = 26
    """Embedding tables, one a categorical feature."""
    max_rows: int = 2000
    """Most rows of a table; a feature with more values shares rows (the k-th table has the k-th of `CRITEO_ROWS`)."""
    width: int = 16
    """Width of an embedding, and of the bottom MLP's output."""
    dense: int = 13
    """Continuous features."""
    lookups: int = 1
    """Rows that a sample reads from each table; they are added."""
    hidden: int = 512
    """Width of the first hidden layer of both MLPs; the second has half, the bottom's third an eighth of it."""
    batch: int = 128
    """Samples per step."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of every table."""
        return tuple(min(CRITEO_ROWS[table % len(CRITEO_ROWS)], self.max_rows) for table in range(self.tables))

    @classmethod
    def paper(cls) -> Self:
        """The paper's model for Criteo Kaggle (section 5): 26 full tables of width 16, 540 million parameters.

        MLPs of 512-256-64-16 and 512-256-1 and the batch of 128 as in the authors' code.
        """
        return cls(max_rows=max(CRITEO_ROWS))
