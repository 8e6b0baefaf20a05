"""`Arguments`: the arguments of a placed step, compared with those of its capture."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from rlplace.errors import InvalidValue, UserError
from rlplace.graphs import OpGraph
from rlplace.graphs.capturing.capture import as_targets, has_numbers
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.program import Origin
from rlplace.records import Described

MOST_SHOWN = 200
"""Characters of a call in a message."""


class Arguments:
    """The arguments of a captured step: their structure, and the values of those that are no tensors.

    Args:
        origin: of the capture.

    Attributes:
        captured: the tensors among the inputs, and the targets behind them.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin, self._call = origin, (origin.args, origin.kwargs)
        self._leaves, self._spec = pytree.tree_flatten(self._call)
        self.captured = [*(leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)), *origin.targets]

    def call(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...]]:
        """The argument of `tensors`: args, kwargs and targets with these tensors, else as captured."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs, tuple(given)

    def tensors(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any, *, has_targets: bool = True
    ) -> list[torch.Tensor]:
        """The tensors among the inputs, and the targets behind them, in the order of capture.

        Args:
            args: positional arguments of the model.
            kwargs: its keyword arguments, in any order.
            targets: further arguments of the loss.
            has_targets: whether targets are called for, where there were any.

        Raises:
            InvalidValue: another structure or number of them, another value of an argument that is no tensor, or a
                tensor without data.
        """
        if has_targets and "targets" in self._origin.kwargs:  # the model's own argument; capture takes no others then
            kwargs, targets = {**kwargs, "targets": targets}, None
        given = _in_order((args, kwargs), self._call)
        if pytree.tree_structure(given) != self._spec:
            given = _in_order(self._as_captured(*given), self._call)
        leaves, spec = pytree.tree_flatten(given)
        if spec != self._spec:
            more = len(self._origin.targets) and targets is None and len(given[0]) > len(self._origin.args)
            hint = (
                "Lists of numbers are no tensors: pass `torch.tensor(...)` of them."
                if has_numbers(given) and not has_numbers(self._call)
                else "Labels are given by name: `step(x, targets=y)`."
                if more
                else ""
            )
            raise InvalidValue(
                "inputs", _shown(given), f"{_shown(self._call)}, as captured", where="placed step", hint=hint
            )
        for position, (value, captured) in enumerate(zip(leaves, self._leaves, strict=True)):
            if not _agree(value, captured):
                paths, _ = pytree.tree_flatten_with_path(given)
                is_array = isinstance(value, np.ndarray)
                raise InvalidValue(
                    f"inputs{pytree.keystr(paths[position][0][1:])}",
                    _word(value),
                    "a tensor, as captured" if is_array else f"{_word(captured)!r}, as captured",
                    where="placed step",
                    hint="Pass `torch.from_numpy(...)` of it."
                    if is_array
                    else "Only tensors change from step to step: what is none is part of the captured graph. Capture "
                    "the model again with the other value.",
                )
        found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        found += self._checked_targets(targets) if has_targets else ()
        check_data(found, "placed step")
        return found

    def _as_captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call as it was captured: by position or by name, and without defaults; as given where none is."""
        try:
            signature = inspect.signature(self._origin.model.forward)
            given, captured = (signature.bind(*call[0], **call[1]).arguments for call in ((args, kwargs), self._call))
        except (TypeError, ValueError):  # it takes other arguments, or cannot tell which
            return args, kwargs
        kinds = {each.kind for each in signature.parameters.values()}
        only_one = {
            name: value for name, value in (given | captured).items() if not (name in given and name in captured)
        }
        if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} or not all(
            _agree(value, signature.parameters[name].default) for name, value in only_one.items()
        ):
            return args, kwargs
        values = {name: given.get(name, value) for name, value in captured.items()}
        by_position = list(values)[: len(self._origin.args)]
        named = {name: value for name, value in values.items() if name not in by_position}
        return tuple(values[name] for name in by_position), named

    def _checked_targets(self, targets: Any) -> tuple[torch.Tensor, ...]:
        names, count = self._origin.target_names, len(self._origin.targets)
        is_dict = isinstance(targets, Mapping)
        if count and targets is not None and (targets.keys() != {*names} if is_dict else names):
            expected = f"a dict of {', '.join(names)}" if names else "a tensor or a tuple of tensors"
            kind = "tensor" if isinstance(targets, torch.Tensor) else type(targets).__name__
            raise InvalidValue(
                "targets",
                Described(f"a dict of {', '.join(map(str, targets)) or 'nothing'}" if is_dict else f"a {kind}"),
                f"{expected}, as captured",
                where="placed step",
                hint="" if is_dict else "Without names, two targets could be taken for each other.",
            )
        given = as_targets({name: targets[name] for name in names} if is_dict and names else targets)
        if len(given) != count:
            raise InvalidValue(
                "targets",
                f"{len(given)} tensors" if given else None,
                f"{f'{count} tensors' if count else 'None'}, as captured",
                where="placed step",
                hint="Pass the labels of this batch: `step(*inputs, targets=...)`."
                if count
                else "Capture with `capture(..., targets=...)`, and let `loss_fn(output, *targets)` take them.",
            )
        return given


