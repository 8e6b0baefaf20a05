"""The ops `rlplace::attention` and `rlplace::attention_backward`: one of each for all backends.

What the forward keeps for the backward is the same on every backend, so that the two may run on different devices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rlplace.graphs.attention.cpu import attention_backward_cpu, attention_cpu
from rlplace.graphs.attention.cuda import attention_backward_cuda, attention_cuda
from rlplace.graphs.attention.formula import (
    Gradients,
    attention_backward_formula,
    attention_formula,
    empty_out,
    logsumexp_dtype,
)

_library: Any = torch.library.Library("rlplace", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale)"
    " -> (Tensor out, Tensor logsumexp)"
)
_library.define(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,"
    " Tensor? mask, bool is_causal, float? scale) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
)

attention = torch.ops.rlplace.attention.default
"""(query (B, H, N, E), key (B, G, M, E), value, mask, is_causal, scale) to (out (B, H, N, E), logsumexp (B, H, N)), as
`attention_formula` says."""
attention_backward = torch.ops.rlplace.attention_backward.default
"""(grad, query, key, value, out, logsumexp, mask, is_causal, scale) to the gradients of query, key and value."""


def _fake_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = logsumexp_dtype(query.dtype)
    return empty_out(query), query.new_empty(query.shape[:-1], dtype=dtype)


def _fake_attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Gradients:
    return _empty_gradient(query), _empty_gradient(key), _empty_gradient(value)


def _empty_gradient(x: Tensor) -> Tensor:
    batch, heads, length, width = x.shape
    return x.new_empty((batch, length, heads, width)).transpose(1, 2)


for _op, _kernels, _fake in (
    ("attention", (attention_cpu, attention_cuda, attention_formula), _fake_attention),
    (
        "attention_backward",
        (attention_backward_cpu, attention_backward_cuda, attention_backward_formula),
        _fake_attention_backward,
    ),
):
    for _key, _kernel in zip(("CPU", "CUDA", "CompositeExplicitAutograd"), _kernels, strict=True):
        _library.impl(_op, _kernel, _key)
    torch.library.register_fake(f"rlplace::{_op}", _fake, lib=_library)


@register_flop_formula(torch.ops.rlplace.attention)
def _flops(query: torch.Size, key: torch.Size, *_: Any, **__: Any) -> int:
    """Two matrix products; what a mask leaves out counts, as in PyTorch's own formulas."""
    return 4 * query.numel() * key[2]


@register_flop_formula(torch.ops.rlplace.attention_backward)
def _backward_flops(grad: torch.Size, query: torch.Size, key: torch.Size, *_: Any, **__: Any) -> int:
    """Five matrix products: the scores are computed again."""
    return 10 * query.numel() * key[2]
