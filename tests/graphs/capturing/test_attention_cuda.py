"""What is put on and taken off around the GPU's kernel, by a stand-in that is as strict; and on a GPU by itself."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from attention_cases import CASES, AttentionCase, assert_equal, eager, grad_of, heads
from torch import Tensor

from rlplace.graphs.capturing import portable as cuda
from rlplace.graphs.capturing.portable import (
    attention,
    attention_backward,
    attention_backward_formula,
    attention_formula,
    empty_out,
)


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
