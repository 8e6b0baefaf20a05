"""Attention on a CPU: PyTorch's own fused kernel, its logarithms in one layout."""

from __future__ import annotations

import torch
from torch import Tensor

from rlplace.graphs.attention.formula import Gradients, additive

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._op
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default._op


def attention_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """What `attention_formula` returns."""
    added = None if mask is None else additive(mask, query.dtype)
    query, key, value = _dense(query), _dense(key), _dense(value)
    out, logsumexp = _forward(query, key, value, 0.0, is_causal, attn_mask=added, scale=scale)
    return out, logsumexp.contiguous()


def attention_backward_cpu(
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
    added = None if mask is None else additive(mask, query.dtype)
    grad, query, key, value = _dense(grad), _dense(query), _dense(key), _dense(value)
    gradients: Gradients = _backward(
        grad, query, key, value, out, logsumexp, 0.0, is_causal, attn_mask=added, scale=scale
    )
    return gradients


def _dense(x: Tensor) -> Tensor:
    """The kernel reads whole rows, and looks at no stride of the last dim."""
    return x if x.stride(3) == 1 else x.contiguous()
