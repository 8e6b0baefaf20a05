"""`mixtral`: the mixture of experts of Jiang et al. 2024 (arXiv:2401.04088).

From `transformers`, but for the experts: `networks/experts.py` says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlplace.workloads.workload import WorkloadConfig


@dataclass(frozen=True, slots=True)
class MixtralConfig(WorkloadConfig):
    """Options of `mixtral`; the defaults are its `small` size.

    Example:
        >>> MixtralConfig.paper().experts
        8
    """

    NAME: ClassVar[str] = "mixtral"
    LEAST: ClassVar[dict[str, int]] = {"vocab": 2, "tokens": 2}

    layers: int = 2
    """Transformer layers."""
    width: int = 128
    """Width of a token."""
    heads: int = 4
    """Attention heads; a divisor of `width`, which leaves each head an even width."""
    kv_heads: int = 2
    """Heads of keys and values; a divisor of `heads`."""
    mlp: int = 256
    """Width of an expert's gated feed-forward layers."""
    experts: int = 4
    """Experts in a layer."""
    chosen: int = 2
    """Experts that a token is sent to; at most `experts`."""
    capacity: int = 125
    """Tokens that an expert has room for, in percent of an even share; the others skip it (see `Experts`)."""
    batch: int = 2
    """Sequences per step."""
    tokens: int = 32
    """Tokens in a sequence."""
    vocab: int = 4000
    """Number of tokens."""

    def _check(self) -> None:
        self._require_divisor("heads", "width")
        self._require_divisor("kv_heads", "heads")
        self._require(self.width // self.heads % 2 == 0, "heads", f"to leave width={self.width} even heads")
        self._require(self.chosen <= self.experts, "chosen", f"at most experts={self.experts}")

    @classmethod
    def paper(cls) -> Self:
        """Mixtral 8x7B (table 1): 32 layers, 4,096 wide, 32 heads, 8 of keys and values, 2 of 8 experts a token.

        The paper's context is 32,768 tokens; one sequence of 2,048 a step is our choice. Its experts drop no token;
        ours have the room of Switch (Fedus et al. 2021), 1.25 of an even share.
        """
        return cls(
            layers=32,
            width=4096,
            heads=32,
            kv_heads=8,
            mlp=14336,
            experts=8,
            chosen=2,
            batch=1,
            tokens=2048,
            vocab=32000,
        )
