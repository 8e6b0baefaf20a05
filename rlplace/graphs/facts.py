"""What an op costs in principle: FLOPs and bytes, from its shapes alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

UPDATE_FLOPS_PER_ELEMENT = {"sgd": 2, "momentum": 4, "adam": 14, "adamw": 16}

Facts = tuple[float, float]


def tensor_bytes(value: torch.Tensor) -> int:
    """Bytes of a contiguous tensor of that shape and dtype."""
    return value.numel() * value.element_size()


def call_facts(target: Any, args: Any, kwargs: Any, output: Any) -> Facts:
    """(flops, bytes_moved) of one ATen call.

    Matrix products, convolutions and attention by PyTorch's own formulas (`torch.utils.flop_counter`); any other op
    one operation for each element of its larger side. Bytes moved are each distinct input and output once.

    Args:
        target: the overload.
        args: arguments, with (fake) tensors in place.
        kwargs: keyword arguments, likewise.
        output: what the call returns.
    """
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    bytes_moved = sum(tensor_bytes(t) for t in {id(t): t for t in inputs}.values()) + sum(map(tensor_bytes, outputs))
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=output)), float(bytes_moved)
    sizes = (sum(t.numel() for t in inputs), sum(t.numel() for t in outputs))
    return float(max(sizes)), float(bytes_moved)


def signature(target: str, args: Any, kwargs: Any) -> str:
    """Target, shapes, strides, dtypes and plain arguments: calls of one signature cost the same."""
    return f"{target}({', '.join(map(_describe, args))}{''.join(f', {k}={_describe(v)}' for k, v in kwargs.items())})"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        strides = "" if value.is_contiguous() else f":{tuple(value.stride())}"
        return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}{strides}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_describe, value))}]"
    return repr(value)
