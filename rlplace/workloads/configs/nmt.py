"""`nmt`: the two-layer translation model with attention that Mirhoseini et al. (2017) place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlplace.workloads.workload import WorkloadConfig


@dataclass(frozen=True, slots=True)
class NMTConfig(WorkloadConfig):
    """Options of `nmt`; the defaults are its `small` size.

    Example:
        >>> NMTConfig.paper().units
        1024
    """

    NAME: ClassVar[str] = "nmt"
    LEAST: ClassVar[dict[str, int]] = {"vocab": 2}

    layers: int = 2
    """LSTM layers in the encoder, and as many in the decoder."""
    units: int = 512
    """Width of the embeddings, of every LSTM cell and of the attention."""
    batch: int = 64
    """Sentence pairs per step."""
    steps: int = 10
    """Tokens in every source and every target sentence, thus the time steps that each side is unrolled over."""
    vocab: int = 4000
    """Number of tokens, the same in both languages."""
    bidirectional: bool = False
    """Whether the encoder's first layer also reads the source from its end."""

    @classmethod
    def paper(cls) -> Self:
        """The two-layer translation model of Mirhoseini et al. (2017), with figures from where they are published.

        Two layers a side, as Mirhoseini et al. (2018) call the model of the 2017 paper; 1,024 units and a vocabulary
        of 32,000 word pieces as in GNMT (Wu et al. 2016); sentences of up to 50 tokens as in Bahdanau et al. (2015).
        The batch of 64 is our choice.
        """
        return cls(layers=2, units=1024, batch=64, steps=50, vocab=32000)
