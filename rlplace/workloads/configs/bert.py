"""`bert`: BERT's pre-training step of Devlin et al. 2018 (arXiv:1810.04805), from `transformers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlplace.workloads.workload import WorkloadConfig


@dataclass(frozen=True, slots=True)
class BertConfig(WorkloadConfig):
    """Options of `bert`; the defaults are its `small` size.

    BERT-large is `bert@paper,layers=24,width=1024,heads=16`.

    Example:
        >>> BertConfig.paper().layers
        12
    """

    NAME: ClassVar[str] = "bert"
    LEAST: ClassVar[dict[str, int]] = {"vocab": 2}

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
        """BERT-base (section 3): 12 layers, 768 wide, 12 heads, 30,522 word pieces, sequences of 512 tokens.

        The paper's batch of 256 is spread over 16 chips; 16 sequences a step is our choice.
        """
        return cls(layers=12, width=768, heads=12, batch=16, tokens=512, vocab=30522)
