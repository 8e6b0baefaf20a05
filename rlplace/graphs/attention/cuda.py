"""Attention on a GPU: PyTorch's memory-efficient kernel, fed what it wants and read in the layout of every backend.

That kernel wants rows of whole 16 bytes, biases whose rows start at whole 16 items, its logarithms padded to 32
queries, and its output in memory as it made it; the padding is put on and taken off here. Half precision and float32
take it; float64 goes by the formula.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlplace.graphs.attention.formula import (
    Gradients,
    additive,
    attention_backward_formula,
    attention_formula,
    laid_out,
    out_like,
    repeat_heads,
    sum_heads,
    visible,
)

ROW_BYTES = 16
"""What rows of queries, keys and values are a multiple of."""
BIAS_ITEMS = 16
"""What rows of a bias are a multiple of."""
LOGSUMEXP_ITEMS = 1 if torch.version.hip else 32
"""What the kernel's rows of logarithms are a multiple of."""

_forward = torch.ops.aten._scaled_dot_product_efficient_attention.default
_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default


def attention_cuda(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """What `attention_formula` returns."""
    if query.dtype == torch.float64:
        return attention_formula(query, key, value, mask, is_causal, scale)
    width, length = query.shape[-1], query.shape[2]
    bias = None if mask is None else aligned_bias(mask, query, key)
    original = query
    query, key, value = _prepared(query, key, value)
    scale = width**-0.5 if scale is None else scale
    out, logsumexp, _, _ = _forward(query, key, value, bias, True, 0.0, is_causal, scale=scale)
    return out_like(out[..., :width], original), visible(logsumexp[..., :length]).contiguous()


def attention_backward_cuda(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Gradients:
    """What `attention_backward_formula` returns."""
    if query.dtype == torch.float64:
        return attention_backward_formula(grad, query, key, value, out, logsumexp, mask, is_causal, scale)
    width, heads = query.shape[-1], key.shape[1]
    bias = None if mask is None else aligned_bias(mask, query, key)
    query, key, value = _prepared(query, key, value)
    scale = width**-0.5 if scale is None else scale
    unused = torch.zeros((), dtype=torch.int64, device=query.device)  # the state of dropout's generator
    gradients = _backward(
        *(aligned_rows(grad), query, key, value, bias),
        *(laid_out(aligned_rows(out)), padded_logsumexp(logsumexp)),  # whose stride of queries it takes for granted
        *(unused, unused, 0.0, [True, True, True, False], is_causal),
        scale=scale,
    )
    grad_query, grad_key, grad_value = (gradient[..., :width] for gradient in gradients[:3])
    return laid_out(grad_query), laid_out(sum_heads(grad_key, heads)), laid_out(sum_heads(grad_value, heads))


def aligned_rows(x: Tensor) -> Tensor:
    """(B, H, N, E) with rows that start at whole 16 bytes: E is padded by zeros, and copied what lies elsewhere."""
    items = ROW_BYTES // x.element_size()
    if x.shape[-1] % items:
        x = pad(x, (0, -x.shape[-1] % items))
    starts = (x.storage_offset(), *x.stride()[:-1])
    return (
        x
        if x.stride(-1) == 1 and not any(start % items for start in starts)
        else x.clone(memory_format=torch.contiguous_format)
    )


def aligned_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as a bias (B, H, N, M) in the dtype of `query`, its rows starting at whole 16 items of memory.

    Args:
        mask: broadcastable to (B, H, N, M).
        query: (B, H, N, E).
        key: (B, G, M, E).
    """
    bias = additive(mask, query.dtype).to(query.dtype)
    length = key.shape[2]
    bias = bias.expand(*bias.shape[:-1], length)
    bias = pad(bias, (0, -length % BIAS_ITEMS)).contiguous()[..., :length]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], length)


def padded_logsumexp(logsumexp: Tensor) -> Tensor:
    """(B, H, N) as the kernel's backward reads it: N padded, by infinity, which makes every weight 0."""
    return pad(logsumexp, (0, -logsumexp.shape[-1] % LOGSUMEXP_ITEMS), value=math.inf)


def _prepared(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    return aligned_rows(query), aligned_rows(repeat_heads(key, groups)), aligned_rows(repeat_heads(value, groups))
