"""`fused_attention`: while active, `scaled_dot_product_attention` runs as one op a direction, wherever it can."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlplace.graphs.attention.ops import attention, attention_backward

_eager = torch.ops.aten.scaled_dot_product_attention.default
_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradMPS", "AutogradXPU", "AutogradPrivateUse1")
"""Where PyTorch's dispatcher asks us: behind autocast, and before attention comes apart."""


class _Override:
    """Our kernel for `aten::scaled_dot_product_attention`, registered as long as anybody captures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._library: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
                for key in _KEYS:
                    self._library.impl("scaled_dot_product_attention", _attend, key)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._library._destroy()


_override = _Override()


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Attention becomes `rlplace::attention`; with dropout, or a mask that learns, it comes apart by its definition.

    It is the dispatcher that is told, so that every caller is covered: PyTorch's own layers, functions imported by
    name, and a forward that runs again within a backward. Other threads get the same results by the same ops meanwhile.
    """
    with sdpa_kernel(SDPBackend.MATH), _override:
        yield


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
    can_fuse = (
        dropout_p == 0
        and not (is_causal and attn_mask is not None)
        and query.is_floating_point()
        and query.dtype == key.dtype == value.dtype
        and _fit(query, key, value, enable_gqa=enable_gqa)
        and (attn_mask is None or _masks(attn_mask, query, key))
    )
    if not can_fuse:
        apart: Tensor = _eager.decompose(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return apart
    is_single = query.dim() == 3
    if is_single:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    out: Tensor = _Attention.apply(query, key, value, attn_mask, is_causal, scale)  # type: ignore[no-untyped-call]
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


def _masks(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether a mask needs no gradient and is one that the ops can read."""
    full = (*query.shape[:-1], key.shape[-2])
    if (mask.requires_grad and torch.is_grad_enabled()) or not 2 <= mask.dim() <= len(full):
        return False
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return False
    return all(size in (1, whole) for size, whole in zip(reversed(mask.shape), reversed(full), strict=False))


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
