"""`Arguments`: what a placed step is called with, held against what it was captured with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from rlplace.errors import InvalidValue, UserError
from rlplace.graphs.capturing.capture import as_targets, has_numbers
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.program import Origin

MOST_SHOWN = 200
"""Characters of a call in a message."""


class Arguments:
    """The arguments of a captured step: their structure, and the values of those that are no tensors.

    Args:
        origin: what was captured.

    Attributes:
        captured: the tensors among the inputs, and the targets behind them.
    """

    def __init__(self, origin: Origin) -> None:
        self._call, self._keywords = (origin.args, origin.kwargs), tuple(origin.kwargs)
        self._leaves, self._spec = pytree.tree_flatten((origin.args, origin.kwargs))
        self._num_positional, self._num_targets = len(origin.args), len(origin.targets)
        self._target_names = origin.target_names
        self._forward = origin.model.forward
        self.captured = [*(leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)), *origin.targets]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in self._leaves]

    def call(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...]]:
        """What `tensors` was given: args, kwargs and targets with these tensors, else as captured."""
        given = iter(tensors)
        leaves = [next(given) if is_tensor else leaf for is_tensor, leaf in zip(self._is_tensor, self._leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs, tuple(given)

    def tensors(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any, *, has_targets: bool = True
    ) -> list[torch.Tensor]:
        """The tensors among the inputs, and the targets behind them, in the order of capture.

        Args:
            args: positional arguments of the model.
            kwargs: its keyword arguments, in any order.
            targets: what the loss takes besides the model's output.
            has_targets: whether targets are called for, where there were any.

        Raises:
            InvalidValue: another structure or number of them, another value of an argument that is no tensor, or a
                tensor without data.
        """
        if has_targets and "targets" in self._keywords:  # it is the model's own argument; capture takes no others then
            kwargs, targets = {**kwargs, "targets": targets}, None
        args, kwargs = _in_order((args, kwargs), self._call)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._spec:
            args, kwargs = _in_order(self._as_captured(args, kwargs), self._call)
            leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._spec:
            expected = _shown(self._call)
            more = self._num_targets and targets is None and len(args) > self._num_positional
            hint = "Labels are given by name: `step(x, targets=y)`." if more else ""
            if has_numbers((args, kwargs)) and not has_numbers(self._call):
                hint = "Lists of numbers are no tensors: pass `torch.tensor(...)` of them."
            raise InvalidValue(
                "inputs", _shown((args, kwargs)), f"{expected}, as captured", where="placed step", hint=hint
            )
        for position, (value, captured) in enumerate(zip(leaves, self._leaves, strict=True)):
            if not _agree(value, captured):
                paths, _ = pytree.tree_flatten_with_path((args, kwargs))
                name = f"inputs{pytree.keystr(paths[position][0][1:])}"
                if isinstance(value, np.ndarray):
                    hint = "Pass `torch.from_numpy(...)` of it."
                    raise InvalidValue(name, _word(value), "a tensor, as captured", where="placed step", hint=hint)
                raise InvalidValue(
                    name,
                    _word(value),
                    f"{_word(captured)!r}, as captured",
                    where="placed step",
                    hint="Only tensors change from step to step: what is none is part of the captured graph. Capture "
                    "the model again with the other value.",
                )
        found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        found += self._checked_targets(targets) if has_targets else ()
        check_data(found, "placed step")
        return found

    def _as_captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call as it was captured: by position or by name, and without defaults; as given where none is."""
        try:
            signature = inspect.signature(self._forward)
            given, captured = (signature.bind(*call[0], **call[1]).arguments for call in ((args, kwargs), self._call))
        except (TypeError, ValueError):  # it takes other arguments, or cannot tell which
            return args, kwargs
        kinds = {each.kind for each in signature.parameters.values()}
        if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            return args, kwargs
        default = {name: each.default for name, each in signature.parameters.items()}
        if not all(name in captured or _agree(value, default[name]) for name, value in given.items()):
            return args, kwargs
        if not all(name in given or _agree(value, default[name]) for name, value in captured.items()):
            return args, kwargs
        values = {name: given.get(name, value) for name, value in captured.items()}
        by_position = list(values)[: self._num_positional]
        named = {name: value for name, value in values.items() if name not in by_position}
        return tuple(values[name] for name in by_position), named

    def _checked_targets(self, targets: Any) -> tuple[torch.Tensor, ...]:
        names = self._target_names
        is_dict = isinstance(targets, Mapping)
        if self._num_targets and targets is not None and (targets.keys() != {*names} if is_dict else names):
            expected = f"a dict of {', '.join(names)}" if names else "a tensor or a tuple of tensors"
            found = _Word(f"a dict of {', '.join(map(str, targets)) or 'nothing'}" if is_dict else _kind(targets))
            hint = "" if is_dict else "Without names, two targets could be taken for each other."
            raise InvalidValue("targets", found, f"{expected}, as captured", where="placed step", hint=hint)
        given = as_targets({name: targets[name] for name in names} if is_dict and names else targets)
        if len(given) == self._num_targets:
            return given
        actual = f"{len(given)} tensors" if given else None
        if not self._num_targets:
            hint = "Capture with `capture(..., targets=...)`, and let `loss_fn(output, *targets)` take them."
            raise InvalidValue("targets", actual, "None, as captured", where="placed step", hint=hint)
        hint = "Pass the labels of this batch: `step(*inputs, targets=...)`."
        raise InvalidValue(
            "targets", actual, f"{self._num_targets} tensors, as captured", where="placed step", hint=hint
        )


