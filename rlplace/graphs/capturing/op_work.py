"""What an op costs in principle: FLOPs, bytes moved and scratch, from its shapes alone.

`register_cost`: what a user's own op costs, where the general estimate would be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._library.custom_ops import CustomOpDef
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from rlplace.errors import InvalidValue, UnknownName
from rlplace.graphs.optimizers import state_bytes
from rlplace.graphs.program import OptimizerSpec

CostFn = Callable[..., float]
"""Called as the op is, with fake tensors (shapes and dtypes, no values), and `output=` what the op returns."""


@dataclass(frozen=True)
class OpCost:
    """What a user said of one op; None leaves a figure to the general estimate.

    Attributes:
        flops: floating-point operations of one call.
        bytes_moved: bytes that it reads and writes.
        workspace_bytes: scratch bytes that it holds while it runs, beside its inputs and outputs.
    """

    flops: CostFn | None = None
    bytes_moved: CostFn | None = None
    workspace_bytes: CostFn | None = None

    def figure(self, name: str, target: Any, args: Any, kwargs: Any, output: Any) -> float | None:
        """The figure `name` of one call, None where the user gave no function.

        Raises:
            InvalidValue: the function failed, or returned anything but a finite number >= 0.
        """
        function: CostFn | None = getattr(self, name)
        if function is None:
            return None
        where, expected = f"cost of {target}", "a function that returns a finite number >= 0"
        try:
            value = function(*args, **kwargs, output=output)
        except Exception as error:
            raise InvalidValue(
                name,
                f"a function that raised {type(error).__name__}: {error}",
                expected,
                where=where,
                hint="It is called with the op's own arguments, as fake tensors, and with `output=` what it returns.",
            ) from error
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise InvalidValue(name, value, expected, where=where)
        return float(value)


_COSTS: dict[Any, OpCost] = {}  # by overload packet or overload; an overload goes first


def register_cost(
    op: object,
    *,
    flops: CostFn | None = None,
    bytes_moved: CostFn | None = None,
    workspace_bytes: CostFn | None = None,
) -> None:
    """Says what an op costs, for graphs captured from now on; the last registration of an op counts.

    Each function is called as the op is, with fake tensors in place of tensors, and with `output=` what the op returns.
    What is left out is estimated: one operation for each element, each input and output moved once, no workspace.

    Args:
        op: `"mylib::op"`, `"mylib::op.overload"`, `torch.ops.mylib.op`, or what `torch.library.custom_op` returned.
        flops: floating-point operations.
        bytes_moved: bytes read and written.
        workspace_bytes: scratch bytes held while the op runs.

    Raises:
        UnknownName: no such op is defined.
        InvalidValue: `op` is something else, or a figure is no function.

    >>> register_cost("aten::trace", flops=lambda matrix, output: matrix.shape[0])
    >>> unregister_cost("aten::trace")
    """
    for name, function in (("flops", flops), ("bytes_moved", bytes_moved), ("workspace_bytes", workspace_bytes)):
        if function is not None and not callable(function):
            raise InvalidValue(name, function, "a function of the op's arguments and `output`", where="register_cost")
    _COSTS[_resolve(op)] = OpCost(flops, bytes_moved, workspace_bytes)


def unregister_cost(op: object) -> None:
    """Takes a registration back; without one, nothing happens.

    Raises:
        UnknownName: no such op is defined.
        InvalidValue: `op` is no op.
    """
    _COSTS.pop(_resolve(op), None)


def registered_cost(target: Any) -> OpCost | None:
    """What was registered for an overload, or else for all overloads of its op."""
    return _COSTS.get(target) or _COSTS.get(getattr(target, "overloadpacket", None))


def _resolve(op: object) -> Any:
    if isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return op
    if isinstance(op, CustomOpDef):
        return op._opoverload.overloadpacket
    if not isinstance(op, str) or "::" not in op:
        raise InvalidValue("op", op, "'namespace::name', an op of `torch.ops`, or a custom op", where="register_cost")
    namespace, _, name = op.partition("::")
    name, _, overload = name.partition(".")
    library = getattr(torch.ops, namespace)
    packet = getattr(library, name, None)
    if packet is None:
        known = {f"{namespace}::{other}" for other in dir(library) if not other.startswith("_")}
        raise UnknownName("op", op, known)
    if overload and overload not in packet.overloads():
        raise UnknownName("op", op, {f"{namespace}::{name}.{other}" for other in packet.overloads()})
    return getattr(packet, overload) if overload else packet


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
