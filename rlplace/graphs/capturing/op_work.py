"""What an op costs in principle: FLOPs, bytes moved and scratch, from its shapes alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from rlplace.graphs.capturing.op_costs import OpCost, registered_cost
from rlplace.graphs.optimizers import state_bytes
from rlplace.graphs.program import OptimizerSpec

_NOT_GIVEN = OpCost()

UPDATE_FLOPS_PER_ELEMENT = {"sgd": 2, "momentum": 4, "adam": 14, "adamw": 16}

_SCRATCH = {torch.ops.aten.logsumexp: lambda x, *_, output: tensor_bytes(x) + tensor_bytes(output)}
"""Scratch that PyTorch's own code for an op takes on every backend; what libraries take (cuBLAS, cuDNN, oneDNN, sorting
on a GPU) depends on device and version and is not counted."""


class Facts(NamedTuple):
    """What one call costs in principle."""

    flops: float
    """Floating-point operations."""
    bytes_moved: float
    """Bytes read and written."""
    workspace_bytes: int
    """Scratch bytes held while it runs."""


NOTHING = Facts(0.0, 0.0, 0)


def tensor_bytes(value: torch.Tensor) -> int:
    """Bytes of a contiguous tensor of that shape and dtype."""
    return value.numel() * value.element_size()


def call_facts(target: Any, args: Any, kwargs: Any, output: Any) -> Facts:
    """What one ATen call costs.

    A figure that the user registered (`register_cost`) goes first. Else FLOPs of matrix products, convolutions and
    attention are those of the formulas in `torch.utils.flop_counter` (PyTorch's own, and those of `graphs.attention`),
    of any other op one operation for each element of its larger side; bytes moved are each distinct input and output
    once.

    Args:
        target: the overload.
        args: arguments, with (fake) tensors in place.
        kwargs: keyword arguments, likewise.
        output: what the call returns.

    Raises:
        InvalidValue: a registered function failed.
    """
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    packet = getattr(target, "overloadpacket", None)
    given = registered_cost(target) or _NOT_GIVEN
    flops = given.figure("flops", target, args, kwargs, output)
    if flops is None and packet in flop_registry:
        flops = float(flop_registry[packet](*args, **kwargs, out_val=output))
    if flops is None:
        flops = float(max(sum(t.numel() for t in inputs), sum(t.numel() for t in outputs)))
    moved = given.figure("bytes_moved", target, args, kwargs, output)
    if moved is None:
        distinct = {id(t): t for t in inputs}
        moved = float(sum(map(tensor_bytes, distinct.values())) + sum(map(tensor_bytes, outputs)))
    workspace = given.figure("workspace_bytes", target, args, kwargs, output)
    if workspace is None:
        workspace = _SCRATCH[packet](*args, **kwargs, output=output) if packet in _SCRATCH else 0
    return Facts(flops, moved, int(workspace))


def update_facts(spec: OptimizerSpec, parameter: torch.Tensor, gradient: torch.Tensor) -> Facts:
    """What the update of one parameter costs.

    Its workspace is a copy of the gradient in the parameter's layout, where it has another: fused kernels need it.
    """
    size = tensor_bytes(parameter)
    moved = 3.0 * size + 2.0 * state_bytes(spec, parameter)
    workspace = 0 if gradient.stride() == parameter.stride() else size
    return Facts(float(UPDATE_FLOPS_PER_ELEMENT[spec.name] * parameter.numel()), moved, workspace)


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
