"""`NMT`: translation by LSTM layers with attention, unrolled in time so that every step's ops can be placed.

The sequence-to-sequence model of Sutskever et al. 2014 (arXiv:1409.3215), whose decoder starts from the encoder's last
states, with the global attention of Luong et al. 2015 (arXiv:1508.04025, section 3.1) and its score `general`. There is
no input feeding (their section 3.3): it would make the first decoder layer wait for the last layer's previous step,
the wait that GNMT (Wu et al. 2016, arXiv:1609.08144, section 3.3) avoids so that layers work on several steps at once.

`RNNLM`: a language model of LSTM layers, unrolled in time so that every cell of the grid can be placed.

The regularised model of Zaremba et al. 2014 (arXiv:1409.2329, section 3, dropout on non-recurrent connections only),
which Mirhoseini et al. 2017 (arXiv:1706.04972) place with two layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlplace.workloads.catalog import Parts, loss_of
from rlplace.workloads.configs import NMTConfig, RNNLMConfig

State = tuple[Tensor, Tensor]
"""Hidden and cell state of one LSTM layer, (B, H) each."""


class NMTOutput(NamedTuple):
    """The result of a forward pass."""

    logits: tuple[Tensor, ...]
    """(B, vocab) for every target step, of a language model for every step."""
    loss: Tensor | None
    """Scalar, where labels were given."""


class NMT(nn.Module):
    """Encoder, attention, decoder and output projection for `config`."""

    def __init__(self, config: NMTConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.decoder = Decoder(config, memory_size=self.encoder.memory_size)
        self.projection = nn.Linear(config.units, config.vocab)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, source_TB: Tensor, target_TB: Tensor, labels_TB: Tensor | None = None) -> NMTOutput:
        """Logits of every target step, and with labels their mean cross-entropy.

        Args:
            source_TB: (steps, B) int64 tokens of the source sentences, time first so that a step is contiguous.
            target_TB: (steps, B) int64 tokens that the decoder reads.
            labels_TB: (steps, B) int64 tokens that it should predict.
        """
        outputs = self.decoder(target_TB, *self.encoder(source_TB))
        logits = tuple(self.projection(output_BH) for output_BH in outputs)
        return NMTOutput(logits, _mean_loss(self.loss, logits, labels_TB))


class LSTMCell(nn.Module):
    """One step of an LSTM layer (Hochreiter & Schmidhuber 1997, Gers et al. 2000), its gates in one matrix product.

    Rows of `gates.weight` are the input, forget, cell and output gate, its columns the input and the hidden state.
    """

    def __init__(self, input_size: int, units: int) -> None:
        super().__init__()
        self.gates = nn.Linear(input_size + units, 4 * units)

    def forward(self, x_BI: Tensor, state: State) -> State:
        """The state after reading `x_BI`, shape (B, input_size)."""
        hidden_BH, cell_BH = state
        gates_B4H = self.gates(torch.cat((x_BI, hidden_BH), dim=1))
        into, forget, candidate, out = gates_B4H.chunk(4, dim=1)  # (B, H) each
        cell_BH = torch.sigmoid(forget) * cell_BH + torch.sigmoid(into) * torch.tanh(candidate)
        return torch.sigmoid(out) * torch.tanh(cell_BH), cell_BH


class Encoder(nn.Module):
    """LSTM layers over the source; optionally the first reads in both directions, as in GNMT (section 3.2)."""

    def __init__(self, config: NMTConfig) -> None:
        super().__init__()
        units = config.units
        first_width = 2 * units if config.bidirectional else units
        self.units = units
        self.memory_size = first_width if config.layers == 1 else units
        """Width of the encoder's outputs, M."""
        self.embedding = nn.Embedding(config.vocab, units)
        widths = [first_width if index == 1 else units for index in range(config.layers)]
        self.layers = nn.ModuleList(LSTMCell(width, units) for width in widths)
        self.backward_layer = LSTMCell(units, units) if config.bidirectional else None

    def forward(self, source_TB: Tensor) -> tuple[Tensor, list[State]]:
        """Outputs of the last layer, (B, steps, M), and every layer's last state (of its forward direction)."""
        embedded_TBH = self.embedding(source_TB)
        zeros_BH = embedded_TBH.new_zeros(embedded_TBH.shape[1], self.units)
        start = (zeros_BH, zeros_BH)
        inputs = embedded_TBH.unbind(0)
        last_states = []
        for index, cell in enumerate(self.layers):
            outputs, last = _unroll(cell, inputs, start)
            last_states.append(last)
            if index == 0 and self.backward_layer is not None:
                reversed_outputs, _ = _unroll(self.backward_layer, inputs[::-1], start)
                outputs = [torch.cat(pair, dim=1) for pair in zip(outputs, reversed_outputs[::-1])]
            inputs = tuple(outputs)
        return torch.stack(inputs, dim=1), last_states


