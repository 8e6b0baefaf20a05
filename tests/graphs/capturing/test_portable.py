"""Layers that PyTorch would run by ops of one backend, or by a number read from a tensor, are captured without."""

from __future__ import annotations

import pytest
import torch
from small_models import mean_square, random
from torch import Tensor, nn
from torch.nn import functional

from rlplace.graphs import capture, run_graph
from rlplace.graphs.capturing.portable import portable
from rlplace.graphs.opgraph import OpGraph


class Attends(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.project = nn.Linear(8, 8 + 4 + 4)

    def forward(self, x: Tensor) -> Tensor:
        """x is (B, L, 8), queries have 4 heads of 2; keys and values 2 or 4 heads."""
        query, key, value = (
            part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in self.project(x).split((8, 4, 4), dim=-1)
        )
        if self.kind != "grouped":
            key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        masks = {"boolean mask": mask, "float mask": torch.zeros(length, length).masked_fill(~mask, float("-inf"))}
        return functional.scaled_dot_product_attention(
            query, key, value, masks.get(self.kind), is_causal=self.kind == "causal", enable_gqa=self.kind == "grouped"
        )


FUSED = ["rlplace.attention.default", "rlplace.attention_backward.default"]


def only_here(graph: OpGraph) -> list[str]:
    words = ("aten._scaled", "aten.scaled", "_attention_", "cpu", "mkldnn", "onednn")
    return [t for t in graph.targets if any(word in t for word in words) and t not in FUSED]


@pytest.mark.parametrize("kind", ["plain", "causal", "boolean mask", "float mask", "grouped"])
@pytest.mark.parametrize("is_training", [False, True])
def test_attention_of_every_kind_is_one_op_a_direction(kind: str, is_training: bool) -> None:
    model, x = Attends(kind), random(2, 5, 8, dtype=torch.float32)
    graph = capture(model, x, mean_square if is_training else None, "sgd" if is_training else None)
    assert only_here(graph) == []
    assert [target for target in graph.targets if target in FUSED] == FUSED[: 1 + is_training]
    y = model(x)
    torch.testing.assert_close(run_graph(graph).result, (mean_square(y) if is_training else y).detach())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Linear(8, 8), (3, 8)),
        (nn.Conv2d(8, 8, 3), (2, 8, 6, 6)),
        (nn.LSTM(8, 8), (3, 2, 8)),
        (nn.GRU(8, 8, 2), (3, 2, 8)),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval(), (2, 5, 8)),
        (nn.MultiheadAttention(8, 2), (5, 2, 8)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_layer_is_left_to_one_backend(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.ones(shape, dtype=dtype)
    inputs = (x, x, x) if isinstance(model, nn.MultiheadAttention) else x
    assert only_here(capture(model.to(dtype), inputs)) == []
    graph = capture(model, inputs, lambda y: (y if isinstance(y, Tensor) else y[0]).float().sum(), "sgd")
    assert only_here(graph) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_batch_norm_that_averages_over_all_batches(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)).to(dtype)
    for k in range(3):
        x = random(6, 4, dtype=dtype, seed=k)
        graph = capture(model, x, mean_square, "sgd")
        step, loss = run_graph(graph), mean_square(model(x))  # the model's own step moves its statistics on
        torch.testing.assert_close(step.result, loss.detach())
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(step.state[name], buffer)
    assert model[1].num_batches_tracked == 3
    assert "forward" not in vars(model[1])
    evaluated = capture(model.eval(), x)
    torch.testing.assert_close(run_graph(evaluated).result, model(x).detach())


def test_afterwards_everything_is_as_it_was() -> None:
    model = nn.BatchNorm1d(4, momentum=None)
    with portable(model):
        assert not torch.backends.mkldnn.enabled
        assert "forward" in vars(model)
    assert torch.backends.mkldnn.enabled
    assert "forward" not in vars(model)


FLAGS_SEEN: list[tuple[bool, bool]] = []
"""A global, as what a closure holds is as before after a capture."""


def test_neither_onednn_nor_cudnn_is_on_while_a_step_is_traced() -> None:
    seen = FLAGS_SEEN

    def flags() -> tuple[bool, bool]:
        return torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            FLAGS_SEEN.append(flags())
            return x + 1

    before = flags()
    capture(Looks(), torch.ones(2), check=False)
    assert set(seen) == {(False, False)}
    assert flags() == before


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("is_decoder", [False, True])
def test_stacks_of_transformer_layers_take_causal_and_padding_masks(is_decoder: bool, is_training: bool) -> None:
    """PyTorch's own stacks compare a mask with the causal one, which reads its values."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            options = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
            self.stack: nn.Module
            if is_decoder:
                self.stack = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, **options), 2)
            else:
                layer = nn.TransformerEncoderLayer(8, 2, 16, **options)
                self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor, *, is_padded: Tensor) -> Tensor:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            if is_decoder:
                out: Tensor = self.stack(x, x, mask, tgt_key_padding_mask=is_padded)
            else:
                out = self.stack(x, mask, src_key_padding_mask=is_padded)
            return out

    torch.manual_seed(0)
    model = Masked().train(is_training)
    x = random(3, 5, 8)
    is_padded = torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]
    loss_fn = mean_square if is_training else None
    graph = capture(model, {"x": x, "is_padded": is_padded}, loss_fn, "sgd" if is_training else None)
    assert "forward" not in vars(model.stack)
    with torch.no_grad():
        y = model(x, is_padded=is_padded)
    torch.testing.assert_close(run_graph(graph).result, mean_square(y) if is_training else y)
