"""`fused_attention`: while active, `scaled_dot_product_attention` runs as one op a direction, wherever it can."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, has_torch_function

from rlplace.graphs.attention.ops import attention, attention_backward

_eager = functional.scaled_dot_product_attention


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Attention becomes `rlplace::attention`; with dropout, or a mask that learns, it comes apart by its definition.

    The mode sees every caller but PyTorch's own layers, whose functions run with modes off: those call the name in
    `torch.nn.functional`.
    """
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _fused
    try:
        with sdpa_kernel(SDPBackend.MATH), FusedAttention():
            yield
    finally:
        functional.scaled_dot_product_attention = before


class FusedAttention(TorchFunctionMode):
    """Answers calls of `scaled_dot_product_attention` by the fused ops."""

    def __torch_function__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (_attend if func is _eager else func)(*args, **(kwargs or {}))


def _fused(*args: Any, **kwargs: Any) -> Tensor:
    """Stands for `scaled_dot_product_attention` in `torch.nn.functional`; modes, where there are any, see the call."""
    return (_eager if has_torch_function(args) else _attend)(*args, **kwargs)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `scaled_dot_product_attention`; what cannot be fused goes to PyTorch, which also refuses what is wrong."""
    dtype = _computed_in(query)
    can_fuse = (
        dropout_p == 0
        and not (is_causal and attn_mask is not None)
        and _fit(query, key, value, enable_gqa=enable_gqa)
        and dtype.is_floating_point
        and dtype == _computed_in(key) == _computed_in(value)
        and (attn_mask is None or _masks(attn_mask, query, key, dtype))
        and not any(map(torch._C._functorch.is_functorch_wrapped_tensor, (query, key, value)))
    )
    if not can_fuse:
        return _eager(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.to(_computed_in(attn_mask))
    is_single = query.dim() == 3
    if is_single:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    out: Tensor = _Attention.apply(query, key, value, attn_mask, bool(is_causal), scale)  # type: ignore[no-untyped-call]
    return out.squeeze(0) if is_single else out


def _fit(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> bool:
    """Whether shapes are those of the ops: the same dims, none of them empty, and heads that go into each other."""
    dims = query.dim()
    if dims not in (3, 4) or not query.numel() or not key.numel() or key.shape != value.shape or key.dim() != dims:
        return False
    if query.shape[-1] != key.shape[-1] or query.shape[:-3] != key.shape[:-3]:
        return False
    heads, key_heads = query.shape[-3], key.shape[-3]
    return heads == key_heads or (enable_gqa and dims == 4 and heads % key_heads == 0)


def _masks(mask: Tensor, query: Tensor, key: Tensor, dtype: torch.dtype) -> bool:
    """Whether a mask needs no gradient and is one that the ops can read."""
    full = (*query.shape[:-1], key.shape[-2])
    if (mask.requires_grad and torch.is_grad_enabled()) or not 1 <= mask.dim() <= len(full):
        return False
    if _computed_in(mask) not in (torch.bool, torch.float32, dtype):
        return False
    return all(size in (1, whole) for size, whole in zip(reversed(mask.shape), reversed(full), strict=False))


def _computed_in(x: Tensor) -> torch.dtype:
    """The dtype that attention reads `x` in: autocast's, where it is on and changes it."""
    kind = x.device.type
    if x.is_floating_point() and x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        out: Tensor
        out, logsumexp = attention(query, key, value, mask, is_causal, scale)
        ctx.save_for_backward(query, key, value, out, logsumexp, mask)
        ctx.is_causal, ctx.scale = is_causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, mask = ctx.saved_tensors
        gradients = attention_backward(grad, *saved, mask, ctx.is_causal, ctx.scale)
        return (*gradients, None, None, None)
