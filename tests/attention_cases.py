"""Calls of attention that differ in what a kernel can stumble over."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class AttentionCase:
    """The arguments of one call of `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None

    @property
    def is_grouped(self) -> bool:
        return self.query.shape[1] != self.key.shape[1]

    @property
    def options(self) -> dict[str, Any]:
        return {
            "attn_mask": self.mask,
            "is_causal": self.is_causal,
            "scale": self.scale,
            "enable_gqa": self.is_grouped,
        }


def heads(length: int, num_heads: int = 4, width: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """(2, heads, length, width) as models make it: a view of (2, length, heads, width)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, length, num_heads, width, dtype=dtype, generator=generator).transpose(1, 2)


def boolean(*shape: int) -> Tensor:
    """A mask in which each query sees its first key."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[..., 0] = True
    return mask


def _cases() -> dict[str, AttentionCase]:
    q, k, v = heads(5, seed=0), heads(7, seed=1), heads(7, seed=2)
    blind = boolean(2, 1, 5, 7)
    blind[0, 0, 2] = False
    floats = torch.randn(5, 7, generator=torch.Generator().manual_seed(4))
    few = heads(7, 2, seed=1), heads(7, 2, seed=2)
    return {
        "plain": AttentionCase(q, k, v),
        "contiguous": AttentionCase(q.contiguous(), k.contiguous(), v.contiguous()),
        "rows not dense": AttentionCase(q.mT.contiguous().mT, k.mT.contiguous().mT, v),
        "positions first": AttentionCase(*(x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (q, k, v))),
        "of one split": AttentionCase(*heads(5, width=24).split(8, dim=-1)),
        "odd width": AttentionCase(heads(5, width=6), heads(7, width=6, seed=1), heads(7, width=6, seed=2)),
        "one head": AttentionCase(heads(5, 1), heads(7, 1, seed=1), heads(7, 1, seed=2)),
        "causal": AttentionCase(q, heads(5, seed=1), heads(5, seed=2), is_causal=True),
        "causal, more keys": AttentionCase(q, k, v, is_causal=True),
        "causal, fewer keys": AttentionCase(q, heads(3, seed=1), heads(3, seed=2), is_causal=True),
        "boolean mask": AttentionCase(q, k, v, boolean(2, 4, 5, 7)),
        "boolean mask of keys": AttentionCase(q, k, v, boolean(2, 1, 1, 7)),
        "boolean mask, expanded": AttentionCase(q, k, v, boolean(2, 1, 1, 7).expand(2, 4, 5, 7)),
        "float mask": AttentionCase(q, k, v, floats),
        "float mask of heads": AttentionCase(q, k, v, floats.expand(4, 5, 7).contiguous()),
        "float mask of keys": AttentionCase(q, k, v, floats[:1]),
        "float mask of queries": AttentionCase(q, k, v, floats[:, :1]),
        "float mask with -inf": AttentionCase(q, k, v, floats.masked_fill(floats > 1, -math.inf)),
        "a query that sees no key": AttentionCase(q, k, v, blind),
        "grouped": AttentionCase(q, *few),
        "grouped, one key head, masked": AttentionCase(q, heads(7, 1, seed=1), heads(7, 1, seed=2), blind),
        "grouped, causal": AttentionCase(q, *few, is_causal=True),
        "scale": AttentionCase(q, k, v, scale=0.7),
        "one feature": AttentionCase(*(x[..., 2:3] for x in (q, k, v))),
        "one query": AttentionCase(heads(1), k, v),
        "many keys": AttentionCase(heads(40, seed=0), heads(70, seed=1), heads(70, seed=2), boolean(40, 70)),
    }


CASES = _cases()


def eager(case: AttentionCase, grad: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """PyTorch's own definition: the output, and the gradients of queries, keys and values for `grad`."""
    inputs = [x.detach().clone().requires_grad_() for x in (case.query, case.key, case.value)]
    with sdpa_kernel(SDPBackend.MATH):
        out = functional.scaled_dot_product_attention(*inputs, **case.options)
    return out.detach(), torch.autograd.grad(out, inputs, grad)


def grad_of(case: AttentionCase) -> Tensor:
    """Some gradient of the output, contiguous."""
    return torch.randn(case.query.shape, dtype=case.query.dtype, generator=torch.Generator().manual_seed(9))


def assert_equal(actual: Any, expected: Any, dtype: torch.dtype = torch.float32) -> None:
    """(output, gradients) are those expected: 1e-5 and 1e-4 for float32."""
    factor = {torch.float64: 1e-6, torch.float32: 1.0, torch.float16: 1e3, torch.bfloat16: 5e3}[dtype]
    torch.testing.assert_close(actual[0], expected[0], atol=1e-5 * factor, rtol=1e-5 * factor)
    for one, other in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4 * factor, rtol=1e-4 * factor)
