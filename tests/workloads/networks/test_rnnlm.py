"""`RNNLM` is torch's LSTM, unrolled."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from rlplace.workloads.configs import RNNLMConfig
from rlplace.workloads.networks.nmt import RNNLM

TINY = RNNLMConfig(layers=2, units=6, batch=3, steps=4, vocab=11)


def test_it_is_torchs_lstm() -> None:
    torch.manual_seed(0)
    model, lstm = RNNLM(TINY), nn.LSTM(TINY.units, TINY.units, num_layers=TINY.layers)
    with torch.no_grad():
        for index, cell in enumerate(model.layers):
            getattr(lstm, f"weight_ih_l{index}").copy_(cell.gates.weight[:, : TINY.units])
            getattr(lstm, f"weight_hh_l{index}").copy_(cell.gates.weight[:, TINY.units :])
            getattr(lstm, f"bias_ih_l{index}").copy_(cell.gates.bias)
            getattr(lstm, f"bias_hh_l{index}").zero_()
    tokens_TB, labels_TB = torch.randint(TINY.vocab, (2, TINY.steps, TINY.batch))
    hidden_TBH, _ = lstm(model.embedding(tokens_TB))
    expected_TBV = model.projection(hidden_TBH)
    output = model(tokens_TB, labels_TB)
    torch.testing.assert_close(torch.stack(output.logits), expected_TBV)
    torch.testing.assert_close(output.loss, cross_entropy(expected_TBV.flatten(0, 1), labels_TB.flatten()))
    assert model(tokens_TB).loss is None


def test_paper_parameters() -> None:
    """By hand: 10,000 words in and out, two cells of 1,500 units that read 3,000 features."""
    config = RNNLMConfig.paper()
    with torch.device("meta"):
        count = sum(p.numel() for p in RNNLM(config).parameters())
    assert count == 2 * 10_000 * 1500 + 10_000 + 2 * (3000 + 1) * 4 * 1500
