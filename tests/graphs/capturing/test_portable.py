"""What is captured in place of ops of one backend: attention as one op a direction, and layers by plain ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import CASES, AttentionCase, assert_equal, boolean, eager, grad_of, heads
from small_models import assert_equals_eager, mean_square, random
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from rlplace.errors import CaptureError
from rlplace.graphs import BACKWARD, FORWARD, capture, run_graph
from rlplace.graphs.capturing import portable as cuda
from rlplace.graphs.capturing.portable import (
    attention,
    attention_backward,
    attention_backward_formula,
    attention_formula,
    empty_out,
    fused_attention,
    portable,
)
from rlplace.graphs.opgraph import OpGraph


class AttendsAs(nn.Module):
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
    model, x = AttendsAs(kind), random(2, 5, 8, dtype=torch.float32)
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
        assert_equals_eager(model, x, mean_square)
        model(x)  # the model's own step moves its statistics on
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


def equals_eager(model: nn.Module, inputs: Any) -> OpGraph:
    return assert_equals_eager(model, inputs, mean_square, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_call_is_one_op_a_direction(name: str) -> None:
    model = Attends(CASES[name])
    assert directions(equals_eager(model, torch.ones(1))) == DIRECTIONS
    inference = capture(model, torch.ones(1))
    assert directions(inference) == DIRECTIONS[:1]
    torch.testing.assert_close(run_graph(inference).result, model(torch.ones(1)).detach())


def test_whoever_calls_it() -> None:
    for attend in (
        scaled_dot_product_attention,
        lambda *args, **options: functional.scaled_dot_product_attention(*args, **options),
    ):
        assert directions(equals_eager(Attends(CASES["plain"], attend), torch.ones(1))) == DIRECTIONS


def test_three_dims() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any) -> Tensor:
        return functional.scaled_dot_product_attention(query[0], key[0], value[0], mask)

    for mask in (None, boolean(5, 7), boolean(4, 5, 7), boolean(4, 1, 7)):
        case = AttentionCase(heads(5), heads(7, seed=1), heads(7, seed=2), mask)
        assert directions(equals_eager(Attends(case, attend), torch.ones(1))) == DIRECTIONS


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

    assert directions(equals_eager(Attends(CASES["plain"], call), torch.ones(1))) == []


def test_dropout_comes_apart_and_is_random() -> None:
    def call(*args: Any, **_: Any) -> Tensor:
        return scaled_dot_product_attention(*args[:3], dropout_p=0.5)

    graph = capture(Attends(CASES["plain"], call), torch.ones(1), mean_square, "sgd")
    assert directions(graph) == []
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
    graph = equals_eager(model, random(2, 5, 8, dtype=torch.float32))
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
        return self.attention(x, x, x, need_weights=False, attn_mask=mask)[0]


@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"add_bias_kv": True}])
def test_multihead_attention(options: dict[str, Any]) -> None:
    model, x = Weightless(**options), random(5, 5, 8, dtype=torch.float32)
    assert directions(equals_eager(model, x)) == DIRECTIONS
    assert directions(equals_eager(model, (x, torch.zeros(5, 5)))) == DIRECTIONS


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
        return checkpoint(lambda *x: scaled_dot_product_attention(*x) ** 2, *args[:3], use_reentrant=False)

    graph = equals_eager(Attends(CASES["plain"], attend), torch.ones(1))
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


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def arguments(case: AttentionCase) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool, float | None]:
    return case.query, case.key, case.value, case.mask, case.is_causal, case.scale


def backward_arguments(case: AttentionCase, out: Tensor, logsumexp: Tensor) -> tuple[object, ...]:
    return grad_of(case), case.query, case.key, case.value, out, logsumexp, case.mask, case.is_causal, case.scale


@pytest.mark.parametrize("name", CASES)
def test_the_ops_equal_eager(name: str) -> None:
    case = CASES[name]
    out, logsumexp = attention(*arguments(case))
    assert_equal((out, attention_backward(*backward_arguments(case, out, logsumexp))), eager(case, grad_of(case)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["plain", "boolean mask", "float mask", "a query that sees no key", "grouped"])
def test_every_dtype(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    mask = case.mask if case.mask is None or case.mask.dtype == torch.bool else case.mask.to(dtype)
    query, key, value = case.query.to(dtype), case.key.to(dtype), case.value.to(dtype)
    case = dataclasses.replace(case, query=query, key=key, value=value, mask=mask)
    out, logsumexp = attention(*arguments(case))
    assert out.dtype == dtype
    assert logsumexp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    gradients = attention_backward(*backward_arguments(case, out, logsumexp))
    assert_equal((out, gradients), eager(case, grad_of(case)), dtype)


def test_a_float32_mask_of_half_precision() -> None:
    case = CASES["float mask"]
    query, key, value = (x.bfloat16() for x in (case.query, case.key, case.value))
    case = dataclasses.replace(case, query=query, key=key, value=value)
    out, logsumexp = attention(*arguments(case))
    gradients = attention_backward(*backward_arguments(case, out, logsumexp))
    assert_equal((out, gradients), eager(case, grad_of(case)), torch.bfloat16)


@pytest.mark.parametrize("name", CASES)
def test_either_direction_may_run_on_another_backend(name: str) -> None:
    """The forward of one kernel feeds the backward of the other."""
    case = CASES[name]
    expected = eager(case, grad_of(case))
    kernel, formula = attention(*arguments(case)), attention_formula(*arguments(case))
    torch.testing.assert_close(kernel[1], formula[1])
    assert_equal((formula[0], attention_backward(*backward_arguments(case, *formula))), expected)
    assert_equal((kernel[0], attention_backward_formula(*backward_arguments(case, *kernel))), expected)


def test_the_logarithms_are_those_of_the_scores() -> None:
    case = CASES["a query that sees no key"]
    _, logsumexp = attention(*arguments(case))
    assert case.mask is not None
    scores = (case.query @ case.key.mT / math.sqrt(8)).masked_fill(~case.mask, -math.inf)
    expected = scores.logsumexp(-1)
    expected[0, :, 2] = 0.0
    torch.testing.assert_close(logsumexp, expected)


@pytest.mark.parametrize("name", CASES)
def test_fake_kernels_promise_what_the_real_ones_return(name: str) -> None:
    case = CASES[name]
    out, logsumexp = attention(*arguments(case))
    real = (out, logsumexp, *attention_backward(*backward_arguments(case, out, logsumexp)))
    formula = attention_formula(*arguments(case))
    other = (*formula, *attention_backward_formula(*backward_arguments(case, *formula)))
    mode = FakeTensorMode()
    faked = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in backward_arguments(case, out, logsumexp)]
    with mode:
        fake = (*attention(*faked[1:4], *faked[6:]), *attention_backward(*faked))
    assert [layout(x) for x in real] == [layout(x) for x in fake]
    assert [layout(x) for x in other] == [layout(x) for x in fake]
    assert logsumexp.is_contiguous()


def layout(x: Tensor) -> tuple[object, ...]:
    """Strides of dims of size 1 mean nothing."""
    return x.dtype, x.shape, [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


@pytest.mark.parametrize("name", ["plain", "boolean mask", "grouped"])
def test_pytorch_finds_nothing_wrong_with_the_ops(name: str) -> None:
    case = CASES[name]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(attention, arguments(case), test_utils=checks)
    saved = attention(*arguments(case))
    torch.library.opcheck(attention_backward, backward_arguments(case, *saved), test_utils=checks)


def test_two_and_five_matrix_products_are_counted() -> None:
    case = CASES["causal, more keys"]
    saved = attention(*arguments(case))
    product = 2 * 2 * 4 * 5 * 7 * 8
    for op, args, products in (
        (attention, arguments(case), 2),
        (attention_backward, backward_arguments(case, *saved), 5),
    ):
        with FlopCounterMode(display=False) as counter:
            op(*args)
        assert counter.get_total_flops() == products * product


def check_rows(*tensors: Tensor) -> None:
    for x in tensors:
        items = 16 // x.element_size()
        assert x.shape[-1] % items == 0
        assert x.stride(-1) == 1
        assert not any(start % items for start in (x.storage_offset(), *x.stride()[:-1]))


def check_inputs(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> None:
    check_rows(query, key, value)
    assert query.shape[1] == key.shape[1] == value.shape[1]
    if bias is not None:
        assert bias.shape == (*query.shape[:3], key.shape[2])
        assert bias.dtype == query.dtype
        assert bias.stride(-1) == 1
        assert not any(stride % 8 for stride in bias.stride()[:-1])


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, keeps: bool, dropout: float, is_causal: bool,
    *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `aten._scaled_dot_product_efficient_attention`: 32 queries at a time, -inf for one that sees no key."""
    check_inputs(query, key, value, bias)
    assert (keeps, dropout) == (True, 0.0)
    out, logsumexp = attention_formula(query, key, value, bias, is_causal, scale)
    logsumexp = logsumexp.masked_fill(logsumexp == 0, -math.inf)
    state = torch.zeros((), dtype=torch.int64)
    return out, torch.nn.functional.pad(logsumexp, (0, -query.shape[2] % 32), value=math.inf), state, state


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor, logsumexp: Tensor,
    seed: Tensor, offset: Tensor, dropout: float, wanted: list[bool], is_causal: bool, *, scale: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """As `aten._scaled_dot_product_efficient_attention_backward`."""
    check_inputs(query, key, value, bias)
    check_rows(grad, out)
    assert out.transpose(1, 2).is_contiguous()  # `o_strideM` of the kernel is heads times width, whatever the tensor's
    assert seed.dtype == offset.dtype == torch.int64
    assert (dropout, wanted) == (0.0, [True, True, True, False])
    length = query.shape[2]
    assert logsumexp.shape[2] == -(-length // 32) * 32
    assert logsumexp.is_contiguous()
    assert torch.all(logsumexp[..., length:] == math.inf)
    kept = logsumexp[..., :length]
    return *attention_backward_formula(grad, query, key, value, out, kept, bias, is_causal, scale), None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_fed_what_it_wants(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_cuda_forward", forward)
    monkeypatch.setattr(cuda, "_cuda_backward", backward)
    case = in_dtype(CASES[name], dtype)
    args: Any = (case.query, case.key, case.value, case.mask, case.is_causal, case.scale)
    out, logsumexp = cuda.attention_cuda(*args)
    assert logsumexp.is_contiguous()
    assert logsumexp.isfinite().all()
    gradients = cuda.attention_backward_cuda(grad_of(case), *args[:3], out, logsumexp, *args[3:])
    assert_equal((out, gradients), eager(case, grad_of(case)), dtype)
    assert out.stride() == empty_out(case.query).stride()
    for x in gradients:
        assert x.transpose(1, 2).is_contiguous()


def in_dtype(case: AttentionCase, dtype: torch.dtype) -> AttentionCase:
    mask = case.mask if case.mask is None or case.mask.dtype == torch.bool else case.mask.to(dtype)
    query, key, value = case.query.to(dtype), case.key.to(dtype), case.value.to(dtype)
    return dataclasses.replace(case, query=query, key=key, value=value, mask=mask)


def test_rows_that_are_aligned_stay_where_they_are() -> None:
    query, key, value = torch.randn(2, 5, 4, 24).transpose(1, 2).split(8, dim=-1)
    for x in (query, key, value):
        assert cuda.aligned_rows(x) is x
    shifted = torch.randn(2 * 5 * 4 * 8 + 1)[1:].view(2, 4, 5, 8)
    torch.testing.assert_close(cuda.aligned_rows(shifted), shifted)
    check_rows(cuda.aligned_rows(shifted), cuda.aligned_rows(heads(5, width=6)), cuda.aligned_rows(heads(1, 1).half()))
    padded = cuda.aligned_rows(heads(5, width=6))
    assert padded.shape[-1] == 8
    assert torch.equal(padded[..., 6:], torch.zeros(2, 4, 5, 2))


def test_a_bias_is_not_repeated_in_memory() -> None:
    query, key = heads(64), heads(70)
    bias = cuda.aligned_bias(torch.ones(2, 1, 1, 70, dtype=torch.bool).expand(2, 4, 64, 70), query, key)
    assert bias.shape == (2, 4, 64, 70)
    assert bias.stride() == (80, 0, 0, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_and_across_devices(name: str, dtype: torch.dtype) -> None:
    case = in_dtype(CASES[name], dtype)
    expected, grad = eager(case, grad_of(case)), grad_of(case)
    for there, back in (("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")):
        args: Any = (case.query, case.key, case.value, case.mask)
        saved = attention(*moved(args, there), case.is_causal, case.scale)
        inputs = (grad, *args[:3], *saved, case.mask)
        gradients = attention_backward(*moved(inputs, back), case.is_causal, case.scale)
        assert_equal((saved[0].cpu(), [x.cpu() for x in gradients]), expected, dtype)


def moved(tensors: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    return tuple(x.to(device) if isinstance(x, Tensor) else x for x in tensors)
