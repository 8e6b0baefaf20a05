"""The two ops: what they compute, what their fake kernels promise, what they count."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from attention_cases import CASES, AttentionCase, assert_equal, eager, grad_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from rlplace.graphs.capturing.portable import (
    attention,
    attention_backward,
    attention_backward_formula,
    attention_formula,
)

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
