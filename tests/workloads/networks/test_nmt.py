"""`NMT` and `RNNLM` are torch's LSTM, unrolled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import cross_entropy

from rlplace.workloads import NMTConfig
from rlplace.workloads.configs import RNNLMConfig
from rlplace.workloads.networks.nmt import NMT, RNNLM, Attention, Encoder, LSTMCell

TINY = NMTConfig(layers=2, units=6, batch=3, steps=4, vocab=11)
CONFIGS = [
    TINY,
    NMTConfig(layers=1, units=6, batch=3, steps=4, vocab=11),
    NMTConfig(layers=1, units=6, batch=3, steps=4, vocab=11, bidirectional=True),
    NMTConfig(layers=3, units=6, batch=3, steps=4, vocab=11, bidirectional=True),
    NMTConfig(layers=1, units=2, batch=1, steps=1, vocab=2),
]


def make(config):
    torch.manual_seed(0)
    model = NMT(config)
    tokens = [torch.randint(config.vocab, (config.steps, config.batch)) for _ in range(3)]
    return model, tokens


def copy_to_torch(cell, lstm, suffix):
    """Gives a layer of `nn.LSTM` the weights of our cell."""
    width = cell.gates.in_features - lstm.hidden_size
    with torch.no_grad():
        getattr(lstm, f"weight_ih_{suffix}").copy_(cell.gates.weight[:, :width])
        getattr(lstm, f"weight_hh_{suffix}").copy_(cell.gates.weight[:, width:])
        getattr(lstm, f"bias_ih_{suffix}").copy_(cell.gates.bias)
        getattr(lstm, f"bias_hh_{suffix}").zero_()


@pytest.mark.parametrize("config", CONFIGS)
def test_parameter_count(config):
    v, h = config.vocab, config.units
    first = 2 * h if config.bidirectional else h
    memory = first if config.layers == 1 else h

    def cell(width):
        return 4 * h * (width + h) + 4 * h

    encoder = v * h + cell(h) * (2 if config.bidirectional else 1)
    if config.layers > 1:
        encoder += cell(first) + (config.layers - 2) * cell(h)
    attention = memory * h + (memory + h) * h
    decoder = v * h + config.layers * cell(h) + attention
    projection = h * v + v
    model, _ = make(config)
    assert sum(p.numel() for p in model.parameters()) == encoder + decoder + projection


@pytest.mark.parametrize("config", CONFIGS)
def test_shapes_and_gradients(config):
    model, (source, target, labels) = make(config)
    output = model(source, target, labels)
    assert [logits.shape for logits in output.logits] == [(config.batch, config.vocab)] * config.steps
    assert output.loss.shape == ()
    assert output.loss.isfinite()
    for (name, _), gradient in zip(
        model.named_parameters(), torch.autograd.grad(output.loss, list(model.parameters()), materialize_grads=True)
    ):
        # Softmax over a single source step is 1 whatever its score, so nothing reaches the keys.
        reached = config.steps > 1 or name != "decoder.attention.keys.weight"
        assert gradient.isfinite().all(), name
        assert bool(gradient.abs().sum() > 0) == reached, name


def test_lstm_cell_is_torchs():
    torch.manual_seed(0)
    cell, lstm = LSTMCell(5, 7), nn.LSTM(5, 7)
    copy_to_torch(cell, lstm, "l0")
    inputs = torch.randn(4, 3, 5)
    state = (torch.randn(3, 7), torch.randn(3, 7))
    expected, (hidden, memory) = lstm(inputs, (state[0][None], state[1][None]))
    for step in range(4):
        state = cell(inputs[step], state)
        torch.testing.assert_close(state[0], expected[step])
    torch.testing.assert_close(state[0], hidden[0])
    torch.testing.assert_close(state[1], memory[0])


def test_encoder_is_torchs_stacked_lstm():
    model, (source, _, _) = make(TINY)
    encoder = model.encoder
    lstm = nn.LSTM(TINY.units, TINY.units, num_layers=2)
    for index, cell in enumerate(encoder.layers):
        copy_to_torch(cell, lstm, f"l{index}")
    expected_TBH, (hidden, cells) = lstm(encoder.embedding(source))
    memory_BTH, states = encoder(source)
    torch.testing.assert_close(memory_BTH, expected_TBH.transpose(0, 1))
    for index, state in enumerate(states):
        torch.testing.assert_close(state[0], hidden[index])
        torch.testing.assert_close(state[1], cells[index])


def test_bidirectional_encoder_is_torchs():
    config = NMTConfig(layers=1, units=6, batch=3, steps=4, vocab=11, bidirectional=True)
    torch.manual_seed(0)
    encoder = Encoder(config)
    lstm = nn.LSTM(6, 6, bidirectional=True)
    copy_to_torch(encoder.layers[0], lstm, "l0")
    copy_to_torch(encoder.backward_layer, lstm, "l0_reverse")
    source = torch.randint(11, (4, 3))
    expected_TBM, _ = lstm(encoder.embedding(source))
    memory_BTM, _ = encoder(source)
    assert encoder.memory_size == memory_BTM.shape[2] == 12
    torch.testing.assert_close(memory_BTM, expected_TBM.transpose(0, 1))


def test_attention_by_hand():
    torch.manual_seed(0)
    attention = Attention(units=3, memory_size=2)
    hidden, memory = torch.randn(1, 3), torch.randn(1, 4, 2)
    scores = torch.stack([hidden[0] @ attention.keys.weight @ memory[0, step] for step in range(4)])
    weights = scores.exp() / scores.exp().sum()
    context = sum(weights[step] * memory[0, step] for step in range(4))
    expected = torch.tanh(attention.combine.weight @ torch.cat((context, hidden[0])))
    torch.testing.assert_close(attention(hidden, attention.keys(memory), memory)[0], expected)


def test_whole_model_with_torchs_layers_has_no_loss_without_labels():
    model, (source, target, labels) = make(TINY)
    encoder_lstm, decoder_lstm = (nn.LSTM(TINY.units, TINY.units, num_layers=2) for _ in range(2))
    for index in range(2):
        copy_to_torch(model.encoder.layers[index], encoder_lstm, f"l{index}")
        copy_to_torch(model.decoder.layers[index], decoder_lstm, f"l{index}")
    memory, states = encoder_lstm(model.encoder.embedding(source))
    hidden, _ = decoder_lstm(model.decoder.embedding(target), states)  # (T, B, H)
    attention = model.decoder.attention
    scores = torch.einsum("tbh,hm,sbm->tbs", hidden, attention.keys.weight, memory)
    context = torch.einsum("tbs,sbm->tbm", scores.softmax(2), memory)
    logits = model.projection(attention.combine(torch.cat((context, hidden), 2)).tanh())  # (T, B, V)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    output = model(source, target, labels)
    torch.testing.assert_close(torch.stack(output.logits), logits)
    torch.testing.assert_close(output.loss, expected)
    assert model(source, target).loss is None


def test_captured_step_has_one_matrix_product_per_cell_and_nothing_in_place():
    with FakeTensorMode():
        model, tokens = make(TINY)
        graph = make_fx(lambda *args: model(*args).loss)(*tokens).graph
    targets = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    num_cells = 2 * TINY.layers * TINY.steps
    assert targets.count(torch.ops.aten.addmm.default) == num_cells + TINY.steps
    assert targets.count(torch.ops.aten.bmm.default) == 2 * TINY.steps
    assert not [target for target in targets if target._schema.is_mutable]


TINY_RNNLM = RNNLMConfig(layers=2, units=6, batch=3, steps=4, vocab=11)


def test_it_is_torchs_lstm() -> None:
    torch.manual_seed(0)
    model, lstm = RNNLM(TINY_RNNLM), nn.LSTM(TINY_RNNLM.units, TINY_RNNLM.units, num_layers=TINY_RNNLM.layers)
    for index, cell in enumerate(model.layers):
        copy_to_torch(cell, lstm, f"l{index}")
    tokens_TB, labels_TB = torch.randint(TINY_RNNLM.vocab, (2, TINY_RNNLM.steps, TINY_RNNLM.batch))
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
