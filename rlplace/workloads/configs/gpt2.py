"""`gpt2`: the language model of Radford et al. 2019 (Language Models are Unsupervised Multitask Learners)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlplace.workloads.workload import WorkloadConfig


@dataclass(frozen=True, slots=True)
class GPT2Config(WorkloadConfig):
    """Options of `gpt2`; the defaults are its `small` size.

    The paper's four sizes: `gpt2@paper` itself, medium `gpt2@paper,layers=24,width=1024,heads=16`, large
    `gpt2@paper,layers=36,width=1280,heads=20`, XL `gpt2@paper,layers=48,width=1600,heads=25`.

    Example:
        >>> GPT2Config.paper().tokens
        1024
    """

    NAME: ClassVar[str] = "gpt2"
    LEAST: ClassVar[dict[str, int]] = {"vocab": 2, "tokens": 2}

    layers: int = 4
    """Transformer layers."""
    width: int = 256
    """Width of a token; feed-forward layers are four times as wide."""
    heads: int = 4
    """Attention heads; a divisor of `width`."""
    batch: int = 4
    """Sequences per step."""
    tokens: int = 64
    """Tokens in a sequence."""
    vocab: int = 8000
    """Number of tokens."""
    dropout: float = 0.0
    """Probability of dropping a feature or an attention weight; 0 keeps the step deterministic."""

    def _check(self) -> None:
        self._require_divisor("heads", "width")

    @classmethod
    def paper(cls) -> Self:
        """The smallest of the paper's four (table 2): 12 layers, 768 wide, 50,257 tokens, contexts of 1,024 tokens.

        The paper's batch of 512 takes many machines; 8 sequences a step is our choice.
        """
        return cls(layers=12, width=768, heads=12, batch=8, tokens=1024, vocab=50257)
