"""`evoformer`: the MSA and pair tracks of AlphaFold (Jumper et al. 2021, doi:10.1038/s41586-021-03819-2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlplace.workloads.workload import WorkloadConfig

AMINO_ACIDS = 23
"""20 amino acids, unknown, gap and mask."""
DISTANCE_BINS = 64
"""Bins of the distogram (supplement, section 1.9.8)."""


@dataclass(frozen=True, slots=True)
class EvoformerConfig(WorkloadConfig):
    """Options of `evoformer`; the defaults are its `small` size. A step is one protein.

    Example:
        >>> EvoformerConfig.paper().blocks
        48
    """

    NAME: ClassVar[str] = "evoformer"
    LEAST: ClassVar[dict[str, int]] = {"residues": 2}

    blocks: int = 2
    """Evoformer blocks, each with its own weights."""
    sequences: int = 16
    """Sequences in the multiple sequence alignment (MSA)."""
    residues: int = 24
    """Residues of the protein."""
    msa_width: int = 64
    """Width of the MSA track."""
    pair_width: int = 32
    """Width of the pair track, and of the triangle multiplications."""
    heads: int = 4
    """Attention heads over the MSA."""
    pair_heads: int = 2
    """Attention heads over pairs."""
    head_width: int = 16
    """Width of a head, and of the vectors whose outer product updates the pairs."""

    @classmethod
    def paper(cls) -> Self:
        """Initial training (supplement, section 1.6 and table 4): 48 blocks, 128 sequences, crops of 256 residues.

        MSA 256 wide with 8 heads, pairs 128 wide with 4 heads, heads 32 wide. The paper recomputes every block in the
        backward pass to fit it in memory (section 1.11.8); a captured step does not: `blocks` is what to reduce.
        """
        return cls(
            blocks=48, sequences=128, residues=256, msa_width=256, pair_width=128, heads=8, pair_heads=4, head_width=32
        )
