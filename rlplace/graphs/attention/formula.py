"""Attention and its gradients by their definition, and what the kernels share: masks, grouped heads, layouts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of queries, keys and values."""


def attention_formula(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """softmax(query @ key^T * scale + mask) @ value, and the logarithm of the softmax's denominators.

    Args:
        query: (B, H, N, E).
        key: (B, G, M, E), G a divisor of H: a key head serves H / G query heads.
        value: (B, G, M, E).
        mask: broadcastable to (B, H, N, M): where to look (bool), or what to add; None adds nothing.
        is_causal: query n sees keys 0 to n.
        scale: None means E ** -0.5.

    Returns:
        (B, H, N, E), laid out as `empty_out` says; and (B, H, N), natural logarithms, contiguous, float32 (float64 for
        float64). A query that sees no key gets 0 in both.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_heads(key, groups), repeat_heads(value, groups)
    scores = _scores(query, key, mask, is_causal, scale)
    logsumexp = visible(scores.logsumexp(-1))
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    return out_like((weights @ value.to(scores.dtype)).to(query.dtype), query), logsumexp


def attention_backward_formula(
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
    """The gradients of queries, keys and values (Dao et al. 2022, arXiv:2205.14135, appendix B.2).

    Args:
        grad: of `out`, (B, H, N, E).
        query: and the arguments that follow: as `attention_formula` took and returned them.

    Returns:
        Three tensors, shaped as queries, keys and values, laid out as (B, N, H, E).
    """
    heads = key.shape[1]
    groups = query.shape[1] // heads
    key, value = repeat_heads(key, groups), repeat_heads(value, groups)
    scores = _scores(query, key, mask, is_causal, scale)
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    wide = grad.to(scores.dtype)
    grad_value = weights.mT @ wide
    delta = (wide * out).sum(-1, keepdim=True)
    grad_scores = weights * (wide @ value.to(scores.dtype).mT - delta) * _scale(query, scale)
    grad_query = grad_scores @ key.to(scores.dtype)
    grad_key = grad_scores.mT @ query.to(scores.dtype)
    sums = (grad_query, sum_heads(grad_key, heads), sum_heads(grad_value, heads))
    return tuple(laid_out(total.to(query.dtype)) for total in sums)  # type: ignore[return-value]


def logsumexp_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, as the fused kernels keep it for every narrower type; float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what to add to the scores, 2-D or 4-D; dims that it repeats (stride 0) have size 1.

    A boolean mask becomes 0 where it is true and -inf elsewhere, in `dtype`; another stays as it is.
    """
    if mask.dim() == 3:
        mask = mask.unsqueeze(0)
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and size > 1:
            mask = mask.narrow(dim, 0, 1)
    return torch.where(mask, 0.0, -math.inf).to(dtype) if mask.dtype == torch.bool else mask


def visible(logsumexp: Tensor) -> Tensor:
    """The same with 0 for queries that see no key (-inf): exp(score - 0) is 0 for each of their keys."""
    return logsumexp.masked_fill(logsumexp == -math.inf, 0.0)


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """(B, G, M, E) to (B, G * groups, M, E), each head `groups` times in a row."""
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def sum_heads(x: Tensor, heads: int) -> Tensor:
    """(B, H, M, E) to (B, heads, M, E): what `repeat_heads` repeated, summed."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)  # type: ignore[no-untyped-call]


def empty_out(query: Tensor) -> Tensor:
    """Memory for the output: laid out as the queries are, as on PyTorch's CPU kernel, contiguous if they have no rows.

    What models do next (heads back behind positions) then copies nothing where the queries were made as a view.
    """
    is_dense = query.stride(3) == 1
    return torch.empty_like(query, memory_format=torch.preserve_format if is_dense else torch.contiguous_format)


def out_like(x: Tensor, query: Tensor) -> Tensor:
    """`x`, laid out as `empty_out` says."""
    empty = empty_out(query)
    return x if x.stride() == empty.stride() else empty.copy_(x)


def laid_out(x: Tensor) -> Tensor:
    """(B, H, N, E) with memory in the order (B, N, H, E), as fused kernels return gradients."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """(B, H, N, M), in the dtype that sums are kept in."""
    dtype = logsumexp_dtype(query.dtype)
    scores = (query.to(dtype) * _scale(query, scale)) @ key.to(dtype).mT
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores if mask is None else scores + additive(mask, dtype)
