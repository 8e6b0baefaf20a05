"""Views in a traced graph: what shows the memory of what, and how a write to a view is one to what it shows."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten

_UNDECLARED = {
    aten._unsafe_view.default, aten._reshape_alias.default, aten.lift_fresh.default, aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}  # fmt: skip
"""They return views of their argument and do not say so: nothing writes to either, in a graph without in-place ops."""
_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
_SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.squeeze.default}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor}


class Uncovered(Exception):
    """A write that the rules for taking writes out of a graph do not cover."""


def is_view(target: torch._ops.OpOverload) -> bool:
    """Whether an op returns views of its first argument."""
    if target in _UNDECLARED:
        return True
    aliases = [result.alias_info for result in target._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def shown(node: Node) -> Node:
    """The node whose memory a view shows, at the end of all views."""
    while node.op == "call_function" and isinstance(node.args[0], Node):
        target: Any = node.target
        if target is not operator.getitem and not is_view(target):
            break
        node = node.args[0]
    return node


def inverse(view: Node, base: Node, fresh: Node) -> tuple[Node, Any, tuple[Any, ...]]:
    """What `view` shows, and the call that puts `fresh` in the place of what is shown: (base, target, args).

    A target of None means `fresh` itself.
    """
    target: Any = view.target
    value = base.meta["val"]
    if target is operator.getitem and isinstance(base.args[0], Node):
        whole, which = base.args[0], view.args[1]
        if base.target in _SPLITS:
            dim = int(base.args[2]) if len(base.args) > 2 else 0  # type: ignore[arg-type]
            ends = list(itertools.accumulate(piece.shape[dim] for piece in value))
            start = ends[which] - value[which].shape[dim]  # type: ignore[index]
            return whole, aten.slice_scatter.default, (whole, fresh, dim, start, ends[which])  # type: ignore[index]
        if base.target is aten.unbind.int:
            dim = int(base.args[1]) if len(base.args) > 1 else 0  # type: ignore[arg-type]
            return whole, aten.select_scatter.default, (whole, fresh, dim, which)
    elif target in _SAME:
        return base, None, ()
    elif target in _SCATTERS:
        return base, _SCATTERS[target], (base, fresh, *view.args[1:])
    elif target in _RESHAPES and fresh.meta["val"].is_contiguous() and value.is_contiguous():
        return base, aten.view.default, (fresh, list(value.shape))
    elif target is aten.unsqueeze.default:
        return base, aten.squeeze.dim, (fresh, view.args[1])
    elif target is aten.squeeze.dim and value.dim() > view.meta["val"].dim():
        return base, aten.unsqueeze.default, (fresh, view.args[1])
    elif target in (aten.t.default, aten.transpose.int):
        return base, target, (fresh, *view.args[1:])
    elif target is aten.permute.default:
        order = [dim % value.dim() for dim in view.args[1]]  # type: ignore[union-attr]
        return base, target, (fresh, [order.index(dim) for dim in range(len(order))])
    raise Uncovered
