"""`t5`: the text-to-text encoder and decoder of Raffel et al. 2019 (arXiv:1910.10683), from `transformers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlplace.workloads.workload import WorkloadConfig


@dataclass(frozen=True, slots=True)
class T5Config(WorkloadConfig):
    """Options of `t5`; the defaults are its `small` size.

    T5-large is `t5@paper,layers=24,width=1024,heads=16`.

    Example:
        >>> T5Config.paper().tokens, T5Config.paper().target_tokens
        (512, 114)
    """

    NAME: ClassVar[str] = "t5"
    LEAST: ClassVar[dict[str, int]] = {"vocab": 2}

    layers: int = 2
    """Transformer layers in the encoder, and as many in the decoder."""
    width: int = 256
    """Width of a token; feed-forward layers are four times as wide."""
    heads: int = 4
    """Attention heads; a divisor of `width`."""
    batch: int = 4
    """Pairs of texts per step."""
    tokens: int = 64
    """Tokens in a source text."""
    target_tokens: int = 32
    """Tokens in a target text."""
    vocab: int = 8000
    """Number of tokens."""
    dropout: float = 0.0
    """Probability of dropping a feature or an attention weight; 0 keeps the step deterministic."""

    def _check(self) -> None:
        self._require_divisor("heads", "width")

    @classmethod
    def paper(cls) -> Self:
        """The paper's baseline, T5-base (section 3.1): 12 + 12 layers, 768 wide, 12 heads, 32,128 tokens.

        Sources of 512 tokens, of which 15 % in spans of 3 are predicted: targets of 114, as in the authors' code. The
        paper's batch of 128 is spread over many chips; 8 pairs a step is our choice.
        """
        return cls(layers=12, width=768, heads=12, batch=8, tokens=512, target_tokens=114, vocab=32128)