def check_data(tensors: Sequence[torch.Tensor], where: str) -> None:
    """Checks that what a call is given has data, and is transformed by nothing.

    Args:
        tensors: inputs, then targets.
        where: what is called.

    Raises:
        InvalidValue: one is on `meta`.
        UserError: the call is in a transform of `torch.func`, or one carries a tangent of forward-mode AD.
    """
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if is_transformed or any(map(_has_tangent, tensors if forward_ad._current_level >= 0 else ())):
        raise UserError(
            f"a {where} runs what was captured, which `torch.func` (`jvp`, `vmap`, `grad`) and forward-mode AD cannot "
            "transform: call the model itself there"
        )
    for position, tensor in enumerate(tensors):
        if tensor.is_meta:
            field = f"device of tensor {position} of the call"
            raise InvalidValue(field, _Word("meta"), "one whose tensors have data", where=where)


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


class InputCutter:
    """Gives every source op of inputs and targets its part of them: all, or what its micro-batch works on.

    Args:
        graph: with its program.

    Attributes:
        positions: of each source op, which of the tensors it is of.
    """

    def __init__(self, graph: OpGraph) -> None:
        program = require_program(graph)
        given = pytree.tree_leaves((program.origin.args, program.origin.kwargs))
        inputs = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
        self._whole = [*inputs, *program.origin.targets]
        self._sources = [
            (op, source, int(source.key) + (len(inputs) if source.kind == "target" else 0))
            for op, source in sorted(program.sources.items())
            if source.kind in ("input", "target")
        ]
        self.positions = {op: position for op, _, position in self._sources}

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
    """`value` with its dicts in the order of `captured`, as far as they have the same keys: order says nothing."""
    if type(value) is not type(captured):
        return value
    if type(value) is dict:
        known = {key: _in_order(value[key], twin) for key, twin in captured.items() if key in value}
        return known | {key: item for key, item in value.items() if key not in known}
    if type(value) in (tuple, list) and len(value) == len(captured):
        return type(value)(_in_order(item, twin) for item, twin in zip(value, captured, strict=True))
    return value


class _Word:
    """Text that a message shows without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _word(value: object) -> _Word:
    if isinstance(value, np.ndarray):
        return _Word(f"a NumPy array ({value.dtype} {value.shape})")
    return _Word("tensor" if isinstance(value, torch.Tensor) else repr(value))


def _kind(value: object) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _shown(call: tuple[tuple[Any, ...], dict[str, Any]]) -> _Word:
    args, kwargs = pytree.tree_map(_word, call)
    shown = f"({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"
    return _Word(shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}...")


def _agree(value: object, captured: object) -> bool:
    if isinstance(captured, torch.Tensor):
        return isinstance(value, torch.Tensor)
    if value is captured:
        return True
    try:
        return type(value) is type(captured) and bool(value == captured)
    except (RuntimeError, TypeError, ValueError):  # it cannot be compared, or not to a truth
        return False
