"""Which calls of `scaled_dot_product_attention` become one op, who calls it, and that steps stay what they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import CASES, AttentionCase, boolean, heads
from small_models import mean_square, random
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from rlplace.errors import CaptureError
from rlplace.graphs import BACKWARD, FORWARD, OpGraph, capture, run_graph
from rlplace.graphs.capturing.portable import fused_attention

DIRECTIONS = ["rlplace.attention.default", "rlplace.attention_backward.default"]


def directions(graph: OpGraph) -> list[str]:
    return [target for target in graph.targets if "attention" in target]


class Attends(nn.Module):
    """Attention of what a case holds, by a function."""

    def __init__(self, case: AttentionCase, attend: Callable[..., Tensor] = scaled_dot_product_attention) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(x.clone()) for x in (case.query, case.key, case.value))
        self.mask, self.attend, self.options = case.mask, attend, {**case.options}
        del self.options["attn_mask"]

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.query * x, self.key, self.value, self.mask, **self.options)


def assert_equals_eager(model: nn.Module, inputs: Any, loss_fn: Callable[..., Tensor] = mean_square) -> OpGraph:
    """The captured step, loss and gradients and all, is PyTorch's own; what comes back is its graph."""
    graph = capture(model, inputs, loss_fn, "sgd")
    step, eager = run_graph(graph), copy.deepcopy(model)
    loss = loss_fn(eager(*inputs) if isinstance(inputs, tuple) else eager(inputs))
    loss.backward()
    torch.testing.assert_close(step.result, loss.detach(), atol=1e-5, rtol=1e-5)
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(step.gradients[name], parameter.grad, atol=1e-4, rtol=1e-4)
    return graph


@pytest.mark.parametrize("name", CASES)
def test_a_call_is_one_op_a_direction(name: str) -> None:
    model = Attends(CASES[name])
    assert directions(assert_equals_eager(model, torch.ones(1))) == DIRECTIONS
    inference = capture(model, torch.ones(1))
    assert directions(inference) == DIRECTIONS[:1]
    torch.testing.assert_close(run_graph(inference).result, model(torch.ones(1)).detach())


def test_whoever_calls_it() -> None:
    for attend in (
        scaled_dot_product_attention,
        lambda *args, **options: functional.scaled_dot_product_attention(*args, **options),
    ):
        assert directions(assert_equals_eager(Attends(CASES["plain"], attend), torch.ones(1))) == DIRECTIONS


def test_three_dims() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any) -> Tensor:
        return functional.scaled_dot_product_attention(query[0], key[0], value[0], mask)

    for mask in (None, boolean(5, 7), boolean(4, 5, 7), boolean(4, 1, 7)):
        case = AttentionCase(heads(5), heads(7, seed=1), heads(7, seed=2), mask)
        assert directions(assert_equals_eager(Attends(case, attend), torch.ones(1))) == DIRECTIONS


@pytest.mark.parametrize(
    "attend",
    {
        "five dims": lambda q, k, v, mask: scaled_dot_product_attention(q[None], k[None], v[None]),
        "values of another width": lambda q, k, v, mask: scaled_dot_product_attention(q, k, v[..., :4]),
        "heads that are broadcast": lambda q, k, v, mask: scaled_dot_product_attention(q, k[:, :1], v[:, :1]),
        "a batch that is broadcast": lambda q, k, v, mask: scaled_dot_product_attention(q, k[:1], v[:1]),
        "a mask that requires grad": lambda q, k, v, mask: scaled_dot_product_attention(q, k, v, q[..., :1] * 2),
        "vmap": lambda q, k, v, mask: torch.vmap(scaled_dot_product_attention)(q, k, v),
    }.items(),
    ids=lambda item: item[0],
)
def test_what_no_op_covers_comes_apart(attend: tuple[str, Callable[..., Tensor]]) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **_: Any) -> Tensor:
        return attend[1](q, k, v, mask)

    assert directions(assert_equals_eager(Attends(CASES["plain"], call), torch.ones(1))) == []


