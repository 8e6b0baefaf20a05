"""`RNNLM`: a language model of LSTM layers, unrolled in time so that every cell of the grid can be placed.

The regularised model of Zaremba et al. 2014 (arXiv:1409.2329, section 3, dropout on non-recurrent connections only),
which Mirhoseini et al. 2017 (arXiv:1706.04972) place with two layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlplace.workloads.configs.rnnlm import RNNLMConfig
from rlplace.workloads.networks.nmt import LSTMCell
from rlplace.workloads.workload import Parts, loss_of


class RNNLMOutput(NamedTuple):
    """What a forward pass returns."""

    logits: tuple[Tensor, ...]
    """(B, vocab) for every time step."""
    loss: Tensor | None
    """Scalar, where labels were given."""


class RNNLM(nn.Module):
    """Embedding, LSTM layers and output projection for `config`; the state starts from zeros."""

    def __init__(self, config: RNNLMConfig) -> None:
        super().__init__()
        self.units = config.units
        self.embedding = nn.Embedding(config.vocab, config.units)
        self.layers = nn.ModuleList(LSTMCell(config.units, config.units) for _ in range(config.layers))
        self.dropout = nn.Dropout(config.dropout)
        self.projection = nn.Linear(config.units, config.vocab)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens_TB: Tensor, labels_TB: Tensor | None = None) -> RNNLMOutput:
        """Logits of every time step, and with labels their mean cross-entropy.

        Args:
            tokens_TB: (steps, B) int64 tokens, time first so that a step is contiguous.
            labels_TB: (steps, B) int64 tokens that follow them.
        """
        embedded_TBH = self.embedding(tokens_TB)
        zeros_BH = embedded_TBH.new_zeros(embedded_TBH.shape[1], self.units)
        states = [(zeros_BH, zeros_BH)] * len(self.layers)
        logits = []
        for x_BH in embedded_TBH.unbind(0):
            for index, cell in enumerate(self.layers):
                states[index] = cell(self.dropout(x_BH), states[index])
                x_BH = states[index][0]
            logits.append(self.projection(self.dropout(x_BH)))
        if labels_TB is None:
            return RNNLMOutput(tuple(logits), None)
        losses = [self.loss(logits_BV, labels_B) for logits_BV, labels_B in zip(logits, labels_TB.unbind(0))]
        return RNNLMOutput(tuple(logits), torch.stack(losses).mean())


def build(config: RNNLMConfig) -> Parts:
    """The model with tokens and the tokens that follow them, (steps, B) each."""
    text_TB = torch.randint(config.vocab, (config.steps + 1, config.batch))
    return Parts(RNNLM(config), (text_TB[:-1].clone(), text_TB[1:].clone()), loss_of, (1, 1), "separate")
