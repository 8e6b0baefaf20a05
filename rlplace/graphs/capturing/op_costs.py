"""`register_cost`: what a user's own op costs, where the general estimate would be wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from rlplace.errors import InvalidValue, UnknownName

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
