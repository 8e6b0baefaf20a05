"""Recurrent networks unrolled over steps, for development alone: no workload of the package and no benchmark uses them.

`Translator` is an encoder and a decoder of gated recurrent units (Cho et al. 2014, arXiv:1406.1078) with additive
attention (Bahdanau et al. 2015, arXiv:1409.0473), whose context enters the decoder's next step; `ResidualStack` a
language model of many such layers, each added to what it reads (as in Wu et al. 2016, arXiv:1609.08144, section 3.1).
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace.graphs import OpGraph, capture


class Translator(nn.Module):
    """Bahdanau's encoder and decoder, their `layers` of `units` each."""

    NUM_INPUTS = 3

    def __init__(self, layers: int, units: int, vocab: int) -> None:
        super().__init__()
        self.units = units
        self.source, self.target = nn.Embedding(vocab, units), nn.Embedding(vocab, units)
        self.ahead, self.back = nn.GRUCell(units, units), nn.GRUCell(units, units)
        self.join = nn.Linear(2 * units, units)
        self.encoder = nn.ModuleList(nn.GRUCell(units, units) for _ in range(layers - 1))
        self.decoder = nn.ModuleList(nn.GRUCell(units if index else 2 * units, units) for index in range(layers))
        self.keys, self.query, self.score = nn.Linear(units, units), nn.Linear(units, units), nn.Linear(units, 1)
        self.logits = nn.Linear(2 * units, vocab)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, source_TB: Tensor, target_TB: Tensor, labels_TB: Tensor) -> Tensor:
        """The mean cross-entropy of the labels; all three are (steps, B) int64 tokens."""
        words = self.source(source_TB).unbind(0)
        zeros_BH = words[0].new_zeros(words[0].shape[0], self.units)
        ahead, back = unroll(self.ahead, words, zeros_BH), unroll(self.back, words[::-1], zeros_BH)[::-1]
        hidden = [torch.tanh(self.join(torch.cat(pair, dim=1))) for pair in zip(ahead, back, strict=True)]
        for cell in self.encoder:
            hidden = unroll(cell, hidden, zeros_BH)
        memory_BTH = torch.stack(hidden, dim=1)
        keys_BTH = self.keys(memory_BTH)
        states = [hidden[-1]] * len(self.decoder)
        losses = []
        for word_BH, label_B in zip(self.target(target_TB).unbind(0), labels_TB.unbind(0), strict=True):
            scores_BT1 = self.score(torch.tanh(keys_BTH + self.query(states[-1]).unsqueeze(1)))
            context_BH = (torch.softmax(scores_BT1, dim=1) * memory_BTH).sum(dim=1)
            below = torch.cat((word_BH, context_BH), dim=1)
            for index, cell in enumerate(self.decoder):
                states[index] = below = cell(below, states[index])
            losses.append(self.loss(self.logits(torch.cat((below, context_BH), dim=1)), label_B))
        return torch.stack(losses).mean()


class ResidualStack(nn.Module):
    """A language model of `layers` of `units`, each added to what it reads; its last layer's outputs are one tensor."""

    NUM_INPUTS = 2

    def __init__(self, layers: int, units: int, vocab: int) -> None:
        super().__init__()
        self.units = units
        self.embedding = nn.Embedding(vocab, units)
        self.layers = nn.ModuleList(nn.GRUCell(units, units) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(units) for _ in range(layers))
        self.logits = nn.Linear(units, vocab)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens_TB: Tensor, labels_TB: Tensor) -> Tensor:
        """The mean cross-entropy of the labels; both are (steps, B) int64 tokens."""
        hidden = list(self.embedding(tokens_TB).unbind(0))
        zeros_BH = torch.zeros_like(hidden[0])
        for cell, norm in zip(self.layers, self.norms, strict=True):
            outputs = unroll(cell, [norm(x_BH) for x_BH in hidden], zeros_BH)
            hidden = [x_BH + output_BH for x_BH, output_BH in zip(hidden, outputs, strict=True)]
        loss: Tensor = self.loss(self.logits(torch.stack(hidden)).flatten(0, 1), labels_TB.flatten())
        return loss


def unroll(cell: nn.Module, inputs: list[Tensor] | tuple[Tensor, ...], state_BH: Tensor) -> list[Tensor]:
    """The states (B, H) of a cell after every input."""
    return list(accumulate(inputs, lambda last_BH, x_BI: cell(x_BI, last_BH), initial=state_BH))[1:]


UNROLLED = {
    "translator-16": (Translator, {"layers": 2, "units": 768, "vocab": 20000}, 16, 128),
    "stack-24": (ResidualStack, {"layers": 6, "units": 1024, "vocab": 16000}, 24, 48),
    "translator-28": (Translator, {"layers": 1, "units": 1280, "vocab": 8000}, 28, 32),
    "stack-12": (ResidualStack, {"layers": 3, "units": 2048, "vocab": 40000}, 12, 96),
}
"""Networks with their options, steps and batch."""


@cache
def unrolled_graph_of(name: str) -> OpGraph:
    """The captured training step of one of `UNROLLED`, never allocated."""
    network, options, steps, batch = UNROLLED[name]
    with FakeTensorMode():
        tokens_TB = [torch.randint(options["vocab"], (steps, batch)) for _ in range(network.NUM_INPUTS)]
        return capture(network(**options), tuple(tokens_TB), lambda loss: loss, "adam")