def test_dropout_comes_apart_and_is_random() -> None:
    def call(*args: Any, **_: Any) -> Tensor:
        return scaled_dot_product_attention(*args[:3], dropout_p=0.5)

    graph = capture(Attends(CASES["plain"], call), torch.ones(1), mean_square, "sgd")
    assert directions(graph) == []
    assert graph.program is not None
    assert any(getattr(call, "is_random", False) for call in graph.program.calls.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask": torch.zeros(5, 7), "is_causal": True}, "is_causal"),
        ({"attn_mask": torch.zeros(5, 6)}, "must match"),
        ({"attn_mask": torch.zeros(5, 7, dtype=torch.int64)}, "dtype"),
    ],
)
def test_pytorch_refuses_what_it_refuses(options: dict[str, Any], message: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        return scaled_dot_product_attention(q, k, v, **options)

    with pytest.raises(CaptureError, match=message):
        capture(Attends(CASES["plain"], call), torch.ones(1), mean_square, "sgd")


@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_of_a_transformer(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    graph = assert_equals_eager(model, random(2, 5, 8, dtype=torch.float32))
    found = [
        (graph.targets[op], graph.modules[op], int(graph.phases[op]))
        for op in range(graph.num_ops)
        if "attention" in graph.targets[op]
    ]
    layers = [f"layers.{k}.self_attn" for k in range(3)]
    assert found == [
        *((DIRECTIONS[0], layer, FORWARD) for layer in layers),
        *((DIRECTIONS[1], layer, BACKWARD) for layer in reversed(layers)),
    ]
    x = random(2, 5, 8, dtype=torch.float32)
    inference = capture(model.eval(), x)
    assert directions(inference) == DIRECTIONS[:1] * 3
    torch.testing.assert_close(run_graph(inference).result, model(x).detach(), atol=1e-5, rtol=1e-5)


class Weightless(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False, attn_mask=mask)[0]
        return y


@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"add_bias_kv": True}])
def test_multihead_attention(options: dict[str, Any]) -> None:
    model, x = Weightless(**options), random(5, 5, 8, dtype=torch.float32)
    assert directions(assert_equals_eager(model, x)) == DIRECTIONS
    assert directions(assert_equals_eager(model, (x, torch.zeros(5, 5)))) == DIRECTIONS


def test_autocast_casts_before() -> None:
    class Casts(Weightless):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                q = x.unflatten(-1, (2, 4)).transpose(1, 2)
                y: Tensor = scaled_dot_product_attention(q, q, q.bfloat16(), mask)
            return y * self.attention.out_proj.weight.sum()

    x, mask = random(2, 5, 8, dtype=torch.float32), torch.randn(5, 5)
    for inputs in ((x,), (x, mask)):
        model = Casts()
        graph = capture(model, inputs)
        (op,) = (op for op in range(graph.num_ops) if "attention" in graph.targets[op])
        assert graph.signatures[op].startswith("rlplace.attention.default(bfloat16")
        torch.testing.assert_close(run_graph(graph).result, model(*inputs).detach(), atol=1e-2, rtol=1e-2)


def test_under_activation_checkpointing_it_runs_again() -> None:
    def attend(*args: Any, **_: Any) -> Tensor:
        again: Tensor = checkpoint(lambda *x: scaled_dot_product_attention(*x) ** 2, *args[:3], use_reentrant=False)
        return again

    graph = assert_equals_eager(Attends(CASES["plain"], attend), torch.ones(1))
    assert directions(graph) == [DIRECTIONS[0], *DIRECTIONS]
    assert [int(graph.phases[op]) for op in range(graph.num_ops) if "attention" in graph.targets[op]] == [0, 1, 1]


def test_models_of_fake_tensors() -> None:
    with FakeTensorMode():
        graph = capture(Weightless(), torch.ones(5, 2, 8), mean_square, "sgd")
    assert directions(graph) == DIRECTIONS
    assert graph.fingerprint == capture(Weightless(), torch.ones(5, 2, 8), mean_square, "sgd").fingerprint


def test_gradients_of_the_op_are_those_of_differences() -> None:
    inputs = [heads(3, 2, 4, torch.float64, seed).requires_grad_() for seed in range(3)]
    with fused_attention():
        for options in ({}, {"is_causal": True}, {"attn_mask": boolean(3, 3)}, {"scale": 0.3}):
            assert torch.autograd.gradcheck(lambda *x: scaled_dot_product_attention(*x, **options), inputs)  # noqa: B023


def has_autograd_kernel() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", "AutogradCPU")


def test_afterwards_pytorch_answers_itself() -> None:
    query = heads(3).requires_grad_()
    with fused_attention():
        with fused_attention():
            assert has_autograd_kernel()
        assert scaled_dot_product_attention(query, query, query).grad_fn.name() == "_AttentionBackward"
    assert not has_autograd_kernel()
    assert scaled_dot_product_attention(query, query, query).grad_fn.name() != "_AttentionBackward"