class Decoder(nn.Module):
    """LSTM layers over the target, then attention over the encoder's outputs at every step."""

    def __init__(self, config: NMTConfig, memory_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.units)
        self.layers = nn.ModuleList(LSTMCell(config.units, config.units) for _ in range(config.layers))
        self.attention = Attention(config.units, memory_size)

    def forward(self, target_TB: Tensor, memory_BTM: Tensor, states: Sequence[State]) -> list[Tensor]:
        """The attentional state, (B, H), of every target step; `states` are the layers' first states."""
        states = list(states)
        keys_BTH = self.attention.keys(memory_BTM)
        outputs = []
        for x_BH in self.embedding(target_TB).unbind(0):
            for index, cell in enumerate(self.layers):
                states[index] = cell(x_BH, states[index])
                x_BH = states[index][0]
            outputs.append(self.attention(x_BH, keys_BTH, memory_BTM))
        return outputs


class Attention(nn.Module):
    """Global attention with score `general` (Luong et al. 2015, equations 5, 7 and 8)."""

    def __init__(self, units: int, memory_size: int) -> None:
        super().__init__()
        self.keys = nn.Linear(memory_size, units, bias=False)
        self.combine = nn.Linear(memory_size + units, units, bias=False)

    def forward(self, hidden_BH: Tensor, keys_BTH: Tensor, memory_BTM: Tensor) -> Tensor:
        """The attentional state, (B, H), of a decoder state; `keys_BTH` is `self.keys(memory_BTM)`, made once."""
        scores_BT1 = torch.bmm(keys_BTH, hidden_BH.unsqueeze(2))
        weights_B1T = torch.softmax(scores_BT1, dim=1).transpose(1, 2)
        context_BM = torch.bmm(weights_B1T, memory_BTM).squeeze(1)
        return torch.tanh(self.combine(torch.cat((context_BM, hidden_BH), dim=1)))


def _mean_loss(loss: nn.Module, logits: Sequence[Tensor], labels_TB: Tensor | None) -> Tensor | None:
    """The mean of the losses of all steps, logits (B, vocab) each; None without labels."""
    labels = () if labels_TB is None else labels_TB.unbind(0)
    return torch.stack([loss(*pair) for pair in zip(logits, labels, strict=True)]).mean() if labels else None


def _unroll(cell: nn.Module, inputs: Sequence[Tensor], state: State) -> tuple[list[Tensor], State]:
    """Hidden states after every input, and the last state."""
    outputs = []
    for x_BI in inputs:
        state = cell(x_BI, state)
        outputs.append(state[0])
    return outputs, state


def build(config: NMTConfig) -> Parts:
    """The model with source, target and label tokens, (steps, B) each."""
    tokens_TB = (torch.randint(config.vocab, (config.steps, config.batch)) for _ in range(3))
    return Parts(NMT(config), tuple(tokens_TB), loss_of, (1, 1, 1), "separate")


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

    def forward(self, tokens_TB: Tensor, labels_TB: Tensor | None = None) -> NMTOutput:
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
        return NMTOutput(tuple(logits), _mean_loss(self.loss, logits, labels_TB))


def build_rnnlm(config: RNNLMConfig) -> Parts:
    """The model with tokens and the tokens that follow them, (steps, B) each."""
    text_TB = torch.randint(config.vocab, (config.steps + 1, config.batch))
    return Parts(RNNLM(config), (text_TB[:-1].clone(), text_TB[1:].clone()), loss_of, (1, 1), "separate")
