"""`rnnlm`: the two-layer LSTM language model that Mirhoseini et al. (2017) place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlplace.workloads.workload import WorkloadConfig


@dataclass(frozen=True, slots=True)
class RNNLMConfig(WorkloadConfig):
    """Options of `rnnlm`; the defaults are its `small` size.

    The larger models of Jozefowicz et al. (2016) are within reach: `rnnlm@paper,units=8192,steps=20,vocab=793471` is
    their two layers of 8,192 units without projection.

    Example:
        >>> RNNLMConfig.paper().units
        1500
    """

    NAME: ClassVar[str] = "rnnlm"
    LEAST: ClassVar[dict[str, int]] = {"vocab": 2}

    layers: int = 2
    """LSTM layers."""
    units: int = 384
    """Width of the embedding and of every LSTM cell."""
    batch: int = 32
    """Sequences per step."""
    steps: int = 12
    """Tokens in every sequence, thus the time steps that the layers are unrolled over."""
    vocab: int = 4000
    """Number of tokens."""
    dropout: float = 0.0
    """Probability of dropping what enters a layer or leaves the last (Zaremba et al. 2014); 0 is deterministic."""

    @classmethod
    def paper(cls) -> Self:
        """Two layers, as Mirhoseini et al. (2017) place, at the `large` figures of Zaremba et al. (2014, section 4.1).

        1,500 units, 35 steps, the 10,000 words of the Penn Treebank. The batch of 64 is our choice, as in `nmt`.
        """
        return cls(layers=2, units=1500, batch=64, steps=35, vocab=10000)
