"""`llama`: the language model of Touvron et al. 2023 (arXiv:2302.13971), from `transformers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlplace.workloads.workload import WorkloadConfig


@dataclass(frozen=True, slots=True)
class LlamaConfig(WorkloadConfig):
    """Options of `llama`; the defaults are its `small` size.

    LLaMA-13B is `llama@paper,layers=40,width=5120,heads=40,kv_heads=40,mlp=13824`.

    Example:
        >>> LlamaConfig.paper().mlp
        11008
    """

    NAME: ClassVar[str] = "llama"
    LEAST: ClassVar[dict[str, int]] = {"vocab": 2, "tokens": 2}

    layers: int = 4
    """Transformer layers."""
    width: int = 256
    """Width of a token."""
    heads: int = 4
    """Attention heads; a divisor of `width`, which leaves each head an even width."""
    kv_heads: int = 4
    """Heads of keys and values; a divisor of `heads`."""
    mlp: int = 688
    """Width of the gated feed-forward layers."""
    batch: int = 4
    """Sequences per step."""
    tokens: int = 64
    """Tokens in a sequence."""
    vocab: int = 8000
    """Number of tokens."""

    def _check(self) -> None:
        self._require_divisor("heads", "width")
        self._require_divisor("kv_heads", "heads")
        self._require(self.width // self.heads % 2 == 0, "heads", f"to leave width={self.width} even heads")

    @classmethod
    def paper(cls) -> Self:
        """LLaMA-7B (table 2): 32 layers, 4,096 wide, 32 heads, 32,000 tokens, contexts of 2,048 tokens.

        The paper's batch of 4 million tokens takes many machines; one sequence a step is our choice.
        """
        return cls(layers=32, width=4096, heads=32, kv_heads=32, mlp=11008, batch=1, tokens=2048, vocab=32000)