def check_data(tensors: Sequence[torch.Tensor], where: str) -> None:
    """Checks that the tensors of a call have data, and are in no transform.

    Args:
        tensors: inputs, then targets.
        where: the kind of callable.

    Raises:
        InvalidValue: one is on `meta`.
        UserError: the call is in a transform of `torch.func`, or one carries a tangent of forward-mode AD.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None or any(
        forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
        for tensor in (tensors if forward_ad._current_level >= 0 else ())
    ):
        raise UserError(
            f"a {where} runs what was captured, which `torch.func` (`jvp`, `vmap`, `grad`) and forward-mode AD cannot "
            "transform: call the model itself there"
        )
    for position, tensor in enumerate(tensors):
        if tensor.is_meta:
            raise InvalidValue(
                f"device of tensor {position} of the call",
                Described("meta"),
                "one whose tensors have data",
                where=where,
            )


Index = EllipsisType | tuple[slice, ...]
"""What a tensor is indexed with for a part of it; for all of it, `...`."""


class InputCutter:
    """Gives every source op of inputs and targets its part of them: all, or the part of its micro-batch.

    Args:
        graph: with its program.
        ops: the ops that are given theirs; all by default.

    Attributes:
        positions: of each source op, which of the tensors it is of.
    """

    def __init__(self, graph: OpGraph, ops: Collection[int] | None = None) -> None:
        program = require_program(graph)
        self._whole = Arguments(program.origin).captured
        num_inputs = len(self._whole) - len(program.origin.targets)
        self._sources = [
            (op, source, int(source.key) + (num_inputs if source.kind == "target" else 0))
            for op, source in sorted(program.sources.items())
            if source.kind in ("input", "target") and (ops is None or op in ops)
        ]
        self.positions = {op: position for op, _, position in self._sources}

    @property
    def parts(self) -> tuple[tuple[Index, ...], ...]:
        """Of each tensor, inputs before targets, the parts that the ops are given."""
        found: list[dict[str, Index]] = [{} for _ in self._whole]
        for _, source, position in self._sources:
            cut = source.cut
            part = ... if cut is None else (slice(None),) * cut.dim + (slice(cut.start, cut.start + cut.size),)
            found[position][str(part)] = part
        return tuple(tuple(each.values()) for each in found)

    def by_op(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Source ops and their values, as views.

        Args:
            tensors: inputs, then targets, of the whole batch.

        Raises:
            InvalidValue: one that is to be cut has another shape or dtype than captured.
        """
        for op, source, position in self._sources:
            tensor, captured = tensors[position], self._whole[position]
            if source.cut is None:
                yield op, tensor
                continue
            if tensor.shape != captured.shape or tensor.dtype != captured.dtype:
                raise InvalidValue(
                    f"{source.kind}_{source.key}",
                    f"{tensor.dtype} {tuple(tensor.shape)}",
                    f"{captured.dtype} {tuple(captured.shape)}",
                    where="step input",
                    hint="A placed step takes the shapes that it was captured with, and cuts the batch itself.",
                )
            yield op, source.cut.of(tensor)


def _in_order(value: Any, captured: Any) -> Any:
    """`value` with its dicts in the order of `captured`, as far as they have the same keys."""
    if type(value) is not type(captured):
        return value
    if type(value) is dict:
        known = {key: _in_order(value[key], twin) for key, twin in captured.items() if key in value}
        return known | {key: item for key, item in value.items() if key not in known}
    if type(value) in (tuple, list) and len(value) == len(captured):
        return type(value)(_in_order(item, twin) for item, twin in zip(value, captured, strict=True))
    return value


def _word(value: object) -> Described:
    if isinstance(value, np.ndarray):
        return Described(f"a NumPy array ({value.dtype} {value.shape})")
    return Described("tensor" if isinstance(value, torch.Tensor) else repr(value))


def _shown(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Described:
    args, kwargs = pytree.tree_map(_word, call)
    shown = f"({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"
    return Described(shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}...")


def _agree(value: object, captured: object) -> bool:
    if isinstance(captured, torch.Tensor):
        return isinstance(value, torch.Tensor)
    try:
        return value is captured or (type(value) is type(captured) and bool(value == captured))
    except (RuntimeError, TypeError, ValueError):  # it cannot be compared, or not to a truth
        return False


def layout(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device]:
    """Type, shape, strides and device."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device
